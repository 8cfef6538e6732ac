//! Round-to-nearest quantization to integers in groups, in the arithmetic of compressed-tensors: f32 with
//! every operation rounded, a division by the scale (not a multiplication by its reciprocal), clamp, then
//! nearest-even.
//!
//! One call covers one row: groups of `group` elements, the last may be shorter.

use super::reduce::{amax, greater, lesser, min_max};
use super::{clamp, round_even_i32};
use crate::simd::Simd;
use std::fmt;

/// Smallest scale, used in place of zero (a group of zeros, or one so small that the quotient underflows).
const ZERO_SCALE: f32 = f32::EPSILON;

/// A group without a scale, because an element is NaN or infinite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NonFinite {
    /// The first such element of the row.
    pub index: usize,
}

impl fmt::Display for NonFinite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "element {} is NaN or infinite", self.index)
    }
}

impl std::error::Error for NonFinite {}

#[inline(always)]
pub(crate) fn quant_int_sym<S: Simd>(
    simd: S,
    x: &[f32],
    group: usize,
    qmin: i8,
    qmax: i8,
    scale_div: f32,
    scales: &mut [f32],
    codes: &mut [i8],
) -> Result<(), NonFinite> {
    check("quant_int_sym", x, group, scales.len(), codes);
    assert!(qmin < 0 && qmin < qmax && scale_div > 0.0, "quant_int_sym: [{qmin}, {qmax}] over {scale_div}");
    let largest = largest_scale(f32::from(qmin).abs().max(f32::from(qmax)));
    let groups = x.chunks(group).zip(codes.chunks_mut(group)).zip(scales);
    for (g, ((x, codes), scale)) in groups.enumerate() {
        let max = amax(simd, x);
        if !max.is_finite() {
            return Err(first_non_finite(x, g * group));
        }
        *scale = nonzero(max / scale_div).min(largest);
        codes_sym(x, qmin, qmax, *scale, codes);
    }
    Ok(())
}

#[inline(always)]
pub(crate) fn int_codes_sym(x: &[f32], group: usize, qmin: i8, qmax: i8, scales: &[f32], codes: &mut [i8]) {
    check("int_codes_sym", x, group, scales.len(), codes);
    for ((x, codes), &scale) in x.chunks(group).zip(codes.chunks_mut(group)).zip(scales) {
        codes_sym(x, qmin, qmax, scale, codes);
    }
}

#[inline(always)]
pub(crate) fn quant_int_asym<S: Simd>(
    simd: S,
    x: &[f32],
    group: usize,
    bits: u32,
    scales: &mut [f32],
    zeros: &mut [i8],
    codes: &mut [i8],
) -> Result<(), NonFinite> {
    check("quant_int_asym", x, group, scales.len(), codes);
    assert!((1..=8).contains(&bits), "quant_int_asym: {bits} bits");
    assert_eq!(zeros.len(), scales.len(), "quant_int_asym: zeros and scales differ in length");
    let qmin = -((1_i32 << (bits - 1)) as f32);
    let steps = ((1_i32 << bits) - 1) as f32;
    let qmax = qmin + steps;
    let groups = x.chunks(group).zip(codes.chunks_mut(group));
    for (g, ((x, codes), (scale, stored_zero))) in groups.zip(scales.iter_mut().zip(zeros)).enumerate() {
        let (low, high) = min_max(simd, x);
        if !(low.is_finite() && high.is_finite()) {
            return Err(first_non_finite(x, g * group));
        }
        let (low, high) = (lesser(0.0, low), greater(0.0, high));
        // Copy the values: the compiler cannot rule out that the codes written below alias them.
        let step = asym_scale(low, high, steps);
        // For a group of zeros compressed-tensors computes 0/0 and casts the NaN to 0.
        let zero = if low == high { 0.0 } else { clamp(qmin - low / step, qmin, qmax) };
        let zero_point = round_even_i32(zero);
        let offset = zero_point as f32;
        for (code, &x) in codes.iter_mut().zip(x) {
            *code = round_even_i32(clamp(x / step + offset, qmin, qmax)) as i8;
        }
        (*scale, *stored_zero) = (step, zero_point as i8);
    }
    Ok(())
}

#[inline(always)]
fn codes_sym(x: &[f32], qmin: i8, qmax: i8, scale: f32, codes: &mut [i8]) {
    let (low, high) = (f32::from(qmin), f32::from(qmax));
    for (code, &x) in codes.iter_mut().zip(x) {
        *code = round_even_i32(clamp(x / scale, low, high)) as i8;
    }
}

/// The scale of a range that includes 0.
#[inline(always)]
fn asym_scale(low: f32, high: f32, steps: f32) -> f32 {
    let scale = (high - low) / steps;
    if scale < largest_scale(steps) { nonzero(scale) } else { huge_asym_scale(low, high, steps) }
}

/// [`asym_scale`] for ranges within a code of f32's limit: `high - low` may overflow where the two quotients do not,
/// and no code may decode to infinity. `|code - zero|` is at most `steps` for a one-sided range, and half of it,
/// rounded up, for a balanced one.
#[cold]
fn huge_asym_scale(low: f32, high: f32, steps: f32) -> f32 {
    let spread = (high - low) / steps;
    let scale = if spread.is_finite() { spread } else { high / steps - low / steps };
    let reach = (high.max(-low) / scale).ceil().clamp(1.0, steps);
    scale.min(largest_scale((reach + 1.0).min(steps)))
}

/// Largest scale at which a code of magnitude `reach` still decodes to a finite f32.
#[inline(always)]
fn largest_scale(reach: f32) -> f32 {
    (f32::MAX / reach).next_down()
}

#[inline(always)]
fn nonzero(scale: f32) -> f32 {
    if scale == 0.0 { ZERO_SCALE } else { scale }
}

#[cold]
fn first_non_finite(x: &[f32], start: usize) -> NonFinite {
    NonFinite { index: start + x.iter().position(|v| !v.is_finite()).unwrap_or(0) }
}

#[inline(always)]
fn check(kernel: &str, x: &[f32], group: usize, scales: usize, codes: &[i8]) {
    assert!(group > 0, "{kernel}: group size 0");
    assert_eq!(x.len(), codes.len(), "{kernel}: x and codes differ in length");
    let groups = x.len().div_ceil(group);
    assert_eq!(scales, groups, "{kernel}: {scales} scales for {groups} groups");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::Portable;
    use proptest::prelude::*;

    /// The rule, element by element, with the library's rounding.
    fn naive_sym(x: &[f32], group: usize, bits: u32, scale_div: f32) -> (Vec<f32>, Vec<i8>) {
        let (qmin, qmax) = (-(2.0_f32.powi(bits as i32 - 1)), 2.0_f32.powi(bits as i32 - 1) - 1.0);
        let mut scales = Vec::new();
        let mut codes = Vec::new();
        for x in x.chunks(group) {
            let scale = x.iter().fold(0.0_f32, |m, v| m.max(v.abs())) / scale_div;
            let scale = scale.min((f32::MAX / -qmin).next_down());
            let scale = if scale == 0.0 { 1.192_092_9e-7 } else { scale };
            scales.push(scale);
            codes.extend(x.iter().map(|x| (x / scale).clamp(qmin, qmax).round_ties_even() as i8));
        }
        (scales, codes)
    }

    /// For ranges far from f32's limit.
    fn naive_asym(x: &[f32], group: usize, bits: u32) -> (Vec<f32>, Vec<i8>, Vec<i8>) {
        let (qmin, qmax) = (-(2.0_f32.powi(bits as i32 - 1)), 2.0_f32.powi(bits as i32 - 1) - 1.0);
        let mut out = (Vec::new(), Vec::new(), Vec::new());
        for x in x.chunks(group) {
            let low = x.iter().fold(0.0_f32, |m, v| m.min(*v));
            let high = x.iter().fold(0.0_f32, |m, v| m.max(*v));
            let scale = (high - low) / (2.0_f32.powi(bits as i32) - 1.0);
            let scale = if scale == 0.0 { 1.192_092_9e-7 } else { scale };
            let zero = (qmin - low / scale).clamp(qmin, qmax).round_ties_even();
            let zero = if low == 0.0 && high == 0.0 { 0.0 } else { zero };
            out.0.push(scale);
            out.1.push(zero as i8);
            out.2.extend(x.iter().map(|x| (x / scale + zero).clamp(qmin, qmax).round_ties_even() as i8));
        }
        out
    }

    proptest! {
        #[test]
        fn agrees_with_the_rule(
            x in prop::collection::vec(prop::num::f32::NORMAL | prop::num::f32::SUBNORMAL | prop::num::f32::ZERO, 0..200),
            scale in -20_i32..20,
            group in 1_usize..80,
            bits in 2_u32..=8,
        ) {
            // Full-range values make groups of one outlier; the remainder exercises ordinary groups.
            let tame: Vec<f32> = x.iter().map(|v| (v.to_bits() >> 8) as f32 * 2.0_f32.powi(scale - 24)).collect();
            for x in [x, tame] {
                let groups = x.len().div_ceil(group);
                let (mut scales, mut zeros, mut codes) = (vec![0.0; groups], vec![0; groups], vec![0; x.len()]);
                let qmin = (-(1_i32 << (bits - 1))) as i8;
                let qmax = ((1_i32 << (bits - 1)) - 1) as i8;
                for scale_div in [((1_i32 << bits) - 1) as f32 / 2.0, f32::from(qmax)] {
                    let result = quant_int_sym(Portable, &x, group, qmin, qmax, scale_div, &mut scales, &mut codes);
                    prop_assert_eq!(result, Ok(()));
                    let expected = naive_sym(&x, group, bits, scale_div);
                    prop_assert_eq!((&scales, &codes), (&expected.0, &expected.1));
                    let mut again = vec![0; x.len()];
                    int_codes_sym(&x, group, qmin, qmax, &scales, &mut again);
                    prop_assert_eq!(&again, &codes);
                }
                let result = quant_int_asym(Portable, &x, group, bits, &mut scales, &mut zeros, &mut codes);
                prop_assert_eq!(result, Ok(()));
                if x.iter().all(|v| v.abs() < 1e36) {
                    let expected = naive_asym(&x, group, bits);
                    prop_assert_eq!((&scales, &zeros, &codes), (&expected.0, &expected.1, &expected.2));
                }
                // For any range, every code decodes to a finite value.
                for (i, &code) in codes.iter().enumerate() {
                    let (scale, zero) = (scales[i / group], zeros[i / group]);
                    prop_assert!(((f32::from(code) - f32::from(zero)) * scale).is_finite());
                }
            }
        }
    }

    #[test]
    fn a_negative_extreme_is_a_tie_that_rounds_to_even() {
        // -amax / (amax / 7.5) = -7.5 -> -8; +amax -> 7.5 clamped to 7.
        let mut scales = [0.0; 2];
        let mut codes = [0; 4];
        quant_int_sym(Portable, &[-3.0, 1.0, 3.0, -1.0], 2, -8, 7, 7.5, &mut scales, &mut codes)
            .unwrap_or_default();
        assert_eq!((codes, scales), ([-8, 2, 7, -2], [0.4; 2]));
    }

    #[test]
    fn zeros_get_the_epsilon_scale() {
        let (mut scales, mut zeros, mut codes) = ([0.0; 1], [9; 1], [1; 3]);
        quant_int_sym(Portable, &[0.0, -0.0, 0.0], 8, -8, 7, 7.5, &mut scales, &mut codes)
            .unwrap_or_default();
        assert_eq!((scales[0], codes), (f32::EPSILON, [0; 3]));
        quant_int_asym(Portable, &[0.0, -0.0, 0.0], 8, 4, &mut scales, &mut zeros, &mut codes)
            .unwrap_or_default();
        assert_eq!((scales[0], zeros[0], codes), (f32::EPSILON, 0, [0; 3]));
    }

    #[test]
    fn non_finite_values_are_located() {
        let mut x = [1.0; 10];
        x[7] = f32::NAN;
        let (mut scales, mut zeros, mut codes) = ([0.0; 3], [0; 3], [0; 10]);
        let sym = quant_int_sym(Portable, &x, 4, -8, 7, 7.5, &mut scales, &mut codes);
        assert_eq!(sym, Err(NonFinite { index: 7 }));
        x[7] = f32::NEG_INFINITY;
        let asym = quant_int_asym(Portable, &x, 4, 4, &mut scales, &mut zeros, &mut codes);
        assert_eq!(asym, Err(NonFinite { index: 7 }));
        (x[7], x[6]) = (f32::MAX, f32::MIN);
        let widest = quant_int_asym(Portable, &x, 4, 4, &mut scales, &mut zeros, &mut codes);
        assert_eq!(widest, Ok(()));
        assert!((f32::from(codes[7]) - f32::from(zeros[1])) * scales[1] > 2.0e38);
    }
}

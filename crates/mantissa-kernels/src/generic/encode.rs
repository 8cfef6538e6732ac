//! Codes of elements whose block has its step already: divides by the step, rounds to nearest even, stores one byte.
//! The steps come from the reference rules; these loops only apply them, with each operation rounded by itself
//! (division stays division).
//!
//! One call covers one line: groups of `group` elements, the last may be shorter.

use super::{clamp, round_even_i32};

/// Step that maps an element to its code's grid.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Step {
    /// `x / scale`.
    Divide(f32),
    /// `x * inverse`.
    Multiply(f32),
}

/// A sign-exponent-mantissa code of at most 8 bits, low-aligned in a byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MinifloatLayout {
    /// Width of the mantissa field, 1 to 6.
    pub mantissa_bits: u32,
    /// Exponent bias, 1 to 64.
    pub bias: u32,
    /// Bit of the sign: 3 to 7.
    pub sign_bit: u32,
    /// Code of the largest finite value, to which everything beyond it saturates.
    pub max_code: u8,
    /// True if a negative zero keeps its sign (in the `fnuz` formats its code is NaN).
    pub signed_zero: bool,
}

/// Grid of integer codes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct IntGrid {
    /// Smallest code.
    pub low: i8,
    /// Largest code.
    pub high: i8,
    /// True if the zero point is added after rounding (torchao) instead of before (compressed-tensors).
    pub zero_after_rounding: bool,
}

/// Elements per step of the loops: a whole group of NVFP4, one register of AVX-512.
const CHUNK: usize = 16;

#[inline(always)]
pub(crate) fn minifloat_codes(
    x: &[f32],
    group: usize,
    steps: &[Step],
    layout: &MinifloatLayout,
    codes: &mut [u8],
) {
    let MinifloatLayout { mantissa_bits, bias, sign_bit, max_code, signed_zero } = *layout;
    assert!(
        (1..=6).contains(&mantissa_bits) && (1..=64).contains(&bias) && (3..=7).contains(&sign_bit),
        "minifloat_codes: {layout:?}"
    );
    assert!(u32::from(max_code) < 1 << sign_bit, "minifloat_codes: {layout:?}");
    let drop = 23 - mantissa_bits;
    let rebias = (127 - bias) << 23;
    let min_normal = rebias + (1 << 23);
    // Below half of this power of two an f32 step is the subnormal step 2^(1-bias-m), so adding it rounds.
    let magic = f32::from_bits((127 + 1 + 23 - bias - mantissa_bits) << 23);
    let half = (1 << (drop - 1)) - 1;
    let zero_sign = u32::from(signed_zero);
    encode("minifloat_codes", x, group, steps, codes, |x, scaled| {
        let magnitude = scaled.to_bits() & 0x7fff_ffff;
        let odd = magnitude.wrapping_shr(drop) & 1;
        let normal = magnitude.wrapping_sub(rebias).wrapping_add(half).wrapping_add(odd).wrapping_shr(drop);
        let subnormal = (f32::from_bits(magnitude) + magic).to_bits().wrapping_sub(magic.to_bits());
        let code = if magnitude < min_normal { subnormal } else { normal };
        // As bits, infinities and NaN are the largest magnitudes.
        let code = code.min(u32::from(max_code));
        let keeps_sign = u32::from(code != 0) | zero_sign;
        // Use the sign of x, not of a NaN computed by the step, whose sign is unspecified.
        (code | ((x.to_bits() >> 31) & keeps_sign).wrapping_shl(sign_bit)) as u8
    });
}

#[inline(always)]
pub(crate) fn book_codes(
    x: &[f32],
    group: usize,
    steps: &[Step],
    midpoints: &[f32; 15],
    order: &[u8; 16],
    codes: &mut [u8],
) {
    encode("book_codes", x, group, steps, codes, |_, scaled| {
        let v = clamp(scaled, -1.0, 1.0);
        let mut below = 0_u32;
        for &midpoint in midpoints {
            below = below.wrapping_add(u32::from(midpoint < v));
        }
        below as u8
    });
    if (0..16).any(|i| order[usize::from(i)] != i) {
        codes.iter_mut().for_each(|code| *code = order[usize::from(*code & 15)]);
    }
}

#[inline(always)]
pub(crate) fn int_codes(
    x: &[f32],
    group: usize,
    steps: &[Step],
    zeros: &[f32],
    grid: IntGrid,
    codes: &mut [u8],
) {
    assert_eq!(zeros.len(), steps.len(), "int_codes: zeros and steps differ in length");
    assert!(grid.low <= grid.high, "int_codes: {grid:?}");
    check("int_codes", x, group, steps, codes);
    let (low, high) = (f32::from(grid.low), f32::from(grid.high));
    let groups = x.chunks(group).zip(codes.chunks_mut(group));
    for ((x, codes), (&step, &zero)) in groups.zip(steps.iter().zip(zeros)) {
        if grid.zero_after_rounding {
            encode_group(x, step, codes, |_, scaled| {
                // No code exceeds 2^8, so this limit, which rounding needs, changes nothing.
                let rounded = round_even_i32(clamp(scaled, -4e6, 4e6)) as f32;
                round_even_i32(clamp(rounded + zero, low, high)) as i8 as u8
            });
        } else {
            encode_group(x, step, codes, |_, scaled| {
                round_even_i32(clamp(scaled + zero, low, high)) as i8 as u8
            });
        }
    }
}

#[inline(always)]
fn encode(
    kernel: &str,
    x: &[f32],
    group: usize,
    steps: &[Step],
    codes: &mut [u8],
    code: impl Fn(f32, f32) -> u8,
) {
    check(kernel, x, group, steps, codes);
    for ((x, codes), &step) in x.chunks(group).zip(codes.chunks_mut(group)).zip(steps) {
        encode_group(x, step, codes, &code);
    }
}

/// `codes[i] = code(x[i], x[i] by step)`.
#[inline(always)]
fn encode_group(x: &[f32], step: Step, codes: &mut [u8], code: impl Fn(f32, f32) -> u8) {
    match step {
        Step::Divide(scale) => each(x, codes, |x| code(x, x / scale)),
        Step::Multiply(inverse) => each(x, codes, |x| code(x, x * inverse)),
    }
}

/// A fixed number of elements at a time: groups are too short to amortize the prologue of a loop of variable length.
#[inline(always)]
fn each(x: &[f32], codes: &mut [u8], code: impl Fn(f32) -> u8) {
    let (x_chunks, x_tail) = x.as_chunks::<CHUNK>();
    let (code_chunks, code_tail) = codes.as_chunks_mut::<CHUNK>();
    for (codes, x) in code_chunks.iter_mut().zip(x_chunks) {
        for i in 0..CHUNK {
            codes[i] = code(x[i]);
        }
    }
    for (codes, &x) in code_tail.iter_mut().zip(x_tail) {
        *codes = code(x);
    }
}

#[inline(always)]
fn check(kernel: &str, x: &[f32], group: usize, steps: &[Step], codes: &[u8]) {
    assert!(group > 0, "{kernel}: group size 0");
    assert_eq!(x.len(), codes.len(), "{kernel}: x and codes differ in length");
    let groups = x.len().div_ceil(group);
    assert_eq!(steps.len(), groups, "{kernel}: {} steps for {groups} groups", steps.len());
}

#[cfg(test)]
mod tests {
    use super::*;

    const E2M1: MinifloatLayout =
        MinifloatLayout { mantissa_bits: 1, bias: 1, sign_bit: 3, max_code: 7, signed_zero: true };

    #[test]
    fn fp4_ties_subnormals_and_saturation() {
        // 0, 0.5, 1, 1.5, 2, 3, 4, 6: a value half-way takes the even code.
        let x = [0.25, 0.26, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.1, 1e9, -0.25, -0.0, -5.1, f32::NEG_INFINITY];
        let mut codes = [0; 14];
        minifloat_codes(&x, 14, &[Step::Divide(1.0)], &E2M1, &mut codes);
        assert_eq!(codes, [0, 1, 2, 2, 4, 4, 6, 6, 7, 7, 8, 8, 15, 15]);
    }

    #[test]
    fn integers_take_their_zero_before_or_after_rounding() {
        let mut codes = [0; 3];
        for (zero_after_rounding, expected) in [(false, [2, 3, -8_i8]), (true, [1, 3, -8])] {
            let grid = IntGrid { low: -8, high: 7, zero_after_rounding };
            // 0.5 + 1.0 is a tie that goes to 2, while 0.5 alone goes to 0.
            int_codes(&[0.5, 2.2, -100.0], 8, &[Step::Multiply(1.0)], &[1.0], grid, &mut codes);
            assert_eq!(codes.map(|c| c as i8), expected);
        }
    }

    #[test]
    #[should_panic(expected = "minifloat_codes: 1 steps for 2 groups")]
    fn missing_steps_are_refused() {
        minifloat_codes(&[0.0; 20], 16, &[Step::Divide(1.0)], &E2M1, &mut [0; 20]);
    }
}

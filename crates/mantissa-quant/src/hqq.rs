//! HQQ, half-quadratic quantization (Badri & Shaji 2023, "Half-Quadratic Quantization of Large Machine Learning Models",
//! mobiusml.github.io/hqq_blog; `optimize_weights_proximal_legacy` of the published code): no calibration, only the weight.
//!
//! Each group of neighbouring columns keeps the scale of its range and finds the zero point under which few weights are far
//! off: `min_z ‖W - s (q - z)‖_p^p` with `p < 1`, which forgives single outliers where a squared error would follow them. An
//! error `E` stands between weight and codes, and both halves have closed forms:
//!
//! ```text
//! q = clamp(round(W / s + z), 0, 2^b - 1)
//! E = shrink(W - s (q - z)),   shrink(x) = sign(x) max(0, |x| - |x|^(p - 1) / β)
//! z = mean over the group of  q - (W - E) / s
//! ```
//!
//! until the mean of `|W - s (q - z)|` over the weight no longer falls. `z` is no integer: with `s` it is stored as the value
//! of the lowest code ([`Offset::Bias`]). Where the format has integer zero points ([`Offset::Zero`]), it is rounded at the end.

use mantissa_kernels::{for_each, kernels, map_reduce_fixed};
use mantissa_num::format::{Affine, Offset};
use mantissa_num::{Blocks, Code, Codes, Format, Quantized, Rule, Scheme};

use crate::clip::rows_at_once;

/// How [`hqq`] works.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HqqOptions {
    /// Most steps.
    pub iterations: usize,
    /// The `p` of the norm, below 1.
    pub norm: f32,
    /// β, the weight of the constraint.
    pub beta: f32,
}

impl Default for HqqOptions {
    /// Those of the published code.
    fn default() -> Self {
        HqqOptions { iterations: 20, norm: 0.7, beta: 10.0 }
    }
}

/// The grids of a weight's groups.
#[derive(Clone, Debug, PartialEq)]
pub struct HqqGrids {
    /// `1 / s` of each group, in the order of the weight.
    pub inverse: Vec<f32>,
    /// `z` of each group, in units of the codes 0 to `2^b - 1`.
    pub zero: Vec<f32>,
    /// Mean of `|W - s (q - z)|` before each step; the first is that of rounding to nearest.
    pub errors: Vec<f64>,
}

/// The largest `1 / s`: of a group whose values are all but equal.
const MAX_INVERSE: f32 = 2e4;

/// Finds the grids of `w`, whose groups of `group` values follow one another, for codes of `bits` bits. Does not depend on
/// `threads`.
pub fn hqq(w: &[f32], group: usize, bits: u32, options: HqqOptions, threads: usize) -> HqqGrids {
    let top = ((1u32 << bits) - 1) as f32;
    let group = group.max(1);
    let range = |x: &[f32]| {
        x.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(low, high), v| (low.min(*v), high.max(*v)))
    };
    let mut grids: Vec<(f32, f32)> = w
        .chunks(group)
        .map(range)
        .map(|(low, high)| {
            let inverse = (top / (high - low)).min(MAX_INVERSE);
            (inverse, -low * inverse)
        })
        .collect();
    let mut errors = Vec::new();
    let mut best = f64::INFINITY;
    for _ in 0..options.iterations {
        let error = step(w, group, top, options, &mut grids, threads) / w.len().max(1) as f64;
        errors.push(error);
        if error >= best {
            break;
        }
        best = error;
    }
    let (inverse, zero) = grids.into_iter().unzip();
    HqqGrids { inverse, zero, errors }
}

/// One step of all groups; the sum of `|W - s (q - z)|` before it.
fn step(
    w: &[f32],
    group: usize,
    top: f32,
    options: HqqOptions,
    grids: &mut [(f32, f32)],
    threads: usize,
) -> f64 {
    let groups = rows_at_once(group);
    let mut sums = vec![0.0; grids.len().div_ceil(groups)];
    let work = w.chunks(groups * group).zip(grids.chunks_mut(groups)).zip(&mut sums);
    for_each(threads, work, |((w, grids), sum)| {
        let (mut codes, mut errors, mut shrunk) = (vec![0f32; group], vec![0f32; group], vec![0f32; group]);
        for (x, (inverse, zero)) in w.chunks(group).zip(grids) {
            let (codes, errors) = (&mut codes[..x.len()], &mut errors[..x.len()]);
            for ((q, error), &v) in codes.iter_mut().zip(&mut *errors).zip(x) {
                *q = (v * *inverse + *zero).round_ties_even().clamp(0.0, top);
                *error = v - (*q - *zero) / *inverse;
            }
            *sum += errors.iter().map(|error| f64::from(error.abs())).sum::<f64>();
            let shrunk = &mut shrunk[..x.len()];
            shrink(errors, options, shrunk);
            let offsets =
                codes.iter().zip(x).zip(&*shrunk).map(|((q, v), e)| f64::from(q - (v - e) * *inverse));
            let offset: f64 = offsets.sum();
            *zero = (offset / x.len() as f64) as f32;
        }
    });
    sums.iter().sum()
}

/// The proximal operator of the norm for each of `errors` (Badri & Shaji 2023, equation 4).
fn shrink(errors: &[f32], HqqOptions { norm, beta, .. }: HqqOptions, shrunk: &mut [f32]) {
    shrunk.iter_mut().zip(errors).for_each(|(cut, error)| *cut = error.abs());
    kernels().pow_inplace(shrunk, norm - 1.0);
    for (cut, error) in shrunk.iter_mut().zip(errors) {
        *cut = (error.abs() - *cut / beta).max(0.0).copysign(*error);
    }
}

/// The scheme that HQQ makes of one that says no offset: its own, with a float zero point.
pub fn with_float_zero(scheme: Scheme) -> Scheme {
    match &scheme.format {
        Format::Affine(Affine { code: Code::Int(bits), blocks, offset: Offset::None, .. }) => {
            Scheme { source: scheme.source, row: scheme.row, ..Scheme::int_biased(*bits, *blocks) }
        }
        _ => scheme,
    }
}

/// Whether [`quantize`] takes `scheme` on a weight of `cols` columns; if not, what it takes.
///
/// # Errors
/// What it takes.
pub fn check_scheme(scheme: &Scheme, cols: usize) -> Result<(), &'static str> {
    group_of(scheme, cols)
        .map(|_| ())
        .ok_or("integers with an offset in whole groups of a row or in channels, such as int4-g64")
}

/// Bits of a code and columns of a group.
fn group_of(scheme: &Scheme, cols: usize) -> Option<(u32, usize)> {
    let Format::Affine(Affine { code: Code::Int(bits), blocks, scale: Some(tree), offset }) = &scheme.format
    else {
        return None;
    };
    let group = match blocks {
        Blocks::Row => cols,
        Blocks::Group(group) => *group as usize,
        _ => return None,
    };
    let plain = *offset != Offset::None && scheme.encoder.rule != Rule::Torchao && tree.outer.is_none();
    (plain && group > 0 && cols.is_multiple_of(group)).then_some((*bits, group))
}

/// Quantizes `w` (`[rows, cols]`, finite) by `scheme`, with the mean magnitudes of the error of rounding to nearest and its
/// own. `None` of schemes that [`check_scheme`] refuses.
pub fn quantize(
    scheme: &Scheme,
    w: &[f32],
    cols: usize,
    options: HqqOptions,
    threads: usize,
) -> Option<(Quantized, [f64; 2])> {
    let (bits, group) = group_of(scheme, cols)?;
    let grids = hqq(w, group, bits, options, threads);
    let biased = scheme.format.has_bias();
    let empty = Quantized::empty(scheme.format.clone(), w.len() / cols.max(1), cols);
    let unit = scheme.format.scale().map_or(4, |scale| scale.code.unit_bytes());
    let mut q =
        Quantized { codes: Codes::U8(vec![0; w.len()]), scales: Codes::with_capacity(unit, 0), ..empty };
    let (top, half) = (((1u32 << bits) - 1) as f32, 1i32 << (bits - 1));
    let code = scheme.format.scale()?.code;
    let mut steps = Vec::with_capacity(grids.zero.len());
    for (inverse, zero) in grids.inverse.iter().zip(&grids.zero) {
        let stored = scheme.format.nearest_scale(1.0 / inverse, None)?;
        let step = code.decode(stored);
        q.scales.push(stored);
        // What the codes see, and what is stored of it.
        let zero = if biased { *zero } else { zero.round_ties_even().clamp(0.0, top) };
        if biased {
            q.biases.push(-zero * step);
        } else {
            q.zeros.push(zero as i32 - half);
        }
        steps.push((step, zero));
    }
    if let Codes::U8(codes) = &mut q.codes {
        let groups = rows_at_once(group);
        let work = w.chunks(groups * group).zip(codes.chunks_mut(groups * group)).zip(steps.chunks(groups));
        for_each(threads, work, |((w, codes), steps)| {
            let each = w.chunks(group).zip(codes.chunks_mut(group)).zip(steps);
            for ((w, codes), (step, zero)) in each {
                for (v, code) in w.iter().zip(codes) {
                    let q = (v / step + zero).round_ties_even().clamp(0.0, top);
                    *code = (q as i32 - half) as i8 as u8;
                }
            }
        });
    }
    let error = mean_error(w, &q, threads);
    Some((q, [grids.errors.first().copied().unwrap_or(error), error]))
}

/// Mean magnitude of `w - q`.
fn mean_error(w: &[f32], q: &Quantized, threads: usize) -> f64 {
    let sum = map_reduce_fixed(
        threads,
        q.rows,
        rows_at_once(q.cols),
        |rows| {
            let mut values = vec![0.0; rows.len() * q.cols];
            q.dequantize_rows(rows.clone(), &mut values);
            let w = &w[rows.start * q.cols..rows.end * q.cols];
            w.iter().zip(&values).map(|(w, v)| f64::from((w - v).abs())).sum::<f64>()
        },
        0.0,
        |sum, part: f64| sum + part,
    );
    sum / w.len().max(1) as f64
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn weights(n: usize) -> Vec<f32> {
        (0..n).map(|i| ((i * i % 991) as f32 * 0.61).sin().powi(3) * 0.1).collect()
    }

    #[test]
    fn errors_fall_and_threads_change_nothing() {
        let w = weights(64 * 256);
        for text in ["int4-g64", "int3-g64-asym", "int2-channel", "int8-g32"] {
            let scheme = with_float_zero(text.parse().unwrap());
            let one = quantize(&scheme, &w, 256, HqqOptions::default(), 1).unwrap();
            assert_eq!(one, quantize(&scheme, &w, 256, HqqOptions::default(), 3).unwrap(), "{text}");
            assert_eq!(one.0.format, scheme.format);
            one.0.check().unwrap();
            let grids = hqq(&w, 64, 3, HqqOptions::default(), 2);
            let falling = grids.errors[..grids.errors.len() - 1].windows(2).all(|pair| pair[1] < pair[0]);
            assert!(falling && grids.errors.len() > 2, "{:?}", grids.errors);
        }
    }

    #[test]
    fn flat_and_zero_groups_are_exact() {
        let mut w = vec![0.0; 128];
        w[64..].fill(0.25);
        for text in ["int4-g64", "int4-g64-asym"] {
            let scheme = with_float_zero(text.parse().unwrap());
            let (q, _) = quantize(&scheme, &w, 128, HqqOptions::default(), 1).unwrap();
            let values = q.dequantize().unwrap();
            let close = values.iter().zip(&w).all(|(v, w)| (v - w).abs() < 1e-3);
            assert!(close || !q.format.has_bias(), "{text}: {values:?}");
            assert!(values.iter().all(|v| v.is_finite()), "{text}");
        }
    }

    #[test]
    fn what_has_no_offset_gets_one_and_the_rest_is_refused() {
        let scheme = with_float_zero("int4-g64".parse().unwrap());
        assert_eq!(scheme.to_string(), "int4-g64-asym:minmax");
        assert!(check_scheme(&scheme, 256).is_ok() && check_scheme(&scheme, 96).is_err());
        for text in ["nf4", "fp8-e4m3-channel", "int4-t4x4-asym", "int4-g64-asym:torchao"] {
            let scheme = with_float_zero(text.parse().unwrap());
            assert!(check_scheme(&scheme, 256).is_err(), "{text}");
        }
    }
}

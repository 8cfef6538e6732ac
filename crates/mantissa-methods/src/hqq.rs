//! HQQ, half-quadratic quantization (Badri & Shaji 2023, "Half-Quadratic Quantization of Large Machine Learning
//! Models", mobiusml.github.io/hqq_blog; `optimize_weights_proximal_legacy` of the published code). Needs no
//! calibration.
//!
//! Each group of adjacent columns keeps the scale of its range and searches the zero point by `min_z ‖W - s (q -
//! z)‖_p^p` with `p < 1`. This norm tolerates single outliers, which would dominate a squared error. An auxiliary
//! error `E` separates weight and codes, and both half-problems have closed forms:
//!
//! ```text
//! q = clamp(round(W / s + z), 0, 2^b - 1)
//! E = shrink(W - s (q - z)),   shrink(x) = sign(x) max(0, |x| - |x|^(p - 1) / β)
//! z = mean over the group of  q - (W - E) / s
//! ```
//!
//! Groups may also be adjacent rows of a column (tiles `tGx1`), the published code's `axis = 0`. The last group of a
//! row or column may be short.
//!
//! The iteration ends when the mean of `|W - s (q - z)|` over the weight no longer falls. `z` is not an integer: it
//! is stored with `s` as the value of the lowest code ([`Offset::Bias`]). For formats with integer zero points
//! ([`Offset::Zero`]) it is rounded at the end.
//!
//! Beyond the paper, this implementation also searches the scales ([`HqqOptions::scales`]), because the scale of the
//! whole range rarely has the least error.

mod refine;

use mantissa_kernels::{for_each, kernels, map_reduce_fixed};
use mantissa_num::format::{Affine, Offset};
use mantissa_num::{Blocks, Code, Codes, Format, Quantized, Rule, Scheme};

use crate::clip::{pieces, rows_at_once};
use crate::error::MethodError;
use crate::error_stats::ErrorStats;
use crate::method::{
    Arithmetic, Buffer, Extent, Feature, Method, Phase, SolveWeight, WeightTask, Work, refused_by_most,
};
use crate::rtn;
use crate::solved::Solved;
use refine::{Grid, Grids, SHARES, Turn, nearest};

/// Options of [`hqq`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HqqOptions {
    /// Most steps.
    pub iterations: usize,
    /// The `p` of the norm, below 1.
    pub norm: f32,
    /// β, the weight of the constraint.
    pub beta: f32,
    /// True if scales are searched too and zero points refined with them, starting from the published result.
    pub scales: bool,
}

impl Default for HqqOptions {
    /// Constants of the published code, with the scale search on.
    fn default() -> Self {
        HqqOptions { iterations: 20, norm: 0.7, beta: 10.0, scales: true }
    }
}

/// Scales and zero points of a weight's groups.
#[derive(Clone, Debug, PartialEq)]
pub struct HqqGrids {
    /// `1 / s` of each group, in the order of the weight.
    pub inverse: Vec<f32>,
    /// `z` of each group, in units of the codes 0 to `2^b - 1`.
    pub zero: Vec<f32>,
    /// Mean of `|W - s (q - z)|` before each step; the first entry is the error of RTN.
    pub errors: Vec<f64>,
}

/// Largest `1 / s`, for groups with nearly equal values.
const MAX_INVERSE: f32 = 2e4;

/// Finds scales and zero points for `w`, whose groups of `group` values are consecutive, for codes of `bits` bits.
/// The result does not depend on `threads`.
pub fn hqq(w: &[f32], group: usize, bits: u32, options: HqqOptions, threads: usize) -> HqqGrids {
    let group = group.max(1);
    of_lines(w, Lines { unit: group, group }, bits, options, threads)
}

/// Values in lines of consecutive groups. The last group of a line is short if the group size does not divide the
/// line.
#[derive(Clone, Copy)]
struct Lines {
    unit: usize,
    group: usize,
}

impl Lines {
    /// Splits lines of `len` values into groups. If the group size divides `len`, each group is a line of its own.
    fn new(len: usize, group: usize) -> Self {
        Lines { unit: if len.is_multiple_of(group) { group } else { len }, group }
    }

    fn groups<'w>(&self, w: &'w [f32]) -> impl Iterator<Item = &'w [f32]> + use<'w> {
        let group = self.group;
        w.chunks(self.unit).flat_map(move |unit| unit.chunks(group))
    }

    /// Values and groups that a thread takes at a time.
    fn at_once(&self) -> (usize, usize) {
        let units = rows_at_once(self.unit);
        (units * self.unit, units * self.unit.div_ceil(self.group))
    }
}

fn of_lines(w: &[f32], lines: Lines, bits: u32, options: HqqOptions, threads: usize) -> HqqGrids {
    let top = ((1u32 << bits) - 1) as f32;
    let range = |x: &[f32]| {
        x.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(low, high), v| (low.min(*v), high.max(*v)))
    };
    let mut grids: Vec<(f32, f32)> = lines
        .groups(w)
        .map(range)
        .map(|(low, high)| {
            let inverse = (top / (high - low)).min(MAX_INVERSE);
            (inverse, -low * inverse)
        })
        .collect();
    let mut errors = Vec::new();
    let mut best = f64::INFINITY;
    for _ in 0..options.iterations {
        let error = step(w, lines, top, options, &mut grids, threads) / w.len().max(1) as f64;
        errors.push(error);
        if error >= best {
            break;
        }
        best = error;
    }
    let (inverse, zero) = grids.into_iter().unzip();
    HqqGrids { inverse, zero, errors }
}

/// Runs one step on all groups; returns the sum of `|W - s (q - z)|` before it.
fn step(
    w: &[f32],
    lines: Lines,
    top: f32,
    options: HqqOptions,
    grids: &mut [(f32, f32)],
    threads: usize,
) -> f64 {
    let (values, groups) = lines.at_once();
    let mut sums = vec![0.0; grids.len().div_ceil(groups)];
    let work = w.chunks(values).zip(grids.chunks_mut(groups)).zip(&mut sums);
    for_each(threads, work, |((w, grids), sum)| {
        let [mut codes, mut errors, mut shrunk] = [(); 3].map(|()| vec![0f32; lines.group]);
        for (x, (inverse, zero)) in lines.groups(w).zip(grids) {
            let (codes, errors) = (&mut codes[..x.len()], &mut errors[..x.len()]);
            for ((q, error), &v) in codes.iter_mut().zip(&mut *errors).zip(x) {
                *q = nearest(v * *inverse + *zero, top);
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

/// Applies the proximal operator of the norm to each of `errors` (Badri & Shaji 2023, equation 4).
fn shrink(errors: &[f32], HqqOptions { norm, beta, .. }: HqqOptions, shrunk: &mut [f32]) {
    shrunk.iter_mut().zip(errors).for_each(|(cut, error)| *cut = error.abs());
    kernels().pow_inplace(shrunk, norm - 1.0);
    for (cut, error) in shrunk.iter_mut().zip(errors) {
        *cut = (error.abs() - *cut / beta).max(0.0).copysign(*error);
    }
}

/// Scheme that HQQ uses for `scheme`: adds a float zero point if the scheme names no offset.
pub fn with_float_zero(scheme: Scheme) -> Scheme {
    match &scheme.format {
        Format::Affine(Affine { code: Code::Int(bits), blocks, offset: Offset::None, .. }) => {
            Scheme { source: scheme.source, ..Scheme::int_biased(*bits, *blocks).with_rows(scheme.row) }
        }
        _ => scheme,
    }
}

/// Checks that [`quantize`] takes `scheme` for a weight of `cols` columns.
///
/// # Errors
/// Names the schemes that it takes.
pub fn check_scheme(scheme: &Scheme, cols: usize) -> Result<(), &'static str> {
    group_of(scheme, cols)
        .map(|_| ())
        .ok_or("integers with an offset in groups of a row or of a column, or in channels, such as int4-g64 or int4-t64x1")
}

/// [Steps](Arithmetic::steps) on a weight in one iteration (a power, a quotient), and from one start of the scale search;
/// measured.
const STEPS: f64 = 6.0;
const STEPS_OF_START: f64 = 6.0;

/// Direction of a group.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Axis {
    Row,
    Column,
}

/// Bits of a code, values per group, and direction of the groups.
fn group_of(scheme: &Scheme, cols: usize) -> Option<(u32, usize, Axis)> {
    let Format::Affine(Affine { code: Code::Int(bits), blocks, scale: Some(tree), offset }) = &scheme.format
    else {
        return None;
    };
    let (group, axis) = match blocks {
        Blocks::Row => (cols, Axis::Row),
        Blocks::Group(group) => (*group as usize, Axis::Row),
        Blocks::Tile { rows, cols: 1 } => (*rows as usize, Axis::Column),
        _ => return None,
    };
    let plain = *offset != Offset::None && scheme.encoder.rule != Rule::Torchao && tree.outer.is_none();
    (plain && group > 0).then_some((*bits, group, axis))
}

/// Quantizes `w` (`[rows, cols]`, finite) by `scheme`. Also returns the mean absolute errors of RTN and of the
/// result. `None` for schemes that [`check_scheme`] refuses.
pub fn quantize(
    scheme: &Scheme,
    w: &[f32],
    cols: usize,
    options: HqqOptions,
    threads: usize,
) -> Option<(Quantized, [f64; 2])> {
    let (bits, group, axis) = group_of(scheme, cols)?;
    let rows = w.len() / cols.max(1);
    if axis == Axis::Column {
        return of_columns(scheme, w, (rows, cols), options, threads);
    }
    quantize_lines(scheme, w, (rows, cols), (bits, Lines::new(cols, group)), options, threads)
}

/// Like [`quantize`], for groups down the columns: transposes, quantizes along rows and transposes back.
fn of_columns(
    scheme: &Scheme,
    w: &[f32],
    (rows, cols): (usize, usize),
    options: HqqOptions,
    threads: usize,
) -> Option<(Quantized, [f64; 2])> {
    let (bits, group, _) = group_of(scheme, cols)?;
    let Format::Affine(affine) = &scheme.format else { return None };
    let blocks = Blocks::Group(u32::try_from(group).ok()?);
    let along = Scheme { format: Format::Affine(Affine { blocks, ..affine.clone() }), ..scheme.clone() };
    let turned: Vec<f32> = (0..cols).flat_map(|c| (0..rows).map(move |r| w[r * cols + c])).collect();
    let lines = Lines::new(rows, group);
    let (found, errors) = quantize_lines(&along, &turned, (cols, rows), (bits, lines), options, threads)?;
    let groups = rows.div_ceil(group);
    let scales = Codes::with_capacity(scheme.format.scale()?.code.unit_bytes(), groups * cols);
    let mut q = Quantized { format: scheme.format.clone(), rows, cols, ..found.clone() };
    q.scales.codes = scales;
    if let (Codes::U8(codes), Codes::U8(turned)) = (&mut q.codes, &found.codes) {
        codes.iter_mut().enumerate().for_each(|(i, code)| *code = turned[i % cols * rows + i / cols]);
    }
    // Tiles are stored by rows of tiles.
    let place = |tile: usize| tile % cols * groups + tile / cols;
    (0..groups * cols).for_each(|tile| q.scales.push(found.scales.get(place(tile))));
    q.scales
        .offsets
        .biases_mut()
        .iter_mut()
        .enumerate()
        .for_each(|(tile, bias)| *bias = found.biases()[place(tile)]);
    q.scales
        .offsets
        .zeros_mut()
        .iter_mut()
        .enumerate()
        .for_each(|(tile, zero)| *zero = found.zeros()[place(tile)]);
    Some((q, errors))
}

/// Like [`quantize`], for groups along the rows of `w`, whatever the blocks of `scheme`.
fn quantize_lines(
    scheme: &Scheme,
    w: &[f32],
    (rows, cols): (usize, usize),
    (bits, lines): (u32, Lines),
    options: HqqOptions,
    threads: usize,
) -> Option<(Quantized, [f64; 2])> {
    let grids = of_lines(w, lines, bits, options, threads);
    let biased = scheme.format.has_bias();
    let Format::Affine(Affine { offset, .. }) = &scheme.format else { return None };
    let empty = Quantized::empty(scheme.format.clone(), rows, cols);
    let unit = scheme.format.scale().map_or(4, |scale| scale.code.unit_bytes());
    let mut q = Quantized {
        codes: Codes::U8(vec![0; w.len()]),
        scales: Codes::with_capacity(unit, 0).into(),
        ..empty
    };
    let (top, half) = (((1u32 << bits) - 1) as f32, 1i32 << (bits - 1));
    let code = scheme.format.scale()?.code;
    let stored = |step: f32| scheme.format.nearest_scale(step, None).map_or(step, |scale| code.decode(scale));
    let target = Grids { top, integer_zero: !biased, least_step: 1.0 / MAX_INVERSE, stored: &stored };
    let found = grids.inverse.iter().zip(&grids.zero);
    let mut steps: Vec<Grid> = found.map(|(inverse, zero)| target.grid(1.0 / inverse, *zero)).collect();
    if options.scales {
        let (values, groups) = lines.at_once();
        let work = w.chunks(values).zip(steps.chunks_mut(groups));
        for_each(threads, work, |(w, steps)| {
            let mut turn = Turn::default();
            lines.groups(w).zip(steps).for_each(|(x, grid)| *grid = target.refine(x, *grid, &mut turn));
        });
    }
    for Grid { step, zero } in &mut steps {
        q.scales.push(scheme.format.nearest_scale(*step, None)?);
        if biased {
            let bias = offset.nearest_bias(-*zero * *step);
            if *offset == Offset::HalfBias {
                // Codes are chosen for the bias that is stored.
                *zero = -bias / *step;
            }
            q.scales.extend_biases([bias]);
        } else {
            q.scales.extend_zeros([*zero as i32 - half]);
        }
    }
    if let Codes::U8(codes) = &mut q.codes {
        let (values, groups) = lines.at_once();
        let work = w.chunks(values).zip(codes.chunks_mut(values)).zip(steps.chunks(groups));
        for_each(threads, work, |((w, codes), steps)| {
            let mut at = 0;
            for (w, Grid { step, zero }) in lines.groups(w).zip(steps) {
                for (v, code) in w.iter().zip(&mut codes[at..]) {
                    *code = (nearest(v / step + zero, top) as i32 - half) as i8 as u8;
                }
                at += w.len();
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

/// HQQ (Badri & Shaji 2023): searches zero points under a norm that tolerates outliers.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Hqq {
    /// Options; no recipe sets them.
    pub options: HqqOptions,
}

impl Method for Hqq {
    fn name(&self) -> &'static str {
        "hqq"
    }

    fn work(&self) -> Work<'_> {
        Work::Weight(self)
    }

    fn scheme(&self, scheme: Scheme) -> Scheme {
        with_float_zero(scheme)
    }

    /// Scales and zero points in f16, as the published package stores them for models in f16.
    fn stored_scheme(&self, scheme: Scheme) -> Scheme {
        scheme.with_half_scales()
    }

    fn takes(&self, scheme: &Scheme, (_, cols): (usize, usize), _: bool) -> Result<(), MethodError> {
        check_scheme(scheme, cols).map_err(MethodError::Scheme)
    }

    fn refuses(&self, feature: Feature) -> Option<&'static str> {
        match feature {
            Feature::StochasticRounding => Some("it does not support stochastic rounding"),
            _ => refused_by_most(feature),
        }
    }

    fn buffers(&self, phase: Phase, extent: &Extent<'_>) -> Vec<Buffer> {
        pieces(phase, extent)
    }

    fn arithmetic(&self, extent: &Extent<'_>) -> Arithmetic {
        let starts = if self.options.scales { SHARES as f64 + 1.0 } else { 0.0 };
        let each = STEPS * self.options.iterations as f64 + STEPS_OF_START * starts;
        Arithmetic { steps: each * extent.weights() as f64, ..Arithmetic::default() }
    }
}

impl SolveWeight for Hqq {
    /// Returns the result of [`quantize`], or RTN's if that is closer to the weight.
    fn solve(&self, task: &WeightTask<'_>) -> Result<Solved, MethodError> {
        let WeightTask { scheme, rows, cols, w, threads, .. } = *task;
        Ok(match quantize(scheme, w, cols, self.options, threads) {
            Some((quantized, [nearest, found])) if found <= nearest => {
                let stats = ErrorStats::of(w, &quantized);
                Solved::rounded((quantized, stats))
            }
            _ => Solved {
                fallback: Some("the error of HQQ is not smaller than that of RTN".to_owned()),
                ..Solved::rounded(rtn::quantize(scheme, w, rows, cols, None, threads)?)
            },
        })
    }
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

    /// Each group under the norm of its search; the same holds with integer zero points.
    #[test]
    fn the_scale_search_makes_no_group_worse() {
        let w = weights(32 * 256);
        for text in ["int4-g32", "int4-g64-asym", "int2-channel", "int3-t16x1", "int8-g256"] {
            let scheme = with_float_zero(text.parse().unwrap());
            let of = |scales| {
                let options = HqqOptions { scales, ..HqqOptions::default() };
                quantize(&scheme, &w, 256, options, 2).unwrap().0
            };
            let (plain, found) = (of(false), of(true));
            found.check().unwrap();
            let mut sums = [vec![0.0; plain.scales.len()], vec![0.0; plain.scales.len()]];
            for (q, sums) in [&plain, &found].into_iter().zip(&mut sums) {
                let values = q.dequantize().unwrap();
                for (i, (v, w)) in values.iter().zip(&w).enumerate() {
                    let block = q.format.blocks().index(256, i / 256, i % 256);
                    sums[block] += f64::from((v - w).abs()).powf(f64::from(crate::clip::NORM));
                }
            }
            let [plain, found] = sums;
            assert!(
                plain.iter().zip(&found).all(|(plain, found)| found <= &(plain * (1.0 + 1e-4))),
                "{text}"
            );
            let [plain, found] = [plain, found].map(|sums| sums.iter().sum::<f64>());
            assert!(found < 0.97 * plain, "{text}: {found} {plain}");
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

    /// Groups down the columns equal those along the rows of the transpose. A short last group is a group by itself.
    #[test]
    fn groups_of_columns_and_short_ones() {
        let (rows, cols) = (80, 24);
        let w = weights(rows * cols);
        let turned: Vec<f32> = (0..rows * cols).map(|i| w[i % rows * cols + i / rows]).collect();
        for (down, along) in [("int4-t32x1", "int4-g32"), ("int3-t16x1-asym", "int3-g16-asym")] {
            let [down, along] = [down, along].map(|text| with_float_zero(text.parse().unwrap()));
            let options = HqqOptions::default();
            let (q, errors) = quantize(&down, &w, cols, options, 2).unwrap();
            let (other, others) = quantize(&along, &turned, rows, options, 1).unwrap();
            q.check().unwrap();
            assert_eq!(q.format, down.format);
            let (values, other) = (q.dequantize().unwrap(), other.dequantize().unwrap());
            assert!((0..rows * cols).all(|i| values[i] == other[i % cols * rows + i / cols]));
            assert_eq!(errors, others);
        }
        // Of 80 columns the last 16 have their own scale: compared with a weight of 64 columns, and one of the last
        // 16 only.
        let scheme = with_float_zero("int4-g64".parse().unwrap());
        let of = |columns: std::ops::Range<usize>| {
            let part: Vec<f32> =
                turned.chunks_exact(80).flat_map(|row| row[columns.clone()].to_vec()).collect();
            let once = HqqOptions { iterations: 1, ..HqqOptions::default() };
            quantize(&scheme, &part, columns.len(), once, 1).unwrap().0.dequantize().unwrap()
        };
        let (whole, first, last) = (of(0..80), of(0..64), of(64..80));
        for (row, values) in whole.chunks_exact(80).enumerate() {
            assert_eq!(values[..64], first[64 * row..64 * (row + 1)]);
            assert_eq!(values[64..], last[16 * row..16 * (row + 1)]);
        }
    }

    #[test]
    fn a_missing_offset_is_added_and_other_schemes_are_refused() {
        let scheme = with_float_zero("int4-g64".parse().unwrap());
        assert_eq!(scheme.to_string(), "int4-g64-asym:minmax");
        assert!(check_scheme(&scheme, 256).is_ok() && check_scheme(&scheme, 96).is_ok());
        for text in ["nf4", "fp8-e4m3-channel", "int4-t4x4-asym", "int4-g64-asym:torchao"] {
            let scheme = with_float_zero(text.parse().unwrap());
            assert!(check_scheme(&scheme, 256).is_err(), "{text}");
        }
    }

    #[test]
    fn scales_and_zero_points_take_16_bits() {
        let w = weights(64 * 256);
        let wide = with_float_zero("int4-g64".parse().unwrap());
        let half = Hqq::default().stored_scheme(wide.clone());
        assert_eq!(half.format.bits_per_weight(64, 256), 4.5);
        assert_eq!(half.to_string(), wide.to_string());
        let of = |scheme: &Scheme| quantize(scheme, &w, 256, HqqOptions::default(), 1).unwrap();
        let ((_, [_, wide]), (q, [_, found])) = (of(&wide), of(&half));
        q.check().unwrap();
        let offset = mantissa_num::format::Offset::HalfBias;
        assert!(q.biases().iter().all(|bias| offset.nearest_bias(*bias) == *bias));
        assert!(found < 1.01 * wide, "{found} {wide}");
        assert_ne!(found, wide);
    }
}

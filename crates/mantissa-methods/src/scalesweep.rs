//! ScaleSweep (Lin & Wan 2026, "ScaleSweep: Accurate NVFP4 Post-Training Quantization of LLMs via Block Scale
//! Initialization", arXiv 2606.07618): tries the few stored block scales that can be best, and keeps the one with the
//! least error.
//!
//! For a block `x` of FP4 (E2M1) elements with amax M, over the values `s` of a stored scale:
//!
//! ```text
//! minimise over s:   L(s) = Σ (x - s · round(x / s))²
//! ```
//!
//! The paper and the proof in its repository bound the best scale from both sides:
//!
//! - **From above**, for any error weights: if `s ≥ M / 3.5`, every `|x| ≤ 3.5 s` rounds to `3 s` or less. All of
//!   these values exist under `s / 2` as well, so `L(s / 2) ≤ L(s)`. The best scale is therefore below `12/7 · M /
//!   6`.
//! - **From below**, for equal weights: doubling s adds at most `s² / 4` for each of the n - 1 other elements and
//!   changes the error of the largest by `-24 a s + 28 s²` with `a = M / 6`. So 2 s is better while `s < 24 a / (28 +
//!   (n - 1) / 4)`.
//!
//! For NVFP4 (n = 16, E4M3 scales) these bounds and an enumeration of the remaining E4M3 values leave the codes from
//! 3 below to 7 above the code of `M / 6`. For MXFP4 (n = 32, powers of two, not treated in the paper) the same
//! inequalities leave `0.67 a < s < 1.72 a`: the power of two at or above a, and the one below it.
//!
//! E4M3 scales end at 448. Blocks that need more, which the paper's proof excludes, take 448.
//!
//! [`SweptGptq`] runs the same sweep inside GPTQ.

mod columns;

use std::ops::{Range as Span, RangeInclusive};

use mantissa_kernels::map_reduce_fixed;
use mantissa_num::minifloat::{E2M1, E4M3};
use mantissa_num::{
    Affine, Blocks, Code, Codes, Format, Quantized, ScaleLevel, Scheme, TensorError, check_finite, code_unit,
};

use crate::clip::{pieces, rows_at_once};
use crate::error::MethodError;
use crate::error_stats::ErrorStats;
use crate::method::{Arithmetic, Buffer, Extent, Feature, Method, Phase, SolveWeight, WeightTask, Work};
use crate::rtn::{append, outer_scale_of};
use crate::solved::Solved;

pub(crate) use columns::BlockScaleSearch;
pub use columns::{SweepOptions, SweptGptq};

/// Schemes that the sweep takes.
const TAKES: &str = "FP4 elements in groups with E4M3 or power-of-two scales: nvfp4 or mxfp4";

/// Number of distinct values of E2M1.
const VALUES: usize = 15;

/// Checks that `scheme` has FP4 elements and scales to sweep.
///
/// # Errors
/// Names the schemes that the sweep takes.
pub fn check_scheme(scheme: &Scheme) -> Result<(), &'static str> {
    let Format::Affine(Affine {
        code: Code::Float(E2M1), blocks: Blocks::Group(_), scale: Some(tree), ..
    }) = &scheme.format
    else {
        return Err(TAKES);
    };
    let swept = matches!(tree.code, Code::Float(E4M3) | Code::E8m0) && tree.nested().is_none();
    if swept { Ok(()) } else { Err(TAKES) }
}

/// Values of FP4 elements under every stored scale of a tensor.
#[derive(Debug)]
pub(crate) struct Scales<'a> {
    scheme: &'a Scheme,
    outer: Option<f32>,
    /// Codes of the elements, ascending by value.
    codes: [u32; VALUES],
    /// Values by scale code.
    levels: Vec<Levels>,
}

/// Values of the elements under one scale, ascending, and the midpoints between them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Levels {
    values: [f64; VALUES],
    middles: [f64; VALUES - 1],
}

impl Levels {
    /// Index of the value nearest to `x`.
    #[inline]
    pub(crate) fn nearest(&self, x: f64) -> usize {
        self.middles.iter().map(|middle| usize::from(x >= *middle)).sum()
    }

    /// Value at index `place`.
    #[inline]
    pub(crate) fn value(&self, place: usize) -> f64 {
        self.values[place]
    }
}

impl<'a> Scales<'a> {
    /// Decodes every element under every scale that `scheme` stores; `outer` is the global scale.
    pub(crate) fn new(scheme: &'a Scheme, outer: Option<f32>) -> Self {
        let format = &scheme.format;
        let mut elements: Vec<(f32, u32)> = (0..1 << 4).map(|code| (format.element(code), code)).collect();
        // Of -0 and 0, write the smaller code.
        elements.sort_by(|a, b| (a.0 + 0.0).total_cmp(&(b.0 + 0.0)).then(a.1.cmp(&b.1)));
        elements.dedup_by(|b, a| a.0 == b.0);
        let mut codes = [0; VALUES];
        codes.iter_mut().zip(&elements).for_each(|(to, (_, code))| *to = *code);
        let highest = format.scale().map_or(0, |tree| highest(tree.code));
        let scale_levels = |scale: u32| {
            let decoder = format.decoder(scale, 0, outer);
            let mut levels = Levels { values: [0.0; VALUES], middles: [0.0; VALUES - 1] };
            for (to, (element, _)) in levels.values.iter_mut().zip(&elements) {
                *to = f64::from(decoder.value(*element));
            }
            for (to, pair) in levels.middles.iter_mut().zip(levels.values.windows(2)) {
                *to = 0.5 * (pair[0] + pair[1]);
            }
            levels
        };
        Scales { scheme, outer, codes, levels: (0..=highest).map(scale_levels).collect() }
    }

    /// Values under the scale with code `scale`.
    pub(crate) fn levels(&self, scale: u32) -> &Levels {
        &self.levels[scale as usize]
    }

    /// Code of the element at index `place`.
    pub(crate) fn code(&self, place: usize) -> u32 {
        self.codes[place]
    }

    /// Code of the scale nearest to `scale`; for powers of two, the one at or above it.
    pub(crate) fn code_of(&self, scale: f32) -> u32 {
        let nearest = self.scheme.format.nearest_scale(scale, self.outer).unwrap_or(0);
        let below = |code: u32| self.levels(code).values[VALUES - 1] < f64::from(scale * E2M1.max());
        if self.has_powers() && below(nearest) { self.limited(nearest + 1) } else { self.limited(nearest) }
    }

    /// True if scales are powers of two.
    fn has_powers(&self) -> bool {
        self.scheme.format.scale().is_some_and(|tree| tree.code == Code::E8m0)
    }

    fn limited(&self, code: u32) -> u32 {
        // Code 0 is not a valid E4M3 scale; in E8M0 it is 2⁻¹²⁷.
        code.clamp(u32::from(!self.has_powers()), self.levels.len() as u32 - 1)
    }

    /// Codes of the scales from `below` codes below to `above` codes above the code of `amax / 6`.
    pub(crate) fn around(&self, amax: f32, (below, above): (u32, u32)) -> RangeInclusive<u32> {
        let base = self.code_of(amax / E2M1.max());
        self.limited(base.saturating_sub(below))..=self.limited(base + above)
    }

    /// Codes of the scales that can have a block's least squared error.
    pub(crate) fn bounded(&self, amax: f32) -> RangeInclusive<u32> {
        self.around(amax, if self.has_powers() { (1, 0) } else { (3, 7) })
    }

    /// Codes of the scales tried for weighted errors, which have no bound from below: down to half of `amax / 6`.
    pub(crate) fn weighed(&self, amax: f32) -> RangeInclusive<u32> {
        self.around(amax, if self.has_powers() { (1, 1) } else { (8, 7) })
    }

    /// Scale in `candidates` with the least `Σ h (x - q)²` for the block `x`, and that error; the lowest for ties.
    /// `h(i)` is the weight of element `i`'s error.
    pub(crate) fn best(
        &self,
        x: &[f32],
        h: impl Fn(usize) -> f64,
        candidates: RangeInclusive<u32>,
    ) -> (u32, f64) {
        let mut best = (*candidates.start(), f64::INFINITY);
        for scale in candidates {
            let levels = self.levels(scale);
            let mut error = 0.0;
            for (i, x) in x.iter().copied().map(f64::from).enumerate() {
                let e = x - levels.value(levels.nearest(x));
                error += h(i) * e * e;
            }
            if error < best.1 {
                best = (scale, error);
            }
        }
        best
    }
}

/// Code of the largest finite scale.
fn highest(code: Code) -> u32 {
    match code {
        Code::E8m0 => 254,
        _ => 126,
    }
}

/// [Steps](Arithmetic::steps) on a weight to try the scales of its block that can be best; measured.
pub(crate) const STEPS: f64 = 20.0;

/// Greatest magnitude of `x`.
pub(crate) fn amax(x: &[f32]) -> f32 {
    x.iter().fold(0.0, |amax: f32, v| amax.max(v.abs()))
}

/// Quantizes `w` (`[rows, cols]`) with the scale of least squared error for each block. `outer` is the global scale
/// if fused layers share one; `None` computes it from `w`.
///
/// # Errors
/// [`TensorError::NonFinite`]; schemes that [`check_scheme`] refuses are rounded to nearest.
pub fn quantize(
    scheme: &Scheme,
    w: &[f32],
    (rows, cols): (usize, usize),
    outer: Option<f32>,
    threads: usize,
) -> Result<(Quantized, ErrorStats), TensorError> {
    if check_scheme(scheme).is_err() {
        return crate::rtn::quantize(scheme, w, rows, cols, outer, threads);
    }
    check_finite(w)?;
    let scales = Scales::new(scheme, outer_scale_of(scheme, w, outer));
    let choose = |_: usize, x: &[f32]| scales.best(x, |_| 1.0, scales.bounded(amax(x))).0;
    let q = encode(&scales, w, (rows, cols), &choose, threads);
    let stats = ErrorStats::of(w, &q);
    Ok((q, stats))
}

/// Rounds `w` to nearest, with the scale that `choose` returns for each block, given its index and values.
pub(crate) fn encode(
    scales: &Scales<'_>,
    w: &[f32],
    (rows, cols): (usize, usize),
    choose: &(dyn Fn(usize, &[f32]) -> u32 + Sync),
    threads: usize,
) -> Quantized {
    let format = &scales.scheme.format;
    let empty = |rows: usize| Quantized {
        codes: Codes::with_capacity(code_unit(format), rows * cols),
        scales: ScaleLevel::from(Codes::with_capacity(1, rows)).with_outer(scales.outer),
        ..Quantized::empty(format.clone(), rows, cols)
    };
    let panel = |span: Span<usize>| {
        let mut q = empty(span.len());
        for row in span {
            for (block, start, end) in format.blocks().runs(cols, row) {
                let x = &w[row * cols + start..row * cols + end];
                let scale = choose(block, x);
                let levels = scales.levels(scale);
                x.iter().for_each(|x| q.codes.push(scales.code(levels.nearest(f64::from(*x)))));
                q.scales.push(scale);
            }
        }
        q
    };
    let start = Quantized { rows, ..empty(0) };
    map_reduce_fixed(threads, rows, rows_at_once(cols), panel, start, |mut all, part| {
        append(&mut all.codes, part.codes);
        append(&mut all.scales.codes, part.scales.codes);
        all
    })
}

/// ScaleSweep without calibration (arXiv 2606.07618).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ScaleSweep;

impl Method for ScaleSweep {
    fn name(&self) -> &'static str {
        "scalesweep"
    }

    fn work(&self) -> Work<'_> {
        Work::Weight(self)
    }

    fn takes(&self, scheme: &Scheme, _: (usize, usize), _: bool) -> Result<(), MethodError> {
        check_scheme(scheme).map_err(MethodError::Scheme)
    }

    fn refuses(&self, feature: Feature) -> Option<&'static str> {
        refuses(feature)
    }

    fn buffers(&self, phase: Phase, extent: &Extent<'_>) -> Vec<Buffer> {
        pieces(phase, extent)
    }

    fn arithmetic(&self, extent: &Extent<'_>) -> Arithmetic {
        Arithmetic { steps: STEPS * extent.weights() as f64, ..Arithmetic::default() }
    }
}

impl SolveWeight for ScaleSweep {
    fn solve(&self, task: &WeightTask<'_>) -> Result<Solved, MethodError> {
        let WeightTask { scheme, rows, cols, w, outer, threads, .. } = *task;
        Ok(Solved::rounded(quantize(scheme, w, (rows, cols), outer, threads)?))
    }
}

/// Features that the sweep does not support.
pub(crate) fn refuses(feature: Feature) -> Option<&'static str> {
    match feature {
        Feature::GivenScales => Some("it chooses its own scales"),
        Feature::StochasticRounding => Some("it rounds to nearest under each scale that it tries"),
        _ => None,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::testing::values;

    /// Heavy-tailed values: cubes and fifth powers of uniform ones, of several sizes.
    fn weights(seed: u64, n: usize) -> Vec<f32> {
        let power = |i: usize| 1 + 2 * (i / 32 % 4) as i32;
        values(seed, n).iter().enumerate().map(|(i, v)| v.powi(power(i)) * 0.1).collect()
    }

    fn scheme(text: &str) -> Scheme {
        text.parse().unwrap()
    }

    /// Squared error of each block, in the order of the scales.
    fn errors(q: &Quantized, w: &[f32]) -> Vec<f64> {
        let (values, blocks) = (q.dequantize().unwrap(), q.format.blocks());
        let mut sums = vec![0.0; q.scales.codes.len()];
        for (i, (v, w)) in values.iter().zip(w).enumerate() {
            sums[blocks.index(q.cols, i / q.cols, i % q.cols)] += f64::from(v - w).powi(2);
        }
        sums
    }

    /// The bounded sweep finds the best of all scales, and no block is worse than RTN.
    #[test]
    fn the_best_scale_is_within_the_bounds() {
        let (rows, cols) = (64, 160);
        for (seed, text) in (1u64..).zip(["nvfp4", "nvfp4:4over6", "mxfp4", "mxfp4:ct"]) {
            let (scheme, w) = (scheme(text), weights(seed, rows * cols));
            let (q, _) = quantize(&scheme, &w, (rows, cols), None, 2).unwrap();
            q.check().unwrap();
            let scales = Scales::new(&scheme, q.outer());
            let all = |x: &[f32]| scales.best(x, |_| 1.0, scales.limited(0)..=scales.limited(u32::MAX)).1;
            let group = cols / (q.scales.codes.len() / rows);
            let found = errors(&q, &w);
            let (nearest, _) = crate::rtn::quantize(&scheme, &w, rows, cols, None, 1).unwrap();
            let nearest = errors(&nearest, &w);
            for (b, x) in w.chunks(group).enumerate() {
                let least = all(x);
                assert!((found[b] - least).abs() <= 1e-5 * least, "{text} {b}: {} {least}", found[b]);
                assert!(found[b] <= nearest[b] * (1.0 + 1e-5), "{text} {b}: {} {}", found[b], nearest[b]);
            }
            let sum = |errors: &[f64]| errors.iter().sum::<f64>();
            // There are only two powers of two to choose from.
            let share = if text.starts_with("mxfp4") { 1.0 } else { 0.9 };
            assert!(sum(&found) < share * sum(&nearest), "{text}: {} {}", sum(&found), sum(&nearest));
        }
    }

    /// The bounds are tight: both ends are the best scale for some block.
    #[test]
    fn both_ends_of_the_bounds_are_used() {
        let scheme = scheme("nvfp4");
        let scales = Scales::new(&scheme, Some(1.0));
        let mut found = [0; 11];
        for seed in 0..400 {
            for x in weights(seed, 16 * 64).chunks(16) {
                let x: Vec<f32> = x.iter().map(|v| v * 100.0).collect();
                let range = scales.bounded(amax(&x));
                let (start, best) = (*range.start(), scales.best(&x, |_| 1.0, range).0);
                found[(best - start) as usize] += 1;
            }
        }
        assert!(found[0] + found[1] > 0 && found[9] + found[10] > 0 && found[3] > 0, "{found:?}");
    }

    #[test]
    fn threads_and_zero_blocks_change_nothing() {
        let mut w = weights(9, 48 * 96);
        w[96..96 + 64].fill(0.0);
        for text in ["nvfp4", "mxfp4"] {
            let of = |threads| quantize(&scheme(text), &w, (48, 96), None, threads).unwrap().0;
            let q = of(1);
            assert_eq!(q, of(3), "{text}");
            let values = q.dequantize().unwrap();
            assert!(values[96..96 + 64].iter().all(|v| *v == 0.0) && values.iter().all(|v| v.is_finite()));
        }
    }

    #[test]
    fn other_schemes_and_values_are_refused() {
        for text in ["int4-g32", "nf4", "mxfp8-e4m3", "fp8-e4m3-channel"] {
            assert!(check_scheme(&scheme(text)).is_err(), "{text}");
        }
        let mut w = weights(3, 64);
        w[5] = f32::INFINITY;
        let error = quantize(&scheme("nvfp4"), &w, (2, 32), None, 1).unwrap_err();
        assert!(matches!(error, TensorError::NonFinite { index: 5, .. }), "{error}");
    }
}

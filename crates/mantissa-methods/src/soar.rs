//! SOAR (Bao, Yan, Li, Qin, Yu & Zhang 2026, "SOAR: Scale Optimization for Accurate Reconstruction in NVFP4
//! Quantization", arXiv 2605.12245): optimizes global and block scales jointly, in closed form.
//!
//! Only the paper's abstract and a summary were available to us, and its code is not published. This implementation
//! is derived from these.
//!
//! For blocks `w_b` of a weight, elements `q_b`, stored block scales `s_b` and a global scale g:
//!
//! ```text
//! minimise over g, s, q:   Σ_b Σ_i h_i (w_bi - g s_b q_bi)²
//!
//! given the others:   s_b = Σ_i h w q / (g Σ_i h q²)                      rounded to a stored scale
//!                     g   = Σ_b s_b Σ_i h w q / Σ_b s_b² Σ_i h q²         stored in f32, and exact
//! ```
//!
//! - **CJSO** (closed-form joint scale optimization) alternates between the two, here until g converges: each step
//!   lowers the error or is the last.
//! - **DSS** (decoupled scale search) chooses elements by a high-precision scale σ, `q = round(w / σ)`, and stores
//!   another scale, searched near the closed form. For a sum of squares, the best elements under a stored scale are
//!   the nearest ones. So the sweep of all stored scales that can be best ([`scalesweep`](crate::scalesweep)) finds
//!   the optimum over every σ, and is used here for `s_b` and `q_b`.
//!
//! Fused layers (qkv, gate and up) share one global scale, as engines require: it is kept, and only block scales are
//! searched. Powers of two (MXFP4) have no global scale, so only the sweep remains.
//!
//! With GPTQ ([`gptq`]) `h` is the diagonal of the Hessian, and the scales stay fixed while GPTQ quantizes the
//! columns.

use mantissa_num::{Quantized, Scheme, Sense, TensorError, check_finite};

use crate::clip::pieces;
use crate::error::MethodError;
use crate::error_stats::ErrorStats;
use crate::method::{Arithmetic, Buffer, Extent, Feature, Method, Phase, SolveWeight, WeightTask, Work};
use crate::rtn::outer_scale_of;
use crate::scalesweep::{BlockScaleSearch, STEPS, Scales, SweptGptq, amax, check_scheme, encode, refuses};
use crate::solved::Solved;

/// Maximum number of alternations between global and block scales.
const TURNS: usize = 8;

/// Relative change of the global scale at which the iteration ends.
const STILL: f64 = 1e-5;

/// Quantizes `w` (`[rows, cols]`) with the block scales of least squared error, and the global scale if `outer` is
/// `None`. `h` weights the errors of each column; empty for equal weights.
///
/// # Errors
/// [`TensorError::NonFinite`]; schemes that the sweep does not take are rounded to nearest.
pub fn quantize(
    scheme: &Scheme,
    w: &[f32],
    (rows, cols): (usize, usize),
    h: &[f64],
    outer: Option<f32>,
    threads: usize,
) -> Result<Quantized, TensorError> {
    if check_scheme(scheme).is_err() {
        return Ok(crate::rtn::quantize(scheme, w, rows, cols, outer, threads)?.0);
    }
    check_finite(w)?;
    let mut best = swept(scheme, w, (rows, cols), h, outer_scale_of(scheme, w, outer), threads);
    if outer.is_some() || !scheme.has_outer_scale() {
        return Ok(best);
    }
    let (mut least, mut factor) = refit(&best, w, h)?;
    for _ in 0..TURNS {
        let Some(global) = best.outer().filter(|_| (factor - 1.0).abs() > STILL) else { break };
        let Some(global) = scaled(scheme, global, factor) else { break };
        let turn = swept(scheme, w, (rows, cols), h, Some(global), threads);
        let (error, next) = refit(&turn, w, h)?;
        if error >= least {
            break;
        }
        (best, least, factor) = (turn, error, next);
    }
    Ok(best)
}

/// Best block scales and elements under the global scale `outer`.
fn swept(
    scheme: &Scheme,
    w: &[f32],
    (rows, cols): (usize, usize),
    h: &[f64],
    outer: Option<f32>,
    threads: usize,
) -> Quantized {
    let scales = Scales::new(scheme, outer);
    let row_blocks = scheme.format.blocks().count(rows, cols) / rows.max(1);
    let group = scheme.format.blocks().len(1, cols).max(1);
    let choose = |block: usize, x: &[f32]| {
        if h.is_empty() {
            return scales.best(x, |_| 1.0, scales.bounded(amax(x))).0;
        }
        let first = block % row_blocks.max(1) * group;
        scales.best(x, |i| h[first + i], scales.weighed(amax(x))).0
    };
    encode(&scales, w, (rows, cols), &choose, threads)
}

/// Error of `q`, and the factor of its global scale that minimizes it.
fn refit(q: &Quantized, w: &[f32], h: &[f64]) -> Result<(f64, f64), TensorError> {
    let (mut error, mut product, mut square) = (0.0, 0.0, 0.0);
    for (i, (q, w)) in q.dequantize()?.iter().zip(w).enumerate().map(|(i, pair)| (i % q.cols.max(1), pair)) {
        let (h, q, w) = (h.get(i).copied().unwrap_or(1.0), f64::from(*q), f64::from(*w));
        error += h * (w - q) * (w - q);
        product += h * w * q;
        square += h * q * q;
    }
    Ok((error, if square > 0.0 { product / square } else { 1.0 }))
}

/// Scales `outer` so that values become `factor` times as large; `None` if that cannot be stored.
fn scaled(scheme: &Scheme, outer: f32, factor: f64) -> Option<f32> {
    let divides = scheme.format.scale()?.tensor_wide()?.sense == Sense::Divisor;
    let factor = if divides { 1.0 / factor } else { factor };
    let scaled = (f64::from(outer) * factor) as f32;
    (scaled.is_normal() && scaled > 0.0).then_some(scaled)
}

/// SOAR without calibration (arXiv 2605.12245).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Soar;

impl Method for Soar {
    fn name(&self) -> &'static str {
        "soar"
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
        let mut buffers = pieces(phase, extent);
        if phase == Phase::Solve {
            buffers.push((
                "the turn before, and its values",
                extent.codes + extent.scales + 4 * extent.weights(),
            ));
        }
        buffers
    }

    fn arithmetic(&self, extent: &Extent<'_>) -> Arithmetic {
        let turns = (1 + TURNS) as f64;
        Arithmetic { steps: turns * STEPS * extent.weights() as f64, ..Arithmetic::default() }
    }
}

impl SolveWeight for Soar {
    fn solve(&self, task: &WeightTask<'_>) -> Result<Solved, MethodError> {
        let WeightTask { scheme, rows, cols, w, outer, threads, .. } = *task;
        let quantized = quantize(scheme, w, (rows, cols), &[], outer, threads)?;
        let stats = ErrorStats::of(w, &quantized);
        Ok(Solved::rounded((quantized, stats)))
    }
}

/// GPTQ under SOAR's scales, which are chosen before the first column and fixed.
static SCALES: BlockScaleSearch = BlockScaleSearch {
    names: ["soar-gptq", "soar-gptaq"],
    table: "soar",
    sweeps: (1 + TURNS) as f64,
    buffer: Some(|extent| {
        let turns = 3 * (extent.codes + extent.scales) + 4 * extent.weights();
        ("turns of the scales, and values", turns)
    }),
    solve: |columns, task| {
        let WeightTask { scheme, rows, cols, target, outer, threads, .. } = *task;
        let found = quantize(scheme, target, (rows, cols), &columns.diagonal()?, outer, threads)?;
        let scales = Scales::new(scheme, found.outer());
        let row_blocks = found.scales.codes.len() / rows.max(1);
        let stored = |row: usize, block: usize| found.scales.codes.get(row * row_blocks + block);
        columns.solve(task, &scales, &|sweep| {
            let scale = stored(sweep.row, sweep.block);
            scale..=scale
        })
    },
};

/// GPTQ under SOAR's scales.
pub fn gptq() -> SweptGptq {
    SweptGptq::of(&SCALES)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use super::*;
    use crate::gptq::Hessian;
    use crate::method::{InputTask, SolveInput, Solver};
    use crate::testing::values;

    fn weights(seed: u64, n: usize) -> Vec<f32> {
        values(seed, n).iter().map(|v| v.powi(3) * 0.1).collect()
    }

    fn error(q: &Quantized, w: &[f32], h: &[f64]) -> f64 {
        refit(q, w, h).unwrap().0
    }

    /// The closed-form global scale errs less than that from amax, and no factor of it is better for these codes.
    #[test]
    fn global_scales_are_those_of_least_squares() {
        let (rows, cols) = (40, 128);
        let w = weights(1, rows * cols);
        for text in ["nvfp4", "nvfp4:4over6", "nvfp4:torchao"] {
            let scheme: Scheme = text.parse().unwrap();
            let sweep = crate::scalesweep::quantize(&scheme, &w, (rows, cols), None, 1).unwrap().0;
            let q = quantize(&scheme, &w, (rows, cols), &[], None, 2).unwrap();
            q.check().unwrap();
            assert_eq!(q, quantize(&scheme, &w, (rows, cols), &[], None, 1).unwrap());
            let (found, least) = (error(&q, &w, &[]), error(&sweep, &w, &[]));
            assert!(found <= least, "{text}: {found} {least}");
            let global = q.outer().unwrap();
            for factor in [0.99, 1.01] {
                let moved = scaled(&scheme, global, factor).unwrap();
                let other = Quantized { scales: q.scales.clone().with_outer(Some(moved)), ..q.clone() };
                assert!(error(&other, &w, &[]) > found, "{text} {factor}");
            }
            let shared = quantize(&scheme, &w, (rows, cols), &[], sweep.outer(), 1).unwrap();
            assert_eq!(shared, sweep, "{text}: a global scale that is given stays");
        }
    }

    #[test]
    fn weights_of_errors_count() {
        let (rows, cols) = (240, 96);
        let w = weights(2, rows * cols);
        let h: Vec<f64> = (0..cols).map(|c| if c % 3 == 0 { 20.0 } else { 1.0 }).collect();
        // There are hardly any powers of two to choose from.
        for (text, strict) in [("nvfp4", true), ("mxfp4", false)] {
            let scheme: Scheme = text.parse().unwrap();
            let of = |h: &[f64]| quantize(&scheme, &w, (rows, cols), h, Some(5000.0), 1).unwrap();
            let (weighed, plain) = (of(&h), of(&[]));
            assert!(error(&weighed, &w, &h) <= error(&plain, &w, &h), "{text}");
            assert!(error(&weighed, &w, &[]) >= error(&plain, &w, &[]), "{text}");
            assert!(!strict || weighed != plain, "{text}");
        }
    }

    /// GPTQ's codes under these scales have a smaller output error than RTN under the same scales.
    #[test]
    fn columns_make_up_under_the_scales() {
        let (rows, cols) = (30, 96);
        let mut x = values(4, 300 * cols);
        for row in x.chunks_exact_mut(cols) {
            (1..cols).for_each(|i| row[i] = 0.6 * row[i] + 0.6 * row[i - 1]);
        }
        let mut hessian = Hessian::new(cols).unwrap();
        hessian.add(&x, 1);
        let w = weights(5, rows * cols);
        for text in ["nvfp4", "mxfp4:ct"] {
            let scheme: Scheme = text.parse().unwrap();
            let input = InputTask { hessian: hessian.clone(), drift: None, place: (0, 0), threads: 2 };
            let (scheme, w) = (&scheme, &w[..]);
            let (target, outer, outputs, scales, place) = (w, None, None, None, (0, 0));
            let task =
                WeightTask { scheme, rows, cols, w, target, outer, outputs, scales, place, threads: 2 };
            let solver = match gptq().prepare(input).unwrap().solver {
                Solver::Ready(solver) => solver,
                round => panic!("{round:?}"),
            };
            let solved = solver.solve(&task).unwrap().quantized;
            let nearest = quantize(scheme, w, (rows, cols), &hessian.diagonal().unwrap(), None, 1).unwrap();
            assert_eq!((&solved.scales, solved.outer()), (&nearest.scales, nearest.outer()), "{text}");
            let loss = |q: &Quantized| hessian.loss(w, &q.dequantize().unwrap());
            assert!(loss(&solved) < 0.7 * loss(&nearest), "{text}");
        }
    }
}

//! AdaRound: learns to round each weight up or down.
//!
//! "Up or Down? Adaptive Rounding for Post-Training Quantization" (Nagel et al., ICML 2020, arXiv:2004.10568). A
//! weight W `[n, k]` lies between two values of its grid, `a ≤ W ≤ b`. With one parameter V per weight, Adam solves
//!
//! ```text
//! W̃ = a + h(V)·(b − a)          h(V) = clip(σ(V)·(ζ − γ) + γ, 0, 1)     ζ = 1.1, γ = −0.1       (equations 22 and 23)
//! minimise over V:   ‖W X − W̃ X‖² + λ Σ (1 − |2·h(V) − 1|^β)             β falls from 20 to 2    (equations 21 and 24)
//! ```
//!
//! At the end h is rounded to 0 or 1. The grid is the same as RTN's, with each group's range chosen by the mean square of
//! the inputs ([`LearnedWeight`]), and stays fixed.
//!
//! Differences from the paper:
//! - The first term is `tr((W − W̃) H (W − W̃)ᵀ)` with `H = XᵀX / t` of the whole calibration. So every step sees all
//!   tokens instead of a batch of 32 samples, and 1000 steps suffice instead of 10 000.
//! - It is divided by its mean per weight under RTN, so that one λ serves all layers.
//! - ReLU and the asymmetric inputs of equation 25 are not used.

use mantissa_kernels::{AdamDirection, for_each, kernels};
use mantissa_num::Scheme;
use mantissa_options::{Count, Named, NamedMut, Number, options};

use crate::autoround::{LearnedWeight, check_scheme};
use crate::error::MethodError;
use crate::error_stats::ErrorStats;
use crate::gptq::Hessian;
use crate::learned;
use crate::method::{
    Arithmetic, Buffer, CalibrationGap, Extent, Feature, InputSolver, InputTask, Method, Needs, Phase,
    Prepared, SolveInput, Solver, WeightTask, Work, refused_by_most,
};
use crate::metric::weigh;
use crate::rtn::shared_outer_scale;
use crate::solved::Solved;

/// Stretch of the sigmoid, ζ and γ of equation 23, so that h reaches 0 and 1.
const ZETA: f32 = 1.1;
const GAMMA: f32 = -0.1;

/// Share of the steps without the regularizer, in which weights move freely.
const WARMUP: f32 = 0.2;

/// First and last exponent β of the regularizer.
const EXPONENTS: (f32, f32) = (20.0, 2.0);

/// Steps of the bisection that inverts h, starting at ±2.
const BISECTIONS: usize = 24;

/// Weights that a thread updates at a time.
const PIECE: usize = 1 << 14;

options! {
    /// AdaRound (arXiv 2004.10568).
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub struct AdaRound {
        /// Steps of each weight.
        iterations: usize = 1000, Count(1_000_000);
        /// Learning rate of Adam.
        rate: f32 = 0.01, Number(1.0);
        /// Weight λ of the regularizer, relative to RTN's error per weight.
        lambda: f32 = 10.0, Number(1e6);
    }
}

impl Method for AdaRound {
    fn name(&self) -> &'static str {
        "adaround"
    }

    fn work(&self) -> Work<'_> {
        Work::Input(self)
    }

    fn tables(&self) -> Vec<Named<'_>> {
        vec![(self.name(), self)]
    }

    fn tables_mut(&mut self) -> Vec<NamedMut<'_>> {
        vec![(self.name(), self)]
    }

    fn needs(&self) -> Needs {
        Needs { text: true, judged: true, ..Needs::default() }
    }

    fn takes(&self, scheme: &Scheme, (rows, cols): (usize, usize), _: bool) -> Result<(), MethodError> {
        Ok(check_scheme(scheme, rows, cols)?)
    }

    fn refuses(&self, feature: Feature) -> Option<&'static str> {
        match feature {
            Feature::StochasticRounding => Some(learned::NOT_STOCHASTIC),
            _ => refused_by_most(feature),
        }
    }

    fn on_gap(&self, gap: CalibrationGap) -> Option<&'static str> {
        Some(learned::on_gap(gap))
    }

    fn buffers(&self, phase: Phase, extent: &Extent<'_>) -> Vec<Buffer> {
        let hessian = extent.inputs * Hessian::bytes_needed(extent.cols);
        let held_out = if extent.held_out { hessian } else { 0 };
        match phase {
            Phase::Prepare => vec![("Hessian", hessian + held_out), ("Hessian, both triangles", hessian)],
            Phase::Correct | Phase::Solve => vec![
                ("Hessian and moments for the comparison with RTN", 2 * hessian + held_out),
                ("weight in f32", 4 * extent.weights()),
                ("learned rounding", SoftRounding::bytes_needed(extent)),
                ("errors and gradient", 8 * extent.weights()),
                ("codes and scales", extent.codes + extent.scales),
            ],
            Phase::Learn => Vec::new(),
        }
    }

    fn arithmetic(&self, extent: &Extent<'_>) -> Arithmetic {
        let (iterations, weights) = (self.iterations as f64, extent.weights() as f64);
        Arithmetic {
            products: iterations * weights * extent.cols as f64,
            steps: iterations * SoftRounding::STEPS * weights,
            ..Arithmetic::default()
        }
    }
}

impl SolveInput for AdaRound {
    fn prepare(&self, task: InputTask) -> Result<Prepared, MethodError> {
        let InputTask { hessian, .. } = task;
        let solver = if hessian.tokens() == 0 {
            Solver::RoundToNearest("no calibration token was routed to it".to_owned())
        } else {
            Solver::Ready(Box::new(Rounder { options: *self, h: hessian.to_dense() }))
        };
        Ok(Prepared { solver, moments: Some(hessian) })
    }
}

/// Second moments of an input, for the weights that read it.
#[derive(Debug)]
struct Rounder {
    options: AdaRound,
    /// H `[cols, cols]`.
    h: Vec<f32>,
}

impl InputSolver for Rounder {
    fn solve(&self, task: &WeightTask<'_>) -> Result<Solved, MethodError> {
        let WeightTask { scheme, rows, cols, w, target, outer, threads, .. } = *task;
        // A layer that is not fused has its own global scale.
        let own = || shared_outer_scale(scheme, target.iter().map(|w| w.abs()));
        let outer = outer.or_else(own);
        let diagonal: Vec<f32> = self.h.iter().step_by(cols + 1).copied().collect();
        let nearest = LearnedWeight::new(scheme, target, cols, &diagonal, outer, false, threads)?;
        let mut soft = SoftRounding::new(nearest, threads);
        let (mut errors, mut gradient) = (vec![0.0; rows * cols], Vec::new());
        soft.nearest(&mut errors, threads);
        let before = self.error(target, &mut errors, &mut gradient, threads);
        if before > 0.0 {
            let factor = (2.0 * (rows * cols) as f64 / before) as f32;
            for step in 0..self.options.iterations {
                soft.values(&mut errors, threads);
                self.error(target, &mut errors, &mut gradient, threads);
                let schedule = Schedule::at(step, self.options.iterations, self.options.lambda);
                soft.step(&gradient, factor, self.options.rate, &schedule, threads);
            }
        }
        let quantized = soft.harden().quantized();
        let mut values = quantized.dequantize()?;
        let after = self.error(target, &mut values, &mut gradient, threads);
        let stats = ErrorStats::of(w, &quantized);
        let note = format!("output error {after:.4e}, {before:.4e} before learning");
        Ok(Solved { output_error: Some(after), notes: vec![note], ..Solved::rounded((quantized, stats)) })
    }
}

impl Rounder {
    /// Replaces `values` by their errors E, and `gradient` by `E H`; returns `tr(E H Eᵀ)`.
    fn error(&self, w: &[f32], values: &mut [f32], gradient: &mut Vec<f32>, threads: usize) -> f64 {
        let cols = self.h.len().isqrt();
        values.iter_mut().zip(w).for_each(|(value, w)| *value -= w);
        weigh(&self.h, cols, values, gradient, threads);
        values.iter().zip(gradient.iter()).map(|(e, g)| f64::from(*e) * f64::from(*g)).sum()
    }
}

/// Regularizer of a step.
#[derive(Clone, Copy, Debug)]
pub struct Schedule {
    /// Number of the step, from 1.
    step: i32,
    /// λ; 0 during the warm-up.
    lambda: f32,
    /// β, an even integer.
    exponent: u32,
}

impl Schedule {
    /// Regularizer of `step`, from 0, of `steps`: none in the first fifth; then β falls linearly from 20 to 2, in
    /// even numbers.
    pub fn at(step: usize, steps: usize, lambda: f32) -> Self {
        let done = step as f32 / steps.max(1) as f32;
        let (first, last) = EXPONENTS;
        let fallen = ((done - WARMUP) / (1.0 - WARMUP)).max(0.0);
        let exponent = 2 * ((first + (last - first) * fallen) / 2.0).round() as u32;
        Schedule { step: step as i32 + 1, lambda: if done < WARMUP { 0.0 } else { lambda }, exponent }
    }
}

/// Weight with values between its two grid neighbours, and the state of Adam.
#[derive(Clone, Debug)]
pub struct SoftRounding {
    weight: LearnedWeight,
    /// Lower neighbour a of each weight, `[rows, cols]`.
    low: Vec<f32>,
    /// Distance b − a to the upper neighbour; 0 for a weight outside the grid, which has one value.
    span: Vec<f32>,
    /// V.
    v: Vec<f32>,
    first: Vec<f32>,
    second: Vec<f32>,
}

impl SoftRounding {
    /// [Steps](Arithmetic::steps) that the values of a weight and a step of Adam cost: two exponentials, a quotient, a root.
    pub const STEPS: f64 = 4.0;

    /// Wraps `weight`, with h(V) initialized to its position between the neighbours.
    pub fn new(mut weight: LearnedWeight, threads: usize) -> Self {
        let len = weight.weight().len();
        let (mut low, mut span) = (vec![0.0; len], vec![0.0; len]);
        weight.choose(|_| false);
        weight.fake_quantize(&mut low, threads);
        weight.choose(|_| true);
        weight.fake_quantize(&mut span, threads);
        weight.reset();
        span.iter_mut().zip(&low).for_each(|(high, low)| *high -= low);
        let mut v = vec![0.0; len];
        let pieces = v.chunks_mut(PIECE).zip(weight.weight().chunks(PIECE));
        for_each(threads, pieces.zip(low.chunks(PIECE)).zip(span.chunks(PIECE)), |(((v, w), low), span)| {
            let place = |((w, low), span): ((&f32, &f32), &f32)| ((w - low) / span).clamp(0.0, 1.0);
            let share: Vec<f32> = w.iter().zip(low).zip(span).map(place).collect();
            invert(&share, v);
        });
        SoftRounding { weight, low, span, v, first: vec![0.0; len], second: vec![0.0; len] }
    }

    /// Writes the values of RTN on the grid to `out`.
    pub fn nearest(&self, out: &mut [f32], threads: usize) {
        self.weight.fake_quantize(out, threads);
    }

    /// Writes `a + h(V)·(b − a)` to `out`.
    pub fn values(&self, out: &mut [f32], threads: usize) {
        let pieces = out.chunks_mut(PIECE).zip(self.v.chunks(PIECE));
        let pieces = pieces.zip(self.low.chunks(PIECE)).zip(self.span.chunks(PIECE));
        for_each(threads, pieces, |(((out, v), low), span)| {
            out.iter_mut().zip(v).for_each(|(out, v)| *out = -v);
            kernels().exp_inplace(out);
            for ((out, low), span) in out.iter_mut().zip(low).zip(span) {
                *out = low + stretched(1.0 / (1.0 + *out)) * span;
            }
        });
    }

    /// Takes an Adam step along the regularizer's gradient plus `factor` times `gradient`, the loss gradient with
    /// respect to [`values`](Self::values).
    pub fn step(&mut self, gradient: &[f32], factor: f32, rate: f32, schedule: &Schedule, threads: usize) {
        let rule = AdamDirection::published(rate, schedule.step);
        let pieces = self.v.chunks_mut(PIECE).zip(self.first.chunks_mut(PIECE));
        let pieces = pieces.zip(self.second.chunks_mut(PIECE)).zip(self.span.chunks(PIECE));
        for_each(threads, pieces.zip(gradient.chunks(PIECE)), |((((v, first), second), span), gradient)| {
            let mut steps: Vec<f32> = v.iter().map(|v| -v).collect();
            kernels().exp_inplace(&mut steps);
            for (i, step) in steps.iter_mut().enumerate() {
                let sigmoid = 1.0 / (1.0 + *step);
                let h = stretched(sigmoid);
                // h is flat where it is clipped.
                let slope = if h > 0.0 && h < 1.0 { sigmoid * (1.0 - sigmoid) * (ZETA - GAMMA) } else { 0.0 };
                let pull = schedule.lambda * regularizer_slope(h, schedule.exponent);
                *step = (factor * gradient[i] * span[i] + pull) * slope;
            }
            kernels().adam_direction(&rule, &mut steps, first, second);
            v.iter_mut().zip(&steps).for_each(|(v, step)| *v -= step);
        });
    }

    /// Returns the weight with every h rounded to 0 or 1.
    pub fn harden(self) -> LearnedWeight {
        let SoftRounding { mut weight, v, .. } = self;
        // h ≥ 1/2 where V ≥ 0: the stretch is symmetric.
        weight.choose(|i| v[i] >= 0.0);
        weight
    }

    /// Memory of a weight of `extent` while its rounding is learned, in bytes.
    pub fn bytes_needed(extent: &Extent<'_>) -> u64 {
        LearnedWeight::bytes_needed(extent.rows, extent.cols, extent.group) + 20 * extent.weights()
    }
}

/// Writes V with `h(V) = share` to `v`. Bisection makes the sign of V exact and equal on every machine. A NaN share
/// gives 0.
fn invert(share: &[f32], v: &mut [f32]) {
    let mut reach = 4.0f32;
    let mut e = vec![0.0; v.len()];
    v.fill(0.0);
    for _ in 0..BISECTIONS {
        reach /= 2.0;
        e.iter_mut().zip(v.iter()).for_each(|(e, v)| *e = -v);
        kernels().exp_inplace(&mut e);
        for ((v, e), share) in v.iter_mut().zip(&e).zip(share) {
            let h = stretched(1.0 / (1.0 + e));
            *v += if *share > h {
                reach
            } else if *share < h {
                -reach
            } else {
                0.0
            };
        }
    }
}

/// Rectified sigmoid, equation 23.
fn stretched(sigmoid: f32) -> f32 {
    (sigmoid * (ZETA - GAMMA) + GAMMA).clamp(0.0, 1.0)
}

/// Derivative of `1 − |2h − 1|^β` with respect to h, for an even β.
fn regularizer_slope(h: f32, exponent: u32) -> f32 {
    let x = 2.0 * h - 1.0;
    -2.0 * exponent as f32 * (1..exponent).fold(1.0, |power, _| power * x)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::testing::values;

    const ROWS: usize = 12;
    const COLS: usize = 32;

    /// Second moments of correlated inputs.
    fn hessian() -> Hessian {
        let noise = values(3, 400 * COLS);
        let correlated = |(i, v): (usize, &f32)| v * 0.3 + noise[i - i % 4];
        let x: Vec<f32> = noise.iter().enumerate().map(correlated).collect();
        let mut hessian = Hessian::new(COLS).unwrap();
        hessian.add(&x, 1);
        hessian
    }

    fn solve(method: AdaRound, scheme: &Scheme, w: &[f32], threads: usize) -> Solved {
        let task = InputTask { hessian: hessian(), drift: None, place: (0, 0), threads };
        let Solver::Ready(solver) = method.prepare(task).unwrap().solver else { unreachable!() };
        let task = WeightTask {
            scheme,
            rows: ROWS,
            cols: COLS,
            w,
            target: w,
            outer: None,
            outputs: None,
            scales: None,
            place: (0, 0),
            threads,
        };
        solver.solve(&task).unwrap()
    }

    #[test]
    fn learned_rounding_errs_less_on_the_inputs_and_moves_no_weight_past_its_neighbours() {
        let w = values(1, ROWS * COLS);
        for name in ["int4-g16", "int3-g32-asym", "mxfp4", "nvfp4", "nf4-g16"] {
            let scheme: Scheme = name.parse().unwrap();
            let still = solve(AdaRound { iterations: 1, rate: 0.0, lambda: 0.0 }, &scheme, &w, 1);
            let learned = solve(AdaRound::default(), &scheme, &w, 1);
            let (still_error, error) = (still.output_error.unwrap(), learned.output_error.unwrap());
            assert!(error < 0.8 * still_error, "{name}: {error} of {still_error}");
            let measured = hessian().loss(&w, &learned.values().unwrap());
            assert!((measured / error - 1.0).abs() < 1e-3, "{name}: {measured} {error}");
            // Scales are unchanged, and every weight takes one of its two neighbours.
            assert_eq!(learned.quantized.scales, still.quantized.scales, "{name}");
            let pairs = still.values().unwrap().into_iter().zip(learned.values().unwrap()).zip(&w);
            for ((nearest, q), w) in pairs {
                assert!(q == nearest || (q - w) * (nearest - w) <= 0.0, "{name}: {w} {nearest} {q}");
            }
        }
    }

    #[test]
    fn bits_do_not_depend_on_threads() {
        let (w, scheme) = (values(5, ROWS * COLS), "int4-g16".parse().unwrap());
        let of = |threads| solve(AdaRound::default(), &scheme, &w, threads).quantized;
        assert!(of(1) == of(3));
    }

    #[test]
    fn the_inverse_meets_h() {
        let share: Vec<f32> = (0..=64).map(|i| i as f32 / 64.0).collect();
        let mut v = vec![0.0; share.len()];
        invert(&share, &mut v);
        for (share, v) in share.iter().zip(v) {
            assert!((stretched(1.0 / (1.0 + (-v).exp())) - share).abs() < 1e-5, "{share} {v}");
        }
    }

    #[test]
    fn the_regularizer_pulls_to_the_nearer_end_and_vanishes_between() {
        for exponent in [2, 8, 20] {
            assert!(regularizer_slope(0.9, exponent) < 0.0 && regularizer_slope(0.1, exponent) > 0.0);
            assert_eq!(regularizer_slope(0.5, exponent), 0.0);
        }
        assert_eq!(Schedule::at(0, 1000, 0.1).lambda, 0.0);
        assert_eq!((Schedule::at(200, 1000, 0.1).exponent, Schedule::at(999, 1000, 0.1).exponent), (20, 2));
    }
}

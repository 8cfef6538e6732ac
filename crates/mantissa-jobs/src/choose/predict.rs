//! Predicted time of a run, from the operations of its plan and the speed of this machine.

use std::ops::Add;
use std::time::Instant;

use mantissa_kernels::{MatMut, MatRef, kernels};
use mantissa_model::LinearInfo;
use mantissa_num::Scheme;
use mantissa_quant::calibrate::CalibrationSet;
use mantissa_quant::{Arithmetic, Plan};

/// Share of the speed of a large matrix product that the products of a run reach: most are smaller, and attention, norms and
/// copies come on top. Measured on ref-8m, as are the constants below (`bench/predict.py`).
const REACHED: f64 = 0.55;

/// Seconds of one thread for a step on a value, with the vector instructions of AVX2.
const STEP: f64 = 0.7e-9;

/// Seconds of one thread for a transition of a trellis.
const TRANSITION: f64 = 0.34e-9;

/// Time of a multiply-add whose columns depend on one another, relative to one of a matrix product.
const COLUMNS: f64 = 2.0;

/// Time of a multiply-add in the forward and backward of a layer, relative to one of a large matrix product: its
/// matrices are of a few hundred tokens, and attention, norms and activations come on top.
const LEARNING: f64 = 1.75;

/// The same in the training of the whole model, whose steps are longer and whose layers need no start and end.
const TRAINING: f64 = 0.9;

/// Multiply-adds of a forward and a backward for each weight and token.
const FORWARD_AND_BACKWARD: f64 = 3.0;

/// Seconds per weight and thread to quantize by rounding, read and write.
const PER_WEIGHT: f64 = 12e-9;

/// Share of the speed of one thread that each of several has.
const SHARED: f64 = 0.85;

/// Seconds of a run whose time is predicted from a rough figure of the processor's speed.
const SHORT: f64 = 2.0;

/// Predicts the seconds of `plan` with `tokens` tokens of calibration; `bench/predict.py` compares it with runs.
pub fn seconds(plan: &Plan, tokens: usize, threads: usize) -> f64 {
    let work = of_methods(plan, tokens) + of_passes(plan, tokens) + of_measurements(plan);
    timed(plan, work, threads)
}

/// Predicts the seconds until the weights of `plan` are written, without the measurements that follow.
pub fn writing_seconds(plan: &Plan, threads: usize) -> f64 {
    let tokens = plan.calibration().map_or(0, CalibrationSet::tokens);
    timed(plan, of_methods(plan, tokens) + of_passes(plan, tokens), threads)
}

/// Returns the seconds of `work`, and of rounding, reading and writing.
fn timed(plan: &Plan, work: Time, threads: usize) -> f64 {
    let fixed = plan.linear_weights() as f64 * PER_WEIGHT;
    let many = if threads > 1 { SHARED * threads as f64 } else { 1.0 };
    let at = |speed: f64| (2.0 * work.products / (REACHED * speed) + work.seconds + fixed) / many;
    // A run of a moment is not worth a measurement that takes as long.
    let roughly = at(speed(96, 4));
    if roughly < SHORT { roughly } else { at(speed(384, 16)) }
}

/// Work of a run: multiply-adds that take the time of those of a matrix product, and seconds of one thread for the rest.
#[derive(Clone, Copy, Default)]
struct Time {
    products: f64,
    seconds: f64,
}

impl Add for Time {
    type Output = Time;

    fn add(self, other: Time) -> Time {
        Time { products: self.products + other.products, seconds: self.seconds + other.seconds }
    }
}

/// Work of transforms and methods on their weights, beside running the model.
fn of_methods(plan: &Plan, tokens: usize) -> Time {
    let windows = plan.calibration();
    let longest = windows.map_or(0, CalibrationSet::longest).max(1);
    let count = tokens.div_ceil(longest).max(1);
    let time = |weights: f64, arithmetic: &Arithmetic| {
        // Whole windows, at least one.
        let tokens_of =
            |(steps, batch): (usize, usize)| (steps * (batch / longest).clamp(1, count) * longest) as f64;
        // Learning begins and ends with the error over all windows.
        let ends = if arithmetic.learning.0 > 0 { 2.0 * tokens as f64 } else { 0.0 };
        let learned = LEARNING * (FORWARD_AND_BACKWARD * tokens_of(arithmetic.learning) + ends);
        let trained = TRAINING * FORWARD_AND_BACKWARD * tokens_of(arithmetic.training);
        Time {
            products: arithmetic.products + COLUMNS * arithmetic.columns + (learned + trained) * weights,
            seconds: STEP * arithmetic.steps + TRANSITION * arithmetic.transitions,
        }
    };
    let of_weight = |(info, scheme): (&LinearInfo, &Scheme)| {
        let (weights, needs) = ((info.rows * info.cols) as f64, plan.needs_of(info));
        // The solution and RTN's are compared by the second moments of the input.
        let judged = if needs.judged && plan.runs_text() { 2.0 * weights * info.cols as f64 } else { 0.0 };
        let judged = Time { products: judged, seconds: 0.0 };
        plan.arithmetic(info, scheme).iter().map(|part| time(weights, part)).fold(judged, Time::add)
    };
    plan.quantized().map(of_weight).fold(Time::default(), Time::add)
}

/// Work of running the model over the calibration text: for the statistics of inputs, Fisher information, and the training
/// of scales.
fn of_passes(plan: &Plan, tokens: usize) -> Time {
    let (tokens, weights) = (tokens as f64, plan.linear_weights() as f64);
    let Some(recipe) = plan.job.recipe().filter(|_| plan.runs_text()) else { return Time::default() };
    let drift = recipe.needs(|needs| needs.drift);
    // A layer runs once to collect statistics, once with its quantized weights, and once more beside the unquantized model.
    let passes = if drift { 3.0 } else { 2.0 };
    let squares = |info: &LinearInfo| (info.cols * info.cols) as f64;
    let has_moments = |info: &&LinearInfo| plan.needs_of(info).text || plan.needs_of(info).judged;
    let calibrated = || plan.quantized().map(|(info, _)| info).filter(has_moments);
    // Second moments are symmetric; the drift has two more matrices.
    let moments = calibrated().map(squares).sum::<f64>() * tokens / 2.0 * if drift { 3.0 } else { 1.0 };
    let all = plan.config.parameters() as f64;
    let differentiated = FORWARD_AND_BACKWARD * tokens * all;
    let fisher = if recipe.needs(|needs| needs.fisher.is_some()) { differentiated } else { 0.0 };
    let tuned = recipe.tuning.map_or(0.0, |options| options.epochs as f64 * differentiated);
    let products = passes * tokens * weights + moments + TRAINING * (fisher + tuned);
    Time { products, seconds: 0.0 }
}

/// Work of the measurements of the output.
fn of_measurements(plan: &Plan) -> Time {
    let all = plan.config.parameters() as f64;
    let evaluated = plan.evaluation().map_or(0.0, |evaluation| {
        // Source and output, and the source in bf16 where that is measured.
        let runs = evaluation.work() / evaluation.text.tokens.max(1) + 1;
        (runs * evaluation.text.tokens) as f64
    });
    let tasks = plan.tasks().map_or(0.0, |tasks| 2.0 * tasks.tokens() as f64);
    Time { products: (evaluated + tasks) * all, seconds: 0.0 }
}

/// Measures the operations per second of one thread in products of matrices of `side` rows and columns: the best of up to
/// `most` runs.
fn speed(side: usize, most: usize) -> f64 {
    // Without vector instructions a run takes a fifth of a second, and one is enough.
    const LONGEST: f64 = 0.1;
    let (a, b) = (vec![0.5f32; side * side], vec![0.25f32; side * side]);
    let mut c = vec![0f32; side * side];
    let (mut best, all) = (f64::INFINITY, Instant::now());
    // The first runs warm up the processor's caches and clock; other programs take some of the rest.
    for _ in 0..most {
        let start = Instant::now();
        let (a, b) = (MatRef::new(&a, side, side), MatRef::new(&b, side, side));
        kernels().gemm_nt(a, b, MatMut::new(&mut c, side, side), false);
        best = best.min(start.elapsed().as_secs_f64());
        if all.elapsed().as_secs_f64() > LONGEST {
            break;
        }
    }
    2.0 * (side * side * side) as f64 / best.max(1e-6)
}

/// Formats a predicted time, which is not exact.
pub fn duration(seconds: f64) -> String {
    match seconds {
        s if s < 10.0 => "under 10 s".to_owned(),
        s if s < 90.0 => format!("about {:.0} s", (s / 5.0).round() * 5.0),
        s if s < 5400.0 => format!("about {:.0} min", s / 60.0),
        s => format!("about {:.1} h", s / 3600.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn predicted_times_are_round() {
        let texts = [3.0, 52.0, 600.0, 10_000.0].map(duration);
        assert_eq!(texts, ["under 10 s", "about 50 s", "about 10 min", "about 2.8 h"]);
    }

    #[test]
    fn the_speed_is_that_of_a_processor() {
        assert!((1e8..1e13).contains(&speed(96, 4)));
        assert!((1e8..1e13).contains(&speed(384, 16)));
    }
}

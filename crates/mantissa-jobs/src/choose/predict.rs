//! Predicted time of a run, from the operations of its plan and the speed of this machine.

use std::time::Instant;

use mantissa_kernels::{MatMut, MatRef, kernels};
use mantissa_quant::Plan;

/// Operations of the solver that take the time of one of a matrix product: its columns depend on one another.
const SOLVER: f64 = 4.0;

/// Seconds per weight and thread to quantize by rounding, read and write.
const PER_WEIGHT: f64 = 12e-9;

/// Share of the speed of one thread that each of several has.
const SHARED: f64 = 0.85;

/// Predicts the seconds of `plan` with `tokens` tokens of calibration, accurate to about a factor of two.
pub fn seconds(plan: &Plan, tokens: usize, threads: usize) -> f64 {
    let (tokens, weights) = (tokens as f64, plan.linear_weights() as f64);
    let recipe = plan.job.recipe();
    let text = recipe.is_some_and(|recipe| recipe.needs(|needs| needs.text));
    let drift = recipe.is_some_and(|recipe| recipe.needs(|needs| needs.drift));
    let calibrated = || plan.quantized().map(|(info, _)| info).filter(|info| plan.needs_of(info).text);
    let squares: f64 = calibrated().map(|info| (info.cols * info.cols) as f64).sum();
    let solved: f64 =
        calibrated().map(|info| (info.rows + info.cols) as f64 * (info.cols * info.cols) as f64).sum();
    let mut operations = 0.0;
    if tokens > 0.0 {
        // A layer runs once to collect statistics, once with its quantized weights, and once more beside the unquantized model.
        let passes = if text { 2.0 } else { 1.0 } + if drift { 1.0 } else { 0.0 };
        operations += passes * 2.0 * tokens * weights;
    }
    if text {
        let statistics = if drift { 3.0 } else { 1.0 };
        operations += statistics * tokens * squares / 2.0 + SOLVER * solved;
    }
    if let Some(evaluation) = plan.evaluation() {
        // Source and output, and the source in bf16 where that is measured.
        let runs = (evaluation.work() / evaluation.text.tokens.max(1) + 1) as f64;
        operations += runs * 2.0 * evaluation.text.tokens as f64 * plan.config.parameters() as f64;
    }
    if let Some(tasks) = plan.tasks() {
        operations += 2.0 * 2.0 * tasks.tokens() as f64 * plan.config.parameters() as f64;
    }
    let many = if threads > 1 { SHARED * threads as f64 } else { 1.0 };
    (operations / speed() + weights * PER_WEIGHT) / many
}

/// Measures the operations per second of one thread in a matrix product.
fn speed() -> f64 {
    const SIDE: usize = 384;
    let (a, b) = (vec![0.5f32; SIDE * SIDE], vec![0.25f32; SIDE * SIDE]);
    let mut c = vec![0f32; SIDE * SIDE];
    let mut best = f64::INFINITY;
    // The first run warms up the processor's caches and clock.
    for _ in 0..4 {
        let start = Instant::now();
        let (a, b) = (MatRef::new(&a, SIDE, SIDE), MatRef::new(&b, SIDE, SIDE));
        kernels().gemm_nt(a, b, MatMut::new(&mut c, SIDE, SIDE), false);
        best = best.min(start.elapsed().as_secs_f64());
    }
    2.0 * (SIDE * SIDE * SIDE) as f64 / best.max(1e-6)
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
        assert!((1e8..1e13).contains(&speed()));
    }
}

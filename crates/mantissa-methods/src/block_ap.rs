//! Block-AP: the first stage of EfficientQAT, which trains all parameters of a decoder layer by its output.
//!
//! "EfficientQAT: Efficient Quantization-Aware Training for Large Language Models" (Chen et al. 2024, arXiv:2407.11062,
//! section 3.2). For the weights W of a layer with scales s and zero points z (equations 1 and 2):
//!
//! ```text
//! minimise over W, s, z:   ‖ f(X'; Ŵ) − f(X; W) ‖²          Ŵ = s (clamp(⌊W/s⌉ + z, q₋, q₊) − z)
//! ```
//!
//! Gradients pass the rounding unchanged where it does not clip. With `u = W/s + z` they are g for W, and for s, as in
//! learned step sizes (Esser et al. 2020, "Learned Step Size Quantization", arXiv:1902.08153, equation 3), `g (⌊u⌉ - u)`
//! inside and `g (q - z)` where the code is clipped. Adam takes the steps. Codes are free, unlike in AutoRound, which
//! chooses between two neighbours. The second stage, E2E-QP, is [`e2e`](crate::e2e): `block-ap-int2-g32+e2e`, whose
//! alias is `efficientqat-int2-g32`.
//!
//! Differences from the paper:
//! - Steps of a weight are in units of its group's scale, so that one rate serves all layers and models.
//! - s and z follow from learned factors of the group's range ([`LearnedWeight`]), which the search of AutoRound begins.
//! - Errors may be measured by the Fisher information of the layer's output ([`Metric`](crate::metric::Metric)).
//! - Rates fall linearly to 0, and it trains on the calibration windows, which are fewer than the paper's 4096.

use mantissa_kernels::Adam;
use mantissa_num::Scheme;
use mantissa_options::{Count, Number, OneOf, Seed, options};

use crate::autoround::LearnedWeight;
use crate::error_stats::ErrorStats;
use crate::learned::{LearnedLayer, LearnsLayers};
use crate::method::{Block, Buffer, CalibrationGap, Extent};
use crate::metric::{ERROR_METRICS, ErrorMetric};
use crate::reconstruction::{Parameters, Step, Steps};
use crate::solved::Solved;

/// Largest change of a factor of a range, relative to its start.
const REACH: f32 = 0.5;

options! {
    /// Block-AP of EfficientQAT (arXiv 2407.11062).
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub struct BlockAp {
        /// Steps of each layer.
        iterations: usize = 400, Count(1_000_000);
        /// First step of a weight, in units of its scale; decays linearly to 0.
        rate: f32 = 0.01, Number(1.0);
        /// First step of the factor of a group's range.
        clip_rate: f32 = 0.002, Number(1.0);
        /// Tokens of a step: whole windows, at least one.
        batch_tokens: usize = 512, Count(1 << 24);
        /// Seed of the order of the windows, and of the targets sampled for the Fisher information.
        seed: u64 = 42, Seed;
        /// Metric of errors of a layer's output.
        metric: ErrorMetric = ErrorMetric::Fisher, OneOf(&ERROR_METRICS);
    }
}

impl LearnsLayers for BlockAp {
    type Layer = Training;

    const NAME: &'static str = "block-ap";
    const NOT_ROTATED: &'static str = "Block-AP cannot rotate inputs while it learns";
    const STEPS: f64 = 3.0;

    fn steps(&self) -> Steps {
        let Self { iterations: count, batch_tokens, seed, .. } = *self;
        Steps { count, batch_tokens, seed }
    }

    fn metric(&self) -> ErrorMetric {
        self.metric
    }

    fn layer(&self) -> Training {
        Training { options: *self, weights: Vec::new() }
    }

    fn gap(gap: CalibrationGap) -> &'static str {
        match gap {
            CalibrationGap::Few => "trained weights may overfit",
            _ => crate::learned::on_gap(gap),
        }
    }

    fn memory(&self, extent: &Extent<'_>) -> Vec<Buffer> {
        let groups = (extent.rows * extent.cols.div_ceil(extent.group.max(1))) as u64;
        // The original, the gradient, its masked copy that becomes the directions, and Adam's state; for both factors of a
        // range the same.
        let bytes = LearnedWeight::bytes_needed(extent.rows, extent.cols, extent.group)
            + (12 + Adam::BYTES) * extent.weights()
            + 2 * (16 + 12 + Adam::BYTES) * groups;
        vec![("weights as they are trained", bytes)]
    }
}

/// Weights of a layer.
#[derive(Debug)]
pub struct Training {
    options: BlockAp,
    weights: Vec<TrainedWeight>,
}

/// Weight in training.
#[derive(Debug)]
struct TrainedWeight {
    weight: LearnedWeight,
    /// Weight and factors before the first step.
    original: Vec<f32>,
    start: Vec<[f32; 2]>,
    weight_adam: Adam,
    clip_adam: Adam,
}

impl TrainedWeight {
    fn new(weight: LearnedWeight) -> Self {
        let (original, start) = (weight.weight().to_vec(), weight.clips().collect::<Vec<_>>());
        let (weight_adam, clip_adam) = (Adam::new(original.len()), Adam::new(2 * start.len()));
        TrainedWeight { weight, original, start, weight_adam, clip_adam }
    }

    /// Takes a step against `gradient` (∂loss/∂dequantized values).
    fn step(&mut self, gradient: &[f32], (rate, clip_rate): (f32, f32), threads: usize) {
        let clip_grad = self.weight.clip_gradients(gradient, threads);
        let mut clip_steps: Vec<f32> = clip_grad.as_flattened().iter().map(|g| *g as f32).collect();
        let mut weight_steps = self.weight.weight_gradients(gradient, threads);
        self.weight_adam.directions(&mut weight_steps, threads);
        self.weight.move_weights(&weight_steps, rate, threads);
        self.clip_adam.directions(&mut clip_steps, threads);
        let mut clips: Vec<[f32; 2]> = self.weight.clips().collect();
        let starts = self.start.as_flattened();
        for ((clip, direction), start) in clips.as_flattened_mut().iter_mut().zip(clip_steps).zip(starts) {
            let (low, high) = (start - REACH * start.abs(), start + REACH * start.abs());
            *clip = (*clip - clip_rate * direction).clamp(low, high);
        }
        self.weight.set_clips(&clips, threads);
    }

    fn reset(&mut self) {
        self.weight.set_weights(&self.original);
        self.weight.reset();
    }

    fn solved(&self) -> Solved {
        let quantized = self.weight.quantized();
        let stats = ErrorStats::of(&self.original, &quantized);
        Solved::rounded((quantized, stats))
    }
}

impl Parameters for Training {
    fn weights(&self) -> usize {
        self.weights.len()
    }

    fn values(&self, index: usize, out: &mut [f32], threads: usize) {
        self.weights[index].weight.fake_quantize(out, threads);
    }

    fn step(&mut self, block: &dyn Block, step: &Step, threads: usize) {
        let falls = 1.0 - step.index as f32 / step.count as f32;
        let rates = (self.options.rate * falls, self.options.clip_rate * falls);
        for (index, weight) in self.weights.iter_mut().enumerate() {
            weight.step(&block.gradient(index), rates, threads);
        }
    }

    fn reset(&mut self) {
        self.weights.iter_mut().for_each(TrainedWeight::reset);
    }
}

impl LearnedLayer for Training {
    fn push(&mut self, weight: LearnedWeight, _: &Scheme, _: usize) {
        self.weights.push(TrainedWeight::new(weight));
    }

    fn solved(&self) -> Vec<Solved> {
        self.weights.iter().map(TrainedWeight::solved).collect()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::testing::learn_mlp as solve;

    const SCHEMES: [&str; 4] = ["int4-g32", "int2-g32-asym", "nvfp4", "nf4-g32"];

    fn options() -> BlockAp {
        BlockAp { iterations: 100, batch_tokens: 96, ..BlockAp::default() }
    }

    fn stored(solved: Vec<Solved>) -> Vec<mantissa_num::Quantized> {
        solved.into_iter().map(|one| one.quantized).collect()
    }

    #[test]
    fn a_layer_errs_less() {
        for name in SCHEMES {
            let (learned, _) = solve(&options(), name, true, 1);
            assert!(learned.after < 0.9 * learned.before, "{name}: {} of {}", learned.after, learned.before);
        }
    }

    #[test]
    fn training_that_is_no_better_is_given_up() {
        for name in SCHEMES {
            let (still, first) = solve(&BlockAp { rate: 0.0, clip_rate: 0.0, ..options() }, name, true, 1);
            assert_eq!(still.after, still.before, "{name}");
            let (wild, solved) = solve(&BlockAp { iterations: 1, rate: 30.0, ..options() }, name, true, 1);
            assert_eq!((wild.before, wild.after), (still.before, still.before), "{name}");
            assert!(stored(solved) == stored(first), "{name}");
        }
    }

    #[test]
    fn bits_do_not_depend_on_threads() {
        for name in ["int2-g32-asym", "nvfp4"] {
            let of = |threads| stored(solve(&options(), name, true, threads).1);
            assert!(of(1) == of(3), "{name}");
        }
    }
}

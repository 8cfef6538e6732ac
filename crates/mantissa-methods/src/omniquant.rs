//! OmniQuant: learnable weight clipping (LWC).
//!
//! "OmniQuant: Omnidirectionally Calibrated Quantization for Large Language Models" (Shao et al., ICLR 2024, arXiv:2308.13137). Weights
//! are rounded to nearest, and the range of each group is learned by block reconstruction:
//!
//! ```text
//! W_q = clamp(⌊W / h⌉ + z, 0, 2^N − 1)        h = (γ·max(W) − β·min(W)) / (2^N − 1)      z = −⌊β·min(W) / h⌉        (equation 2)
//! minimise over p and q, one each per group:   ‖ f(X; W) − f(X'; W_q) ‖²        γ = σ(p), β = σ(q)                  (equation 1)
//! ```
//!
//! by Adam; gradients pass the rounding straight through. X' comes from the quantized layers before.
//!
//! Differences from the paper: symmetric schemes have one factor for both sides, which starts where the group loses least on the
//! inputs ([`LearnedWeight`]) and can grow by 14 %; 200 steps of 512 tokens at a rate that falls from 0.1 to 0 instead of 20 epochs over 128
//! samples at 0.005; the gradient passes the rounding of the zero point too. Learnable equivalent transformation (LET), the paper's
//! second part, is not built: it scales and shifts channels for quantized activations, which is a transform of the model, and the paper
//! quantizes the weights of LLaMA models without it.

use mantissa_kernels::{AdamDirection, kernels};
use mantissa_num::Scheme;
use mantissa_options::{Count, Number, OneOf, Seed, options};

use crate::autoround::LearnedWeight;
use crate::learned::{LearnedLayer, LearnsLayers};
use crate::method::{Block, Buffer, CalibrationGap, Extent};
use crate::metric::{ERROR_METRICS, ErrorMetric};
use crate::reconstruction::{Parameters, Step, Steps};
use crate::solved::Solved;

/// Logit of the factors of whole ranges before the first step, as published: σ(4) = 0.98.
const WHOLE: f32 = 4.0;

/// Logit of the factors of searched ranges before the first step: they can grow by 1 / σ(2) = 1.14.
const SEARCHED: f32 = 2.0;

options! {
    /// OmniQuant's learnable weight clipping (arXiv 2308.13137).
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub struct OmniQuant {
        /// Steps of each layer.
        iterations: usize = 200, Count(1_000_000);
        /// Learning rate of Adam.
        rate: f32 = 0.1, Number(1.0);
        /// Tokens of a step: whole windows, at least one.
        batch_tokens: usize = 512, Count(1 << 24);
        /// Seed of the order of the windows, and of the targets sampled for the Fisher information.
        seed: u64 = 42, Seed;
        /// Metric of errors of a layer's output.
        metric: ErrorMetric = ErrorMetric::Mse, OneOf(&ERROR_METRICS);
    }
}

impl LearnsLayers for OmniQuant {
    type Layer = Clipping;

    const NAME: &'static str = "omniquant";
    const NOT_ROTATED: &'static str = "OmniQuant cannot rotate inputs while it learns";
    const STEPS: f64 = 2.0;

    fn steps(&self) -> Steps {
        let Self { iterations: count, batch_tokens, seed, .. } = *self;
        Steps { count, batch_tokens, seed }
    }

    fn metric(&self) -> ErrorMetric {
        self.metric
    }

    fn layer(&self) -> Clipping {
        Clipping { options: *self, weights: Vec::new() }
    }

    fn gap(gap: CalibrationGap) -> &'static str {
        match gap {
            CalibrationGap::Tokens | CalibrationGap::AllChannels => {
                "the ranges of its layers stay as they begin"
            }
            CalibrationGap::Few => "ranges are learned on less than they can fit",
            CalibrationGap::Channels => "the ranges of their weights are learned from the other channels",
        }
    }

    fn memory(&self, extent: &Extent<'_>) -> Vec<Buffer> {
        let weight = LearnedWeight::bytes_needed(extent.rows, extent.cols, extent.group);
        let groups = (extent.rows * extent.cols.div_ceil(extent.group.max(1))) as u64;
        // Factors and their state; gradients; logits and factors of a step.
        let bytes = weight + groups * (2 * Clips::BYTES + size_of::<[f64; 2]>() + 16) as u64;
        vec![("ranges as they are learned", bytes)]
    }
}

/// Weights of a layer.
#[derive(Debug)]
pub struct Clipping {
    options: OmniQuant,
    weights: Vec<ClippedWeight>,
}

impl Parameters for Clipping {
    fn weights(&self) -> usize {
        self.weights.len()
    }

    fn values(&self, index: usize, out: &mut [f32], threads: usize) {
        self.weights[index].weight.fake_quantize(out, threads);
    }

    fn step(&mut self, block: &dyn Block, step: &Step, threads: usize) {
        let falls = 1.0 - step.index as f32 / step.count as f32;
        let adam = AdamDirection::published(self.options.rate * falls, step.index as i32 + 1);
        for (index, weight) in self.weights.iter_mut().enumerate() {
            weight.step(&block.gradient(index), step.relative, &adam, threads);
        }
    }

    fn reset(&mut self) {
        self.weights.iter_mut().for_each(ClippedWeight::reset);
    }
}

impl LearnedLayer for Clipping {
    fn push(&mut self, weight: LearnedWeight, scheme: &Scheme, threads: usize) {
        self.weights.push(ClippedWeight::new(weight, scheme.format.has_zero(), threads));
    }

    fn solved(&self) -> Vec<Solved> {
        self.weights.iter().map(|clipped| clipped.weight.solved()).collect()
    }
}

/// A weight whose ranges are learned.
#[derive(Debug)]
struct ClippedWeight {
    weight: LearnedWeight,
    /// Logit of all factors before the first step.
    start: f32,
    clips: Clips,
}

/// Factors of the ranges, `bound · σ(logit)` for both sides of each group `[rows, groups, 2]`, and the state of Adam.
#[derive(Debug)]
struct Clips {
    bounds: Vec<f32>,
    logits: Vec<f32>,
    first: Vec<f32>,
    second: Vec<f32>,
}

impl Clips {
    /// Bytes of a factor.
    const BYTES: usize = 4 * size_of::<f32>();
}

impl ClippedWeight {
    /// Starts from nearly whole ranges if `whole`, as published; otherwise from those that `weight` has.
    fn new(weight: LearnedWeight, whole: bool, threads: usize) -> Self {
        let start = if whole { WHOLE } else { SEARCHED };
        let first = sigmoids(&mut [start])[0];
        let bound = |clip: f32| if whole { 1.0 } else { clip / first };
        let bounds: Vec<f32> = weight.clips().flat_map(|clips| clips.map(bound)).collect();
        let count = bounds.len();
        let (first, second) = (vec![0.0; count], vec![0.0; count]);
        let clips = Clips { bounds, logits: vec![start; count], first, second };
        let mut clipped = ClippedWeight { weight, start, clips };
        clipped.put(threads);
        clipped
    }

    /// Sets the weight's ranges from the logits.
    fn put(&mut self, threads: usize) {
        let Clips { bounds, logits, .. } = &self.clips;
        let mut factors = logits.clone();
        sigmoids(&mut factors).iter_mut().zip(bounds).for_each(|(factor, bound)| *factor *= bound);
        self.weight.set_clips(factors.as_chunks().0, threads);
    }

    /// Takes a step of Adam along `factor` times `gradient` (∂loss/∂values of the weight).
    fn step(&mut self, gradient: &[f32], factor: f32, adam: &AdamDirection, threads: usize) {
        let gradients = self.weight.clip_gradients(gradient, threads);
        let Clips { bounds, logits, first, second } = &mut self.clips;
        let mut steps = logits.clone();
        let sides = sigmoids(&mut steps).iter_mut().zip(gradients.as_flattened()).zip(bounds);
        for ((step, &gradient), bound) in sides {
            let sigmoid = *step;
            *step = factor * gradient as f32 * *bound * sigmoid * (1.0 - sigmoid);
        }
        kernels().adam_direction(adam, &mut steps, first, second);
        logits.iter_mut().zip(&steps).for_each(|(logit, step)| *logit -= step);
        self.put(threads);
    }

    /// Returns to the ranges before the first step.
    fn reset(&mut self) {
        self.clips.logits.fill(self.start);
        self.put(1);
    }
}

/// Replaces `logits` by their sigmoids.
fn sigmoids(logits: &mut [f32]) -> &mut [f32] {
    logits.iter_mut().for_each(|logit| *logit = -*logit);
    kernels().exp_inplace(logits);
    logits.iter_mut().for_each(|e| *e = 1.0 / (1.0 + *e));
    logits
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::testing::learn_mlp as solve;

    const SCHEMES: [&str; 6] =
        ["int4-g32", "int4-g32-asym", "int3-g32-asym", "int2-g32-asym", "nvfp4", "nf4-g32"];

    fn options() -> OmniQuant {
        OmniQuant { iterations: 200, batch_tokens: 96, ..OmniQuant::default() }
    }

    fn stored(solved: Vec<Solved>) -> Vec<mantissa_num::Quantized> {
        solved.into_iter().map(|one| one.quantized).collect()
    }

    #[test]
    fn a_layer_errs_less() {
        for (name, signed) in SCHEMES.into_iter().flat_map(|name| [(name, false), (name, true)]) {
            let (learned, _) = solve(&options(), name, signed, 1);
            assert!(learned.after < 0.95 * learned.before, "{name}: {} of {}", learned.after, learned.before);
        }
    }

    #[test]
    fn ranges_that_are_no_better_are_given_up() {
        for name in SCHEMES {
            let (still, first) = solve(&OmniQuant { rate: 0.0, ..options() }, name, true, 1);
            assert_eq!(still.after, still.before, "{name}");
            // A step too long to be of use.
            let (wild, solved) = solve(&OmniQuant { iterations: 1, rate: 30.0, ..options() }, name, true, 1);
            assert_eq!((wild.before, wild.after), (still.before, still.before), "{name}");
            assert!(stored(solved) == stored(first), "{name}");
        }
    }

    #[test]
    fn bits_do_not_depend_on_threads() {
        for name in ["int4-g32-asym", "nvfp4"] {
            let of = |threads| stored(solve(&options(), name, true, threads).1);
            assert!(of(1) == of(3), "{name}");
        }
    }
}

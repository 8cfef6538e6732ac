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

use mantissa_kernels::kernels;
use mantissa_num::Scheme;

use crate::autoround::LearnedWeight;
use crate::learned::{Field, LearnedLayer, LearnsLayers};
use crate::method::{Block, Buffer, Extent, Lack};
use crate::metric::ErrorMetric;
use crate::options::{Key, TableSpec};
use crate::reconstruction::{Parameters, Step, Steps};
use crate::solved::Solved;

/// Decay of Adam's first and second moments, and its ε.
const BETA1: f32 = 0.9;
const BETA2: f32 = 0.999;
const EPSILON: f32 = 1e-8;

/// Logit of the factors of whole ranges before the first step, as published: σ(4) = 0.98.
const WHOLE: f32 = 4.0;

/// Logit of the factors of searched ranges before the first step: they can grow by 1 / σ(2) = 1.14.
const SEARCHED: f32 = 2.0;

const TABLE: TableSpec = TableSpec {
    name: "omniquant",
    keys: &[
        Key { name: "iterations", help: "steps of each layer" },
        Key { name: "rate", help: "learning rate of Adam" },
        Key { name: "batch_tokens", help: "tokens of a step" },
        Key { name: "seed", help: "seed of the order of the windows" },
        Key { name: "metric", help: "metric of errors of a layer's output: mse, fisher" },
    ],
};

/// OmniQuant's learnable weight clipping (arXiv 2308.13137).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OmniQuant {
    /// Steps of each layer.
    pub iterations: usize,
    /// Learning rate of Adam.
    pub rate: f32,
    /// Tokens of a step: as many windows as hold them, at least one.
    pub batch_tokens: usize,
    /// Seed of the order of the windows, and of the targets that the Fisher information draws.
    pub seed: u64,
    /// Metric of the errors that are minimised.
    pub metric: ErrorMetric,
}

impl Default for OmniQuant {
    fn default() -> Self {
        OmniQuant { iterations: 200, rate: 0.1, batch_tokens: 512, seed: 42, metric: ErrorMetric::Mse }
    }
}

impl LearnsLayers for OmniQuant {
    type Layer = Clipping;

    const TABLE: &'static TableSpec = &TABLE;
    const NOT_ROTATED: &'static str = "OmniQuant cannot rotate inputs while it learns";

    fn fields(&mut self) -> Vec<Field<'_>> {
        vec![
            Field::Count("iterations", &mut self.iterations, 1_000_000),
            Field::Number("rate", &mut self.rate, 1.0),
            Field::Count("batch_tokens", &mut self.batch_tokens, 1 << 24),
            Field::Seed(&mut self.seed),
            Field::Metric(&mut self.metric),
        ]
    }

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

    fn gap(lack: Lack) -> &'static str {
        match lack {
            Lack::Tokens | Lack::AllChannels => "the ranges of its layers stay as they begin",
            Lack::Few => "ranges are learned on less than they can fit",
            Lack::Channels => "the ranges of their weights are learned from the other channels",
        }
    }

    fn memory(&self, extent: &Extent<'_>) -> Vec<Buffer> {
        let weight = LearnedWeight::bytes_needed(extent.rows, extent.cols, extent.group);
        let groups = (extent.rows * extent.cols.div_ceil(extent.group.max(1))) as u64;
        // Factors and their state; gradients; logits and factors of a step.
        let bytes = weight + groups * (2 * size_of::<Clip>() + size_of::<[f64; 2]>() + 16) as u64;
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
        let taken = step.index as i32 + 1;
        let falls = 1.0 - step.index as f32 / step.count as f32;
        let rate = self.options.rate * falls * (1.0 - BETA2.powi(taken)).sqrt() / (1.0 - BETA1.powi(taken));
        for (index, weight) in self.weights.iter_mut().enumerate() {
            weight.step(&block.gradient(index), step.relative, rate, threads);
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
    /// Factors of the ranges, `[rows, groups]`.
    clips: Vec<[Clip; 2]>,
}

/// The factor of one side of a group's range, `bound · σ(logit)`, and the state of Adam.
#[derive(Clone, Copy, Debug)]
struct Clip {
    bound: f32,
    logit: f32,
    first: f32,
    second: f32,
}

impl ClippedWeight {
    /// Starts from nearly whole ranges if `whole`, as published; otherwise from those that `weight` has.
    fn new(weight: LearnedWeight, whole: bool, threads: usize) -> Self {
        let start = if whole { WHOLE } else { SEARCHED };
        let first = sigmoids(&mut [start])[0];
        let side = |clip: f32| {
            let bound = if whole { 1.0 } else { clip / first };
            Clip { bound, logit: start, first: 0.0, second: 0.0 }
        };
        let clips = weight.clips().map(|clips| clips.map(side)).collect();
        let mut clipped = ClippedWeight { weight, start, clips };
        clipped.put(threads);
        clipped
    }

    /// Sets the weight's ranges to those of the logits.
    fn put(&mut self, threads: usize) {
        let clips = self.clips.as_flattened();
        let mut factors: Vec<f32> = clips.iter().map(|clip| clip.logit).collect();
        sigmoids(&mut factors).iter_mut().zip(clips).for_each(|(factor, clip)| *factor *= clip.bound);
        self.weight.set_clips(factors.as_chunks().0, threads);
    }

    /// Takes a step of Adam along `factor` times `gradient`, that of the loss by the weight's values.
    fn step(&mut self, gradient: &[f32], factor: f32, rate: f32, threads: usize) {
        let gradients = self.weight.clip_gradients(gradient, threads);
        let clips = self.clips.as_flattened_mut();
        let mut logits: Vec<f32> = clips.iter().map(|clip| clip.logit).collect();
        let sides = clips.iter_mut().zip(gradients.as_flattened()).zip(sigmoids(&mut logits));
        for ((clip, &gradient), &mut sigmoid) in sides {
            let g = factor * gradient as f32 * clip.bound * sigmoid * (1.0 - sigmoid);
            clip.first = BETA1 * clip.first + (1.0 - BETA1) * g;
            clip.second = BETA2 * clip.second + (1.0 - BETA2) * g * g;
            clip.logit -= rate * clip.first / (clip.second.sqrt() + EPSILON);
        }
        self.put(threads);
    }

    /// Returns to the ranges before the first step.
    fn reset(&mut self) {
        let start = self.start;
        self.clips.as_flattened_mut().iter_mut().for_each(|clip| clip.logit = start);
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
    use crate::Method;
    use crate::options::Options;
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

    #[test]
    fn settings_read_back() {
        let text = "iterations = 7\nrate = 0.125\nbatch_tokens = 99\nseed = 3\nmetric = \"fisher\"";
        let mut set = OmniQuant::default();
        set.set(TABLE.name, Options::new(&text.parse().unwrap())).unwrap();
        let metric = ErrorMetric::Fisher;
        assert_eq!(set, OmniQuant { iterations: 7, rate: 0.125, batch_tokens: 99, seed: 3, metric });
        let keys =
            set.settings().into_iter().map(|setting| (setting.key.to_owned(), setting.value)).collect();
        let mut again = OmniQuant::default();
        again.set(TABLE.name, Options::new(&keys)).unwrap();
        assert_eq!(again, set);
    }
}

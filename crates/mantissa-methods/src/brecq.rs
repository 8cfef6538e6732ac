//! BRECQ: learned rounding up or down, for the weights of a decoder layer together.
//!
//! "BRECQ: Pushing the Limit of Post-Training Quantization by Block Reconstruction" (Li et al., ICLR 2021,
//! arXiv:2102.05426). The output of a block is reconstructed, here of a decoder layer. A block is larger than a linear
//! layer, so that weights compensate for one another, and smaller than the model, so that it does not overfit the
//! calibration set. With the block's output z and the soft rounding W̃(V) of [AdaRound](crate::adaround),
//!
//! ```text
//! minimise over V:   E[Δzᵀ H Δz] + λ Σ (1 − |2·h(V) − 1|^β)       Δz = f(X'; W̃(V)) − f(X; W)
//! ```
//!
//! by Adam on a few windows a step. H is the Fisher information of the output (section 3.3); X' comes from the
//! quantized layers before the block.
//!
//! Differences from the paper:
//! - H is the [whole matrix](crate::metric::Metric), averaged over tokens, instead of the diagonal of each sample.
//! - The first term is divided by its value at RTN per weight of the layer, so that one λ serves all layers.
//! - Ranges minimise the weight error under the mean square of the inputs ([`LearnedWeight`]).
//! - There are fewer steps.
//! - Step sizes of activations and bits per layer are not learned.

use mantissa_num::Scheme;
use mantissa_options::{Count, Number, OneOf, Seed, options};

use crate::adaround::{Schedule, SoftRounding};
use crate::autoround::LearnedWeight;
use crate::learned::{LearnedLayer, LearnsLayers};
use crate::method::{Block, Buffer, Extent};
use crate::metric::{ERROR_METRICS, ErrorMetric};
use crate::reconstruction::{Parameters, Step, Steps};
use crate::solved::Solved;

options! {
    /// BRECQ (arXiv 2102.05426).
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub struct Brecq {
        /// Steps of each layer.
        iterations: usize = 600, Count(1_000_000);
        /// Learning rate of Adam.
        rate: f32 = 0.2, Number(1.0);
        /// Weight λ of the regularizer, relative to RTN's error per weight.
        lambda: f32 = 50.0, Number(1e6);
        /// Tokens of a step: whole windows, at least one.
        batch_tokens: usize = 512, Count(1 << 24);
        /// Seed of the order of the windows, and of the targets sampled for the Fisher information.
        seed: u64 = 42, Seed;
        /// Metric of errors of a layer's output.
        metric: ErrorMetric = ErrorMetric::Fisher, OneOf(&ERROR_METRICS);
    }
}

impl LearnsLayers for Brecq {
    type Layer = Rounding;

    const NAME: &'static str = "brecq";
    const NOT_ROTATED: &'static str = "BRECQ cannot rotate inputs while it learns";
    const STEPS: f64 = 1.0 + SoftRounding::STEPS;

    fn steps(&self) -> Steps {
        let Self { iterations: count, batch_tokens, seed, .. } = *self;
        Steps { count, batch_tokens, seed }
    }

    fn metric(&self) -> ErrorMetric {
        self.metric
    }

    fn layer(&self) -> Rounding {
        Rounding { options: *self, soft: Vec::new(), hard: Vec::new(), elements: 0, begun: false }
    }

    fn memory(&self, extent: &Extent<'_>) -> Vec<Buffer> {
        vec![("rounding as it is learned", SoftRounding::bytes_needed(extent))]
    }
}

/// The weights of a layer.
#[derive(Debug)]
pub struct Rounding {
    options: Brecq,
    /// Weights before they are rounded.
    soft: Vec<SoftRounding>,
    /// Rounded weights.
    hard: Vec<LearnedWeight>,
    /// Number of elements of all weights.
    elements: usize,
    /// True after learning has begun.
    begun: bool,
}

impl Parameters for Rounding {
    fn weights(&self) -> usize {
        self.soft.len() + self.hard.len()
    }

    fn values(&self, index: usize, out: &mut [f32], threads: usize) {
        match self.hard.get(index) {
            Some(weight) => weight.fake_quantize(out, threads),
            None if self.begun => self.soft[index].values(out, threads),
            None => self.soft[index].nearest(out, threads),
        }
    }

    fn begin(&mut self) {
        self.begun = true;
    }

    fn step(&mut self, block: &dyn Block, step: &Step, threads: usize) {
        let schedule = Schedule::at(step.index, step.count, self.options.lambda);
        // The regularizer is a sum over elements: the relative error is scaled to the same size.
        let factor = step.relative * self.elements as f32;
        for (index, weight) in self.soft.iter_mut().enumerate() {
            weight.step(&block.gradient(index), factor, self.options.rate, &schedule, threads);
        }
    }

    fn finish(&mut self) {
        self.hard.extend(self.soft.drain(..).map(SoftRounding::harden));
    }

    fn reset(&mut self) {
        self.hard.iter_mut().for_each(LearnedWeight::reset);
    }
}

impl LearnedLayer for Rounding {
    fn push(&mut self, weight: LearnedWeight, _: &Scheme, threads: usize) {
        self.elements += weight.weight().len();
        self.soft.push(SoftRounding::new(weight, threads));
    }

    fn solved(&self) -> Vec<Solved> {
        self.hard.iter().map(LearnedWeight::solved).collect()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::testing::{Mlp, learn_mlp as solve};

    const SCHEMES: [&str; 5] = ["int4-g32", "int3-g32-asym", "mxfp4", "nvfp4", "nf4-g32"];

    fn options() -> Brecq {
        Brecq { iterations: 300, rate: 0.01, lambda: 1.0, batch_tokens: 96, ..Brecq::default() }
    }

    #[test]
    fn a_layer_errs_less_and_no_weight_moves_past_its_neighbours() {
        for (name, signed) in SCHEMES.into_iter().flat_map(|name| [(name, false), (name, true)]) {
            let (learned, solved) = solve(&options(), name, signed, 1);
            assert!(learned.after < 0.9 * learned.before, "{name}: {} of {}", learned.after, learned.before);
            let (_, still) = solve(&Brecq { iterations: 1, rate: 0.0, ..options() }, name, signed, 1);
            for (index, (solved, still)) in solved.iter().zip(&still).enumerate() {
                assert_eq!(solved.quantized.scales, still.quantized.scales, "{name}");
                let values = still.values().unwrap().into_iter().zip(solved.values().unwrap());
                for ((nearest, q), w) in values.zip(Mlp::new(7).weight(index)) {
                    assert!(q == nearest || (q - w) * (nearest - w) <= 0.0, "{name}: {w} {nearest} {q}");
                }
            }
        }
    }

    #[test]
    fn rounding_that_is_no_better_is_given_up() {
        let (learned, solved) = solve(&Brecq { rate: 0.0, ..options() }, "int4-g32", false, 1);
        assert_eq!(learned.after, learned.before);
        let (_, still) = solve(&Brecq { iterations: 1, rate: 0.0, ..options() }, "int4-g32", false, 1);
        let codes = |all: Vec<Solved>| all.into_iter().map(|one| one.quantized).collect::<Vec<_>>();
        assert!(codes(solved) == codes(still));
    }

    #[test]
    fn bits_do_not_depend_on_threads() {
        let of = |threads| {
            let (_, solved) = solve(&options(), "int4-g32", true, threads);
            solved.into_iter().map(|one| one.quantized).collect::<Vec<_>>()
        };
        assert!(of(1) == of(3));
    }
}

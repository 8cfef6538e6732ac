//! AutoRound as a method of recipes.

use mantissa_kernels::Adam;
use mantissa_num::{Code, Scheme};
use mantissa_options::{Count, Number, OneOf, Seed, options};

use super::{LearnedWeight, Update};
use crate::learned::{LearnedLayer, LearnsLayers};
use crate::method::{Block, Buffer, CalibrationGap, Extent};
use crate::metric::{ERROR_METRICS, ErrorMetric};
use crate::reconstruction::{Parameters, Step, Steps};
use crate::solved::Solved;

options! {
    /// AutoRound (arXiv 2309.05516).
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub struct AutoRound {
        /// Direction of the steps of offsets.
        update: Update = Update::Sign;
        /// Steps of each layer.
        iterations: usize = 200, Count(1_000_000);
        /// First step of a weight's offset; 0.0 for 1 / iterations (adam: 4 / iterations).
        rate: f32 = 0.0, Number(0.5);
        /// First step of a group's range, as a share of it; 0.0 for a fifth of the rate (adam: .2 / iterations), because a
        /// range moves all weights of its group.
        clip_rate: f32 = 0.0, Number(0.5);
        /// Tokens of a step: whole windows, at least one.
        batch_tokens: usize = 512, Count(1 << 24);
        /// Seed of the order of the windows, and of the targets sampled for the Fisher information.
        seed: u64 = 42, Seed;
        /// Metric of errors of a layer's output.
        metric: ErrorMetric = ErrorMetric::Fisher, OneOf(&ERROR_METRICS);
    }
}

impl AutoRound {
    /// AutoRound with its defaults for weights of `scheme`. Scales that are powers of two are not learned: they take more
    /// steps of fewer tokens.
    pub fn of(scheme: &Scheme) -> Self {
        let powers = scheme.format.scale().is_some_and(|tree| tree.code == Code::E8m0);
        match powers {
            true => AutoRound { iterations: 600, batch_tokens: 256, ..Self::default() },
            false => Self::default(),
        }
    }

    /// The same with steps along the directions of Adam.
    pub fn adam(scheme: &Scheme) -> Self {
        AutoRound { update: Update::Adam, ..Self::of(scheme) }
    }

    /// First steps of offsets and of ranges.
    fn rates(&self) -> (f32, f32) {
        let even = 1.0 / self.iterations.max(1) as f32;
        let default = match self.update {
            Update::Sign => even,
            Update::Adam => 4.0 * even,
        };
        let rate = if self.rate > 0.0 { self.rate } else { default };
        let by_signs = if self.update == Update::Sign { rate } else { even };
        (rate, if self.clip_rate > 0.0 { self.clip_rate } else { by_signs / 5.0 })
    }
}

impl LearnsLayers for AutoRound {
    type Layer = Rounding;

    const NAME: &'static str = "autoround";
    const NOT_ROTATED: &'static str = "AutoRound cannot rotate inputs while it learns";
    const STEPS: f64 = 2.0;

    fn alias(&self) -> &'static str {
        match self.update {
            Update::Sign => Self::NAME,
            Update::Adam => "autoround-adam",
        }
    }

    fn steps(&self) -> Steps {
        let Self { iterations: count, batch_tokens, seed, .. } = *self;
        Steps { count, batch_tokens, seed }
    }

    fn metric(&self) -> ErrorMetric {
        self.metric
    }

    fn layer(&self) -> Rounding {
        Rounding { options: *self, weights: Vec::new(), adam: Vec::new() }
    }

    fn gap(gap: CalibrationGap) -> &'static str {
        match gap {
            CalibrationGap::Tokens | CalibrationGap::AllChannels => "its layers keep their initial rounding",
            CalibrationGap::Few => "learned rounding may overfit",
            CalibrationGap::Channels => "their weights keep their initial rounding",
        }
    }

    fn memory(&self, extent: &Extent<'_>) -> Vec<Buffer> {
        let bytes = LearnedWeight::bytes_needed(extent.rows, extent.cols, extent.group);
        // The state, and a direction.
        let moments = ("moments of gradients", (Adam::BYTES + 4) * extent.weights());
        let adam_buffer = (self.update == Update::Adam).then_some(moments);
        std::iter::once(("learned rounding", bytes)).chain(adam_buffer).collect()
    }
}

/// Weights of a layer.
#[derive(Debug)]
pub struct Rounding {
    options: AutoRound,
    weights: Vec<LearnedWeight>,
    /// State of each weight's steps; empty with signs.
    adam: Vec<Adam>,
}

impl Parameters for Rounding {
    fn weights(&self) -> usize {
        self.weights.len()
    }

    fn values(&self, index: usize, out: &mut [f32], threads: usize) {
        self.weights[index].fake_quantize(out, threads);
    }

    fn step(&mut self, block: &dyn Block, step: &Step, threads: usize) {
        let falls = 1.0 - step.index as f32 / step.count as f32;
        let (rate, clip_rate) = self.options.rates();
        let (rate, clip_rate) = (rate * falls, clip_rate * falls);
        for (index, weight) in self.weights.iter_mut().enumerate() {
            let gradient = block.gradient(index);
            match self.adam.get_mut(index) {
                None => weight.step(&gradient, rate, clip_rate, threads),
                Some(adam) => {
                    let mut directions = gradient.to_vec();
                    adam.directions(&mut directions, threads);
                    weight.step_along(&gradient, &directions, rate, clip_rate, threads);
                }
            }
        }
    }

    fn reset(&mut self) {
        self.weights.iter_mut().for_each(LearnedWeight::reset);
    }
}

impl LearnedLayer for Rounding {
    fn push(&mut self, weight: LearnedWeight, _: &Scheme, _: usize) {
        if self.options.update == Update::Adam {
            self.adam.push(Adam::new(weight.weight().len()));
        }
        self.weights.push(weight);
    }

    fn solved(&self) -> Vec<Solved> {
        self.weights.iter().map(LearnedWeight::solved).collect()
    }
}

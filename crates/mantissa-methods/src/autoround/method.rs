//! AutoRound as a method of recipes.

use mantissa_kernels::Adam;
use mantissa_num::Scheme;

use super::{AutoRoundOptions, LearnedWeight, Update};
use crate::learned::{Field, LearnedLayer, LearnsLayers};
use crate::method::{Block, Buffer, Extent, Lack};
use crate::metric::ErrorMetric;
use crate::options::{Key, TableSpec};
use crate::reconstruction::{Parameters, Step, Steps};
use crate::solved::Solved;

const TABLE: TableSpec = TableSpec {
    name: "autoround",
    keys: &[
        Key { name: "iterations", help: "steps of each layer" },
        Key {
            name: "rate",
            help: "first step of a weight's offset; 0.0 for 1 / iterations (adam: 4 / iterations)",
        },
        Key {
            name: "clip_rate",
            help: "first step of a group's range; 0.0 for a fifth of the rate (adam: .2 / iterations)",
        },
        Key { name: "batch_tokens", help: "tokens of a step" },
        Key { name: "seed", help: "seed of the order of the windows" },
        Key { name: "metric", help: "metric of errors of a layer's output: fisher, mse" },
    ],
};

/// AutoRound (arXiv 2309.05516).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct AutoRound {
    /// Options.
    pub options: AutoRoundOptions,
}

impl AutoRound {
    /// AutoRound with its defaults for weights of `scheme`.
    pub fn of(scheme: &Scheme) -> Self {
        AutoRound { options: AutoRoundOptions::of(scheme) }
    }

    /// The same with steps along the directions of Adam.
    pub fn adam(scheme: &Scheme) -> Self {
        AutoRound { options: AutoRoundOptions { update: Update::Adam, ..AutoRoundOptions::of(scheme) } }
    }
}

impl LearnsLayers for AutoRound {
    type Layer = Rounding;

    const TABLE: &'static TableSpec = &TABLE;
    const NOT_ROTATED: &'static str = "AutoRound cannot rotate inputs while it learns";

    fn alias(&self) -> &'static str {
        match self.options.update {
            Update::Sign => TABLE.name,
            Update::Adam => "autoround-adam",
        }
    }

    fn fields(&mut self) -> Vec<Field<'_>> {
        let options = &mut self.options;
        vec![
            Field::Count("iterations", &mut options.iterations, 1_000_000),
            Field::Number("rate", &mut options.rate, 0.5),
            Field::Number("clip_rate", &mut options.clip_rate, 0.5),
            Field::Count("batch_tokens", &mut options.batch_tokens, 1 << 24),
            Field::Seed(&mut options.seed),
            Field::Metric(&mut options.metric),
        ]
    }

    fn steps(&self) -> Steps {
        let AutoRoundOptions { iterations: count, batch_tokens, seed, .. } = self.options;
        Steps { count, batch_tokens, seed }
    }

    fn metric(&self) -> ErrorMetric {
        self.options.metric
    }

    fn layer(&self) -> Rounding {
        Rounding { options: self.options, weights: Vec::new(), adam: Vec::new() }
    }

    fn gap(lack: Lack) -> &'static str {
        match lack {
            Lack::Tokens | Lack::AllChannels => "its layers keep their initial rounding",
            Lack::Few => "learned rounding may overfit",
            Lack::Channels => "their weights keep their initial rounding",
        }
    }

    fn memory(&self, extent: &Extent<'_>) -> Vec<Buffer> {
        let bytes = LearnedWeight::bytes_needed(extent.rows, extent.cols, extent.group);
        // The state, and a direction.
        let moments = ("moments of gradients", (Adam::BYTES + 4) * extent.weights());
        let of_adam = (self.options.update == Update::Adam).then_some(moments);
        std::iter::once(("learned rounding", bytes)).chain(of_adam).collect()
    }
}

/// Weights of a layer.
#[derive(Debug)]
pub struct Rounding {
    options: AutoRoundOptions,
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

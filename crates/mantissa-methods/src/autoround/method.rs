//! AutoRound as a method of recipes.

use mantissa_num::Scheme;

use super::adam::Adam;
use super::{AutoRoundOptions, LearnedWeight, Update, check_scheme};
use crate::error::MethodError;
use crate::method::{
    Block, Buffer, Extent, Feature, Fisher, Lack, LayerSolver, Learned, Method, Needs, Phase, Run,
    SolveLayer, WeightTask, Work, refused_by_most,
};
use crate::metric::ERROR_METRICS;
use crate::options::{Key, OptionError, Options, Setting, TableSpec, name_of, shortest};
use crate::reconstruction::{Parameters, Step, Steps, error, learn};
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

impl Method for AutoRound {
    fn name(&self) -> &'static str {
        "autoround"
    }

    fn work(&self) -> Work<'_> {
        Work::Layer(self)
    }

    fn recipe_name(&self) -> &'static str {
        match self.options.update {
            Update::Sign => self.name(),
            Update::Adam => "autoround-adam",
        }
    }

    fn tables(&self) -> &'static [TableSpec] {
        &[TABLE]
    }

    fn set(&mut self, _: &str, from: Options<'_>) -> Result<(), OptionError> {
        let options = &mut self.options;
        options.iterations = from.count("iterations", 1_000_000)?.unwrap_or(options.iterations);
        options.batch_tokens = from.count("batch_tokens", 1 << 24)?.unwrap_or(options.batch_tokens);
        options.rate = from.number("rate", 0.5)?.unwrap_or(options.rate);
        options.clip_rate = from.number("clip_rate", 0.5)?.unwrap_or(options.clip_rate);
        options.seed = from.seed()?.unwrap_or(options.seed);
        options.metric = from.one_of("metric", &ERROR_METRICS)?.unwrap_or(options.metric);
        Ok(())
    }

    fn settings(&self) -> Vec<Setting> {
        let AutoRoundOptions { iterations, rate, clip_rate, batch_tokens, seed, metric, .. } = self.options;
        let set = |key, value: toml::Value| Setting::new(TABLE.name, key, value);
        vec![
            set("iterations", (iterations as i64).into()),
            set("rate", shortest(rate).into()),
            set("clip_rate", shortest(clip_rate).into()),
            set("batch_tokens", (batch_tokens as i64).into()),
            set("seed", (seed as i64).into()),
            set("metric", name_of(&metric, &ERROR_METRICS).into()),
        ]
    }

    fn needs(&self) -> Needs {
        let AutoRoundOptions { metric, seed, .. } = self.options;
        Needs { fisher: Fisher::of_layers(metric, seed), ..self.work().needs() }
    }

    fn takes(&self, scheme: &Scheme, (rows, cols): (usize, usize), _: bool) -> Result<(), MethodError> {
        Ok(check_scheme(scheme, rows, cols)?)
    }

    fn refuses(&self, feature: Feature) -> Option<&'static str> {
        match feature {
            Feature::StochasticRounding => Some("it does not support stochastic rounding"),
            Feature::RotatedInputs => Some("AutoRound cannot rotate inputs while it trains"),
            _ => refused_by_most(feature),
        }
    }

    fn lacking(&self, lack: Lack) -> Option<&'static str> {
        Some(match lack {
            Lack::Tokens | Lack::AllChannels => "its layers keep their initial rounding",
            Lack::Few => "learned rounding may overfit",
            Lack::Channels => "their weights keep their initial rounding",
        })
    }

    fn buffers(&self, phase: Phase, extent: &Extent<'_>) -> Vec<Buffer> {
        let bytes = LearnedWeight::bytes_needed(extent.rows, extent.cols, extent.group);
        if phase != Phase::Learn {
            return Vec::new();
        }
        let mut buffers = vec![("learned rounding", bytes)];
        if self.options.update == Update::Adam {
            buffers.push(("moments of gradients", Adam::BYTES * extent.weights()));
        }
        buffers
    }
}

impl SolveLayer for AutoRound {
    fn begin(&self) -> Box<dyn LayerSolver> {
        Box::new(Rounding { options: self.options, weights: Vec::new(), adam: Vec::new() })
    }

    fn batch_tokens(&self) -> usize {
        self.options.batch_tokens
    }
}

/// Weights of a layer.
struct Rounding {
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
                    let directions = adam.directions(&gradient, threads);
                    weight.step_along(&gradient, &directions, rate, clip_rate, threads);
                }
            }
        }
    }

    fn reset(&mut self) {
        self.weights.iter_mut().for_each(LearnedWeight::reset);
    }
}

impl LayerSolver for Rounding {
    fn add(&mut self, task: &WeightTask<'_>, h: &[f32], signed: bool) -> Result<(), MethodError> {
        let WeightTask { scheme, w, cols, outer, threads, .. } = *task;
        self.weights.push(LearnedWeight::new(scheme, w, cols, h, outer, signed, threads)?);
        if self.options.update == Update::Adam {
            self.adam.push(Adam::new(w.len()));
        }
        Ok(())
    }

    fn learn(&mut self, block: &mut dyn Block, run: &mut Run<'_>) -> Result<Learned, MethodError> {
        let AutoRoundOptions { iterations: count, batch_tokens, seed, .. } = self.options;
        learn(self, block, run, &Steps { count, batch_tokens, seed })
    }

    fn error(&mut self, block: &mut dyn Block, run: &mut Run<'_>) -> Result<f64, MethodError> {
        error(block, run, self.options.batch_tokens)
    }

    fn dequantize(&self, index: usize, out: &mut [f32], threads: usize) {
        if let Some(weight) = self.weights.get(index) {
            weight.fake_quantize(out, threads);
        }
    }

    fn finish(self: Box<Self>) -> Vec<Solved> {
        self.weights.iter().map(LearnedWeight::solved).collect()
    }
}

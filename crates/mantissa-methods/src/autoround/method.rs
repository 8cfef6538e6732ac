//! AutoRound as a method of recipes.

use mantissa_num::Scheme;

use super::{AutoRoundOptions, LearnedWeight, check_scheme};
use crate::error::MethodError;
use crate::error_stats::ErrorStats;
use crate::method::{
    Block, Buffer, Extent, Feature, Fisher, Lack, LayerSolver, Learned, Method, Needs, Phase, Run,
    SolveLayer, WeightTask, Work, refused_by_most,
};
use crate::metric::{ERROR_METRICS, ErrorMetric};
use crate::options::{Key, OptionError, Options, Setting, TableSpec, name_of, shortest};
use crate::reconstruction::{Parameters, Step, Steps, error, learn};
use crate::solved::Solved;

const TABLE: TableSpec = TableSpec {
    name: "autoround",
    keys: &[
        Key { name: "iterations", help: "steps of each layer" },
        Key { name: "rate", help: "first step of a weight's offset; 0.0 for 1 / iterations" },
        Key { name: "clip_rate", help: "first step of a group's range; 0.0 for a fifth of the rate" },
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
}

impl Method for AutoRound {
    fn name(&self) -> &'static str {
        "autoround"
    }

    fn work(&self) -> Work<'_> {
        Work::Layer(self)
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
        let AutoRoundOptions { iterations, rate, clip_rate, batch_tokens, seed, metric } = self.options;
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
        let fisher = (metric == ErrorMetric::Fisher).then_some(Fisher::Layers { seed });
        Needs { text: true, judged: true, gradients: true, fisher, ..Needs::default() }
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
        Vec::from_iter((phase == Phase::Learn).then_some(("learned rounding", bytes)))
    }
}

impl SolveLayer for AutoRound {
    fn begin(&self) -> Box<dyn LayerSolver> {
        Box::new(Rounding { options: self.options, weights: Vec::new() })
    }

    fn batch_tokens(&self) -> usize {
        self.options.batch_tokens
    }
}

/// Weights of a layer.
struct Rounding {
    options: AutoRoundOptions,
    weights: Vec<LearnedWeight>,
}

impl Parameters for Rounding {
    fn weights(&self) -> usize {
        self.weights.len()
    }

    fn values(&self, index: usize, out: &mut [f32], threads: usize) {
        self.weights[index].fake_quantize(out, threads);
    }

    fn step(&mut self, block: &dyn Block, step: &Step, threads: usize) {
        let AutoRoundOptions { iterations, rate, clip_rate, .. } = self.options;
        let rate = if rate > 0.0 { rate } else { 1.0 / iterations.max(1) as f32 };
        let clip_rate = if clip_rate > 0.0 { clip_rate } else { rate / 5.0 };
        let falls = 1.0 - step.index as f32 / step.count as f32;
        for (index, weight) in self.weights.iter_mut().enumerate() {
            weight.step(&block.gradient(index), rate * falls, clip_rate * falls, threads);
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
        let solved = |weight: LearnedWeight| {
            let quantized = weight.quantized();
            let stats = ErrorStats::of(weight.weight(), &quantized);
            Solved::rounded((quantized, stats))
        };
        self.weights.into_iter().map(solved).collect()
    }
}

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
//! inside and `g (q - z)` where the code is clipped. Adam takes the steps. Codes are free, unlike those of AutoRound, which
//! chooses between two neighbours. The second stage, E2E-QP, is [`e2e`](crate::e2e): `block-ap-int2-g32+e2e`, whose
//! alias is `efficientqat-int2-g32`.
//!
//! Differences from the paper:
//! - Steps of a weight are in units of its group's scale, so that one rate serves all layers and models.
//! - s and z follow from learned factors of the group's range ([`LearnedWeight`]), which the search of AutoRound begins.
//! - Errors may be measured by the Fisher information of the layer's output ([`Metric`](crate::metric::Metric)).
//! - Rates fall linearly to 0, and the windows are those of a calibration: fewer than the paper's 4096.

use mantissa_num::Scheme;

use crate::autoround::{Adam, LearnedWeight, check_scheme};
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
    name: "block-ap",
    keys: &[
        Key { name: "iterations", help: "steps of each layer" },
        Key { name: "rate", help: "first step of a weight, in units of its scale" },
        Key { name: "clip_rate", help: "first step of the factor of a group's range" },
        Key { name: "batch_tokens", help: "tokens of a step" },
        Key { name: "seed", help: "seed of the order of the windows" },
        Key { name: "metric", help: "metric of errors of a layer's output: fisher, mse" },
    ],
};

/// Largest change of a factor of a range, relative to its start.
const REACH: f32 = 0.5;

/// Block-AP of EfficientQAT (arXiv 2407.11062).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BlockAp {
    /// Steps of each layer.
    pub iterations: usize,
    /// First step of a weight, in units of its scale; falls linearly to 0.
    pub rate: f32,
    /// First step of the factor of a group's range.
    pub clip_rate: f32,
    /// Tokens of a step: as many windows as hold them, at least one.
    pub batch_tokens: usize,
    /// Seed of the order of the windows, and of the targets that the Fisher information draws.
    pub seed: u64,
    /// Metric of the errors that are minimised.
    pub metric: ErrorMetric,
}

impl Default for BlockAp {
    fn default() -> Self {
        BlockAp {
            iterations: 400,
            rate: 0.01,
            clip_rate: 0.002,
            batch_tokens: 512,
            seed: 42,
            metric: ErrorMetric::default(),
        }
    }
}

impl Method for BlockAp {
    fn name(&self) -> &'static str {
        "block-ap"
    }

    fn work(&self) -> Work<'_> {
        Work::Layer(self)
    }

    fn tables(&self) -> &'static [TableSpec] {
        &[TABLE]
    }

    fn set(&mut self, _: &str, from: Options<'_>) -> Result<(), OptionError> {
        self.iterations = from.count("iterations", 1_000_000)?.unwrap_or(self.iterations);
        self.rate = from.number("rate", 1.0)?.unwrap_or(self.rate);
        self.clip_rate = from.number("clip_rate", 1.0)?.unwrap_or(self.clip_rate);
        self.batch_tokens = from.count("batch_tokens", 1 << 24)?.unwrap_or(self.batch_tokens);
        self.seed = from.seed()?.unwrap_or(self.seed);
        self.metric = from.one_of("metric", &ERROR_METRICS)?.unwrap_or(self.metric);
        Ok(())
    }

    fn settings(&self) -> Vec<Setting> {
        let set = |key, value: toml::Value| Setting::new(TABLE.name, key, value);
        vec![
            set("iterations", (self.iterations as i64).into()),
            set("rate", shortest(self.rate).into()),
            set("clip_rate", shortest(self.clip_rate).into()),
            set("batch_tokens", (self.batch_tokens as i64).into()),
            set("seed", (self.seed as i64).into()),
            set("metric", name_of(&self.metric, &ERROR_METRICS).into()),
        ]
    }

    fn needs(&self) -> Needs {
        Needs { fisher: Fisher::of_layers(self.metric, self.seed), ..self.work().needs() }
    }

    fn takes(&self, scheme: &Scheme, (rows, cols): (usize, usize), _: bool) -> Result<(), MethodError> {
        Ok(check_scheme(scheme, rows, cols)?)
    }

    fn refuses(&self, feature: Feature) -> Option<&'static str> {
        match feature {
            Feature::StochasticRounding => Some("it rounds to nearest as it learns"),
            Feature::RotatedInputs => Some("it does not rotate inputs as it learns"),
            _ => refused_by_most(feature),
        }
    }

    fn lacking(&self, lack: Lack) -> Option<&'static str> {
        Some(match lack {
            Lack::Tokens | Lack::AllChannels => "its layers are rounded to nearest",
            Lack::Few => "trained weights may overfit",
            Lack::Channels => "their weights are rounded to nearest",
        })
    }

    fn buffers(&self, phase: Phase, extent: &Extent<'_>) -> Vec<Buffer> {
        let groups = (extent.rows * extent.cols.div_ceil(extent.group.max(1))) as u64;
        // The original, Adam's state and directions, and the masked gradient; for both factors of a range the same.
        let bytes = LearnedWeight::bytes_needed(extent.rows, extent.cols, extent.group)
            + (8 + Adam::BYTES) * extent.weights()
            + 2 * (16 + 8 + Adam::BYTES) * groups;
        Vec::from_iter((phase == Phase::Learn).then_some(("weights as they are trained", bytes)))
    }
}

impl SolveLayer for BlockAp {
    fn begin(&self) -> Box<dyn LayerSolver> {
        Box::new(Training { options: *self, weights: Vec::new() })
    }

    fn batch_tokens(&self) -> usize {
        self.batch_tokens
    }
}

/// Weights of a layer.
struct Training {
    options: BlockAp,
    weights: Vec<TrainedWeight>,
}

/// Weight in training.
struct TrainedWeight {
    weight: LearnedWeight,
    /// Weight and factors before the first step.
    original: Vec<f32>,
    start: Vec<[f32; 2]>,
    of_weights: Adam,
    of_clips: Adam,
}

impl TrainedWeight {
    fn new(weight: LearnedWeight) -> Self {
        let (original, start) = (weight.weight().to_vec(), weight.clips().collect::<Vec<_>>());
        let (of_weights, of_clips) = (Adam::new(original.len()), Adam::new(2 * start.len()));
        TrainedWeight { weight, original, start, of_weights, of_clips }
    }

    /// Takes a step against `gradient`, that of the loss by the dequantized values.
    fn step(&mut self, gradient: &[f32], (rate, clip_rate): (f32, f32), threads: usize) {
        let of_clips = self.weight.clip_gradients(gradient, threads);
        let of_clips: Vec<f32> = of_clips.as_flattened().iter().map(|g| *g as f32).collect();
        let of_weights = self.weight.weight_gradients(gradient, threads);
        let directions = self.of_weights.directions(&of_weights, threads);
        self.weight.move_weights(&directions, rate, threads);
        let directions = self.of_clips.directions(&of_clips, threads);
        let mut clips: Vec<[f32; 2]> = self.weight.clips().collect();
        let starts = self.start.as_flattened();
        for ((clip, direction), start) in clips.as_flattened_mut().iter_mut().zip(directions).zip(starts) {
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

impl LayerSolver for Training {
    fn add(&mut self, task: &WeightTask<'_>, h: &[f32], signed: bool) -> Result<(), MethodError> {
        let WeightTask { scheme, w, cols, outer, threads, .. } = *task;
        let weight = LearnedWeight::new(scheme, w, cols, h, outer, signed, threads)?;
        self.weights.push(TrainedWeight::new(weight));
        Ok(())
    }

    fn learn(&mut self, block: &mut dyn Block, run: &mut Run<'_>) -> Result<Learned, MethodError> {
        let BlockAp { iterations: count, batch_tokens, seed, .. } = self.options;
        learn(self, block, run, &Steps { count, batch_tokens, seed })
    }

    fn error(&mut self, block: &mut dyn Block, run: &mut Run<'_>) -> Result<f64, MethodError> {
        error(block, run, self.options.batch_tokens)
    }

    fn dequantize(&self, index: usize, out: &mut [f32], threads: usize) {
        if let Some(trained) = self.weights.get(index) {
            trained.weight.fake_quantize(out, threads);
        }
    }

    fn finish(self: Box<Self>) -> Vec<Solved> {
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

    #[test]
    fn settings_read_back() {
        let text =
            "iterations = 7\nrate = 0.125\nclip_rate = 0.5\nbatch_tokens = 99\nseed = 3\nmetric = \"mse\"";
        let mut set = BlockAp::default();
        set.set("block-ap", Options::new(&text.parse().unwrap())).unwrap();
        let lines: Vec<_> = set.settings().iter().map(ToString::to_string).collect();
        let expected: Vec<_> = text.lines().map(|line| format!("block-ap.{line}")).collect();
        assert_eq!(lines, expected);
    }
}

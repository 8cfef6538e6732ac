//! AutoRound: learned rounding and clipping by block reconstruction.
//!
//! "Optimize Weight Rounding via Signed Gradient Descent for the Quantization of LLMs" (SignRound, Cheng et al. 2023,
//! arXiv:2309.05516), in the frame of BRECQ (Li et al., ICLR 2021). For one decoder layer `f` with the weights W of its linear
//! layers, inputs X' `[tokens, hidden]` as the quantized layers before it give them, and the outputs `f(X; W)` of the original
//! model,
//!
//! ```text
//! minimise over v, α, β:   ‖ f(X'; Q(W; v, α, β)) - f(X; W) ‖²        v ∈ [-1/2, 1/2] per weight, α and β per group
//! ```
//!
//! by descent along signs with a step that falls linearly to 0 (200 steps, 1/200 at first). [`LearnedWeight`] is Q and its
//! gradient; the layer's own is `mantissa-train`'s.
//!
//! Some things are not as published, each because it loses less (docs/explain/methods.md): the norm is that of the Fisher information
//! of the output ([`Metric`]); signs are of the gradient and its momentum together, which lets 512 tokens a step do where 2048
//! were taken; ranges begin where they lose least against each input's mean square, not at the largest magnitude; their step is
//! a fifth of the offsets'; and of symmetric integers a group's multiplier may be negative, so that the larger side has the extra
//! code.

mod levels;
mod weight;

use std::ops::ControlFlow;

use mantissa_kernels::kernels;
use mantissa_model::LinearKind;
use mantissa_num::round::philox4x32_10;
use mantissa_num::{Code, Scheme};
use mantissa_store::ErrorClass;
use mantissa_train::{LayerTrainer, TrainError};

pub use mantissa_methods::metric::{ERROR_METRICS, ErrorMetric, Metric};
pub use weight::{LearnedWeight, check_scheme};

use crate::calibrate::{States, Tick};

/// How AutoRound works.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AutoRoundOptions {
    /// Steps of descent for each layer.
    pub iterations: usize,
    /// First step of offsets; 0 for `1 / iterations`.
    pub rate: f32,
    /// First step of a group's range, as a share of it; 0 for a fifth of that of the
    /// offsets: a range moves all weights of its group.
    pub clip_rate: f32,
    /// Tokens of a step: as many windows as hold them, at least one.
    pub batch_tokens: usize,
    /// Seed of the order of the windows, and of the targets that the Fisher information draws.
    pub seed: u64,
    /// What is minimised: the caller of [`reconstruct`] gives it with the [`Windows`].
    pub metric: ErrorMetric,
}

impl Default for AutoRoundOptions {
    fn default() -> Self {
        AutoRoundOptions {
            iterations: 200,
            rate: 0.0,
            clip_rate: 0.0,
            batch_tokens: 512,
            seed: 42,
            metric: ErrorMetric::default(),
        }
    }
}

impl AutoRoundOptions {
    /// What a recipe with weights of `scheme` has where it says nothing else: the [default](Self::default), but of scales that are powers of two,
    /// which are not learned, more steps of fewer tokens.
    pub fn of(scheme: &Scheme) -> Self {
        let powers = scheme.format.scale().is_some_and(|tree| tree.code == Code::E8m0);
        match powers {
            true => AutoRoundOptions { iterations: 600, batch_tokens: 256, ..Self::default() },
            false => Self::default(),
        }
    }
}

/// Why rounding could not be learned.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AutoRoundError {
    /// Lengths that do not agree.
    #[error("{what}: found {found}, allowed {expected}")]
    Length {
        /// Of what.
        what: &'static str,
        /// Its length.
        found: usize,
        /// The length required.
        expected: usize,
    },
    /// The scheme has no rounding to learn.
    #[error("autoround: scheme {scheme}: found a scheme that it does not take: {why}; use rtn")]
    Scheme {
        /// The scheme.
        scheme: String,
        /// Why.
        why: &'static str,
    },
    /// The layer cannot be run or differentiated.
    #[error("{0}; gptq needs no gradients")]
    Layer(#[from] TrainError),
    /// Hidden states that are kept in a file.
    #[error(transparent)]
    States(#[from] mantissa_store::Error),
    /// The caller ended the run.
    #[error("found a request to stop, allowed to run to the end")]
    Interrupted,
}

impl AutoRoundError {
    /// Whether the input or the environment is at fault.
    pub fn class(&self) -> ErrorClass {
        match self {
            AutoRoundError::Layer(error) => error.class(),
            AutoRoundError::States(error) => error.class(),
            AutoRoundError::Interrupted => ErrorClass::Environment,
            _ => ErrorClass::Input,
        }
    }
}

/// The hidden states of some windows before and after a decoder layer.
#[derive(Clone, Copy, Debug)]
pub struct Windows<'a> {
    /// What the layer reads in the quantized model, `[tokens, hidden]` of each window.
    pub inputs: &'a States,
    /// What it gave in the original model, of the same shapes.
    pub targets: &'a States,
    /// Width of the residual stream.
    pub hidden: usize,
    /// What an error of the output costs; without one, its square.
    pub metric: Option<&'a Metric>,
}

impl Windows<'_> {
    /// How many of them a step takes.
    fn at_once(&self, options: AutoRoundOptions) -> usize {
        let (count, inputs) = (self.inputs.len(), self.inputs);
        let longest = (0..count).map(|i| inputs.elements(i) / self.hidden).max().unwrap_or(0);
        (options.batch_tokens / longest.max(1)).clamp(1, count.max(1))
    }
}

/// Mean squared errors of a layer's output over all windows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Reconstruction {
    /// Rounded to nearest within the ranges that learning began with.
    pub before: f64,
    /// As learned.
    pub after: f64,
}

/// Learns the rounding of `weights` of the layer in `trainer` on `windows`. Where the layer's output is no better for it, the
/// weights are what they were. `tick` is asked after every step.
///
/// # Errors
/// [`AutoRoundError`].
pub fn reconstruct(
    trainer: &mut LayerTrainer,
    weights: &mut [(LinearKind, LearnedWeight)],
    windows: Windows<'_>,
    options: AutoRoundOptions,
    threads: usize,
    tick: &mut Tick<'_>,
) -> Result<Reconstruction, AutoRoundError> {
    let each = windows.at_once(options);
    let mut block = Block { trainer, windows, threads, weighed: Vec::new() };
    block.put(weights);
    let before = block.loss(each, tick)?;
    let rate = if options.rate > 0.0 { options.rate } else { 1.0 / options.iterations.max(1) as f32 };
    let clip_rate = if options.clip_rate > 0.0 { options.clip_rate } else { rate / 5.0 };
    let mut order = Vec::new();
    for step in 0..options.iterations {
        if order.len() < each {
            order = shuffled(windows.inputs.len(), options.seed, step as u64);
        }
        let batch = order.split_off(order.len() - each);
        block.gradients(&batch)?;
        let falls = 1.0 - step as f32 / options.iterations as f32;
        for (kind, weight) in weights.iter_mut() {
            weight.step(&block.trainer.gradient(*kind), rate * falls, clip_rate * falls, threads);
        }
        block.put(weights);
        go_on(tick)?;
    }
    let after = block.loss(each, tick)?;
    if after < before {
        return Ok(Reconstruction { before, after });
    }
    weights.iter_mut().for_each(|(_, weight)| weight.reset());
    Ok(Reconstruction { before, after: before })
}

/// The error that [`reconstruct`] minimises, with the weights that the layer in `trainer` has. `tick` is asked after every batch.
///
/// # Errors
/// [`AutoRoundError`].
pub fn reconstruction_error(
    trainer: &mut LayerTrainer,
    windows: Windows<'_>,
    options: AutoRoundOptions,
    threads: usize,
    tick: &mut Tick<'_>,
) -> Result<f64, AutoRoundError> {
    let mut block = Block { trainer, windows, threads, weighed: Vec::new() };
    block.loss(windows.at_once(options), tick)
}

fn go_on(tick: &mut Tick<'_>) -> Result<(), AutoRoundError> {
    match tick() {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(()) => Err(AutoRoundError::Interrupted),
    }
}

/// A layer and what it is to give.
struct Block<'a> {
    trainer: &'a mut LayerTrainer,
    windows: Windows<'a>,
    threads: usize,
    /// Differences under the metric.
    weighed: Vec<f32>,
}

impl Block<'_> {
    /// Puts the weights' present values in place.
    fn put(&mut self, weights: &[(LinearKind, LearnedWeight)]) {
        for (kind, weight) in weights {
            self.trainer.set_weight(*kind, |values| weight.fake_quantize(values, self.threads));
        }
    }

    /// Runs some windows; gives the differences from what they should give, and the lengths.
    fn differences(&mut self, batch: &[usize]) -> Result<(Vec<f32>, Vec<usize>), AutoRoundError> {
        let Windows { inputs, targets, hidden, .. } = self.windows;
        let lens: Vec<usize> = batch.iter().map(|&i| inputs.elements(i) / hidden).collect();
        let mut states: Vec<f32> = Vec::with_capacity(lens.iter().sum::<usize>() * hidden);
        batch.iter().try_for_each(|&i| inputs.append_to(i, &mut states))?;
        self.trainer.forward(&mut states, &lens)?;
        let mut expected = Vec::with_capacity(states.len());
        batch.iter().try_for_each(|&i| targets.append_to(i, &mut expected))?;
        states.iter_mut().zip(expected).for_each(|(y, target)| *y -= target);
        Ok((states, lens))
    }

    /// The gradients of a batch, but for a positive factor.
    fn gradients(&mut self, batch: &[usize]) -> Result<(), AutoRoundError> {
        let (differences, lens) = self.differences(batch)?;
        match self.windows.metric {
            None => self.trainer.backward(&differences, &lens),
            Some(metric) => {
                metric.weigh(&differences, &mut self.weighed, self.threads);
                self.trainer.backward(&self.weighed, &lens);
            }
        }
        Ok(())
    }

    /// Mean squared error over all windows, under the metric where there is one, `each` at a time.
    fn loss(&mut self, each: usize, tick: &mut Tick<'_>) -> Result<f64, AutoRoundError> {
        let (mut sum, mut count) = (0.0, 0);
        let all: Vec<usize> = (0..self.windows.inputs.len()).collect();
        for batch in all.chunks(each) {
            let (differences, _) = self.differences(batch)?;
            sum += match self.windows.metric {
                None => kernels().sum_squares_f64(&differences),
                Some(metric) => {
                    metric.weigh(&differences, &mut self.weighed, self.threads);
                    let pairs = differences.iter().zip(&self.weighed);
                    pairs.map(|(e, m)| f64::from(*e) * f64::from(*m)).sum()
                }
            };
            count += differences.len();
            go_on(tick)?;
        }
        Ok(sum / count.max(1) as f64)
    }
}

/// The numbers below `n` in an order that follows from seed and counter alone (Fisher and Yates; Philox4x32-10).
pub(crate) fn shuffled(n: usize, seed: u64, counter: u64) -> Vec<usize> {
    let mut all: Vec<usize> = (0..n).collect();
    for i in (1..n).rev() {
        let counter = [i as u32, (i as u64 >> 32) as u32, counter as u32, (counter >> 32) as u32];
        let [word, ..] = philox4x32_10(counter, [seed as u32, (seed >> 32) as u32]);
        all.swap(i, ((u64::from(word) * (i as u64 + 1)) >> 32) as usize);
    }
    all
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests;

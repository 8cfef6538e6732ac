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
//! of the output ([`Metric`](crate::metric::Metric)); signs are of the gradient and its momentum together, which lets 512 tokens a step do where 2048
//! were taken; ranges begin where they lose least against each input's mean square, not at the largest magnitude; their step is
//! a fifth of the offsets'; and of symmetric integers a group's multiplier may be negative, so that the larger side has the extra
//! code.

mod levels;
pub mod method;
mod weight;

use mantissa_kernels::kernels;
use mantissa_num::round::philox4x32_10;
use mantissa_num::{Code, Scheme};

use crate::error::MethodError;
use crate::method::{Block, Learned, Run};
use crate::metric::ErrorMetric;

pub use method::AutoRound;
pub use weight::{LearnedWeight, check_scheme};

/// Options of AutoRound.
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
    /// Metric of the errors that are minimised; the caller of [`reconstruct`] gives it with the windows.
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
    /// Defaults for weights of `scheme`. Scales that are powers of two are not learned: they take more steps of fewer tokens.
    pub fn of(scheme: &Scheme) -> Self {
        let powers = scheme.format.scale().is_some_and(|tree| tree.code == Code::E8m0);
        match powers {
            true => AutoRoundOptions { iterations: 600, batch_tokens: 256, ..Self::default() },
            false => Self::default(),
        }
    }
}

/// A weight whose rounding cannot be learned.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum AutoRoundError {
    /// Lengths that do not agree.
    #[error("{what}: expected {expected}, got {found}")]
    Length {
        /// Name.
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
        /// Reason.
        why: &'static str,
    },
}

impl From<AutoRoundError> for MethodError {
    fn from(error: AutoRoundError) -> Self {
        MethodError::input(error)
    }
}

/// Number of windows of a step.
fn at_once(run: &Run<'_>, options: AutoRoundOptions) -> usize {
    let count = run.inputs.count();
    let longest = (0..count).map(|i| run.inputs.elements(i) / run.hidden).max().unwrap_or(0);
    (options.batch_tokens / longest.max(1)).clamp(1, count.max(1))
}

/// Learns the rounding of `weights` of `block`, which are its weights in their order. Where the layer's output is no better for it,
/// the weights are what they were. Errors are squared, under the metric of `run` where there is one.
///
/// # Errors
/// [`MethodError`].
pub fn reconstruct(
    block: &mut dyn Block,
    weights: &mut [LearnedWeight],
    run: &mut Run<'_>,
    options: AutoRoundOptions,
) -> Result<Learned, MethodError> {
    let (each, threads) = (at_once(run, options), run.threads);
    let mut layer = Layer { block, weighed: Vec::new() };
    layer.put(weights, threads);
    let before = layer.loss(each, run)?;
    let rate = if options.rate > 0.0 { options.rate } else { 1.0 / options.iterations.max(1) as f32 };
    let clip_rate = if options.clip_rate > 0.0 { options.clip_rate } else { rate / 5.0 };
    let mut order = Vec::new();
    for step in 0..options.iterations {
        if order.len() < each {
            order = shuffled(run.inputs.count(), options.seed, step as u64);
        }
        let batch = order.split_off(order.len() - each);
        layer.gradients(&batch, run)?;
        let falls = 1.0 - step as f32 / options.iterations as f32;
        for (index, weight) in weights.iter_mut().enumerate() {
            weight.step(&layer.block.gradient(index), rate * falls, clip_rate * falls, threads);
        }
        layer.put(weights, threads);
        run.go_on()?;
    }
    let after = layer.loss(each, run)?;
    if after < before {
        return Ok(Learned::new(run, before, after));
    }
    weights.iter_mut().for_each(LearnedWeight::reset);
    Ok(Learned::new(run, before, before))
}

/// The error that [`reconstruct`] minimises, with the weights that `block` has.
///
/// # Errors
/// [`MethodError`].
pub fn reconstruction_error(
    block: &mut dyn Block,
    run: &mut Run<'_>,
    options: AutoRoundOptions,
) -> Result<f64, MethodError> {
    let each = at_once(run, options);
    Layer { block, weighed: Vec::new() }.loss(each, run)
}

/// A layer as it is learned.
struct Layer<'a> {
    block: &'a mut dyn Block,
    /// Differences under the metric.
    weighed: Vec<f32>,
}

impl Layer<'_> {
    /// Puts the weights' present values in place.
    fn put(&mut self, weights: &[LearnedWeight], threads: usize) {
        for (index, weight) in weights.iter().enumerate() {
            self.block.set_weight(index, &mut |values| weight.fake_quantize(values, threads));
        }
    }

    /// Runs some windows; gives the differences from the targets, and the lengths.
    fn differences(&mut self, batch: &[usize], run: &Run<'_>) -> Result<(Vec<f32>, Vec<usize>), MethodError> {
        let Run { inputs, targets, hidden, .. } = *run;
        let lens: Vec<usize> = batch.iter().map(|&i| inputs.elements(i) / hidden).collect();
        let mut states: Vec<f32> = Vec::with_capacity(lens.iter().sum::<usize>() * hidden);
        batch.iter().try_for_each(|&i| inputs.append_to(i, &mut states))?;
        self.block.forward(&mut states, &lens)?;
        let mut expected = Vec::with_capacity(states.len());
        batch.iter().try_for_each(|&i| targets.append_to(i, &mut expected))?;
        states.iter_mut().zip(expected).for_each(|(y, target)| *y -= target);
        Ok((states, lens))
    }

    /// Computes the gradients of a batch, up to a positive factor.
    fn gradients(&mut self, batch: &[usize], run: &Run<'_>) -> Result<(), MethodError> {
        let (differences, lens) = self.differences(batch, run)?;
        match run.metric {
            None => self.block.backward(&differences, &lens),
            Some(metric) => {
                metric.weigh(&differences, &mut self.weighed, run.threads);
                self.block.backward(&self.weighed, &lens);
            }
        }
        Ok(())
    }

    /// Mean squared error over all windows, under the metric where there is one, `each` at a time.
    fn loss(&mut self, each: usize, run: &mut Run<'_>) -> Result<f64, MethodError> {
        let (mut sum, mut count) = (0.0, 0);
        let all: Vec<usize> = (0..run.inputs.count()).collect();
        for batch in all.chunks(each) {
            let (differences, _) = self.differences(batch, run)?;
            sum += match run.metric {
                None => kernels().sum_squares_f64(&differences),
                Some(metric) => {
                    metric.weigh(&differences, &mut self.weighed, run.threads);
                    let pairs = differences.iter().zip(&self.weighed);
                    pairs.map(|(e, m)| f64::from(*e) * f64::from(*m)).sum()
                }
            };
            count += differences.len();
            run.go_on()?;
        }
        Ok(sum / count.max(1) as f64)
    }
}

/// The numbers below `n` in an order that follows from seed and counter alone (Fisher and Yates; Philox4x32-10).
pub fn shuffled(n: usize, seed: u64, counter: u64) -> Vec<usize> {
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

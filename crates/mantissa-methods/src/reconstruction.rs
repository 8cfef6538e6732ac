//! Block reconstruction: learns the weights of a decoder layer by the error of the layer's output.
//!
//! This is the objective of BRECQ (Li et al., ICLR 2021, arXiv:2102.05426), with exchangeable parameters. For one
//! decoder layer `f` with the weights W of its linear layers, inputs X' `[tokens, hidden]` from the quantized layers
//! before it, and the outputs `f(X; W)` of the original model:
//!
//! ```text
//! minimise over the parameters p:   ‖ f(X'; Q(W; p)) − f(X; W) ‖²
//! ```
//!
//! Each step uses a few windows. The norm is the Fisher information of the output ([`Metric`](crate::metric::Metric))
//! if a [`Run`] has it. A method supplies its [`Parameters`], and a [`Block`] the layer's forward and backward.

use mantissa_kernels::kernels;
use mantissa_num::round::philox4x32_10;

use crate::error::MethodError;
use crate::method::{Block, Learned, Run};

/// Number, batch size and order of the steps.
#[derive(Clone, Copy, Debug)]
pub struct Steps {
    /// Number of steps.
    pub count: usize,
    /// Tokens of a step: as many windows as hold them, at least one.
    pub batch_tokens: usize,
    /// Seed of the order of the windows.
    pub seed: u64,
}

/// One step.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    /// Number of the step, from 0.
    pub index: usize,
    /// Number of steps.
    pub count: usize,
    /// Factor that turns the block's gradients into gradients of the mean error relative to the initial error; 0 if the
    /// initial error is 0.
    pub relative: f32,
}

/// Parameters that determine the weights of a layer. Weights are in the order of the [`Block`].
pub trait Parameters {
    /// Number of weights.
    fn weights(&self) -> usize;

    /// Writes the dequantized values of weight `index` to `out`; before [`begin`](Self::begin), the initial ones.
    fn values(&self, index: usize, out: &mut [f32], threads: usize);

    /// Begins learning, after the initial error was measured.
    fn begin(&mut self) {}

    /// Takes a step along the gradients of `block`, which has run forward and backward.
    fn step(&mut self, block: &dyn Block, step: &Step, threads: usize);

    /// Ends learning; [`values`](Self::values) then returns the stored values.
    fn finish(&mut self) {}

    /// Returns to the initial parameters.
    fn reset(&mut self);
}

/// Learns `parameters` for the weights of `block`. Resets them if the layer's output is no better.
///
/// # Errors
/// [`MethodError`].
pub fn learn(
    parameters: &mut dyn Parameters,
    block: &mut dyn Block,
    run: &mut Run<'_>,
    steps: &Steps,
) -> Result<Learned, MethodError> {
    let (each, threads) = (at_once(run, steps.batch_tokens), run.threads);
    let mut layer = Layer { block, weighed: Vec::new() };
    layer.put(parameters, threads);
    let before = layer.loss(each, run)?;
    parameters.begin();
    let mut order = Vec::new();
    for index in 0..steps.count {
        if order.len() < each {
            order = shuffled(run.inputs.count(), steps.seed, index as u64);
        }
        let batch = order.split_off(order.len() - each);
        layer.put(parameters, threads);
        let values = layer.gradients(&batch, run)?;
        // The block differentiates half the summed error.
        let relative = if before > 0.0 { (2.0 / (before * values as f64)) as f32 } else { 0.0 };
        parameters.step(&*layer.block, &Step { index, count: steps.count, relative }, threads);
        run.go_on()?;
    }
    parameters.finish();
    layer.put(parameters, threads);
    let after = layer.loss(each, run)?;
    if after < before {
        return Ok(Learned::new(run, before, after));
    }
    parameters.reset();
    Ok(Learned::new(run, before, before))
}

/// Error that [`learn`] minimizes, with the current weights of `block`; runs `batch_tokens` at a time.
///
/// # Errors
/// [`MethodError`].
pub fn error(block: &mut dyn Block, run: &mut Run<'_>, batch_tokens: usize) -> Result<f64, MethodError> {
    let each = at_once(run, batch_tokens);
    Layer { block, weighed: Vec::new() }.loss(each, run)
}

/// Number of windows of a step.
fn at_once(run: &Run<'_>, batch_tokens: usize) -> usize {
    let count = run.inputs.count();
    let longest = (0..count).map(|i| run.inputs.elements(i) / run.hidden).max().unwrap_or(0);
    (batch_tokens / longest.max(1)).clamp(1, count.max(1))
}

/// Layer while it is learned.
struct Layer<'a> {
    block: &'a mut dyn Block,
    /// Differences multiplied by the metric.
    weighed: Vec<f32>,
}

impl Layer<'_> {
    /// Writes the weights' current values to the block.
    fn put(&mut self, parameters: &dyn Parameters, threads: usize) {
        for index in 0..parameters.weights() {
            self.block.set_weight(index, &mut |values| parameters.values(index, values, threads));
        }
    }

    /// Runs some windows; returns the differences from the targets, and the lengths.
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

    /// Computes the gradients of half the summed error of a batch; returns the number of its output values.
    fn gradients(&mut self, batch: &[usize], run: &Run<'_>) -> Result<usize, MethodError> {
        let (differences, lens) = self.differences(batch, run)?;
        match run.metric {
            None => self.block.backward(&differences, &lens),
            Some(metric) => {
                metric.weigh(&differences, &mut self.weighed, run.threads);
                self.block.backward(&self.weighed, &lens);
            }
        }
        Ok(differences.len())
    }

    /// Mean squared error over all windows, under the metric if there is one, `each` windows at a time.
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

/// Permutation of the numbers below `n`, determined by seed and counter (Fisher–Yates; Philox4x32-10).
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
mod tests {
    use super::shuffled;

    #[test]
    fn an_order_is_a_permutation_and_follows_from_its_seed() {
        let order = shuffled(100, 42, 0);
        let mut sorted = order.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..100).collect::<Vec<_>>());
        assert_eq!(order, shuffled(100, 42, 0));
        assert!(order != shuffled(100, 42, 1) && order != shuffled(100, 43, 0));
    }
}

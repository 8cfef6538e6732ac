//! Block reconstruction: learns the weights of a decoder layer by the error of the layer's output.
//!
//! The frame of BRECQ (Li et al., ICLR 2021, arXiv:2102.05426), in which other methods learn other parameters. For one decoder layer
//! `f` with the weights W of its linear layers, inputs X' `[tokens, hidden]` as the quantized layers before it give them, and the
//! outputs `f(X; W)` of the original model,
//!
//! ```text
//! minimise over the parameters p:   ‖ f(X'; Q(W; p)) − f(X; W) ‖²
//! ```
//!
//! by steps on a few windows each. The norm is that of the Fisher information of the output ([`Metric`](crate::metric::Metric)) where
//! a [`Run`] has it. A method supplies its [`Parameters`]; the layer's forward and backward come as a [`Block`].

use mantissa_kernels::kernels;
use mantissa_num::round::philox4x32_10;

use crate::error::MethodError;
use crate::method::{Block, Learned, Run};

/// Number, size and order of the steps.
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
    /// Factor of the block's gradients that makes them those of the mean error relative to the starting point's; 0 if that has none.
    pub relative: f32,
}

/// Parameters from which the weights of a layer follow. Weights are in the order of the [`Block`].
pub trait Parameters {
    /// Number of weights.
    fn weights(&self) -> usize;

    /// Writes the dequantized values of weight `index` to `out`; those of the starting point before [`begin`](Self::begin).
    fn values(&self, index: usize, out: &mut [f32], threads: usize);

    /// Begins learning, after the error of the starting point is measured.
    fn begin(&mut self) {}

    /// Takes a step along the gradients of `block`, which has run forward and backward.
    fn step(&mut self, block: &dyn Block, step: &Step, threads: usize);

    /// Ends learning: [`values`](Self::values) are then those that are stored.
    fn finish(&mut self) {}

    /// Returns to the starting point.
    fn reset(&mut self);
}

/// Learns `parameters` of the weights of `block`. Where the layer's output is no better for it, they are reset.
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
        // The gradients are half of those of the summed error.
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

/// The error that [`learn`] minimises, with the weights that `block` has; `batch_tokens` at a time.
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

/// A layer as it is learned.
struct Layer<'a> {
    block: &'a mut dyn Block,
    /// Differences under the metric.
    weighed: Vec<f32>,
}

impl Layer<'_> {
    /// Puts the weights' present values in place.
    fn put(&mut self, parameters: &dyn Parameters, threads: usize) {
        for index in 0..parameters.weights() {
            self.block.set_weight(index, &mut |values| parameters.values(index, values, threads));
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

    /// Computes the gradients of half the summed error of a batch; gives the number of values of its output.
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

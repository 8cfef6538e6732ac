//! Gradients of a model's own predictions, of which the Fisher information is made.
//!
//! With targets `y` drawn from the distribution `p` that the model itself gives, `E[g gᵀ]` of `g = ∂(-ln p(y))/∂x` is the Fisher
//! information of the states x: the second derivative of KL(p(x) ‖ p(x + δ)) in δ (Martens 2020, "New Insights and Perspectives
//! on the Natural Gradient Method", section 5; arXiv:1412.1193). Targets of a text would give another matrix, the "empirical" one.

use mantissa_kernels::kernels;
use mantissa_model::flow::parts;
use mantissa_model::{ForwardError, ModelConfig, WeightSource};
use mantissa_num::round::random_u32;

use crate::arena::Parameters;
use crate::error::TrainError;
use crate::model::{Options, TrainModel};
use crate::plan::HEAD_ROWS;
use crate::rows::rows;

/// The last norm and the head of a model, by themselves.
#[derive(Debug)]
pub struct SampledHead {
    model: TrainModel,
}

impl SampledHead {
    /// Reads them from `source`, for batches as `options` plans them.
    ///
    /// # Errors
    /// As [`LayerTrainer::load`](crate::LayerTrainer::load).
    pub fn load(
        source: &dyn WeightSource,
        config: &ModelConfig,
        options: Options,
    ) -> Result<Self, TrainError> {
        crate::model::check_supported(config)?;
        let config = without_layers(config);
        let params = Parameters::load(source, &config)?;
        Ok(SampledHead { model: TrainModel::new(config, params, options)? })
    }

    /// Bytes that they take.
    pub fn bytes_needed(config: &ModelConfig, options: &Options) -> u64 {
        crate::plan::Plan::new(&without_layers(config), options).bytes()
    }

    /// Takes `states` `[tokens, hidden]`, what the last layer gave, to the gradients of `-ln p(y)` with respect to them, in place;
    /// y is drawn from p by Philox4x32-10, key `seed`, counter `first` and on.
    ///
    /// # Errors
    /// [`TrainError::Forward`] for more tokens than were planned.
    pub fn gradients(&mut self, states: &mut [f32], first: u64, seed: u64) -> Result<(), TrainError> {
        let (d, model) = (self.model.config.hidden_size, &mut self.model);
        let tokens = states.len() / d;
        if tokens * d != states.len() {
            return Err(ForwardError::Lengths { sum: tokens * d, tokens: states.len() }.into());
        }
        let planned = model.options.max_tokens;
        if tokens > planned {
            return Err(ForwardError::Plan { what: "tokens of a batch", needed: tokens, planned }.into());
        }
        model.scratch.residual[..states.len()].copy_from_slice(states);
        model.final_norm(tokens);
        let targets = draw(model, tokens, first, seed);
        model.zero_gradients();
        model.head_backward(&targets, 1.0);
        states.copy_from_slice(&model.scratch.d_residual[..states.len()]);
        Ok(())
    }
}

/// A target for each of the normed states in `scratch`.
fn draw(model: &mut TrainModel, tokens: usize, first: u64, seed: u64) -> Vec<u32> {
    let (d, vocab, threads) = (model.config.hidden_size, model.config.vocab_size, model.options.threads);
    let s = &mut model.scratch;
    let mut targets = Vec::with_capacity(tokens);
    for part in parts(tokens, HEAD_ROWS) {
        let (logits, states) = (&mut s.logits[..part.len() * vocab], rows(&s.normed, d, part.clone()));
        let states = s.head_input.at_row(part.start, d, states);
        model.head.fprop(&model.params, states, logits, false, threads);
        for (logits, index) in logits.chunks_exact_mut(vocab).zip(first + part.start as u64..) {
            kernels().softmax_numerators(logits, 1.0);
            targets.push(drawn(logits, random_u32(seed, index)));
        }
    }
    targets
}

/// The first index at which the sum of `weights` so far exceeds the share `word / 2³²` of the whole.
fn drawn(weights: &[f32], word: u32) -> u32 {
    let total: f64 = weights.iter().map(|&w| f64::from(w)).sum();
    let threshold = total * (f64::from(word) / 4_294_967_296.0);
    let mut sum = 0.0;
    let reached = weights.iter().position(|&w| {
        sum += f64::from(w);
        sum > threshold
    });
    reached.unwrap_or(weights.len().saturating_sub(1)) as u32
}

/// The configuration of a model that has no layers.
fn without_layers(config: &ModelConfig) -> ModelConfig {
    ModelConfig { num_hidden_layers: 0, ..config.clone() }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn draws_follow_the_distribution() {
        let weights = [1.0, 0.0, 2.0, 5.0];
        let mut counts = [0usize; 4];
        let n = 80_000;
        (0..n).for_each(|i| counts[drawn(&weights, random_u32(7, i)) as usize] += 1);
        for (count, weight) in counts.into_iter().zip(weights) {
            let (p, n) = (f64::from(weight) / 8.0, n as f64);
            let deviation = (n * p * (1.0 - p)).sqrt();
            assert!((count as f64 - n * p).abs() <= 4.0 * deviation, "{counts:?}");
        }
        assert_eq!(drawn(&weights, 0), 0);
        assert_eq!(drawn(&weights, u32::MAX), 3);
    }
}

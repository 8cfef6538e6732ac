//! Gradients for targets sampled from the model's own predictions, from which the Fisher information is
//! estimated.
//!
//! With targets `y` sampled from the model's distribution `p`, `E[g gᵀ]` of `g = ∂(-ln p(y))/∂x` is the
//! Fisher information of the hidden states x: the second derivative of KL(p(x) ‖ p(x + δ)) in δ (Martens
//! 2020, "New Insights and Perspectives on the Natural Gradient Method", section 5; arXiv:1412.1193). Targets
//! from a text would give the "empirical" Fisher, another matrix.

use std::ops::Range;

use mantissa_kernels::{MatMut, MatRef, for_each, kernels};
use mantissa_model::flow::parts;
use mantissa_model::{ForwardError, LoadError, ModelConfig, WeightSource, forward_f32, zeros};
use mantissa_num::round::random_u32;

use crate::error::TrainError;
use crate::plan::Options;
use crate::rows::take;

/// Maximum tokens whose logits a thread holds. A part of [`parts`] has more than half of it; the split
/// affects results.
const ROWS: usize = 128;

/// Final norm and head of a model, without weight gradients. Logits are computed for some tokens at a time.
#[derive(Debug)]
pub struct SampledHead {
    hidden: usize,
    vocab: usize,
    eps: f32,
    /// Maximum tokens per batch.
    planned: usize,
    /// Weight of the final norm, `[hidden]`.
    norm: Vec<f32>,
    /// Weight of the head, `[vocabulary, hidden]`.
    head: Vec<f32>,
    /// Buffers, one per thread.
    workers: Vec<Worker>,
}

/// Buffers of one thread.
#[derive(Debug)]
struct Worker {
    /// `[ROWS, vocabulary]`.
    logits: Vec<f32>,
    /// Softmax numerators of one token, `[vocabulary]`.
    numerators: Vec<f32>,
    /// `[ROWS, hidden]`.
    normed: Vec<f32>,
    /// Gradient of `normed`.
    d_normed: Vec<f32>,
    /// Gradient of the norm weight, `[hidden]`.
    partial: Vec<f32>,
}

impl SampledHead {
    /// Loads final norm and head from `source`, for batches planned by `options`.
    ///
    /// # Errors
    /// As [`LayerTrainer::load`](crate::LayerTrainer::load).
    pub fn load(
        source: &dyn WeightSource,
        config: &ModelConfig,
        options: &Options,
    ) -> Result<Self, TrainError> {
        crate::support::check_plain(config)?;
        let (hidden, vocab) = (config.hidden_size, config.vocab_size);
        let norm = source.tensor_f32(&format!("{}.weight", config.final_norm_module()), &[hidden])?;
        // A transform may have untied the head from the embedding.
        let own = format!("{}.weight", config.head_module());
        let tied = config.tie_word_embeddings && !source.has(&own);
        let name = if tied { format!("{}.weight", config.embedding_module()) } else { own };
        let head = source.tensor_f32(&name, &[vocab, hidden])?;
        let memory = || LoadError::Memory { what: "training", bytes: Self::bytes_needed(config, options) };
        let worker = || Worker::new(hidden, vocab, options.max_tokens);
        let workers = (0..workers(options)).map(|_| worker()).collect::<Option<_>>().ok_or_else(memory)?;
        let eps = config.rms_norm_eps;
        Ok(SampledHead { hidden, vocab, eps, planned: options.max_tokens, norm, head, workers })
    }

    /// Predicts the bytes of norm, head and buffers.
    pub fn bytes_needed(config: &ModelConfig, options: &Options) -> u64 {
        let (d, vocab, most) =
            (config.hidden_size as u64, config.vocab_size as u64, most(options.max_tokens));
        let worker = most as u64 * (vocab + 2 * d) + vocab + d;
        let values =
            (vocab + 1).saturating_mul(d).saturating_add(worker.saturating_mul(workers(options) as u64));
        4 * values
    }

    /// Replaces `states` `[tokens, hidden]`, the output of the last layer, by the gradients of `-ln p(y)`. y
    /// is sampled from p with Philox4x32-10, key `seed`, counters from `first` on.
    ///
    /// # Errors
    /// [`TrainError::Forward`] for more tokens than planned.
    pub fn gradients(&mut self, states: &mut [f32], first: u64, seed: u64) -> Result<(), TrainError> {
        let (d, planned) = (self.hidden, self.planned);
        let tokens = states.len() / d;
        if tokens * d != states.len() {
            return Err(ForwardError::Lengths { sum: tokens * d, tokens: states.len() }.into());
        }
        if tokens > planned {
            return Err(ForwardError::Plan { what: "tokens of a batch", needed: tokens, planned }.into());
        }
        let mut workers = std::mem::take(&mut self.workers);
        let (this, mut rest) = (&*self, states);
        let cut: Vec<Range<usize>> = parts(tokens, ROWS).collect();
        for cut in cut.chunks(workers.len().max(1)) {
            let pieces = cut.iter().map(|part| (part.start, take(&mut rest, part.len() * d)));
            let pieces: Vec<_> = pieces.zip(&mut workers).collect();
            for_each(pieces.len(), pieces, |((start, states), worker)| {
                this.part(states, first + start as u64, seed, worker);
            });
        }
        self.workers = workers;
        Ok(())
    }

    /// Computes [`gradients`](Self::gradients) for at most [`ROWS`] tokens.
    fn part(&self, states: &mut [f32], first: u64, seed: u64, worker: &mut Worker) {
        let (d, vocab, n) = (self.hidden, self.vocab, states.len() / self.hidden);
        let Worker { logits, numerators, normed, d_normed, partial } = worker;
        let (logits, normed, d_normed) =
            (&mut logits[..n * vocab], &mut normed[..n * d], &mut d_normed[..n * d]);
        kernels().rms_norm(states, &self.norm, self.eps, normed);
        forward_f32(&self.head, None, (vocab, d), normed, logits, false);
        for (logits, index) in logits.chunks_exact_mut(vocab).zip(first..) {
            numerators.copy_from_slice(logits);
            kernels().softmax_numerators(numerators, 1.0);
            let target = drawn(numerators, random_u32(seed, index));
            kernels().cross_entropy_backward(logits, target as usize, 1.0);
        }
        let (dy, head) = (MatRef::new(logits, n, vocab), MatRef::new(&self.head, vocab, d));
        kernels().gemm_nn(dy, head, MatMut::new(d_normed, n, d), false);
        // The norm's backward adds to `states`, whose values as the norm's input are no longer needed.
        normed.copy_from_slice(states);
        states.fill(0.0);
        partial.fill(0.0);
        kernels().rms_norm_backward(normed, &self.norm, self.eps, d_normed, states, partial);
    }
}

impl Worker {
    fn new(hidden: usize, vocab: usize, max_tokens: usize) -> Option<Self> {
        let rows = most(max_tokens);
        Some(Worker {
            logits: zeros(rows.checked_mul(vocab)?)?,
            numerators: zeros(vocab)?,
            normed: zeros(rows * hidden)?,
            d_normed: zeros(rows * hidden)?,
            partial: zeros(hidden)?,
        })
    }
}

/// Maximum tokens of a part of a batch.
fn most(max_tokens: usize) -> usize {
    max_tokens.min(ROWS)
}

/// Number of threads with work to do.
fn workers(options: &Options) -> usize {
    options.threads.clamp(1, options.max_tokens.div_ceil(ROWS).max(1))
}

/// Samples an index: the first at which the running sum of `weights` exceeds the share `word / 2³²` of the
/// total.
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

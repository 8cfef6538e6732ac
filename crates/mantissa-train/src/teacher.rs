//! Distillation from another model of the same vocabulary: the loss of a step is the KL divergence of the model's
//! predictions from the teacher's, token by token (LLM-QAT: Liu et al. 2023, "LLM-QAT: Data-Free Quantization Aware
//! Training for Large Language Models", arXiv 2305.17888, section 2.3; the hard labels of its equation 2 are replaced by
//! all probabilities of the teacher).

use mantissa_kernels::for_each;
use mantissa_model::{Batch, Buffers, Decoder, ForwardError, LoadError, ModelConfig, WeightSource, zeros};

use crate::distill::divergence;
use crate::error::TrainError;
use crate::model::{IGNORE_TARGET, Loss, TrainModel};
use crate::plan::HEAD_ROWS;

/// Unquantized model whose predictions another one learns.
#[derive(Debug)]
pub struct Teacher {
    decoder: Decoder,
    buffers: Buffers,
    /// Logits of some tokens.
    logits: Vec<f32>,
    /// Hash of its weights.
    digest: String,
}

impl Teacher {
    /// Loads the model in `source` for batches of up to `max_tokens` tokens in sequences of up to `max_len`. `digest` is
    /// the hash of its weights, which a resumed run must have too.
    ///
    /// # Errors
    /// As [`Decoder::load`]; [`TrainError::Load`] if memory is missing.
    pub fn load(
        source: &dyn WeightSource,
        (max_tokens, max_len): (usize, usize),
        digest: String,
    ) -> Result<Self, TrainError> {
        let decoder = Decoder::load(source)?;
        let buffers = Buffers::plan(decoder.config(), max_tokens, max_len)?;
        let n = logits(decoder.config(), max_tokens);
        let memory = LoadError::Memory { what: "the teacher's logits", bytes: 4 * n as u64 };
        Ok(Teacher { logits: zeros(n).ok_or(memory)?, decoder, buffers, digest })
    }

    /// Predicts the bytes of a teacher, without its weights.
    pub fn bytes(config: &ModelConfig, max_tokens: usize, max_len: usize) -> u64 {
        let buffers = Buffers::bytes_needed(config, max_tokens, max_len);
        buffers.saturating_add(4 * logits(config, max_tokens) as u64)
    }

    /// Hash of its weights.
    pub(crate) fn digest(&self) -> &str {
        &self.digest
    }

    /// Number of tokens in its vocabulary.
    pub(crate) fn vocab_size(&self) -> usize {
        self.decoder.config().vocab_size
    }
}

/// Number of logits that are held at a time.
fn logits(config: &ModelConfig, max_tokens: usize) -> usize {
    max_tokens.min(HEAD_ROWS).saturating_mul(config.vocab_size)
}

impl TrainModel {
    /// Computes the sum over a batch's targets of `KL(teacher ‖ model)` in nats, as the loss, and adds `scale` times its
    /// gradient to the gradients. Tokens whose target is [`IGNORE_TARGET`] do not count; the targets themselves are not
    /// read.
    ///
    /// # Errors
    /// As [`forward_backward`](Self::forward_backward).
    pub fn distill_from_model(
        &mut self,
        teacher: &mut Teacher,
        batch: &Batch<'_>,
        targets: &[u32],
        scale: f32,
    ) -> Result<Loss, TrainError> {
        self.check(batch)?;
        let Teacher { decoder, buffers, logits: all, .. } = teacher;
        let vocab = decoder.config().vocab_size;
        let mut hidden = decoder.forward(batch, buffers)?;
        let (mut failed, threads): (Option<ForwardError>, _) = (None, self.options.threads);
        let loss = self.forward_backward_by(batch, targets, scale, |model| {
            let mut loss = Loss::default();
            model.head_backward_of(targets.len(), |_, part, own| {
                let of_teacher = &mut all[..own.len()];
                if let Err(error) = hidden.logits(part.clone(), of_teacher) {
                    failed = Some(error);
                }
                divergences(&targets[part], (of_teacher, own), vocab, scale, &mut loss, threads);
            });
            loss
        })?;
        failed.map_or(Ok(loss), |error| Err(error.into()))
    }
}

/// Adds the divergences of some tokens to `loss`; the model's logits become `scale` times the gradient.
fn divergences(
    targets: &[u32],
    (teacher, own): (&[f32], &mut [f32]),
    vocab: usize,
    scale: f32,
    loss: &mut Loss,
    threads: usize,
) {
    let mut found = vec![0.0; targets.len()];
    let most = targets.len().div_ceil(threads.max(1)).max(1);
    let logits = teacher.chunks(most * vocab).zip(own.chunks_mut(most * vocab));
    let pieces = targets.chunks(most).zip(logits).zip(found.chunks_mut(most));
    for_each(threads, pieces, |((targets, (teacher, own)), found)| {
        let mut p = vec![0.0; vocab];
        let rows = teacher.chunks_exact(vocab).zip(own.chunks_exact_mut(vocab));
        for ((target, (teacher, own)), found) in targets.iter().zip(rows).zip(found) {
            if *target == IGNORE_TARGET {
                own.fill(0.0);
            } else {
                *found = divergence(teacher, own, &mut p, scale);
            }
        }
    });
    loss.nll += found.iter().sum::<f64>();
    loss.targets += targets.iter().filter(|target| **target != IGNORE_TARGET).count();
}

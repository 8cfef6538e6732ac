//! Distillation from another model of the same vocabulary.
//!
//! Hinton, Vinyals & Dean 2015, "Distilling the Knowledge in a Neural Network", arXiv:1503.02531, section 2: with logits
//! z of the model and v of the teacher, a temperature T, a weight α and the text's next token y, the loss of a token is
//!
//! `L = (1 - α) · -ln q(y) + α · T² · KL(p_T ‖ q_T)`,  `q = softmax(z)`, `q_T = softmax(z / T)`, `p_T = softmax(v / T)`.
//!
//! The factor T² keeps the size of the soft targets' gradient, which falls as 1/T². The gradient is
//! `∂L/∂z = (1 - α)(q - y) + α · T · (q_T - p_T)`.
//! With α = 1 and T = 1, the defaults, the loss is KL(teacher ‖ model) over all probabilities, as in LLM-QAT (Liu et al.
//! 2023, arXiv:2305.17888, section 2.3), and the text's tokens are not read.

use mantissa_kernels::{for_each, kernels};
use mantissa_model::{Batch, Buffers, Decoder, ForwardError, LoadError, ModelConfig, WeightSource, zeros};

use crate::distill::divergence;
use crate::error::TrainError;
use crate::loss::{IGNORE_TARGET, Loss};
use crate::model::TrainModel;
use crate::plan::HEAD_ROWS;

/// Weight and temperature of the teacher's predictions in the loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SoftTargets {
    /// Weight α of the divergence from the teacher, 0 to 1; the loss on the text has the weight 1 - α.
    pub weight: f64,
    /// Temperature T by which both models' logits are divided in the divergence.
    pub temperature: f64,
}

impl Default for SoftTargets {
    fn default() -> Self {
        SoftTargets { weight: 1.0, temperature: 1.0 }
    }
}

impl SoftTargets {
    /// Returns the loss of a token whose next one is `target`, in nats; `logits` of the model become `scale` times its
    /// gradient. The last rows are scratch.
    fn loss(
        self,
        teacher: &[f32],
        logits: &mut [f32],
        target: usize,
        [p, softened, teacher_logits]: &mut [Vec<f32>; 3],
        scale: f32,
    ) -> f64 {
        if self == SoftTargets::default() {
            return divergence(teacher, logits, p, scale);
        }
        let SoftTargets { weight, temperature } = self;
        let (alpha, t) = (weight as f32, temperature as f32);
        teacher_logits.iter_mut().zip(teacher).for_each(|(soft, v)| *soft = v / t);
        softened.iter_mut().zip(&*logits).for_each(|(soft, z)| *soft = z / t);
        let soft = divergence(teacher_logits, softened, p, 1.0);
        let nll = kernels().log_softmax_stats(logits).nll(logits[target]);
        let sum = kernels().softmax_numerators(logits, 1.0);
        for (z, soft) in logits.iter_mut().zip(&*softened) {
            *z = scale * ((1.0 - alpha) * (*z / sum) + alpha * t * soft);
        }
        logits[target] -= scale * (1.0 - alpha);
        (1.0 - weight) * nll + weight * temperature * temperature * soft
    }
}

/// Model whose predictions another one learns.
#[derive(Debug)]
pub struct Teacher {
    decoder: Decoder,
    soft: SoftTargets,
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
        let soft = SoftTargets::default();
        Ok(Teacher { logits: zeros(n).ok_or(memory)?, decoder, soft, buffers, digest })
    }

    /// Sets weight and temperature of its predictions in the loss.
    pub fn with_soft_targets(mut self, soft: SoftTargets) -> Self {
        self.soft = soft;
        self
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
    /// Computes the sum over a batch's targets of the loss that the teacher's [`SoftTargets`] define, in nats, and adds
    /// `scale` times its gradient to the gradients. Tokens whose target is [`IGNORE_TARGET`] do not count.
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
        let Teacher { decoder, soft, buffers, logits: all, .. } = teacher;
        let soft = *soft;
        let vocab = decoder.config().vocab_size;
        let mut hidden = decoder.forward(batch, buffers)?;
        let (mut failed, threads): (Option<ForwardError>, _) = (None, self.options.threads);
        let loss = self.forward_backward_by(batch, targets, scale, |model| {
            let mut loss = Loss::default();
            model.head_backward_of(targets.len(), |_, part, own| {
                let teacher_logits = &mut all[..own.len()];
                if let Err(error) = hidden.logits(part.clone(), teacher_logits) {
                    failed = Some(error);
                }
                losses(soft, &targets[part], (teacher_logits, own), vocab, scale, &mut loss, threads);
            });
            loss
        })?;
        failed.map_or(Ok(loss), |error| Err(error.into()))
    }
}

/// Adds the losses of some tokens to `loss`; the model's logits become `scale` times the gradient.
fn losses(
    soft: SoftTargets,
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
        let mut scratch = [(); 3].map(|()| vec![0.0; vocab]);
        let rows = teacher.chunks_exact(vocab).zip(own.chunks_exact_mut(vocab));
        for ((target, (teacher, own)), found) in targets.iter().zip(rows).zip(found) {
            if *target == IGNORE_TARGET {
                own.fill(0.0);
            } else {
                *found = soft.loss(teacher, own, *target as usize, &mut scratch, scale);
            }
        }
    });
    loss.nll += found.iter().sum::<f64>();
    loss.targets += targets.iter().filter(|target| **target != IGNORE_TARGET).count();
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEACHER: [f32; 5] = [0.3, -1.0, 2.0, 0.5, -0.2];
    const LOGITS: [f32; 5] = [0.1, 0.4, 1.0, -2.0, 0.7];
    const TARGET: usize = 3;

    /// Loss and gradient.
    fn found(soft: SoftTargets, logits: &[f32]) -> (f64, Vec<f32>) {
        let (mut own, mut rows) = (logits.to_vec(), [(); 3].map(|()| vec![0.0; 5]));
        let loss = soft.loss(&TEACHER, &mut own, TARGET, &mut rows, 1.0);
        (loss, own)
    }

    fn softmax(z: &[f32], t: f64) -> Vec<f64> {
        let e: Vec<f64> = z.iter().map(|z| (f64::from(*z) / t).exp()).collect();
        e.iter().map(|v| v / e.iter().sum::<f64>()).collect()
    }

    #[test]
    fn the_loss_is_hintons_and_its_gradient_the_slope() {
        for (weight, temperature) in [(1.0, 1.0), (0.0, 1.0), (1.0, 3.0), (0.7, 2.0), (0.5, 0.5), (0.25, 1.0)]
        {
            let soft = SoftTargets { weight, temperature };
            let (loss, gradient) = found(soft, &LOGITS);
            let (p, q) = (softmax(&TEACHER, temperature), softmax(&LOGITS, temperature));
            let kl: f64 = p.iter().zip(&q).map(|(p, q)| p * (p / q).ln()).sum();
            let nll = -softmax(&LOGITS, 1.0)[TARGET].ln();
            let expected = (1.0 - weight) * nll + weight * temperature * temperature * kl;
            assert!((loss - expected).abs() < 1e-5, "{soft:?}: {loss} for {expected}");
            for i in 0..LOGITS.len() {
                let at = |h: f32| {
                    let mut moved = LOGITS;
                    moved[i] += h;
                    found(soft, &moved).0
                };
                let slope = (at(1e-2) - at(-1e-2)) / 2e-2;
                assert!(
                    (f64::from(gradient[i]) - slope).abs() < 5e-4,
                    "{soft:?} {i}: {} for {slope}",
                    gradient[i]
                );
            }
        }
    }
}

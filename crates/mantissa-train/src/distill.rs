//! Knowledge distillation: minimizes the KL divergence from a teacher's predictions instead of the NLL of a
//! text.
//!
//! `KL(teacher ‖ model) = Σ p (ln p - ln q)` has the gradient `q - p` with respect to the model's logits. It
//! vanishes where the two agree, unlike the NLL gradient, so little text suffices to measure small
//! differences (Hinton, Vinyals & Dean 2015, arXiv:1503.02531).

use mantissa_kernels::{for_each, kernels};
use mantissa_model::flow::{MIN_ROWS, parts};
use mantissa_model::{
    Batch, ForwardError, InputQuantizer, LinearInput, LoadError, ModelConfig, WeightSource, forward_f32,
    zeros,
};

use crate::error::TrainError;
use crate::exchange::Unit;
use crate::gradients::Wanted;
use crate::head::soft;
use crate::model::TrainModel;
use crate::operand::Operand;
use crate::plan::HEAD_ROWS;
use crate::rows::{rows, rows_mut};
use crate::support::check_plain;

impl TrainModel {
    /// Returns the sum over a batch's tokens of `KL(teacher ‖ model)` in nats, and propagates `scale` times
    /// its gradient through the layers.
    ///
    /// Weight gradients are added to the gradients if `weights`; the [slopes](Self::slopes) of inputs are
    /// replaced. The teacher shares this model's final norm and head; `states` `[tokens, hidden]` is the
    /// output of its last layer.
    ///
    /// # Errors
    /// As [`forward_backward`](Self::forward_backward); [`TrainError::Load`] if memory for the teacher's
    /// predictions is missing.
    pub fn distill(
        &mut self,
        batch: &Batch<'_>,
        states: &[f32],
        scale: f32,
        weights: bool,
    ) -> Result<f64, TrainError> {
        self.distill_by(None, batch, states, scale, weights)
    }

    /// Computes the same for a teacher with its own final norm and head, whose last states are `states`; gradients
    /// of all parameters are added.
    ///
    /// # Errors
    /// As [`distill`](Self::distill).
    pub fn distill_from(
        &mut self,
        head: &TeacherHead,
        batch: &Batch<'_>,
        states: &[f32],
        scale: f32,
    ) -> Result<f64, TrainError> {
        self.distill_by(Some(head), batch, states, scale, true)
    }

    fn distill_by(
        &mut self,
        head: Option<&TeacherHead>,
        batch: &Batch<'_>,
        states: &[f32],
        scale: f32,
        weights: bool,
    ) -> Result<f64, TrainError> {
        let mut teacher = self.teacher(head, batch, states)?;
        self.forward_saving(batch)?;
        self.balance.clear();
        let (mut sum, threads) = (0.0, self.options.threads);
        self.head_backward_of(batch.tokens.len(), |multiply, part, logits| {
            sum += teacher.divergence(multiply, part.start, logits, scale, threads);
        });
        let inputs = self.saved.iter_mut().flat_map(|saved| &mut saved.inputs);
        inputs.for_each(Operand::forget_slopes);
        if weights {
            return self.backward(batch).map(|()| sum);
        }
        for i in (0..self.layers.len()).rev() {
            self.reach(Unit::Layer(i))?;
            self.layer_backward(i, batch.lens, Wanted::Input);
        }
        Ok(sum)
    }

    /// Returns the same sum without computing gradients.
    ///
    /// # Errors
    /// As [`distill`](Self::distill).
    pub fn divergence(&mut self, batch: &Batch<'_>, states: &[f32]) -> Result<f64, TrainError> {
        self.divergence_by(None, batch, states)
    }

    /// Computes the sum of [`distill_from`](Self::distill_from) without gradients.
    ///
    /// # Errors
    /// As [`distill`](Self::distill).
    pub fn divergence_from(
        &mut self,
        head: &TeacherHead,
        batch: &Batch<'_>,
        states: &[f32],
    ) -> Result<f64, TrainError> {
        self.divergence_by(Some(head), batch, states)
    }

    fn divergence_by(
        &mut self,
        head: Option<&TeacherHead>,
        batch: &Batch<'_>,
        states: &[f32],
    ) -> Result<f64, TrainError> {
        let mut teacher = self.teacher(head, batch, states)?;
        self.forward_saving(batch)?;
        let (d, vocab, threads) = (self.config.hidden_size, self.config.vocab_size, self.options.threads);
        let (s, params, head) = (&mut self.scratch, &self.params, &self.head);
        let (mut sum, cap) = (0.0, self.config.logit_softcap);
        for part in parts(batch.tokens.len(), HEAD_ROWS) {
            let (logits, normed) = (&mut s.logits[..part.len() * vocab], rows(&s.normed, d, part.clone()));
            let normed = s.head_input.at_row(part.start, d, normed);
            head.fprop(params, normed, logits, false, threads);
            soft(cap, logits);
            let multiply = |x: &[f32], out: &mut [f32]| {
                head.fprop_f32(params, x, out, threads);
                soft(cap, out);
            };
            sum += teacher.divergence(&multiply, part.start, logits, 0.0, threads);
        }
        Ok(sum)
    }

    /// Quantizes the `input` of layer `layer`'s linear layers with `quantizer` from now on, as at run time.
    /// Gradients pass the rounding unchanged (straight-through estimator). With `order`, the
    /// [slopes](Self::slopes) for rotations of that order are kept.
    ///
    /// # Errors
    /// [`TrainError::Load`] if memory is missing.
    ///
    /// # Panics
    /// If the layer or input does not exist.
    pub fn quantize_input(
        &mut self,
        layer: usize,
        input: LinearInput,
        quantizer: InputQuantizer,
        order: Option<usize>,
    ) -> Result<(), TrainError> {
        let n = self.options.max_tokens.max(MIN_ROWS).saturating_mul(self.config.input_width(input));
        let slopes = order.map_or(0, |order| order.saturating_mul(order));
        let memory =
            LoadError::Memory { what: "training", bytes: 4 * (n as u64).saturating_add(slopes as u64) };
        let operand = match order {
            Some(order) => Operand::rotated(quantizer, n, order),
            None => Operand::quantized(quantizer, n),
        };
        self.saved[layer].inputs[input.index()] = operand.ok_or(memory)?;
        Ok(())
    }

    /// Returns the slope matrix `S` `[order, order]` of the last [`distill`](Self::distill) for a quantized
    /// input; `None` if it is not kept.
    ///
    /// If the input turns from x to `x + A x` before rounding, each run of `order` values by itself, and the
    /// consumers turn with it, the loss changes by `Σ S[i, j] A[i, j]`, as far as block ranges change.
    ///
    /// # Panics
    /// As [`quantize_input`](Self::quantize_input).
    pub fn slopes(&self, layer: usize, input: LinearInput) -> Option<&[f32]> {
        self.saved[layer].inputs[input.index()].slopes()
    }

    fn teacher<'t>(
        &self,
        head: Option<&'t TeacherHead>,
        batch: &Batch<'_>,
        states: &[f32],
    ) -> Result<Teacher<'t>, TrainError> {
        self.check(batch)?;
        let (d, vocab) = (self.config.hidden_size, self.config.vocab_size);
        let tokens = batch.tokens.len();
        if states.len() != tokens * d {
            return Err(ForwardError::Lengths { sum: states.len() / d, tokens }.into());
        }
        let values = tokens.min(HEAD_ROWS) * vocab;
        let memory = || LoadError::Memory { what: "training", bytes: 4 * (values + states.len()) as u64 };
        let mut normed = zeros(states.len()).ok_or_else(memory)?;
        let logits = zeros(values).ok_or_else(memory)?;
        match head {
            Some(head) => {
                kernels().rms_norm(states, &head.norm, self.config.rms_norm_eps, &mut normed);
            }
            None => self.final_norm.values(&self.params).forward(states, &mut normed),
        }
        Ok(Teacher { hidden: d, vocab, normed, logits, head: head.map(|head| &head.weight[..]) })
    }
}

/// Final norm and head of a teacher that does not share them with the model in training.
#[derive(Debug)]
pub struct TeacherHead {
    /// Weight of the norm, `[hidden]`.
    norm: Vec<f32>,
    /// Weight of the head, `[vocab, hidden]`.
    weight: Vec<f32>,
}

impl TeacherHead {
    /// Loads final norm and head of the unquantized model in `source`.
    ///
    /// # Errors
    /// As [`WeightSource::tensor_f32`]; [`TrainError::Unsupported`] for norms and heads of other kinds.
    pub fn load(source: &dyn WeightSource, config: &ModelConfig) -> Result<Self, TrainError> {
        check_plain(config)?;
        let (hidden, vocab) = (config.hidden_size, config.vocab_size);
        let module = if config.tie_word_embeddings {
            config.embedding_module()
        } else {
            config.head_module().to_owned()
        };
        let norm = source.tensor_f32(&format!("{}.weight", config.final_norm_module()), &[hidden])?;
        let weight = source.tensor_f32(&format!("{module}.weight"), &[vocab, hidden])?;
        Ok(TeacherHead { norm, weight })
    }

    /// Bytes of norm and head.
    pub fn bytes(config: &ModelConfig) -> u64 {
        4 * (config.vocab_size as u64 + 1).saturating_mul(config.hidden_size as u64)
    }
}

/// Minimum tokens per thread of the head's product: from 64 rows on, a row does not depend on their number.
const TOKENS: usize = 128;

/// Predictions of the teacher.
struct Teacher<'t> {
    hidden: usize,
    vocab: usize,
    /// Input of the head, `[tokens, hidden]`.
    normed: Vec<f32>,
    /// Logits of some tokens.
    logits: Vec<f32>,
    /// Its own head; `None` if it shares the model's.
    head: Option<&'t [f32]>,
}

impl Teacher<'_> {
    /// Returns the divergence for the tokens from `first` on; `logits` become `scale` times its gradient.
    /// `multiply` is the head's product.
    fn divergence(
        &mut self,
        multiply: &dyn Fn(&[f32], &mut [f32]),
        first: usize,
        logits: &mut [f32],
        scale: f32,
        threads: usize,
    ) -> f64 {
        let tokens = logits.len() / self.vocab;
        let own = &mut self.logits[..logits.len()];
        let normed = rows(&self.normed, self.hidden, first..first + tokens);
        match self.head {
            None => multiply(normed, own),
            Some(head) => {
                let (d, shape) = (self.hidden, (self.vocab, self.hidden));
                let cut = parts(tokens, tokens.div_ceil(threads.max(1)).max(TOKENS));
                for_each(threads, cut.clone().zip(rows_mut(own, self.vocab, cut)), |(part, own)| {
                    forward_f32(head, None, shape, rows(normed, d, part), own, false);
                });
            }
        }
        let mut found = vec![0.0; tokens];
        let most = tokens.div_ceil(threads.max(1)).max(1);
        let pieces = own.chunks_mut(most * self.vocab).zip(logits.chunks_mut(most * self.vocab));
        for_each(threads, pieces.zip(found.chunks_mut(most)), |((own, logits), found)| {
            let mut p = vec![0.0; self.vocab];
            let rows = own.chunks_exact(self.vocab).zip(logits.chunks_exact_mut(self.vocab));
            for ((own, logits), found) in rows.zip(found) {
                *found = divergence(own, logits, &mut p, scale);
            }
        });
        found.iter().sum()
    }
}

/// Returns the KL of one token; `logits` become `scale` times its gradient. `p` is scratch.
pub(crate) fn divergence(teacher: &[f32], logits: &mut [f32], p: &mut [f32], scale: f32) -> f64 {
    let [teacher_stats, student_stats] = [teacher, &*logits].map(|row| kernels().log_softmax_stats(row));
    p.copy_from_slice(teacher);
    let sum = kernels().softmax_numerators(p, 1.0);
    let gaps = p.iter().zip(teacher.iter().zip(&*logits));
    let gap: f64 = gaps.map(|(p, (t, q))| f64::from(*p) * (f64::from(*t) - f64::from(*q))).sum();
    let own = kernels().softmax_numerators(logits, 1.0);
    logits.iter_mut().zip(&*p).for_each(|(q, p)| *q = scale * (*q / own - p / sum));
    // The NLL at index 0 plus its logit is the log of the sum of exponentials.
    gap / f64::from(sum) + student_stats.nll(0.0) - teacher_stats.nll(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gradient_matches_the_divergence() {
        let teacher = [0.3, -1.0, 2.0, 0.5];
        let logits = [0.1f32, 0.4, 1.0, -2.0];
        let at = |logits: &[f32]| {
            let mut logits = logits.to_vec();
            divergence(&teacher, &mut logits, &mut [0.0; 4], 1.0)
        };
        let mut gradient = logits;
        let found = divergence(&teacher, &mut gradient, &mut [0.0; 4], 1.0);
        let softmax = |z: &[f32]| {
            let e: Vec<f64> = z.iter().map(|z| f64::from(*z).exp()).collect();
            e.iter().map(|v| v / e.iter().sum::<f64>()).collect::<Vec<_>>()
        };
        let (p, q) = (softmax(&teacher), softmax(&logits));
        let expected: f64 = p.iter().zip(&q).map(|(p, q)| p * (p / q).ln()).sum();
        assert!((found - expected).abs() < 1e-6, "{found} for {expected}");
        for i in 0..4 {
            let (mut up, mut down) = (logits, logits);
            (up[i], down[i]) = (up[i] + 1e-2, down[i] - 1e-2);
            let slope = (at(&up) - at(&down)) / 2e-2;
            assert!((f64::from(gradient[i]) - slope).abs() < 1e-4, "{i}: {} for {slope}", gradient[i]);
        }
        let mut same = teacher;
        assert!(divergence(&teacher, &mut same, &mut [0.0; 4], 1.0).abs() < 1e-9);
        assert_eq!(same, [0.0; 4]);
    }
}

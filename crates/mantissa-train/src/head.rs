//! Final norm, head and softmax cross-entropy with their backward. Tokens are processed in parts, so that
//! logits are never held for all.

use std::ops::Range;

use mantissa_kernels::{for_each, kernels};
use mantissa_model::flow::parts;

use crate::gemm_error::Exact;
use crate::health::{OperandKind, Operator};
use crate::loss::{IGNORE_TARGET, Loss};
use crate::model::TrainModel;
use crate::plan::HEAD_ROWS;
use crate::policy::Gemm;
use crate::profile::StepPart;
use crate::rows::rows;
use crate::store::StoreRef;

impl TrainModel {
    /// Computes the loss from the hidden states in `scratch`, the gradients of head and final norm, and in
    /// `d_residual` the gradient of the norm's input.
    pub(crate) fn head_backward(&mut self, targets: &[u32], scale: f32) -> Loss {
        let (mut loss, threads) = (Loss::default(), self.options.threads);
        self.head_backward_of(targets.len(), |_, part, logits| {
            cross_entropy(&targets[part], scale, logits, &mut loss, threads);
        });
        loss
    }

    /// Computes the same for any loss. `differentiate` receives the head's product, a part of the `tokens`
    /// tokens and their logits, which it replaces by the gradient of the loss.
    pub(crate) fn head_backward_of(
        &mut self,
        tokens: usize,
        mut differentiate: impl FnMut(&dyn Fn(&[f32], &mut [f32]), Range<usize>, &mut [f32]),
    ) {
        let (d, vocab, threads) = (self.config.hidden_size, self.config.vocab_size, self.options.threads);
        let (s, params, profile, head) = (&mut self.scratch, &self.params, &self.profile, &self.head);
        let cap = self.config.logit_softcap;
        let mut bias = vec![0.0; if head.has_bias() { vocab } else { 0 }];
        let (watch, policy, at) = (&self.watch, &self.options.policy.head, Operator::Head);
        // Head gradients accumulate in f32 over all parts, and are rounded once if gradients are bf16.
        let mut pass = |mut dw: Option<&mut [f32]>| {
            for part in parts(tokens, HEAD_ROWS) {
                let (logits, states) =
                    (&mut s.logits[..part.len() * vocab], rows(&s.normed, d, part.clone()));
                watch.operand(at, OperandKind::X, policy, states);
                let (x, w) = (states, params.get(head.weight()));
                watch.gemm(at, head, Exact { gemm: Gemm::Fprop, left: x, right: w }, None);
                let states = s.head_input.at_row(part.start, d, states);
                profile.time(StepPart::Head, || head.fprop(params, states, logits, false, threads));
                watch.result(at, "fprop y", logits);
                let multiply = |x: &[f32], out: &mut [f32]| {
                    head.fprop_f32(params, x, out, threads);
                    soft(cap, out);
                };
                profile.time(StepPart::CrossEntropy, || {
                    soft(cap, logits);
                    let capped = &mut s.capped[..if cap.is_some() { logits.len() } else { 0 }];
                    capped.copy_from_slice(&logits[..capped.len()]);
                    differentiate(&multiply, part.clone(), logits);
                    if let Some(cap) = cap {
                        kernels().softcap_backward(capped, 1.0, cap, logits);
                    }
                });
                let d_normed = &mut s.d_normed[part.start * d..part.end * d];
                // From here on, `logits` holds the gradient of the loss.
                watch.result(Operator::Loss, "gradient", logits);
                watch.operand(at, OperandKind::Dy, policy, logits);
                watch.gemm(at, head, Exact { gemm: Gemm::Dgrad, left: logits, right: w }, None);
                watch.gemm(
                    at,
                    head,
                    Exact { gemm: Gemm::Wgrad, left: logits, right: StoreRef::F32(x) },
                    None,
                );
                profile.time(StepPart::Rounding, || s.head_gradient.round(0, vocab, logits, threads));
                if !bias.is_empty() {
                    logits.chunks_exact(vocab).for_each(|dy| kernels().axpy(1.0, dy, &mut bias));
                }
                let logits = s.head_gradient.of(logits);
                profile.time(StepPart::Head, || {
                    head.dgrad(params, logits, d_normed, false, threads);
                    if let Some(dw) = dw.as_deref_mut() {
                        head.wgrad_into(logits, states, dw, threads);
                    }
                });
                watch.result(at, "dgrad dx", d_normed);
                if let Some(dw) = dw.as_deref() {
                    watch.result(at, "wgrad dw", dw);
                }
            }
        };
        match self.grads.holds(&head.weight()) {
            true => self.grads.add(head.weight(), |dw| pass(Some(dw))),
            false => pass(None), // frozen
        }
        head.add_bias_grad(&bias, &mut self.grads);
        let pair = (&s.residual[..tokens * d], &s.d_normed[..tokens * d]);
        let dx = &mut s.d_residual[..tokens * d];
        profile.time(StepPart::NormBackward, || {
            dx.fill(0.0);
            self.final_norm.backward(params, d, pair, dx, &mut s.partials, &mut self.grads, threads);
        });
        if !watch.is_off() && self.grads.holds(self.final_norm.weight()) {
            let weight = self.grads.get(self.final_norm.weight().clone());
            watch.result(Operator::FinalNorm, "gradient", &weight.widened());
        }
        watch.result(Operator::FinalNorm, "gradient", &s.d_residual[..tokens * d]);
    }
}

impl TrainModel {
    /// Computes the loss from the hidden states in `scratch`.
    pub(crate) fn head_loss(&mut self, targets: &[u32]) -> Loss {
        let (d, vocab, threads) = (self.config.hidden_size, self.config.vocab_size, self.options.threads);
        let (s, params, head) = (&mut self.scratch, &self.params, &self.head);
        let mut loss = Loss::default();
        for part in parts(targets.len(), HEAD_ROWS) {
            let (logits, states) = (&mut s.logits[..part.len() * vocab], rows(&s.normed, d, part.clone()));
            let states = s.head_input.at_row(part.start, d, states);
            head.fprop(params, states, logits, false, threads);
            soft(self.config.logit_softcap, logits);
            cross_entropy(&targets[part], 0.0, logits, &mut loss, threads);
        }
        loss
    }
}

/// Caps logits, if the model caps them.
pub(crate) fn soft(cap: Option<f32>, logits: &mut [f32]) {
    if let Some(cap) = cap {
        kernels().softcap(logits, 1.0, cap);
    }
}

/// Adds the loss of at most [`HEAD_ROWS`] tokens to `loss`, and replaces each token's logits by `scale` times
/// its gradient.
fn cross_entropy(targets: &[u32], scale: f32, logits: &mut [f32], loss: &mut Loss, threads: usize) {
    let mut nll = [0.0; HEAD_ROWS];
    let nll = &mut nll[..targets.len()];
    let vocab = logits.len() / targets.len().max(1);
    let most = targets.len().div_ceil(threads.max(1)).max(1);
    let pieces = targets.chunks(most).zip(logits.chunks_mut(most * vocab)).zip(nll.chunks_mut(most));
    for_each(threads, pieces, |((targets, logits), nll)| {
        for ((&target, row), nll) in targets.iter().zip(logits.chunks_exact_mut(vocab)).zip(nll) {
            *nll = if target == IGNORE_TARGET {
                row.fill(0.0);
                0.0
            } else {
                kernels().cross_entropy_backward(row, target as usize, scale)
            };
        }
    });
    loss.nll += nll.iter().sum::<f64>();
    loss.targets += targets.iter().filter(|target| **target != IGNORE_TARGET).count();
}

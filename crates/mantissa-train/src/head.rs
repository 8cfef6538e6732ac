//! Last norm, head and softmax cross-entropy with their backward, some tokens at a time, so that logits and
//! their gradients are never held for all.

use mantissa_kernels::{for_each, kernels};
use mantissa_model::flow::parts;

use crate::backward::{add_partials, norm_backward_part};
use crate::model::{IGNORE_TARGET, Loss, TrainModel};
use crate::plan::HEAD_ROWS;
use crate::profile::Part;
use crate::rows::{PART, rows, rows_mut};

impl TrainModel {
    /// From the states in `scratch`: the loss, the gradients of head and last norm, and in `d_residual` that of
    /// what the last norm reads.
    pub(crate) fn head_backward(&mut self, targets: &[u32], scale: f32) -> Loss {
        let (d, vocab, threads) = (self.config.hidden_size, self.config.vocab_size, self.options.threads);
        let tokens = targets.len();
        let (s, params, profile, head) = (&mut self.scratch, &self.params, &self.profile, &self.head);
        // One sum over all tokens, which is rounded once where gradients are.
        let loss = self.grads.add(head.weight(), |dw| {
            let mut loss = Loss::default();
            for part in parts(tokens, HEAD_ROWS) {
                let (n, targets) = (part.len(), &targets[part.clone()]);
                let (logits, states) = (&mut s.logits[..n * vocab], rows(&s.normed, d, part.clone()));
                let states = s.head_input.from_row(part.start, d, states);
                profile.time(Part::Head, || head.fprop(params, states, logits, false, threads));
                let mut nll = [0.0; HEAD_ROWS];
                profile.time(Part::CrossEntropy, || {
                    cross_entropy(targets, scale, logits, &mut nll[..n], threads);
                });
                loss.nll += nll[..n].iter().sum::<f64>();
                loss.targets += targets.iter().filter(|target| **target != IGNORE_TARGET).count();
                let d_normed = &mut s.d_normed[part.start * d..part.end * d];
                profile.time(Part::Rounding, || s.head_gradient.round(0, vocab, logits, threads));
                let logits = s.head_gradient.of(logits);
                profile.time(Part::Head, || {
                    head.dgrad(params, logits, d_normed, false, threads);
                    head.wgrad_into(logits, states, dw, threads);
                });
            }
            loss
        });
        let eps = self.config.rms_norm_eps;
        let weight = params.f32(&self.final_norm);
        profile.time(Part::NormBackward, || {
            s.d_residual[..tokens * d].fill(0.0);
            let cut = parts(tokens, PART);
            let partials = rows_mut(&mut s.partials, d, cut.clone().map(|_| 0..1));
            let pieces = cut.clone().zip(rows_mut(&mut s.d_residual, d, cut)).zip(partials);
            let (x, dy) = (&s.residual, &s.d_normed);
            for_each(threads, pieces, |((part, dx), partial)| {
                norm_backward_part(rows(x, d, part.clone()), &weight, eps, rows(dy, d, part), dx, partial);
            });
            self.grads.add(self.final_norm.clone(), |grad| add_partials(&s.partials, tokens, grad));
        });
        loss
    }
}

/// Replaces the logits of each token by `scale` times the gradient of its loss, which goes to `nll`.
fn cross_entropy(targets: &[u32], scale: f32, logits: &mut [f32], nll: &mut [f64], threads: usize) {
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
}

//! Optimizers: AdamW with f32 states, and the norm of the gradients.

use mantissa_kernels::{AdamWStep, for_each, kernels, map_reduce_fixed};
use mantissa_model::{LoadError, Role, zeros};

use crate::arena::ParamTable;
use crate::error::TrainError;
use crate::model::TrainModel;
use crate::profile::Part;

/// Elements of an arena that a thread takes at a time; sums are taken in pieces of this many, in their order.
const PIECE: usize = 1 << 16;

/// What an AdamW run keeps fixed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWOptions {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the corrected second moment.
    pub eps: f64,
    /// Decoupled weight decay, times the learning rate for each step.
    pub weight_decay: f64,
    /// Whether the weights of norms and the biases decay too, as they do in PyTorch's optimizer unless they are
    /// put in a group of their own.
    pub decay_vectors: bool,
    /// Greatest norm of all gradients together; greater ones are scaled down to it.
    pub max_norm: Option<f64>,
}

impl Default for AdamWOptions {
    /// PyTorch's betas, eps and weight decay; vectors do not decay, no clipping.
    fn default() -> Self {
        AdamWOptions {
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 1e-2,
            decay_vectors: false,
            max_norm: None,
        }
    }
}

/// AdamW (Loshchilov & Hutter 2019, alg. 2) with PyTorch's order of operations; see [`AdamWStep`].
#[derive(Clone, Debug)]
pub struct AdamW {
    options: AdamWOptions,
    /// First moments, in an arena.
    m: Vec<f32>,
    /// Second moments, in an arena.
    v: Vec<f32>,
    /// Steps done.
    steps: u64,
}

impl AdamW {
    /// A fresh state for the parameters of `table`.
    ///
    /// # Errors
    /// [`LoadError::Memory`].
    pub fn new(table: &ParamTable, options: AdamWOptions) -> Result<Self, LoadError> {
        let arena = || {
            let memory = LoadError::Memory { what: "optimizer state", bytes: Self::bytes(table) };
            zeros(table.len()).ok_or(memory)
        };
        Ok(AdamW { options, m: arena()?, v: arena()?, steps: 0 })
    }

    /// Bytes of a state.
    pub fn bytes(table: &ParamTable) -> u64 {
        (table.len() as u64).saturating_mul(8)
    }

    /// Steps done.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Updates the parameters of `model` by its gradients with learning rate `lr` and returns the norm of the
    /// gradients, before clipping.
    ///
    /// # Errors
    /// [`TrainError::NonFinite`] where that norm is not finite, [`TrainError::OtherModel`]; parameters and state are
    /// then as they were.
    pub fn step(&mut self, model: &mut TrainModel, lr: f64) -> Result<f64, TrainError> {
        let (found, allowed) = (self.m.len(), model.grads.len());
        if found != allowed {
            return Err(TrainError::OtherModel { found, allowed });
        }
        let threads = model.options.threads;
        let norm = model.profile.time(Part::Optimizer, || norm(&model.grads, threads));
        if !norm.is_finite() {
            return Err(TrainError::NonFinite { step: self.steps + 1, norm });
        }
        self.steps += 1;
        let factor = self.options.max_norm.map_or(1.0, |max| clip_factor(norm, max));
        let decayed = self.factors(lr, self.options.weight_decay, factor);
        let plain = self.factors(lr, 0.0, factor);
        let (table, values) = model.params.split_mut();
        model.profile.time(Part::Optimizer, || {
            for param in table.iter() {
                let vector = matches!(param.tensor.role, Role::Norm { .. } | Role::Bias { .. });
                let step = if vector && !self.options.decay_vectors { &plain } else { &decayed };
                let range = &param.range;
                let pieces =
                    values[range.clone()].chunks_mut(PIECE).zip(model.grads[range.clone()].chunks(PIECE));
                let pieces = pieces.zip(self.m[range.clone()].chunks_mut(PIECE));
                let pieces = pieces.zip(self.v[range.clone()].chunks_mut(PIECE));
                for_each(threads, pieces, |(((values, grads), m), v)| {
                    kernels().adamw(step, values, grads, m, v);
                });
            }
        });
        Ok(norm)
    }

    /// The factors of step `self.steps`, made in f64 as PyTorch makes them.
    fn factors(&self, lr: f64, weight_decay: f64, grad_scale: f64) -> AdamWStep {
        let AdamWOptions { beta1, beta2, eps, .. } = self.options;
        let t = self.steps as f64;
        AdamWStep {
            grad_scale: grad_scale as f32,
            decay: (1.0 - lr * weight_decay) as f32,
            one_minus_beta1: (1.0 - beta1) as f32,
            beta2: beta2 as f32,
            one_minus_beta2: (1.0 - beta2) as f32,
            sqrt_correction2: (1.0 - beta2.powf(t)).sqrt() as f32,
            eps: eps as f32,
            step_size: (lr / (1.0 - beta1.powf(t))) as f32,
        }
    }
}

/// The norm of all gradients together, summed in f64 in fixed pieces.
fn norm(grads: &[f32], threads: usize) -> f64 {
    let squares = |range| kernels().sum_squares_f64(&grads[range]);
    map_reduce_fixed(threads, grads.len(), PIECE, squares, 0.0, |a, b| a + b).sqrt()
}

/// Factor that brings gradients of `norm` to at most `max`, as PyTorch's `clip_grad_norm_` has it.
pub fn clip_factor(norm: f64, max: f64) -> f64 {
    (max / (norm + 1e-6)).min(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_norm_has_the_same_bits_at_every_thread_count() {
        let grads: Vec<f32> = (0..300_001).map(|i| (i as f32 * 0.37).sin()).collect();
        let one = norm(&grads, 1);
        let exact: f64 = grads.iter().map(|&g| f64::from(g) * f64::from(g)).sum();
        assert!((one - exact.sqrt()).abs() < 1e-9);
        assert!([2, 3, 7].iter().all(|&threads| norm(&grads, threads).to_bits() == one.to_bits()));
    }

    #[test]
    fn clipping_only_scales_down() {
        assert_eq!(clip_factor(0.5, 1.0), 1.0);
        assert!((clip_factor(4.0, 1.0) - 0.25).abs() < 1e-6);
        assert_eq!(clip_factor(0.0, 1.0), 1.0);
    }
}

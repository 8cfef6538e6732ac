//! AdamW (Loshchilov & Hutter 2019, "Decoupled Weight Decay Regularization", arXiv 1711.05101, alg. 2), for any
//! tensor:
//!
//! ```text
//! m ← β1 m + (1 - β1) g,  v ← β2 v + (1 - β2) g²
//! p ← p (1 - lr wd) - lr / (1 - β1ᵗ) · m / (√v / √(1 - β2ᵗ) + ε)
//! ```
//!
//! With PyTorch's order of operations ([`AdamWStep`]); with 8-bit moments of bitsandbytes, with its own
//! ([`crate::blockwise`]).

use std::sync::Arc;

use mantissa_kernels::{AdamWStep, kernels};
use mantissa_model::LoadError;
use mantissa_options::{Note, Within, options};

use super::keys::{MomentKeys, NamedFormat, Only, OptimizerKeys, OptimizerKind};
use super::method::{Layout, State, Step, UpdateRule, UpdateTarget};
use super::moment_format::MomentFormat;
use super::{Optimizer, OptimizerSpec};
use crate::arena::Parameters;
use crate::blockwise::{BlockwiseRule, BlockwiseStep};
use crate::error::TrainError;
use crate::param_table::{ParamInfo, ParamTable};
use crate::policy::Policy;

/// Row of the registry.
pub(super) const KIND: OptimizerKind = OptimizerKind {
    name: "adamw",
    about: "AdamW (Loshchilov & Hutter 2019)",
    keys: || Box::<Keys>::default(),
};

options! {
    /// Own keys.
    #[derive(Clone, Debug)]
    struct Keys {
        ..moments: MomentKeys, "Format of the moments.";
        /// decay of the first moment of adamw
        beta1: f64 = 0.9, Within(0.0, 0.999_999);
        /// decay of the second moment of adamw
        beta2: f64 = 0.95, Within(0.0, 0.999_999_9);
        /// term of adamw added to the root
        eps: f64 = 1e-8, Within(1e-30, 1.0);
        /// key of other optimizers
        momentum: f64 = 0.9, Only(0.9), Note::RETIRED;
        /// key of other optimizers
        nesterov: bool = false, Only(false), Note::RETIRED;
    }
}

impl OptimizerKeys for Keys {
    fn moments(&self) -> &NamedFormat {
        &self.moments.moments
    }

    fn build(&self) -> Arc<dyn UpdateRule> {
        let Keys { beta1, beta2, eps, .. } = self;
        Arc::new(AdamWMethod { beta1: *beta1, beta2: *beta2, eps: *eps, moments: self.moments().format })
    }
}

/// Hyperparameters of AdamW.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWOptions {
    /// Decay rate of the first moment.
    pub beta1: f64,
    /// Decay rate of the second moment.
    pub beta2: f64,
    /// Term added to the square root of the bias-corrected second moment.
    pub eps: f64,
    /// Decoupled weight decay, multiplied by the learning rate each step.
    pub weight_decay: f64,
    /// True if norm weights and biases decay too, as in PyTorch's default parameter group.
    pub decay_vectors: bool,
    /// Maximum global gradient norm; larger gradients are scaled down to it.
    pub max_norm: Option<f64>,
    /// Storage format of the moments.
    pub moments: MomentFormat,
}

impl Default for AdamWOptions {
    /// Uses PyTorch's betas, eps and weight decay; vectors do not decay, no clipping.
    fn default() -> Self {
        AdamWOptions {
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 1e-2,
            decay_vectors: false,
            max_norm: None,
            moments: MomentFormat::F32,
        }
    }
}

/// Constructor of AdamW optimizers.
#[derive(Clone, Copy, Debug)]
pub struct AdamW;

impl AdamW {
    /// Allocates a fresh state for the f32 weights `params`, trained with `policy`.
    ///
    /// # Errors
    /// [`LoadError::Memory`].
    #[expect(clippy::new_ret_no_self, reason = "every optimizer is an `Optimizer`")]
    pub fn new(params: &Parameters, policy: &Policy, options: AdamWOptions) -> Result<Optimizer, LoadError> {
        Optimizer::new(params, policy, &Self::recipe(options))
    }

    /// Bytes of the optimizer state.
    pub fn bytes(table: &ParamTable, policy: &Policy, moments: MomentFormat) -> u64 {
        Self::recipe(AdamWOptions { moments, ..AdamWOptions::default() }).bytes(table, policy)
    }

    fn recipe(options: AdamWOptions) -> OptimizerSpec {
        let AdamWOptions { beta1, beta2, eps, weight_decay, decay_vectors, max_norm, moments } = options;
        let method = Arc::new(AdamWMethod { beta1, beta2, eps, moments });
        OptimizerSpec { method, weight_decay, decay_vectors, max_norm, paged: false }
    }
}

/// AdamW with its hyperparameters.
#[derive(Clone, Copy, Debug)]
pub(super) struct AdamWMethod {
    pub(super) beta1: f64,
    pub(super) beta2: f64,
    pub(super) eps: f64,
    pub(super) moments: MomentFormat,
}

impl UpdateRule for AdamWMethod {
    fn layout(&self, _: &ParamInfo) -> Layout {
        let moments = vec![("m", false, self.moments), ("v", true, self.moments)];
        Layout { moments, ..Layout::default() }
    }

    fn is_elementwise(&self, param: &ParamInfo) -> bool {
        !self.moments.is_whole(param.range.len())
    }

    fn update(
        &self,
        target: &mut UpdateTarget<'_>,
        state: &mut State,
        scratch: &mut [f32],
        step: &Step,
    ) -> Result<(), TrainError> {
        let (plain, eight) = (self.step(step), self.blockwise(step));
        target.each_piece(&mut state.moments, scratch, |piece| {
            // Everything in f32 and nothing to count: the kernel updates the piece directly.
            if let Some((p, g, [m, v])) = piece.plain() {
                kernels().adamw(&plain, p, g, m, v);
            } else if !piece.coded_blocks(|p, g, codes, absmax| eight.codes(p, g, codes, absmax)) {
                piece.blocks(|_, p, g, [m, v]| kernels().adamw(&plain, p, g, m, v));
            }
        })
    }
}

impl AdamWMethod {
    /// Computes the constants of a step in f64, as PyTorch does.
    pub(super) fn step(&self, step: &Step) -> AdamWStep {
        let AdamWMethod { beta1, beta2, eps, .. } = *self;
        let t = step.t as f64;
        AdamWStep {
            grad_scale: step.grad_scale as f32,
            decay: (1.0 - step.lr * step.weight_decay) as f32,
            one_minus_beta1: (1.0 - beta1) as f32,
            beta2: beta2 as f32,
            one_minus_beta2: (1.0 - beta2) as f32,
            sqrt_correction2: (1.0 - beta2.powf(t)).sqrt() as f32,
            eps: eps as f32,
            step_size: (step.lr / (1.0 - beta1.powf(t))) as f32,
        }
    }

    /// Computes the constants of a step of 8-bit moments.
    fn blockwise(&self, step: &Step) -> BlockwiseStep {
        let rule = match self.moments {
            MomentFormat::Blockwise8(rule) => rule,
            _ => BlockwiseRule::default(),
        };
        let betas = (self.beta1, self.beta2, self.eps);
        BlockwiseStep::new(rule, betas, step.lr, step.weight_decay, step.t, step.grad_scale)
    }
}

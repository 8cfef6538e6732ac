//! AutoRound: learned rounding and clipping by block reconstruction.
//!
//! "Optimize Weight Rounding via Signed Gradient Descent for the Quantization of LLMs" (SignRound, Cheng et al. 2023,
//! arXiv:2309.05516), with the objective of BRECQ (Li et al., ICLR 2021). For one decoder layer `f` with the weights
//! W of its linear layers, inputs X' `[tokens, hidden]` from the quantized layers before it, and the outputs `f(X;
//! W)` of the original model:
//!
//! ```text
//! minimise over v, α, β:   ‖ f(X'; Q(W; v, α, β)) - f(X; W) ‖²        v ∈ [-1/2, 1/2] per weight, α and β per group
//! ```
//!
//! Sign descent takes 200 steps, whose length falls linearly from 1/200 to 0. [`LearnedWeight`] is Q and its
//! gradient; the layer's gradient comes from `mantissa-train`.
//!
//! Differences from the paper, each because it lowers the loss (docs/explain/methods.md):
//! - The norm is the Fisher information of the output ([`Metric`](crate::metric::Metric)).
//! - Steps follow the signs of gradient plus momentum, so that 512 tokens per step suffice instead of 2048.
//! - Ranges start at the least error weighted by each input's mean square instead of at amax. Their step is a fifth
//!   of the offsets'.
//! - In symmetric integers a group's multiplier may be negative, so that the larger side has the extra code.

mod levels;
pub mod method;
mod weight;

use crate::error::MethodError;

pub use method::AutoRound;
pub use weight::{LearnedWeight, check_scheme};

/// Direction of the steps of offsets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Update {
    /// Signs of the gradient and its momentum together.
    Sign,
    /// Adam: weights whose gradients are noise move less.
    Adam,
}

/// The rounding of a weight cannot be learned.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum AutoRoundError {
    /// Lengths disagree.
    #[error("{what}: expected {expected}, got {found}")]
    Length {
        /// Name of the quantity.
        what: &'static str,
        /// Its length.
        found: usize,
        /// The length required.
        expected: usize,
    },
    /// The scheme has no learnable rounding.
    #[error("expected a scheme with learnable rounding, got {scheme}: {why}; use rtn")]
    Scheme {
        /// The scheme.
        scheme: String,
        /// Reason.
        why: &'static str,
    },
}

impl From<AutoRoundError> for MethodError {
    fn from(error: AutoRoundError) -> Self {
        MethodError::input(error)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests;

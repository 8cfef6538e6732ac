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
//! - Signs are those of gradient plus momentum, so that 512 tokens per step suffice instead of 2048.
//! - Ranges start at the least error weighted by each input's mean square instead of at amax. Their step is a fifth
//!   of the offsets'.
//! - In symmetric integers a group's multiplier may be negative, so that the larger side has the extra code.

mod levels;
pub mod method;
mod weight;

use mantissa_num::{Code, Scheme};

use crate::error::MethodError;
use crate::metric::ErrorMetric;

pub use method::AutoRound;
pub use weight::{LearnedWeight, check_scheme};

/// Direction of the steps of offsets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Update {
    /// Signs of the gradient and its momentum together.
    #[default]
    Sign,
    /// Adam: weights whose gradients are noise move less.
    Adam,
}

/// Options of AutoRound.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AutoRoundOptions {
    /// Number of steps per layer.
    pub iterations: usize,
    /// Direction of the steps of offsets.
    pub update: Update,
    /// First step of offsets; 0 for `1 / iterations`, four times that with Adam.
    pub rate: f32,
    /// First step of a group's range, as a share of it; 0 for a fifth of the step of the
    /// offsets by signs: a range moves all weights of its group.
    pub clip_rate: f32,
    /// Tokens of a step: as many windows as hold them, at least one.
    pub batch_tokens: usize,
    /// Seed of the order of the windows, and of the targets sampled for the Fisher information.
    pub seed: u64,
    /// Metric of the minimized errors.
    pub metric: ErrorMetric,
}

impl Default for AutoRoundOptions {
    fn default() -> Self {
        AutoRoundOptions {
            iterations: 200,
            update: Update::default(),
            rate: 0.0,
            clip_rate: 0.0,
            batch_tokens: 512,
            seed: 42,
            metric: ErrorMetric::default(),
        }
    }
}

impl AutoRoundOptions {
    /// First steps of offsets and of ranges.
    fn rates(&self) -> (f32, f32) {
        let even = 1.0 / self.iterations.max(1) as f32;
        let of_update = match self.update {
            Update::Sign => even,
            Update::Adam => 4.0 * even,
        };
        let rate = if self.rate > 0.0 { self.rate } else { of_update };
        let by_signs = if self.update == Update::Sign { rate } else { even };
        (rate, if self.clip_rate > 0.0 { self.clip_rate } else { by_signs / 5.0 })
    }

    /// Defaults for weights of `scheme`. Scales that are powers of two are not learned: they take more steps of fewer tokens.
    pub fn of(scheme: &Scheme) -> Self {
        let powers = scheme.format.scale().is_some_and(|tree| tree.code == Code::E8m0);
        match powers {
            true => AutoRoundOptions { iterations: 600, batch_tokens: 256, ..Self::default() },
            false => Self::default(),
        }
    }
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

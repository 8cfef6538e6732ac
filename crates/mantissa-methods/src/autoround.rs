//! AutoRound: learned rounding and clipping by block reconstruction.
//!
//! "Optimize Weight Rounding via Signed Gradient Descent for the Quantization of LLMs" (SignRound, Cheng et al. 2023,
//! arXiv:2309.05516), in the frame of BRECQ (Li et al., ICLR 2021). For one decoder layer `f` with the weights W of its linear
//! layers, inputs X' `[tokens, hidden]` as the quantized layers before it give them, and the outputs `f(X; W)` of the original
//! model,
//!
//! ```text
//! minimise over v, α, β:   ‖ f(X'; Q(W; v, α, β)) - f(X; W) ‖²        v ∈ [-1/2, 1/2] per weight, α and β per group
//! ```
//!
//! by descent along signs with a step that falls linearly to 0 (200 steps, 1/200 at first). [`LearnedWeight`] is Q and its
//! gradient; the layer's own is `mantissa-train`'s.
//!
//! Some things are not as published, each because it loses less (docs/explain/methods.md): the norm is that of the Fisher information
//! of the output ([`Metric`](crate::metric::Metric)); signs are of the gradient and its momentum together, which lets 512 tokens a step do where 2048
//! were taken; ranges begin where they lose least against each input's mean square, not at the largest magnitude; their step is
//! a fifth of the offsets'; and of symmetric integers a group's multiplier may be negative, so that the larger side has the extra
//! code.

mod levels;
pub mod method;
mod weight;

use mantissa_num::{Code, Scheme};

use crate::error::MethodError;
use crate::metric::ErrorMetric;

pub use method::AutoRound;
pub use weight::{LearnedWeight, check_scheme};

/// Options of AutoRound.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AutoRoundOptions {
    /// Steps of descent for each layer.
    pub iterations: usize,
    /// First step of offsets; 0 for `1 / iterations`.
    pub rate: f32,
    /// First step of a group's range, as a share of it; 0 for a fifth of that of the
    /// offsets: a range moves all weights of its group.
    pub clip_rate: f32,
    /// Tokens of a step: as many windows as hold them, at least one.
    pub batch_tokens: usize,
    /// Seed of the order of the windows, and of the targets that the Fisher information draws.
    pub seed: u64,
    /// Metric of the errors that are minimised.
    pub metric: ErrorMetric,
}

impl Default for AutoRoundOptions {
    fn default() -> Self {
        AutoRoundOptions {
            iterations: 200,
            rate: 0.0,
            clip_rate: 0.0,
            batch_tokens: 512,
            seed: 42,
            metric: ErrorMetric::default(),
        }
    }
}

impl AutoRoundOptions {
    /// Defaults for weights of `scheme`. Scales that are powers of two are not learned: they take more steps of fewer tokens.
    pub fn of(scheme: &Scheme) -> Self {
        let powers = scheme.format.scale().is_some_and(|tree| tree.code == Code::E8m0);
        match powers {
            true => AutoRoundOptions { iterations: 600, batch_tokens: 256, ..Self::default() },
            false => Self::default(),
        }
    }
}

/// A weight whose rounding cannot be learned.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum AutoRoundError {
    /// Lengths that do not agree.
    #[error("{what}: expected {expected}, got {found}")]
    Length {
        /// Name.
        what: &'static str,
        /// Its length.
        found: usize,
        /// The length required.
        expected: usize,
    },
    /// The scheme has no rounding to learn.
    #[error("autoround: expected a supported scheme, got {scheme}: {why}; use rtn")]
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

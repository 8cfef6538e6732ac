//! Sizes that a model in training is planned for.

use crate::policy::Policy;

/// Tokens whose logits are held at a time.
pub(crate) const HEAD_ROWS: usize = 512;

/// Sizes and precision that a model in training is planned for.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// Maximum tokens per batch.
    pub max_tokens: usize,
    /// Maximum tokens per sequence.
    pub max_len: usize,
    /// Number of threads; results do not depend on it.
    pub threads: usize,
    /// Precision policy.
    pub policy: Policy,
}

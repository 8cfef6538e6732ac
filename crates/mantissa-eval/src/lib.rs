//! Quality loss of a quantized model: perplexity, KL divergence, top-1 agreement and accuracy on [`tasks`], each with a
//! standard error.
//!
//! Definitions: windows are independent; position `i` of a window predicts token `i + 1`; logits are f32,
//! sums f64.
//! - NLL: mean over predicted tokens of `-ln p(token)`, in nats; perplexity is `exp(NLL)`.
//! - KL: mean over the same positions of `sum_v p_ref(v) (ln p_ref(v) - ln p(v))`, in nats.
//! - top-1: share of positions where both models have the same argmax (the lowest index wins ties).
//!
//! Tokens within a window are correlated, so standard errors take the window as the independent unit
//! ([`stats`]). Differences from a reference are taken per position first (paired).
#![forbid(unsafe_code)]

// Layer: statistics, tokens and errors.
mod error;
pub mod stats;
mod tokens;
pub mod verdict;

// Layer: passes of a model.
mod parallel;
mod pass;

// Layer: evaluations.
mod evaluate;
pub mod tasks;

// Layer: comparisons.
mod diff;

pub use diff::{Continuation, Diff, DiffError, Difference, TokenCandidate, diff};
pub use error::EvalError;
pub use evaluate::{
    Comparison, ContextKl, Evaluation, Percentile, WindowResult, check_sequences, compare, divergence,
    evaluate, evaluate_while, evaluate_windows, kl_difference, logits, summarize,
};
pub use pass::{Evaluated, ROWS};
pub use tokens::{
    Sequence, TextOptions, TokenError, parse_docs, sequences_from_file, sequences_from_text, token_file,
    token_path, token_windows, whole,
};

//! What a quantization cost, measured: perplexity, KL divergence and top-1 agreement, each with a standard error.
//!
//! Definitions: windows are independent; position `i` of a window predicts token `i + 1`; logits are f32, sums f64.
//! - NLL: mean over predicted tokens of `-ln p(token)`, in nats; perplexity `exp(NLL)`.
//! - KL: mean over the same positions of `sum_v p_ref(v) (ln p_ref(v) - ln p(v))`, in nats.
//! - top-1: share of positions at which both models have the same argmax (lowest index wins ties).
//!
//! Tokens of a window depend on each other, so standard errors treat windows, not tokens, as the independent unit
//! ([`stats`]). With a reference, differences are taken position by position first (paired).
#![forbid(unsafe_code)]

mod evaluate;
mod pass;
pub mod stats;
mod tokens;

pub use evaluate::{
    Comparison, EvalError, Evaluation, ROWS, WindowResult, check_sequences, compare, divergence, evaluate,
    evaluate_decoding, evaluate_while, logits,
};
pub use tokens::{
    Sequence, TextOptions, TokenError, parse_docs, sequences_from_file, sequences_from_text, token_file,
    token_path, token_windows, whole,
};

//! Error type of evaluations.

use mantissa_model::{ForwardError, GenerateError, LoadError, TokenizerError};
use mantissa_store::ErrorClass;

/// Error of an evaluation.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EvalError {
    /// A forward pass failed.
    #[error("window {window}: {error}")]
    Forward {
        /// Index of the window.
        window: usize,
        /// Cause.
        error: ForwardError,
    },
    /// A window is longer than the model's context.
    #[error(
        "window {window}: expected at most {allowed} tokens (max_position_embeddings), got {needed} tokens"
    )]
    Context {
        /// Index of the window.
        window: usize,
        /// Tokens of the window.
        needed: usize,
        /// Maximum context of the model in tokens.
        allowed: usize,
    },
    /// The buffers of a forward pass could not be allocated, or the model does not load.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A model gives NaN or infinite log-probabilities.
    #[error(
        "window {window}, position {position}: expected a finite loss, got {value}; the {model} overflows or holds NaN"
    )]
    NonFinite {
        /// Index of the window.
        window: usize,
        /// Position in the window.
        position: usize,
        /// Value of the loss.
        value: f64,
        /// Model that gave the loss: `model` or `reference`.
        model: &'static str,
    },
    /// The model and the reference have different vocabulary sizes.
    #[error("reference: expected a vocabulary of {model} tokens (the model's), got {reference}")]
    Vocabulary {
        /// Vocabulary size of the model.
        model: usize,
        /// Vocabulary size of the reference.
        reference: usize,
    },
    /// The KV scheme keeps the most recent keys and values in f32; a single pass over a window never
    /// quantizes them.
    #[error(
        "KV cache: expected a prompt to decode from, because recent keys and values stay in f32; fix: add --prefill N"
    )]
    KvWindow,
    /// No token is predicted.
    #[error("evaluation: expected at least one token to predict, got none in {windows} windows; fix: use windows of at least two tokens{}",
        .prefill.map_or_else(String::new, |tokens| format!(", longer than the prompt of {tokens} tokens (--prefill)")))]
    Nothing {
        /// Number of windows.
        windows: usize,
        /// Prompt length in tokens when decoding through the KV cache.
        prefill: Option<usize>,
    },
    /// A choice of a task has no token of its own behind the prompt.
    #[error(
        "choice {choice}: expected at least one token behind the tokens of the prompt, got none for {text:?}; fix: add text to the prompt or the choice"
    )]
    Choice {
        /// Index of the choice.
        choice: usize,
        /// Its text.
        text: String,
    },
    /// An item of a task is longer than the model's context.
    #[error(
        "line {line}: expected at most {allowed} tokens (max_position_embeddings) with the answer, got {needed} tokens; fix: shorten the prompt, or max_tokens"
    )]
    ItemContext {
        /// Line of the item.
        line: usize,
        /// Tokens of prompt and answer.
        needed: usize,
        /// Maximum context of the model in tokens.
        allowed: usize,
    },
    /// An item of a task could not be run.
    #[error("line {line}: {error}")]
    Item {
        /// Line of the item.
        line: usize,
        /// Cause.
        error: Box<EvalError>,
    },
    /// A text could not be tokenized, or tokens not decoded.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// A continuation could not be generated.
    #[error(transparent)]
    Generate(#[from] GenerateError),
    /// The caller stopped the evaluation.
    #[error("evaluation: stopped before the last window")]
    Stopped,
}

impl EvalError {
    /// Returns who has to act: the input or the environment is at fault.
    pub fn class(&self) -> ErrorClass {
        match self {
            EvalError::Load(error) => error.class(),
            EvalError::Generate(error) => error.class(),
            EvalError::Tokenizer(error) => error.class(),
            EvalError::Item { error, .. } => error.class(),
            EvalError::Stopped => ErrorClass::Environment,
            _ => ErrorClass::Input,
        }
    }
}

//! Errors of loading a tokenizer and of encoding with it.

use std::path::PathBuf;

use mantissa_store::ErrorClass;
use mantissa_store::Shown;

use crate::config::ConfigError;

/// Error of a tokenizer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// There is no tokenizer.
    #[error("{}: expected a tokenizer.json next to the weights, got no such file; fix: add it, or use token windows, which need none", .path.display())]
    Missing {
        /// Expected path.
        path: PathBuf,
    },
    /// A field of the file contradicts another, or is not supported.
    #[error("{}: {}: expected {allowed}, got {}; token windows need no tokenizer", .path.display(), Shown(.field), Shown(.found))]
    Field {
        /// The file.
        path: PathBuf,
        /// The field, with dots between levels.
        field: String,
        /// Value found.
        found: String,
        /// Values supported.
        allowed: String,
    },
    /// A text is too long to be encoded in one piece.
    #[error("text: expected at most {allowed} bytes in one piece with {}, got {found}; fix: split it into documents (--split)", .path.display())]
    TextTooLong {
        /// The tokenizer's file.
        path: PathBuf,
        /// Bytes of the text.
        found: u64,
        /// Limit that follows from the file.
        allowed: u64,
    },
    /// The file is not a tokenizer, or the library failed on a text.
    #[error("{}: {operation}: expected a tokenizer that the tokenizers library accepts, got `{message}`", .path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// Operation that failed.
        operation: &'static str,
        /// Message of the library.
        message: String,
    },
    /// A beginning-of-text token was requested and none is known.
    #[error("{}: expected a beginning-of-text token in tokenizer_config.json or config.json, got none; fix: use --bos auto or never", .path.display())]
    NoBos {
        /// The tokenizer's file.
        path: PathBuf,
    },
    /// The tokenizer has more tokens than the model.
    #[error("{}: expected token ids from 0 to {}, got {id}; the tokenizer belongs to another model", .path.display(), .vocab_size - 1)]
    Vocabulary {
        /// The tokenizer's file.
        path: PathBuf,
        /// The id.
        id: u32,
        /// The model's vocabulary.
        vocab_size: usize,
    },
    /// The file of the tokenizer cannot be read.
    #[error(transparent)]
    Store(#[from] mantissa_store::Error),
    /// A configuration file of the tokenizer is wrong.
    #[error(transparent)]
    Config(#[from] ConfigError),
}

impl TokenizerError {
    /// Class of the error, for the exit code.
    pub fn class(&self) -> ErrorClass {
        match self {
            TokenizerError::Store(error) => error.class(),
            _ => ErrorClass::Input,
        }
    }
}

//! Errors of loading a tokenizer and of encoding with it.

use std::io;
use std::path::PathBuf;

use mantissa_store::ErrorClass;
use mantissa_store::error::Shown;

use crate::config::ConfigError;

/// Error of a tokenizer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// There is no tokenizer.
    #[error("{}: found no such file, allowed a tokenizer.json beside the weights; token windows need none", .path.display())]
    Missing {
        /// Expected path.
        path: PathBuf,
    },
    /// The file cannot be read.
    #[error("{}: found I/O error `{error}`, allowed a readable file", .path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Error of the operating system.
        error: io::Error,
    },
    /// The file is too large.
    #[error("{}: found more than {allowed} bytes, allowed up to that", .path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// The limit.
        allowed: u64,
    },
    /// A field of the file contradicts another, or is not supported.
    #[error("{}: {}: found {}, allowed {allowed}; token windows need no tokenizer", .path.display(), Shown(.field), Shown(.found))]
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
    #[error("text: found {found} bytes, allowed {allowed} in one piece with {}; cut it into documents (--split)", .path.display())]
    TextTooLong {
        /// The tokenizer's file.
        path: PathBuf,
        /// Bytes of the text.
        found: u64,
        /// Limit that follows from the file.
        allowed: u64,
    },
    /// The file is not a tokenizer, or the library failed on a text.
    #[error("{}: {operation}: found `{message}`, allowed a tokenizer that the tokenizers library accepts", .path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// Operation that failed.
        operation: &'static str,
        /// Message of the library.
        message: String,
    },
    /// A beginning-of-text token was requested and none is known.
    #[error("{}: found no beginning-of-text token, allowed one in tokenizer_config.json or config.json; use --bos auto or never", .path.display())]
    NoBos {
        /// The tokenizer's file.
        path: PathBuf,
    },
    /// The tokenizer has more tokens than the model.
    #[error("{}: found token id {id}, allowed 0 to {}; the tokenizer belongs to another model", .path.display(), .vocab_size - 1)]
    Vocabulary {
        /// The tokenizer's file.
        path: PathBuf,
        /// The id.
        id: u32,
        /// The model's vocabulary.
        vocab_size: usize,
    },
    /// The GGUF file of the tokenizer cannot be read.
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
            TokenizerError::Io { .. } => ErrorClass::Environment,
            TokenizerError::Store(error) => error.class(),
            _ => ErrorClass::Input,
        }
    }
}

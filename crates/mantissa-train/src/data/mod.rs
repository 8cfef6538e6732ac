//! Training data: text or JSONL becomes a file of tokens once; batches are read from it in a shuffled order that a few numbers
//! say where it stands.

mod bpe;
mod sampler;
mod shuffle;
mod text;
mod tokens;
mod words;

pub use bpe::{BEGIN, END, LEAST_VOCAB, SPECIAL, TrainedTokenizer, learn_bpe, train_bpe};
pub use sampler::{Batches, Cursor, Sample};
pub use shuffle::Shuffle;
pub use text::{TextFormat, documents, documents_within};
pub use tokens::{TokenFile, TokenWriter};
pub use words::WordCounts;

/// Why there is no data.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// A file.
    #[error(transparent)]
    Store(#[from] mantissa_store::Error),
    /// The tokenizer.
    #[error(transparent)]
    Tokenizer(#[from] mantissa_model::TokenizerError),
    /// Texts take more memory than they may.
    #[error("{file}: needs {needs} bytes, {allowed} allowed")]
    Memory {
        /// The text, or what is done with it.
        file: String,
        /// Bytes that it takes, at least.
        needs: u64,
        /// Bytes that it may take.
        allowed: u64,
    },
    /// A text or token file does not hold what it should.
    #[error("{file}: {field}: found {found}, allowed {allowed}")]
    Field {
        /// The file.
        file: String,
        /// Where.
        field: String,
        /// What is there.
        found: String,
        /// What may be there.
        allowed: String,
    },
}

impl DataError {
    /// Whether the input or the environment is at fault.
    pub fn class(&self) -> mantissa_store::ErrorClass {
        match self {
            DataError::Store(error) => error.class(),
            DataError::Tokenizer(error) => error.class(),
            DataError::Memory { .. } => mantissa_store::ErrorClass::Environment,
            DataError::Field { .. } => mantissa_store::ErrorClass::Input,
        }
    }
}

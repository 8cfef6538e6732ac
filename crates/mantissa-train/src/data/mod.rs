//! Training data: text or JSONL is tokenized once into a token file, from which batches are read in a
//! shuffled order. A few numbers (the [`Cursor`]) describe the position.

mod bpe;
pub mod chat;
mod pieces;
mod records;
mod sampler;
mod shuffle;
mod text;
mod tokens;
mod words;

pub use bpe::{BEGIN, END, LEAST_VOCAB, SPECIAL, TrainedTokenizer, learn_bpe, learn_bpe_at_most, train_bpe};
pub use pieces::{HoldOut, Piece, pieces_within};
pub use records::{first_record, is_records, record_word, refuse_table};
pub use sampler::{Batches, Cursor, Data, Sample};
pub use shuffle::Shuffle;
pub use text::{Found, TextFormat, documents, documents_within};
pub use tokens::{TokenFile, TokenWriter};
pub use words::WordCounts;

/// Error of reading or preparing training data.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// A file cannot be read or written.
    #[error(transparent)]
    Store(#[from] mantissa_store::Error),
    /// The tokenizer failed.
    #[error(transparent)]
    Tokenizer(#[from] mantissa_model::TokenizerError),
    /// A text exceeds the memory limit.
    #[error("{file}: expected at most {allowed} bytes of memory, got a need of {needs}; fix: raise --memory")]
    Memory {
        /// File, or the work that needs the memory.
        file: String,
        /// Bytes needed, at least.
        needs: u64,
        /// Bytes allowed.
        allowed: u64,
    },
    /// A text or token file has the wrong content.
    #[error("{file}: {field}: expected {allowed}, got {found}")]
    Field {
        /// File at fault.
        file: String,
        /// Field, line or document.
        field: String,
        /// Value found.
        found: String,
        /// Accepted values.
        allowed: String,
    },
}

impl DataError {
    /// Returns who has to act: the input or the environment is at fault.
    pub fn class(&self) -> mantissa_store::ErrorClass {
        match self {
            DataError::Store(error) => error.class(),
            DataError::Tokenizer(error) => error.class(),
            DataError::Memory { .. } => mantissa_store::ErrorClass::Environment,
            DataError::Field { .. } => mantissa_store::ErrorClass::Input,
        }
    }
}

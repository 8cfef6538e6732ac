//! Second reader of GGUF files: container, block types and reordered rows.

mod blocks;
mod file;
mod model;
mod parts;
mod super_blocks;
#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests;

use std::io;
use std::path::PathBuf;

pub use blocks::{BlockType, Blocks, allowed, bound_group};
pub use file::{GgufFile, Key, Tensor};
pub use model::{Model, Place};
pub use parts::SplitTensor;

/// Unreadable GGUF file, or one that deviates from the format's description.
#[derive(Debug)]
pub enum Error {
    /// The operating system refused an operation.
    Io {
        /// The file.
        path: PathBuf,
        /// The operation: `open`, `read` or `seek`.
        operation: &'static str,
        /// The system's answer.
        error: io::Error,
    },
    /// A field, a key or a tensor deviates from the description.
    Field {
        /// The file.
        path: PathBuf,
        /// The field, key or tensor.
        field: String,
        /// Value that the description allows.
        expected: String,
        /// Value in the file.
        got: String,
    },
    /// A tensor is missing.
    Missing {
        /// Name of the tensor in the file.
        tensor: String,
    },
}

//! GGUF, the single-file model format of ggml and llama.cpp: version 3, little-endian, read and written.
//!
//! Layout (`docs/gguf.md` of ggml): magic, version, counts, key-value metadata, tensor infos, padding to
//! `general.alignment`, the data section. Dimensions are stored fastest first in the file and outermost first here.
//!
//! The file is untrusted. Every length is checked against a cap, then against the remaining bytes, then with checked
//! arithmetic, before memory is allocated. All memory of parsing counts towards one budget, so that neither a large
//! count nor many empty strings cost more than [`MAX_METADATA_BYTES`]. Version 2 has the layout of version 3 and is
//! read as such.

mod cursor;
mod header;
mod split;
mod split_writer;
mod types;
mod value;
mod writer;

use std::path::Path;

pub use crate::error::GgufFault;
pub use header::{GgufHeader, GgufTensor};
pub use split::is_part_of;
pub use split_writer::{GgufSplitWriter, split, split_paths};
pub use types::{GgmlType, Storage};
pub use value::{Metadata, Value, ValueType};
pub use writer::{GgufTensorSpec, GgufWriter};

use crate::error::Result;
use crate::reader::RegularFile;
use crate::safetensors::{SafeTensors, TensorMeta};

/// Memory budget of metadata and tensor infos, in bytes. The largest tokenizers need a twentieth of it.
pub const MAX_METADATA_BYTES: u64 = 512 << 20;

/// Largest `general.alignment` accepted.
pub const MAX_ALIGNMENT: u64 = 64 << 10;

/// The alignment if the file states none.
pub const DEFAULT_ALIGNMENT: u64 = 32;

/// Nested arrays deeper than this are refused.
pub const MAX_ARRAY_DEPTH: usize = 4;

/// First bytes of every file.
pub(crate) const MAGIC: [u8; 4] = *b"GGUF";

/// An open GGUF file: its metadata in memory, its tensors read on demand.
#[derive(Debug)]
pub struct Gguf {
    /// Header of the first file, with the tensors of all files, one file after another.
    header: GgufHeader,
    files: Vec<SafeTensors>,
    /// The first tensor of each file.
    first: Vec<usize>,
}

impl Gguf {
    /// Opens the file and checks everything except the values of its tensors. If the model is split over several
    /// files, opens only this one; [`open_model`](Self::open_model) opens all.
    ///
    /// # Errors
    /// [`Error::Missing`](crate::Error::Missing), [`Error::WrongKind`](crate::Error::WrongKind) or
    /// [`Error::Io`](crate::Error::Io) if it cannot be read, [`Error::Gguf`](crate::Error::Gguf) if it is malformed.
    pub fn open(path: &Path) -> Result<Self> {
        let source = RegularFile::open(path, "a .gguf file")?;
        let header = GgufHeader::read(&source)?;
        let stored = header.tensors.iter().map(GgufTensor::as_stored).collect();
        Ok(Self { files: vec![SafeTensors::of_parts(source, stored)], first: vec![0], header })
    }

    /// True if the file begins as a GGUF file does; false if it cannot be read.
    pub fn sniff(path: &Path) -> bool {
        let mut head = [0; 4];
        RegularFile::open(path, "a file").and_then(|s| s.read_exact(0, &mut head, "read header")).is_ok()
            && head == MAGIC
    }

    /// Metadata and tensor infos.
    pub fn header(&self) -> &GgufHeader {
        &self.header
    }

    /// The key-value metadata.
    pub fn metadata(&self) -> &Metadata {
        &self.header.metadata
    }

    /// All tensors, in the order of the file's tensor infos.
    pub fn tensors(&self) -> &[GgufTensor] {
        &self.header.tensors
    }

    /// Tensor with this name.
    pub fn get(&self, name: &str) -> Option<&GgufTensor> {
        self.header.get(name)
    }

    /// Bytes of a tensor of this file.
    ///
    /// # Errors
    /// [`Error::Memory`](crate::Error::Memory), [`Error::Io`](crate::Error::Io).
    pub fn read(&self, tensor: &GgufTensor) -> Result<Vec<u8>> {
        self.file_of(tensor).read(&tensor.as_stored())
    }

    /// Fills `buf` with the tensor's bytes from `byte_offset` on.
    ///
    /// # Errors
    /// [`Error::Range`](crate::Error::Range) when the read reaches beyond the tensor, [`Error::Io`](crate::Error::Io).
    pub fn read_range(&self, tensor: &GgufTensor, byte_offset: u64, buf: &mut [u8]) -> Result<()> {
        self.file_of(tensor).read_range(&tensor.as_stored(), byte_offset, buf)
    }

    /// The path it was opened with.
    pub fn path(&self) -> &Path {
        self.files[0].path()
    }

    /// File that holds a tensor of this model.
    fn file_of(&self, tensor: &GgufTensor) -> &SafeTensors {
        let at = self.header.position(&tensor.name).unwrap_or(0);
        &self.files[self.first.partition_point(|first| *first <= at) - 1]
    }

    /// The same files as tensors of bytes: floats and integers under their dtype, blocks as `U8 [.., bytes of a row]`.
    pub(crate) fn into_parts(self) -> (GgufHeader, Vec<SafeTensors>) {
        (self.header, self.files)
    }
}

impl GgufTensor {
    /// The tensor as plain bytes.
    pub(crate) fn as_stored(&self) -> TensorMeta {
        let (dtype, shape) = self.stored_shape();
        TensorMeta { name: self.name.clone(), dtype, shape, offset: self.offset, len: self.len }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests;

//! Writing one GGUF file: metadata and tensor infos first, then tensors in any order, whole or in ranges.

use std::collections::HashSet;
use std::path::Path;

use super::header::byte_len;
use super::types::GgmlType;
use super::value::Value;
use super::{DEFAULT_ALIGNMENT, GgufTensor, MAGIC};
use crate::error::gguf_fault::TensorFault;
use crate::error::{Error, Result, WriteFault};
use crate::hash::FileDigest;
use crate::safetensors::TensorMeta;
use crate::writer::{Layout, SafetensorsWriter, TensorSpec};

/// The version written.
const VERSION: u32 = 3;

/// Longest tensor name that llama.cpp reads, its closing NUL left out.
const MAX_NAME: usize = 63;

/// A tensor to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GgufTensorSpec {
    /// The name, at most 63 bytes.
    pub name: String,
    /// Type.
    pub ty: GgmlType,
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
}

impl GgufTensorSpec {
    /// A tensor to be written.
    pub fn new(name: impl Into<String>, ty: GgmlType, shape: impl Into<Vec<usize>>) -> Self {
        Self { name: name.into(), ty, shape: shape.into() }
    }

    /// The tensor as plain bytes: blocks as `U8 [.., bytes of a row]`.
    pub fn as_stored(&self) -> TensorSpec {
        let Self { name, ty, shape } = self.clone();
        let tensor = GgufTensor { name, ty, shape, offset: 0, len: 0 };
        let TensorMeta { name, dtype, shape, .. } = tensor.as_stored();
        TensorSpec { name, dtype, shape }
    }

    /// Dimensions, fastest first.
    fn dims(&self) -> Vec<u64> {
        self.shape.iter().rev().map(|&dim| dim as u64).collect()
    }

    /// Bytes of the tensor; `None` if blocks do not divide a row, or on overflow.
    pub fn byte_len(&self) -> Option<u64> {
        byte_len(self.ty, &self.dims()).ok().map(|(_, len)| len)
    }
}

/// GGUF file being written. Tracks missing bytes, like [`SafetensorsWriter`].
#[derive(Debug)]
pub struct GgufWriter(SafetensorsWriter);

impl GgufWriter {
    /// Creates the file, which must not exist, writes everything except the data and reserves its disk space. Tensors
    /// are stored in the given order, as llama.cpp requires.
    ///
    /// # Errors
    /// [`Error::Write`] for a duplicate or too long name, a duplicate key, or a shape that blocks do not divide;
    /// [`Error::Io`].
    pub fn create(path: &Path, metadata: &[(String, Value)], specs: &[GgufTensorSpec]) -> Result<Self> {
        refuse_duplicates(path, metadata, specs)?;
        let mut header = Vec::new();
        header.extend(MAGIC);
        header.extend(VERSION.to_le_bytes());
        header.extend((specs.len() as u64).to_le_bytes());
        header.extend((metadata.len() as u64).to_le_bytes());
        for (key, value) in metadata {
            put_string(&mut header, key);
            header.extend(value.value_type().id().to_le_bytes());
            put_value(&mut header, value);
        }
        let (infos, tensors, data) = infos(path, specs)?;
        header.extend(infos);
        header.resize(header.len().next_multiple_of(DEFAULT_ALIGNMENT as usize), 0);
        SafetensorsWriter::create_laid_out(path, Layout::of(header, tensors, data)).map(Self)
    }

    /// Like [`SafetensorsWriter::hash_beside`].
    pub fn hash_beside(&mut self) {
        self.0.hash_beside();
    }

    /// Writes a whole tensor.
    ///
    /// # Errors
    /// As [`SafetensorsWriter::write`].
    pub fn write(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        self.0.write(name, bytes)
    }

    /// Writes part of a tensor, from its byte `byte_offset` on.
    ///
    /// # Errors
    /// As [`SafetensorsWriter::write_range`].
    pub fn write_range(&mut self, name: &str, byte_offset: u64, bytes: &[u8]) -> Result<()> {
        self.0.write_range(name, byte_offset, bytes)
    }

    /// Flushes written data to disk (fsync).
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn sync(&self) -> Result<()> {
        self.0.sync()
    }

    /// Checks that every byte was written, makes the file durable and hashes what is on disk.
    ///
    /// # Errors
    /// As [`SafetensorsWriter::finish`].
    pub fn finish(self) -> Result<FileDigest> {
        self.0.finish()
    }
}

fn refuse_duplicates(path: &Path, metadata: &[(String, Value)], specs: &[GgufTensorSpec]) -> Result<()> {
    let mut seen = HashSet::new();
    let names = specs.iter().map(|spec| &spec.name);
    let repeated = metadata.iter().map(|(key, _)| key).find(|&key| !seen.insert(key));
    seen.clear();
    match repeated.or_else(|| names.into_iter().find(|&name| !seen.insert(name))) {
        Some(name) => Err(Error::write(path, name, WriteFault::Duplicate)),
        None => Ok(()),
    }
}

/// The tensor infos, the tensors with offsets from the data section, and that section's length.
fn infos(path: &Path, specs: &[GgufTensorSpec]) -> Result<(Vec<u8>, Vec<TensorMeta>, u64)> {
    let (mut infos, mut tensors, mut offset) = (Vec::new(), Vec::new(), 0u64);
    for spec in specs {
        let GgufTensorSpec { name, ty, shape } = spec;
        if name.len() > MAX_NAME {
            return Err(Error::write(
                path,
                name,
                WriteFault::NameTooLong { found: name.len(), allowed: MAX_NAME },
            ));
        }
        let dims = spec.dims();
        let unfit =
            |fault: TensorFault| Error::write(path, name, WriteFault::Blocks { what: fault.to_string() });
        let (_, len) = byte_len(*ty, &dims).map_err(unfit)?;
        put_string(&mut infos, name);
        infos.extend((dims.len() as u32).to_le_bytes());
        dims.iter().for_each(|dim| infos.extend(dim.to_le_bytes()));
        infos.extend(ty.id.to_le_bytes());
        infos.extend(offset.to_le_bytes());
        let tensor = GgufTensor { name: name.clone(), ty: *ty, shape: shape.clone(), offset, len };
        tensors.push(tensor.as_stored());
        let end = offset.checked_add(len).and_then(|end| end.checked_next_multiple_of(DEFAULT_ALIGNMENT));
        offset = end.ok_or_else(|| unfit(TensorFault::Overflow { shape: dims }))?;
    }
    Ok((infos, tensors, offset))
}

fn put_string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn put_value(out: &mut Vec<u8>, value: &Value) {
    match value {
        Value::U8(v) => out.extend(v.to_le_bytes()),
        Value::I8(v) => out.extend(v.to_le_bytes()),
        Value::U16(v) => out.extend(v.to_le_bytes()),
        Value::I16(v) => out.extend(v.to_le_bytes()),
        Value::U32(v) => out.extend(v.to_le_bytes()),
        Value::I32(v) => out.extend(v.to_le_bytes()),
        Value::F32(v) => out.extend(v.to_le_bytes()),
        Value::Bool(v) => out.push(u8::from(*v)),
        Value::String(text) => put_string(out, text),
        Value::U64(v) => out.extend(v.to_le_bytes()),
        Value::I64(v) => out.extend(v.to_le_bytes()),
        Value::F64(v) => out.extend(v.to_le_bytes()),
        Value::Array(items, values) => {
            out.extend(items.id().to_le_bytes());
            out.extend((values.len() as u64).to_le_bytes());
            values.iter().for_each(|value| put_value(out, value));
        }
    }
}

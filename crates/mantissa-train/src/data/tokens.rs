//! Token files: safetensors with one tensor `tokens`, U16 if the vocabulary fits and U32 otherwise, with the
//! data's origin in the metadata. Read in pieces, never as a whole.

use std::collections::BTreeMap;
use std::path::Path;

use mantissa_store::{
    Dtype, Output, SafeTensors, SafetensorsWriter, StagedFile, TensorMeta, TensorSpec, sealed,
};

use super::DataError;

const TENSOR: &str = "tokens";
const VOCAB_SIZE: &str = "vocab_size";

/// Collects tokens and writes them to a file.
#[derive(Debug)]
pub struct TokenWriter {
    vocab_size: usize,
    narrow: bool,
    bytes: Vec<u8>,
}

impl TokenWriter {
    /// Starts a file for ids below `vocab_size`.
    pub fn new(vocab_size: usize) -> Self {
        TokenWriter { vocab_size, narrow: vocab_size <= 1 << 16, bytes: Vec::new() }
    }

    /// Adds the tokens of a document.
    ///
    /// # Errors
    /// [`DataError::Field`] for an id outside the vocabulary.
    pub fn push(&mut self, ids: &[u32]) -> Result<(), DataError> {
        if let Some(id) = ids.iter().find(|id| **id as usize >= self.vocab_size) {
            return Err(DataError::Field {
                file: "tokenizer".to_owned(),
                field: "id".to_owned(),
                found: id.to_string(),
                allowed: format!("below {}, the model's vocabulary", self.vocab_size),
            });
        }
        match self.narrow {
            true => ids.iter().for_each(|id| self.bytes.extend((*id as u16).to_le_bytes())),
            false => ids.iter().for_each(|id| self.bytes.extend(id.to_le_bytes())),
        }
        Ok(())
    }

    /// Number of tokens so far.
    pub fn len(&self) -> usize {
        self.bytes.len() / if self.narrow { 2 } else { 4 }
    }

    /// Bytes of memory held.
    pub fn bytes(&self) -> u64 {
        self.bytes.capacity() as u64
    }

    /// True if no token was added.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Writes the file atomically with a checksum ([`sealed`]). `about` records the origin of the tokens.
    ///
    /// # Errors
    /// As [`StagedFile`] and [`SafetensorsWriter`].
    pub fn finish(self, output: &Output, about: BTreeMap<String, String>) -> Result<(), DataError> {
        let dtype = if self.narrow { Dtype::U16 } else { Dtype::U32 };
        let mut metadata = about;
        metadata.insert(VOCAB_SIZE.to_owned(), self.vocab_size.to_string());
        sealed::reserve(&mut metadata);
        let staged = StagedFile::begin(output)?;
        let specs = vec![TensorSpec::new(TENSOR, dtype, [self.len()])];
        let mut writer = SafetensorsWriter::create(staged.path(), specs, metadata)?;
        writer.write(TENSOR, &self.bytes)?;
        writer.finish()?;
        sealed::seal(staged.path())?;
        Ok(staged.commit()?)
    }
}

/// Open token file.
#[derive(Debug)]
pub struct TokenFile {
    file: SafeTensors,
    meta: TensorMeta,
    len: u64,
    vocab_size: usize,
}

impl TokenFile {
    /// Opens a file written by [`TokenWriter`].
    ///
    /// # Errors
    /// As [`SafeTensors::open`]; [`DataError::Field`] if it is not a token file.
    pub fn open(path: &Path) -> Result<Self, DataError> {
        sealed::check(path)?;
        let file = SafeTensors::open(path)?;
        let fault = |field: &str, found: String, allowed: &str| DataError::Field {
            file: path.display().to_string(),
            field: field.to_owned(),
            found,
            allowed: allowed.to_owned(),
        };
        let meta =
            file.get(TENSOR).ok_or_else(|| fault(TENSOR, "no such tensor".into(), "token ids"))?.clone();
        let len = match (&meta.shape[..], meta.dtype) {
            (&[len], Dtype::U16 | Dtype::U32) => len as u64,
            (shape, dtype) => {
                return Err(fault(TENSOR, format!("{dtype} {shape:?}"), "U16 or U32 of one dimension"));
            }
        };
        let size = file.metadata().get(VOCAB_SIZE).and_then(|text| text.parse().ok());
        let vocab_size = size.ok_or_else(|| fault(VOCAB_SIZE, "no number".into(), "the tokenizer's"))?;
        Ok(TokenFile { file, meta, len, vocab_size })
    }

    /// Number of tokens.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// True if the file holds no token.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Vocabulary size; all ids are below it.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Origin of the tokens.
    pub fn about(&self) -> &BTreeMap<String, String> {
        self.file.metadata()
    }

    /// Appends `count` tokens from index `first` on to `out`.
    ///
    /// # Errors
    /// As [`SafeTensors::read_range`]; [`DataError::Field`] for an id outside the vocabulary.
    pub fn read(&self, first: u64, count: usize, out: &mut Vec<u32>) -> Result<(), DataError> {
        let width = if self.meta.dtype == Dtype::U16 { 2 } else { 4 };
        let mut bytes = vec![0; count * width];
        self.file.read_range(&self.meta, first * width as u64, &mut bytes)?;
        let start = out.len();
        match width {
            2 => out.extend(bytes.as_chunks::<2>().0.iter().map(|b| u32::from(u16::from_le_bytes(*b)))),
            _ => out.extend(bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b))),
        }
        match out[start..].iter().position(|id| *id as usize >= self.vocab_size) {
            None => Ok(()),
            Some(at) => Err(DataError::Field {
                file: self.file.path().display().to_string(),
                field: format!("token {}", first + at as u64),
                found: out[start + at].to_string(),
                allowed: format!("below {}", self.vocab_size),
            }),
        }
    }
}

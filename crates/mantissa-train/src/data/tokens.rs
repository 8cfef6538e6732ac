//! Token files: safetensors with one tensor `tokens`, U16 if the vocabulary fits and U32 otherwise, with the
//! data's origin in the metadata. Read in pieces, never as a whole.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use mantissa_store::{
    Dtype, Error, Output, SafeTensors, SafetensorsWriter, StagedFile, TensorMeta, TensorSpec, WorkFolder,
    disk, sealed,
};

use super::DataError;

const TENSOR: &str = "tokens";
const VOCAB_SIZE: &str = "vocab_size";

/// Bytes of tokens held in memory by a writer with a work folder, and bytes copied at a time.
const HELD: usize = 1 << 20;

/// Collects tokens and writes them to a file. In memory, or, with a place for a work folder, in a temporary file there
/// beyond 1 MiB.
#[derive(Debug)]
pub struct TokenWriter {
    vocab_size: usize,
    narrow: bool,
    bytes: Vec<u8>,
    /// Output beside which a work folder is made, and its purpose.
    beside: Option<(PathBuf, &'static str)>,
    spilled: Option<Spilled>,
}

/// Temporary file with the first tokens.
#[derive(Debug)]
struct Spilled {
    folder: Option<WorkFolder>,
    path: PathBuf,
    file: File,
    len: u64,
}

impl Drop for Spilled {
    fn drop(&mut self) {
        // Drop cannot report errors; the next start for the same output removes what is left.
        let _ = self.folder.take().map(WorkFolder::remove);
    }
}

impl TokenWriter {
    /// Starts a file for ids below `vocab_size`.
    pub fn new(vocab_size: usize) -> Self {
        let narrow = vocab_size <= 1 << 16;
        TokenWriter { vocab_size, narrow, bytes: Vec::new(), beside: None, spilled: None }
    }

    /// Starts a file whose tokens are kept beside `output` in a work folder for `purpose`, so that memory does not grow
    /// with them.
    pub fn beside(vocab_size: usize, output: &Path, purpose: &'static str) -> Self {
        TokenWriter { beside: Some((output.to_owned(), purpose)), ..TokenWriter::new(vocab_size) }
    }

    /// Adds the tokens of a document.
    ///
    /// # Errors
    /// [`DataError::Field`] for an id outside the vocabulary; [`DataError::Store`] if the temporary file cannot be
    /// written.
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
        if self.bytes.len() >= HELD { self.spill() } else { Ok(()) }
    }

    /// Moves the tokens in memory to the temporary file, if there may be one.
    fn spill(&mut self) -> Result<(), DataError> {
        let Some((output, purpose)) = &self.beside else { return Ok(()) };
        if self.spilled.is_none() {
            let folder = WorkFolder::begin(output, purpose, "")?;
            let path = folder.path().join("tokens");
            let io = |error| Error::Io { path: path.clone(), operation: "create", error };
            disk::remove_file_if_there(&path).and_then(|()| disk::create_new(&path)).map_err(io).map(
                |file| {
                    self.spilled = Some(Spilled { folder: Some(folder), path: path.clone(), file, len: 0 });
                },
            )?;
        }
        if let Some(Spilled { path, file, len, .. }) = &mut self.spilled {
            let io = |error| Error::Io { path: path.clone(), operation: "write", error };
            disk::write_at(file, path, &self.bytes, *len).map_err(io)?;
            *len += self.bytes.len() as u64;
            self.bytes.clear();
        }
        Ok(())
    }

    /// Number of tokens so far.
    pub fn len(&self) -> usize {
        let spilled = self.spilled.as_ref().map_or(0, |spilled| spilled.len as usize);
        (spilled + self.bytes.len()) / if self.narrow { 2 } else { 4 }
    }

    /// Bytes of memory held.
    pub fn bytes(&self) -> u64 {
        self.bytes.capacity() as u64
    }

    /// True if no token was added.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
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
        let mut at = 0;
        if let Some(Spilled { path, file, len, .. }) = &self.spilled {
            let mut piece = vec![0; HELD];
            while at < *len {
                let piece = &mut piece[..HELD.min((*len - at) as usize)];
                let io = |error| Error::Io { path: path.clone(), operation: "read", error };
                file.read_exact_at(piece, at).map_err(io)?;
                writer.write_range(TENSOR, at, piece)?;
                at += piece.len() as u64;
            }
        }
        writer.write_range(TENSOR, at, &self.bytes)?;
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
        Self::of(SafeTensors::open(path)?, path, None)
    }

    /// Opens a token file as data of a run with `vocab_size` tokens. Files of other programs may lack the checksum and
    /// the vocabulary size.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_data(path: &Path, vocab_size: usize) -> Result<Self, DataError> {
        let file = SafeTensors::open(path)?;
        if file.metadata().contains_key(sealed::KEY) {
            sealed::check(path)?;
        }
        Self::of(file, path, Some(vocab_size))
    }

    fn of(file: SafeTensors, path: &Path, least: Option<usize>) -> Result<Self, DataError> {
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
        let size = file.metadata().get(VOCAB_SIZE).and_then(|text| text.parse().ok()).or(least);
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

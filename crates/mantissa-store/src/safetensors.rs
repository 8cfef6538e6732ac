//! The safetensors format, read with stricter checks than its reference implementation's.
//!
//! Layout: 8 bytes little-endian header length, a JSON header, the data. The header maps each tensor's name to
//! `{"dtype", "shape", "data_offsets": [begin, end]}`, offsets from the start of the data, and may hold one
//! `__metadata__` object of strings. <https://github.com/huggingface/safetensors#format>
//!
//! Stricter than the reference: a repeated key is refused anywhere (tensor, field, `__metadata__` or a key in it). So
//! is an unknown field in a tensor's entry, because a later version could use it to change the meaning of the bytes.
//! As lenient as the reference: white space may precede `{`, and the data need not be aligned.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::dtype::{Dtype, SizeFault, byte_len};
use crate::error::{Error, ForeignKind, HeaderFault, Result, TensorFault};
use crate::header_json::{self, Entry};
use crate::reader::{RegularFile, Tail};

/// Longest header accepted, in bytes; the reference implementation's cap.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Bytes of the header-length field.
pub(crate) const LENGTH_BYTES: u64 = 8;

/// Place, dtype and shape of one tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorMeta {
    /// The name, an opaque key: never to be used as a path.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions, outermost first; empty for a scalar.
    pub shape: Vec<usize>,
    /// First byte, from the start of the file.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

impl TensorMeta {
    /// Number of elements; 1 for a scalar. Saturates, which no checked header's tensor can reach.
    pub fn numel(&self) -> u64 {
        self.shape.iter().fold(1, |count: u64, &dim| count.saturating_mul(dim as u64))
    }
}

/// An open safetensors file: its header checked, its tensors read on demand.
#[derive(Debug)]
pub struct SafeTensors {
    source: RegularFile,
    header: Header,
}

impl SafeTensors {
    /// Opens the file and checks its header against its length; reads no tensor.
    ///
    /// # Errors
    /// [`Error::Missing`], [`Error::WrongKind`] or [`Error::Io`] when it cannot be read, [`Error::Foreign`] when
    /// it is recognised as something else, [`Error::Header`] or [`Error::Tensor`] when it is malformed.
    pub fn open(path: &Path) -> Result<Self> {
        let source = RegularFile::open(path, "a .safetensors file")?;
        let header_len = header_len(&source)?;
        let json = source.read_vec(LENGTH_BYTES, header_len, "header", "read header")?;
        let header = Header::parse(path, &json, source.len())?;
        Ok(Self { source, header })
    }

    /// Wraps another format's file, with its tensors already checked.
    pub(crate) fn of_parts(source: RegularFile, tensors: Vec<TensorMeta>) -> Self {
        let mut by_name: Vec<usize> = (0..tensors.len()).collect();
        by_name.sort_by(|&a, &b| tensors[a].name.cmp(&tensors[b].name));
        Self { source, header: Header { tensors, by_name, metadata: BTreeMap::new() } }
    }

    /// Replaces the tensors by others that lie in this file.
    pub(crate) fn with_tensors(self, mut tensors: Vec<TensorMeta>) -> Self {
        tensors.sort_by_key(|meta| meta.offset);
        Self::of_parts(self.source, tensors)
    }

    /// Keeps the tensors for which `keep` is true, and adds computed ones behind the end of the file.
    pub(crate) fn with_tail(
        self,
        keep: impl Fn(&str) -> bool,
        computed: impl IntoIterator<Item = TensorMeta>,
        tail: Option<Box<dyn Tail>>,
    ) -> Self {
        let mut tensors: Vec<_> = self.header.tensors.into_iter().filter(|meta| keep(&meta.name)).collect();
        tensors.extend(computed);
        match tail {
            Some(tail) => Self::of_parts(self.source.with_tail(tail), tensors),
            None => Self::of_parts(self.source, tensors),
        }
    }

    /// All tensors, in the order of their bytes in the file.
    pub fn tensors(&self) -> &[TensorMeta] {
        &self.header.tensors
    }

    /// Tensor with this name.
    pub fn get(&self, name: &str) -> Option<&TensorMeta> {
        self.header.get(name)
    }

    /// The header's `__metadata__`; empty when it has none.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.header.metadata
    }

    /// Bytes of a tensor of this file.
    ///
    /// # Errors
    /// [`Error::Range`] when `meta` does not lie in this file, [`Error::Memory`], [`Error::Io`].
    pub fn read(&self, meta: &TensorMeta) -> Result<Vec<u8>> {
        self.require_inside(meta)?;
        self.source.read_vec(meta.offset, meta.len, &meta.name, "read tensor")
    }

    /// Fills `buf` with the tensor's bytes from `byte_offset` on, so that it can be streamed in panels.
    ///
    /// # Errors
    /// [`Error::Range`] when the read reaches beyond the tensor or the file, [`Error::Io`].
    pub fn read_range(&self, meta: &TensorMeta, byte_offset: u64, buf: &mut [u8]) -> Result<()> {
        self.require_range(meta, byte_offset, buf.len() as u64)?;
        self.source.read_exact(meta.offset + byte_offset, buf, "read tensor")
    }

    /// The path it was opened with.
    pub fn path(&self) -> &Path {
        self.source.path()
    }

    /// Bytes of the file when it was opened.
    pub fn file_len(&self) -> u64 {
        self.source.len()
    }

    pub(crate) fn require_range(&self, meta: &TensorMeta, byte_offset: u64, len: u64) -> Result<()> {
        self.require_inside(meta)?;
        if byte_offset.checked_add(len).is_none_or(|end| end > meta.len) {
            return Err(self.range_error(meta, byte_offset, len, meta.len));
        }
        Ok(())
    }

    pub(crate) fn require_inside(&self, meta: &TensorMeta) -> Result<()> {
        if meta.offset.checked_add(meta.len).is_some_and(|end| end <= self.file_len()) {
            return Ok(());
        }
        Err(self.range_error(meta, meta.offset, meta.len, self.file_len()))
    }

    fn range_error(&self, meta: &TensorMeta, offset: u64, len: u64, size: u64) -> Error {
        Error::Range { path: self.path().to_owned(), tensor: meta.name.clone(), offset, len, size }
    }
}

/// A checked header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    tensors: Vec<TensorMeta>,
    /// Positions in `tensors`, by name.
    by_name: Vec<usize>,
    metadata: BTreeMap<String, String>,
}

impl Header {
    /// Checks a header, its 8 length bytes removed, of a file of `file_len` bytes. `path` only labels errors.
    ///
    /// # Errors
    /// [`Error::Header`] or [`Error::Tensor`] for the first fault found.
    pub fn parse(path: &Path, json: &[u8], file_len: u64) -> Result<Self> {
        let (entries, metadata) = header_json::parse(path, json)?;
        let data_start = LENGTH_BYTES.saturating_add(json.len() as u64);
        let Some(data_len) = file_len.checked_sub(data_start) else {
            let available = file_len.saturating_sub(LENGTH_BYTES);
            return Err(Error::header(path, HeaderFault::PastEnd { found: json.len() as u64, available }));
        };
        let by_name = index_by_name(path, &entries)?;
        let (entries, by_name) = in_file_order(entries, by_name);
        for entry in &entries {
            check_size(path, entry)?;
        }
        check_coverage(path, &entries, data_len)?;
        let tensors = entries.into_iter().map(|entry| entry.placed(data_start)).collect();
        Ok(Self { tensors, by_name, metadata })
    }

    /// All tensors, in the order of their bytes in the file.
    pub fn tensors(&self) -> &[TensorMeta] {
        &self.tensors
    }

    /// Tensor with this name.
    pub fn get(&self, name: &str) -> Option<&TensorMeta> {
        let found = self.by_name.binary_search_by(|&at| self.tensors[at].name.as_str().cmp(name)).ok()?;
        Some(&self.tensors[self.by_name[found]])
    }

    /// `__metadata__`; empty when there is none.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }
}

impl Entry {
    fn placed(self, data_start: u64) -> TensorMeta {
        let Self { name, dtype, shape, start, end } = self;
        TensorMeta { name, dtype, shape, offset: data_start + start, len: end - start }
    }
}

/// The header's length, checked against the cap and the file; recognises other kinds of files.
fn header_len(source: &RegularFile) -> Result<u64> {
    let path = source.path();
    if source.len() < LENGTH_BYTES {
        return Err(foreign_or(source, HeaderFault::TooShort { found: source.len() }));
    }
    let mut length = [0; LENGTH_BYTES as usize];
    source.read_exact(0, &mut length, "read header length")?;
    let found = u64::from_le_bytes(length);
    let available = source.len() - LENGTH_BYTES;
    if found > MAX_HEADER_BYTES {
        Err(foreign_or(source, HeaderFault::TooLong { found, cap: MAX_HEADER_BYTES }))
    } else if found > available {
        Err(foreign_or(source, HeaderFault::PastEnd { found, available }))
    } else if found == 0 {
        Err(Error::header(path, HeaderFault::Json { position: 0, message: "an empty header".to_owned() }))
    } else {
        Ok(found)
    }
}

/// Names the kind of file if its first bytes tell it, else returns the fault.
fn foreign_or(source: &RegularFile, fault: HeaderFault) -> Error {
    let path: PathBuf = source.path().to_owned();
    let mut head = [0; 64];
    let n = head.len().min(usize::try_from(source.len()).unwrap_or(usize::MAX));
    if let Err(error) = source.read_exact(0, &mut head[..n], "read first bytes") {
        return error;
    }
    match ForeignKind::sniff(&head[..n]) {
        Some(kind) => Error::Foreign { path, kind },
        None => Error::Header { path, fault },
    }
}

/// Positions of the entries by name; a name that occurs twice is an error.
fn index_by_name(path: &Path, entries: &[Entry]) -> Result<Vec<usize>> {
    let mut by_name: Vec<usize> = (0..entries.len()).collect();
    by_name.sort_by(|&a, &b| entries[a].name.cmp(&entries[b].name));
    match by_name.windows(2).find(|pair| entries[pair[0]].name == entries[pair[1]].name) {
        Some(pair) => Err(Error::tensor(path, &entries[pair[0]].name, TensorFault::Duplicate)),
        None => Ok(by_name),
    }
}

/// Sorts entries by their bytes (empty tensors by name) and renumbers the index.
fn in_file_order(entries: Vec<Entry>, by_name: Vec<usize>) -> (Vec<Entry>, Vec<usize>) {
    let mut numbered: Vec<(usize, Entry)> = entries.into_iter().enumerate().collect();
    numbered.sort_by(|(_, a), (_, b)| place(a, b));
    let mut position = vec![0; numbered.len()];
    for (new, (old, _)) in numbered.iter().enumerate() {
        position[*old] = new;
    }
    let by_name = by_name.into_iter().map(|old| position[old]).collect();
    (numbered.into_iter().map(|(_, entry)| entry).collect(), by_name)
}

fn place(a: &Entry, b: &Entry) -> Ordering {
    (a.start, a.end, &a.name).cmp(&(b.start, b.end, &b.name))
}

/// Offsets ordered, and as many bytes as dtype and shape ask for.
fn check_size(path: &Path, entry: &Entry) -> Result<()> {
    let &Entry { start, end, dtype, .. } = entry;
    let fault = match byte_len(dtype, &entry.shape) {
        _ if end < start => TensorFault::Reversed { start, end },
        Err(SizeFault::Overflow) => TensorFault::Overflow { shape: shape_text(&entry.shape) },
        Err(SizeFault::PartialByte(bits)) => {
            TensorFault::PartialByte { shape: shape_text(&entry.shape), dtype, bits }
        }
        Ok(expected) if expected != end - start => TensorFault::Size { found: end - start, expected },
        Ok(_) => return Ok(()),
    };
    Err(Error::tensor(path, &entry.name, fault))
}

/// Each tensor begins where the one before ends, and the last ends with the file.
fn check_coverage(path: &Path, entries: &[Entry], data_len: u64) -> Result<()> {
    let mut covered = 0;
    let mut previous = "";
    for entry in entries {
        let &Entry { start, end, .. } = entry;
        let fault = match start.cmp(&covered) {
            Ordering::Less => TensorFault::Overlap { start, end: covered, previous: previous.to_owned() },
            Ordering::Greater => TensorFault::Hole { start, end: covered },
            Ordering::Equal if end > data_len => TensorFault::PastEnd { end, available: data_len },
            Ordering::Equal => {
                covered = end;
                previous = &entry.name;
                continue;
            }
        };
        return Err(Error::tensor(path, &entry.name, fault));
    }
    if covered == data_len {
        return Ok(());
    }
    Err(Error::header(path, HeaderFault::TrailingBytes { found: data_len, used: covered }))
}

/// A shape for a message, its dimensions cut to sixteen.
pub(crate) fn shape_text(shape: &[usize]) -> String {
    let shown: Vec<String> = shape.iter().take(16).map(ToString::to_string).collect();
    let rest = if shape.len() > 16 { ", …" } else { "" };
    format!("[{}{rest}]", shown.join(", "))
}

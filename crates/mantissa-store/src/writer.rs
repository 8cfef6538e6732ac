//! Writes one safetensors file: header first, then tensors in any order, whole or in ranges.
//!
//! The bytes equal the output of the reference implementation's writer: tensors by descending dtype alignment and then by
//! name, a compact header padded with spaces to 8 bytes.

use std::collections::{BTreeMap, HashMap};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use serde_json::json;

use crate::checksum::Checksum;
use crate::disk;
use crate::dtype::{Dtype, byte_len};
use crate::error::{Error, OutputFault, Result, WriteFault};
use crate::failpoint;
use crate::hash::{FileDigest, hash_file};
use crate::safetensors::{MAX_HEADER_BYTES, TensorMeta, shape_text};
use crate::trail::TrailingHash;

/// Bytes read at a time.
const PIECE: u64 = 1 << 20;

/// A tensor to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// The name, an opaque key.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions, outermost first; empty for a scalar.
    pub shape: Vec<usize>,
}

impl TensorSpec {
    /// A tensor to be written.
    pub fn new(name: impl Into<String>, dtype: Dtype, shape: impl Into<Vec<usize>>) -> Self {
        Self { name: name.into(), dtype, shape: shape.into() }
    }

    /// Bytes of the tensor; `path` labels the error.
    pub(crate) fn len(&self, path: &Path) -> Result<u64> {
        byte_len(self.dtype, &self.shape).map_err(|_| {
            let fault = WriteFault::Size { shape: shape_text(&self.shape), dtype: self.dtype };
            Error::write(path, &self.name, fault)
        })
    }
}

/// Safetensors file being written.
///
/// It tracks missing bytes: [`Self::finish`] refuses an incomplete file, and writing a byte twice is an error.
/// Dropping it without `finish` leaves an incomplete file, so write into a [`crate::Staging`] folder.
#[derive(Debug)]
pub struct SafetensorsWriter {
    path: PathBuf,
    file: File,
    tensors: Vec<(TensorMeta, Written)>,
    by_name: HashMap<String, usize>,
    /// Bytes of the file.
    end: u64,
    /// The first tensor that is not complete.
    incomplete: usize,
    hash: Option<TrailingHash>,
}

impl SafetensorsWriter {
    /// Creates the file, which must not exist, writes its header and reserves its disk space.
    ///
    /// # Errors
    /// [`Error::Write`] for a name given twice or a shape without a byte length, [`Error::Output`] when the
    /// header would be too long, [`Error::Io`] when the file exists, or cannot be created, or the disk is full.
    pub fn create(path: &Path, specs: Vec<TensorSpec>, metadata: BTreeMap<String, String>) -> Result<Self> {
        let layout = Layout::new(path, specs, &metadata)?;
        Self::create_laid_out(path, layout)
    }

    /// Creates a file of any format that is a header and, at their offsets, the bytes of tensors.
    pub(crate) fn create_laid_out(path: &Path, layout: Layout) -> Result<Self> {
        let Layout { header, tensors, end } = layout;
        let file = disk::create_new(path).map_err(|e| Error::io(path, "create", e))?;
        let begun = disk::reserve(&file, path, end).and_then(|()| disk::write_at(&file, path, &header, 0));
        if let Err(error) = begun {
            // We just created this file; the first error matters more.
            let _ = disk::remove_file(path);
            return Err(Error::io(path, "reserve disk space", error));
        }
        Ok(Self::of(path, file, tensors, end))
    }

    /// Opens an unfinished file begun by [`Self::create`] with the same arguments; `None` if there is none. Every
    /// byte counts as missing until [`Self::count_as_written`] marks it.
    ///
    /// # Errors
    /// As [`Self::create`] for the arguments, [`Error::Io`].
    pub fn reopen(
        path: &Path,
        specs: Vec<TensorSpec>,
        metadata: BTreeMap<String, String>,
    ) -> Result<Option<Self>> {
        let Layout { header, tensors, end } = Layout::new(path, specs, &metadata)?;
        let mut options = OpenOptions::new();
        // Not through a link, which in a shared folder somebody else may have planted, and not waiting for a pipe.
        options.custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed());
        let Ok(file) = failpoint::read(|| options.read(true).write(true).open(path)) else { return Ok(None) };
        let found = failpoint::read(|| file.metadata()).map_err(|e| Error::io(path, "read length", e))?;
        if !found.is_file() || found.nlink() != 1 || found.len() != end {
            return Ok(None);
        }
        let mut begun = vec![0; header.len()];
        failpoint::read(|| file.read_exact_at(&mut begun, 0))
            .map_err(|e| Error::io(path, "read header", e))?;
        Ok((begun == header).then(|| Self::of(path, file, tensors, end)))
    }

    fn of(path: &Path, file: File, tensors: Vec<(TensorMeta, Written)>, end: u64) -> Self {
        let by_name = tensors.iter().enumerate().map(|(i, (meta, _))| (meta.name.clone(), i)).collect();
        Self { path: path.to_owned(), file, tensors, by_name, end, incomplete: 0, hash: None }
    }

    /// Hashes the file on its own thread while it is written, up to the first gap. If the system provides no thread,
    /// [`Self::finish`] hashes all of it.
    pub fn hash_beside(&mut self) {
        self.hash = TrailingHash::begin(&self.file).ok();
        self.advance_hash();
    }

    /// True if the tensor's bytes on disk have this [`Checksum`].
    ///
    /// # Errors
    /// [`Error::Write`] when the name is unknown, [`Error::Io`].
    pub fn holds(&self, name: &str, checksum: u64) -> Result<bool> {
        Ok(self.checksum(self.position(name)?)? == checksum)
    }

    /// Counts a tensor that is on disk already as written.
    ///
    /// # Errors
    /// [`Error::Write`] when the name is unknown or a byte was written before.
    pub fn count_as_written(&mut self, name: &str) -> Result<()> {
        let at = self.position(name)?;
        self.claim(at, 0, self.tensors[at].0.len)
    }

    /// Flushes written data to disk (fsync).
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn sync(&self) -> Result<()> {
        disk::sync_data(&self.file, &self.path).map_err(|e| Error::io(&self.path, "fsync", e))
    }

    /// Writes a whole tensor.
    ///
    /// # Errors
    /// [`Error::Write`] when the name is unknown, the length is wrong or a byte was written before,
    /// [`Error::Io`].
    pub fn write(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        let at = self.position(name)?;
        let size = self.tensors[at].0.len;
        if bytes.len() as u64 != size {
            return Err(self.length_error(name, 0, bytes.len(), format!("all {size} bytes")));
        }
        self.write_at(at, 0, bytes)
    }

    /// Writes part of a tensor, from its byte `byte_offset` on.
    ///
    /// # Errors
    /// [`Error::Write`] when the name is unknown, the range reaches beyond the tensor or a byte in it was written
    /// before, [`Error::Io`].
    pub fn write_range(&mut self, name: &str, byte_offset: u64, bytes: &[u8]) -> Result<()> {
        let at = self.position(name)?;
        let size = self.tensors[at].0.len;
        if byte_offset.checked_add(bytes.len() as u64).is_none_or(|end| end > size) {
            return Err(self.length_error(name, byte_offset, bytes.len(), format!("within {size} bytes")));
        }
        self.write_at(at, byte_offset, bytes)
    }

    /// Tensors with their places, in file order.
    pub fn tensors(&self) -> impl Iterator<Item = &TensorMeta> {
        self.tensors.iter().map(|(meta, _)| meta)
    }

    /// Bytes of tensors not yet written.
    pub fn remaining(&self) -> u64 {
        self.tensors.iter().map(|(meta, written)| meta.len - written.total).sum()
    }

    /// Checks that every byte was written, makes the file durable and hashes what is on disk.
    ///
    /// # Errors
    /// [`Error::Write`] naming the first incomplete tensor, [`Error::Io`].
    pub fn finish(self) -> Result<FileDigest> {
        for (meta, written) in &self.tensors {
            if written.total != meta.len {
                let fault = WriteFault::Incomplete { written: written.total, size: meta.len };
                return Err(Error::write(&self.path, &meta.name, fault));
            }
        }
        disk::sync(&self.file, &self.path).map_err(|e| Error::io(&self.path, "fsync", e))?;
        match self.hash {
            Some(hash) => hash.finish(self.end).map_err(|e| Error::io(&self.path, "read to hash", e)),
            None => hash_file(&self.path),
        }
    }

    fn position(&self, name: &str) -> Result<usize> {
        let known = self.by_name.get(name).copied();
        known.ok_or_else(|| Error::write(&self.path, name, WriteFault::Unknown))
    }

    fn length_error(&self, name: &str, offset: u64, len: usize, allowed: String) -> Error {
        Error::write(&self.path, name, WriteFault::Length { offset, len: len as u64, allowed })
    }

    fn write_at(&mut self, at: usize, byte_offset: u64, bytes: &[u8]) -> Result<()> {
        self.claim(at, byte_offset, byte_offset + bytes.len() as u64)?;
        let offset = self.tensors[at].0.offset + byte_offset;
        disk::write_at(&self.file, &self.path, bytes, offset)
            .map_err(|e| Error::io(&self.path, "write tensor", e))?;
        self.advance_hash();
        Ok(())
    }

    /// Tells the hash up to where the file has no gap.
    fn advance_hash(&mut self) {
        let Some(hash) = &self.hash else { return };
        let whole = |(meta, written): &(TensorMeta, Written)| meta.len == written.total;
        while self.tensors.get(self.incomplete).is_some_and(whole) {
            self.incomplete += 1;
        }
        let gap = self.tensors.get(self.incomplete).map(|(meta, written)| meta.offset + written.prefix());
        hash.advance(gap.unwrap_or(self.end));
    }

    fn claim(&mut self, at: usize, start: u64, end: u64) -> Result<()> {
        let (meta, written) = &mut self.tensors[at];
        written
            .claim(start, end)
            .map_err(|offset| Error::write(&self.path, &meta.name, WriteFault::Twice { offset }))
    }

    /// Checksum of the tensor's bytes on disk.
    fn checksum(&self, at: usize) -> Result<u64> {
        let meta = &self.tensors[at].0;
        let mut sum = Checksum::default();
        let mut piece = vec![0; usize::try_from(meta.len.min(PIECE)).unwrap_or(0)];
        let mut done = 0;
        while done < meta.len {
            let n = usize::try_from((meta.len - done).min(PIECE)).unwrap_or(0);
            failpoint::read(|| self.file.read_exact_at(&mut piece[..n], meta.offset + done))
                .map_err(|e| Error::io(&self.path, "read tensor", e))?;
            sum.update(&piece[..n]);
            done += n as u64;
        }
        Ok(sum.finish())
    }
}

/// Layout of a file to be written.
pub(crate) struct Layout {
    header: Vec<u8>,
    tensors: Vec<(TensorMeta, Written)>,
    /// Bytes of the file.
    end: u64,
}

impl Layout {
    fn new(path: &Path, specs: Vec<TensorSpec>, metadata: &BTreeMap<String, String>) -> Result<Self> {
        let placed = place(path, specs)?;
        let header = header(path, &placed, metadata)?;
        let data = placed.last().map_or(0, |meta| meta.offset + meta.len);
        Ok(Self::of(header, placed, data))
    }

    /// A header, tensors with offsets from its end, and `data` bytes behind it.
    pub(crate) fn of(header: Vec<u8>, placed: Vec<TensorMeta>, data: u64) -> Self {
        let start = header.len() as u64;
        let shift = |meta: TensorMeta| TensorMeta { offset: meta.offset + start, ..meta };
        let tensors = placed.into_iter().map(|meta| (shift(meta), Written::default())).collect();
        Self { header, tensors, end: start + data }
    }
}

/// Bytes of a tensor that have been written: disjoint spans, begin to end, adjacent ones merged.
#[derive(Debug, Default)]
struct Written {
    spans: BTreeMap<u64, u64>,
    total: u64,
}

impl Written {
    /// Bytes from the first on that have all been written.
    fn prefix(&self) -> u64 {
        self.spans.get(&0).copied().unwrap_or(0)
    }

    /// Adds a span, or gives the first byte of it that was written before.
    fn claim(&mut self, mut start: u64, mut end: u64) -> std::result::Result<(), u64> {
        if start == end {
            return Ok(());
        }
        let before = self.spans.range(..=start).next_back().map(|(&s, &e)| (s, e));
        let after = self.spans.range(start..).next().map(|(&s, &e)| (s, e));
        if before.is_some_and(|(_, e)| e > start) {
            return Err(start);
        }
        if let Some((s, _)) = after.filter(|&(s, _)| s < end) {
            return Err(s);
        }
        self.total += end - start;
        if let Some((s, _)) = before.filter(|&(_, e)| e == start) {
            start = s;
        }
        if let Some((s, e)) = after.filter(|&(s, _)| s == end) {
            self.spans.remove(&s);
            end = e;
        }
        self.spans.insert(start, end);
        Ok(())
    }
}

/// Sorts the tensors and gives each its offset within the data.
fn place(path: &Path, mut specs: Vec<TensorSpec>) -> Result<Vec<TensorMeta>> {
    specs.sort_by(|a, b| b.dtype.cmp(&a.dtype).then_with(|| a.name.cmp(&b.name)));
    refuse_bad_names(path, &specs)?;
    let mut offset: u64 = 0;
    let mut placed = Vec::with_capacity(specs.len());
    for spec in specs {
        let len = spec.len(path)?;
        let end = offset.checked_add(len).filter(|&end| i64::try_from(end).is_ok());
        let end = end.ok_or_else(|| {
            let fault = WriteFault::Size { shape: shape_text(&spec.shape), dtype: spec.dtype };
            Error::write(path, &spec.name, fault)
        })?;
        let TensorSpec { name, dtype, shape } = spec;
        placed.push(TensorMeta { name, dtype, shape, offset, len });
        offset = end;
    }
    Ok(placed)
}

/// Refuses a name given twice and the format's own key.
pub(crate) fn refuse_bad_names(path: &Path, specs: &[TensorSpec]) -> Result<()> {
    let mut names: Vec<&str> = specs.iter().map(|spec| spec.name.as_str()).collect();
    names.sort_unstable();
    if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(Error::write(path, pair[0], WriteFault::Duplicate));
    }
    if names.binary_search(&"__metadata__").is_ok() {
        return Err(Error::write(path, "__metadata__", WriteFault::Reserved));
    }
    Ok(())
}

/// Length field and padded JSON header.
fn header(path: &Path, tensors: &[TensorMeta], metadata: &BTreeMap<String, String>) -> Result<Vec<u8>> {
    let mut entries = Vec::with_capacity(tensors.len() + 1);
    if !metadata.is_empty() {
        entries.push(format!("\"__metadata__\":{}", json!(metadata)));
    }
    for meta in tensors {
        let TensorMeta { name, dtype, shape, offset, len } = meta;
        // One object at a time, so that fields stay in the reference writer's order.
        let (name, offsets) = (json!(name), json!([offset, offset + len]));
        let shape = json!(shape);
        entries
            .push(format!("{name}:{{\"dtype\":\"{dtype}\",\"shape\":{shape},\"data_offsets\":{offsets}}}"));
    }
    let mut json = format!("{{{}}}", entries.join(",")).into_bytes();
    json.resize(json.len().next_multiple_of(8), b' ');
    let found = json.len() as u64;
    if found > MAX_HEADER_BYTES {
        return Err(Error::output(path, OutputFault::HeaderTooLong { found, cap: MAX_HEADER_BYTES }));
    }
    let mut bytes = found.to_le_bytes().to_vec();
    bytes.append(&mut json);
    Ok(bytes)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use super::*;

    #[test]
    fn spans_join_and_refuse_overlap() {
        let mut written = Written::default();
        for (start, end, expected) in [
            (4, 8, Ok(())),
            (0, 2, Ok(())),
            (8, 8, Ok(())),
            (7, 9, Err(7)),
            (1, 5, Err(1)),
            (3, 6, Err(4)),
            (2, 4, Ok(())),
            (8, 10, Ok(())),
        ] {
            assert_eq!(written.claim(start, end), expected, "{start}..{end}");
        }
        assert_eq!(written.spans, BTreeMap::from([(0, 10)]));
        assert_eq!(written.total, 10);
    }

    #[test]
    fn a_full_disk_is_an_environment_error() {
        let full = OpenOptions::new().write(true).open("/dev/full");
        let Ok(file) = full else {
            println!("skipped: no /dev/full");
            return;
        };
        let path = PathBuf::from("out.safetensors");
        let meta = TensorMeta { name: "a".into(), dtype: Dtype::U8, shape: vec![4], offset: 0, len: 4 };
        let mut writer = SafetensorsWriter::of(&path, file, vec![(meta, Written::default())], 4);
        let error = writer.write("a", &[1; 4]).unwrap_err();
        assert_eq!(error.class(), crate::ErrorClass::Environment);
        assert!(error.to_string().starts_with("out.safetensors: write tensor: I/O error"), "{error}");
        assert!(error.to_string().contains("free disk space"), "{error}");
    }
}

//! Result of a unit: a file with one line of JSON that names unit, worker, length and SHA-256, then the bytes.
//!
//! It appears whole: written under a temporary name, synced, renamed. What a power cut or a faulty disk damaged does not
//! have its digest, and counts as missing.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use mantissa_store::{Error, FileDigest, disk, regular};
use serde::{Deserialize, Serialize};

use crate::error::{Disagreement, RankError, Result};

/// Longest first line in bytes: a unit's name is that of a tensor or window, of at most a few hundred.
const MAX_HEADER: u64 = 1 << 16;

/// Result of a unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitResult {
    /// Worker that computed it.
    pub worker: String,
    /// Digest of the bytes.
    pub digest: FileDigest,
    /// The bytes.
    pub bytes: Vec<u8>,
}

/// First line of the file.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Header {
    unit: String,
    worker: String,
    result: FileDigest,
}

impl UnitResult {
    /// Reads the result of `unit` at `path`. `None` if there is none, or one that is damaged or of another unit.
    ///
    /// # Errors
    /// The file cannot be read, or there is no memory for it.
    pub(crate) fn read(path: &Path, unit: &str) -> Result<Option<Self>> {
        let Some((Header { worker, result, .. }, mut rest)) = open(path, unit)? else { return Ok(None) };
        let mut bytes = Vec::new();
        let len = usize::try_from(result.len).unwrap_or(usize::MAX);
        let io = |error| Error::Io { path: path.to_owned(), operation: "read (result of a unit)", error };
        bytes.try_reserve_exact(len).map_err(|_| io(std::io::ErrorKind::OutOfMemory.into()))?;
        let most = result.len.saturating_add(1);
        rest.by_ref().take(most).read_to_end(&mut bytes).map_err(io)?;
        let whole = FileDigest::of(&bytes) == result;
        Ok(whole.then_some(UnitResult { worker, digest: result, bytes }))
    }

    /// Writes the result of `unit` to `path`. An equal result that is there stays.
    ///
    /// # Errors
    /// [`RankError::Disagrees`] if another result is there; I/O.
    pub(crate) fn write(&self, path: &Path, unit: &str) -> Result<()> {
        if let Some(stored) = Self::read(path, unit)? {
            return match stored.digest == self.digest {
                true => Ok(()),
                false => Err(self.disagreement(path, unit, &stored)),
            };
        }
        let header = Header { unit: unit.to_owned(), worker: self.worker.clone(), result: self.digest };
        let mut line = serde_json::to_vec(&header).unwrap_or_default();
        line.push(b'\n');
        let staged = staged_name(path);
        let written = write_new(&staged, &[&line, &self.bytes]).and_then(|()| {
            let io = |error| Error::Io { path: path.to_owned(), operation: "put in place", error };
            disk::rename(&staged, path).map_err(io)
        });
        if written.is_err() {
            // The first error counts.
            let _ = disk::remove_file_if_there(&staged);
        }
        Ok(written?)
    }

    /// Makes the error of a result that differs from the one at `path`.
    pub(crate) fn disagreement(&self, path: &Path, unit: &str, stored: &Self) -> RankError {
        let of = |result: &Self| (result.worker.clone(), result.digest.hex());
        let found = Disagreement { unit: unit.to_owned(), stored: of(stored), again: of(self) };
        RankError::Disagrees(path.to_owned(), Box::new(found))
    }
}

/// Opens the result of `unit` after its first line.
fn open(path: &Path, unit: &str) -> Result<Option<(Header, impl Read)>> {
    let Some(file) = regular::open_optional(path, "the result of a unit")? else { return Ok(None) };
    let io = |error| Error::Io { path: path.to_owned(), operation: "read (result of a unit)", error };
    let len = file.metadata().map_err(io)?.len();
    let mut rest = BufReader::new(file);
    let mut line = Vec::new();
    rest.by_ref().take(MAX_HEADER).read_until(b'\n', &mut line).map_err(io)?;
    let header = serde_json::from_slice::<Header>(&line).ok().filter(|header| header.unit == unit);
    // The length is checked before memory is taken for it.
    let fits = |header: &Header| header.result.len.checked_add(line.len() as u64) == Some(len);
    Ok(header.filter(fits).map(|header| (header, rest)))
}

fn write_new(path: &Path, pieces: &[&[u8]]) -> Result<(), Error> {
    let io = |operation| move |error| Error::Io { path: path.to_owned(), operation, error };
    let file = disk::create_new(path).map_err(io("create"))?;
    let mut at = 0;
    for piece in pieces {
        disk::write_at(&file, path, piece, at).map_err(io("write"))?;
        at += piece.len() as u64;
    }
    disk::sync_data(&file, path).map_err(io("sync"))
}

/// Name beside `path` that no other write of any process has.
fn staged_name(path: &Path) -> PathBuf {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let (pid, count) = (std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let host = crate::lease::Worker::this().host_digits();
    path.with_extension(format!("{host}-{pid}-{count}.new"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn result(bytes: &[u8], worker: &str) -> UnitResult {
        UnitResult { worker: worker.to_owned(), digest: FileDigest::of(bytes), bytes: bytes.to_vec() }
    }

    #[test]
    fn a_result_is_read_back_and_damage_counts_as_missing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.unit");
        assert_eq!(UnitResult::read(&path, "u").unwrap(), None);
        for bytes in [&b""[..], b"\n", b"{\"unit\":1}\n\0\xff"] {
            let one = result(bytes, "w 1");
            let _ = std::fs::remove_file(&path);
            one.write(&path, "u").unwrap();
            assert_eq!(UnitResult::read(&path, "u").unwrap(), Some(one));
            assert_eq!(UnitResult::read(&path, "v").unwrap(), None);
        }
        let whole = std::fs::read(&path).unwrap();
        for cut in 0..whole.len() {
            std::fs::write(&path, &whole[..cut]).unwrap();
            assert_eq!(UnitResult::read(&path, "u").unwrap(), None, "{cut}");
            let mut other = whole.clone();
            other[cut] ^= 1;
            std::fs::write(&path, &other).unwrap();
            let read = UnitResult::read(&path, "u").unwrap();
            // Only the worker's name is not covered by the digest.
            assert!(read.is_none_or(|read| read.bytes == result(b"{\"unit\":1}\n\0\xff", "").bytes), "{cut}");
        }
        std::fs::write(&path, [&whole[..], b"x"].concat()).unwrap();
        assert_eq!(UnitResult::read(&path, "u").unwrap(), None);
        // A damaged result is replaced.
        result(b"new", "w 2").write(&path, "u").unwrap();
        assert_eq!(UnitResult::read(&path, "u").unwrap().unwrap().bytes, b"new");
    }

    #[test]
    fn another_result_of_the_same_unit_names_both_workers() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.unit");
        result(b"1", "node-a 12").write(&path, "layers.0").unwrap();
        result(b"1", "node-b 7").write(&path, "layers.0").unwrap();
        let said = result(b"2", "node-b 7").write(&path, "layers.0").unwrap_err().to_string();
        for part in ["layers.0", "node-a 12", "node-b 7", "expected equal results", "; fix: "] {
            assert!(said.contains(part), "{said}");
        }
        assert_eq!(UnitResult::read(&path, "layers.0").unwrap().unwrap().bytes, b"1");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}

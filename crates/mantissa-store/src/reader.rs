//! Positioned reads from one regular file.

use std::fmt::Debug;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::{failpoint, regular};

/// Open regular file; its length was read at opening.
///
/// If the file is truncated later, a read past its end is an I/O error, never a signal.
#[derive(Debug)]
pub(crate) struct RegularFile {
    path: PathBuf,
    file: File,
    len: u64,
    tail: Option<Box<dyn Tail>>,
}

/// Bytes beyond the end of a file that are computed when they are read.
pub(crate) trait Tail: Debug + Send + Sync {
    /// Number of bytes.
    fn len(&self) -> u64;

    /// Fills `buf` from byte `at` of the tail; the range lies within one tensor.
    ///
    /// # Errors
    /// The bytes cannot be computed.
    fn read(&self, at: u64, buf: &mut [u8]) -> Result<()>;
}

impl RegularFile {
    /// Opens `path`, which must be a regular file. `expected` names what was looked for.
    pub(crate) fn open(path: &Path, expected: &'static str) -> Result<Self> {
        let (file, opened) = regular::open_with_metadata(path, expected)?;
        Ok(Self { path: path.to_owned(), file, len: opened.len(), tail: None })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes, including the tail.
    pub(crate) fn len(&self) -> u64 {
        self.tail.as_ref().map_or(self.len, |tail| self.len.saturating_add(tail.len()))
    }

    /// Adds computed bytes beyond the end.
    pub(crate) fn with_tail(self, tail: Box<dyn Tail>) -> Self {
        Self { tail: Some(tail), ..self }
    }

    /// Fills `buf` from byte `offset`.
    pub(crate) fn read_exact(&self, offset: u64, buf: &mut [u8], operation: &'static str) -> Result<()> {
        if let (Some(tail), Some(at)) = (&self.tail, offset.checked_sub(self.len)) {
            return tail.read(at, buf);
        }
        failpoint::read(|| self.file.read_exact_at(buf, offset))
            .map_err(|e| Error::io(&self.path, operation, e))
    }

    /// `len` bytes from byte `offset`, which the caller has checked against [`Self::len`].
    pub(crate) fn read_vec(
        &self,
        offset: u64,
        len: u64,
        what: &str,
        operation: &'static str,
    ) -> Result<Vec<u8>> {
        let mut bytes = reserve(&self.path, what, len, len)?;
        bytes.resize(usize::try_from(len).unwrap_or(0), 0);
        self.read_exact(offset, &mut bytes, operation)?;
        Ok(bytes)
    }
}

/// An empty vector with room for `count` elements that take `bytes` in all, or an error that names `what`.
pub(crate) fn reserve<T>(path: &Path, what: &str, count: u64, bytes: u64) -> Result<Vec<T>> {
    let mut items = Vec::new();
    let reserved = usize::try_from(count).is_ok_and(|count| items.try_reserve_exact(count).is_ok());
    if reserved {
        Ok(items)
    } else {
        Err(Error::Memory { path: path.to_owned(), what: what.to_owned(), bytes })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_file_truncated_after_opening_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        fs::write(&path, [7; 64]).unwrap();
        let source = RegularFile::open(&path, "a file").unwrap();
        assert_eq!(source.read_vec(60, 4, "t", "read").unwrap(), [7; 4]);
        fs::write(&path, [7; 8]).unwrap();
        let error = source.read_vec(60, 4, "t", "read").unwrap_err();
        assert!(error.to_string().contains("changed while it was read"), "{error}");
    }

    #[test]
    fn an_impossible_allocation_is_an_error() {
        let error = reserve::<u8>(Path::new("m"), "tensor \"a\"", 1 << 63, 1 << 63).unwrap_err();
        assert!(matches!(error, Error::Memory { .. }));
        assert_eq!(error.class(), crate::ErrorClass::Environment);
    }
}

//! Arrays of an optimizer state in a file ("paged"): read and written piece by piece, so that they take memory only as
//! the page cache grants it. The file is scratch: it has no name once it is open, so nothing is left of it however the process
//! ends. Checkpoints hold the state.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use mantissa_store::{Dtype, Error, disk};

use crate::error::TrainError;

/// Open file of moments.
#[derive(Debug)]
struct Pages {
    file: File,
    path: PathBuf,
}

/// File of moments that is opened after its parts are known.
#[derive(Clone, Debug, Default)]
pub(crate) struct Unpaged {
    pages: Arc<OnceLock<Pages>>,
    bytes: u64,
}

/// Part of the file.
#[derive(Clone, Debug)]
pub(crate) struct Extent {
    pages: Arc<OnceLock<Pages>>,
    offset: u64,
    bytes: u64,
}

/// Array in the file.
#[derive(Clone, Copy, Debug)]
pub struct Paged<'a> {
    extent: &'a Extent,
    dtype: Dtype,
}

impl PartialEq for Paged<'_> {
    /// Compares places, not contents.
    fn eq(&self, other: &Self) -> bool {
        self.extent.offset == other.extent.offset && self.dtype == other.dtype
    }
}

impl Unpaged {
    /// Reserves a part of `bytes`.
    pub(crate) fn reserve(&mut self, bytes: u64) -> Extent {
        let offset = self.bytes;
        // Whole pages, so that no two parts share one.
        self.bytes = offset + bytes.next_multiple_of(4096);
        Extent { pages: Arc::clone(&self.pages), offset, bytes }
    }

    /// Bytes of the file.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Creates the file at `path`, filled with zeros, and removes its name.
    ///
    /// # Errors
    /// [`TrainError::Store`], also if the disk is too small.
    pub(crate) fn open(&self, path: &Path) -> Result<(), TrainError> {
        let fault =
            |operation, error| Error::opening(path, "the file of the optimizer state", operation, error);
        // A run that was killed between the next two lines left its file.
        disk::remove_file_if_there(path).map_err(|error| fault("remove", error))?;
        let file = disk::create_new(path).map_err(|error| fault("create", error))?;
        disk::remove_file(path).map_err(|error| fault("remove the name of", error))?;
        disk::reserve(&file, path, self.bytes).map_err(|error| fault("reserve space for", error))?;
        // A second call keeps the first file.
        let _ = self.pages.set(Pages { file, path: path.to_owned() });
        Ok(())
    }
}

impl Extent {
    fn pages(&self) -> Result<&Pages, TrainError> {
        let path = Path::new("optimizer state");
        let missing =
            || Error::field(path, "paged", "no file", "an open file", "call Optimizer::open_pages first");
        Ok(self.pages.get().ok_or_else(missing)?)
    }

    /// Reads bytes from offset `at` on.
    pub(crate) fn read(&self, at: u64, bytes: &mut [u8]) -> Result<(), TrainError> {
        let pages = self.pages()?;
        let read = pages.file.read_exact_at(bytes, self.offset + at);
        Ok(read.map_err(|error| Error::Io { path: pages.path.clone(), operation: "read", error })?)
    }

    /// Writes bytes from offset `at` on.
    pub(crate) fn write(&self, at: u64, bytes: &[u8]) -> Result<(), TrainError> {
        let pages = self.pages()?;
        let written = pages.file.write_all_at(bytes, self.offset + at);
        Ok(written.map_err(|error| Error::Io { path: pages.path.clone(), operation: "write", error })?)
    }

    /// Returns the part as an array of `dtype`.
    pub(crate) fn array(&self, dtype: Dtype) -> Paged<'_> {
        Paged { extent: self, dtype }
    }
}

impl Paged<'_> {
    /// Element type.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        (self.extent.bytes / (self.dtype.bits() / 8)) as usize
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.extent.bytes == 0
    }

    /// Reads little-endian bytes from offset `at` on.
    ///
    /// # Errors
    /// [`TrainError::Store`].
    pub fn read(&self, at: u64, bytes: &mut [u8]) -> Result<(), TrainError> {
        self.extent.read(at, bytes)
    }

    /// Writes little-endian bytes from offset `at` on.
    ///
    /// # Errors
    /// [`TrainError::Store`].
    pub fn write(&self, at: u64, bytes: &[u8]) -> Result<(), TrainError> {
        self.extent.write(at, bytes)
    }
}

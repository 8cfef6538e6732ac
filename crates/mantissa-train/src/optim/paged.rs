//! Moments in a file ("paged"): read and written piece by piece, so that the state takes memory only as the page
//! cache grants it. The file is scratch: it has no name once it is open, so nothing is left of it however the process
//! ends. Checkpoints hold the state.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use mantissa_store::{Dtype, Error, disk};

use super::moments::{CodesMut, MomentFormat};
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

    fn read(&self, at: u64, bytes: &mut [u8]) -> Result<(), TrainError> {
        let pages = self.pages()?;
        let read = pages.file.read_exact_at(bytes, self.offset + at);
        Ok(read.map_err(|error| Error::Io { path: pages.path.clone(), operation: "read", error })?)
    }

    fn write(&self, at: u64, bytes: &[u8]) -> Result<(), TrainError> {
        let pages = self.pages()?;
        let written = pages.file.write_all_at(bytes, self.offset + at);
        Ok(written.map_err(|error| Error::Io { path: pages.path.clone(), operation: "write", error })?)
    }

    /// Returns the part as an array of moments in `format`.
    pub(crate) fn of(&self, format: MomentFormat) -> Paged<'_> {
        let dtype = match format {
            MomentFormat::F32 => Dtype::F32,
            MomentFormat::Bf16 => Dtype::BF16,
            _ => Dtype::U8,
        };
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

/// Memory of one thread for a piece of a paged moment.
#[derive(Debug, Default)]
pub(crate) struct PageBuffer {
    bytes: Vec<u8>,
    f32: Vec<f32>,
    u16: Vec<u16>,
}

impl PageBuffer {
    /// Reads `len` units (values or bytes of codes) from unit `first` on.
    pub(crate) fn read(
        &mut self,
        extent: &Extent,
        format: MomentFormat,
        first: usize,
        len: usize,
    ) -> Result<(), TrainError> {
        let width = width(format);
        self.bytes.resize(len * width, 0);
        extent.read((first * width) as u64, &mut self.bytes)?;
        match self.codes(format, len) {
            CodesMut::F32(_) => {
                let bytes = self.bytes.as_chunks::<4>().0;
                self.f32.iter_mut().zip(bytes).for_each(|(x, b)| *x = f32::from_le_bytes(*b));
            }
            CodesMut::Bf16(_) => {
                let bytes = self.bytes.as_chunks::<2>().0;
                self.u16.iter_mut().zip(bytes).for_each(|(x, b)| *x = u16::from_le_bytes(*b));
            }
            CodesMut::U8(_) => {}
        }
        Ok(())
    }

    /// Returns room for `len` units.
    pub(crate) fn codes(&mut self, format: MomentFormat, len: usize) -> CodesMut<'_> {
        match format {
            MomentFormat::F32 => {
                self.f32.resize(len, 0.0);
                CodesMut::F32(&mut self.f32)
            }
            MomentFormat::Bf16 => {
                self.u16.resize(len, 0);
                CodesMut::Bf16(&mut self.u16)
            }
            _ => {
                self.bytes.resize(len, 0);
                CodesMut::U8(&mut self.bytes)
            }
        }
    }

    /// Writes `len` units from unit `first` on.
    pub(crate) fn write(
        &mut self,
        extent: &Extent,
        format: MomentFormat,
        first: usize,
        len: usize,
    ) -> Result<(), TrainError> {
        let width = width(format);
        self.bytes.resize(len * width, 0);
        let bytes = &mut self.bytes;
        match format {
            MomentFormat::F32 => {
                let to = bytes.as_chunks_mut::<4>().0;
                self.f32.iter().zip(to).for_each(|(x, b)| *b = x.to_le_bytes());
            }
            MomentFormat::Bf16 => {
                let to = bytes.as_chunks_mut::<2>().0;
                self.u16.iter().zip(to).for_each(|(x, b)| *b = x.to_le_bytes());
            }
            _ => {}
        }
        extent.write((first * width) as u64, bytes)
    }

    /// Bytes of the buffers of one thread: a piece of two moments with its bytes.
    pub(crate) const BYTES: u64 = 2 * (4 + 4) * super::PIECE as u64;
}

/// Bytes of a unit.
fn width(format: MomentFormat) -> usize {
    match format {
        MomentFormat::F32 => 4,
        MomentFormat::Bf16 => 2,
        _ => 1,
    }
}

//! Journal: lines appended to a file beside unfinished work, each with its checksum.
//!
//! A line is `CHECKSUM TEXT\n`, the XXH64 of the text in 16 hexadecimal digits. Reading returns only whole lines; a
//! line torn by a kill or lost in a power cut is ignored.

use std::fs::{File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

use crate::checksum::Checksum;
use crate::disk;
use crate::error::{Error, Result};
use crate::failpoint;

/// File name of the journal within a staging folder. It never becomes part of an output.
pub const JOURNAL_NAME: &str = ".mantissa-journal";

/// Longest journal read, in bytes.
const MAX_JOURNAL_BYTES: u64 = 256 << 20;

/// A journal open for appending.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    file: File,
}

impl Journal {
    /// Creates the journal of the folder `dir`, which must not have one.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn create(dir: &Path) -> Result<Self> {
        let path = dir.join(JOURNAL_NAME);
        let file = disk::create_new(&path).map_err(|e| Error::io(&path, "create journal", e))?;
        Ok(Self { path, file })
    }

    /// Whole lines of the journal of the folder `dir`, in order; `None` if there is no journal that can be read.
    pub fn read(dir: &Path) -> Option<Vec<String>> {
        let file = open(&dir.join(JOURNAL_NAME), false).ok()?;
        let mut bytes = Vec::new();
        bytes
            .try_reserve_exact(usize::try_from(file.metadata().ok()?.len().min(MAX_JOURNAL_BYTES)).ok()?)
            .ok()?;
        failpoint::read(|| file.take(MAX_JOURNAL_BYTES).read_to_end(&mut bytes)).ok()?;
        Some(bytes.split(|&b| b == b'\n').filter_map(whole_line).collect())
    }

    /// Opens the journal of the folder `dir` to continue it.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn reopen(dir: &Path) -> Result<Self> {
        let path = dir.join(JOURNAL_NAME);
        let file = open(&path, true).map_err(|e| Error::io(&path, "open journal", e))?;
        let mut journal = Self { path, file };
        // The last line may be torn; end it, so that the next is not appended to it.
        journal.write(b"\n")?;
        Ok(journal)
    }

    /// Appends a line; `text` has no line break. It is durable after the next [`Self::sync`].
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn append(&mut self, text: &str) -> Result<()> {
        debug_assert!(!text.contains('\n'));
        // A single write, so that a kill leaves the whole line or none.
        self.write(format!("{:016x} {text}\n", Checksum::of(text.as_bytes())).as_bytes())
    }

    /// Makes every line durable. Make the data that the lines describe durable first.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn sync(&self) -> Result<()> {
        disk::sync_data(&self.file, &self.path).map_err(|e| Error::io(&self.path, "fsync journal", e))
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let Self { path, file } = self;
        disk::append(file, path, bytes).map_err(|e| Error::io(path, "write journal", e))
    }
}

fn open(path: &Path, append: bool) -> std::io::Result<File> {
    let mut options = OpenOptions::new();
    // Do not follow a link, which others can plant in a shared folder, and do not wait for a pipe.
    options.custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed());
    options.read(true).append(append).open(path)
}

fn whole_line(line: &[u8]) -> Option<String> {
    let (sum, text) = std::str::from_utf8(line).ok()?.split_once(' ')?;
    let whole = sum.len() == 16 && u64::from_str_radix(sum, 16) == Ok(Checksum::of(text.as_bytes()));
    whole.then(|| text.to_owned())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn whole_lines_are_read_back_and_torn_ones_are_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(JOURNAL_NAME);
        assert_eq!(Journal::read(dir.path()), None);
        let mut journal = Journal::create(dir.path()).unwrap();
        journal.append("one").unwrap();
        journal.append("two, with a space").unwrap();
        journal.sync().unwrap();
        let bytes = fs::read(&path).unwrap();
        for cut in 0..=bytes.len() {
            fs::write(&path, &bytes[..cut]).unwrap();
            let expected = usize::from(cut >= 20) + usize::from(cut + 1 >= bytes.len());
            let lines = Journal::read(dir.path()).unwrap();
            assert_eq!(lines.len(), expected, "cut at {cut}: {lines:?}");
            let mut journal = Journal::reopen(dir.path()).unwrap();
            journal.append("three").unwrap();
            assert_eq!(Journal::read(dir.path()).unwrap().last().unwrap(), "three", "cut at {cut}");
        }
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 4;
            fs::write(&path, damaged).unwrap();
            assert!(Journal::read(dir.path()).unwrap().len() < 2, "damaged at {at}");
        }
    }

    #[test]
    fn links_are_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let elsewhere = dir.path().join("elsewhere");
        fs::write(&elsewhere, "mine").unwrap();
        std::os::unix::fs::symlink(&elsewhere, dir.path().join(JOURNAL_NAME)).unwrap();
        assert_eq!(Journal::read(dir.path()), None);
        assert!(Journal::reopen(dir.path()).is_err());
        assert_eq!(fs::read(&elsewhere).unwrap(), b"mine");
    }
}

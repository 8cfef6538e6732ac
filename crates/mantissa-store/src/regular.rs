//! The one way to open a file for reading: regular files only.
//!
//! Whoever prepares a model folder chooses what lies at its names. A pipe would wait for a writer, a device may never
//! end. So a file is opened without waiting, and its type is read from the open handle, which nothing can replace between
//! a check and its use. Links to regular files are followed: download caches are made of them. Texts that a user names
//! may also be pipes ([`crate::TextFile`]).

use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::OFlags;
use rustix::io::Errno;

use crate::error::{Error, JsonFault, Result};
use crate::failpoint;

/// Opens the regular file at `path`, or at the end of a link there. `expected` names it in messages.
///
/// # Errors
/// [`Error::Missing`]; [`Error::WrongKind`] for a folder, a pipe, a device, a socket and for a link that leads nowhere;
/// [`Error::Io`].
pub fn open(path: &Path, expected: &'static str) -> Result<File> {
    open_with_metadata(path, expected).map(|(file, _)| file)
}

/// As [`open`]; `None` if there is nothing at `path`.
///
/// # Errors
/// As [`open`], but for [`Error::Missing`].
pub fn open_optional(path: &Path, expected: &'static str) -> Result<Option<File>> {
    present(open(path, expected))
}

/// Reads the regular file at `path`, of at most `most` bytes.
///
/// # Errors
/// As [`open`], and [`Error::Json`] for a larger file.
pub fn read(path: &Path, most: u64, expected: &'static str) -> Result<Vec<u8>> {
    let (file, metadata) = open_with_metadata(path, expected)?;
    let too_large =
        |found| Error::Json { path: path.to_owned(), fault: JsonFault::TooLarge { found, cap: most } };
    if metadata.len() > most {
        return Err(too_large(metadata.len()));
    }
    let mut bytes = Vec::new();
    let reserved = usize::try_from(metadata.len()).is_ok_and(|len| bytes.try_reserve_exact(len).is_ok());
    if !reserved {
        return Err(Error::Memory {
            path: path.to_owned(),
            what: expected.to_owned(),
            bytes: metadata.len(),
        });
    }
    // One byte more shows a file that has grown since.
    let read = failpoint::read(|| (&file).take(most.saturating_add(1)).read_to_end(&mut bytes));
    read.map_err(|error| Error::io(path, "read", error))?;
    if bytes.len() as u64 > most { Err(too_large(bytes.len() as u64)) } else { Ok(bytes) }
}

/// Reads the regular file at `path`, of at most `most` bytes, as UTF-8.
///
/// # Errors
/// As [`read`], and [`Error::Field`] for other bytes.
pub fn read_text(path: &Path, most: u64, expected: &'static str) -> Result<String> {
    let bytes = read(path, most, expected)?;
    String::from_utf8(bytes).map_err(|error| Error::not_utf8(path, error.utf8_error().valid_up_to() as u64))
}

/// As [`read`]; `None` if there is nothing at `path`.
///
/// # Errors
/// As [`read`], but for [`Error::Missing`].
pub fn read_optional(path: &Path, most: u64, expected: &'static str) -> Result<Option<Vec<u8>>> {
    present(read(path, most, expected))
}

/// Opens a regular file; also returns its metadata at opening.
pub(crate) fn open_with_metadata(path: &Path, expected: &'static str) -> Result<(File, Metadata)> {
    let mut options = OpenOptions::new();
    // Neither waits for the other end of a pipe nor takes a terminal; reading a regular file is as always.
    options.read(true).custom_flags((OFlags::NONBLOCK | OFlags::NOCTTY).bits().cast_signed());
    let file = failpoint::read(|| options.open(path)).map_err(|error| refusal(path, expected, error))?;
    let opened = failpoint::read(|| file.metadata()).map_err(|e| Error::io(path, "read length", e))?;
    match found(&opened) {
        None => Ok((file, opened)),
        Some(found) => Err(Error::WrongKind { path: path.to_owned(), found, expected }),
    }
}

/// Name of the type of a file that is not regular.
pub(crate) fn found(metadata: &Metadata) -> Option<&'static str> {
    let kind = metadata.file_type();
    if kind.is_file() {
        None
    } else if kind.is_dir() {
        Some("a folder, not a regular file")
    } else if kind.is_fifo() {
        Some("a pipe, not a regular file")
    } else if kind.is_char_device() {
        Some("a character device, not a regular file")
    } else if kind.is_block_device() {
        Some("a block device, not a regular file")
    } else {
        Some("a socket, not a regular file")
    }
}

/// Classifies a failed opening: something at `path` that cannot be opened because it is no file is bad input.
fn refusal(path: &Path, expected: &'static str, error: io::Error) -> Error {
    let wrong = |found| Error::WrongKind { path: path.to_owned(), found, expected };
    match Errno::from_io_error(&error) {
        Some(Errno::LOOP) => return wrong("a link that leads back to itself, not a regular file"),
        // A socket, or a device without hardware.
        Some(Errno::NXIO | Errno::NODEV) => return wrong("a device or a socket, not a regular file"),
        _ => {}
    }
    let is_link = || fs::read_link(path).is_ok();
    if error.kind() == io::ErrorKind::NotFound && is_link() {
        return wrong("a link to nothing, not a regular file");
    }
    Error::opening(path, expected, "open", error)
}

/// Makes `None` of a missing file.
///
/// # Errors
/// The error of `read`, but for [`Error::Missing`].
pub fn present<T>(read: Result<T>) -> Result<Option<T>> {
    match read {
        Ok(read) => Ok(Some(read)),
        Err(Error::Missing { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use super::*;
    use rustix::fs::{CWD, FileType, Mode, mknodat};
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

    #[test]
    fn nothing_but_a_regular_file_opens_or_waits() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::write(at("file"), "text").unwrap();
        symlink("file", at("link")).unwrap();
        mknodat(CWD, at("pipe"), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        symlink("pipe", at("to-pipe")).unwrap();
        symlink("no", at("to-nothing")).unwrap();
        symlink("loop", at("loop")).unwrap();
        symlink("/dev/zero", at("zero")).unwrap();
        symlink(".", at("to-folder")).unwrap();
        let _socket = UnixListener::bind(at("socket")).unwrap();
        assert_eq!(read(&at("file"), 4, "a file").unwrap(), b"text");
        assert_eq!(read_optional(&at("link"), 4, "a file").unwrap().unwrap(), b"text");
        for (name, kind) in [
            ("pipe", "a pipe"),
            ("to-pipe", "a pipe"),
            ("to-nothing", "a link to nothing"),
            ("loop", "a link that leads back"),
            ("zero", "a character device"),
            ("to-folder", "a folder"),
            ("socket", "a device or a socket"),
        ] {
            let error = open_optional(&at(name), "a test").unwrap_err();
            assert!(matches!(error, Error::WrongKind { .. }), "{error}");
            let wanted = format!("/{name}: expected a test, got {kind}");
            assert!(error.to_string().contains(&wanted), "{error}");
            assert!(error.to_string().contains("not a regular file"), "{error}");
            assert_eq!(error.class(), crate::ErrorClass::Input);
        }
        assert!(open_optional(&at("no"), "a test").unwrap().is_none());
        assert!(matches!(open(&at("no"), "a test"), Err(Error::Missing { .. })));
    }

    #[test]
    fn caps_come_before_reading() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        fs::write(&path, [b' '; 9]).unwrap();
        assert_eq!(read(&path, 9, "a file").unwrap().len(), 9);
        assert!(matches!(read(&path, 8, "a file"), Err(Error::Json { .. })));
        // Files of /proc state no length.
        assert!(matches!(read(Path::new("/proc/self/status"), 8, "a file"), Err(Error::Json { .. })));
    }
}

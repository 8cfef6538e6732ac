//! All changes that this program makes to files and folders. No other module may create, write, rename or remove. So
//! in every command each change can be made to fail, be replaced by a kill, or be recorded ([`crate::failpoint`]).

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::{
    CWD, FallocateFlags, RenameFlags, XattrFlags, fallocate, renameat_with, setxattr, statvfs, symlinkat,
};
use rustix::io::{Errno, retry_on_intr};

use crate::failpoint::{Change, change};

/// Returns the folder that `path` lies in: `.` for a bare name.
pub fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Creates a file that must not exist, open for reading and writing.
///
/// # Errors
/// I/O errors.
pub fn create_new(path: &Path) -> io::Result<File> {
    change(Change::Create(path), || File::options().read(true).write(true).create_new(true).open(path))
}

/// Opens a file for appending; creates it if missing.
///
/// # Errors
/// I/O errors.
pub fn open_append(path: &Path) -> io::Result<File> {
    let open = || File::options().append(true).create(true).open(path);
    if path.exists() { open() } else { change(Change::Create(path), open) }
}

/// Creates a folder, which must not exist, in an existing parent.
///
/// # Errors
/// I/O errors.
pub fn create_folder(path: &Path) -> io::Result<()> {
    change(Change::Folder(path), || fs::create_dir(path))
}

/// Creates a folder and missing parents.
///
/// # Errors
/// I/O errors.
pub fn create_folders(path: &Path) -> io::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        create_folders(parent)?;
    }
    match create_folder(path) {
        // Another process created it first.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
        result => result,
    }
}

/// Writes all bytes at the current position, the end of the file; `path` is its name.
///
/// # Errors
/// I/O errors.
pub fn append(mut file: &File, path: &Path, bytes: &[u8]) -> io::Result<()> {
    change(Change::Write(path, None, bytes), || file.write_all(bytes))
}

/// Writes all bytes from the offset `at` on.
///
/// # Errors
/// I/O errors.
pub fn write_at(file: &File, path: &Path, bytes: &[u8], at: u64) -> io::Result<()> {
    change(Change::Write(path, Some(at), bytes), || file.write_all_at(bytes, at))
}

/// Sets the length of a file; new bytes read as zeros.
///
/// # Errors
/// I/O errors.
pub fn set_len(file: &File, path: &Path, len: u64) -> io::Result<()> {
    change(Change::Length(path, len), || file.set_len(len))
}

/// Sets the length and reserves the disk space, so that a full disk is found before hours of work.
///
/// # Errors
/// I/O errors.
pub fn reserve(file: &File, path: &Path, len: u64) -> io::Result<()> {
    change(Change::Length(path, len), || {
        match retry_on_intr(|| fallocate(file, FallocateFlags::empty(), 0, len)) {
            // File systems without reservation get a sparse file; a full disk then fails at a write.
            Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => file.set_len(len),
            result => result.map_err(io::Error::from),
        }
    })
}

/// Sets the extended attribute `name` of a file or folder; does nothing on file systems without attributes.
///
/// # Errors
/// I/O errors.
pub fn mark(path: &Path, name: &str, text: &str) -> io::Result<()> {
    change(Change::Mark(path, text), || match setxattr(path, name, text.as_bytes(), XattrFlags::empty()) {
        Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::PERM) => Ok(()),
        result => result.map_err(io::Error::from),
    })
}

/// Makes content and metadata of an open file durable.
///
/// # Errors
/// I/O errors.
pub fn sync(file: &File, path: &Path) -> io::Result<()> {
    change(Change::Sync(path), || file.sync_all())
}

/// Makes the content of an open file durable.
///
/// # Errors
/// I/O errors.
pub fn sync_data(file: &File, path: &Path) -> io::Result<()> {
    change(Change::Sync(path), || file.sync_data())
}

/// Makes the file or folder at `path` durable.
///
/// # Errors
/// I/O errors.
pub fn sync_path(path: &Path) -> io::Result<()> {
    change(Change::Sync(path), || File::open(path)?.sync_all())
}

/// Renames a file or folder; atomically replaces a file at the new name.
///
/// # Errors
/// I/O errors.
pub fn rename(from: &Path, to: &Path) -> io::Result<()> {
    change(Change::Rename(from, to), || fs::rename(from, to))
}

/// Renames to a name that must not exist.
///
/// # Errors
/// [`io::ErrorKind::AlreadyExists`] if it exists; other I/O errors.
pub fn rename_to_free(from: &Path, to: &Path) -> io::Result<()> {
    change(Change::Rename(from, to), || match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        // File systems without the flag: check first, which leaves a short race.
        Err(error) if unsupported(error) => match fs::symlink_metadata(to) {
            Ok(_) => Err(io::ErrorKind::AlreadyExists.into()),
            Err(_) => fs::rename(from, to),
        },
        result => result.map_err(io::Error::from),
    })
}

/// Exchanges two names atomically; `None` if the file system cannot.
///
/// # Errors
/// I/O errors.
pub fn exchange(a: &Path, b: &Path) -> io::Result<Option<()>> {
    change(Change::Exchange(a, b), || match renameat_with(CWD, a, CWD, b, RenameFlags::EXCHANGE) {
        Err(error) if unsupported(error) => Ok(None),
        result => Ok(Some(result?)),
    })
}

fn unsupported(error: Errno) -> bool {
    [Errno::NOSYS, Errno::INVAL, Errno::OPNOTSUPP].contains(&error)
}

/// Creates a symbolic link at `path`, which must not exist, with the text `target`.
///
/// # Errors
/// [`io::ErrorKind::AlreadyExists`] if it exists; other I/O errors, as on file systems without links.
pub fn link(target: &Path, path: &Path) -> io::Result<()> {
    change(Change::Link(target, path), || symlinkat(target, CWD, path).map_err(io::Error::from))
}

/// Returns the bytes that this process may still write to the file system of an existing file or folder.
///
/// # Errors
/// I/O errors.
pub fn free(path: &Path) -> io::Result<u64> {
    let found = statvfs(path)?;
    Ok(found.f_bavail.saturating_mul(found.f_frsize))
}

/// Removes a file.
///
/// # Errors
/// I/O errors.
pub fn remove_file(path: &Path) -> io::Result<()> {
    change(Change::RemoveFile(path), || fs::remove_file(path))
}

/// Removes a file, if it exists.
///
/// # Errors
/// I/O errors.
pub fn remove_file_if_there(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        _ => remove_file(path),
    }
}

/// Removes an empty folder.
///
/// # Errors
/// I/O errors.
pub fn remove_folder(path: &Path) -> io::Result<()> {
    change(Change::RemoveFolder(path), || fs::remove_dir(path))
}

/// Removes a file, or a folder with its content. Links are removed, never followed. Only for paths that this process
/// created, or that a mark attributes to a dead process.
///
/// # Errors
/// I/O errors.
pub fn remove_all(path: &Path) -> io::Result<()> {
    if !fs::symlink_metadata(path)?.is_dir() {
        return remove_file(path);
    }
    let mut entries = fs::read_dir(path)?.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<_>>>()?;
    // Fixed order, so that a fault hits the same step each time.
    entries.sort();
    entries.iter().try_for_each(|entry| remove_all(entry))?;
    remove_folder(path)
}

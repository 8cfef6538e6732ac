//! Every change that this program makes to files and folders. Nothing else may create, write, rename or remove: so each change can
//! be made to fail, be replaced by a kill, or be recorded ([`crate::failpoint`]), in every command, also in those to come.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::{CWD, FallocateFlags, RenameFlags, XattrFlags, fallocate, renameat_with, setxattr};
use rustix::io::{Errno, retry_on_intr};

use crate::failpoint::{Change, change};

/// Creates a file that must not exist, open for reading and writing.
///
/// # Errors
/// As the system.
pub fn create_new(path: &Path) -> io::Result<File> {
    change(Change::Create(path), || File::options().read(true).write(true).create_new(true).open(path))
}

/// Opens a file for appending, and creates it where there is none.
///
/// # Errors
/// As the system.
pub fn open_append(path: &Path) -> io::Result<File> {
    let open = || File::options().append(true).create(true).open(path);
    if path.exists() { open() } else { change(Change::Create(path), open) }
}

/// Creates a folder, which must not exist; its parent must.
///
/// # Errors
/// As the system.
pub fn create_folder(path: &Path) -> io::Result<()> {
    change(Change::Folder(path), || fs::create_dir(path))
}

/// Creates a folder and its parents, where they do not exist.
///
/// # Errors
/// As the system.
pub fn create_folders(path: &Path) -> io::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        create_folders(parent)?;
    }
    match create_folder(path) {
        // Another process was first.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
        result => result,
    }
}

/// Writes all bytes at the file's place, which is its end; `path` is its name.
///
/// # Errors
/// As the system.
pub fn append(mut file: &File, path: &Path, bytes: &[u8]) -> io::Result<()> {
    change(Change::Write(path, None, bytes), || file.write_all(bytes))
}

/// Writes all bytes from the offset `at` on.
///
/// # Errors
/// As the system.
pub fn write_at(file: &File, path: &Path, bytes: &[u8], at: u64) -> io::Result<()> {
    change(Change::Write(path, Some(at), bytes), || file.write_all_at(bytes, at))
}

/// Sets the length of a file; what is beyond the old one reads as zeros.
///
/// # Errors
/// As the system.
pub fn set_len(file: &File, path: &Path, len: u64) -> io::Result<()> {
    change(Change::Length(path, len), || file.set_len(len))
}

/// Sets the length and takes the disk space now: a full disk is found before hours of work, not after.
///
/// # Errors
/// As the system.
pub fn reserve(file: &File, path: &Path, len: u64) -> io::Result<()> {
    change(Change::Length(path, len), || {
        match retry_on_intr(|| fallocate(file, FallocateFlags::empty(), 0, len)) {
            // File systems without reservation get a sparse file and find a full disk when they write.
            Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => file.set_len(len),
            result => result.map_err(io::Error::from),
        }
    })
}

/// Puts a text on a file or folder as the extended attribute `name`; nothing where the file system has no attributes.
///
/// # Errors
/// As the system.
pub fn mark(path: &Path, name: &str, text: &str) -> io::Result<()> {
    change(Change::Mark(path, text), || match setxattr(path, name, text.as_bytes(), XattrFlags::empty()) {
        Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::PERM) => Ok(()),
        result => result.map_err(io::Error::from),
    })
}

/// Makes content and metadata of an open file durable.
///
/// # Errors
/// As the system.
pub fn sync(file: &File, path: &Path) -> io::Result<()> {
    change(Change::Sync(path), || file.sync_all())
}

/// Makes the content of an open file durable.
///
/// # Errors
/// As the system.
pub fn sync_data(file: &File, path: &Path) -> io::Result<()> {
    change(Change::Sync(path), || file.sync_data())
}

/// Makes the file or folder at `path` durable.
///
/// # Errors
/// As the system.
pub fn sync_path(path: &Path) -> io::Result<()> {
    change(Change::Sync(path), || File::open(path)?.sync_all())
}

/// Moves a name; a file that is at the new one is replaced in the same step.
///
/// # Errors
/// As the system.
pub fn rename(from: &Path, to: &Path) -> io::Result<()> {
    change(Change::Rename(from, to), || fs::rename(from, to))
}

/// Moves a name to one at which there must be nothing.
///
/// # Errors
/// [`io::ErrorKind::AlreadyExists`] if something is there; as the system.
pub fn rename_to_free(from: &Path, to: &Path) -> io::Result<()> {
    change(Change::Rename(from, to), || match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        // File systems without the flag: looked up first, which leaves a moment between.
        Err(error) if unsupported(error) => match fs::symlink_metadata(to) {
            Ok(_) => Err(io::ErrorKind::AlreadyExists.into()),
            Err(_) => fs::rename(from, to),
        },
        result => result.map_err(io::Error::from),
    })
}

/// Exchanges two names in one step; `None` if the file system cannot.
///
/// # Errors
/// As the system.
pub fn exchange(a: &Path, b: &Path) -> io::Result<Option<()>> {
    change(Change::Exchange(a, b), || match renameat_with(CWD, a, CWD, b, RenameFlags::EXCHANGE) {
        Err(error) if unsupported(error) => Ok(None),
        result => Ok(Some(result?)),
    })
}

fn unsupported(error: Errno) -> bool {
    [Errno::NOSYS, Errno::INVAL, Errno::OPNOTSUPP].contains(&error)
}

/// Removes a file.
///
/// # Errors
/// As the system.
pub fn remove_file(path: &Path) -> io::Result<()> {
    change(Change::RemoveFile(path), || fs::remove_file(path))
}

/// Removes a file, if there is one.
///
/// # Errors
/// As the system.
pub fn remove_file_if_there(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        _ => remove_file(path),
    }
}

/// Removes an empty folder.
///
/// # Errors
/// As the system.
pub fn remove_folder(path: &Path) -> io::Result<()> {
    change(Change::RemoveFolder(path), || fs::remove_dir(path))
}

/// Removes a file, or a folder with all that is in it. Links are removed, never followed. For what this process made, or what a
/// mark says that a dead one made.
///
/// # Errors
/// As the system.
pub fn remove_all(path: &Path) -> io::Result<()> {
    if !fs::symlink_metadata(path)?.is_dir() {
        return remove_file(path);
    }
    let mut entries = fs::read_dir(path)?.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<_>>>()?;
    // In one order, so that a fault hits the same step each time.
    entries.sort();
    entries.iter().try_for_each(|entry| remove_all(entry))?;
    remove_folder(path)
}

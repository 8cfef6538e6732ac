//! One writer at a time for an output: an advisory lock on a file beside it, which holds the owner's process id.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

use crate::error::{Error, OutputFault, Result};
use crate::failpoint;
use crate::target::Target;

/// Held until dropped; the system releases it when the process dies, so a stale file locks nobody out.
#[derive(Debug)]
pub(crate) struct Lock {
    path: PathBuf,
    file: File,
}

impl Lock {
    /// Takes the lock of `target`, or says who holds it.
    pub(crate) fn acquire(target: &Target) -> Result<Self> {
        let path = target.sibling("lock");
        // The owner before us unlinks the file while it holds it, so the one we open can already be gone.
        for _ in 0..64 {
            let mut file = open(&path)?;
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    let fault = OutputFault::Busy { owner: owner(&mut file) };
                    return Err(Error::output(&target.path(), fault));
                }
                Err(TryLockError::Error(error)) => return Err(Error::io(&path, "lock", error)),
            }
            if is_at(&file, &path).map_err(|e| Error::io(&path, "lock", e))? {
                // Owned before it is written, so that a failed write removes it.
                let mut lock = Self { path, file };
                write_owner(&mut lock.file).map_err(|e| Error::io(&lock.path, "write lock", e))?;
                return Ok(lock);
            }
        }
        Err(Error::output(&target.path(), OutputFault::Busy { owner: "of changing id".to_owned() }))
    }

    /// The lock file.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Before the lock is released, so that nobody can have locked this very file in between.
        let _ = fs::remove_file(&self.path);
    }
}

fn open(path: &Path) -> Result<File> {
    let mut options = OpenOptions::new();
    // A link planted in a shared folder must not have its target truncated.
    options.read(true).write(true).create(true).custom_flags(OFlags::NOFOLLOW.bits().cast_signed());
    failpoint::write(|| options.open(path)).map_err(|e| Error::io(path, "create lock file", e))
}

fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let held = file.metadata()?;
    match fs::symlink_metadata(path) {
        Ok(named) => Ok((named.dev(), named.ino()) == (held.dev(), held.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

fn write_owner(file: &mut File) -> io::Result<()> {
    failpoint::write(|| file.set_len(0))?;
    failpoint::write(|| writeln!(file, "{}", std::process::id()))
}

fn owner(file: &mut File) -> String {
    let mut text = String::new();
    let read = file.take(16).read_to_string(&mut text);
    let pid = text.trim();
    if read.is_ok() && !pid.is_empty() && pid.bytes().all(|b| b.is_ascii_digit()) {
        pid.to_owned()
    } else {
        "of unknown id".to_owned()
    }
}

//! One writer at a time for an output or a training run: an advisory lock on a file beside it that names its owner.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use rustix::fs::OFlags;

use crate::disk;
use crate::error::{Error, OutputFault, Result};
use crate::failpoint::{Change, change};
use crate::lock_file::{Holder, INSIDE, is_lock, owner_of, text, text_of};
use crate::nested::{Form, refuse_inside};
use crate::target::{Target, resolve};
use crate::unpublished::Unpublished;

/// Number and distance of the tries to take a lock: a process that looks for nested outputs holds it for a moment.
const TRIES: u32 = 3;
const WAIT: Duration = Duration::from_millis(5);

/// Held until dropped; the system releases it when the process dies, so a stale file locks nobody out.
#[derive(Debug)]
pub struct Lock {
    path: PathBuf,
    file: File,
    _unpublished: Unpublished,
}

impl Lock {
    /// Takes the lock of the run at `path`; creates missing parent folders.
    ///
    /// # Errors
    /// [`Error::Output`] with [`OutputFault::Busy`] and the owner's process id and start, [`OutputFault::Nested`] if the
    /// run lies inside an output, [`OutputFault::NotALock`] if another file has the lock's name, [`Error::Io`].
    pub fn of(path: &Path) -> Result<Self> {
        let closed = |error: &io::Error| {
            matches!(error.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem)
        };
        // Looked for again under the lock, but before any folder is made.
        refuse_inside(&resolve(path)?, Form::Tree)?;
        let beside = Target::prepare(path).and_then(|at| Self::acquire_as(&at, "lock", Holder::Run));
        let lock = match beside {
            // If the parent is not writable (a mounted volume), the lock is inside the folder.
            Err(Error::Io { error, .. }) if closed(&error) && path.is_dir() => {
                Target::prepare(&path.join(INSIDE))
                    .and_then(|at| Self::acquire_as(&at, "lock", Holder::Inside))
            }
            result => result,
        };
        // Also where taking it failed: an outer output may have replaced the folders that were made for it.
        refuse_inside(&resolve(path)?, Form::Tree)?;
        lock
    }

    /// Takes the lock of `target`, or fails with its owner.
    pub(crate) fn acquire(target: &Target) -> Result<Self> {
        Self::acquire_as(target, "lock", Holder::Output)
    }

    /// Like [`Self::acquire`], with another lock file name and holder.
    pub(crate) fn acquire_as(target: &Target, name: &str, holder: Holder) -> Result<Self> {
        let path = target.sibling(name);
        let mut tries = 0;
        // The previous owner unlinks the file while holding it, so the one we open may be gone already.
        for _ in 0..64 {
            let mut file = open(&path)?;
            let found = text_of(&mut file);
            if !is_lock(&found) {
                return Err(Error::output(&path, OutputFault::NotALock));
            }
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) if tries < TRIES => {
                    tries += 1;
                    sleep(WAIT);
                    continue;
                }
                Err(TryLockError::WouldBlock) => {
                    let owner = owner_of(&mut file, found);
                    return Err(Error::output(&target.path(), OutputFault::Busy { owner }));
                }
                Err(TryLockError::Error(error)) => return Err(Error::io(&path, "lock", error)),
            }
            if is_at(&file, &path).map_err(|e| Error::io(&path, "lock", e))? {
                // Take ownership before writing, so that a failed write removes the file.
                let unpublished = Unpublished::lock(&path);
                let lock = Self { path, file, _unpublished: unpublished };
                lock.write_owner(holder).map_err(|e| Error::io(&lock.path, "write lock", e))?;
                return Ok(lock);
            }
        }
        Err(Error::output(&target.path(), OutputFault::Busy { owner: "of changing id".to_owned() }))
    }

    fn write_owner(&self, holder: Holder) -> io::Result<()> {
        disk::set_len(&self.file, &self.path, 0)?;
        let text = text(holder);
        disk::write_at(&self.file, &self.path, text.as_bytes(), 0)
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Unlink before the lock is released, so that nobody can have locked this very file in between.
        let _ = disk::remove_file(&self.path);
    }
}

fn open(path: &Path) -> Result<File> {
    let mut options = OpenOptions::new();
    // Do not truncate the target of a planted link.
    options.read(true).write(true).create(true).custom_flags(OFlags::NOFOLLOW.bits().cast_signed());
    change(Change::Create(path), || options.open(path)).map_err(|e| Error::io(path, "create lock file", e))
}

fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let held = file.metadata()?;
    match fs::symlink_metadata(path) {
        Ok(named) => Ok((named.dev(), named.ino()) == (held.dev(), held.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_somebody_else_is_not_locked_and_not_changed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(".out.mantissa-lock");
        fs::write(&path, "shopping list").unwrap();
        let error = Lock::of(&dir.path().join("out")).unwrap_err();
        assert!(matches!(error, Error::Output { fault: OutputFault::NotALock, .. }), "{error}");
        assert_eq!(fs::read_to_string(&path).unwrap(), "shopping list");
    }

    #[test]
    fn a_lock_of_zeros_is_one_that_a_power_cut_has_left() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(".out.mantissa-lock"), [0; 31]).unwrap();
        drop(Lock::of(&dir.path().join("out")).unwrap());
        assert!(fs::read_dir(dir.path()).unwrap().next().is_none());
    }

    #[test]
    fn the_owner_is_named_with_its_start() {
        let dir = tempfile::tempdir().unwrap();
        let held = Lock::of(&dir.path().join("out")).unwrap();
        let error = Lock::of(&dir.path().join("out")).unwrap_err().to_string();
        assert!(error.contains(&format!("process {} (started 2", std::process::id())), "{error}");
        drop(held);
        Lock::of(&dir.path().join("out")).unwrap();
        assert!(fs::read_dir(dir.path()).unwrap().next().is_none());
    }
}

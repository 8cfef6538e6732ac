//! One writer at a time for an output or a training run: an advisory lock on a file beside it that names its owner.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::OFlags;

use crate::disk;
use crate::error::{Error, OutputFault, Result};
use crate::failpoint::{Change, change};
use crate::target::Target;
use crate::unpublished::Unpublished;

/// First word of a lock file, which distinguishes it from other files.
const WORD: &str = "mantissa-lock";

/// Name in the file name of a lock inside a folder: `.run.mantissa-lock`.
const INSIDE: &str = "run";

/// Longest lock file read, in bytes.
const MAX_LOCK: u64 = 256;

/// Number and distance of the reads of a lock file until it names the process that holds it.
const OWNER_TRIES: u32 = 20;
const OWNER_WAIT: Duration = Duration::from_millis(5);

/// Held until dropped; the system releases it when the process dies, so a stale file locks nobody out.
#[derive(Debug)]
pub struct Lock {
    path: PathBuf,
    file: File,
    _unpublished: Unpublished,
}

impl Lock {
    /// Takes the lock of the output or run at `path`; creates missing parent folders.
    ///
    /// # Errors
    /// [`Error::Output`] with [`OutputFault::Busy`] and the owner's process id and start, [`OutputFault::NotALock`]
    /// if another file has the lock's name, [`Error::Io`].
    pub fn of(path: &Path) -> Result<Self> {
        let closed = |error: &io::Error| {
            matches!(error.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem)
        };
        match Self::acquire(&Target::prepare(path)?) {
            // If the parent is not writable (a mounted volume), the lock is inside the folder.
            Err(Error::Io { error, .. }) if closed(&error) && path.is_dir() => {
                Self::acquire(&Target::prepare(&path.join(INSIDE))?)
            }
            result => result,
        }
    }

    /// Takes the lock of `target`, or fails with its owner.
    pub(crate) fn acquire(target: &Target) -> Result<Self> {
        Self::acquire_as(target, "lock")
    }

    /// Like [`Self::acquire`], with another lock file name.
    pub(crate) fn acquire_as(target: &Target, name: &str) -> Result<Self> {
        let path = target.sibling(name);
        // The previous owner unlinks the file while holding it, so the one we open may be gone already.
        for _ in 0..64 {
            let mut file = open(&path)?;
            let text = text_of(&mut file);
            if !(text.is_empty() || text.starts_with(WORD)) {
                return Err(Error::output(&path, OutputFault::NotALock));
            }
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    let owner = owner_of(&mut file, text);
                    return Err(Error::output(&target.path(), OutputFault::Busy { owner }));
                }
                Err(TryLockError::Error(error)) => return Err(Error::io(&path, "lock", error)),
            }
            if is_at(&file, &path).map_err(|e| Error::io(&path, "lock", e))? {
                // Take ownership before writing, so that a failed write removes the file.
                let unpublished = Unpublished::lock(&path);
                let lock = Self { path, file, _unpublished: unpublished };
                lock.write_owner().map_err(|e| Error::io(&lock.path, "write lock", e))?;
                return Ok(lock);
            }
        }
        Err(Error::output(&target.path(), OutputFault::Busy { owner: "of changing id".to_owned() }))
    }

    fn write_owner(&self) -> io::Result<()> {
        disk::set_len(&self.file, &self.path, 0)?;
        let text = format!("{WORD} {} {}\n", std::process::id(), now());
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

fn text_of(file: &mut File) -> String {
    let mut bytes = Vec::new();
    let read = file.rewind().and_then(|()| file.take(MAX_LOCK).read_to_end(&mut bytes));
    // Treat an unreadable file as foreign. A power cut may leave zeros in place of the owner.
    let text = || String::from_utf8_lossy(&bytes).trim_start_matches('\0').to_owned();
    read.map_or_else(|_| "?".to_owned(), |_| text())
}

/// Owner for messages. Waits briefly for one that has just taken the lock to write its name.
fn owner_of(file: &mut File, mut text: String) -> String {
    for _ in 0..OWNER_TRIES {
        if !text.is_empty() {
            break;
        }
        sleep(OWNER_WAIT);
        text = text_of(file);
    }
    owner(&text)
}

/// Owner for messages: process id and start.
fn owner(text: &str) -> String {
    let mut words = text.split_whitespace().skip(1);
    match (words.next(), words.next().and_then(|seconds| seconds.parse().ok())) {
        (Some(pid), Some(start)) => format!("{pid} (started {})", utc(start)),
        _ => "of unknown id".to_owned(),
    }
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// Date and time of seconds since 1970, such as `2026-11-22 21:04:09 UTC`. Days to a date as in Howard Hinnant, "chrono-Compatible
/// Low-Level Date Algorithms", `civil_from_days`.
fn utc(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    let z = days + 719_468;
    let (era, day_of_era) = (z / 146_097, z % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let m = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * m + 2) / 5 + 1;
    let month = if m < 10 { m + 3 } else { m - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02} {:02}:{:02}:{:02} UTC", rest / 3600, rest / 60 % 60, rest % 60)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn times_are_dates() {
        assert_eq!(utc(0), "1970-01-01 00:00:00 UTC");
        assert_eq!(utc(951_782_400), "2000-02-29 00:00:00 UTC");
        assert_eq!(utc(1_795_381_449), "2026-11-22 21:04:09 UTC");
    }

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

//! Folder of temporary files, used only while this process runs.

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::disk;
use crate::error::{Error, Result};
use crate::failpoint::{Change, change};
use crate::unpublished::Unpublished;

/// Number of names tried before the folder for temporary files counts as unusable.
const TRIES: usize = 64;

/// Folder below the system's folder for temporary files (`TMPDIR`), readable only by its owner. It is removed on drop
/// and when a signal ends the process; only a kill leaves it behind.
#[derive(Debug)]
pub struct Scratch {
    path: PathBuf,
    _unpublished: Unpublished,
}

impl Scratch {
    /// Creates an empty folder.
    ///
    /// # Errors
    /// [`Error::Io`] names the folder for temporary files.
    pub fn new() -> Result<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let parent = std::env::temp_dir();
        let mut failed = None;
        for _ in 0..TRIES {
            let clock = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.subsec_nanos());
            let count = COUNT.fetch_add(1, Ordering::Relaxed);
            let path = parent.join(format!("mantissa-{}-{count}-{clock:08x}", std::process::id()));
            // Never reuse an existing folder: it may belong to someone else.
            let create = || DirBuilder::new().mode(0o700).create(&path);
            match Unpublished::create(&path, || change(Change::Folder(&path), create)) {
                Ok(unpublished) => return Ok(Scratch { path, _unpublished: unpublished }),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => failed = Some(error),
                Err(error) => return Err(Error::io(&path, "create a temporary folder (TMPDIR)", error)),
            }
        }
        let error = failed.unwrap_or_else(|| io::ErrorKind::AlreadyExists.into());
        Err(Error::io(&parent, "create a temporary folder (TMPDIR)", error))
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // Anything left is in the folder for temporary files, which the system cleans.
        let _ = disk::remove_all(&self.path);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn it_is_private_and_removed() {
        let (a, b) = (Scratch::new().unwrap(), Scratch::new().unwrap());
        assert_ne!(a.path(), b.path());
        assert_eq!(fs::metadata(a.path()).unwrap().permissions().mode() & 0o777, 0o700);
        fs::write(a.path().join("file"), b"x").unwrap();
        let path = a.path().to_owned();
        drop(a);
        assert!(!path.exists() && b.path().exists());
    }
}

//! Outputs begun and not yet published by this process, so that its signal thread can remove them: work folders and
//! locks.

use std::fs;
use std::io;
use std::mem;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::disk;
use crate::ending;
use crate::mark::remove_marked;

struct Begun {
    path: PathBuf,
    kept: bool,
}

static BEGUN: Mutex<Vec<Begun>> = Mutex::new(Vec::new());

/// Before the process exits, removes every output that it has begun and not published, and its lock. Resumable work
/// ([`crate::Staging::keep`]) stays. Called by the thread that received a signal, while others still write.
///
/// Afterwards no other thread changes a file: those that try wait for the exit.
pub fn abandon_unpublished() {
    let begun = begun();
    ending::begin();
    // Locks are registered before what they protect, and removed after it.
    for entry in begun.iter().rev().filter(|entry| !entry.kept) {
        remove(&entry.path);
    }
    mem::forget(begun);
}

/// Entry of a work folder, a temporary folder or a lock file, taken out when dropped.
#[derive(Debug)]
pub(crate) struct Unpublished {
    path: PathBuf,
}

impl Unpublished {
    /// Folder that is removed with its content.
    pub(crate) fn folder(path: &Path) -> Self {
        let path = path.to_owned();
        begun().push(Begun { path: path.clone(), kept: false });
        Self { path }
    }

    /// Folder created by `create`, with no signal in between that could leave it behind.
    pub(crate) fn create(path: &Path, create: impl FnOnce() -> io::Result<()>) -> io::Result<Self> {
        let mut begun = begun();
        create()?;
        let path = path.to_owned();
        begun.push(Begun { path: path.clone(), kept: false });
        Ok(Self { path })
    }

    /// A lock file.
    pub(crate) fn lock(path: &Path) -> Self {
        Self::folder(path)
    }

    pub(crate) fn keep(&self, kept: bool) {
        begun().iter_mut().filter(|entry| entry.path == self.path).for_each(|entry| entry.kept = kept);
    }

    /// Runs `put`, which moves outputs to their final places, so that a signal does not end the process halfway.
    pub(crate) fn publish<T, E>(&self, put: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        let mut begun = begun();
        let result = put();
        if result.is_ok() {
            // Whatever has this name now is the replaced output.
            begun.retain(|entry| entry.path != self.path);
        }
        result
    }
}

impl Drop for Unpublished {
    fn drop(&mut self) {
        begun().retain(|entry| entry.path != self.path);
    }
}

fn begun() -> MutexGuard<'static, Vec<Begun>> {
    BEGUN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Other threads may create files in a folder while it is removed.
fn remove(path: &Path) {
    for _ in 0..16 {
        let removed = match fs::symlink_metadata(path) {
            Ok(metadata) if metadata.is_dir() => remove_marked(path).is_ok(),
            Ok(_) => disk::remove_file(path).is_ok(),
            Err(_) => return,
        };
        if removed {
            return;
        }
    }
}

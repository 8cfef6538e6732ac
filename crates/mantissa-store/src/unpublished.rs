//! Outputs that this process has begun and not yet put in place, so that a signal handler's thread can take it away: work folders and locks.

use std::cell::Cell;
use std::fs;
use std::io;
use std::mem;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

use crate::disk;
use crate::work;

struct Begun {
    path: PathBuf,
    kept: bool,
}

static BEGUN: Mutex<Vec<Begun>> = Mutex::new(Vec::new());

/// True once the process is being ended.
static ENDING: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// True for the thread that ends the process.
    static ENDER: Cell<bool> = const { Cell::new(false) };
}

/// Stops this thread for ever if the process is being ended: a file made now would be left behind.
pub(crate) fn stop_if_ending() {
    while ENDING.load(Ordering::SeqCst) && !ENDER.get() {
        thread::park();
    }
}

/// Removes every output that this process has begun and not put in place, and its lock, before the process exits. Work that can be
/// resumed ([`crate::Staging::keep`]) stays. For the thread that has received a signal, while others still write.
///
/// After this no other thread changes a file: those that try wait for the exit.
pub fn abandon_unpublished() {
    let begun = begun();
    ENDER.set(true);
    ENDING.store(true, Ordering::SeqCst);
    // Locks come before what they protect, and are removed after it.
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
    /// A folder that is removed with all that is in it.
    pub(crate) fn folder(path: &Path) -> Self {
        let path = path.to_owned();
        begun().push(Begun { path: path.clone(), kept: false });
        Self { path }
    }

    /// A folder that `create` makes. No signal comes between: such a folder would be left behind.
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

    /// Runs `put`, which moves outputs to their final places, so that the process is not ended halfway by a signal.
    pub(crate) fn publish<T, E>(&self, put: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        let mut begun = begun();
        let result = put();
        if result.is_ok() {
            // What now lies under this name, if anything, is what was replaced.
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
            Ok(metadata) if metadata.is_dir() => work::remove_marked(path).is_ok(),
            Ok(_) => disk::remove_file(path).is_ok(),
            Err(_) => return,
        };
        if removed {
            return;
        }
    }
}

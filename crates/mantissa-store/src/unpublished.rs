//! The outputs that this process has begun and not yet put in place, so that a signal handler's thread can take them away.

use std::fs;
use std::mem;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

struct Output {
    partial: PathBuf,
    lock: PathBuf,
    kept: bool,
}

static OUTPUTS: Mutex<Vec<Output>> = Mutex::new(Vec::new());

/// Removes every output that this process has begun and not put in place, and its lock, before the process exits. What
/// can be continued ([`crate::Staging::keep`]) stays. For the thread that has received a signal, while others still write.
///
/// After this no output of the process can be begun or put in place: threads that try wait for the exit.
pub fn abandon_unpublished() {
    let outputs = outputs();
    for output in outputs.iter() {
        if !output.kept {
            remove(&output.partial);
        }
        // The lock itself is released by the exit.
        let _ = fs::remove_file(&output.lock);
    }
    mem::forget(outputs);
}

/// Entry of one output, taken out when dropped.
#[derive(Debug)]
pub(crate) struct Unpublished {
    partial: PathBuf,
}

impl Unpublished {
    pub(crate) fn new(partial: &Path, lock: &Path) -> Self {
        let (partial, lock) = (partial.to_owned(), lock.to_owned());
        outputs().push(Output { partial: partial.clone(), lock, kept: false });
        Self { partial }
    }

    pub(crate) fn keep(&self, kept: bool) {
        outputs().iter_mut().filter(|o| o.partial == self.partial).for_each(|o| o.kept = kept);
    }

    /// Runs `put`, which moves the output to its final place, so that it is not taken away halfway.
    pub(crate) fn publish<T, E>(&self, put: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        let mut outputs = outputs();
        let result = put();
        if result.is_ok() {
            // What now lies under this name, if anything, is the replaced output.
            outputs.retain(|o| o.partial != self.partial);
        }
        result
    }
}

impl Drop for Unpublished {
    fn drop(&mut self) {
        outputs().retain(|o| o.partial != self.partial);
    }
}

fn outputs() -> MutexGuard<'static, Vec<Output>> {
    OUTPUTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Other threads may create files in a folder while it is removed.
fn remove(path: &Path) {
    for _ in 0..16 {
        let removed = match fs::symlink_metadata(path) {
            Ok(metadata) if metadata.is_dir() => fs::remove_dir_all(path),
            Ok(_) => fs::remove_file(path),
            Err(_) => return,
        };
        if removed.is_ok() {
            return;
        }
    }
}

//! Hashes of the source, computed while the run works on it.
//!
//! A hash reads a file from its beginning, and quantization reads panels in any order, so they cannot share reads. A
//! separate thread hashes while the others quantize; what it reads is in the page cache for them.

use std::io;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, Scope, ScopedJoinHandle};
use std::time::Duration;

use mantissa_store::convention::ModelFiles;
use mantissa_store::hash_file_while;

use crate::error::{QuantError, Result};
use crate::quality::Digests;

/// Bytes per read.
const BUFFER: usize = 256 << 10;

/// Interval between checks of the hashing thread.
const POLL: Duration = Duration::from_millis(10);

/// Stack size of the hashing thread.
const STACK: usize = 128 << 10;

/// Digests of a source being computed.
pub(crate) struct SourceHashes<'scope> {
    files: Vec<PathBuf>,
    /// Hashing thread; `None` if there is none, and the files are hashed in [`wait`](Self::wait).
    running: Option<ScopedJoinHandle<'scope, Result<Option<Digests>>>>,
}

impl SourceHashes<'_> {
    /// Runs `work` while `source` is hashed on a separate thread, if `threads` is at least two.
    ///
    /// # Errors
    /// Errors of `work`; hashing is then stopped.
    pub(crate) fn beside<T>(
        source: &ModelFiles,
        threads: usize,
        work: impl FnOnce(SourceHashes<'_>) -> Result<T>,
    ) -> Result<T> {
        let stop = AtomicBool::new(false);
        let files = files_of(source);
        thread::scope(|scope| {
            // Stops hashing when `work` ends, so that the scope does not wait for the rest of the files.
            let _stop = StopOnDrop(&stop);
            let running = if threads > 1 { spawn(scope, files.clone(), &stop).ok() } else { None };
            work(SourceHashes { files, running })
        })
    }

    /// Returns the digests by file name. `check_tick` is called repeatedly; `Break` interrupts the wait.
    ///
    /// # Errors
    /// A file that cannot be read; [`QuantError::Interrupted`].
    pub(crate) fn wait(self, check_tick: &mut dyn FnMut() -> ControlFlow<()>) -> Result<Digests> {
        let found = match self.running {
            None => hash(&self.files, &mut vec![0; BUFFER], &mut || check_tick().is_continue()),
            Some(running) => {
                while !running.is_finished() {
                    if check_tick().is_break() {
                        return Err(QuantError::Interrupted);
                    }
                    thread::sleep(POLL);
                }
                running.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            }
        };
        found?.ok_or(QuantError::Interrupted)
    }
}

/// Returns the digests of the weight files of `source` and of its `config.json`, by file name.
///
/// # Errors
/// A file that cannot be read.
pub(crate) fn of_source(source: &ModelFiles) -> Result<Digests> {
    Ok(hash(&files_of(source), &mut vec![0; BUFFER], &mut || true)?.unwrap_or_default())
}

/// Returns the files that define a source.
fn files_of(source: &ModelFiles) -> Vec<PathBuf> {
    let weights = source.checkpoint().files().map(Path::to_owned);
    // GGUF metadata are part of the weight file.
    let config = Some(source.config_path()).filter(|path| source.gguf().is_none() && path.is_file());
    weights.chain(config).collect()
}

fn spawn<'scope>(
    scope: &'scope Scope<'scope, '_>,
    files: Vec<PathBuf>,
    stop: &'scope AtomicBool,
) -> io::Result<ScopedJoinHandle<'scope, Result<Option<Digests>>>> {
    // Allocated on this thread: a first allocation on the new thread would reserve address space for an arena.
    let mut buffer = vec![0; BUFFER];
    let work = move || hash(&files, &mut buffer, &mut || !stop.load(Ordering::Relaxed));
    thread::Builder::new().name("source hash".into()).stack_size(STACK).spawn_scoped(scope, work)
}

/// Hashes `files`; `None` if `check_tick` stopped it.
fn hash(
    files: &[PathBuf],
    buffer: &mut [u8],
    check_tick: &mut dyn FnMut() -> bool,
) -> Result<Option<Digests>> {
    let mut digests = Digests::new();
    for path in files {
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        match hash_file_while(path, buffer, &mut |_| check_tick())? {
            Some(digest) => digests.insert(name, digest),
            None => return Ok(None),
        };
    }
    Ok(Some(digests))
}

struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

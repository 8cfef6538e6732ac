//! Hashes a file while it is written. A hash needs the bytes in order, and the writer knows how far the file is
//! complete.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use sha2::{Digest, Sha256};

use crate::hash::FileDigest;

/// Bytes per read.
const PIECE: usize = 256 << 10;

/// Stack of the thread that hashes.
const STACK: usize = 128 << 10;

/// A thread that hashes a file behind its writer.
#[derive(Debug)]
pub(crate) struct TrailingHash {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<io::Result<Sha256>>>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Clone, Copy, Debug, Default)]
struct State {
    /// Bytes from the start of the file that are final.
    written: u64,
    /// True if no more will come.
    ended: bool,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, state: State) {
        *self.state() = state;
        self.changed.notify_one();
    }

    /// Waits until the file has more than `hashed` bytes or is complete.
    fn more_than(&self, hashed: u64) -> State {
        let waiting = |state: &mut State| state.written <= hashed && !state.ended;
        *self.changed.wait_while(self.state(), waiting).unwrap_or_else(PoisonError::into_inner)
    }
}

impl TrailingHash {
    /// Starts on `file`, with nothing written yet.
    ///
    /// # Errors
    /// The system provides no second handle or no thread.
    pub(crate) fn begin(file: &File) -> io::Result<Self> {
        let (file, shared) = (file.try_clone()?, Arc::new(Shared::default()));
        let shared_state = Arc::clone(&shared);
        // Allocate here: a thread's first allocation would reserve address space of its own.
        let mut piece = vec![0; PIECE];
        let work = move || hash(&file, &shared_state, &mut piece);
        let thread = thread::Builder::new().name("output hash".into()).stack_size(STACK).spawn(work)?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Marks the first `written` bytes of the file as final.
    pub(crate) fn advance(&self, written: u64) {
        self.shared.set(State { written, ended: false });
    }

    /// Digest of the complete file of `len` bytes.
    ///
    /// # Errors
    /// The file cannot be read back.
    pub(crate) fn finish(mut self, len: u64) -> io::Result<FileDigest> {
        self.shared.set(State { written: len, ended: true });
        let Some(thread) = self.thread.take() else { return Err(io::ErrorKind::Other.into()) };
        let hasher = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        Ok(FileDigest { len, sha256: hasher.finalize().into() })
    }
}

impl Drop for TrailingHash {
    fn drop(&mut self) {
        // The thread ends by itself at the next piece; its result is not needed.
        self.shared.set(State { written: 0, ended: true });
    }
}

fn hash(file: &File, shared: &Shared, piece: &mut [u8]) -> io::Result<Sha256> {
    let (mut hasher, mut at) = (Sha256::new(), 0u64);
    loop {
        let State { written, ended } = shared.more_than(at);
        let n = piece.len().min(usize::try_from(written.saturating_sub(at)).unwrap_or(usize::MAX));
        if n == 0 && ended {
            return Ok(hasher);
        }
        file.read_exact_at(&mut piece[..n], at)?;
        hasher.update(&piece[..n]);
        at += n as u64;
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_digest_covers_all_writes_in_any_pieces() {
        let bytes: Vec<u8> = (0..3 * PIECE + 11).map(|i| (i % 253) as u8).collect();
        for pieces in [1, 7, 1000] {
            let file = tempfile::tempfile().unwrap();
            let trailing = TrailingHash::begin(&file).unwrap();
            let mut at = 0;
            for piece in bytes.chunks(bytes.len().div_ceil(pieces)) {
                file.write_all_at(piece, at).unwrap();
                at += piece.len() as u64;
                trailing.advance(at);
            }
            assert_eq!(trailing.finish(at).unwrap(), FileDigest::of(&bytes));
        }
    }

    #[test]
    fn given_up_it_leaves_and_a_file_too_short_is_an_error() {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&[1; 100], 0).unwrap();
        drop(TrailingHash::begin(&file).unwrap());
        let trailing = TrailingHash::begin(&file).unwrap();
        assert!(trailing.finish(101).is_err());
    }
}

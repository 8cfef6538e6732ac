//! Turns: engines that share a machine run one pass at a time, in the order in which they asked.

use std::sync::{Condvar, Mutex, PoisonError};

/// Lock that is given in the order of asking, so that no engine waits for two passes of another.
#[derive(Debug, Default)]
pub struct Turns {
    /// Next ticket, and the ticket whose turn it is.
    state: Mutex<(u64, u64)>,
    changed: Condvar,
}

/// A turn; ends when dropped.
#[derive(Debug)]
pub struct Turn<'a>(&'a Turns);

impl Turns {
    /// Waits for a turn.
    pub fn take(&self) -> Turn<'_> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let ticket = state.0;
        state.0 += 1;
        while state.1 != ticket {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        Turn(self)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner).1 += 1;
        self.0.changed.notify_all();
    }
}

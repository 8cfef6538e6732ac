//! Memory of the processes that hold grammars: a sum that all of them keep to, of which one client has a part.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::fair::Client;

/// Memory in bytes that may be reserved.
#[derive(Debug)]
pub(super) struct Memory {
    state: Mutex<State>,
    changed: Condvar,
    total: u64,
}

#[derive(Debug)]
struct State {
    free: u64,
    used: HashMap<Client, u64>,
}

/// Part of the memory. Dropping it gives it back.
#[derive(Debug)]
pub(super) struct Reservation {
    memory: Arc<Memory>,
    client: Client,
    bytes: u64,
}

/// Reason for memory that was not reserved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lack {
    /// The client has its part.
    Client,
    /// There is not so much.
    All,
}

impl Memory {
    /// Creates `bytes` of memory, of which one client other than this process has at most three quarters.
    pub(super) fn new(bytes: u64) -> Arc<Self> {
        let state = State { free: bytes, used: HashMap::new() };
        Arc::new(Memory { state: Mutex::new(state), changed: Condvar::new(), total: bytes })
    }

    /// All memory in bytes.
    pub(super) fn total(&self) -> u64 {
        self.total
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes memory for a client, if there is so much.
    pub(super) fn reserve(self: &Arc<Self>, client: Client, bytes: u64) -> Result<Reservation, Lack> {
        let mut reservation = Reservation { memory: Arc::clone(self), client, bytes: 0 };
        reservation.set(bytes).map(|()| reservation)
    }

    /// Waits until memory is given back, at most for `patience`.
    pub(super) fn wait(&self, patience: Duration) {
        let state = self.lock();
        drop(self.changed.wait_timeout(state, patience));
    }
}

impl Reservation {
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Changes the size. Returns false, and changes nothing, if there is not so much memory.
    pub(super) fn resize(&mut self, bytes: u64) -> bool {
        self.set(bytes).is_ok()
    }

    fn set(&mut self, bytes: u64) -> Result<(), Lack> {
        let mut state = self.memory.lock();
        let left = (state.free + self.bytes).checked_sub(bytes).ok_or(Lack::All)?;
        let own = state.used.get(&self.client).copied().unwrap_or(0) - self.bytes + bytes;
        if bytes > self.bytes && own > self.memory.total / 4 * 3 && self.client != Client::Own {
            return Err(Lack::Client);
        }
        state.free = left;
        match own {
            0 => _ = state.used.remove(&self.client),
            own => _ = state.used.insert(self.client, own),
        }
        self.bytes = bytes;
        drop(state);
        self.memory.changed.notify_all();
        Ok(())
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // Less always fits.
        let _ = self.set(0);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_sum_is_kept() {
        let memory = Memory::new(100);
        let mut first = memory.reserve(Client::Own, 60).unwrap();
        assert_eq!(memory.reserve(Client::Key(0), 41).unwrap_err(), Lack::All);
        assert!(first.resize(100) && !first.resize(101));
        assert!(first.resize(10));
        // One client leaves memory for others.
        let second = memory.reserve(Client::Key(0), 75).unwrap();
        assert_eq!(memory.reserve(Client::Key(0), 1).unwrap_err(), Lack::Client);
        let third = memory.reserve(Client::Key(1), 15).unwrap();
        drop((first, second, third));
        assert!(memory.reserve(Client::Own, 101).is_err() && memory.reserve(Client::Own, 100).is_ok());
        assert!(memory.lock().used.is_empty());
    }
}

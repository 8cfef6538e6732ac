//! Turns: engines and scorings that share a machine run one pass at a time, in shares of time by client.
//!
//! Clients are queued fairly ([`Tags`]): a tag advances by the time of the passes that work for the client. The next
//! pass is the pass of the client served least, whoever else it works for. A pass that follows another one books its
//! turn before it gives up the other one, so that a client with little to do need not wait for a pass of others each
//! time.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use mantissa_runtime::Tags;

use super::queue::{Caller, Client};

/// Turns of passes.
#[derive(Debug, Default)]
pub struct Turns {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    tags: Tags<Client>,
    next: u64,
    /// Numbers of those who wait, with the clients that they work for.
    waiting: Vec<(u64, Vec<Caller>)>,
    /// Number of the turn at work.
    given: Option<u64>,
}

/// A turn; ends when dropped.
#[derive(Debug)]
pub struct Turn {
    booking: Booking,
    callers: Vec<Caller>,
    since: Instant,
}

/// A place among those who wait. Dropping it gives it up.
#[derive(Debug)]
pub(crate) struct Booking {
    shared: Arc<Shared>,
    number: u64,
}

impl State {
    /// Sets the clients that one of those who wait works for.
    fn set(&mut self, number: u64, callers: Vec<Caller>) {
        if let Some(own) = self.waiting.iter_mut().find(|other| other.0 == number) {
            own.1 = callers;
        }
    }

    /// Gives the turn to the one who works for the client served least; of equals, to the one that came first.
    fn give(&mut self) {
        if self.given.is_some() {
            return;
        }
        let least = |callers: &[Caller]| self.tags.least(callers.iter().map(|caller| &caller.client));
        let first = self.waiting.iter().map(|(number, callers)| (least(callers), *number));
        let Some((tag, number)) = first.min_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1))) else {
            return;
        };
        self.tags.advance(tag);
        self.given = Some(number);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Turns {
    /// Waits for a turn of this process.
    pub fn take(&self) -> Turn {
        self.take_for(vec![Caller { client: Client::Own, priority: 0 }])
    }

    /// Waits for a turn that works for `callers`, one for each of their sequences.
    pub(crate) fn take_for(&self, callers: Vec<Caller>) -> Turn {
        self.wait(self.book(Vec::new()), callers)
    }

    /// Takes a place among those who wait, for `callers` as far as they are known: without any it is given last.
    pub(crate) fn book(&self, callers: Vec<Caller>) -> Booking {
        let mut state = self.shared.lock();
        state.next += 1;
        let number = state.next;
        state.waiting.push((number, callers));
        Booking { shared: Arc::clone(&self.shared), number }
    }

    /// Waits for the turn of a booking that works for `callers`.
    pub(crate) fn wait(&self, booking: Booking, callers: Vec<Caller>) -> Turn {
        let mut state = self.shared.lock();
        let number = booking.number;
        state.set(number, callers.clone());
        state.give();
        while state.given != Some(number) {
            state = self.shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        drop(state);
        Turn { booking, callers, since: Instant::now() }
    }
}

impl Turn {
    /// Ends the turn; the same clients have another one booked.
    pub(crate) fn again(self, turns: &Turns) -> Booking {
        turns.book(self.callers.clone())
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut state = self.booking.shared.lock();
        let each = self.since.elapsed().as_secs_f64() / self.callers.len().max(1) as f64;
        for caller in &self.callers {
            state.tags.charge(caller.client, each / caller.weight());
        }
        state.tags.forget_past();
    }
}

impl Drop for Booking {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.waiting.retain(|(number, _)| *number != self.number);
        if state.given == Some(self.number) {
            state.given = None;
        }
        state.give();
        drop(state);
        self.shared.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn callers(keys: &[usize]) -> Vec<Caller> {
        keys.iter().map(|key| Caller { client: Client::Key(*key), priority: 0 }).collect()
    }

    /// Client whose booking would be given next.
    fn next(turns: &Turns) -> Option<u64> {
        let state = turns.shared.lock();
        state.given
    }

    #[test]
    fn the_client_served_least_is_next_whoever_else_the_pass_works_for() {
        let turns = Turns::default();
        let first = turns.take_for(callers(&[0]));
        std::thread::sleep(std::time::Duration::from_millis(5));
        let (busy, mixed) = (turns.book(callers(&[0])), turns.book(callers(&[0, 0, 1])));
        let number = mixed.number;
        drop(first);
        assert_eq!(next(&turns), Some(number));
        drop(mixed);
        assert_eq!(next(&turns), Some(busy.number));
        drop(busy);
        assert_eq!(next(&turns), None);
        assert!(turns.shared.lock().waiting.is_empty());
    }

    #[test]
    fn a_turn_that_books_another_keeps_it_from_those_served_more() {
        let turns = Turns::default();
        let greedy = turns.take_for(callers(&[0]));
        std::thread::sleep(std::time::Duration::from_millis(20));
        drop(greedy);
        let turn = turns.take_for(callers(&[1]));
        let waits = turns.book(Vec::new());
        let again = turn.again(&turns);
        assert_eq!(next(&turns), Some(again.number));
        drop((waits, again));
    }
}

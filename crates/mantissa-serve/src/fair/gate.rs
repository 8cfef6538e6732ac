//! Gate: work that runs in a limited number of places, given to the client served least.
//!
//! As in the queue of an engine, a client's tag advances by what it was given: the time for which it held a place, or the
//! time that is charged instead. One client never holds all places, so that another finds one as soon as it comes.

use std::collections::HashMap;
use std::future::poll_fn;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use super::queue::{Caller, Client, FairQueue};

/// Time between two looks at whether a place is still wanted.
const LOOK: Duration = Duration::from_millis(20);

/// Places for work, and those who wait for one.
#[derive(Debug)]
pub(crate) struct Gate {
    state: Mutex<State>,
    /// Places were given.
    given: Condvar,
    places: usize,
    /// Most places of one client.
    most: usize,
    /// Most entries of one client that wait.
    waiting: usize,
}

#[derive(Debug)]
struct State {
    queue: FairQueue<u64>,
    /// Places in use, by client.
    used: HashMap<Client, usize>,
    /// Entries by number, with the time at which they got a place and the task that waits for one.
    entries: HashMap<u64, Entry>,
    next: u64,
}

#[derive(Debug, Default)]
struct Entry {
    since: Option<Instant>,
    waker: Option<Waker>,
}

/// A place, or the wait for one. Dropping it gives it up.
#[derive(Debug)]
pub(crate) struct Place {
    gate: Arc<Gate>,
    number: u64,
    caller: Caller,
    /// Time charged, instead of the time for which the place is held.
    charged: Option<Duration>,
}

impl Gate {
    /// Creates `places` places, of which one client holds at most `most`, and waits at most `waiting` times for more.
    pub(crate) fn new(places: usize, most: usize, waiting: usize) -> Arc<Self> {
        let state = State { queue: FairQueue::new(), used: HashMap::new(), entries: HashMap::new(), next: 0 };
        Arc::new(Gate { state: Mutex::new(state), given: Condvar::new(), places, most, waiting })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks for a place. `None` if too many entries of the client wait.
    pub(crate) fn enter(self: &Arc<Self>, caller: Caller) -> Option<Place> {
        let mut state = self.lock();
        if state.queue.len_of(caller.client) >= self.waiting {
            return None;
        }
        state.next += 1;
        let number = state.next;
        state.queue.push(caller.client, number);
        state.entries.insert(number, Entry::default());
        self.admit(&mut state);
        drop(state);
        Some(Place { gate: Arc::clone(self), number, caller, charged: None })
    }

    /// Gives the free places to those who wait.
    fn admit(&self, state: &mut State) {
        while state.used.values().sum::<usize>() < self.places {
            let State { queue, used, entries, .. } = &mut *state;
            let may = |client: Client| used.get(&client).is_none_or(|used| *used < self.most);
            let Some((client, number)) = queue.pop_of(may) else { return };
            *used.entry(client).or_default() += 1;
            if let Some(entry) = entries.get_mut(&number) {
                entry.since = Some(Instant::now());
                entry.waker.take().into_iter().for_each(Waker::wake);
                self.given.notify_all();
            }
        }
    }
}

impl Place {
    /// True if the place was given.
    pub(crate) fn is_given(&self) -> bool {
        self.gate.lock().entries.get(&self.number).is_some_and(|entry| entry.since.is_some())
    }

    /// Waits until the place is given.
    pub(crate) async fn given(&self) {
        poll_fn(|context| {
            let mut state = self.gate.lock();
            match state.entries.get_mut(&self.number) {
                Some(Entry { since: None, waker }) => {
                    *waker = Some(context.waker().clone());
                    Poll::Pending
                }
                _ => Poll::Ready(()),
            }
        })
        .await;
    }

    /// Waits on this thread until the place is given, as long as `wanted`. Returns false if it was not given.
    pub(crate) fn wait_while(&self, wanted: &dyn Fn() -> bool) -> bool {
        let mut state = self.gate.lock();
        while state.entries.get(&self.number).is_some_and(|entry| entry.since.is_none()) {
            drop(state);
            if !wanted() {
                return false;
            }
            state = self.gate.lock();
            if state.entries.get(&self.number).is_some_and(|entry| entry.since.is_none()) {
                let waited = self.gate.given.wait_timeout(state, LOOK);
                state = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
        }
        true
    }

    /// Charges `time`, which was used in this place, instead of the time for which it is held.
    pub(crate) fn charge(&mut self, time: Duration) {
        *self.charged.get_or_insert_default() += time;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut state = self.gate.lock();
        let Some(entry) = state.entries.remove(&self.number) else { return };
        match entry.since {
            None => {
                let number = self.number;
                state.queue.remove(|other| *other != number);
            }
            Some(since) => {
                let time = self.charged.unwrap_or_else(|| since.elapsed());
                let micros = usize::try_from(time.as_micros()).unwrap_or(usize::MAX);
                state.queue.charge(self.caller, micros.max(1));
                if let Some(used) = state.used.get_mut(&self.caller.client) {
                    *used -= 1;
                    if *used == 0 {
                        state.used.remove(&self.caller.client);
                    }
                }
            }
        }
        self.gate.admit(&mut state);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn caller(key: usize) -> Caller {
        Caller { client: Client::Key(key), priority: 0 }
    }

    #[test]
    fn one_client_never_holds_all_places() {
        let gate = Gate::new(3, 2, 100);
        let greedy: Vec<_> = (0..10).map(|_| gate.enter(caller(0)).unwrap()).collect();
        assert_eq!(greedy.iter().filter(|place| place.is_given()).count(), 2);
        let other = gate.enter(caller(1)).unwrap();
        assert!(other.is_given());
        let second = gate.enter(caller(1)).unwrap();
        assert!(!second.is_given());
        drop(other);
        assert!(second.is_given());
    }

    #[test]
    fn places_go_to_the_client_served_least() {
        let gate = Gate::new(1, 1, 100);
        let mut held = gate.enter(caller(0)).unwrap();
        let (first, second) = (gate.enter(caller(0)).unwrap(), gate.enter(caller(1)).unwrap());
        held.charge(Duration::from_secs(1));
        drop(held);
        assert!(second.is_given() && !first.is_given());
        drop(second);
        assert!(first.is_given());
    }

    #[test]
    fn a_client_waits_a_limited_number_of_times() {
        let gate = Gate::new(1, 1, 2);
        let held = gate.enter(caller(0)).unwrap();
        let waits = [gate.enter(caller(0)), gate.enter(caller(0))];
        assert!(waits.iter().all(Option::is_some) && gate.enter(caller(0)).is_none());
        assert!(gate.enter(caller(1)).is_some_and(|place| !place.is_given()));
        drop(waits);
        drop(held);
        // Nothing is left behind.
        let state = gate.lock();
        assert!(state.entries.is_empty() && state.used.is_empty() && state.queue.len() == 0);
    }
}

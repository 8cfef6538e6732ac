//! Fair queue: the next job comes from the client that has been served least for its weight.
//!
//! Start-time fair queueing (Goyal, Vin, Cheng 1996): a client's tag advances by the cost of what it was given, divided
//! by its weight; the smallest tag is next. A client that was idle starts at the present and gains nothing by waiting.

use std::collections::{HashMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::IpAddr;

/// Sender of a request: who shares the queue fairly.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Client {
    /// Holder of the API key with this index.
    Key(usize),
    /// Address, if there are no keys.
    Address(IpAddr),
    /// This process.
    Own,
}

impl Client {
    /// Number of the client, 0 for this process. Two addresses have the same one with a probability of 2^-64.
    pub(crate) fn number(self) -> u64 {
        match self {
            Client::Own => 0,
            other => {
                let mut hasher = DefaultHasher::new();
                other.hash(&mut hasher);
                hasher.finish()
            }
        }
    }
}

/// Highest priority of a client.
pub const MOST_PRIORITY: u8 = 9;

/// Client with its priority. Each level doubles the share of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caller {
    /// The client.
    pub client: Client,
    /// Priority, 0 to [`MOST_PRIORITY`].
    pub priority: u8,
}

impl Caller {
    pub(crate) fn weight(self) -> f64 {
        f64::from(1u32 << self.priority.min(MOST_PRIORITY))
    }
}

/// Jobs that wait, by client.
#[derive(Debug)]
pub(crate) struct FairQueue<T> {
    lanes: HashMap<Client, Lane<T>>,
    /// Tag of the job given last.
    now: f64,
    len: usize,
    arrivals: u64,
}

#[derive(Debug)]
struct Lane<T> {
    jobs: VecDeque<(u64, T)>,
    tag: f64,
}

impl<T> FairQueue<T> {
    pub(crate) fn new() -> Self {
        FairQueue { lanes: HashMap::new(), now: 0.0, len: 0, arrivals: 0 }
    }

    /// Number of jobs.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Number of jobs of a client.
    pub(crate) fn len_of(&self, client: Client) -> usize {
        self.lanes.get(&client).map_or(0, |lane| lane.jobs.len())
    }

    fn lane(&mut self, client: Client) -> &mut Lane<T> {
        let now = self.now;
        self.lanes.entry(client).or_insert_with(|| Lane { jobs: VecDeque::new(), tag: now })
    }

    /// Adds a job of `client` after its others.
    pub(crate) fn push(&mut self, client: Client, job: T) {
        self.arrivals += 1;
        let (arrival, now) = (self.arrivals, self.now);
        let lane = self.lane(client);
        if lane.jobs.is_empty() {
            lane.tag = lane.tag.max(now);
        }
        lane.jobs.push_back((arrival, job));
        self.len += 1;
    }

    /// Takes the first job of the client served least; of equals, the one that came first.
    #[cfg(test)]
    pub(crate) fn pop(&mut self) -> Option<T> {
        Some(self.pop_of(|_| true)?.1)
    }

    /// Takes the first job of the client served least, of equals the one that came first, among the clients for which `may` is
    /// true.
    pub(crate) fn pop_of(&mut self, may: impl Fn(Client) -> bool) -> Option<(Client, T)> {
        let (tag, client) = self.least(may)?;
        self.now = self.now.max(tag);
        let (_, job) = self.lanes.get_mut(&client)?.jobs.pop_front()?;
        self.len -= 1;
        Some((client, job))
    }

    /// Tag of a client: the smaller, the less it has been served.
    pub(crate) fn tag(&self, client: Client) -> f64 {
        self.lanes.get(&client).map_or(self.now, |lane| lane.tag.max(self.now))
    }

    /// Clients with jobs, the one whose first job came first at the front.
    pub(crate) fn waiting(&self) -> impl Iterator<Item = Client> {
        let first = |(client, lane): (&Client, &Lane<T>)| Some((lane.jobs.front()?.0, *client));
        let mut all: Vec<_> = self.lanes.iter().filter_map(first).collect();
        all.sort_unstable_by_key(|(arrival, _)| *arrival);
        all.into_iter().map(|(_, client)| client)
    }

    /// Number of clients with jobs.
    pub(crate) fn clients(&self) -> usize {
        self.lanes.values().filter(|lane| !lane.jobs.is_empty()).count()
    }

    /// Sums `weight` over the jobs of a client.
    pub(crate) fn sum_of(&self, client: Client, weight: impl Fn(&T) -> usize) -> usize {
        self.lanes.get(&client).map_or(0, |lane| lane.jobs.iter().map(|(_, job)| weight(job)).sum())
    }

    /// Tag and name of the client served least that has a job and for which `may` is true.
    fn least(&self, may: impl Fn(Client) -> bool) -> Option<(f64, Client)> {
        let first = |(client, lane): (&Client, &Lane<T>)| {
            let (arrival, _) = lane.jobs.front().filter(|_| may(*client))?;
            Some((lane.tag, *arrival, *client))
        };
        let order = |a: &(f64, u64, Client), b: &(f64, u64, Client)| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1));
        let (tag, _, client) = self.lanes.iter().filter_map(first).min_by(order)?;
        Some((tag, client))
    }

    /// Counts `cost` tokens that were given to a client.
    pub(crate) fn charge(&mut self, caller: Caller, cost: usize) {
        let now = self.now;
        let lane = self.lane(caller.client);
        lane.tag = lane.tag.max(now) + cost as f64 / caller.weight();
        // Clients of the past are forgotten.
        self.lanes.retain(|_, lane| !lane.jobs.is_empty() || lane.tag > now);
    }

    /// Removes the jobs for which `keep` is false, and returns them.
    pub(crate) fn remove(&mut self, keep: impl Fn(&T) -> bool) -> Vec<T> {
        let mut removed = Vec::new();
        for lane in self.lanes.values_mut() {
            for _ in 0..lane.jobs.len() {
                let Some((arrival, job)) = lane.jobs.pop_front() else { break };
                if keep(&job) {
                    lane.jobs.push_back((arrival, job));
                } else {
                    removed.push(job);
                }
            }
        }
        self.len -= removed.len();
        removed
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn caller(key: usize, priority: u8) -> Caller {
        Caller { client: Client::Key(key), priority }
    }

    /// Serves `rounds` jobs of equal cost from clients that always have more, and counts them by client.
    fn shares(callers: &[Caller], rounds: usize) -> Vec<usize> {
        let mut queue = FairQueue::new();
        let mut counts = vec![0; callers.len()];
        for (i, caller) in callers.iter().enumerate() {
            queue.push(caller.client, i);
            queue.push(caller.client, i);
        }
        for _ in 0..rounds {
            let i = queue.pop().unwrap();
            counts[i] += 1;
            queue.charge(callers[i], 100);
            queue.push(callers[i].client, i);
        }
        counts
    }

    #[test]
    fn equal_clients_get_equal_shares() {
        assert_eq!(shares(&[caller(0, 0), caller(1, 0), caller(2, 0)], 300), [100, 100, 100]);
    }

    #[test]
    fn a_priority_doubles_the_share_and_starves_nobody() {
        let counts = shares(&[caller(0, 1), caller(1, 0)], 300);
        assert!((198..=202).contains(&counts[0]), "{counts:?}");
        let counts = shares(&[caller(0, 9), caller(1, 0)], 5130);
        assert!((9..=11).contains(&counts[1]), "{counts:?}");
    }

    #[test]
    fn a_client_with_many_jobs_delays_no_other() {
        let mut queue = FairQueue::new();
        for job in 0..100 {
            queue.push(Client::Key(0), job);
        }
        assert_eq!(queue.pop(), Some(0));
        queue.charge(caller(0, 0), 50);
        queue.push(Client::Key(1), 1000);
        assert_eq!(queue.pop(), Some(1000));
        assert_eq!((queue.len(), queue.len_of(Client::Key(0))), (99, 99));
    }

    #[test]
    fn jobs_are_removed_and_the_others_keep_their_order() {
        let mut queue = FairQueue::new();
        (0..4).for_each(|job| queue.push(Client::Own, job));
        assert_eq!(queue.remove(|job| job % 2 == 1), [0, 2]);
        assert_eq!((queue.pop(), queue.pop(), queue.pop(), queue.len()), (Some(1), Some(3), None, 0));
    }

    #[test]
    fn an_idle_client_gains_nothing_by_waiting() {
        let mut queue = FairQueue::new();
        for _ in 0..10 {
            queue.push(Client::Key(0), 0);
            queue.pop().unwrap();
            queue.charge(caller(0, 0), 100);
        }
        for job in [0, 0, 0] {
            queue.push(Client::Key(0), job);
        }
        for job in [1, 1, 1] {
            queue.push(Client::Key(1), job);
        }
        let mut order = Vec::new();
        while let Some(job) = queue.pop() {
            order.push(job);
            queue.charge(caller(job, 0), 100);
        }
        assert_eq!(order, [1, 0, 1, 0, 1, 0]);
    }
}

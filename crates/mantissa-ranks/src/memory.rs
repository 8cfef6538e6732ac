//! Links between threads of one process.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

use crate::error::{RankError, Result};
use crate::link::{Link, Traffic};

/// One end of the links between the threads of a process.
pub struct MemoryLink {
    rank: usize,
    to: Vec<Sender<Vec<u8>>>,
    from: Vec<Receiver<Vec<u8>>>,
    traffic: Traffic,
}

impl std::fmt::Debug for MemoryLink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MemoryLink")
            .field("rank", &self.rank)
            .field("size", &self.to.len())
            .finish_non_exhaustive()
    }
}

impl MemoryLink {
    /// Makes the ends of `size` ranks, in their order. An end that is dropped is lost to the others.
    pub fn ranks(size: usize) -> Vec<Self> {
        let mut from: Vec<Vec<Receiver<Vec<u8>>>> = (0..size).map(|_| Vec::new()).collect();
        let mut to: Vec<Vec<Sender<Vec<u8>>>> = (0..size).map(|_| Vec::new()).collect();
        for senders in &mut to {
            for receivers in &mut from {
                let (sender, receiver) = channel();
                senders.push(sender);
                receivers.push(receiver);
            }
        }
        let ends = to.into_iter().zip(from).enumerate();
        ends.map(|(rank, (to, from))| MemoryLink { rank, to, from, traffic: Traffic::default() }).collect()
    }
}

impl Link for MemoryLink {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.to.len()
    }

    fn send(&mut self, to: usize, message: Vec<u8>) -> Result<()> {
        let lost = || RankError::Lost { rank: to };
        self.traffic.sent += message.len() as u64;
        self.to.get(to).ok_or_else(lost)?.send(message).map_err(|_| lost())
    }

    fn receive(&mut self, from: usize) -> Result<Vec<u8>> {
        let lost = || RankError::Lost { rank: from };
        let receiver = self.from.get(from).ok_or_else(lost)?;
        let begin = Instant::now();
        let message = receiver.recv().map_err(|_| lost());
        self.traffic.waited += begin.elapsed();
        message
    }

    fn traffic(&self) -> Traffic {
        self.traffic
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn messages_keep_their_order_and_their_sender() {
        let mut ends = MemoryLink::ranks(3);
        let (mut third, mut second) = (ends.remove(2), ends.remove(1));
        let first = &mut ends[0];
        second.send(0, vec![2]).unwrap();
        third.send(0, vec![3]).unwrap();
        second.send(0, vec![4, 4]).unwrap();
        assert_eq!((first.receive(1).unwrap(), first.receive(1).unwrap()), (vec![2], vec![4, 4]));
        assert_eq!(first.receive(2).unwrap(), [3]);
        assert_eq!((second.traffic().sent, third.size(), third.rank()), (3, 3, 2));
    }

    #[test]
    fn a_rank_that_ends_is_named_to_those_who_wait_for_it() {
        let mut ends = MemoryLink::ranks(2);
        ends.remove(1).send(0, vec![1]).unwrap();
        // What it sent before its end is received.
        assert_eq!(ends[0].receive(1).unwrap(), [1]);
        let said = ends[0].receive(1).unwrap_err().to_string();
        assert!(said.starts_with("rank 1: expected a message, got its end"), "{said}");
        assert!(ends[0].send(1, Vec::new()).is_err());
    }
}

//! Links between the ranks of one run: messages of bytes from one rank to another, in the order in which they were sent.
//!
//! A link carries bytes and adds nothing: sums are made by those who know their order.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::error::Result;

/// One rank's end of the links to all others.
pub trait Link: Send + fmt::Debug {
    /// Returns the number of this rank, from 0.
    fn rank(&self) -> usize;

    /// Returns the number of ranks.
    fn size(&self) -> usize;

    /// Sends a message to rank `to`. Does not wait until it is received.
    ///
    /// # Errors
    /// [`RankError::Lost`](crate::RankError::Lost): the rank has ended. [`RankError::Transport`](crate::RankError::Transport).
    fn send(&mut self, to: usize, message: Vec<u8>) -> Result<()>;

    /// Waits for the next message of rank `from`.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    fn receive(&mut self, from: usize) -> Result<Vec<u8>>;

    /// Returns what was sent and how long messages were waited for.
    fn traffic(&self) -> Traffic;

    /// Leaves the other ranks in order, after all that was sent has gone.
    ///
    /// # Errors
    /// [`RankError::Transport`](crate::RankError::Transport).
    fn leave(self: Box<Self>) -> Result<()> {
        Ok(())
    }
}

/// Bytes and waiting time of a rank's links so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes that this rank sent to others.
    pub sent: u64,
    /// Time in which it waited for messages.
    pub waited: Duration,
}

/// End of the links of a rank that several owners use in turns.
#[derive(Clone, Debug)]
pub struct SharedLink(Arc<Mutex<Box<dyn Link>>>);

impl SharedLink {
    /// Shares the end `link`.
    pub fn new(link: Box<dyn Link>) -> Self {
        SharedLink(Arc::new(Mutex::new(link)))
    }

    fn link(&self) -> MutexGuard<'_, Box<dyn Link>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Link for SharedLink {
    fn rank(&self) -> usize {
        self.link().rank()
    }

    fn size(&self) -> usize {
        self.link().size()
    }

    fn send(&mut self, to: usize, message: Vec<u8>) -> Result<()> {
        self.link().send(to, message)
    }

    fn receive(&mut self, from: usize) -> Result<Vec<u8>> {
        self.link().receive(from)
    }

    fn traffic(&self) -> Traffic {
        self.link().traffic()
    }

    /// Leaves if this is the last owner; the others would use links that have ended.
    fn leave(self: Box<Self>) -> Result<()> {
        match Arc::into_inner(self.0) {
            Some(link) => link.into_inner().unwrap_or_else(PoisonError::into_inner).leave(),
            None => Ok(()),
        }
    }
}

/// Link of a single rank.
#[derive(Debug)]
pub struct Alone;

impl Link for Alone {
    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        1
    }

    fn send(&mut self, to: usize, _: Vec<u8>) -> Result<()> {
        Err(crate::RankError::Lost { rank: to })
    }

    fn receive(&mut self, from: usize) -> Result<Vec<u8>> {
        Err(crate::RankError::Lost { rank: from })
    }

    fn traffic(&self) -> Traffic {
        Traffic::default()
    }
}

//! Links between the ranks of one run: messages of bytes from one rank to another, in the order in which they were sent.
//!
//! A link carries bytes and adds nothing: sums are made by those who know their order.

use std::fmt;
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

/// What went over a rank's links so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes that this rank sent to others.
    pub sent: u64,
    /// Time in which it waited for messages.
    pub waited: Duration,
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

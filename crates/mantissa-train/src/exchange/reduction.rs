//! Sums of gradients while a pass makes them (ZeRO 2): those of a unit are exchanged as soon as they are complete, and each rank
//! keeps its part of the sums.

use std::ops::Range;
use std::sync::Arc;

use mantissa_ranks::{Link, RankError, SharedLink};

use super::coded::{encode, sum_coded};
use super::message::MessageFormat;
use super::sums::{length, reduce, to_all};
use super::units::{Unit, Units};
use crate::gradients::Gradients;

/// Exchange of the gradients of one leaf on every rank, unit by unit.
#[derive(Debug)]
pub(crate) struct Reduction {
    pub(crate) link: SharedLink,
    pub(crate) shards: Vec<Range<usize>>,
    pub(crate) units: Arc<Units>,
    pub(crate) format: MessageFormat,
    /// Sum of what the leaf sent in few bits and should have sent; empty for unquantized gradients.
    pub(crate) errors: Vec<f32>,
}

impl Reduction {
    /// Sums the gradients that `unit` completes over all ranks, and gives the memory of other ranks' parts back.
    ///
    /// # Errors
    /// [`RankError`].
    pub(crate) fn unit(&mut self, unit: Unit, grads: &mut Gradients) -> Result<(), RankError> {
        let units = Arc::clone(&self.units);
        let params = units.completes(units.index(unit));
        if self.format.is_plain() {
            let ranges = params.iter().map(|param| param.range.clone());
            reduce(&mut self.link, ranges, &self.shards, grads)?;
        } else {
            let messages = encode(&self.format, params.iter(), &self.shards, grads, &mut self.errors);
            sum_coded(&mut self.link, &self.format, params.iter(), &self.shards, vec![messages], grads)?;
        }
        self.wait_for_all()?;
        let shard = &self.shards[self.link.rank()];
        params.iter().for_each(|param| grads.release_outside(shard, &param.range));
        Ok(())
    }

    /// Waits until all ranks have received what they were sent: a rank that holds no part of many units would run ahead, and its
    /// messages would fill the memory that the division saves.
    fn wait_for_all(&mut self) -> Result<(), RankError> {
        to_all(&mut self.link, &[])?;
        let own = self.link.rank();
        for rank in (0..self.link.size()).filter(|rank| *rank != own) {
            let message = self.link.receive(rank)?;
            if !message.is_empty() {
                return Err(length(rank, &message));
            }
        }
        Ok(())
    }
}

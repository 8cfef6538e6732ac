//! Settings of a run over ranks.

use mantissa_model::ModelConfig;

use crate::exchange::{BUCKET, MessageFormat, Units, most_waiting};
use crate::param_table::ParamTable;
use crate::shards::PIECE;
use crate::store::Precision;

/// Settings of a run over ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct ParallelOptions {
    /// Logical workers of a step, a power of two. The bits of a run depend on it, and not on the number of ranks.
    pub leaves: usize,
    /// Stage of ZeRO: 0 keeps everything on every rank, 1 divides the optimizer's state and master weights among them, 2 also
    /// gradients where each rank computes one batch a step, 3 also the weights.
    pub zero: u8,
    /// Format of exchanged gradients.
    pub gradients: MessageFormat,
    /// Format of gathered weights, which are rounded to it wherever they are; `None` for weights as stored. Needs an f32
    /// master copy.
    pub gather: Option<MessageFormat>,
}

/// Part of a model that a rank holds at most.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeldByRank {
    /// Share of the weights.
    pub weights: f64,
    /// Share of the gradients.
    pub gradients: f64,
    /// Gradients in messages of one layer, elements.
    pub messages: u64,
}

impl Default for ParallelOptions {
    fn default() -> Self {
        ParallelOptions { leaves: 1, zero: 0, gradients: MessageFormat::default(), gather: None }
    }
}

impl ParallelOptions {
    /// True if a step is that of a single worker with unquantized gradients.
    pub fn is_plain(&self) -> bool {
        self.leaves <= 1 && self.gradients.is_plain() && self.gather.is_none()
    }

    /// Returns what one of `ranks` ranks holds at most, whose leaves have `batches` batches each.
    pub fn held(&self, config: &ModelConfig, table: &ParamTable, ranks: usize, batches: usize) -> HeldByRank {
        let units = Units::new(config, table);
        let all = table.len().max(1) as f64;
        let part = |largest: usize| (1.0 / ranks.max(1) as f64 + largest as f64 / all).min(1.0);
        let divides = |stage: u8| self.zero >= stage && ranks > 1;
        let by_unit = divides(2) && self.leaves == ranks && batches == 1;
        let [read, completed] = [units.most_read(), units.most_completed()];
        HeldByRank {
            weights: if divides(3) { part(read) } else { 1.0 },
            gradients: if by_unit { part(completed) } else { 1.0 },
            // What is sent of a unit waits until it is received, while what others sent of it arrives.
            messages: if by_unit { 2 * completed as u64 } else { 0 },
        }
    }

    /// Bytes of sums that wait, of the errors of gradients in few bits, and of messages on one of `ranks` ranks, for `len`
    /// gradients of `precision`; `largest` are those of the largest parameter.
    pub fn bytes(&self, (len, largest): (usize, usize), precision: Precision, ranks: usize) -> u64 {
        let (own, len, several) = ((self.leaves / ranks.max(1)).max(1), len as u64, ranks.max(1) as u64);
        let buckets = if ranks > 1 { 2 * several * BUCKET as u64 } else { 0 };
        // Values, what was wanted, padded rows, codes and decoded values.
        let coding = 5 * 4 * (largest as u64).min(len / several + PIECE as u64);
        let gathered = self.gather.as_ref().map_or(0, |format| format.bytes(len as usize) + coding);
        match self.gradients.is_plain() {
            true => most_waiting(own) as u64 * precision.bytes() * len + buckets + gathered,
            // Errors and messages of the own leaves, and f32 sums of the part that is the rank's.
            false => {
                let messages = own as u64 * self.gradients.bytes(len as usize) + coding + buckets + gathered;
                own as u64 * 4 * len
                    + messages
                    + (most_waiting(self.leaves) as u64 + 1) * 4 * len / ranks.max(1) as u64
            }
        }
    }
}

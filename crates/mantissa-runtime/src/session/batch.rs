//! Tokens of one pass.

use crate::speculate::Origin;

/// Multiple of positions at which a prompt may be cut: attention computes so many queries at a time.
pub(super) const BLOCK: usize = 64;

/// Tokens of one pass, by sequence.
#[derive(Debug, Default)]
pub(super) struct Batch {
    pub(super) tokens: Vec<u32>,
    pub(super) lens: Vec<usize>,
    pub(super) starts: Vec<usize>,
    pub(super) slots: Vec<usize>,
    /// Number of last rows of each sequence whose logits are computed.
    pub(super) outputs: Vec<usize>,
    /// Rows whose logits are computed.
    pub(super) rows: Vec<usize>,
    /// Origins of the tokens proposed, by sequence, as far as there are any.
    pub(super) origins: Vec<Option<Origin>>,
}

impl Batch {
    pub(super) fn clear(&mut self) {
        self.tokens.clear();
        self.origins.clear();
        [&mut self.lens, &mut self.starts, &mut self.slots, &mut self.outputs, &mut self.rows]
            .into_iter()
            .for_each(Vec::clear);
    }

    /// Adds `tokens` of the sequence in `slot`, at position `start`, with logits of the last `outputs`.
    pub(super) fn push(&mut self, slot: usize, start: usize, tokens: &[u32], outputs: usize) {
        self.propose(slot, start, tokens, &[], outputs, None);
    }

    /// Adds `tokens` of a sequence, and the tokens `proposed` after them.
    pub(super) fn propose(
        &mut self,
        slot: usize,
        start: usize,
        tokens: &[u32],
        proposed: &[u32],
        outputs: usize,
        origin: Option<Origin>,
    ) {
        self.tokens.extend_from_slice(tokens);
        self.tokens.extend_from_slice(proposed);
        self.lens.push(tokens.len() + proposed.len());
        self.origins.push(origin);
        self.starts.push(start);
        self.slots.push(slot);
        self.outputs.push(outputs);
        self.rows.extend(self.tokens.len() - outputs..self.tokens.len());
    }
}

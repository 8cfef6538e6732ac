//! Results of prompts: probabilities of their tokens, and pooled hidden states.

use mantissa_model::{ForwardError, StopReason};

use super::pooling::{Pooled, Pooling};
use super::sequence::{Event, EventKind, Sequence, logprobs};
use super::{Runtime, Slot};

/// Rows of a prompt whose logits are computed at once, which bounds the memory of long prompts.
const ROWS: usize = 32;

impl Sequence {
    /// Number of first tokens whose rows need not be computed for the results of the prompt.
    pub(super) fn skippable(&self) -> usize {
        let scored = match self.request.prompt_logprobs {
            // The row before a token tells its probability.
            Some(_) if self.scored < self.prompt_len() => self.scored.saturating_sub(1),
            _ => usize::MAX,
        };
        match self.request.embed {
            Some(Pooling::Mean) => scored.min(self.pooled.tokens),
            _ => scored,
        }
    }
}

impl Runtime<'_> {
    /// Reports the results of the prompts in the batch, whose pass has just run.
    ///
    /// # Errors
    /// As [`FastModel::logits`](crate::FastModel::logits). Nothing is reported then.
    pub(super) fn report_prompts(&mut self) -> Result<(), ForwardError> {
        let (mut first, reported) = (0, self.events.len());
        for entry in 0..self.batch.slots.len() {
            if let Err(error) = self.score(entry, first) {
                self.unreport(reported);
                return Err(error);
            }
            first += self.batch.lens[entry];
        }
        first = 0;
        for entry in 0..self.batch.slots.len() {
            self.pool(entry, first);
            first += self.batch.lens[entry];
        }
        Ok(())
    }

    /// Takes the reports from the event `first` on back.
    fn unreport(&mut self, first: usize) {
        for event in self.events.drain(first..) {
            let sequence = self.running.iter().find_map(|&slot| match &self.slots[slot] {
                Slot::Running(sequence) if sequence.id == event.sequence => Some(slot),
                _ => None,
            });
            if let Some(Slot::Running(sequence)) = sequence.map(|slot| &mut self.slots[slot]) {
                sequence.scored -= 1;
            }
        }
    }

    /// Reports the probabilities of the tokens of a prompt, as far as its rows from `first` on tell them.
    fn score(&mut self, entry: usize, first: usize) -> Result<(), ForwardError> {
        let (slot, start, len) = (self.batch.slots[entry], self.batch.starts[entry], self.batch.lens[entry]);
        let Slot::Running(sequence) = &mut self.slots[slot] else { return Ok(()) };
        let (Some(n), prompt) = (sequence.request.prompt_logprobs, sequence.prompt_len()) else {
            return Ok(());
        };
        let mut report = |token, logprob, top| {
            let kind = EventKind::PromptToken { token, logprob, top };
            self.events.push(Event { sequence: sequence.id, kind });
        };
        if sequence.scored == 0 {
            report(sequence.tokens[0], None, Vec::new());
            sequence.scored = 1;
        }
        let vocabulary = self.model.config().vocab_size;
        while sequence.scored < prompt.min(start + len + 1) {
            // Row of the token before.
            let Some(row) = (sequence.scored - 1).checked_sub(start) else { break };
            let rows = ROWS.min(len - row).min(prompt - sequence.scored);
            if rows == 0 {
                break;
            }
            self.rows.clear();
            self.rows.extend(first + row..first + row + rows);
            self.scores.resize(self.scores.len().max(rows * vocabulary), 0.0);
            let logits = &mut self.scores[..rows * vocabulary];
            self.model.logits(&self.rows, logits, &mut self.buffers)?;
            for logits in logits.chunks_exact(vocabulary) {
                let token = sequence.tokens[sequence.scored];
                let (own, top) = logprobs(logits, token, n);
                report(token, Some(own), top);
                sequence.scored += 1;
            }
        }
        Ok(())
    }

    /// Adds the hidden states of a prompt from row `first` on to its vector.
    fn pool(&mut self, entry: usize, first: usize) {
        let (slot, start, len) = (self.batch.slots[entry], self.batch.starts[entry], self.batch.lens[entry]);
        let Slot::Running(sequence) = &mut self.slots[slot] else { return };
        let width = self.model.config().hidden_size;
        match sequence.request.embed {
            None => {}
            Some(Pooling::Mean) => {
                let states = self.model.hidden(first..first + len, &mut self.buffers);
                sequence.pooled.add(states, width, start);
            }
            Some(Pooling::Last) => {
                let states = self.model.hidden(first + len - 1..first + len, &mut self.buffers);
                sequence.pooled = Pooled::default();
                sequence.pooled.add(states, width, 0);
            }
        }
    }

    /// Ends the sequences that generate nothing and whose prompt has been computed.
    pub(super) fn finish_prompts(&mut self) {
        for entry in 0..self.batch.slots.len() {
            let slot = self.batch.slots[entry];
            let Slot::Running(sequence) = &self.slots[slot] else { continue };
            if sequence.generates() || self.kv.len(slot) < sequence.tokens.len() {
                continue;
            }
            let id = sequence.id;
            if sequence.request.embed.is_some() {
                let kind = EventKind::Embedding(sequence.pooled.mean());
                self.events.push(Event { sequence: id, kind });
            }
            let kind = EventKind::Finished(StopReason::Length);
            self.events.push(Event { sequence: id, kind });
            self.keep(slot);
        }
    }
}

//! Choice of the tokens of a pass.
//!
//! A constraint that has not answered by the end of the step's patience leaves its sequence undecided: others go on,
//! and it is asked again after each pass.

use std::time::{Duration, Instant};

use super::constraint::Constraint;
use super::draw::Next;
use super::sequence::Sequence;
use super::{Runtime, Slot};

/// Part of the time of a pass for which a step waits for constraints: what a slow one costs the other sequences.
const PATIENCE_SHARE: u32 = 4;

/// Least and most time for which a step with other work waits for constraints.
const PATIENCE: [Duration; 2] = [Duration::from_micros(100), Duration::from_millis(20)];

impl Sequence {
    /// Waits for the answer of the constraint of an undecided sequence. Returns true if it is there.
    pub(super) fn wait(&mut self, patience: Duration) -> bool {
        let constraint: Option<&mut Box<dyn Constraint>> = self.request.constraint.as_mut();
        self.undecided.is_some() && constraint.is_some_and(|constraint| constraint.wait(patience))
    }
}

impl Runtime<'_> {
    /// Time for which this step may wait for constraints.
    pub(super) fn patience(&self) -> Duration {
        (self.last_pass / PATIENCE_SHARE).clamp(PATIENCE[0], PATIENCE[1])
    }

    /// Samples the next tokens of all sequences of the batch that have logits.
    pub(super) fn sample(&mut self) {
        let (mut row, mut first) = (0, 0);
        for entry in 0..self.batch.slots.len() {
            let (slot, rows) = (self.batch.slots[entry], self.batch.outputs[entry]);
            first += self.batch.lens[entry];
            if rows > 0 && self.sample_one(entry, first - rows, row) == Next::Ended {
                self.keep(slot);
            }
            row += rows;
        }
    }

    /// Samples the next token of one sequence, and further ones as long as they were proposed. `first` is its first
    /// token of the batch with logits, `row` that of the logits.
    fn sample_one(&mut self, entry: usize, first: usize, row: usize) -> Next {
        let (slot, rows) = (self.batch.slots[entry], self.batch.outputs[entry]);
        let patient = Instant::now() + self.patience();
        let mut accepted = 0;
        let mut last = self.sample_token(slot, row);
        loop {
            if rows > 1 && last == Next::Undecided {
                // Without an answer the proposals that are left are lost.
                last = self.sample_again(slot, patient);
            }
            let Next::Token(token) = last else { break };
            if accepted + 1 >= rows || token != self.batch.tokens[first + accepted + 1] {
                break;
            }
            accepted += 1;
            last = self.sample_token(slot, row + accepted);
        }
        if rows > 1 {
            self.settle(entry, accepted);
        }
        last
    }

    /// Counts the `accepted` proposals of a sequence and forgets the others.
    fn settle(&mut self, entry: usize, accepted: usize) {
        let (slot, proposed) = (self.batch.slots[entry], self.batch.outputs[entry] - 1);
        self.proposals.proposed += proposed as u64;
        self.proposals.accepted += accepted as u64;
        let Slot::Running(sequence) = &mut self.slots[slot] else { return };
        if let Some(origin) = self.batch.origins[entry] {
            sequence.trust.record(origin, proposed, accepted);
        }
        // The last token has not been computed yet, unless the next one is undecided.
        let held = sequence.tokens.len() - usize::from(sequence.undecided.is_none());
        self.kv.truncate(slot, held);
        if let Some(draft) = &mut self.draft {
            draft.truncate(slot, held);
        }
    }

    /// Samples one token of a sequence from row `row` of the logits.
    fn sample_token(&mut self, slot: usize, row: usize) -> Next {
        let Slot::Running(sequence) = &mut self.slots[slot] else { return Next::Ended };
        let (vocabulary, eos) = (self.model.config().vocab_size, &self.model.config().eos_token_ids);
        let logits = &self.logits[row * vocabulary..(row + 1) * vocabulary];
        self.scratch.next(sequence, logits, eos, &mut self.events)
    }

    /// Waits for the constraint of a sequence at work until `patient`, and asks it again.
    fn sample_again(&mut self, slot: usize, patient: Instant) -> Next {
        let Slot::Running(sequence) = &mut self.slots[slot] else { return Next::Ended };
        let eos = &self.model.config().eos_token_ids;
        loop {
            let next = self.scratch.ask_again(sequence, eos, &mut self.events);
            let left = patient.saturating_duration_since(Instant::now());
            if next != Next::Undecided || left.is_zero() || !sequence.wait(left) {
                return next;
            }
        }
    }

    /// Asks the constraints that have not answered again, and waits for them, at most for `patience`.
    pub(super) fn settle_undecided(&mut self, patience: Duration) {
        let begin = Instant::now();
        while self.ask_undecided() {
            let left = patience.saturating_sub(begin.elapsed());
            if left.is_zero() || !self.wait_for_undecided(left) {
                break;
            }
        }
        self.waited += begin.elapsed();
    }

    /// Asks the constraint of every undecided sequence. Returns true if some have not answered.
    fn ask_undecided(&mut self) -> bool {
        let eos = &self.model.config().eos_token_ids;
        let (mut open, mut ended) = (false, Vec::new());
        for &slot in &self.running {
            let Slot::Running(sequence) = &mut self.slots[slot] else { continue };
            if sequence.undecided.is_some() {
                let next = self.scratch.ask_again(sequence, eos, &mut self.events);
                open |= next == Next::Undecided;
                ended.extend((next == Next::Ended).then_some(slot));
            }
        }
        ended.into_iter().for_each(|slot| self.keep(slot));
        let (scratch, events) = (&mut self.scratch, &mut self.events);
        self.waiting.retain_mut(|sequence| {
            if sequence.undecided.is_none() {
                return true;
            }
            let next = scratch.ask_again(sequence, eos, events);
            open |= next == Next::Undecided;
            next != Next::Ended
        });
        open
    }

    /// Waits until one of the constraints that are worked on has answered, at most for `patience`. Returns true if one has.
    fn wait_for_undecided(&mut self, patience: Duration) -> bool {
        let end = Instant::now() + patience;
        let left = || end.saturating_duration_since(Instant::now());
        for &slot in &self.running {
            if let Slot::Running(sequence) = &mut self.slots[slot]
                && sequence.wait(left())
            {
                return true;
            }
        }
        self.waiting.iter_mut().any(|sequence| sequence.wait(left()))
    }
}

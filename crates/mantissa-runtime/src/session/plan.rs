//! Choice of the tokens of a step.

use mantissa_model::ForwardError;

use super::sequence::Sequence;
use super::{Event, EventKind, Runtime, Slot};
use crate::cache::FEW;
use crate::speculate::{self, Origin, Speculation};

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
    fn clear(&mut self) {
        self.tokens.clear();
        self.origins.clear();
        [&mut self.lens, &mut self.starts, &mut self.slots, &mut self.outputs, &mut self.rows]
            .into_iter()
            .for_each(Vec::clear);
    }

    /// Adds `tokens` of the sequence in `slot`, at position `start`, with logits of the last `outputs`.
    fn push(&mut self, slot: usize, start: usize, tokens: &[u32], outputs: usize) {
        self.propose(slot, start, tokens, &[], outputs, None);
    }

    /// Adds `tokens` of a sequence, and the tokens `proposed` after them.
    fn propose(
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

impl Runtime<'_> {
    /// Fills the batch of the next pass.
    ///
    /// # Errors
    /// Those of the draft model.
    pub(super) fn plan_step(&mut self) -> Result<(), ForwardError> {
        self.batch.clear();
        self.plan_decode()?;
        let mut left = self.options.step_tokens.saturating_sub(self.batch.tokens.len()).max(2 * BLOCK);
        self.plan_prefill(&mut left);
        while left >= BLOCK && self.running.len() < self.options.sequences && self.admit(&mut left) {}
        Ok(())
    }

    /// Adds the next token of every sequence that generates, the oldest first.
    fn plan_decode(&mut self) -> Result<(), ForwardError> {
        let speculates = self.speculates();
        let mut at = 0;
        while let Some(&slot) = self.running.get(at) {
            at += 1;
            let Slot::Running(sequence) = &self.slots[slot] else { continue };
            let (held, all) = (self.kv.len(slot), sequence.tokens.len());
            if all - held != 1 || !sequence.generates() {
                continue;
            }
            if !self.grow(slot, all) {
                // It was the youngest itself, and so the last.
                break;
            }
            let origin = if speculates { self.propose(slot)? } else { None };
            if let Slot::Running(sequence) = &self.slots[slot] {
                let (tokens, proposed) = (&sequence.tokens[held..], self.proposed.as_slice());
                self.batch.propose(slot, held, tokens, proposed, 1 + proposed.len(), origin);
            }
            self.proposed.clear();
        }
        Ok(())
    }

    /// True if this step may propose tokens: few sequences generate, and nothing else is to be done.
    fn speculates(&self) -> bool {
        let on = self.draft.is_some() || self.options.speculation == Speculation::Lookup;
        // Rejected tokens must leave no trace in the cache.
        let on = on && self.model.kv().is_by_token() && !self.kv.is_recurrent();
        let decodes = |slot: &usize| match &self.slots[*slot] {
            Slot::Running(sequence) => sequence.tokens.len() - self.kv.len(*slot) == 1,
            _ => false,
        };
        on && self.running.len() <= speculate::SEQUENCES
            && self.waiting.is_empty()
            && self.running.iter().all(decodes)
    }

    /// Fills `proposed` with tokens after those of the sequence in `slot`, if they should pay.
    fn propose(&mut self, slot: usize) -> Result<Option<Origin>, ForwardError> {
        self.proposed.clear();
        let rows = self.running.len().max(self.batch.tokens.len() + 1);
        let Slot::Running(sequence) = &mut self.slots[slot] else { return Ok(None) };
        // The last new token has no successor.
        let left = sequence.request.max_new_tokens.saturating_sub(sequence.made + 1);
        let origin = match &self.draft {
            Some(_) => Origin::Draft,
            None => Origin::Match(speculate::find(&sequence.tokens, &mut self.proposed)),
        };
        let most = if self.draft.is_some() { left } else { left.min(self.proposed.len()) };
        if most == 0 {
            self.proposed.clear();
            return Ok(None);
        }
        let n = sequence.trust.proposals(origin, rows, most, &self.plain, &self.with_proposals);
        self.proposed.truncate(n);
        if n == 0 || !self.kv.reserve(slot, sequence.tokens.len() + n) {
            self.proposed.clear();
            return Ok(None);
        }
        if let Some(draft) = &mut self.draft {
            let sampling = (&sequence.request.sampling, sequence.made as u64);
            let choices = &mut self.scratch.choices;
            draft.propose(slot, &sequence.tokens, n, sampling, choices, &mut self.proposed)?;
        }
        Ok((!self.proposed.is_empty()).then_some(origin))
    }

    /// Makes room for `tokens` tokens in `slot`, by preempting younger sequences if needed. Returns false if the
    /// sequence itself was preempted.
    fn grow(&mut self, slot: usize, tokens: usize) -> bool {
        while !self.kv.reserve(slot, tokens) {
            if self.drop_kept() {
                continue;
            }
            let Some(youngest) = self.running.pop() else { return false };
            self.release(youngest);
            let preempted = std::mem::replace(&mut self.slots[youngest], Slot::Free);
            if let Slot::Running(sequence) = preempted {
                self.wait(sequence);
            }
            if youngest == slot {
                return false;
            }
        }
        true
    }

    /// Adds chunks of the prompts at work, in the order of rank.
    fn plan_prefill(&mut self, left: &mut usize) {
        for &slot in &self.running {
            let Slot::Running(sequence) = &self.slots[slot] else { continue };
            let (held, all) = (self.kv.len(slot), sequence.tokens.len());
            if all - held > 1 || !sequence.generates() {
                let n = chunk(held, all - held, *left);
                if n > 0 {
                    let outputs = usize::from(held + n == all && sequence.generates());
                    self.batch.push(slot, held, &sequence.tokens[held..held + n], outputs);
                    *left = left.saturating_sub(n);
                }
            }
        }
    }

    /// Admits the sequence that has waited longest, if there is room for it, and adds a chunk of its prompt. Returns
    /// false if there is not.
    fn admit(&mut self, left: &mut usize) -> bool {
        let Some(mut sequence) = self.waiting.pop_front() else { return false };
        let slot = match self.prefix_comes(&sequence) {
            true => None,
            false => self.free_slot(),
        };
        let Some(slot) = slot else {
            self.waiting.push_front(sequence);
            return false;
        };
        self.share(slot, &sequence);
        // Room for the next token too, or it would be preempted at once.
        while !self.kv.reserve(slot, sequence.tokens.len() + 1) {
            if !self.drop_kept() {
                self.release(slot);
                self.waiting.push_front(sequence);
                return false;
            }
        }
        let (held, all) = (self.kv.len(slot), sequence.tokens.len());
        self.shared_tokens += held as u64;
        if sequence.cached.is_none() {
            sequence.cached = Some(held);
            self.events.push(Event { sequence: sequence.id, kind: EventKind::Started { cached: held } });
        }
        let n = chunk(held, all - held, *left);
        if n > 0 {
            let outputs = usize::from(held + n == all && sequence.generates());
            self.batch.push(slot, held, &sequence.tokens[held..held + n], outputs);
            *left = left.saturating_sub(n);
        }
        self.run(slot, sequence);
        true
    }

    /// Number of first tokens of `sequence` that are `other` too, in a form that can be shared once they are computed. At
    /// least one token is left to be computed. Without recurrent layers the rest has the same bits as without sharing:
    /// it begins at a multiple of a block of queries, and is not computed as a few tokens.
    fn common(&self, sequence: &Sequence, other: &[u32]) -> usize {
        let (all, recurrent) = (sequence.tokens.len(), self.kv.is_recurrent());
        let most = if recurrent { all - 1 } else { all.saturating_sub(FEW + 1) };
        let ours = &sequence.tokens[..sequence.skippable().min(most)];
        let same = ours.iter().zip(other).take_while(|(a, b)| a == b).count();
        let block = match self.kv.block() {
            block if BLOCK.is_multiple_of(block) => BLOCK,
            block if block.is_multiple_of(BLOCK) => block,
            block => block * BLOCK,
        };
        match recurrent {
            // A state is that after all of its tokens.
            true if same < other.len() => 0,
            true => same,
            false => same / block * block,
        }
    }

    /// True if a sequence at work is about to compute more of the beginning of `sequence` than can be shared now.
    fn prefix_comes(&self, sequence: &Sequence) -> bool {
        if self.kv.is_recurrent() {
            return false;
        }
        let all = self.running.iter().filter_map(|&slot| match &self.slots[slot] {
            Slot::Running(other) => {
                let (held, prompt) = (self.kv.len(slot), &other.tokens);
                (held < prompt.len()).then(|| self.common(sequence, prompt))
            }
            _ => None,
        });
        let later = all.max().unwrap_or(0);
        later > 0 && later > self.shareable(sequence).map_or(0, |(len, _)| len)
    }

    /// Slot of the sequence that shares the longest beginning with `sequence`, and its length; with recurrent layers, of
    /// the longest sequence that it begins with.
    fn shareable(&self, sequence: &Sequence) -> Option<(usize, usize)> {
        let common = |other: usize| {
            let theirs = match &self.slots[other] {
                Slot::Running(Sequence { tokens, .. }) | Slot::Kept(tokens) => tokens.as_slice(),
                Slot::Free => &[],
            };
            self.common(sequence, &theirs[..self.kv.len(other).min(theirs.len())])
        };
        let best = (0..self.slots.len()).map(|other| (common(other), other)).max_by_key(|(len, _)| *len);
        best.filter(|(len, _)| *len > 0)
    }

    /// Lets `slot` begin with the blocks of the sequence that shares the longest beginning with `sequence`.
    fn share(&mut self, slot: usize, sequence: &Sequence) {
        if let Some((len, other)) = self.shareable(sequence) {
            self.kv.share(other, slot, len);
        }
    }

    /// Returns a free slot, if need be that of the sequence kept longest.
    pub(super) fn free_slot(&mut self) -> Option<usize> {
        let free = |slots: &[Slot]| slots.iter().position(|slot| matches!(slot, Slot::Free));
        free(&self.slots).or_else(|| if self.drop_kept() { free(&self.slots) } else { None })
    }

    /// Gives back the memory of the sequence kept longest. Returns false if there is none.
    fn drop_kept(&mut self) -> bool {
        let Some(slot) = self.kept.pop_front() else { return false };
        self.release(slot);
        self.slots[slot] = Slot::Free;
        true
    }

    /// Gives back the memory of a slot.
    fn release(&mut self, slot: usize) {
        self.kv.release(slot);
        if let Some(draft) = &mut self.draft {
            draft.truncate(slot, 0);
        }
    }

    /// Ends the sequence in `slot` and keeps its cache, if any are kept.
    pub(super) fn keep(&mut self, slot: usize) {
        self.running.retain(|other| *other != slot);
        if let Slot::Running(sequence) = std::mem::replace(&mut self.slots[slot], Slot::Free) {
            self.slots[slot] = Slot::Kept(sequence.tokens);
            self.kept.push_back(slot);
        }
        while self.kept.len() > self.options.kept {
            self.drop_kept();
        }
    }
}

/// Number of tokens of a prompt to compute in this step: of `pending` from position `held`, with `left` tokens left.
///
/// Chunks end at multiples of a block, where attention gives the same bits as without a cut, and the last one is no
/// shorter than a block, because few rows take another path.
fn chunk(held: usize, pending: usize, left: usize) -> usize {
    if pending <= left {
        return pending;
    }
    let end = (held + left.min(pending.saturating_sub(BLOCK))) / BLOCK * BLOCK;
    end.saturating_sub(held)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_end_at_blocks_and_leave_no_short_rest() {
        for (held, pending, left, expected) in [
            (0, 130, 512, 130),
            (0, 130, 129, 64),
            (0, 1000, 512, 512),
            (512, 488, 512, 488),
            (0, 520, 512, 448),
            (10, 700, 100, 54),
            (0, 100, 64, 0),
            (0, 100, 99, 0),
            (0, 1, 1, 1),
        ] {
            assert_eq!(chunk(held, pending, left), expected, "{held} {pending} {left}");
        }
    }
}

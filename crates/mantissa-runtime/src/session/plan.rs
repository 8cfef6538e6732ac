//! Choice of the tokens of a step.

use mantissa_model::ForwardError;

use super::batch::BLOCK;
use super::sequence::Sequence;
use super::shares::{Rows, Shares};
use super::{Event, EventKind, Runtime, Slot};
use crate::cache::FEW;
use crate::speculate::{self, Origin, Speculation};

impl Runtime<'_> {
    /// Fills the batch of the next pass.
    ///
    /// # Errors
    /// Sequences of the draft model.
    pub(super) fn plan_step(&mut self) -> Result<(), ForwardError> {
        self.batch.clear();
        self.plan_decode()?;
        let mut left = self.options.step_tokens.saturating_sub(self.batch.tokens.len()).max(2 * BLOCK);
        let mut owners = std::mem::take(&mut self.owners);
        self.find_owners(&mut owners);
        if self.is_shared(&owners) {
            // Short passes, and those who wait first: nobody waits for more than a chunk of another's prompt.
            left = left.min(2 * BLOCK);
            self.small_left = 0;
            self.plan_admissions(&mut left, &owners);
            self.plan_prefill(&mut left, &owners);
            // Those whose turn it is not have what is left.
            self.small_left = BLOCK;
            self.plan_prefill(&mut left, &owners);
            self.plan_admissions(&mut left, &owners);
        } else {
            self.plan_prefill(&mut left, &owners);
            self.plan_admissions(&mut left, &owners);
        }
        self.owners = owners;
        Ok(())
    }

    /// Admits sequences as long as there is room.
    fn plan_admissions(&mut self, left: &mut usize, owners: &[u64]) {
        while *left >= BLOCK && self.running.len() < self.options.sequences && self.admit(left, owners) {}
    }

    /// Finds the owners of the sequences at work, but for those that wait for their constraint.
    fn find_owners(&self, owners: &mut Vec<u64>) {
        owners.clear();
        for &slot in &self.running {
            if let Slot::Running(Sequence { undecided: None, request, .. }) = &self.slots[slot]
                && !owners.contains(&request.owner)
            {
                owners.push(request.owner);
            }
        }
    }

    /// True if more than one owner has something to compute.
    fn is_shared(&self, owners: &[u64]) -> bool {
        let mut all =
            owners.iter().copied().chain(self.waiting.iter().map(|sequence| sequence.request.owner));
        all.next().is_some_and(|first| all.any(|other| other != first))
    }

    /// Charges the last pass to the owners of its rows.
    pub(super) fn charge_owners(&mut self) {
        let mut rows = std::mem::take(&mut self.owned_rows);
        rows.clear();
        for (entry, &slot) in self.batch.slots.iter().enumerate() {
            if let Slot::Running(sequence) = &self.slots[slot] {
                let (owner, priority) = (sequence.request.owner, sequence.request.priority);
                let (tokens, outputs) = (self.batch.lens[entry], self.batch.outputs[entry]);
                rows.push(Rows { owner, priority, tokens, prompt: tokens > outputs });
            }
        }
        self.shares.charge(self.last_pass.as_secs_f64(), &rows);
        self.owned_rows = rows;
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
            Slot::Running(sequence) => {
                sequence.undecided.is_some() || sequence.tokens.len() - self.kv.len(*slot) == 1
            }
            _ => false,
        };
        on && self.running.len() <= speculate::SEQUENCES
            && self.waiting.is_empty()
            && self.running.iter().all(decodes)
    }

    /// Fills `proposed` with tokens that continue the sequence in `slot`, if they should pay.
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
            self.preempt(youngest);
            if youngest == slot {
                return false;
            }
        }
        true
    }

    /// Lets the sequence in `slot` wait again, without its cache.
    pub(super) fn preempt(&mut self, slot: usize) {
        self.release(slot);
        if let Slot::Running(sequence) = std::mem::replace(&mut self.slots[slot], Slot::Free) {
            self.wait(sequence);
        }
    }

    /// Adds chunks of the prompts at work, in the order of rank; those of the owners who have had more time than
    /// another of `owners` wait.
    fn plan_prefill(&mut self, left: &mut usize, owners: &[u64]) {
        for &slot in &self.running {
            // Those that were just admitted have their chunk.
            if self.batch.slots.contains(&slot) {
                continue;
            }
            let Slot::Running(sequence) = &self.slots[slot] else { continue };
            let (held, all) = (self.kv.len(slot), sequence.tokens.len());
            if !may_compute(&self.shares, sequence, all - held.min(all), owners, &mut self.small_left) {
                continue;
            }
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

    /// Admits the sequence that has waited longest, if there is room for it, and adds a chunk of its prompt. Those that
    /// wait for their constraint or for the beginning of their prompt are passed over, and so are those whose owner has
    /// had more time than another of `owners`. Returns false if none is admitted.
    fn admit(&mut self, left: &mut usize, owners: &[u64]) -> bool {
        let mut small = self.small_left;
        let ready = |sequence: &Sequence| {
            sequence.undecided.is_none()
                && !self.prefix_comes(sequence)
                && may_compute(&self.shares, sequence, sequence.tokens.len(), owners, &mut small)
        };
        let Some(at) = self.waiting.iter().position(ready) else { return false };
        let Some(slot) = self.free_slot() else { return false };
        let Some(mut sequence) = self.waiting.remove(at) else { return false };
        self.small_left = small;
        self.share(slot, &sequence);
        // Room for the next token too, or it would be preempted at once.
        while !self.kv.reserve(slot, sequence.tokens.len() + 1) {
            if !self.drop_kept() {
                self.release(slot);
                self.wait(sequence);
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

    /// Number of first tokens of `sequence` that are `other` too, in a form that can be shared once they are computed.
    /// At least one token is left to be computed. Without recurrent layers the rest has the same bits as without
    /// sharing: it begins at a multiple of a block of queries, and is not computed as a few tokens.
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
            Slot::Running(other) if other.request.prefixes == sequence.request.prefixes => {
                let (held, prompt) = (self.kv.len(slot), &other.tokens);
                (held < prompt.len()).then(|| self.common(sequence, prompt))
            }
            _ => None,
        });
        let later = all.max().unwrap_or(0);
        later > 0 && later > self.shareable(sequence).map_or(0, |(len, _)| len)
    }

    /// Slot of the sequence that shares the longest beginning with `sequence`, and its length; with recurrent layers,
    /// of the longest sequence that it begins with.
    fn shareable(&self, sequence: &Sequence) -> Option<(usize, usize)> {
        let common = |other: usize| {
            let theirs = match &self.slots[other] {
                Slot::Running(other) if other.request.prefixes == sequence.request.prefixes => &other.tokens,
                Slot::Kept { prefixes, tokens } if *prefixes == sequence.request.prefixes => tokens,
                _ => return 0,
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

    /// Returns a free slot, if need be by dropping the sequence kept longest.
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
        if let Some(Sequence { request, tokens, .. }) = self.vacate(slot) {
            self.keep_cache(slot, request.prefixes, tokens);
        }
    }

    /// Takes the sequence in `slot` out and keeps its cache, if any are kept.
    pub(super) fn take(&mut self, slot: usize) -> Option<Sequence> {
        let sequence = self.vacate(slot)?;
        self.keep_cache(slot, sequence.request.prefixes, sequence.tokens.clone());
        Some(sequence)
    }

    fn vacate(&mut self, slot: usize) -> Option<Sequence> {
        self.running.retain(|other| *other != slot);
        match std::mem::replace(&mut self.slots[slot], Slot::Free) {
            Slot::Running(sequence) => Some(sequence),
            other => {
                self.slots[slot] = other;
                None
            }
        }
    }

    fn keep_cache(&mut self, slot: usize, prefixes: u64, tokens: Vec<u32>) {
        self.slots[slot] = Slot::Kept { prefixes, tokens };
        self.kept.push_back(slot);
        while self.kept.len() > self.options.kept {
            self.drop_kept();
        }
    }
}

/// True if `pending` tokens of a prompt may be computed in a pass for these `owners`: it is its owner's turn, or they
/// are so few that nobody notices, of which `small` tokens are left in the pass.
fn may_compute(
    shares: &Shares,
    sequence: &Sequence,
    pending: usize,
    owners: &[u64],
    small: &mut usize,
) -> bool {
    if !shares.defers(sequence.request.owner, owners) {
        return true;
    }
    let few = pending <= *small;
    if few {
        *small -= pending;
    }
    few
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

//! Choice of the tokens of a pass.
//!
//! The logits of a token are changed in this order: biases, penalties, constraint. With a constraint a token is first
//! drawn without it. If the constraint refuses that token, one is drawn from the allowed ones, with a random number of
//! its own. Without cuts of the distribution this draws token t with the probability p(t) / P(allowed), as a mask does:
//! p(t) + (1 − P) · p(t) / P. It saves the mask where the model keeps to the constraint by itself.

use mantissa_model::StopReason;

use super::constraint::{ConstraintError, TokenMask};
use super::sequence::{Event, EventKind, Sequence, logprobs};
use super::{Runtime, Slot};

/// First random number of the second draws.
const SECOND: u64 = 1 << 63;

/// Buffers of the choice of a token.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    pub(super) choices: Vec<(f64, u32)>,
    /// Logits after changes.
    logits: Vec<f32>,
    mask: TokenMask,
}

/// Failure of a choice.
enum NoToken {
    /// All logits are NaN.
    Broken,
    Constraint(ConstraintError),
}

impl From<ConstraintError> for NoToken {
    fn from(error: ConstraintError) -> Self {
        NoToken::Constraint(error)
    }
}

impl Scratch {
    /// Chooses the next token of `sequence` by the `logits` `[vocabulary]` of the model, whose end tokens are `eos`.
    fn choose(&mut self, sequence: &mut Sequence, logits: &[f32], eos: &[u32]) -> Result<u32, NoToken> {
        let (sampling, draw) = (sequence.request.sampling, sequence.made as u64);
        let plain = sequence.request.logit_bias.is_empty() && !sampling.penalizes();
        if plain && sequence.request.constraint.is_none() {
            return sampling.choose(logits, draw, &mut self.choices).ok_or(NoToken::Broken);
        }
        self.logits.clear();
        self.logits.extend_from_slice(logits);
        for &(token, bias) in &sequence.request.logit_bias {
            self.logits[token as usize] += bias;
        }
        if sampling.penalizes() {
            let (prompt, output) = sequence.tokens.split_at(sequence.prompt_len());
            sampling.penalize(prompt, output, &mut self.logits);
        }
        let token = sampling.choose(&self.logits, draw, &mut self.choices).ok_or(NoToken::Broken)?;
        if self.logits[token as usize] == f32::NEG_INFINITY {
            return Err(ConstraintError("expected a token that is not banned, found none".into()).into());
        }
        if sequence.request.constraint.is_none() || allows(sequence, token, eos)? {
            return Ok(token);
        }
        self.mask.reset(logits.len());
        mask(sequence, &mut self.mask, eos)?;
        if !self.mask.apply(&mut self.logits) {
            return Err(
                ConstraintError("expected an allowed token, found none in the vocabulary".into()).into()
            );
        }
        sampling.choose(&self.logits, SECOND + draw, &mut self.choices).ok_or(NoToken::Broken)
    }
}

/// True if the constraint of `sequence` allows `token` next.
fn allows(sequence: &mut Sequence, token: u32, eos: &[u32]) -> Result<bool, ConstraintError> {
    let is_end = sequence.is_end(token, eos);
    match &mut sequence.request.constraint {
        None => Ok(true),
        Some(constraint) if is_end => constraint.may_end(),
        Some(constraint) => constraint.allows(token),
    }
}

/// Fills `mask` with the tokens that the constraint of `sequence` allows next.
fn mask(sequence: &mut Sequence, mask: &mut TokenMask, eos: &[u32]) -> Result<(), ConstraintError> {
    let Some(constraint) = &mut sequence.request.constraint else { return Ok(()) };
    constraint.mask(mask)?;
    let may_end = constraint.may_end()?;
    eos.iter().chain(&sequence.request.stop).for_each(|token| mask.set(*token, may_end));
    Ok(())
}

impl Runtime<'_> {
    /// Samples the next tokens of all sequences of the batch that have logits.
    pub(super) fn sample(&mut self) {
        let (mut row, mut first) = (0, 0);
        for entry in 0..self.batch.slots.len() {
            let (slot, rows) = (self.batch.slots[entry], self.batch.outputs[entry]);
            first += self.batch.lens[entry];
            if rows > 0 && self.sample_one(entry, first - rows, row) {
                self.keep(slot);
            }
            row += rows;
        }
    }

    /// Samples the next token of one sequence, and further ones as long as they were proposed. `first` is its first
    /// token of the batch with logits, `row` that of the logits. Returns true if the sequence has ended.
    fn sample_one(&mut self, entry: usize, first: usize, row: usize) -> bool {
        let (slot, rows) = (self.batch.slots[entry], self.batch.outputs[entry]);
        let mut accepted = 0;
        let mut last = self.sample_token(slot, row);
        while let Some(token) = last.filter(|_| accepted + 1 < rows) {
            if token != self.batch.tokens[first + accepted + 1] {
                break;
            }
            accepted += 1;
            last = self.sample_token(slot, row + accepted);
        }
        if rows > 1 {
            self.settle(entry, accepted);
        }
        last.is_none()
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
        // The last token has not been computed yet.
        let held = sequence.tokens.len() - 1;
        self.kv.truncate(slot, held);
        if let Some(draft) = &mut self.draft {
            draft.truncate(slot, held);
        }
    }

    /// Samples one token of a sequence from row `row` of the logits. Returns it, or `None` if the sequence has
    /// ended.
    fn sample_token(&mut self, slot: usize, row: usize) -> Option<u32> {
        let Slot::Running(sequence) = &mut self.slots[slot] else { return None };
        let (vocabulary, eos) = (self.model.config().vocab_size, &self.model.config().eos_token_ids);
        let (id, logits) = (sequence.id, &self.logits[row * vocabulary..(row + 1) * vocabulary]);
        let before = sequence.made;
        let chosen = self.scratch.choose(sequence, logits, eos);
        let taken = chosen.and_then(|token| {
            let token = sequence.request.forced.get(before).copied().unwrap_or(token);
            Ok((token, sequence.push(token, eos)?))
        });
        let (token, stopped) = match taken {
            Ok(taken) => taken,
            Err(error) => {
                let kind = match error {
                    NoToken::Broken => EventKind::Broken,
                    NoToken::Constraint(error) => EventKind::Unconstrained(error),
                };
                self.events.push(Event { sequence: id, kind });
                return None;
            }
        };
        if sequence.made > before {
            let asked = sequence.request.logprobs.map(|n| logprobs(logits, token, n));
            let (logprob, top) = asked.map_or((None, Vec::new()), |(own, top)| (Some(own), top));
            self.events.push(Event { sequence: id, kind: EventKind::Token { token, logprob, top } });
        }
        let reason: StopReason = match stopped {
            None => return Some(token),
            Some(reason) => reason,
        };
        self.events.push(Event { sequence: id, kind: EventKind::Finished(reason) });
        None
    }
}

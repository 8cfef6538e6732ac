//! Choice of the next token of a sequence.
//!
//! The logits of a token are changed in this order: biases, penalties, constraint. With a constraint a token is first
//! drawn without it. If the constraint refuses that token, one is drawn from the allowed ones, with a random number of
//! its own. Without cuts of the distribution this draws token t with the probability p(t) / P(allowed), as a mask does:
//! p(t) + (1 − P) · p(t) / P. It saves the mask where the model keeps to the constraint by itself.

use mantissa_model::StopReason;

use super::constraint::{ConstraintError, TokenMask, Verdict};
use super::sequence::{Drawn, Event, EventKind, Sequence, Undecided, logprobs};

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

/// Next token of a sequence.
enum Chosen {
    /// The constraint has taken the token; after a `complete` one only an end may follow.
    Taken { token: u32, complete: bool },
    /// The constraint has not answered for this token.
    Undecided(Drawn),
}

/// Result of the choice of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    Token(u32),
    Undecided,
    Ended,
}

impl Scratch {
    /// Chooses the next token of `sequence` by the `logits` `[vocabulary]` of the model, whose end tokens are `eos`,
    /// from the one that was `drawn` before on.
    fn choose(
        &mut self,
        sequence: &mut Sequence,
        logits: &[f32],
        eos: &[u32],
        drawn: Option<Drawn>,
    ) -> Result<Chosen, NoToken> {
        let mut drawn = match drawn {
            Some(drawn) => drawn,
            None => {
                let token = self.draw(sequence, logits, eos)?;
                let forced = sequence.request.forced.get(sequence.made).copied();
                Drawn { token: forced.unwrap_or(token), last: forced.is_some() }
            }
        };
        if sequence.request.constraint.is_none() {
            return Ok(Chosen::Taken { token: drawn.token, complete: false });
        }
        loop {
            self.mask.reset(logits.len());
            match sequence.offer(drawn.token, eos, &mut self.mask)? {
                Verdict::Taken { complete } => return Ok(Chosen::Taken { token: drawn.token, complete }),
                Verdict::Pending => return Ok(Chosen::Undecided(drawn)),
                Verdict::Refused { .. } if drawn.last => {
                    return Err(ConstraintError("expected an allowed token, got another".into()).into());
                }
                Verdict::Refused { may_end } => {
                    let token = self.draw_allowed(sequence, logits, eos, may_end)?;
                    drawn = Drawn { token, last: true };
                }
            }
        }
    }

    /// Draws a token without regard to the constraint.
    fn draw(&mut self, sequence: &Sequence, logits: &[f32], eos: &[u32]) -> Result<u32, NoToken> {
        let (sampling, draw) = (sequence.request.sampling, sequence.made as u64);
        let goes_on = sequence.must_go_on();
        if sequence.request.logit_bias.is_empty() && !sampling.penalizes() && !goes_on {
            return sampling.choose(logits, draw, &mut self.choices).ok_or(NoToken::Broken);
        }
        self.change(sequence, logits);
        if goes_on {
            let ends = eos.iter().chain(&sequence.request.stop);
            for &token in ends {
                // A config may name an end token outside of the vocabulary.
                if let Some(logit) = self.logits.get_mut(token as usize) {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
        let token = sampling.choose(&self.logits, draw, &mut self.choices).ok_or(NoToken::Broken)?;
        if self.logits[token as usize] == f32::NEG_INFINITY {
            return Err(ConstraintError("expected a token that is not banned, found none".into()).into());
        }
        Ok(token)
    }

    /// Draws one of the tokens of the mask; an end token if the sequence `may_end`.
    fn draw_allowed(
        &mut self,
        sequence: &Sequence,
        logits: &[f32],
        eos: &[u32],
        may_end: bool,
    ) -> Result<u32, NoToken> {
        let (sampling, draw) = (sequence.request.sampling, sequence.made as u64);
        eos.iter().chain(&sequence.request.stop).for_each(|token| self.mask.set(*token, may_end));
        self.change(sequence, logits);
        if !self.mask.apply(&mut self.logits) {
            let what = "expected an allowed token, found none in the vocabulary";
            return Err(ConstraintError(what.into()).into());
        }
        sampling.choose(&self.logits, SECOND + draw, &mut self.choices).ok_or(NoToken::Broken)
    }

    /// Fills `logits` with the model's, after biases and penalties.
    fn change(&mut self, sequence: &Sequence, logits: &[f32]) {
        let sampling = sequence.request.sampling;
        self.logits.clear();
        self.logits.extend_from_slice(logits);
        for &(token, bias) in &sequence.request.logit_bias {
            self.logits[token as usize] += bias;
        }
        if sampling.penalizes() {
            let (prompt, output) = sequence.tokens.split_at(sequence.prompt_len());
            sampling.penalize(prompt, output, &mut self.logits);
        }
    }

    /// Chooses the next token of `sequence` and appends it. Without an answer of the constraint the sequence keeps the
    /// token and its logits.
    pub(super) fn next(
        &mut self,
        sequence: &mut Sequence,
        logits: &[f32],
        eos: &[u32],
        events: &mut Vec<Event>,
    ) -> Next {
        let id = sequence.id;
        let mut end = |kind| {
            events.push(Event { sequence: id, kind });
            Next::Ended
        };
        let undecided = sequence.undecided.take();
        let drawn = undecided.as_ref().and_then(|undecided| undecided.drawn);
        let (token, complete) = match self.choose(sequence, logits, eos, drawn) {
            Ok(Chosen::Taken { token, complete }) => (token, complete),
            Ok(Chosen::Undecided(drawn)) => {
                let logits = undecided.map_or_else(|| logits.to_vec(), |undecided| undecided.logits);
                sequence.undecided = Some(Undecided { drawn: Some(drawn), logits });
                return Next::Undecided;
            }
            Err(NoToken::Broken) => return end(EventKind::Broken),
            Err(NoToken::Constraint(error)) => return end(EventKind::Unconstrained(error)),
        };
        let before = sequence.made;
        let stopped: Option<StopReason> = sequence.push(token, complete, eos);
        if sequence.made > before {
            let asked = sequence.request.logprobs.map(|n| logprobs(logits, token, n));
            let (logprob, top) = asked.map_or((None, Vec::new()), |(own, top)| (Some(own), top));
            events.push(Event { sequence: id, kind: EventKind::Token { token, logprob, top } });
        }
        let Some(reason) = stopped else { return Next::Token(token) };
        events.push(Event { sequence: id, kind: EventKind::Finished(reason) });
        Next::Ended
    }

    /// Asks the constraint of an undecided sequence again.
    pub(super) fn ask_again(
        &mut self,
        sequence: &mut Sequence,
        eos: &[u32],
        events: &mut Vec<Event>,
    ) -> Next {
        let Some(mut undecided) = sequence.undecided.take() else { return Next::Undecided };
        let logits = std::mem::take(&mut undecided.logits);
        sequence.undecided = Some(undecided);
        let next = self.next(sequence, &logits, eos, events);
        if let Some(undecided) = &mut sequence.undecided {
            undecided.logits = logits;
        }
        next
    }
}

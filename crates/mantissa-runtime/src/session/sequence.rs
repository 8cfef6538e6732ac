//! Sequences of a runtime: what a caller asks for, and how far it has come.

use std::cmp::Reverse;

use mantissa_model::{Sampling, StopReason};

use super::constraint::{Constraint, ConstraintError, Offer, TokenMask, Verdict};
use super::pooling::{Pooled, Pooling};
use crate::speculate::Trust;

/// A sequence to be generated.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// Prompt, at least one token.
    pub prompt: Vec<u32>,
    /// Largest number of new tokens. With 0 the prompt is only computed.
    pub max_new_tokens: usize,
    /// Number of new tokens before which no end token is sampled. A constraint may end the sequence earlier.
    pub min_new_tokens: usize,
    /// Sampling of each token.
    pub sampling: Sampling,
    /// Values added to logits of tokens, before penalties; `-inf` bans a token.
    pub logit_bias: Vec<(u32, f32)>,
    /// Tokens that may follow. With it the model's end tokens always end the sequence, where the constraint allows it.
    pub constraint: Option<Box<dyn Constraint>>,
    /// Tokens that end the sequence, in addition to the model's own.
    pub stop: Vec<u32>,
    /// True to ignore the model's own end tokens.
    pub ignore_eos: bool,
    /// Number of most probable tokens to report with each token; `None` reports no probabilities.
    pub logprobs: Option<usize>,
    /// Number of most probable tokens to report with each token of the prompt; `None` reports none of them. The whole
    /// prompt is computed, without a shared beginning.
    pub prompt_logprobs: Option<usize>,
    /// Pools the hidden states of the prompt into one vector, instead of generating.
    pub embed: Option<Pooling>,
    /// Sequences of higher priority are admitted first and preempted last; of equals, the oldest first.
    pub priority: i32,
    /// Tokens to take instead of sampled ones, as far as they go: for measurements of a known continuation.
    pub forced: Vec<u32>,
    /// Number of the owner, who has a share of the time.
    pub owner: u64,
    /// Sequences with the same number share the beginnings of their prompts, and wait for each other's.
    pub prefixes: u64,
}

/// Names a sequence of a runtime. Later sequences have larger ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId(pub(crate) u64);

/// News of one sequence.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// The sequence.
    pub sequence: SequenceId,
    /// Kind of the event.
    pub kind: EventKind,
}

/// Kind of an event, with its values.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum EventKind {
    /// The sequence was admitted. Reported once, before its other events.
    Started {
        /// Tokens of the prompt that are not computed because another sequence had them.
        cached: usize,
    },
    /// A token of the prompt, in order, if asked for.
    PromptToken {
        /// The token.
        token: u32,
        /// Its natural logarithm of probability; `None` for the first.
        logprob: Option<f32>,
        /// Most probable tokens at its place.
        top: Vec<(u32, f32)>,
    },
    /// Pooled hidden states after the last norm, `[hidden]`, if asked for.
    Embedding(Vec<f32>),
    /// A token was generated.
    Token {
        /// The token.
        token: u32,
        /// Its natural logarithm of probability if asked for: of the model, before biases, penalties, constraint,
        /// temperature and cuts.
        logprob: Option<f32>,
        /// Most probable tokens with their logarithms of probability, if asked for.
        top: Vec<(u32, f32)>,
    },
    /// The sequence has ended; a stop token is not reported as a token.
    Finished(StopReason),
    /// The sequence has ended, because all logits were NaN.
    Broken,
    /// The sequence has ended, because its constraint failed or allows no token of the vocabulary.
    Unconstrained(ConstraintError),
}

/// A sequence at work.
#[derive(Clone, Debug)]
pub(super) struct Sequence {
    pub(super) id: SequenceId,
    pub(super) request: Box<Request>,
    /// Prompt and new tokens.
    pub(super) tokens: Vec<u32>,
    /// Number of new tokens.
    pub(super) made: usize,
    /// Tokens of the prompt that were reported.
    pub(super) scored: usize,
    pub(super) pooled: Pooled,
    /// Tokens of the cache of another sequence that it began with; `None` before it was admitted.
    pub(super) cached: Option<usize>,
    pub(super) trust: Trust,
    /// Next token, while its constraint has not answered.
    pub(super) undecided: Option<Undecided>,
}

/// Next token of a sequence whose constraint has not answered. The sequence is neither
/// computed nor admitted meanwhile; it may be preempted or detached.
#[derive(Clone, Debug)]
pub(super) struct Undecided {
    /// The token that was offered; `None` to draw one.
    pub(super) drawn: Option<Drawn>,
    /// Logits of its place, `[vocabulary]`.
    pub(super) logits: Vec<f32>,
}

/// A token that was drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Drawn {
    pub(super) token: u32,
    /// True if it was drawn from those that the constraint allows, or is forced: then it must be taken.
    pub(super) last: bool,
}

impl Sequence {
    pub(super) fn new(id: SequenceId, mut request: Request) -> Self {
        let mut tokens = std::mem::take(&mut request.prompt);
        tokens.reserve_exact(request.max_new_tokens);
        Sequence {
            id,
            request: Box::new(request),
            tokens,
            made: 0,
            scored: 0,
            pooled: Pooled::default(),
            cached: None,
            trust: Trust::default(),
            undecided: None,
        }
    }

    /// Number of tokens of the prompt.
    pub(super) fn prompt_len(&self) -> usize {
        self.tokens.len() - self.made
    }

    /// True if tokens are generated after the prompt.
    pub(super) fn generates(&self) -> bool {
        self.request.embed.is_none() && self.request.max_new_tokens > 0
    }

    /// Place in the order of admission, the first the smallest.
    pub(super) fn rank(&self) -> (Reverse<i32>, SequenceId) {
        (Reverse(self.request.priority), self.id)
    }

    /// True if `token` ends the sequence.
    pub(super) fn is_end(&self, token: u32, eos: &[u32]) -> bool {
        let ignores = self.request.ignore_eos && self.request.constraint.is_none();
        (!ignores && eos.contains(&token)) || self.request.stop.contains(&token)
    }

    /// True if the sequence is too short for an end token to be sampled.
    pub(super) fn must_go_on(&self) -> bool {
        self.made < self.request.min_new_tokens && self.request.constraint.is_none()
    }

    /// Appends a token that its constraint has taken; after a `complete` one only an end may follow. Returns the reason
    /// to end after it: a stop token is not appended.
    pub(super) fn push(&mut self, token: u32, complete: bool, eos: &[u32]) -> Option<StopReason> {
        if self.is_end(token, eos) {
            return Some(StopReason::Token(token));
        }
        self.tokens.push(token);
        self.made += 1;
        match self.made >= self.request.max_new_tokens {
            _ if complete => Some(StopReason::Constraint),
            true => Some(StopReason::Length),
            false => None,
        }
    }

    /// Offers `token` to the constraint.
    ///
    /// # Errors
    /// [`ConstraintError`] of the constraint.
    pub(super) fn offer(
        &mut self,
        token: u32,
        eos: &[u32],
        mask: &mut TokenMask,
    ) -> Result<Verdict, ConstraintError> {
        let offer = if self.is_end(token, eos) { Offer::End } else { Offer::Token(token) };
        match &mut self.request.constraint {
            Some(constraint) => constraint.offer(offer, mask),
            None => Ok(Verdict::Taken { complete: false }),
        }
    }
}

/// Returns the logarithms of probability of `token` and of the `n` most probable tokens.
pub(super) fn logprobs(logits: &[f32], token: u32, n: usize) -> (f32, Vec<(u32, f32)>) {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().filter(|x| !x.is_nan()).map(|x| f64::from(x - max).exp()).sum();
    let log = |x: f32| (f64::from(x) - f64::from(max) - sum.ln()) as f32;
    let mut top: Vec<(u32, f32)> = Vec::with_capacity(n + 1);
    for (id, &x) in (0u32..).zip(logits).filter(|(_, x)| !x.is_nan()) {
        let at = top.partition_point(|(_, held)| *held >= x);
        if at < n {
            top.insert(at, (id, x));
            top.truncate(n);
        }
    }
    top.iter_mut().for_each(|(_, x)| *x = log(*x));
    (log(logits[token as usize]), top)
}

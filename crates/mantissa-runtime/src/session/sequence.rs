//! Sequences of a runtime: what a caller asks for, and how far it has come.

use mantissa_model::{Sampling, StopReason};

use crate::speculate::Trust;

/// A sequence to be generated.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Request {
    /// Prompt, at least one token.
    pub prompt: Vec<u32>,
    /// Largest number of new tokens.
    pub max_new_tokens: usize,
    /// Sampling of each token.
    pub sampling: Sampling,
    /// Tokens that end the sequence, in addition to the model's own.
    pub stop: Vec<u32>,
    /// True to ignore the model's own end tokens.
    pub ignore_eos: bool,
    /// Number of most probable tokens to report with each token; `None` reports no probabilities.
    pub logprobs: Option<usize>,
    /// Tokens to take instead of sampled ones, as far as they go: for measurements of a known continuation.
    pub forced: Vec<u32>,
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
pub enum EventKind {
    /// A token was generated.
    Token {
        /// The token.
        token: u32,
        /// Its natural logarithm of probability before temperature and cuts, if asked for.
        logprob: Option<f32>,
        /// Most probable tokens with their logarithms of probability, if asked for.
        top: Vec<(u32, f32)>,
    },
    /// The sequence has ended; a stop token is not reported as a token.
    Finished(StopReason),
    /// The sequence has ended, because all logits were NaN.
    Broken,
}

/// A sequence at work.
#[derive(Clone, Debug)]
pub(super) struct Sequence {
    pub(super) id: SequenceId,
    pub(super) request: Request,
    /// Prompt and new tokens.
    pub(super) tokens: Vec<u32>,
    /// Number of new tokens.
    pub(super) made: usize,
    pub(super) trust: Trust,
}

impl Sequence {
    pub(super) fn new(id: SequenceId, mut request: Request) -> Self {
        let mut tokens = std::mem::take(&mut request.prompt);
        tokens.reserve_exact(request.max_new_tokens);
        Sequence { id, request, tokens, made: 0, trust: Trust::default() }
    }

    /// Appends a sampled token. Returns the reason to end after it: a stop token is not appended.
    pub(super) fn push(&mut self, token: u32, eos: &[u32]) -> Option<StopReason> {
        let is_end = !self.request.ignore_eos && eos.contains(&token);
        if is_end || self.request.stop.contains(&token) {
            return Some(StopReason::Token(token));
        }
        self.tokens.push(token);
        self.made += 1;
        (self.made >= self.request.max_new_tokens).then_some(StopReason::Length)
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

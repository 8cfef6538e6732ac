//! Greedy continuations of one prompt by two models, and the first token at which they differ.
//!
//! Both models run in step while they choose the same token, so the next-token distributions at each position have the
//! same context. After the first difference each model continues its own text.

use mantissa_kernels::kernels;
use mantissa_model::{Decoder, Decoding, GenerateError, StopReason};
use mantissa_store::ErrorClass;
use serde::Serialize;

use crate::evaluate::divergence;

/// Error of a comparison of continuations.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DiffError {
    /// The models have different vocabulary sizes.
    #[error("expected two models with one vocabulary, got vocabularies of {} and {} tokens", sizes[0], sizes[1])]
    Vocabulary {
        /// Vocabulary sizes of both models.
        sizes: [usize; 2],
    },
    /// A model could not be run.
    #[error(transparent)]
    Generate(#[from] GenerateError),
    /// The distributions of a position have no divergence.
    #[error("token {position}: expected finite logits of both models, got a KL divergence of {kl}")]
    NonFinite {
        /// Index of the token after the prompt.
        position: usize,
        /// Divergence in nats.
        kl: f64,
    },
}

impl DiffError {
    /// Returns who has to act: the input or the environment is at fault.
    pub fn class(&self) -> ErrorClass {
        match self {
            DiffError::Generate(error) => error.class(),
            _ => ErrorClass::Input,
        }
    }
}

/// Candidate for the next token.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct TokenCandidate {
    /// Token.
    pub token: u32,
    /// Probability in the model that proposes it.
    pub p: f64,
    /// Probability in the other model.
    pub p_other: f64,
}

/// First position at which the models choose different tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct Difference {
    /// Most probable token of each model.
    pub chosen: [u32; 2],
    /// KL(first ‖ second) of the next-token distributions, in nats.
    pub kl: f64,
    /// Most probable tokens of each model, in decreasing order.
    pub top: [Vec<TokenCandidate>; 2],
}

/// Greedy continuation by one model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Continuation {
    /// New tokens, without an end token.
    pub tokens: Vec<u32>,
    /// Reason for the end.
    pub stopped: StopReason,
}

/// Greedy continuations of one prompt by two models.
#[derive(Clone, Debug, PartialEq)]
pub struct Diff {
    /// Continuation by each model.
    pub continuations: [Continuation; 2],
    /// Number of tokens before the first difference; an end token that both choose is not counted.
    pub equal: usize,
    /// First difference, if there is one within the requested number of tokens.
    pub difference: Option<Difference>,
    /// KL(first ‖ second) of each position up to the first difference or the common end, in nats.
    pub kl: Vec<f64>,
}

/// One model with its text so far.
struct Writer<'a> {
    decoding: Decoding<'a>,
    tokens: Vec<u32>,
    most: usize,
}

impl<'a> Writer<'a> {
    fn begin(decoder: &'a Decoder, prompt: &[u32], most: usize) -> Result<Self, GenerateError> {
        Ok(Writer { decoding: Decoding::begin(decoder, prompt, most)?, tokens: Vec::new(), most })
    }

    /// Appends `token`, unless it ends the text; returns the reason for the end if it does, or is the last one.
    fn take(&mut self, token: u32) -> Result<Option<StopReason>, GenerateError> {
        if self.decoding.decoder().config().eos_token_ids.contains(&token) {
            return Ok(Some(StopReason::Token(token)));
        }
        self.tokens.push(token);
        if self.tokens.len() >= self.most {
            return Ok(Some(StopReason::Length));
        }
        self.decoding.push(token)?;
        Ok(None)
    }

    /// Continues to the end.
    fn finish(mut self, mut stopped: Option<StopReason>) -> Result<Continuation, GenerateError> {
        loop {
            if let Some(stopped) = stopped {
                return Ok(Continuation { tokens: self.tokens, stopped });
            }
            let next = self.decoding.most_probable()?;
            stopped = self.take(next)?;
        }
    }
}

/// Continues `prompt` greedily by both models, up to `tokens` (at least 1) new tokens each. The first difference lists
/// the `top` most probable tokens of each model.
///
/// # Errors
/// [`DiffError`].
pub fn diff(
    [first, second]: [&Decoder; 2],
    prompt: &[u32],
    tokens: usize,
    top: usize,
) -> Result<Diff, DiffError> {
    let sizes = [first, second].map(|decoder| decoder.config().vocab_size);
    if sizes[0] != sizes[1] {
        return Err(DiffError::Vocabulary { sizes });
    }
    let mut a = Writer::begin(first, prompt, tokens)?;
    let mut b = Writer::begin(second, prompt, tokens)?;
    let mut kl = Vec::new();
    loop {
        let position = kl.len();
        let here = divergence(a.decoding.logits(), b.decoding.logits());
        let chosen = [a.decoding.most_probable()?, b.decoding.most_probable()?];
        if !here.is_finite() {
            return Err(DiffError::NonFinite { position, kl: here });
        }
        kl.push(here);
        let equal = a.tokens.len();
        let difference = (chosen[0] != chosen[1]).then(|| {
            let logits = [a.decoding.logits(), b.decoding.logits()];
            Difference { chosen, kl: here, top: candidates(logits, top) }
        });
        let ends = [a.take(chosen[0])?, b.take(chosen[1])?];
        if difference.is_some() || ends != [None, None] {
            let equal = if difference.is_some() { equal } else { a.tokens.len() };
            let continuations = [a.finish(ends[0])?, b.finish(ends[1])?];
            return Ok(Diff { continuations, equal, difference, kl });
        }
    }
}

/// Returns the `top` most probable tokens of each model; of equals, the lowest id first.
fn candidates(logits: [&[f32]; 2], top: usize) -> [Vec<TokenCandidate>; 2] {
    let stats = logits.map(|logits| kernels().log_softmax_stats(logits));
    let p = |model: usize, token: u32| (-stats[model].nll(logits[model][token as usize])).exp();
    [0, 1].map(|model| {
        let mut order: Vec<u32> = (0..).take(logits[model].len()).collect();
        let by_logit = |a: &u32, b: &u32| {
            let of = |id: u32| logits[model][id as usize];
            of(*b).total_cmp(&of(*a)).then(a.cmp(b))
        };
        if top < order.len() {
            order.select_nth_unstable_by(top, by_logit);
            order.truncate(top);
        }
        order.sort_unstable_by(by_logit);
        order
            .into_iter()
            .map(|token| TokenCandidate { token, p: p(model, token), p_other: p(1 - model, token) })
            .collect()
    })
}

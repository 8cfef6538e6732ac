//! Generation: the prompt runs through the cache, then one token at a time, greedy or sampled.
//!
//! Sampling draws from the softmax of `logits / temperature`, restricted to the tokens with at least `min_p` of the
//! probability of the most probable one (Nguyen et al. 2024, arXiv 2407.01082), then to the `top_k` most probable
//! tokens and then to the fewest that hold `top_p` of the rest (Holtzman et al. 2020, "The Curious Case of Neural Text
//! Degeneration"). Draw `i` takes word `i` of the Philox stream of the seed, so a run is the same on every machine
//! and in any order of calls.
//!
//! Penalties change the logits before: a repetition penalty θ divides positive logits of the tokens of prompt and
//! continuation by θ and multiplies negative ones (Keskar et al. 2019, CTRL, arXiv 1909.05858, section 4.1); then
//! `frequency · count + presence · [count > 0]` is subtracted, with counts in the continuation (the definition of
//! OpenAI's API).

use std::ops::ControlFlow;

use mantissa_kernels::kernels;
use mantissa_num::round::random_u32;
use mantissa_store::ErrorClass;

use crate::buffers::Buffers;
use crate::cache::KvCache;
use crate::decoder::Decoder;
use crate::error::{ForwardError, LoadError};
use crate::memory::check_context;
use crate::sampler::{descending, llama_cpp};
pub use crate::sampling::{Sampler, Sampling};

/// Tokens of a prompt per pass through the model.
pub const PREFILL: usize = 512;

/// Options of a generation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerateOptions {
    /// Largest number of new tokens.
    pub max_new_tokens: usize,
    /// Sampling of each token.
    pub sampling: Sampling,
    /// Tokens that end the text, in addition to the model's own.
    pub stop: Vec<u32>,
    /// True to ignore the model's own end tokens.
    pub ignore_eos: bool,
}

/// Reason for the end of a generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// The requested number of tokens was generated.
    Length,
    /// A stop token was generated; it is not returned.
    Token(u32),
    /// The callback ended the generation.
    Caller,
    /// The constraint on the tokens is complete: only an end could follow.
    Constraint,
}

/// Result of a generation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Generated {
    /// The new tokens.
    pub tokens: Vec<u32>,
    /// Reason for the end.
    pub stopped: StopReason,
}

/// Error of a generation.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GenerateError {
    /// The context is too long or does not fit into memory.
    #[error(transparent)]
    Plan(#[from] LoadError),
    /// The model could not be run.
    #[error(transparent)]
    Forward(#[from] ForwardError),
    /// The prompt is empty.
    #[error("prompt: expected at least one token, got none; fix: give a text or use --bos always")]
    EmptyPrompt,
    /// A sampling parameter cannot be used.
    #[error("{parameter}: expected {allowed}, got {found}")]
    Parameter {
        /// Name of the parameter.
        parameter: &'static str,
        /// Its value.
        found: f32,
        /// Its range.
        allowed: &'static str,
    },
}

impl GenerateError {
    /// Class of the error, for the exit code.
    pub fn class(&self) -> ErrorClass {
        match self {
            GenerateError::Plan(error) => error.class(),
            _ => ErrorClass::Input,
        }
    }
}

/// A sequence that grows token by token: its KV cache, and the logits of the next token.
#[derive(Debug)]
pub struct Decoding<'a> {
    decoder: &'a Decoder,
    cache: KvCache,
    buffers: Buffers,
    logits: Vec<f32>,
}

impl<'a> Decoding<'a> {
    /// Runs `prompt`, with room for `new` more tokens.
    ///
    /// # Errors
    /// [`GenerateError`]; before any allocation if prompt and new tokens exceed the model's context.
    pub fn begin(decoder: &'a Decoder, prompt: &[u32], new: usize) -> Result<Self, GenerateError> {
        let config = decoder.config();
        if prompt.is_empty() {
            return Err(GenerateError::EmptyPrompt);
        }
        let context = prompt.len().saturating_add(new);
        check_context(config, context)?;
        let cache = KvCache::for_decoder(decoder, context)?;
        let buffers = Buffers::plan(config, prompt.len().min(PREFILL), context)?;
        let mut decoding = Decoding { decoder, cache, buffers, logits: vec![0.0; config.vocab_size] };
        decoding.extend(prompt)?;
        Ok(decoding)
    }

    /// Appends a token.
    ///
    /// # Errors
    /// [`GenerateError::Forward`] if the model cannot be run, or the planned number of tokens is exceeded.
    pub fn push(&mut self, token: u32) -> Result<(), GenerateError> {
        self.extend(&[token])
    }

    fn extend(&mut self, tokens: &[u32]) -> Result<(), GenerateError> {
        let end = self.cache.len() + tokens.len();
        for part in tokens.chunks(PREFILL) {
            let mut hidden = self.decoder.forward_cached(part, &mut self.cache, &mut self.buffers)?;
            let last = hidden.tokens() - 1;
            if self.cache.len() == end {
                hidden.logits(last..last + 1, &mut self.logits)?;
            }
        }
        Ok(())
    }

    /// Logits of the next token, `[vocabulary]`.
    pub fn logits(&self) -> &[f32] {
        &self.logits
    }

    /// Returns the most probable next token.
    ///
    /// # Errors
    /// [`ForwardError::NoLogits`] if all logits are NaN.
    pub fn most_probable(&self) -> Result<u32, GenerateError> {
        let best = kernels().argmax(&self.logits).ok_or_else(|| self.no_logits())?;
        Ok(best as u32)
    }

    /// Model that runs.
    pub fn decoder(&self) -> &'a Decoder {
        self.decoder
    }

    fn no_logits(&self) -> ForwardError {
        ForwardError::NoLogits { position: self.cache.len() - 1 }
    }
}

/// Continues `prompt`. `on_token` receives every new token and may end the generation.
///
/// # Errors
/// [`GenerateError`]; before any allocation if prompt and new tokens exceed the model's context.
pub fn generate(
    decoder: &Decoder,
    prompt: &[u32],
    options: &GenerateOptions,
    mut on_token: impl FnMut(u32) -> ControlFlow<()>,
) -> Result<Generated, GenerateError> {
    let sampling = options.sampling.check()?;
    let mut decoding = Decoding::begin(decoder, prompt, options.max_new_tokens)?;
    let mut choices = Vec::new();
    let mut tokens = Vec::new();
    let mut penalized = Vec::new();
    while tokens.len() < options.max_new_tokens {
        let draw = tokens.len() as u64;
        let logits = match sampling.penalizes() {
            false => decoding.logits(),
            true => {
                penalized.clear();
                penalized.extend_from_slice(decoding.logits());
                sampling.penalize(prompt, &tokens, &mut penalized);
                &penalized
            }
        };
        let next = sampling.choose(logits, draw, &mut choices);
        let next = next.ok_or_else(|| decoding.no_logits())?;
        let is_end = !options.ignore_eos && decoder.config().eos_token_ids.contains(&next);
        if is_end || options.stop.contains(&next) {
            return Ok(Generated { tokens, stopped: StopReason::Token(next) });
        }
        tokens.push(next);
        if on_token(next).is_break() {
            return Ok(Generated { tokens, stopped: StopReason::Caller });
        }
        if tokens.len() < options.max_new_tokens {
            decoding.push(next)?;
        }
    }
    Ok(Generated { tokens, stopped: StopReason::Length })
}

/// Choices that are sorted at first for the nucleus.
const NUCLEUS: usize = 256;

impl Sampling {
    /// Checks the parameters.
    ///
    /// # Errors
    /// [`GenerateError::Parameter`].
    pub fn check(self) -> Result<Self, GenerateError> {
        let wrong = |parameter, found, allowed| Err(GenerateError::Parameter { parameter, found, allowed });
        if !(self.temperature.is_finite() && self.temperature >= 0.0) {
            return wrong("temperature", self.temperature, "0 or a finite number greater than 0");
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return wrong("top_p", self.top_p, "a number greater than 0 and at most 1");
        }
        if !(self.min_p >= 0.0 && self.min_p <= 1.0) {
            return wrong("min_p", self.min_p, "a number of 0 to 1");
        }
        if !(self.repetition.is_finite() && self.repetition > 0.0) {
            return wrong("repetition_penalty", self.repetition, "a finite number greater than 0");
        }
        for (name, value) in [("presence_penalty", self.presence), ("frequency_penalty", self.frequency)] {
            if !value.is_finite() {
                return wrong(name, value, "a finite number");
            }
        }
        Ok(self)
    }

    /// Chooses the next token; `None` if all logits are NaN. `draw` counts the tokens drawn before; `choices` is
    /// scratch.
    pub fn choose(&self, logits: &[f32], draw: u64, choices: &mut Vec<(f64, u32)>) -> Option<u32> {
        let best = kernels().argmax(logits)?;
        if self.temperature == 0.0 || !logits[best].is_finite() {
            return Some(best as u32);
        }
        if self.sampler == Sampler::LlamaCpp {
            return llama_cpp(self, logits, draw, choices);
        }
        let (max, temperature) = (f64::from(logits[best]), f64::from(self.temperature));
        choices.clear();
        let all = logits.iter().zip(0u32..).filter(|(x, _)| !x.is_nan());
        choices.extend(all.map(|(&x, id)| ((f64::from(x) - max) / temperature, id)));
        self.cut_logits(choices);
        choices.iter_mut().for_each(|(weight, _)| *weight = weight.exp());
        if self.top_k > 0 || self.top_p < 1.0 {
            self.cut_weights(choices);
        }
        let total: f64 = choices.iter().map(|(weight, _)| weight).sum();
        let mut left = f64::from(random_u32(self.seed, draw)) / 4_294_967_296.0 * total;
        for &(weight, id) in choices.iter() {
            left -= weight;
            if left < 0.0 {
                return Some(id);
            }
        }
        // Rounding may leave a remainder at the end.
        choices.iter().rev().find(|(weight, _)| *weight > 0.0).map(|(_, id)| *id)
    }

    /// Keeps the `top_k` largest logits, and those within `min_p` of the largest, which is 0.
    fn cut_logits(&self, choices: &mut Vec<(f64, u32)>) {
        if self.min_p > 0.0 {
            let least = f64::from(self.min_p).ln();
            choices.retain(|(logit, _)| *logit >= least);
        }
        if self.top_k > 0 && self.top_k < choices.len() {
            choices.select_nth_unstable_by(self.top_k - 1, descending);
            choices.truncate(self.top_k);
        }
    }

    /// Sorts the choices, and keeps the fewest that hold `top_p`.
    fn cut_weights(&self, choices: &mut Vec<(f64, u32)>) {
        let target = choices.iter().map(|(weight, _)| weight).sum::<f64>() * f64::from(self.top_p);
        // The nucleus is small against a vocabulary, so sort no more than it takes.
        let mut sorted = if self.top_p < 1.0 { NUCLEUS.min(choices.len()) } else { choices.len() };
        loop {
            if sorted < choices.len() {
                choices.select_nth_unstable_by(sorted, descending);
            }
            if sorted == choices.len()
                || choices[..sorted].iter().map(|(weight, _)| weight).sum::<f64>() >= target
            {
                break;
            }
            sorted = (4 * sorted).min(choices.len());
        }
        choices.truncate(sorted);
        choices.sort_unstable_by(descending);
        let mut held = 0.0;
        let kept = choices.iter().take_while(|(weight, _)| {
            let needed = held < target;
            held += weight;
            needed
        });
        let kept = kept.count().max(1);
        choices.truncate(kept);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use super::*;

    fn shares(sampling: Sampling, logits: &[f32], draws: u64) -> Vec<f64> {
        let mut counts = vec![0.0; logits.len()];
        let mut scratch = Vec::new();
        for draw in 0..draws {
            counts[sampling.choose(logits, draw, &mut scratch).unwrap() as usize] += 1.0 / draws as f64;
        }
        counts
    }

    const LOGITS: [f32; 4] = [1.0, 2.0, -1.0, 0.5];

    #[test]
    fn draws_follow_the_softmax() {
        let sampling = Sampling { temperature: 0.7, seed: 5, ..Sampling::default() };
        let draws = 40_000;
        let weights = LOGITS.map(|x| (f64::from(x) / 0.7).exp());
        let total: f64 = weights.iter().sum();
        for (share, weight) in shares(sampling, &LOGITS, draws).iter().zip(weights) {
            let p = weight / total;
            assert!((share - p).abs() < 5.0 * (p * (1.0 - p) / draws as f64).sqrt(), "{share} for {p}");
        }
    }

    #[test]
    fn cuts_keep_the_most_probable() {
        let base = Sampling { temperature: 1.0, ..Sampling::default() };
        let kept = |sampling| shares(sampling, &LOGITS, 2000).iter().map(|s| *s > 0.0).collect::<Vec<_>>();
        assert_eq!(kept(Sampling { top_k: 2, ..base }), [true, true, false, false]);
        assert_eq!(kept(Sampling { top_p: 0.5, ..base }), [false, true, false, false]);
        assert_eq!(kept(Sampling { top_p: 0.9, ..base }), [true, true, false, true]);
        assert_eq!(kept(Sampling { top_k: 100, ..base }), [true; 4]);
        // Shares of the most probable: e^-1, 1, e^-3, e^-1.5.
        assert_eq!(kept(Sampling { min_p: 0.3, ..base }), [true, true, false, false]);
        assert_eq!(kept(Sampling { min_p: 0.2, top_k: 2, ..base }), [true, true, false, false]);
        assert_eq!(kept(Sampling { min_p: 1.0, ..base }), [false, true, false, false]);
        assert_eq!(Sampling { top_k: 1, ..base }.choose(&[1.0, 3.0, 3.0], 9, &mut Vec::new()), Some(1));
    }

    /// Against a full sort of all weights.
    #[test]
    fn cuts_of_large_vocabularies_keep_the_same_choices() {
        let logits: Vec<f32> = (0..20_000u32)
            .map(|id| ((random_u32(1, u64::from(id)) % 2000) as f32 / 200.0).floor() / 2.0)
            .collect();
        let mut sorted: Vec<(f64, u32)> = logits.iter().zip(0..).map(|(x, id)| (f64::from(*x), id)).collect();
        sorted.sort_by(descending);
        for (top_k, top_p) in [(0, 0.01), (0, 0.5), (0, 0.99), (7, 1.0), (700, 0.8), (50_000, 0.3)] {
            let sampling = Sampling { temperature: 1.0, top_k, top_p, ..Sampling::default() };
            let mut found = Vec::new();
            sampling.choose(&logits, 0, &mut found).unwrap();
            let kept = &sorted[..if top_k > 0 { top_k.min(20_000) } else { 20_000 }];
            let weight = |x: f64| (x - sorted[0].0).exp();
            let target = kept.iter().map(|(x, _)| weight(*x)).sum::<f64>() * f64::from(top_p);
            let mut held = 0.0;
            let count = kept.iter().take_while(|(x, _)| {
                let needed = held < target * (1.0 - 1e-12);
                held += weight(*x);
                needed
            });
            let ids: Vec<u32> = kept[..count.count()].iter().map(|(_, id)| *id).collect();
            let found: Vec<u32> = found.iter().map(|(_, id)| *id).collect();
            assert_eq!(found.len(), ids.len(), "{top_k} {top_p}");
            assert!(found == ids, "{top_k} {top_p}");
        }
    }

    #[test]
    fn penalties_follow_their_definitions() {
        let penalized = |sampling: Sampling, prompt: &[u32], output: &[u32]| {
            let mut logits = LOGITS;
            sampling.penalize(prompt, output, &mut logits);
            logits
        };
        let base = Sampling::default();
        assert!(!base.penalizes());
        let repetition = Sampling { repetition: 2.0, ..base };
        assert_eq!(penalized(repetition, &[1, 1], &[2]), [1.0, 1.0, -2.0, 0.5]);
        let both = Sampling { presence: 0.5, frequency: 0.25, ..base };
        assert_eq!(penalized(both, &[1], &[0, 3, 3]), [0.25, 2.0, -1.0, -0.5]);
        // Tokens beyond the logits are ignored.
        assert_eq!(penalized(Sampling { repetition: 2.0, ..both }, &[9], &[9]), LOGITS);
    }

    #[test]
    fn seeds_and_draws_decide() {
        let run = |seed| {
            let sampling = Sampling { temperature: 1.5, seed, ..Sampling::default() };
            let mut scratch = Vec::new();
            (0..50).map(|draw| sampling.choose(&LOGITS, draw, &mut scratch).unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(run(1), run(1));
        assert_ne!(run(1), run(2));
    }

    #[test]
    fn odd_logits_are_survived() {
        let sampling = Sampling { temperature: 1.0, ..Sampling::default() };
        let choose = |logits: &[f32]| sampling.choose(logits, 0, &mut Vec::new());
        assert_eq!(choose(&[f32::NAN, f32::NAN]), None);
        assert_eq!(choose(&[f32::NAN, 1.0]), Some(1));
        assert_eq!(choose(&[0.0, f32::INFINITY, 1.0]), Some(1));
        assert_eq!(choose(&[f32::NEG_INFINITY, -3.0]), Some(1));
        assert_eq!(choose(&[f32::NEG_INFINITY, f32::NEG_INFINITY]), Some(0));
    }

    #[test]
    fn parameters_are_checked() {
        for (temperature, top_p) in
            [(-1.0, 1.0), (f32::NAN, 1.0), (f32::INFINITY, 1.0), (1.0, 0.0), (1.0, 1.5)]
        {
            let sampling = Sampling { temperature, top_p, ..Sampling::default() };
            assert!(matches!(sampling.check(), Err(GenerateError::Parameter { .. })));
        }
        let base = Sampling::default();
        for sampling in [
            Sampling { min_p: 1.5, ..base },
            Sampling { min_p: f32::NAN, ..base },
            Sampling { repetition: 0.0, ..base },
            Sampling { presence: f32::NAN, ..base },
            Sampling { frequency: f32::INFINITY, ..base },
        ] {
            assert!(matches!(sampling.check(), Err(GenerateError::Parameter { .. })), "{sampling:?}");
        }
    }
}

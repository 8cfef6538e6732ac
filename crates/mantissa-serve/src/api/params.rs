//! Sampling and limits of a request, checked.

use std::collections::BTreeMap;
use std::time::Instant;

use mantissa_model::{Sampler, Sampling, SamplingDefaults};
use mantissa_runtime::Request;
use serde::Deserialize;
use utoipa::ToSchema;

use super::generate::check_tokens;
use super::{ApiError, Artifact};
use crate::options::Limits;

/// One stop string or several.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(untagged, expecting = "a string or a list of strings")]
pub(crate) enum Stop {
    /// One string.
    One(String),
    /// Several strings.
    Many(Vec<String>),
}

/// Fields of sampling, which all endpoints that generate share.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
pub(crate) struct Sampled {
    /// Largest number of new tokens; -1 for as many as the context holds. If absent, 16 for completions, else as with -1.
    #[schema(minimum = -1)]
    pub(crate) max_tokens: Option<i64>,
    #[schema(minimum = 0, maximum = 2)]
    pub(crate) temperature: Option<f32>,
    #[schema(minimum = 0, maximum = 1)]
    pub(crate) top_p: Option<f32>,
    #[schema(minimum = -1)]
    pub(crate) top_k: Option<i32>,
    #[schema(minimum = 0, maximum = 1)]
    pub(crate) min_p: Option<f32>,
    #[schema(minimum = -2, maximum = 2)]
    pub(crate) presence_penalty: Option<f32>,
    #[schema(minimum = -2, maximum = 2)]
    pub(crate) frequency_penalty: Option<f32>,
    #[serde(alias = "repeat_penalty")]
    #[schema(minimum = 0.01, maximum = 10)]
    pub(crate) repetition_penalty: Option<f32>,
    #[schema(minimum = 1, maximum = 64)]
    pub(crate) n: Option<u32>,
    pub(crate) seed: Option<i64>,
    pub(crate) stop: Option<Stop>,
    /// Tokens that end the text beside the model's end tokens.
    pub(crate) stop_token_ids: Option<Vec<u32>>,
    /// Number of tokens before which nothing ends the text.
    pub(crate) min_tokens: Option<u32>,
    pub(crate) logit_bias: Option<BTreeMap<String, f32>>,
    /// True to go on after the model's end token.
    pub(crate) ignore_eos: Option<bool>,
    /// Order of the cuts and random numbers: `mantissa` or `llama.cpp`.
    #[schema(value_type = Option<String>)]
    pub(crate) sampler: Option<Sampler>,
    /// True to send how much of the prompt has been computed, in a stream.
    pub(crate) return_progress: Option<bool>,
    /// Number of most probable tokens to report with each token, as the endpoint reads it.
    #[serde(skip)]
    pub(crate) logprobs: Option<u32>,
    /// Sampling where neither the request nor the model says how, as the endpoint's users expect it.
    #[serde(skip)]
    pub(crate) usual: SamplingDefaults,
    /// Longest sequence, where the request limits it.
    #[serde(skip)]
    pub(crate) context: Option<usize>,
}

/// Checked options of sampling.
#[derive(Clone, Debug)]
pub(crate) struct Params {
    pub(crate) sampling: Sampling,
    pub(crate) n: usize,
    pub(crate) stops: Vec<String>,
    pub(crate) logprobs: Option<usize>,
    /// Number of most probable tokens to report with each token of the prompt.
    pub(crate) prompt_logprobs: Option<usize>,
    /// True to report how much of the prompt has been computed.
    pub(crate) progress: bool,
    /// Number of tokens before which nothing ends the text.
    pub(crate) min_tokens: usize,
    stop_tokens: Vec<u32>,
    bias: Vec<(u32, f32)>,
    max_tokens: Option<usize>,
    context: Option<usize>,
    ignore_eos: bool,
    deadline: Instant,
    most: usize,
}

/// Checks that `value` is a number from `least` to `most`.
fn within(name: &str, value: Option<f32>, default: f32, least: f32, most: f32) -> Result<f32, ApiError> {
    let value = value.unwrap_or(default);
    if value >= least && value <= most {
        return Ok(value);
    }
    Err(ApiError::field(name, value, &format!("a number from {least} to {most}")))
}

impl Sampled {
    /// Checks the options against the limits of the server and the vocabulary of the model. `random` is the seed if the
    /// request has none.
    ///
    /// # Errors
    /// A status of 400 that names the field.
    pub(crate) fn check(self, limits: &Limits, artifact: &Artifact, random: u64) -> Result<Params, ApiError> {
        let default = artifact.sampling.or(self.usual);
        let temperature =
            within("temperature", self.temperature, default.temperature.unwrap_or(1.0), 0.0, 2.0)?;
        // 0 keeps one token.
        let top_p =
            within("top_p", self.top_p, default.top_p.unwrap_or(1.0), 0.0, 1.0)?.max(f32::MIN_POSITIVE);
        let vocabulary = artifact.model.config().vocab_size;
        let top_k = match self.top_k {
            // More than all are all.
            None => default.top_k.unwrap_or(0).min(vocabulary),
            Some(-1) => 0,
            Some(k) if (0..=vocabulary as i64).contains(&i64::from(k)) => k as usize,
            Some(k) => return Err(ApiError::field("top_k", k, &format!("-1 or 0 (all) to {vocabulary}"))),
        };
        let n = self.n.unwrap_or(1) as usize;
        if n == 0 || n > limits.choices {
            return Err(ApiError::field("n", n, &format!("1 to {}", limits.choices)));
        }
        let logprobs = self.logprobs.map(|n| n as usize);
        if logprobs.is_some_and(|n| n > limits.logprobs) {
            let allowed = format!("0 to {}", limits.logprobs);
            return Err(ApiError::field("logprobs", logprobs.unwrap_or(0), &allowed));
        }
        let min_p = within("min_p", self.min_p, default.min_p.unwrap_or(0.0), 0.0, 1.0)?;
        let presence = within("presence_penalty", self.presence_penalty, 0.0, -2.0, 2.0)?;
        let frequency = within("frequency_penalty", self.frequency_penalty, 0.0, -2.0, 2.0)?;
        let usual = default.repetition.unwrap_or(1.0);
        let repetition = within("repetition_penalty", self.repetition_penalty, usual, 0.01, 10.0)?;
        let seed = self.seed.map_or(random, i64::cast_unsigned);
        let stop_tokens = self.stop_token_ids.unwrap_or_default();
        if stop_tokens.len() > limits.biases {
            let allowed = format!("at most {} tokens", limits.biases);
            return Err(ApiError::field("stop_token_ids", format!("{} tokens", stop_tokens.len()), &allowed));
        }
        check_tokens(artifact, "stop_token_ids", &stop_tokens)?;
        let min_tokens = self.min_tokens.unwrap_or(0) as usize;
        let max_tokens = new_tokens(self.max_tokens)?;
        let most = max_tokens.unwrap_or(limits.new_tokens);
        if min_tokens > most {
            return Err(ApiError::field(
                "min_tokens",
                min_tokens,
                &format!("0 to {most}, the most new tokens"),
            ));
        }
        Ok(Params {
            sampling: Sampling {
                temperature,
                top_k,
                top_p,
                min_p,
                repetition,
                presence,
                frequency,
                seed,
                sampler: self.sampler.unwrap_or_default(),
            },
            n,
            stops: stops(self.stop, limits)?,
            logprobs,
            prompt_logprobs: None,
            progress: self.return_progress.unwrap_or(false),
            min_tokens,
            stop_tokens,
            bias: biases(self.logit_bias, limits, vocabulary)?,
            max_tokens,
            context: self.context,
            ignore_eos: self.ignore_eos.unwrap_or(false),
            deadline: limits.deadline(),
            most: limits.new_tokens,
        })
    }
}

/// Reads a number of new tokens: -1 stands for any number.
fn new_tokens(given: Option<i64>) -> Result<Option<usize>, ApiError> {
    match given {
        Some(-1) => Ok(Some(usize::MAX)),
        Some(n) => match usize::try_from(n) {
            Ok(n) => Ok(Some(n)),
            Err(_) => Err(ApiError::field("max_tokens", n, "at least 1, or -1 (until the end)")),
        },
        None => Ok(None),
    }
}

/// Checks stop strings.
fn stops(stop: Option<Stop>, limits: &Limits) -> Result<Vec<String>, ApiError> {
    let (count, bytes) = limits.stops;
    let stops = match stop {
        None => Vec::new(),
        Some(Stop::One(stop)) => vec![stop],
        Some(Stop::Many(stops)) => stops,
    };
    if stops.len() > count {
        return Err(ApiError::field(
            "stop",
            format!("{} strings", stops.len()),
            &format!("at most {count} strings"),
        ));
    }
    match stops.iter().find(|stop| stop.is_empty() || stop.len() > bytes) {
        Some(stop) => {
            let found = format!("one of {} bytes", stop.len());
            Err(ApiError::field("stop", found, &format!("strings of 1 to {bytes} bytes")))
        }
        None => Ok(stops),
    }
}

/// Checks biases: keys are tokens.
fn biases(
    bias: Option<BTreeMap<String, f32>>,
    limits: &Limits,
    vocabulary: usize,
) -> Result<Vec<(u32, f32)>, ApiError> {
    const MOST: f32 = 100.0;
    let bias = bias.unwrap_or_default();
    if bias.len() > limits.biases {
        let allowed = format!("at most {} tokens", limits.biases);
        return Err(ApiError::field("logit_bias", format!("{} tokens", bias.len()), &allowed));
    }
    let one = |(key, value): (String, f32)| {
        let token = key.parse::<u32>().ok().filter(|token| (*token as usize) < vocabulary);
        let Some(token) = token else {
            return Err(ApiError::field("logit_bias", key, &format!("tokens below {vocabulary}")));
        };
        // -100 bans a token, as the API says.
        match value {
            _ if value <= -MOST => Ok((token, f32::NEG_INFINITY)),
            _ if value <= MOST => Ok((token, value)),
            _ => Err(ApiError::field("logit_bias", value, "numbers from -100 to 100")),
        }
    };
    bias.into_iter().map(one).collect()
}

impl Params {
    /// Largest number of new tokens; -1 for any.
    pub(crate) fn new_tokens(&self) -> i64 {
        self.max_tokens.and_then(|tokens| i64::try_from(tokens).ok()).unwrap_or(-1)
    }

    /// Time at which the request ends.
    pub(crate) fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Makes the request for choice `choice` of a prompt, with as many new tokens as asked for, or else `default`, as far
    /// as the context of `context` tokens and the server's limit allow.
    ///
    /// # Errors
    /// A status of 400 if the prompt is empty or leaves no room for a token.
    pub(crate) fn request(
        &self,
        prompt: &[u32],
        choice: usize,
        default: Option<usize>,
        context: usize,
    ) -> Result<Request, ApiError> {
        if prompt.is_empty() {
            return Err(ApiError::field("prompt", "no tokens", "at least one token"));
        }
        let context = context.min(self.context.unwrap_or(usize::MAX));
        let room = context.saturating_sub(prompt.len());
        if room == 0 {
            let message = format!(
                "the prompt has {} tokens, but the context of the model holds {context}, with at least one new token",
                prompt.len()
            );
            return Err(ApiError::bad(message).param("prompt").code("context_length_exceeded"));
        }
        let wanted = self.max_tokens.or(default).unwrap_or(usize::MAX);
        if wanted == 0 && self.prompt_logprobs.is_none() {
            return Err(ApiError::field("max_tokens", 0, "at least 1, or -1 (until the end)"));
        }
        // Each choice has a stream of its own.
        let sampling = Sampling { seed: self.sampling.seed.wrapping_add(choice as u64), ..self.sampling };
        Ok(Request {
            prompt: prompt.to_vec(),
            max_new_tokens: wanted.min(room).min(self.most),
            sampling,
            ignore_eos: self.ignore_eos,
            stop: self.stop_tokens.clone(),
            min_new_tokens: self.min_tokens,
            logit_bias: self.bias.clone(),
            logprobs: self.logprobs,
            prompt_logprobs: self.prompt_logprobs,
            ..Request::default()
        })
    }
}

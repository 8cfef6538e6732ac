//! `/v1/completions`: continues texts.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use mantissa_model::Bos;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::routes;

use super::body::Sampling;
use super::format::Form;
use super::generate::{Plan, check_tokens, submit};
use super::params::Sampled;
use super::preparation::{Preparation, prepare};
use super::sse::{self, Cut, Events, Gone};
use super::usage::{StreamOptions, Usage, wants_usage};
use super::{ApiError, App, Artifact, Endpoints, now};
use crate::engine::{Caller, Job, Progress, Stream};
use crate::text::{Delta, Finish, Generation, Piece, TokenInfo};

/// New tokens if the request names no number.
const DEFAULT_TOKENS: usize = 16;

/// Text or tokens, one or several.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(untagged, expecting = "a string, a list of strings, a list of tokens, or a list of lists of tokens")]
enum Prompt {
    Text(String),
    Texts(Vec<String>),
    Tokens(Vec<u32>),
    TokenLists(Vec<Vec<u32>>),
}

/// Request of a completion.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub(crate) struct CompletionRequest {
    model: Option<String>,
    prompt: Prompt,
    best_of: Option<u32>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    /// Number of most probable tokens to report with each token.
    logprobs: Option<u32>,
    /// True to return the prompt before the new text.
    echo: Option<bool>,
    suffix: Option<String>,
    /// True to return the tokens of the text.
    return_token_ids: Option<bool>,
}

/// Completion, or a piece of one.
#[derive(Debug, Serialize, ToSchema)]
struct CompletionResponse {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
    choices: Vec<CompletionChoice>,
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Usage>,
    /// How much of the prompt has been computed, if asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_progress: Option<Progress>,
}

/// One choice.
#[derive(Debug, Default, Serialize, ToSchema)]
struct CompletionChoice {
    text: String,
    index: usize,
    logprobs: Option<CompletionLogprobs>,
    /// `stop` or `length` with the last piece.
    finish_reason: Option<&'static str>,
    /// Stop string that was found.
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_reason: Option<String>,
    /// Tokens of the text, if asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
}

/// Probabilities of tokens, in lists of one length.
#[derive(Clone, Debug, Default, Serialize, ToSchema)]
struct CompletionLogprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<Option<f32>>,
    top_logprobs: Vec<Option<BTreeMap<String, f32>>>,
    /// Characters of the text before each token. Special tokens have no text, and the tokens of one character the same
    /// offset.
    text_offset: Vec<usize>,
}

/// Text of a token as OpenAI's API shows it: bytes of a part of a character as `bytes:\xHH`.
fn token_text(piece: &Piece) -> String {
    match piece.text() {
        Some(text) => text.to_owned(),
        None => format!("bytes:{}", piece.shown()),
    }
}

impl CompletionLogprobs {
    /// Adds tokens of a text before which `before` characters are returned.
    fn extend(&mut self, infos: Vec<TokenInfo>, before: usize) {
        for info in infos {
            self.text_offset.push(before + info.offset);
            self.tokens.push(token_text(&info.piece));
            self.token_logprobs.push(info.logprob);
            let top = info.top.iter().map(|(_, piece, logprob)| (token_text(piece), *logprob));
            self.top_logprobs.push(info.logprob.map(|_| top.collect()));
        }
    }
}

/// Request that was checked.
struct Checked {
    plan: Plan,
    /// Text of each prompt, to be returned.
    echo: Option<Vec<String>>,
    include_usage: bool,
    token_ids: bool,
    id: String,
}

impl CompletionRequest {
    /// Checks the request and tokenizes the prompts.
    fn check(
        self,
        sampled: Sampled,
        form: Form,
        app: &Preparation,
        artifact: Arc<Artifact>,
    ) -> Result<(Checked, Vec<Job>), ApiError> {
        if let Some(best_of) = self.best_of.filter(|best_of| *best_of != sampled.n.unwrap_or(1)) {
            return Err(ApiError::field("best_of", best_of, "as many as n"));
        }
        if self.suffix.as_ref().is_some_and(|suffix| !suffix.is_empty()) {
            return Err(ApiError::field("suffix", "a text", "none"));
        }
        let echo = self.echo.unwrap_or(false);
        // Clients that score a text expect the probability of one more token, which may be an end token.
        let scores = echo && self.logprobs.is_some() && sampled.max_tokens == Some(1);
        let ignore_eos = sampled.ignore_eos.or(scores.then_some(true));
        let sampled = Sampled { logprobs: self.logprobs, ignore_eos, ..sampled };
        let mut params = sampled.check(&app.limits, &artifact, app.random())?;
        params.prompt_logprobs = params.logprobs.filter(|_| echo);
        app.check_room(&artifact, self.prompt.count() * params.n)?;
        let prompts = prompts(self.prompt, app, &artifact)?;
        let text = |prompt: &Vec<u32>| Ok(artifact.tokenizer.decode(prompt)?);
        let echo = echo.then(|| prompts.iter().map(text).collect::<Result<_, ApiError>>()).transpose()?;
        let grammar = form.grammar()?;
        let constraint =
            grammar.map(|(grammar, field)| app.compile(&artifact, &grammar, field)).transpose()?;
        let plan = Plan { artifact, params, prompts, default_tokens: Some(DEFAULT_TOKENS) };
        let jobs = plan.jobs(app, constraint)?;
        let include_usage = wants_usage(self.stream_options);
        let token_ids = self.return_token_ids.unwrap_or(false);
        Ok((Checked { plan, echo, include_usage, token_ids, id: app.id("cmpl-") }, jobs))
    }
}

impl Prompt {
    /// Number of prompts.
    fn count(&self) -> usize {
        match self {
            Prompt::Text(_) | Prompt::Tokens(_) => 1,
            Prompt::Texts(texts) => texts.len(),
            Prompt::TokenLists(lists) => lists.len(),
        }
    }
}

/// Tokenizes the prompts of a request.
fn prompts(prompt: Prompt, app: &Preparation, artifact: &Artifact) -> Result<Vec<Vec<u32>>, ApiError> {
    let most = app.limits.choices;
    let count = |n: usize| match n <= most && n > 0 {
        true => Ok(()),
        false => Err(ApiError::field("prompt", format!("{n} prompts"), &format!("1 to {most}"))),
    };
    let tokens = |tokens: Vec<u32>| {
        check_tokens(artifact, "prompt", &tokens)?;
        Ok(tokens)
    };
    match prompt {
        Prompt::Text(text) => Ok(vec![app.encode(artifact, &text, Bos::Auto)?]),
        Prompt::Texts(texts) => {
            count(texts.len())?;
            texts.iter().map(|text| app.encode(artifact, text, Bos::Auto)).collect()
        }
        Prompt::Tokens(list) => Ok(vec![tokens(list)?]),
        Prompt::TokenLists(lists) => {
            count(lists.len())?;
            lists.into_iter().map(tokens).collect()
        }
    }
}

/// Stop string of an end.
fn stop_reason(finish: Option<&Finish>) -> Option<String> {
    match finish? {
        Finish::Stop(text) => text.clone(),
        Finish::Length => None,
    }
}

/// Name of the reason for an end.
fn reason(finish: &Finish) -> &'static str {
    match finish {
        Finish::Stop(_) => "stop",
        Finish::Length => "length",
    }
}

impl Checked {
    fn response(
        &self,
        choices: Vec<CompletionChoice>,
        usage: Option<Usage>,
        created: u64,
    ) -> CompletionResponse {
        CompletionResponse {
            id: self.id.clone(),
            object: "text_completion",
            created,
            model: self.plan.artifact.name.clone(),
            choices,
            usage,
            prompt_progress: None,
        }
    }

    fn usage(&self, generation: &Generation<'_>) -> Usage {
        Usage::new(self.plan.prompt_tokens(), generation.generated(), generation.cached())
    }

    fn generation(&self, stream: Stream) -> Result<Generation<'_>, ApiError> {
        let plan = &self.plan;
        Generation::new(
            &plan.artifact.tokenizer,
            stream,
            plan.choices(),
            &plan.params.stops,
            plan.params.min_tokens,
        )
    }

    /// Text to return before choice `index`.
    fn echo(&self, index: usize) -> &str {
        let texts = self.echo.as_ref();
        texts.and_then(|texts| texts.get(index / self.plan.params.n)).map_or("", String::as_str)
    }

    /// Waits for the whole text of all choices.
    async fn collect(&self, stream: Stream) -> Result<CompletionResponse, ApiError> {
        let mut generation = self.generation(stream)?;
        let count = self.plan.choices().count();
        let empty = |index| CompletionChoice {
            index,
            text: self.echo(index).to_owned(),
            logprobs: self.plan.params.logprobs.map(|_| CompletionLogprobs::default()),
            token_ids: self.token_ids.then(Vec::new),
            ..CompletionChoice::default()
        };
        let mut choices: Vec<_> = (0..count).map(empty).collect();
        while let Some(delta) = generation.next().await? {
            let choice = &mut choices[delta.index];
            choice.text += &delta.text;
            choice.finish_reason = delta.finish.as_ref().map(reason);
            choice.stop_reason = stop_reason(delta.finish.as_ref());
            choice.token_ids.iter_mut().for_each(|ids| ids.extend(&delta.tokens));
            if let Some(logprobs) = &mut choice.logprobs {
                logprobs.extend(delta.prompt, 0);
                logprobs.extend(delta.infos, self.echo(delta.index).chars().count());
            }
        }
        Ok(self.response(choices, Some(self.usage(&generation)), now()))
    }

    /// Sends the pieces of all choices as they come.
    async fn stream(self, stream: Stream, events: Events) -> Result<(), Gone> {
        let created = now();
        let sent = self.pieces(stream, &events, created).await;
        events.end(sent).await
    }

    async fn pieces(&self, stream: Stream, events: &Events, created: u64) -> Result<(), Cut> {
        let mut generation = self.generation(stream)?;
        let count = self.plan.choices().count();
        let mut echoed = vec![self.echo.is_none(); count];
        while let Some(delta) = generation.next().await? {
            let Delta { index, text, infos, finish, prompt, tokens, progress } = delta;
            if progress.is_some() {
                let choice = CompletionChoice { index, ..CompletionChoice::default() };
                let response = self.response(vec![choice], None, created);
                events.send(&CompletionResponse { prompt_progress: progress, ..response }).await?;
                continue;
            }
            if !std::mem::replace(&mut echoed[index], true) {
                let logprobs = self.plan.params.logprobs.map(|_| {
                    let mut logprobs = CompletionLogprobs::default();
                    logprobs.extend(prompt, 0);
                    logprobs
                });
                let text = self.echo(index).to_owned();
                let choice = CompletionChoice { text, index, logprobs, ..CompletionChoice::default() };
                events.send(&self.response(vec![choice], None, created)).await?;
            }
            let logprobs = self.plan.params.logprobs.map(|_| {
                let mut logprobs = CompletionLogprobs::default();
                logprobs.extend(infos, self.echo(index).chars().count());
                logprobs
            });
            let choice = CompletionChoice {
                text,
                index,
                logprobs,
                finish_reason: finish.as_ref().map(reason),
                stop_reason: stop_reason(finish.as_ref()),
                token_ids: self.token_ids.then_some(tokens),
            };
            events.send(&self.response(vec![choice], None, created)).await?;
        }
        if self.include_usage {
            let usage = Some(self.usage(&generation));
            events.send(&self.response(Vec::new(), usage, created)).await?;
        }
        Ok(())
    }
}

/// Lists the endpoints of this file.
pub(super) fn endpoints() -> Endpoints {
    Endpoints::new().routes(routes!(completions))
}

/// Continues texts.
#[utoipa::path(
    post,
    path = "/v1/completions",
    request_body = Sampling<CompletionRequest>,
    responses(
        (
            status = 200,
            description = "The text, or events with pieces of it",
            content((CompletionResponse = "application/json"), (super::sse::Event = "text/event-stream"))
        ),
        crate::error::Errors,
    )
)]
pub(crate) async fn completions(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Sampling { request, sampled, form, bytes }: Sampling<CompletionRequest>,
) -> Result<Response, ApiError> {
    let artifact = app.artifact(request.model.as_deref())?;
    let streams = request.stream.unwrap_or(false);
    let (checked, jobs) =
        prepare(&app, caller, bytes, move |app| request.check(sampled, form, app, artifact)).await?;
    let stream = submit(&app, &checked.plan.artifact, jobs, caller)?;
    if streams {
        return Ok(sse::respond(app.limits.write_time, |events| checked.stream(stream, events)));
    }
    Ok(Json(checked.collect(stream).await?).into_response())
}

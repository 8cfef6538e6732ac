//! `/v1/chat/completions`: answers a conversation.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use mantissa_model::Bos;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;
use utoipa_axum::routes;

use super::answer::{Answer, Part, Parts};
use super::body::Sampling;
use super::conversation::{ChatMessage, values};
use super::format::Form;
use super::generate::{Plan, submit};
use super::offered::{Offered, ToolChoice, ToolItem};
use super::params::Sampled;
use super::preparation::{Preparation, prepare};
use super::reply::End;
use super::sse::{self, Cut, Events, Gone};
use super::thinking::Thinking;
use super::turn::{Turn, constraint};
use super::usage::{StreamOptions, Usage, wants_usage};
use super::{ApiError, App, Artifact, Endpoints, now};
use crate::engine::{Caller, Job, Progress, Stream};
use crate::text::TokenInfo;
use crate::tools::{Piece, call_id};

/// Request of an answer.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub(crate) struct ChatRequest {
    model: Option<String>,
    messages: Vec<ChatMessage>,
    /// Largest number of new tokens, or -1; takes precedence over `max_tokens`.
    #[schema(minimum = -1)]
    max_completion_tokens: Option<i64>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    /// True to report the probability of each token.
    logprobs: Option<bool>,
    /// Number of most probable tokens to report with each token.
    top_logprobs: Option<u32>,
    tools: Option<Vec<ToolItem>>,
    tool_choice: Option<ToolChoice>,
    /// False for at most one call.
    parallel_tool_calls: Option<bool>,
    /// Variables for the chat template, such as `enable_thinking`.
    #[schema(value_type = Option<Object>)]
    chat_template_kwargs: Option<Map<String, Value>>,
    /// False to leave out the beginning of the answer's turn.
    add_generation_prompt: Option<bool>,
    /// True to go on with the last message, which is the beginning of the answer.
    continue_final_message: Option<bool>,
    /// `auto` or `deepseek`: a thought stands in `reasoning_content`. `none`: it stays in the text.
    reasoning_format: Option<String>,
    /// Most tokens of a thought; -1 for any number.
    #[serde(alias = "thinking_token_budget", alias = "thinking_budget_tokens")]
    #[schema(minimum = -1)]
    reasoning_budget: Option<i64>,
    /// `none`: no thought. Other values are given to the chat template.
    reasoning_effort: Option<String>,
}

/// Answer.
#[derive(Debug, Serialize, ToSchema)]
struct ChatResponse {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
    choices: Vec<ChatChoice>,
    usage: Usage,
}

/// One choice of an answer.
#[derive(Debug, Serialize, ToSchema)]
struct ChatChoice {
    index: usize,
    message: AnswerMessage,
    logprobs: Option<ChatLogprobs>,
    /// `stop`, `length` or `tool_calls`.
    finish_reason: Option<&'static str>,
}

/// Message of the model.
#[derive(Debug, Serialize, ToSchema)]
struct AnswerMessage {
    role: &'static str,
    content: Option<String>,
    /// Thought before the answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<CallItem>,
}

/// Call of a tool, or a piece of one.
#[derive(Clone, Debug, Default, Serialize, ToSchema)]
struct CallItem {
    /// Number of the call, in pieces.
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    /// `function`.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    function: CalledFunction,
}

/// Function of a call.
#[derive(Clone, Debug, Default, Serialize, ToSchema)]
struct CalledFunction {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    /// JSON text.
    arguments: String,
}

impl CallItem {
    /// Begins a call of a reply.
    fn new(reply: u64, index: usize, name: String) -> Self {
        let function = CalledFunction { name: Some(name), arguments: String::new() };
        CallItem { index: None, id: Some(call_id(reply, index)), kind: Some("function"), function }
    }
}

/// Piece of an answer.
#[derive(Debug, Serialize, ToSchema)]
struct ChatChunk {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
    choices: Vec<ChunkChoice>,
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Usage>,
    /// How much of the prompt has been computed, if asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_progress: Option<Progress>,
}

/// Piece of one choice.
#[derive(Debug, Default, Serialize, ToSchema)]
struct ChunkChoice {
    index: usize,
    delta: AnswerDelta,
    logprobs: Option<ChatLogprobs>,
    finish_reason: Option<&'static str>,
}

/// Addition of a piece to the message.
#[derive(Debug, Default, Serialize, ToSchema)]
struct AnswerDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<CallItem>,
}

/// Probabilities of the tokens of an answer.
#[derive(Debug, Default, Serialize, ToSchema)]
struct ChatLogprobs {
    content: Vec<TokenLogprob>,
}

/// Probability of a token.
#[derive(Debug, Serialize, ToSchema)]
struct TokenLogprob {
    token: String,
    logprob: f32,
    /// UTF-8 of the token, which may be a part of a character; the bytes of all tokens join to the text.
    bytes: Vec<u8>,
    top_logprobs: Vec<TopLogprob>,
}

/// Probability of one of the most probable tokens.
#[derive(Debug, Serialize, ToSchema)]
struct TopLogprob {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
}

impl From<TokenInfo> for TokenLogprob {
    fn from(info: TokenInfo) -> Self {
        let top = |(_, piece, logprob): (u32, crate::text::Piece, f32)| TopLogprob {
            token: piece.shown(),
            logprob,
            bytes: piece.bytes,
        };
        TokenLogprob {
            token: info.piece.shown(),
            logprob: info.logprob.unwrap_or_default(),
            top_logprobs: info.top.into_iter().map(top).collect(),
            bytes: info.piece.bytes,
        }
    }
}

/// Chat answer that was checked.
struct Checked {
    answer: Answer,
    include_usage: bool,
    id: String,
}

impl ChatRequest {
    /// Name of the model, if there is one.
    pub(crate) fn model(&self) -> Option<&str> {
        self.model.as_deref()
    }

    /// Checks the request, renders the conversation, compiles the grammar and tokenizes the text.
    pub(crate) fn check(
        self,
        sampled: Sampled,
        form: Form,
        app: &Preparation,
        artifact: Arc<Artifact>,
    ) -> Result<(Answer, Vec<Job>), ApiError> {
        let reports = self.logprobs.unwrap_or(false);
        if self.top_logprobs.is_some_and(|n| n > 0) && !reports {
            return Err(ApiError::field("top_logprobs", "a number", "none unless logprobs is true"));
        }
        if let Some(n) = self.top_logprobs.filter(|n| *n as usize > app.limits.logprobs) {
            return Err(ApiError::field("top_logprobs", n, &format!("0 to {}", app.limits.logprobs)));
        }
        let sampled = Sampled {
            max_tokens: self.max_completion_tokens.or(sampled.max_tokens),
            logprobs: reports.then_some(self.top_logprobs.unwrap_or(0)),
            ..sampled
        };
        let params = sampled.check(&app.limits, &artifact, app.random())?;
        app.check_room(&artifact, params.n)?;
        let offered = Offered::new(self.tools, self.tool_choice, self.parallel_tool_calls, &artifact)?;
        let constraint = constraint(app, &artifact, offered.as_ref(), form)?;
        let mut kwargs = self.chat_template_kwargs.unwrap_or_default();
        let (format, budget, effort) = (self.reasoning_format, self.reasoning_budget, self.reasoning_effort);
        let thinking = Thinking { format, budget, effort }.check(app, &mut kwargs)?;
        let turn = Turn {
            messages: values(self.messages)?,
            kwargs,
            add_generation_prompt: self.add_generation_prompt,
            continue_final_message: self.continue_final_message.unwrap_or(false),
        };
        let rendered = turn.render(app, &artifact, offered.as_ref())?;
        let constraint = thinking.limit(app, &artifact, &rendered, constraint)?;
        // A chat template writes the special tokens itself.
        let prompts = vec![app.encode(&artifact, &rendered.text, Bos::Never)?];
        let plan = Plan { artifact, params, prompts, default_tokens: None };
        let jobs = plan.jobs(app, constraint)?;
        let tools = offered.map(|offered| (offered.syntax, offered.names()));
        let thoughts = rendered.marks.filter(|_| thinking.separate).map(|marks| (marks, rendered.opened));
        Ok((Answer::new(app, plan, tools, thoughts), jobs))
    }
}

/// Name of the reason for an end of a reply with `calls` calls.
fn reason(end: &End, calls: usize) -> &'static str {
    match end {
        End::Length => "length",
        _ if calls > 0 => "tool_calls",
        End::Stop | End::StopText(_) => "stop",
    }
}

/// Probabilities as the API reports them.
fn logprobs(asked: bool, infos: Vec<TokenInfo>) -> Option<ChatLogprobs> {
    asked.then(|| ChatLogprobs { content: infos.into_iter().map(TokenLogprob::from).collect() })
}

/// A choice while it is collected.
#[derive(Default)]
struct Collected {
    text: String,
    thought: String,
    calls: Vec<CallItem>,
    infos: Vec<TokenInfo>,
    end: Option<End>,
}

impl Collected {
    fn add(&mut self, part: Part, number: u64) {
        for piece in part.pieces {
            match piece {
                Piece::Text(text) => self.text += &text,
                Piece::Thought(text) => self.thought += &text,
                Piece::Call { index, name } => self.calls.push(CallItem::new(number, index, name)),
                Piece::Arguments { text, .. } => {
                    if let Some(call) = self.calls.last_mut() {
                        call.function.arguments += &text;
                    }
                }
            }
        }
        self.infos.extend(part.infos);
        self.end = part.end;
    }

    fn choice(self, index: usize, asked: bool) -> ChatChoice {
        let content = (!self.text.is_empty() || self.calls.is_empty()).then_some(self.text);
        ChatChoice {
            index,
            finish_reason: self.end.as_ref().map(|end| reason(end, self.calls.len())),
            message: AnswerMessage {
                role: "assistant",
                content,
                reasoning_content: Some(self.thought).filter(|thought| !thought.is_empty()),
                tool_calls: self.calls,
            },
            logprobs: logprobs(asked, self.infos),
        }
    }
}

impl Checked {
    fn usage(parts: &Parts<'_>) -> Usage {
        let usage = parts.usage();
        Usage::new(usage.prompt, usage.new, usage.cached).with_thought(usage.thought)
    }

    fn reports(&self) -> bool {
        self.answer.plan.params.logprobs.is_some()
    }

    /// Waits for the whole answer.
    async fn collect(&self, stream: Stream) -> Result<ChatResponse, ApiError> {
        let mut parts = self.answer.parts(stream)?;
        let mut all: Vec<Collected> = (0..self.answer.plan.params.n).map(|_| Collected::default()).collect();
        while let Some(part) = parts.next().await? {
            all[part.index].add(part, self.answer.number);
        }
        let choices = all.into_iter().enumerate().map(|(i, one)| one.choice(i, self.reports())).collect();
        Ok(ChatResponse {
            id: self.id.clone(),
            object: "chat.completion",
            created: now(),
            model: self.answer.model().to_owned(),
            choices,
            usage: Self::usage(&parts),
        })
    }

    fn chunk(&self, choices: Vec<ChunkChoice>, usage: Option<Usage>, created: u64) -> ChatChunk {
        ChatChunk {
            id: self.id.clone(),
            object: "chat.completion.chunk",
            created,
            model: self.answer.model().to_owned(),
            choices,
            usage,
            prompt_progress: None,
        }
    }

    /// Sends the pieces of the answer as they come.
    async fn stream(self, stream: Stream, events: Events) -> Result<(), Gone> {
        let sent = self.pieces(stream, &events, now()).await;
        events.end(sent).await
    }

    async fn pieces(&self, stream: Stream, events: &Events, created: u64) -> Result<(), Cut> {
        let mut parts = self.answer.parts(stream)?;
        let mut begun = vec![false; self.answer.plan.params.n];
        let mut calls = vec![0; begun.len()];
        while let Some(part) = parts.next().await? {
            let Part { index, pieces, infos, end, progress } = part;
            if progress.is_some() {
                let choice = ChunkChoice { index, ..ChunkChoice::default() };
                let chunk = self.chunk(vec![choice], None, created);
                events.send(&ChatChunk { prompt_progress: progress, ..chunk }).await?;
                continue;
            }
            if !std::mem::replace(&mut begun[index], true) {
                let delta = AnswerDelta {
                    role: Some("assistant"),
                    content: Some(String::new()),
                    ..Default::default()
                };
                let first = ChunkChoice { index, delta, ..ChunkChoice::default() };
                events.send(&self.chunk(vec![first], None, created)).await?;
            }
            let mut logprobs = logprobs(self.reports(), infos);
            let has_logprobs = logprobs.as_ref().is_some_and(|logprobs| !logprobs.content.is_empty());
            let mut deltas: Vec<_> =
                pieces.into_iter().map(|piece| self.delta(piece, &mut calls[index])).collect();
            if deltas.is_empty() && has_logprobs {
                deltas.push(AnswerDelta { content: Some(String::new()), ..AnswerDelta::default() });
            }
            for delta in deltas {
                let choice = ChunkChoice { index, delta, logprobs: logprobs.take(), finish_reason: None };
                events.send(&self.chunk(vec![choice], None, created)).await?;
            }
            if let Some(end) = end {
                let finish_reason = Some(reason(&end, calls[index]));
                let last = ChunkChoice { index, finish_reason, ..ChunkChoice::default() };
                events.send(&self.chunk(vec![last], None, created)).await?;
            }
        }
        if self.include_usage {
            events.send(&self.chunk(Vec::new(), Some(Self::usage(&parts)), created)).await?;
        }
        Ok(())
    }

    /// Makes the addition of a piece to the message; counts its calls.
    fn delta(&self, piece: Piece, calls: &mut usize) -> AnswerDelta {
        let call = match piece {
            Piece::Text(text) => return AnswerDelta { content: Some(text), ..AnswerDelta::default() },
            Piece::Thought(text) => {
                return AnswerDelta { reasoning_content: Some(text), ..AnswerDelta::default() };
            }
            Piece::Call { index, name } => {
                *calls += 1;
                CallItem { index: Some(index), ..CallItem::new(self.answer.number, index, name) }
            }
            Piece::Arguments { index, text } => {
                let function = CalledFunction { name: None, arguments: text };
                CallItem { index: Some(index), function, ..CallItem::default() }
            }
        };
        AnswerDelta { tool_calls: vec![call], ..AnswerDelta::default() }
    }
}

/// Lists the endpoints of this file.
pub(super) fn endpoints() -> Endpoints {
    Endpoints::new().routes(routes!(completions))
}

/// Answers a conversation.
#[utoipa::path(
    post,
    path = "/v1/chat/completions",
    request_body = Sampling<ChatRequest>,
    responses(
        (
            status = 200,
            description = "The answer, or events with pieces of it",
            content((ChatResponse = "application/json"), (super::sse::Event = "text/event-stream"))
        ),
        crate::error::Errors,
    )
)]
pub(crate) async fn completions(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Sampling { request, sampled, form, bytes }: Sampling<ChatRequest>,
) -> Result<Response, ApiError> {
    let artifact = app.artifact(request.model())?;
    let (streams, include_usage) = (request.stream.unwrap_or(false), wants_usage(request.stream_options));
    let (answer, jobs) =
        prepare(&app, caller, bytes, move |app| request.check(sampled, form, app, artifact)).await?;
    let id = format!("chatcmpl-{}", answer.id());
    let checked = Checked { answer, include_usage, id };
    let stream = submit(&app, &checked.answer.plan.artifact, jobs, caller)?;
    if streams {
        return Ok(sse::respond(app.limits.write_time, |events| checked.stream(stream, events)));
    }
    Ok(Json(checked.collect(stream).await?).into_response())
}

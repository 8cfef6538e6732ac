//! `/v1/chat/completions`: answers a conversation. `/apply-template`: its text.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use mantissa_model::Bos;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use super::body::Body;
use super::generate::{Plan, encode, prepare, submit};
use super::params::{Sampled, Stop};
use super::render::{Variables, render};
use super::sse::{self, Cut, Events, Gone};
use super::usage::{StreamOptions, Usage, wants_usage};
use super::{ApiError, App, Artifact, now};
use crate::engine::{Caller, Job, Stream};
use crate::text::{Delta, Finish, Generation, TokenInfo};

/// Text of a message, whole or in parts.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(untagged, expecting = "a string or a list of parts")]
enum Content {
    Text(String),
    Parts(Vec<Part>),
}

/// Part of a message.
#[derive(Clone, Debug, Deserialize, ToSchema)]
struct Part {
    /// `text`.
    #[serde(rename = "type")]
    kind: String,
    text: Option<String>,
}

/// Message of a conversation.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub(crate) struct ChatMessage {
    /// `system`, `developer`, `user`, `assistant` or `tool`.
    role: String,
    content: Option<Content>,
    name: Option<String>,
    #[schema(value_type = Option<Vec<Object>>)]
    tool_calls: Option<Vec<Value>>,
    tool_call_id: Option<String>,
    reasoning_content: Option<String>,
}

/// Request of an answer.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub(crate) struct ChatRequest {
    model: Option<String>,
    messages: Vec<ChatMessage>,
    /// Largest number of new tokens; as many as the context holds if absent.
    max_completion_tokens: Option<u32>,
    /// The same, under its older name.
    max_tokens: Option<u32>,
    #[schema(minimum = 0, maximum = 2)]
    temperature: Option<f32>,
    #[schema(minimum = 0, maximum = 1)]
    top_p: Option<f32>,
    #[schema(minimum = -1)]
    top_k: Option<i32>,
    #[schema(minimum = 0, maximum = 1)]
    min_p: Option<f32>,
    #[schema(minimum = -2, maximum = 2)]
    presence_penalty: Option<f32>,
    #[schema(minimum = -2, maximum = 2)]
    frequency_penalty: Option<f32>,
    #[serde(alias = "repeat_penalty")]
    #[schema(minimum = 0.01, maximum = 10)]
    repetition_penalty: Option<f32>,
    #[schema(minimum = 1, maximum = 64)]
    n: Option<u32>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    /// True to report the probability of each token.
    logprobs: Option<bool>,
    /// Number of most probable tokens to report with each token.
    top_logprobs: Option<u32>,
    stop: Option<Stop>,
    seed: Option<i64>,
    logit_bias: Option<BTreeMap<String, f32>>,
    /// True to go on after the model's end token.
    ignore_eos: Option<bool>,
    #[schema(value_type = Option<Object>)]
    response_format: Option<Value>,
    #[schema(value_type = Option<Vec<Object>>)]
    tools: Option<Vec<Value>>,
    /// Variables for the chat template, such as `enable_thinking`.
    #[schema(value_type = Option<Object>)]
    chat_template_kwargs: Option<Map<String, Value>>,
    /// False to leave out the beginning of the answer's turn.
    add_generation_prompt: Option<bool>,
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
    /// `stop` or `length`.
    finish_reason: Option<&'static str>,
}

/// Message of the model.
#[derive(Debug, Serialize, ToSchema)]
struct AnswerMessage {
    role: &'static str,
    content: Option<String>,
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
}

/// Piece of one choice.
#[derive(Debug, Default, Serialize, ToSchema)]
struct ChunkChoice {
    index: usize,
    delta: AnswerDelta,
    logprobs: Option<ChatLogprobs>,
    finish_reason: Option<&'static str>,
}

/// What a piece adds to the message.
#[derive(Debug, Default, Serialize, ToSchema)]
struct AnswerDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<String>,
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
    /// UTF-8 of the token; absent for a part of a character.
    bytes: Option<Vec<u8>>,
    top_logprobs: Vec<TopLogprob>,
}

/// Probability of one of the most probable tokens.
#[derive(Debug, Serialize, ToSchema)]
struct TopLogprob {
    token: String,
    logprob: f32,
    bytes: Option<Vec<u8>>,
}

impl From<TokenInfo> for TokenLogprob {
    fn from(info: TokenInfo) -> Self {
        let top =
            |(_, token, logprob): (u32, String, f32)| TopLogprob { bytes: bytes(&token), token, logprob };
        TokenLogprob {
            bytes: bytes(&info.text),
            logprob: info.logprob.unwrap_or_default(),
            top_logprobs: info.top.into_iter().map(top).collect(),
            token: info.text,
        }
    }
}

/// UTF-8 of a token, unless it is a part of a character.
fn bytes(text: &str) -> Option<Vec<u8>> {
    (!text.contains('\u{fffd}')).then(|| text.as_bytes().to_vec())
}

impl ChatMessage {
    /// Makes the message as templates read it. `at` is its index.
    fn value(self, at: usize) -> Result<Value, ApiError> {
        let role = match self.role.as_str() {
            // Templates know the older name.
            "developer" => "system",
            role @ ("system" | "user" | "assistant" | "tool" | "function") => role,
            other => {
                let allowed = "system, developer, user, assistant or tool";
                return Err(ApiError::field(format!("messages[{at}].role"), other, allowed));
            }
        };
        let mut value = json!({ "role": role });
        value["content"] = match self.content {
            Some(Content::Text(text)) => text.into(),
            Some(Content::Parts(parts)) => joined(parts, at)?.into(),
            // A turn that only calls tools has no text.
            None if self.tool_calls.is_some() => "".into(),
            None => return Err(ApiError::field(format!("messages[{at}].content"), "nothing", "a text")),
        };
        let others = [
            ("name", self.name.map(Value::from)),
            ("tool_calls", self.tool_calls.map(Value::from)),
            ("tool_call_id", self.tool_call_id.map(Value::from)),
            ("reasoning_content", self.reasoning_content.map(Value::from)),
        ];
        for (name, other) in others {
            if let Some(other) = other {
                value[name] = other;
            }
        }
        Ok(value)
    }
}

/// Joins the parts of a message, which are all text.
fn joined(parts: Vec<Part>, at: usize) -> Result<String, ApiError> {
    let text = |(i, part): (usize, Part)| match (part.kind.as_str(), part.text) {
        ("text" | "input_text" | "output_text", Some(text)) => Ok(text),
        (kind, _) => Err(ApiError::field(format!("messages[{at}].content[{i}].type"), kind, "text")),
    };
    Ok(parts.into_iter().enumerate().map(text).collect::<Result<Vec<_>, _>>()?.join("\n"))
}

/// Makes the messages as templates read them.
///
/// # Errors
/// Status 400 without messages, or for one that no template reads.
pub(crate) fn values(messages: Vec<ChatMessage>) -> Result<Vec<Value>, ApiError> {
    if messages.is_empty() {
        return Err(ApiError::field("messages", "none", "at least one"));
    }
    messages.into_iter().enumerate().map(|(at, message)| message.value(at)).collect()
}

/// Request that was checked.
struct Checked {
    plan: Plan,
    include_usage: bool,
    id: String,
}

impl ChatRequest {
    /// Checks the request, renders the conversation and tokenizes it.
    fn check(self, app: &App, artifact: Arc<Artifact>) -> Result<(Checked, Vec<Job>), ApiError> {
        if let Some(format) = self.response_format.as_ref().filter(|format| format["type"] != "text") {
            return Err(ApiError::field("response_format.type", &format["type"], "text"));
        }
        if self.tools.as_ref().is_some_and(|tools| !tools.is_empty()) {
            return Err(ApiError::field("tools", "tools", "none"));
        }
        let reports = self.logprobs.unwrap_or(false);
        if self.top_logprobs.is_some_and(|n| n > 0) && !reports {
            return Err(ApiError::field("top_logprobs", "a number", "none unless logprobs is true"));
        }
        let sampled = Sampled {
            max_tokens: self.max_completion_tokens.or(self.max_tokens),
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            min_p: self.min_p,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            repetition_penalty: self.repetition_penalty,
            n: self.n,
            seed: self.seed,
            stop: self.stop,
            logprobs: reports.then_some(self.top_logprobs.unwrap_or(0)),
            logit_bias: self.logit_bias,
            ignore_eos: self.ignore_eos,
        };
        let params = sampled.check(&app.limits, &artifact, app.random())?;
        let variables = Variables {
            tools: None,
            add_generation_prompt: self.add_generation_prompt.unwrap_or(true),
            other: self.chat_template_kwargs.unwrap_or_default(),
        };
        let text = render(app, &artifact, &values(self.messages)?, variables)?;
        // A chat template writes the special tokens itself.
        let prompts = vec![encode(&artifact, &text, Bos::Never)?];
        let plan = Plan { artifact, params, prompts, default_tokens: None };
        let jobs = plan.jobs(app, None)?;
        let include_usage = wants_usage(self.stream_options);
        Ok((Checked { plan, include_usage, id: app.id("chatcmpl-") }, jobs))
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
    fn generation(&self, stream: Stream) -> Result<Generation<'_>, ApiError> {
        let plan = &self.plan;
        Generation::new(&plan.artifact.tokenizer, stream, plan.choices(), &plan.params.stops)
    }

    fn usage(&self, generation: &Generation<'_>) -> Usage {
        Usage::new(self.plan.prompt_tokens(), generation.generated(), generation.cached())
    }

    fn logprobs(&self, infos: Vec<TokenInfo>) -> Option<ChatLogprobs> {
        let content = || infos.into_iter().map(TokenLogprob::from).collect();
        self.plan.params.logprobs.map(|_| ChatLogprobs { content: content() })
    }

    /// Waits for the whole answer.
    async fn collect(&self, stream: Stream) -> Result<ChatResponse, ApiError> {
        let mut generation = self.generation(stream)?;
        let mut all: Vec<Delta> =
            (0..self.plan.params.n).map(|index| Delta { index, ..Delta::default() }).collect();
        while let Some(delta) = generation.next().await? {
            let choice = &mut all[delta.index];
            choice.text += &delta.text;
            choice.infos.extend(delta.infos);
            choice.finish = delta.finish;
        }
        let choice = |delta: Delta| ChatChoice {
            index: delta.index,
            message: AnswerMessage { role: "assistant", content: Some(delta.text) },
            logprobs: self.logprobs(delta.infos),
            finish_reason: delta.finish.as_ref().map(reason),
        };
        Ok(ChatResponse {
            id: self.id.clone(),
            object: "chat.completion",
            created: now(),
            model: self.plan.artifact.name.clone(),
            choices: all.into_iter().map(choice).collect(),
            usage: self.usage(&generation),
        })
    }

    fn chunk(&self, choices: Vec<ChunkChoice>, usage: Option<Usage>, created: u64) -> ChatChunk {
        ChatChunk {
            id: self.id.clone(),
            object: "chat.completion.chunk",
            created,
            model: self.plan.artifact.name.clone(),
            choices,
            usage,
        }
    }

    /// Sends the pieces of the answer as they come.
    async fn stream(self, stream: Stream, events: Events) -> Result<(), Gone> {
        let sent = self.pieces(stream, &events, now()).await;
        events.end(sent).await
    }

    async fn pieces(&self, stream: Stream, events: &Events, created: u64) -> Result<(), Cut> {
        let mut generation = self.generation(stream)?;
        let mut begun = vec![false; self.plan.params.n];
        while let Some(delta) = generation.next().await? {
            let Delta { index, text, infos, finish, .. } = delta;
            if !std::mem::replace(&mut begun[index], true) {
                let delta = AnswerDelta { role: Some("assistant"), content: Some(String::new()) };
                let first = ChunkChoice { index, delta, ..ChunkChoice::default() };
                events.send(&self.chunk(vec![first], None, created)).await?;
            }
            if !text.is_empty() || !infos.is_empty() {
                let delta = AnswerDelta { role: None, content: Some(text) };
                let logprobs = self.logprobs(infos);
                let choice = ChunkChoice { index, delta, logprobs, finish_reason: None };
                events.send(&self.chunk(vec![choice], None, created)).await?;
            }
            if let Some(finish) = finish {
                let finish_reason = Some(reason(&finish));
                let last = ChunkChoice { index, finish_reason, ..ChunkChoice::default() };
                events.send(&self.chunk(vec![last], None, created)).await?;
            }
        }
        if self.include_usage {
            events.send(&self.chunk(Vec::new(), Some(self.usage(&generation)), created)).await?;
        }
        Ok(())
    }
}

/// Answers a conversation.
#[utoipa::path(
    post,
    path = "/v1/chat/completions",
    request_body = ChatRequest,
    responses(
        (
            status = 200,
            description = "The answer, or events with pieces of it",
            content((ChatResponse = "application/json"), (String = "text/event-stream"))
        ),
        super::openapi::Errors,
    )
)]
pub(crate) async fn completions(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Body(request): Body<ChatRequest>,
) -> Result<Response, ApiError> {
    let artifact = app.artifact(request.model.as_deref())?;
    let streams = request.stream.unwrap_or(false);
    let (checked, jobs) = prepare(&app, move |app| request.check(app, artifact)).await?;
    let stream = submit(&app, &checked.plan.artifact, jobs, caller)?;
    if streams {
        return Ok(sse::respond(app.limits.write_time, |events| checked.stream(stream, events)));
    }
    Ok(Json(checked.collect(stream).await?).into_response())
}

/// Conversation to be rendered.
#[derive(Clone, Debug, Deserialize, ToSchema)]
pub(crate) struct TemplateRequest {
    model: Option<String>,
    messages: Vec<ChatMessage>,
    #[schema(value_type = Option<Vec<Object>>)]
    tools: Option<Vec<Value>>,
    #[schema(value_type = Option<Object>)]
    chat_template_kwargs: Option<Map<String, Value>>,
    add_generation_prompt: Option<bool>,
}

/// Text of a conversation.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TemplateResponse {
    prompt: String,
}

/// Renders a conversation with the chat template of the model.
#[utoipa::path(
    post,
    path = "/apply-template",
    request_body = TemplateRequest,
    responses((status = 200, description = "The text", body = TemplateResponse), super::openapi::Errors)
)]
pub(crate) async fn apply_template(
    State(app): State<Arc<App>>,
    Body(request): Body<TemplateRequest>,
) -> Result<Json<TemplateResponse>, ApiError> {
    let artifact = app.artifact(request.model.as_deref())?;
    let work = move |app: &App| {
        let variables = Variables {
            tools: request.tools.map(Value::from),
            add_generation_prompt: request.add_generation_prompt.unwrap_or(true),
            other: request.chat_template_kwargs.unwrap_or_default(),
        };
        let prompt = render(app, &artifact, &values(request.messages)?, variables)?;
        Ok(Json(TemplateResponse { prompt }))
    };
    prepare(&app, work).await
}

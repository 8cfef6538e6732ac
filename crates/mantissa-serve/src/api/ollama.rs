//! `/api/chat`, `/api/generate`, `/api/embed`: Ollama's API, for its clients.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use mantissa_runtime::Pooling;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use utoipa::ToSchema;
use utoipa_axum::routes;

use super::answer::Answer;
use super::body::{Body, Sampling};
use super::chat::ChatRequest;
use super::continuation::{self, Nothing, PromptPart};
use super::embedding_input::normalize;
use super::embeddings::{Asked, Embedded, embed as embed_texts};
use super::notes::note;
use super::ollama_convert::{
    CHAT_FIELDS, EMBED_FIELDS, GENERATE_FIELDS, chat, check_generate, flag, generate, model, sampling,
    streams, text,
};
use super::ollama_error::Errors;
use super::ollama_reply::{OllamaReply, Place};
use super::preparation::{aside, prepare};
use super::{ApiError, App, Artifact, Endpoints, streamed, unknown};
use crate::engine::Caller;
use crate::reasoning::Marks;

/// Request of Ollama's API.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(transparent)]
pub(crate) struct OllamaRequest {
    #[schema(value_type = Object)]
    pub(super) body: Value,
}

/// Embeddings of texts.
#[derive(Debug, Serialize, ToSchema)]
struct EmbedResponse {
    model: String,
    embeddings: Vec<Vec<f32>>,
    /// Nanoseconds from the arrival of the request.
    total_duration: u64,
    load_duration: u64,
    prompt_eval_count: usize,
}

/// Lists the endpoints of this file.
pub(super) fn endpoints() -> Endpoints {
    Endpoints::new()
        .routes(routes!(answer_chat))
        .routes(routes!(answer_prompt))
        .routes(routes!(embed))
        .routes(routes!(embeddings))
}

/// Checks the fields of a request and finds its model.
fn begin(app: &App, body: &Value, known: &[&str]) -> Result<Arc<Artifact>, ApiError> {
    if !body.is_object() {
        return Err(ApiError::bad("expected a JSON object"));
    }
    unknown::check_fields(body, known)?;
    if model(body)?.is_none() {
        return Err(ApiError::field("model", "nothing", "the name of a model"));
    }
    app.artifact(model(body)?)
}

/// Checks what a request wants of a model: thoughts of one that thinks. Notes what it does not get.
fn check_wishes(body: &Value, artifact: &Artifact) -> Result<(), ApiError> {
    let thinks = !matches!(body["think"], Value::Null | Value::Bool(false));
    if thinks && Marks::of(artifact.tokenizer.chat_template()).is_none() {
        let allowed = format!("false: the chat template of {} has no thoughts", artifact.name);
        return Err(ApiError::field("think", &body["think"], &allowed));
    }
    let (asked, context) = (&body["options"]["num_ctx"], artifact.engine.runtime().context);
    if asked.as_u64().is_some_and(|asked| asked > context as u64) {
        note(format!(
            "options.num_ctx: {asked} is more than the {context} tokens of this server (--context)"
        ));
    }
    if unloads(body) {
        note("keep_alive: models stay loaded as long as the server runs");
    }
    Ok(())
}

/// True if a request asks for the model to be unloaded.
fn unloads(body: &Value) -> bool {
    body["keep_alive"] == 0 || matches!(body["keep_alive"].as_str(), Some("0" | "0s" | "0m" | "0h"))
}

/// Answers a request without a prompt: the model is there.
fn loaded(place: Place, artifact: &Artifact) -> Response {
    Json(OllamaReply::new(place, &artifact.name, Instant::now()).empty("load")).into_response()
}

/// Answers a conversation.
#[utoipa::path(
    post,
    path = "/api/chat",
    request_body = OllamaRequest,
    responses((status = 200, description = "The answer as lines of JSON, or whole with stream false", content((Value = "application/json"), (Value = "application/x-ndjson"))), Errors)
)]
pub(crate) async fn answer_chat(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Body(OllamaRequest { body }, bytes): Body<OllamaRequest>,
) -> Result<Response, ApiError> {
    let arrived = Instant::now();
    let artifact = begin(&app, &body, CHAT_FIELDS)?;
    check_wishes(&body, &artifact)?;
    if body["messages"].is_null() || body["messages"] == json!([]) {
        return Ok(loaded(Place::Message, &artifact));
    }
    let request = sampling(&body, chat(&body)?, bytes)?;
    converse(&app, caller, (artifact, request), streams(&body)?, (Place::Message, arrived)).await
}

/// Answers a conversation.
async fn converse(
    app: &Arc<App>,
    caller: Caller,
    (artifact, request): (Arc<Artifact>, Sampling<ChatRequest>),
    streams: bool,
    (place, arrived): (Place, Instant),
) -> Result<Response, ApiError> {
    let Sampling { request, sampled, form, bytes } = request;
    let checked = prepare(app, caller, bytes, move |app| request.check(sampled, form, app, artifact)).await?;
    let reply = |answer: &Answer| OllamaReply::new(place, answer.model(), arrived);
    streamed::answer_checked(app, caller, checked, streams, reply).await
}

/// Answers a prompt.
#[utoipa::path(
    post,
    path = "/api/generate",
    request_body = OllamaRequest,
    responses((status = 200, description = "The answer as lines of JSON, or whole with stream false", content((Value = "application/json"), (Value = "application/x-ndjson"))), Errors)
)]
pub(crate) async fn answer_prompt(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Body(OllamaRequest { body }, bytes): Body<OllamaRequest>,
) -> Result<Response, ApiError> {
    let place = (Place::Response, Instant::now());
    let artifact = begin(&app, &body, GENERATE_FIELDS)?;
    check_generate(&body)?;
    check_wishes(&body, &artifact)?;
    let prompt = text(&body, "prompt")?;
    if prompt.is_empty() {
        return Ok(loaded(Place::Response, &artifact));
    }
    let raw = flag(&body, "raw", false)?;
    let streams = streams(&body)?;
    if !raw && artifact.tokenizer.chat_template().is_some() {
        let request = sampling(&body, generate(&body)?, bytes)?;
        return converse(&app, caller, (artifact, request), streams, place).await;
    }
    if !text(&body, "system")?.is_empty() {
        let allowed = if raw { "none with raw" } else { "none: the model has no chat template" };
        return Err(ApiError::field("system", "a text", allowed));
    }
    let prompt = vec![PromptPart::Text(prompt.to_owned())];
    let request = sampling::<Nothing>(&body, serde_json::Map::new(), bytes)?;
    let checked = continuation::check(&app, caller, artifact, prompt, request).await?;
    let reply = |answer: &Answer| OllamaReply::new(place.0, answer.model(), place.1);
    streamed::answer_checked(&app, caller, checked, streams, reply).await
}

/// Computes embeddings of length 1.
#[utoipa::path(
    post,
    path = "/api/embed",
    request_body = OllamaRequest,
    responses((status = 200, description = "The embeddings", body = EmbedResponse), Errors)
)]
pub(crate) async fn embed(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Body(OllamaRequest { body }, bytes): Body<OllamaRequest>,
) -> Result<Response, ApiError> {
    let arrived = Instant::now();
    let artifact = begin(&app, &body, EMBED_FIELDS)?;
    let width = artifact.model.config().hidden_size;
    let dimensions = &body["dimensions"];
    if !dimensions.is_null() && *dimensions != 0 && *dimensions != width {
        return Err(ApiError::field("dimensions", dimensions, &width.to_string()));
    }
    let input = body["input"].clone();
    let name = artifact.name.clone();
    if input.is_null() || input == "" || input == json!([]) {
        return Ok(Json(json!({ "model": name, "embeddings": [] })).into_response());
    }
    let cuts = flag(&body, "truncate", true)?;
    let asked = Asked { input, pooling: Pooling::Mean, cuts, bytes };
    let Embedded { mut vectors, tokens, cut } = embed_texts(&app, caller, &artifact, asked).await?;
    if cut > 0 {
        let context = artifact.engine.runtime().context;
        note(format!("truncate: {cut} of {} texts were cut to {context} tokens", vectors.len()));
    }
    // Thousands of vectors take a while to be written.
    aside(bytes, move || {
        vectors.iter_mut().for_each(|vector| normalize(vector));
        let total_duration = u64::try_from(arrived.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let load_duration = 0;
        Json(EmbedResponse {
            model: name,
            embeddings: vectors,
            total_duration,
            load_duration,
            prompt_eval_count: tokens,
        })
        .into_response()
    })
    .await
}

/// Computes the embedding of one text, as the model has it.
#[utoipa::path(
    post,
    path = "/api/embeddings",
    request_body = OllamaRequest,
    responses((status = 200, description = "The embedding", body = Value), Errors)
)]
pub(crate) async fn embeddings(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Body(OllamaRequest { body }, bytes): Body<OllamaRequest>,
) -> Result<Response, ApiError> {
    let artifact = begin(&app, &body, EMBED_FIELDS)?;
    let prompt = text(&body, "prompt")?;
    if prompt.is_empty() {
        return Ok(Json(json!({ "embedding": [] })).into_response());
    }
    let asked = Asked { input: json!(prompt), pooling: Pooling::Mean, cuts: false, bytes };
    let Embedded { vectors, .. } = embed_texts(&app, caller, &artifact, asked)
        .await
        .map_err(|error| if error.param.is_some() { error.param("prompt") } else { error })?;
    Ok(Json(json!({ "embedding": vectors.into_iter().next().unwrap_or_default() })).into_response())
}

//! `/v1/messages`: Anthropic's Messages API. `/v1/messages/count_tokens`: tokens of a conversation.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use axum::{Extension, Json};
use serde::Deserialize;
use serde_json::{Value, json};
use utoipa::ToSchema;
use utoipa_axum::routes;

use super::answer::Answer;
use super::anthropic_error::{Errors, MessagesError};
use super::anthropic_reply::AnthropicReply;
use super::body::{Body, Sampling};
use super::chat::ChatRequest;
use super::convert::{ANTHROPIC_FIELDS, FieldError, anthropic_to_chat};
use super::{ApiError, App, Endpoints, streamed, unknown};
use crate::engine::Caller;

/// Request of a message.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(transparent)]
pub(crate) struct MessagesRequest {
    #[schema(value_type = Object)]
    body: Value,
}

/// Body of a request, whose faults are reported in Anthropic's form.
type Request = Result<Body<MessagesRequest>, ApiError>;

/// Reads the request as one of the chat API.
fn chat(body: &Value, bytes: usize) -> Result<Sampling<ChatRequest>, ApiError> {
    if !body.is_object() {
        return Err(ApiError::bad("expected a JSON object"));
    }
    unknown::check_fields(body, ANTHROPIC_FIELDS)?;
    unknown::check_within(body, "output_config", &["effort", "format"])?;
    Sampling::of(
        anthropic_to_chat(body)?,
        bytes,
        &[("stop", "stop_sequences"), ("reasoning_budget", "thinking.budget_tokens")],
    )
}

/// Lists the endpoints of this file.
pub(super) fn endpoints() -> Endpoints {
    Endpoints::new().routes(routes!(messages)).routes(routes!(count_tokens))
}

/// Answers a conversation.
#[utoipa::path(
    post,
    path = "/v1/messages",
    request_body = MessagesRequest,
    responses((status = 200, description = "The message, or events with pieces of it", content((Value = "application/json"), (super::sse::Event = "text/event-stream"))), Errors)
)]
pub(crate) async fn messages(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Response, MessagesError> {
    let Body(MessagesRequest { body }, bytes) = request?;
    let limit = &body["max_tokens"];
    if limit.as_u64().is_none_or(|n| n == 0) {
        return Err(ApiError::from(FieldError::new("max_tokens", "a number of at least 1", limit)).into());
    }
    let chat = chat(&body, bytes)?;
    let reply = |answer: &Answer| AnthropicReply::new(answer.number, &answer.id(), answer.model());
    Ok(streamed::answer(&app, caller, chat, body["stream"] == true, reply).await?)
}

/// Counts the tokens of a conversation.
#[utoipa::path(
    post,
    path = "/v1/messages/count_tokens",
    request_body = MessagesRequest,
    responses((status = 200, description = "The number of tokens", body = Value), Errors)
)]
pub(crate) async fn count_tokens(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    request: Request,
) -> Result<Json<Value>, MessagesError> {
    let Body(MessagesRequest { mut body }, bytes) = request?;
    if body.is_object() {
        body["max_tokens"] = json!(1);
    }
    let (answer, _) = streamed::check(&app, caller, chat(&body, bytes)?).await?;
    Ok(Json(json!({ "input_tokens": answer.plan.prompt_tokens() })))
}

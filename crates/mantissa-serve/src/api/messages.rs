//! `/v1/messages`: Anthropic's Messages API. `/v1/messages/count_tokens`: tokens of a conversation.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use utoipa::{IntoResponses, ToSchema};

use super::answer::Answer;
use super::anthropic_reply::AnthropicReply;
use super::body::{Body, Sampling};
use super::chat::ChatRequest;
use super::convert::{FieldError, anthropic_to_chat};
use super::error::ErrorBody;
use super::{ApiError, App, streamed};
use crate::engine::Caller;

/// Request of a message. Fields that are not listed, such as `metadata`, are ignored.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(transparent)]
pub(crate) struct MessagesRequest {
    #[schema(value_type = Object)]
    body: Value,
}

/// Error in the form of Anthropic's API.
#[derive(Debug)]
pub(crate) struct MessagesError(ApiError);

impl From<ApiError> for MessagesError {
    fn from(error: ApiError) -> Self {
        MessagesError(error)
    }
}

impl From<FieldError> for ApiError {
    fn from(error: FieldError) -> Self {
        ApiError::bad(error.to_string()).param(error.field)
    }
}

/// Body of an error response.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct MessagesErrorBody {
    /// `error`.
    #[serde(rename = "type")]
    kind: &'static str,
    error: MessagesErrorFields,
}

/// Description of an error.
#[derive(Debug, Serialize, ToSchema)]
struct MessagesErrorFields {
    #[serde(rename = "type")]
    kind: &'static str,
    message: String,
}

/// Errors of these endpoints; those of the connection have the shape of OpenAI's API.
#[derive(IntoResponses)]
#[allow(dead_code)]
pub(crate) enum Errors {
    /// A field is missing, of another type or out of range
    #[response(status = 400)]
    Bad(MessagesErrorBody),
    /// No key that is known
    #[response(status = 401)]
    Unauthorized(ErrorBody),
    /// A host of another name
    #[response(status = 403)]
    Forbidden(ErrorBody),
    /// No model of this name
    #[response(status = 404)]
    NotFound(MessagesErrorBody),
    /// The body took too long
    #[response(status = 408)]
    Slow(MessagesErrorBody),
    /// The body is too large
    #[response(status = 413)]
    Large(MessagesErrorBody),
    /// The body is not said to be JSON
    #[response(status = 415)]
    Type(MessagesErrorBody),
    /// Too many requests of this client wait
    #[response(status = 429)]
    Client(MessagesErrorBody),
    /// A fault of the server
    #[response(status = 500)]
    Fault(MessagesErrorBody),
    /// The queue is full, or the server stops
    #[response(status = 503)]
    Busy(MessagesErrorBody),
}

impl MessagesError {
    fn kind(&self) -> &'static str {
        match self.0.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::FORBIDDEN => "permission_error",
            StatusCode::NOT_FOUND => "not_found_error",
            StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
            status if status.is_client_error() => "invalid_request_error",
            _ => "api_error",
        }
    }

    /// Body of the response, and data of the event `error`.
    pub(crate) fn body(&self) -> MessagesErrorBody {
        let error = MessagesErrorFields { kind: self.kind(), message: self.0.message.clone() };
        MessagesErrorBody { kind: "error", error }
    }
}

impl IntoResponse for MessagesError {
    fn into_response(self) -> Response {
        let body = Json(self.body());
        let (mut parts, _) = self.0.into_response().into_parts();
        parts.headers.remove(axum::http::header::CONTENT_LENGTH);
        (parts.status, parts.headers, body).into_response()
    }
}

/// Body of a request, whose faults are reported in Anthropic's form.
type Request = Result<Body<MessagesRequest>, ApiError>;

/// Reads the request as one of the chat API.
fn chat(body: &Value) -> Result<Sampling<ChatRequest>, ApiError> {
    if !body.is_object() {
        return Err(ApiError::bad("expected a JSON object"));
    }
    Sampling::of(
        anthropic_to_chat(body)?,
        &[("stop", "stop_sequences"), ("reasoning_budget", "thinking.budget_tokens")],
    )
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
    let body = request?.0.body;
    let limit = &body["max_tokens"];
    if limit.as_u64().is_none_or(|n| n == 0) {
        return Err(ApiError::from(FieldError::new("max_tokens", "a number of at least 1", limit)).into());
    }
    let chat = chat(&body)?;
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
    request: Request,
) -> Result<Json<Value>, MessagesError> {
    let mut body = request?.0.body;
    if body.is_object() {
        body["max_tokens"] = json!(1);
    }
    let (answer, _) = streamed::check(&app, chat(&body)?).await?;
    Ok(Json(json!({ "input_tokens": answer.plan.prompt_tokens() })))
}

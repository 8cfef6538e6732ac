//! `/v1/responses`: OpenAI's Responses API, without stored responses.

use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::response::Response;
use serde::Deserialize;
use serde_json::Value;
use utoipa::ToSchema;
use utoipa_axum::routes;

use super::answer::Answer;
use super::body::{Body, Sampling};
use super::chat::ChatRequest;
use super::convert::{RESPONSES_FIELDS, responses_to_chat};
use super::responses_reply::ResponsesReply;
use super::{ApiError, App, Endpoints, now, streamed, unknown};
use crate::engine::Caller;

/// Request of a response.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(transparent)]
pub(crate) struct ResponsesRequest {
    #[schema(value_type = Object)]
    body: Value,
}

/// Reads the request as one of the chat API.
fn chat(body: &Value, bytes: usize) -> Result<Sampling<ChatRequest>, ApiError> {
    if !body.is_object() {
        return Err(ApiError::bad("expected a JSON object"));
    }
    unknown::check_fields(body, RESPONSES_FIELDS)?;
    Sampling::of(
        responses_to_chat(body)?,
        bytes,
        &[("max_tokens", "max_output_tokens"), ("reasoning_effort", "reasoning.effort")],
    )
}

/// Lists the endpoints of this file.
pub(super) fn endpoints() -> Endpoints {
    Endpoints::new().routes(routes!(responses))
}

/// Answers a conversation.
#[utoipa::path(
    post,
    path = "/v1/responses",
    request_body = ResponsesRequest,
    responses((status = 200, description = "The response, or events with pieces of it", content((Value = "application/json"), (super::sse::Event = "text/event-stream"))), crate::error::Errors)
)]
pub(crate) async fn responses(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Body(request, bytes): Body<ResponsesRequest>,
) -> Result<Response, ApiError> {
    let body = request.body;
    let chat = chat(&body, bytes)?;
    let reply =
        |answer: &Answer| ResponsesReply::new(answer.number, &answer.id(), answer.model(), now(), &body);
    streamed::answer(&app, caller, chat, body["stream"] == true, reply).await
}

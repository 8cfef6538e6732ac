//! `/v1/responses`: OpenAI's Responses API, without stored responses.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use serde::Deserialize;
use serde_json::Value;
use utoipa::ToSchema;

use super::answer::Answer;
use super::body::Body;
use super::chat::ChatRequest;
use super::convert::responses_to_chat;
use super::generate::{prepare, submit};
use super::reply::End;
use super::responses_reply::ResponsesReply;
use super::sse::{self, Cut, Events, Gone};
use super::{ApiError, App, now};
use crate::engine::{Caller, Stream};

/// Request of a response.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(transparent)]
pub(crate) struct ResponsesRequest {
    #[schema(value_type = Object)]
    body: Value,
}

/// Reads the request as one of the chat API.
fn chat(body: &Value) -> Result<ChatRequest, ApiError> {
    if !body.is_object() {
        return Err(ApiError::bad("expected a JSON object"));
    }
    let chat = responses_to_chat(body)?;
    serde_path_to_error::deserialize(chat).map_err(|error| {
        let path = error.path().to_string();
        let path = if path == "max_tokens" { "max_output_tokens".to_owned() } else { path };
        ApiError::bad(format!("{path}: {}", error.into_inner())).param(path)
    })
}

/// Response that was checked.
struct Checked {
    answer: Answer,
    body: Value,
}

impl Checked {
    fn reply(&self) -> ResponsesReply {
        ResponsesReply::new(self.answer.number, &self.answer.id(), self.answer.model(), now(), &self.body)
    }

    async fn collect(&self, stream: Stream) -> Result<Value, ApiError> {
        let mut parts = self.answer.parts(stream)?;
        let (mut reply, mut end) = (self.reply(), End::Stop);
        while let Some(part) = parts.next().await? {
            part.pieces.into_iter().for_each(|piece| _ = reply.push(piece));
            end = part.end.unwrap_or(end);
        }
        reply.finish(&end, parts.usage());
        Ok(reply.response(&end, parts.usage()))
    }

    async fn stream(self, stream: Stream, events: Events) -> Result<(), Gone> {
        let mut reply = self.reply();
        match self.events(stream, &events, &mut reply).await {
            Ok(()) => Ok(()),
            Err(Cut::Gone) => Err(Gone),
            Err(Cut::Failed(error)) => events.all(reply.fail(&error.message)).await,
        }
    }

    async fn events(&self, stream: Stream, events: &Events, reply: &mut ResponsesReply) -> Result<(), Cut> {
        let mut parts = self.answer.parts(stream)?;
        events.all(reply.start()).await?;
        while let Some(part) = parts.next().await? {
            for piece in part.pieces {
                events.all(reply.push(piece)).await?;
            }
            if let Some(end) = part.end {
                events.all(reply.finish(&end, parts.usage())).await?;
            }
        }
        Ok(())
    }
}

/// Answers a conversation.
#[utoipa::path(
    post,
    path = "/v1/responses",
    request_body = ResponsesRequest,
    responses((status = 200, description = "The response, or events with pieces of it", content((Value = "application/json"), (String = "text/event-stream"))), super::openapi::Errors)
)]
pub(crate) async fn responses(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
    Body(request): Body<ResponsesRequest>,
) -> Result<Response, ApiError> {
    let body = request.body;
    let request = chat(&body)?;
    let artifact = app.artifact(request.model())?;
    let (answer, jobs) = prepare(&app, move |app| request.check(app, artifact)).await?;
    let streams = body["stream"] == true;
    let checked = Checked { answer, body };
    let stream = submit(&app, &checked.answer.plan.artifact, jobs, caller)?;
    if streams {
        return Ok(sse::respond(app.limits.write_time, |events| checked.stream(stream, events)));
    }
    Ok(Json(checked.collect(stream).await?).into_response())
}

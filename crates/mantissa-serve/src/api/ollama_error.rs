//! Errors in the shape of Ollama's API.

use axum::Json;
use axum::extract::Request;
use axum::http::header;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::{IntoResponses, ToSchema};

use super::ApiError;
use super::body::is_ollama;
use crate::error::Said;

/// Body of an error response.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct OllamaErrorBody {
    error: String,
}

impl From<ApiError> for OllamaErrorBody {
    fn from(error: ApiError) -> Self {
        OllamaErrorBody { error: error.message }
    }
}

/// Errors that every endpoint of Ollama's API may answer.
#[derive(IntoResponses)]
#[allow(dead_code)]
pub(crate) enum Errors {
    /// A field is missing, of another type or out of range
    #[response(status = 400)]
    Bad(OllamaErrorBody),
    /// No key that is known
    #[response(status = 401)]
    Unauthorized(OllamaErrorBody),
    /// A host of another name
    #[response(status = 403)]
    Forbidden(OllamaErrorBody),
    /// No model of this name
    #[response(status = 404)]
    NotFound(OllamaErrorBody),
    /// The body took too long
    #[response(status = 408)]
    Slow(OllamaErrorBody),
    /// The body is too large
    #[response(status = 413)]
    Large(OllamaErrorBody),
    /// The body is not said to be JSON
    #[response(status = 415)]
    Type(OllamaErrorBody),
    /// Too many requests of this client wait
    #[response(status = 429)]
    Client(OllamaErrorBody),
    /// A fault of the server
    #[response(status = 500)]
    Fault(OllamaErrorBody),
    /// This server does not manage models
    #[response(status = 501)]
    Unmanaged(OllamaErrorBody),
    /// The queue is full, or the server stops
    #[response(status = 503)]
    Busy(OllamaErrorBody),
}

/// Gives the errors of Ollama's paths the shape that its clients read, those of the checks before an endpoint too.
pub(crate) async fn errors(request: Request, next: Next) -> Response {
    let theirs = is_ollama(request.uri().path());
    let mut response = next.run(request).await;
    if !theirs {
        return response;
    }
    let Some(Said(error)) = response.extensions_mut().remove() else { return response };
    let (mut parts, _) = response.into_parts();
    parts.headers.remove(header::CONTENT_LENGTH);
    (parts, Json(OllamaErrorBody { error })).into_response()
}

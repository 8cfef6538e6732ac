//! Errors in the shape of Anthropic's API.

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::{IntoResponses, ToSchema};

use super::ApiError;
use super::convert::FieldError;
use crate::error::ErrorBody;

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

/// Errors of these endpoints. Errors of the connection have the shape of OpenAI's API.
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

//! Errors in the shape of OpenAI's API.

use std::time::Duration;

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use mantissa_model::TokenizerError;
use serde::Serialize;
use utoipa::{IntoResponses, ToSchema};

use crate::engine::{Failure, Refused};

/// Error of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ApiError {
    pub(crate) status: StatusCode,
    /// Kind of the error, such as `invalid_request_error`.
    pub(crate) kind: &'static str,
    pub(crate) message: String,
    /// Field at fault.
    pub(crate) param: Option<String>,
    pub(crate) code: Option<&'static str>,
    /// Time after which the same request may succeed.
    pub(crate) retry: Option<Duration>,
}

/// Body of an error response.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ErrorBody {
    error: ErrorFields,
}

/// Description of an error.
#[derive(Debug, Serialize, ToSchema)]
struct ErrorFields {
    message: String,
    #[serde(rename = "type")]
    kind: &'static str,
    param: Option<String>,
    code: Option<&'static str>,
}

/// Errors that every endpoint with a body may answer.
#[derive(IntoResponses)]
#[allow(dead_code)]
pub(crate) enum Errors {
    /// A field is missing, of another type or out of range
    #[response(status = 400)]
    Bad(ErrorBody),
    /// No key that is known
    #[response(status = 401)]
    Unauthorized(ErrorBody),
    /// A host of another name
    #[response(status = 403)]
    Forbidden(ErrorBody),
    /// No model of this name
    #[response(status = 404)]
    NotFound(ErrorBody),
    /// The body took too long
    #[response(status = 408)]
    Slow(ErrorBody),
    /// The body is too large
    #[response(status = 413)]
    Large(ErrorBody),
    /// The body is not said to be JSON
    #[response(status = 415)]
    Type(ErrorBody),
    /// Too many requests of this client wait
    #[response(status = 429)]
    Client(ErrorBody),
    /// A fault of the server
    #[response(status = 500)]
    Fault(ErrorBody),
    /// The queue is full, or the server stops
    #[response(status = 503)]
    Busy(ErrorBody),
}

impl ApiError {
    pub(crate) fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        ApiError { status, kind, message: message.into(), param: None, code: None, retry: None }
    }

    /// A request that cannot be served as it is: status 400.
    pub(crate) fn bad(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
    }

    /// A field with a value that is not allowed: status 400.
    pub(crate) fn field(name: impl Into<String>, found: impl std::fmt::Display, allowed: &str) -> Self {
        let name = name.into();
        let found = short(&found.to_string());
        let error = Self::bad(format!("{name}: expected {allowed}, got {found}"));
        ApiError { param: Some(name), ..error }
    }

    /// A fault of the server: status 500.
    pub(crate) fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message)
    }

    /// Adds a code.
    pub(crate) fn code(self, code: &'static str) -> Self {
        ApiError { code: Some(code), ..self }
    }

    /// Adds the name of the field at fault.
    pub(crate) fn param(self, name: impl Into<String>) -> Self {
        ApiError { param: Some(name.into()), ..self }
    }

    /// A server that cannot take the request now: status 429 or 503.
    pub(crate) fn busy(status: StatusCode, message: &str, code: &'static str, retry: Duration) -> Self {
        let kind =
            if status == StatusCode::TOO_MANY_REQUESTS { "rate_limit_error" } else { "overloaded_error" };
        ApiError { retry: Some(retry), ..Self::new(status, kind, message).code(code) }
    }

    /// A job that failed.
    pub(crate) fn failed(failure: &Failure) -> Self {
        let message = failure.to_string();
        match failure {
            Failure::Panicked => Self::internal(message),
            Failure::Model(_) => Self::internal(message).code("model_failed"),
            Failure::Request(_) => Self::bad(message),
            Failure::Stopping => stopping(),
            Failure::Late => {
                let status = StatusCode::SERVICE_UNAVAILABLE;
                Self::busy(status, &message, "time_limit", Duration::from_secs(10))
            }
        }
    }

    /// Body of the response.
    pub(crate) fn body(&self) -> ErrorBody {
        let ApiError { kind, message, param, code, .. } = self.clone();
        ErrorBody { error: ErrorFields { message, kind, param, code } }
    }
}

/// Makes the error of a server that stops.
pub(crate) fn stopping() -> ApiError {
    let status = StatusCode::SERVICE_UNAVAILABLE;
    ApiError::busy(status, "the server is stopping", "stopping", Duration::from_secs(5))
}

impl From<Refused> for ApiError {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::Stopping => stopping(),
            Refused::Full { retry } => {
                let status = StatusCode::SERVICE_UNAVAILABLE;
                Self::busy(
                    status,
                    "the queue is full; retry after the time in Retry-After",
                    "queue_full",
                    retry,
                )
            }
            Refused::ClientFull { retry } => {
                let message = "too many requests of this client wait; retry after the time in Retry-After";
                Self::busy(StatusCode::TOO_MANY_REQUESTS, message, "client_queue_full", retry)
            }
        }
    }
}

impl From<TokenizerError> for ApiError {
    fn from(error: TokenizerError) -> Self {
        match error {
            TokenizerError::TextTooLong { found, allowed, .. } => {
                Self::bad(format!("expected a text of at most {allowed} bytes, got {found}"))
            }
            // The path of the model's files is nobody's business.
            _ => Self::internal("the tokenizer failed on this text"),
        }
    }
}

/// Message of an error response, for APIs whose errors have another shape.
#[derive(Clone, Debug)]
pub(crate) struct Said(pub(crate) String);

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.body())).into_response();
        response.extensions_mut().insert(Said(self.message));
        if let Some(retry) = self.retry {
            let seconds = retry.as_secs().max(1);
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

/// Shortens a value of a request for a message.
pub(crate) fn short(text: &str) -> String {
    const MOST: usize = 80;
    let mut shown: String = text.chars().take(MOST).map(|c| if c.is_control() { ' ' } else { c }).collect();
    if text.chars().nth(MOST).is_some() {
        shown.push('…');
    }
    shown
}

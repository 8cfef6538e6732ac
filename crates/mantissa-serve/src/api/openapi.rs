//! `/openapi.json`: the description of the API.

use axum::Json;
use utoipa::openapi::OpenApi as Description;
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::{IntoResponses, Modify, OpenApi};

use super::error::ErrorBody;
use super::{chat, compare, completions, embeddings, messages, models, responses, status, tokens, turn};

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

/// Adds the keys to the description.
struct Key;

impl Modify for Key {
    fn modify(&self, api: &mut Description) {
        let scheme = SecurityScheme::Http(HttpBuilder::new().scheme(HttpAuthScheme::Bearer).build());
        api.components.get_or_insert_default().add_security_scheme("key", scheme);
    }
}

/// Description of the API.
#[derive(OpenApi)]
#[openapi(
    info(title = "mantissa serve", description = "Models over HTTP, for clients of OpenAI's API."),
    paths(
        chat::completions,
        completions::completions,
        compare::compare,
        responses::responses,
        messages::messages,
        messages::count_tokens,
        embeddings::embeddings,
        models::list,
        models::one,
        tokens::tokenize,
        tokens::detokenize,
        turn::apply_template,
        status::health,
        status::metrics,
        status::slots,
        status::props,
    ),
    components(schemas(ErrorBody, messages::MessagesErrorBody, compare::CompareEvent)),
    modifiers(&Key),
    security((), ("key" = []))
)]
struct Api;

/// Describes the API.
pub(crate) async fn describe() -> Json<Description> {
    Json(Api::openapi())
}

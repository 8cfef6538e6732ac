//! `/openapi.json`: the description of the API.

use axum::Json;
use utoipa::openapi::OpenApi as Description;
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::{Modify, OpenApi};

use super::anthropic_error::MessagesErrorBody;
use super::{chat, compare, completions, embeddings, messages, models, responses, status, tokens, turn};
use crate::error::ErrorBody;

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
    components(schemas(ErrorBody, MessagesErrorBody, compare::CompareEvent)),
    modifiers(&Key),
    security((), ("key" = []))
)]
struct Api;

/// Describes the API.
pub(crate) async fn describe() -> Json<Description> {
    Json(Api::openapi())
}

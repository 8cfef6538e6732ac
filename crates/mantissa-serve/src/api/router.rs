//! Paths of the API, and the endpoint of each.

use std::sync::Arc;

use axum::Router;
use axum::http::StatusCode;
use axum::routing::{get, post};

use super::{
    ApiError, App, chat, compare, completions, embeddings, messages, models, openapi, page, responses,
    status, tokens, turn,
};

/// Paths that need no key: they tell nothing of a client.
pub(crate) const PUBLIC: [&str; 6] = ["/", "/health", "/v1/health", "/models", "/v1/models", "/openapi.json"];

/// Makes the routes.
pub(crate) fn routes() -> Router<Arc<App>> {
    Router::new()
        .route("/", get(page::page))
        .route("/health", get(status::health))
        .route("/v1/health", get(status::health))
        .route("/metrics", get(status::metrics))
        .route("/slots", get(status::slots))
        .route("/props", get(status::props))
        .route("/models", get(models::list))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{name}", get(models::one))
        .route("/v1/completions", post(completions::completions))
        .route("/v1/chat/completions", post(chat::completions))
        .route("/v1/compare", post(compare::compare))
        .route("/v1/responses", post(responses::responses))
        .route("/v1/messages", post(messages::messages))
        .route("/v1/messages/count_tokens", post(messages::count_tokens))
        .route("/v1/embeddings", post(embeddings::embeddings))
        .route("/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .route("/apply-template", post(turn::apply_template))
        .route("/openapi.json", get(openapi::describe))
        .fallback(unknown)
        .method_not_allowed_fallback(wrong_method)
}

async fn unknown() -> ApiError {
    ApiError::new(
        StatusCode::NOT_FOUND,
        "not_found_error",
        "expected a path of the API, got another; see the documentation",
    )
}

async fn wrong_method() -> ApiError {
    let message = "expected another method for this path";
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "invalid_request_error", message)
}

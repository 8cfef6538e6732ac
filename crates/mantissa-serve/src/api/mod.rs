//! Endpoints: a file per family, with its types of requests and responses, and a line in [`ENDPOINTS`].

mod answer;
mod anthropic_error;
mod anthropic_reply;
mod app;
mod body;
mod chat;
mod compare;
mod completions;
mod continuation;
mod conversation;
mod convert;
mod embedding_input;
mod embeddings;
mod format;
mod generate;
mod llama;
mod llama_convert;
mod messages;
mod models;
pub(crate) mod notes;
mod offered;
mod ollama;
mod ollama_convert;
mod ollama_error;
mod ollama_models;
mod ollama_reply;
mod openapi;
mod page;
mod params;
mod preparation;
mod render;
mod renderer;
mod reply;
mod responses;
mod responses_reply;
mod sse;
mod status;
mod streamed;
mod thinking;
mod tokens;
mod turn;
mod unknown;
mod usage;

use std::sync::Arc;

use axum::Router;
use axum::http::StatusCode;

pub(crate) use self::app::{App, Endpoints, now};
pub(crate) use self::ollama_error::errors as ollama_errors;
pub use self::renderer::{Render, RenderError};
pub(crate) use crate::artifact::Artifact;
pub(crate) use crate::error::{ApiError, stopping};

/// Endpoints of each file.
const ENDPOINTS: &[fn() -> Endpoints] = &[
    chat::endpoints,
    compare::endpoints,
    completions::endpoints,
    embeddings::endpoints,
    llama::endpoints,
    messages::endpoints,
    models::endpoints,
    ollama::endpoints,
    ollama_models::endpoints,
    page::endpoints,
    responses::endpoints,
    status::endpoints,
    tokens::endpoints,
    turn::endpoints,
];

/// Paths that need no key: they tell nothing of a client.
pub(crate) const PUBLIC: &[&str] =
    &["/", "/health", "/v1/health", "/models", "/v1/models", "/openapi.json", "/api/version", "/api/tags"];

/// Paths that the description of the endpoints leaves out: other names of endpoints, and pages.
const UNDESCRIBED: [&str; 5] = ["/", "/openapi.json", "/completions", "/infill", "/api/pull"];

/// Makes the routes.
pub(crate) fn routes() -> Router<Arc<App>> {
    let endpoints = ENDPOINTS.iter().fold(openapi::undescribed(), |all, endpoints| all.merge(endpoints()));
    let (routes, described) = openapi::described(endpoints).split_for_parts();
    let mut paths: Vec<&str> = described.paths.paths.keys().map(String::as_str).chain(UNDESCRIBED).collect();
    paths.sort_unstable();
    let message: Arc<str> = format!("expected one of the paths {}, got another", paths.join(", ")).into();
    let unknown_path = move || std::future::ready(unknown_path(&message));
    routes.fallback(unknown_path).method_not_allowed_fallback(wrong_method)
}

/// Makes the error of a path that there is not.
fn unknown_path(message: &str) -> ApiError {
    ApiError::new(StatusCode::NOT_FOUND, "not_found_error", message)
}

async fn wrong_method() -> ApiError {
    let message = "expected another method for this path";
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "invalid_request_error", message)
}

//! State of the server: health, metrics, jobs at work, settings.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::extract::State;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Extension, Json};
use mantissa_model::Sampling;
use serde::Serialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;
use utoipa_axum::routes;

use super::{ApiError, App, Artifact, Endpoints, llama, llama_convert, stopping};
use crate::engine::{Caller, SlotState};

/// This program with its version, in replies.
pub(super) const PROGRAM: &str = concat!("mantissa ", env!("CARGO_PKG_VERSION"));

/// Health of the server.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Health {
    status: &'static str,
}

/// Lists the endpoints of this file.
pub(super) fn endpoints() -> Endpoints {
    Endpoints::new()
        .routes(routes!(health))
        .routes(routes!(metrics))
        .routes(routes!(slots))
        .routes(routes!(props))
        .route("/v1/health", get(health))
}

/// Tells that the server takes requests; status 503 while it stops.
#[utoipa::path(
    get,
    path = "/health",
    responses((status = 200, description = "The server takes requests", body = Health), crate::error::Errors)
)]
pub(crate) async fn health(State(app): State<Arc<App>>) -> Result<Json<Health>, ApiError> {
    if app.stopping.load(Ordering::Relaxed) {
        return Err(stopping());
    }
    Ok(Json(Health { status: "ok" }))
}

/// Writes the counters in Prometheus' text format.
#[utoipa::path(
    get,
    path = "/metrics",
    responses(
        (status = 200, description = "The counters", body = String, content_type = "application/openmetrics-text"),
        crate::error::Errors,
    )
)]
pub(crate) async fn metrics(State(app): State<Arc<App>>) -> Response {
    let mut response = app.metrics.text().into_response();
    let kind = HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

/// Sequence at work.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Slot {
    /// Model that runs it.
    model: String,
    /// Longest sequence.
    n_ctx: usize,
    /// True: only sequences at work are listed.
    is_processing: bool,
    #[serde(flatten)]
    state: SlotState,
}

/// Lists the client's sequences at work.
#[utoipa::path(
    get,
    path = "/slots",
    responses((status = 200, description = "The sequences", body = Vec<Slot>), crate::error::Errors)
)]
pub(crate) async fn slots(
    State(app): State<Arc<App>>,
    Extension(caller): Extension<Caller>,
) -> Json<Vec<Slot>> {
    let of = |artifact: &Arc<Artifact>| {
        let model = artifact.name.clone();
        let n_ctx = artifact.engine.runtime().context;
        let slots = artifact.engine.load().slots.into_iter();
        slots.filter(|slot| slot.client == caller.client).map(move |state| Slot {
            model: model.clone(),
            n_ctx,
            is_processing: true,
            state,
        })
    };
    Json(app.artifacts.iter().flat_map(of).collect())
}

/// Settings and load of the server.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Props {
    version: &'static str,
    /// Seconds since 1970 at the start.
    started: u64,
    models: Vec<ModelProps>,
    /// The first model as llama.cpp's server describes its own: settings of `/completion`, places, template.
    #[serde(flatten)]
    #[schema(value_type = Object)]
    first: Map<String, Value>,
}

/// Settings and load of a model.
#[derive(Debug, Serialize, ToSchema)]
struct ModelProps {
    model: String,
    /// Longest sequence, prompt and new tokens.
    context: usize,
    /// Sequences at work at once.
    parallel: usize,
    /// Scheme of the KV cache.
    kv: String,
    /// Bytes of a token in the KV cache.
    kv_bytes_per_token: f64,
    /// Sequences at work.
    running: usize,
    /// Sequences that wait.
    queued: usize,
    /// Tokens generated per second, over about the last second of work.
    tokens_per_second: f64,
    /// Blocks of the KV cache in use, kept ones included.
    kv_blocks_used: usize,
    /// Blocks of the KV cache.
    kv_blocks: usize,
    /// Recent KL of the shadow comparison in nats/token, if there is one.
    shadow_kl: Option<f64>,
    /// Chat template.
    chat_template: Option<String>,
}

/// Describes a model as llama.cpp's server describes its own.
fn described(artifact: &Artifact) -> Map<String, Value> {
    let runtime = artifact.engine.runtime();
    let sampling = artifact.sampling.or(llama_convert::USUAL).over(Sampling::default());
    let params = llama::settings(&sampling, runtime.context);
    let all = [
        ("default_generation_settings", json!({ "n_ctx": runtime.context, "params": params })),
        ("total_slots", json!(runtime.sequences)),
        ("model_alias", json!(artifact.name)),
        ("model_path", json!(artifact.name)),
        ("chat_template", json!(artifact.tokenizer.chat_template().unwrap_or_default())),
        ("bos_token", json!(special(artifact, "bos_token"))),
        ("eos_token", json!(special(artifact, "eos_token"))),
        ("modalities", json!({ "vision": false, "audio": false })),
        ("build_info", json!(PROGRAM)),
        ("is_sleeping", json!(false)),
    ];
    all.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

/// Text of a special token, or nothing.
fn special<'a>(artifact: &'a Artifact, name: &str) -> &'a str {
    artifact.tokenizer.special_tokens().get(name).map_or("", String::as_str)
}

/// Tells the settings and the load.
#[utoipa::path(
    get,
    path = "/props",
    responses((status = 200, description = "Settings and load", body = Props), crate::error::Errors)
)]
pub(crate) async fn props(State(app): State<Arc<App>>) -> Json<Props> {
    let of = |artifact: &Arc<Artifact>| {
        let (load, runtime) = (artifact.engine.load(), artifact.engine.runtime());
        ModelProps {
            model: artifact.name.clone(),
            context: runtime.context,
            parallel: runtime.sequences,
            kv: artifact.kv.clone(),
            kv_bytes_per_token: artifact.model.kv_bytes_per_token(),
            running: load.slots.len(),
            queued: load.queued,
            tokens_per_second: load.tokens_per_second,
            kv_blocks_used: load.kv_used,
            kv_blocks: load.kv_blocks,
            shadow_kl: artifact.engine.shadow_kl(),
            chat_template: artifact.tokenizer.chat_template().map(str::to_owned),
        }
    };
    let models = app.artifacts.iter().map(of).collect();
    let first = app.artifacts.first().map(|artifact| described(artifact)).unwrap_or_default();
    Json(Props { version: env!("CARGO_PKG_VERSION"), started: app.started, models, first })
}

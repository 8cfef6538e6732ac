//! Endpoints: a file per family, with its types of requests and responses.

mod answer;
mod anthropic_reply;
mod body;
mod chat;
mod compare;
mod completions;
mod convert;
mod embedding_input;
mod embeddings;
mod error;
mod format;
mod generate;
mod messages;
mod models;
mod offered;
mod openapi;
mod page;
mod params;
mod render;
mod reply;
mod responses;
mod responses_reply;
mod sse;
mod status;
mod streamed;
mod thinking;
mod tokens;
mod turn;
mod usage;

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::http::StatusCode;
use axum::routing::{get, post};
use mantissa_model::Tokenizer;
use mantissa_runtime::{Constraint, FastModel};
use tokio::sync::Semaphore;

pub(crate) use self::error::{ApiError, stopping};
pub use self::render::{Render, RenderError};
use crate::engine::{Engine, Turns};
use crate::grammar::{Grammar, GrammarError, Grammars};
use crate::metrics::Metrics;
use crate::options::{Limits, Reasoning};

/// A model that is served: one set of weights in one precision.
#[derive(Debug)]
pub struct Artifact {
    /// Name in requests and metrics.
    pub name: String,
    /// Tokenizer and chat template.
    pub tokenizer: Tokenizer,
    /// Weights.
    pub model: Arc<FastModel>,
    /// Scheme of the KV cache.
    pub kv: String,
    /// The model at work.
    pub engine: Engine,
}

/// State that all handlers share.
pub(crate) struct App {
    /// Models; the first one serves requests that name none.
    pub(crate) artifacts: Vec<Arc<Artifact>>,
    pub(crate) renderer: Arc<dyn Render>,
    pub(crate) limits: Limits,
    pub(crate) reasoning: Reasoning,
    pub(crate) metrics: Metrics,
    /// Turns in which passes run.
    pub(crate) turns: Arc<Turns>,
    pub(crate) preparations: Semaphore,
    /// Units of memory for bodies.
    pub(crate) bodies: Semaphore,
    /// Compilers of grammars, one for each model.
    grammars: Vec<Arc<Grammars>>,
    pub(crate) stopping: AtomicBool,
    /// Seconds since 1970 at the start.
    pub(crate) started: u64,
    ids: Ids,
}

impl App {
    pub(crate) fn new(
        artifacts: Vec<Arc<Artifact>>,
        renderer: Arc<dyn Render>,
        limits: Limits,
        reasoning: Reasoning,
        metrics: Metrics,
        turns: Arc<Turns>,
    ) -> Self {
        let preparations = Semaphore::new(limits.preparations);
        let bodies = Semaphore::new((limits.bodies / body::UNIT).max(1));
        let (stopping, started, ids) = (AtomicBool::new(false), now(), Ids::default());
        let grammars = |artifact: &Arc<Artifact>| Arc::new(Grammars::new(artifact.model.config().vocab_size));
        let grammars = artifacts.iter().map(grammars).collect();
        App {
            artifacts,
            renderer,
            limits,
            reasoning,
            metrics,
            turns,
            preparations,
            bodies,
            grammars,
            stopping,
            started,
            ids,
        }
    }

    /// Prepares the vocabularies for grammars, on a thread of its own. Without a thread the first grammar does it.
    pub(crate) fn prepare_grammars(&self) {
        let all: Vec<_> = self.artifacts.iter().cloned().zip(self.grammars.iter().cloned()).collect();
        let work = move || all.iter().for_each(|(artifact, grammars)| grammars.prepare(&artifact.tokenizer));
        let _ = std::thread::Builder::new().name("vocabulary".into()).spawn(work);
    }

    /// Returns the model that a request names, or the first one.
    ///
    /// # Errors
    /// Status 404 for an unknown name.
    pub(crate) fn artifact(&self, name: Option<&str>) -> Result<Arc<Artifact>, ApiError> {
        let found = match name.filter(|name| !name.is_empty()) {
            None => self.artifacts.first(),
            Some(name) => self.artifacts.iter().find(|artifact| artifact.name == name),
        };
        found.cloned().ok_or_else(|| {
            let names: Vec<_> = self.artifacts.iter().map(|artifact| artifact.name.as_str()).collect();
            let error = ApiError::field("model", name.unwrap_or_default(), &names.join(" or "));
            ApiError { status: StatusCode::NOT_FOUND, ..error }.code("model_not_found")
        })
    }

    /// Compiles a grammar for `artifact`; `field` is the field of the request that asks for it.
    ///
    /// # Errors
    /// Status 400 if the grammar cannot be used, 503 if too many are compiled.
    pub(crate) fn compile(
        &self,
        artifact: &Arc<Artifact>,
        grammar: &Grammar,
        field: &str,
    ) -> Result<Box<dyn Constraint>, ApiError> {
        let at = self.artifacts.iter().position(|other| Arc::ptr_eq(other, artifact));
        let grammars = at.and_then(|at| self.grammars.get(at));
        let grammars = grammars.ok_or_else(|| ApiError::internal("a model without a vocabulary"))?;
        grammars.compile(&artifact.tokenizer, grammar).map_err(|error| match error {
            GrammarError::Busy => {
                let status = StatusCode::SERVICE_UNAVAILABLE;
                ApiError::busy(status, &error.to_string(), "grammars_busy", Duration::from_secs(1))
            }
            error => ApiError::bad(format!("{field}: {error}")).param(field).code("invalid_grammar"),
        })
    }

    /// Makes a number that no other request has and that nobody can guess.
    pub(crate) fn random(&self) -> u64 {
        self.ids.next()
    }

    /// Makes the id of a response.
    pub(crate) fn id(&self, prefix: &str) -> String {
        format!("{prefix}{:016x}", self.ids.next())
    }
}

/// Source of ids.
#[derive(Debug, Default)]
struct Ids {
    keys: RandomState,
    count: AtomicU64,
}

impl Ids {
    fn next(&self) -> u64 {
        let mut hasher = self.keys.build_hasher();
        hasher.write_u64(self.count.fetch_add(1, Ordering::Relaxed));
        hasher.finish()
    }
}

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

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

//! State that all handlers share.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use axum::http::StatusCode;
use tokio::sync::Semaphore;

use super::notes::{Logged, note};
use super::renderer::Render;
use super::{ApiError, Artifact};
use crate::engine::Turns;
use crate::error::short;
use crate::fair::Gate;
use crate::grammar::{Confinement, Grammars};
use crate::metrics::Metrics;
use crate::options::{Limits, Options, Reasoning};

/// Routes with their description.
pub(crate) type Endpoints = utoipa_axum::router::OpenApiRouter<Arc<App>>;

/// Bytes of a unit of memory for bodies. Bodies below it take none.
pub(super) const BODY_UNIT: usize = 64 << 10;

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
    /// Places for preparation, of small and of large requests, and for scoring.
    pub(crate) preparations: Arc<Gate>,
    pub(crate) large: Arc<Gate>,
    pub(crate) scorings: Arc<Gate>,
    /// Units of memory for bodies.
    pub(crate) bodies: Arc<Semaphore>,
    /// Compilers of grammars, one for each model, if there are any.
    pub(crate) grammars: Vec<Arc<Grammars>>,
    pub(crate) stopping: AtomicBool,
    /// True if a name that no model has is an error where a single model is served.
    strict_model: bool,
    /// Notes of responses that were logged.
    pub(crate) logged: Logged,
    /// Seconds since 1970 at the start.
    pub(crate) started: u64,
    ids: Ids,
}

impl App {
    pub(crate) fn new(
        artifacts: Vec<Arc<Artifact>>,
        renderer: Arc<dyn Render>,
        options: Options,
        metrics: Metrics,
        turns: Arc<Turns>,
    ) -> Self {
        let Options { limits, reasoning, grammars, grammar_memory, strict_model, .. } = options;
        let most = limits.preparations.div_ceil(4);
        let preparations = Gate::new(limits.preparations, most, limits.waiting);
        // Those that wait hold their parsed bodies.
        let large = Gate::new(limits.large, 1, limits.waiting.div_ceil(16));
        let scorings = Gate::new(limits.scorings, 1, limits.waiting);
        let bodies = Arc::new(Semaphore::new((limits.bodies / BODY_UNIT).max(1)));
        let (stopping, started, ids) = (AtomicBool::new(false), now(), Ids::default());
        let memory = grammar_memory / artifacts.len().max(1) as u64;
        let compiler = |confinement: Confinement| {
            let of = |artifact: &Arc<Artifact>| {
                Arc::new(Grammars::new(artifact.model.config().vocab_size, confinement.clone(), memory))
            };
            artifacts.iter().map(of).collect()
        };
        let grammars = grammars.map_or_else(Vec::new, compiler);
        App {
            artifacts,
            renderer,
            limits,
            reasoning,
            metrics,
            turns,
            preparations,
            large,
            scorings,
            bodies,
            grammars,
            stopping,
            strict_model,
            logged: Logged::default(),
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

    /// Returns the model that a request names, or the first one. Where a single model is served, it answers requests for
    /// any name, with a note, unless the server is strict.
    ///
    /// # Errors
    /// Status 404 for an unknown name.
    pub(crate) fn artifact(&self, name: Option<&str>) -> Result<Arc<Artifact>, ApiError> {
        let Some(name) = name.filter(|name| !name.is_empty()) else {
            return self.artifacts.first().cloned().ok_or_else(|| self.unknown_model(""));
        };
        match (self.named(name), self.artifacts.as_slice()) {
            (Err(_), [only]) if !self.strict_model => {
                let name = short(name);
                note(format!("model: no model is named {name}; {} answers, the only one", only.name));
                Ok(Arc::clone(only))
            }
            (named, _) => named,
        }
    }

    /// Returns the model of this name, which may end in Ollama's usual tag `:latest`.
    ///
    /// # Errors
    /// Status 404 for an unknown name.
    pub(crate) fn named(&self, name: &str) -> Result<Arc<Artifact>, ApiError> {
        let of = |name: &str| self.artifacts.iter().find(|artifact| artifact.name == name).cloned();
        let found = of(name).or_else(|| of(name.strip_suffix(":latest")?));
        found.ok_or_else(|| self.unknown_model(name))
    }

    fn unknown_model(&self, name: &str) -> ApiError {
        let names: Vec<_> = self.artifacts.iter().map(|artifact| artifact.name.as_str()).collect();
        let error = ApiError::field("model", name, &names.join(" or "));
        ApiError { status: StatusCode::NOT_FOUND, ..error }.code("model_not_found")
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

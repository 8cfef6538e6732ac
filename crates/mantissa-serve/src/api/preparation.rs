//! Preparation of requests: what takes processor time before a request is queued. It runs off the threads that serve
//! connections, in places that clients share fairly, and ends when the client leaves or its time has passed.

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use mantissa_model::Bos;
use mantissa_runtime::Constraint;
use tokio::sync::oneshot;

use super::generate::counted;
use super::{ApiError, App, Artifact, stopping};
use crate::engine::{Caller, Failure};
use crate::fair::{Gate, Place};
use crate::grammar::{Grammar, GrammarError, Meter, Wanted};

/// A request that is being prepared.
pub(crate) struct Preparation {
    app: Arc<App>,
    /// Sender of the request.
    caller: Caller,
    /// True once nobody waits for the request.
    left: Arc<AtomicBool>,
    deadline: Instant,
    /// Counts the processor time of its grammar.
    pub(crate) meter: Arc<Meter>,
}

/// Tells the work of a request that its client has left, when it is dropped.
pub(crate) struct Leaves(Arc<AtomicBool>);

impl Leaves {
    /// Makes the mark, and what drops to set it.
    pub(crate) fn new() -> (Arc<AtomicBool>, Self) {
        let left = Arc::new(AtomicBool::new(false));
        (Arc::clone(&left), Leaves(left))
    }
}

impl Drop for Leaves {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Deref for Preparation {
    type Target = App;

    fn deref(&self) -> &App {
        &self.app
    }
}

impl Preparation {
    /// Checks that the work is still wanted, between parts of it.
    ///
    /// # Errors
    /// Status 503 if its time has passed.
    pub(crate) fn check(&self) -> Result<(), ApiError> {
        if self.is_wanted() {
            return Ok(());
        }
        let seconds = self.limits.preparation_time.as_secs();
        let message =
            format!("expected a request that is prepared within {seconds} s, got one that takes longer");
        Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "overloaded_error", message)
            .code("preparation_time"))
    }

    fn is_wanted(&self) -> bool {
        !self.left.load(Ordering::Relaxed) && Instant::now() < self.deadline
    }

    /// Checks that so many jobs would be queued, before their prompts are tokenized and their grammars compiled.
    ///
    /// # Errors
    /// Status 429 or 503 if they would not.
    pub(crate) fn check_room(&self, artifact: &Artifact, jobs: usize) -> Result<(), ApiError> {
        artifact.engine.check_room(jobs, self.caller).map_err(|refused| counted(self, refused))
    }

    /// Tokenizes a text.
    pub(crate) fn encode(&self, artifact: &Artifact, text: &str, bos: Bos) -> Result<Vec<u32>, ApiError> {
        self.check()?;
        Ok(artifact.tokenizer.encode(text, bos)?)
    }

    /// Compiles a grammar for `artifact`; `field` is the field of the request that asks for it.
    ///
    /// # Errors
    /// Status 400 if the grammar cannot be used, 503 if too many are compiled or the server cannot compile any.
    pub(crate) fn compile(
        &self,
        artifact: &Arc<Artifact>,
        grammar: &Grammar,
        field: &str,
    ) -> Result<Box<dyn Constraint>, ApiError> {
        let at = self.artifacts.iter().position(|other| Arc::ptr_eq(other, artifact));
        let Some(grammars) = at.and_then(|at| self.grammars.get(at)) else {
            return Err(ApiError::field(field, "a form", "none: this server constrains no replies"));
        };
        let wanted = || self.is_wanted();
        let request = Wanted { caller: self.caller, wanted: &wanted };
        let compiled = grammars.compile_for(&artifact.tokenizer, grammar, request, Arc::clone(&self.meter));
        let unavailable = |error: &GrammarError, code| {
            let status = StatusCode::SERVICE_UNAVAILABLE;
            ApiError::busy(status, &error.to_string(), code, Duration::from_secs(1))
        };
        compiled.map_err(|error| match error {
            GrammarError::Busy | GrammarError::Unwanted => unavailable(&error, "grammars_busy"),
            GrammarError::Process(_) | GrammarError::Memory { .. } => {
                unavailable(&error, "grammars_unavailable")
            }
            error => ApiError::bad(format!("{field}: {error}")).param(field).code("invalid_grammar"),
        })
    }
}

/// Bytes of a request from which it is large: its work runs at a low priority, so that engines and small requests go on.
const LARGE: usize = 64 << 10;

/// Priority of the work of large requests, as of `nice`.
const LOW: i32 = 15;

/// Runs `work` for a request of so many bytes off the threads that serve connections.
///
/// # Errors
/// Status 500 if it panics.
pub(crate) async fn aside<T: Send + 'static>(
    bytes: usize,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ApiError> {
    let bug = || ApiError::failed(&Failure::Panicked);
    if bytes < LARGE {
        return tokio::task::spawn_blocking(work).await.map_err(|_| bug());
    }
    let (sender, done) = oneshot::channel();
    let run = move || {
        // Of this thread, on systems where threads have priorities.
        let _ = rustix::process::nice(LOW);
        let _ = sender.send(work());
        // What such a request took would stay with the process.
        mantissa_kernels::give_back_memory();
    };
    std::thread::Builder::new().name("large".into()).spawn(run).map_err(|_| bug())?;
    done.await.map_err(|_| bug())
}

/// Waits for a place for a client.
///
/// # Errors
/// Status 429 if too many requests of the client wait.
pub(crate) async fn enter_gate(gate: &Arc<Gate>, caller: Caller) -> Result<Place, ApiError> {
    let place = gate.enter(caller).ok_or_else(|| {
        let message = "too many requests of this client wait to be prepared or scored; retry after the time in Retry-After";
        ApiError::busy(StatusCode::TOO_MANY_REQUESTS, message, "client_queue_full", Duration::from_secs(1))
    })?;
    place.given().await;
    Ok(place)
}

/// Waits for a place to prepare a request of so many bytes.
///
/// # Errors
/// As [`enter_gate`].
pub(crate) async fn enter(app: &App, caller: Caller, bytes: usize) -> Result<Place, ApiError> {
    let gate = if bytes < LARGE { &app.preparations } else { &app.large };
    enter_gate(gate, caller).await
}

/// Runs `work` for a request of so many bytes, which takes processor time, in a place of the client's.
pub(crate) async fn prepare<T: Send + 'static>(
    app: &Arc<App>,
    caller: Caller,
    bytes: usize,
    work: impl FnOnce(&Preparation) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    if app.stopping.load(Ordering::Relaxed) {
        return Err(stopping());
    }
    let place = enter(app, caller, bytes).await?;
    let (left, leaves) = Leaves::new();
    let deadline = Instant::now() + app.limits.preparation_time;
    let preparation = Preparation { app: Arc::clone(app), caller, left, deadline, meter: Arc::default() };
    let done = aside(bytes, move || {
        let done = work(&preparation);
        // The place is taken as long as the work goes on, wanted or not.
        drop(place);
        done
    })
    .await;
    drop(leaves);
    done?
}

//! A model at work: a thread that steps a [`Runtime`](mantissa_runtime::Runtime), and the queue before it.
//!
//! [`Engine::submit`] queues jobs and returns a [`Stream`] of their updates. The thread begins as many as run at once,
//! from the client served least first, and ends those whose stream was dropped before its next step.
//!
//! A fault in a step (a panic, or a value that the model cannot compute with) may be due to any job at work. The engine
//! then begins them anew, one at a time and from the tokens already reported, so that only the job at fault fails.

mod job;
mod queue;
#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests;
mod turns;
mod worker;

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use mantissa_model::LoadError;
use mantissa_runtime::{FastModel, RuntimeOptions};
use serde::Serialize;
use tokio::sync::mpsc::unbounded_channel;
use utoipa::ToSchema;

pub use self::job::{Ending, Failure, Job, Progress, Refused, Stream, Update};
use self::job::{Pending, Reported};
pub(crate) use self::queue::FairQueue;
pub use self::queue::{Caller, Client, MOST_PRIORITY};
pub use self::turns::{Turn, Turns};
use self::worker::Worker;
use crate::metrics::EngineMetrics;
use crate::shadow::Tap;

/// Settings of an [`Engine`].
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Sizes of the session.
    pub runtime: RuntimeOptions,
    /// Most jobs that wait.
    pub queue: usize,
    /// Most jobs of one client that wait.
    pub client_queue: usize,
    /// Turns shared with the other engines of the machine.
    pub turns: Arc<Turns>,
    /// Counters.
    pub metrics: EngineMetrics,
}

/// State of one job at work.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct SlotState {
    /// Number of the job, counted from the start of the server.
    pub id: u64,
    /// `waiting` for memory or another prompt, `prefill` or `decode`.
    pub state: &'static str,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens of the prompt that were not computed, because another sequence had them.
    pub cached_tokens: usize,
    /// Tokens generated so far.
    pub generated_tokens: usize,
    /// Most tokens that are generated.
    pub max_tokens: usize,
    /// Tokens in the KV cache.
    pub held_tokens: usize,
    /// Priority of the client.
    pub priority: i32,
    /// Seconds since the job was begun.
    pub seconds: f64,
}

/// Load of an engine.
#[derive(Clone, Debug, Default)]
pub struct Load {
    /// Jobs at work.
    pub slots: Vec<SlotState>,
    /// Jobs that wait.
    pub queued: usize,
    /// Tokens generated per second, over about the last second of work.
    pub tokens_per_second: f64,
    /// Blocks of the KV cache in use, kept ones included.
    pub kv_used: usize,
    /// Blocks of the KV cache.
    pub kv_blocks: usize,
}

/// Stage of an engine's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    /// Takes jobs.
    Open,
    /// Finishes its jobs and takes no others.
    Draining,
    /// Fails all jobs.
    Cancelling,
    /// Ends the thread.
    Stopped,
}

#[derive(Debug)]
struct State {
    queue: FairQueue<Pending>,
    stage: Stage,
    load: Load,
    /// Mean seconds of a job at work.
    job_seconds: f64,
    /// Jobs at work.
    working: usize,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    options: EngineOptions,
    /// Taker of finished sequences.
    tap: OnceLock<Arc<Tap>>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Handle of a model at work. Dropping it fails the jobs left and waits for the thread.
#[derive(Debug)]
pub struct Engine {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Engine {
    /// Plans the memory of a session and starts its thread.
    ///
    /// # Errors
    /// As [`Runtime::new`](mantissa_runtime::Runtime::new) and
    /// [`with_draft`](mantissa_runtime::Runtime::with_draft); [`LoadError::Memory`] if no thread can be started.
    pub fn start(
        model: Arc<FastModel>,
        draft: Option<Arc<FastModel>>,
        options: EngineOptions,
    ) -> Result<Self, LoadError> {
        let state = State {
            queue: FairQueue::new(),
            stage: Stage::Open,
            load: Load::default(),
            job_seconds: 1.0,
            working: 0,
        };
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            changed: Condvar::new(),
            options,
            tap: OnceLock::new(),
        });
        let (planned, result) = mpsc::channel();
        let own = Arc::clone(&shared);
        let work = move || match Worker::new(&own, &model, draft.as_deref()) {
            Ok(worker) => {
                let _ = planned.send(Ok(()));
                worker.run();
            }
            Err(error) => {
                let _ = planned.send(Err(error));
            }
        };
        let no_thread = || LoadError::Memory { what: "thread of the engine", bytes: 2 << 20 };
        let thread =
            std::thread::Builder::new().name("engine".into()).spawn(work).map_err(|_| no_thread())?;
        result.recv().map_err(|_| no_thread())??;
        Ok(Engine { shared, thread: Some(thread) })
    }

    /// Queues the jobs of one request, all or none.
    ///
    /// # Errors
    /// [`Refused`] if there is no room or the server stops.
    pub fn submit(&self, jobs: Vec<Job>, caller: Caller) -> Result<Stream, Refused> {
        let (sender, updates) = unbounded_channel();
        let options = &self.shared.options;
        let mut state = self.shared.lock();
        if state.stage > Stage::Open {
            return Err(Refused::Stopping);
        }
        let waiting = state.queue.len() + jobs.len();
        let own = state.queue.len_of(caller.client) + jobs.len();
        // An idle engine takes any request that fits the limits.
        let idle = state.working == 0 && state.queue.len() == 0;
        let retry = || state.retry(options.runtime.sequences);
        if !idle && own > options.client_queue && options.client_queue < options.queue {
            return Err(Refused::ClientFull { retry: retry() });
        }
        if !idle && waiting > options.queue {
            return Err(Refused::Full { retry: retry() });
        }
        let mut cancelled = Vec::with_capacity(jobs.len());
        for (index, mut job) in jobs.into_iter().enumerate() {
            job.request.priority = i32::from(caller.priority);
            let flag = Arc::new(AtomicBool::new(false));
            cancelled.push(Arc::clone(&flag));
            let pending = Pending {
                job,
                caller,
                index,
                updates: sender.clone(),
                cancelled: flag,
                arrived: Instant::now(),
                reported: Reported::default(),
            };
            state.queue.push(caller.client, pending);
        }
        options.metrics.queued.set(state.queue.len() as i64);
        drop(state);
        self.shared.changed.notify_all();
        Ok(Stream { updates, cancelled })
    }

    /// Offers finished sequences to `tap` from now on; a later one is not taken.
    pub(crate) fn tap(&self, tap: Arc<Tap>) {
        let _ = self.shared.tap.set(tap);
    }

    /// Recent KL of the shadow comparison in nats/token, if there is one.
    pub(crate) fn shadow_kl(&self) -> Option<f64> {
        self.shared.tap.get().and_then(|tap| tap.kl())
    }

    /// Load at the last step.
    pub fn load(&self) -> Load {
        let state = self.shared.lock();
        let idle = state.load.slots.is_empty();
        let tokens_per_second = if idle { 0.0 } else { state.load.tokens_per_second };
        Load { queued: state.queue.len(), tokens_per_second, ..state.load.clone() }
    }

    /// Sizes of the session.
    pub fn runtime(&self) -> RuntimeOptions {
        self.shared.options.runtime
    }

    /// True if no job waits or is at work.
    pub fn is_idle(&self) -> bool {
        let state = self.shared.lock();
        state.working == 0 && state.queue.len() == 0
    }

    /// Takes no jobs from now on.
    pub fn drain(&self) {
        self.advance(Stage::Draining);
    }

    /// Fails all jobs, before the next step.
    pub fn cancel_all(&self) {
        self.advance(Stage::Cancelling);
    }

    fn advance(&self, stage: Stage) {
        let mut state = self.shared.lock();
        state.stage = state.stage.max(stage);
        drop(state);
        self.shared.changed.notify_all();
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.advance(Stage::Stopped);
        if let Some(thread) = self.thread.take() {
            // Its faults were reported to the jobs.
            let _ = thread.join();
        }
    }
}

impl State {
    /// Estimates the time until a place in the queue is free, within 1 to 60 s.
    fn retry(&self, sequences: usize) -> Duration {
        let waves = (self.queue.len() as f64 / sequences.max(1) as f64).max(1.0);
        Duration::from_secs_f64((waves * self.job_seconds).clamp(1.0, 60.0).ceil())
    }
}

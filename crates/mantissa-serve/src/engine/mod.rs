//! A model at work: a thread that steps a [`Runtime`](mantissa_runtime::Runtime), and the queue before it.
//!
//! [`Engine::submit`] queues jobs and returns a [`Stream`] of their updates. The thread begins as many as run at once,
//! from the client served least first, and ends those whose stream was dropped before its next step.
//!
//! A job whose constraint takes its time gives up its place when another client waits for one.
//!
//! A fault in a step (a panic, or a value that the model cannot compute with) may be due to any job at work. The engine
//! then begins them anew, one at a time and from the tokens already reported, so that only the job at fault fails.

mod active;
mod job;
mod state;
#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests;
mod worker;

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Condvar, Mutex, OnceLock, mpsc};
use std::thread::JoinHandle;
use std::time::Instant;

use mantissa_model::LoadError;
use mantissa_runtime::{FastModel, RuntimeOptions};
use tokio::sync::mpsc::unbounded_channel;

pub use self::job::{Ending, Failure, Job, Progress, Refused, Stream, Update};
use self::job::{Pending, Reported};
pub use self::state::{EngineOptions, Load, SlotState};
use self::state::{Shared, Stage, State};
use self::worker::Worker;
use crate::fair::FairQueue;
pub use crate::fair::{Caller, Client, MOST_PRIORITY, Turn, Turns};
use crate::shadow::Tap;

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

    /// Checks that there is room for so many jobs, before their prompts are made: that takes time that other requests
    /// would have.
    ///
    /// # Errors
    /// [`Refused`] if there is none.
    pub fn check_room(&self, jobs: usize, caller: Caller) -> Result<(), Refused> {
        self.shared.lock().check_room(jobs, 0, caller, &self.shared.options)
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
        let tokens = jobs.iter().map(|job| job.request.prompt.len()).sum();
        state.check_room(jobs.len(), tokens, caller, options)?;
        let mut cancelled = Vec::with_capacity(jobs.len());
        for (index, mut job) in jobs.into_iter().enumerate() {
            job.request.priority = i32::from(caller.priority);
            job.request.owner = caller.client.number();
            job.request.prefixes = if options.share_prefixes { 0 } else { job.request.owner };
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

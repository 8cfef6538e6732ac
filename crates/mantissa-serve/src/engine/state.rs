//! Settings of an engine, and the state that its handle shares with its thread.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use mantissa_runtime::RuntimeOptions;
use serde::Serialize;
use utoipa::ToSchema;

use super::job::{Pending, Refused};
use crate::fair::{Caller, Client, FairQueue, Turns};
use crate::metrics::EngineMetrics;
use crate::shadow::Tap;

/// Settings of an [`Engine`](super::Engine).
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Sizes of the session.
    pub runtime: RuntimeOptions,
    /// Most jobs that wait.
    pub queue: usize,
    /// Most jobs of one client that wait, and most tokens of their prompts. A client without waiting jobs may queue one
    /// request beyond them.
    pub client_queue: usize,
    /// See [`client_queue`](Self::client_queue).
    pub client_tokens: usize,
    /// True if clients share the beginnings of their prompts.
    pub share_prefixes: bool,
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
    /// Sender of the job.
    #[serde(skip)]
    pub client: Client,
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
pub(super) enum Stage {
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
pub(super) struct State {
    pub(super) queue: FairQueue<Pending>,
    pub(super) stage: Stage,
    pub(super) load: Load,
    /// Mean seconds of a job at work.
    pub(super) job_seconds: f64,
    /// Jobs at work.
    pub(super) working: usize,
}

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) state: Mutex<State>,
    pub(super) changed: Condvar,
    pub(super) options: EngineOptions,
    /// Taker of finished sequences.
    pub(super) tap: OnceLock<Arc<Tap>>,
}

impl Shared {
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Checks that there is room for so many jobs whose prompts have so many tokens. The waiting work of the client
    /// counts: one without any gets in whatever the others have queued, as long as not too many clients wait.
    pub(super) fn check_room(
        &self,
        jobs: usize,
        tokens: usize,
        caller: Caller,
        options: &EngineOptions,
    ) -> Result<(), Refused> {
        let retry = || self.retry(options.runtime.sequences);
        let own = self.queue.len_of(caller.client);
        if own == 0 {
            return match self.queue.clients() < options.queue {
                true => Ok(()),
                false => Err(Refused::Full { retry: retry() }),
            };
        }
        let held = self.queue.sum_of(caller.client, |pending| pending.job.request.prompt.len());
        if own + jobs <= options.client_queue && held + tokens <= options.client_tokens {
            return Ok(());
        }
        // With a single client that can wait, it is the queue that is full.
        match options.client_queue < options.queue {
            true => Err(Refused::ClientFull { retry: retry() }),
            false => Err(Refused::Full { retry: retry() }),
        }
    }

    /// Estimates the time until a place in the queue is free, within 1 to 60 s.
    fn retry(&self, sequences: usize) -> Duration {
        let waves = (self.queue.len() as f64 / sequences.max(1) as f64).max(1.0);
        Duration::from_secs_f64((waves * self.job_seconds).clamp(1.0, 60.0).ceil())
    }
}

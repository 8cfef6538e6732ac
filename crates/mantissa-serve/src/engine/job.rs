//! Jobs of an engine and what comes back.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use mantissa_model::StopReason;
use mantissa_runtime::{EventKind, Request};
use serde::Serialize;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender};
use utoipa::ToSchema;

use crate::fair::Caller;
use crate::grammar::Meter;

/// A sequence to be generated.
#[derive(Clone, Debug)]
pub struct Job {
    /// Prompt, sampling and length.
    pub request: Request,
    /// Time at which the sequence ends, done or not.
    pub deadline: Instant,
    /// True to report how much of the prompt has been computed, after each step.
    pub progress: bool,
    /// Processor time of the constraint, charged to the client.
    pub(crate) meter: Arc<Meter>,
}

impl Job {
    /// Creates a job without a constraint.
    pub fn new(request: Request, deadline: Instant) -> Self {
        Job { request, deadline, progress: false, meter: Arc::default() }
    }
}

/// News of one job.
#[derive(Clone, Debug, PartialEq)]
pub enum Update {
    /// Its sequence has been begun.
    Begun,
    /// News of its sequence before its end.
    News(EventKind),
    /// How much of the prompt has been computed, if asked for.
    Progress(Progress),
    /// The job has ended.
    Finished(Ending),
    /// The job has ended without a result.
    Failed(Failure),
}

/// How much of a prompt has been computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct Progress {
    /// Tokens of the prompt.
    pub total: usize,
    /// Tokens of the prompt that are not computed because another sequence had them.
    pub cache: usize,
    /// Tokens in the KV cache, those included.
    pub processed: usize,
    /// Milliseconds since the job was begun.
    pub time_ms: u64,
}

/// Reason for the end of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// A stop token, or the requested number of tokens.
    Stopped(StopReason),
    /// The time limit.
    Time,
}

/// Reason for a job without a result.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// A fault of the program in this job.
    #[error("internal error in this request; this is a bug, please report it")]
    Panicked,
    /// The model computed values that are no numbers, or without a code in the KV cache.
    #[error("the model cannot continue this text: {0}")]
    Model(String),
    /// The prompt, an option or the constraint is not one that the model takes.
    #[error("{0}")]
    Request(String),
    /// The server stops.
    #[error("the server is stopping")]
    Stopping,
    /// The time limit passed before the request was begun.
    #[error("the time limit passed while the request waited")]
    Late,
}

/// Reason for a job that was not queued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// The server stops.
    Stopping,
    /// The queue is full.
    Full {
        /// Time after which a place may be free.
        retry: Duration,
    },
    /// The client's part of the queue is full.
    ClientFull {
        /// Time after which a place may be free.
        retry: Duration,
    },
}

/// A job that waits or is at work.
#[derive(Debug)]
pub(super) struct Pending {
    pub(super) job: Job,
    pub(super) caller: Caller,
    /// Index among the jobs of its request.
    pub(super) index: usize,
    pub(super) updates: UnboundedSender<(usize, Update)>,
    pub(super) cancelled: Arc<AtomicBool>,
    pub(super) arrived: Instant,
    /// Updates that were already sent, before the work was begun anew after a fault.
    pub(super) reported: Reported,
}

/// Updates that a job has had.
#[derive(Clone, Debug, Default)]
pub(super) struct Reported {
    pub(super) started: bool,
    /// Tokens of the prompt.
    pub(super) prompt: usize,
    /// Generated tokens.
    pub(super) tokens: Vec<u32>,
}

impl Pending {
    /// True if nobody waits for it any more.
    pub(super) fn is_gone(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed) || self.updates.is_closed()
    }

    pub(super) fn send(&self, update: Update) {
        // A receiver that has gone shows in `is_gone`.
        let _ = self.updates.send((self.index, update));
    }
}

/// Updates of the jobs of a request. Dropping it cancels those that have not ended, before the engine's next step.
#[derive(Debug)]
pub struct Stream {
    pub(super) updates: UnboundedReceiver<(usize, Update)>,
    pub(super) cancelled: Vec<Arc<AtomicBool>>,
}

impl Stream {
    /// Waits for the next update, with the index of the job; `None` after the last.
    pub async fn next(&mut self) -> Option<(usize, Update)> {
        self.updates.recv().await
    }

    /// Ends one job without an update.
    pub fn cancel(&self, index: usize) {
        if let Some(flag) = self.cancelled.get(index) {
            flag.store(true, Ordering::Relaxed);
        }
    }
}

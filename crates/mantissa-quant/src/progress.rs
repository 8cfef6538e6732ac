//! Progress of a run, as reported to the caller.

use std::ops::ControlFlow;

/// Step of a layer that an earlier run has finished, as [`Progress::tensor`].
pub const RESUMED: &str = "layers of an earlier run";

/// Progress of a run.
#[derive(Clone, Copy, Debug)]
pub struct Progress<'a> {
    /// Bytes done out of [`Plan::work_bytes`](crate::Plan::work_bytes).
    pub done: u64,
    /// Current tensor, layer or step.
    pub tensor: &'a str,
    /// Tokens evaluated out of [`crate::Evaluation::work`], once everything is written.
    pub tokens: Option<u64>,
    /// Items of tasks answered out of [`crate::TaskRuns::work`], after the evaluation.
    pub items: Option<u64>,
}

impl Progress<'_> {
    /// Returns the progress of a run that has written everything and still hashes the source.
    pub(crate) fn hashing(done: u64) -> Self {
        Progress { done, tensor: "hash of the source", tokens: None, items: None }
    }
}

/// Reports progress to the caller; `Break` interrupts the run.
pub(crate) type Tell<'a> = dyn FnMut(Progress<'_>) -> ControlFlow<()> + Send + 'a;

//! Progress of a run, as its caller is told it.

use std::ops::ControlFlow;

/// Progress of a run.
#[derive(Clone, Copy, Debug)]
pub struct Progress<'a> {
    /// Bytes done, of [`Plan::work_bytes`](crate::Plan::work_bytes).
    pub done: u64,
    /// Tensor, layer or step at work.
    pub tensor: &'a str,
    /// Tokens evaluated, of [`crate::Evaluation::work`], once everything is written.
    pub tokens: Option<u64>,
}

impl Progress<'_> {
    /// Progress of a run that has written everything and still hashes the source.
    pub(crate) fn hashing(done: u64) -> Self {
        Progress { done, tensor: "hash of the source", tokens: None }
    }
}

/// Tells the caller of progress and asks whether to go on.
pub(crate) type Tell<'a> = dyn FnMut(Progress<'_>) -> ControlFlow<()> + Send + 'a;

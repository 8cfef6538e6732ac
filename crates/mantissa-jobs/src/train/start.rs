//! Modes of starting a training run.

use serde::{Deserialize, Serialize};

/// Mode of starting a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StartMode {
    /// Start a new run.
    New,
    /// Resume from the last checkpoint.
    Resume,
    /// Resume an unfinished run of the same settings and data, which the same command began.
    Continue,
    /// Remove an existing run, then start.
    Restart,
}

impl StartMode {
    /// True if the run goes on from its last checkpoint.
    pub fn resumes(self) -> bool {
        matches!(self, StartMode::Resume | StartMode::Continue)
    }
}

//! Report of a training run.

use std::path::PathBuf;

use mantissa_ranks::Traffic;
use mantissa_train::GemmHealth;
use serde::Serialize;

use super::results::Results;
use crate::data_report::DataReport;
use crate::learning::LearningReport;

/// Result of a training run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TrainReport {
    /// Folder of the run.
    pub run: PathBuf,
    /// True if the run was complete already, so that nothing was done.
    pub already_complete: bool,
    /// `done`, or `done, but` with what did not learn.
    pub outcome: String,
    /// Models that were written.
    #[serde(flatten)]
    pub results: Results,
    /// The data in numbers.
    pub data: DataReport,
    /// Number of parameters of the model.
    pub parameters: u64,
    /// Number of parameters that train, those of adapters included.
    pub trainable_parameters: u64,
    /// Number of steps.
    pub steps: u64,
    /// Step at which this process resumed the run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resumed_at: Option<u64>,
    /// Number of skipped steps.
    pub skipped: u64,
    /// Number of tokens.
    pub tokens: u64,
    /// Loss of the last step; `None` if no step was left.
    pub loss: Option<f64>,
    /// Least loss on held-out text.
    pub validation_loss: Option<f64>,
    /// Step of the exported weights.
    pub exported_step: u64,
    /// Seconds of this process.
    pub seconds: f64,
    /// Predicted peak anonymous memory in bytes.
    pub predicted_peak_memory: u64,
    /// Peak anonymous memory of this process in bytes.
    pub measured_peak_memory: Option<u64>,
    /// Matmuls with the lowest SQNR of their results in the last step with telemetry.
    pub worst_gemms: Vec<GemmHealth>,
    /// Bytes sent and time waited by each rank; empty for a single rank.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ranks: Vec<RankReport>,
    /// Parts that did not learn.
    pub learning: LearningReport,
    /// True if an autopsy of the run names the cause of what did not learn.
    #[serde(skip)]
    pub examinable: bool,
}

/// Bytes sent and time waited by a rank.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RankReport {
    /// Bytes that it sent.
    pub sent: u64,
    /// Seconds in which it waited for messages; on the slowest rank the least.
    pub waited_seconds: f64,
}

impl From<Traffic> for RankReport {
    fn from(Traffic { sent, waited }: Traffic) -> Self {
        RankReport { sent, waited_seconds: waited.as_secs_f64() }
    }
}

//! Files of a training run: their names, the lines of its log, and its description.

use std::collections::BTreeMap;
use std::path::Path;

use mantissa_store::{Output, write_file_atomic};
use mantissa_train::scaling::ScaleEvent;
use serde::{Deserialize, Serialize};

use crate::data_report::DataReport;
use crate::error::Result;
use crate::learning::{Learning, NotLearning, UnusedExperts};
use crate::machine::Machine;

pub use crate::run_names::{ADAPTER, MANIFEST, MODEL};

/// Settings with all defaults.
pub const CONFIG: &str = "config.toml";
/// Maximum size of the settings and of `run.json`.
pub const MAX_FILE: u64 = 16 << 20;
/// Log with a JSON object per step.
pub const LOG: &str = "log.jsonl";
/// Telemetry with a JSON object per observed step.
pub const TELEMETRY: &str = "telemetry.jsonl";
/// Continuations of prompts, with a JSON object per prompt.
pub const SAMPLES: &str = "samples.jsonl";
/// Description of the run: a [`RunFile`].
pub const RUN: &str = "run.json";

/// Token file made from the data.
pub const TOKENS: &str = "tokens.safetensors";
/// Metadata key of the token file: the hash of its sources.
pub const MADE_FROM: &str = "made_from";
/// Folder of the checkpoints.
pub const CHECKPOINTS: &str = "checkpoints";
/// Folder of the base that an adapter was made with, if it fits no other.
pub const BASE: &str = "base";
/// Folder of the merged and quantized model.
pub const QUANTIZED: &str = "quantized";
/// Tokens held out for validation.
pub const HELD_OUT: &str = "validation.safetensors";
/// Folder of the tokenizer that was trained on the data.
pub const TOKENIZER: &str = "tokenizer";
/// Files of that folder.
pub const TOKENIZER_FILES: [&str; 2] = ["tokenizer.json", "tokenizer_config.json"];

/// Outcome of a run that has not ended, also after a kill.
pub const RUNNING: &str = "running";

/// Outcome of a run whose results are written.
pub const DONE: &str = "done";

/// Log line of a step.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LogLine {
    /// Step number, from 1.
    pub step: u64,
    /// Mean loss before the update, nats/token.
    pub loss: f64,
    /// Exponential moving average of the loss, with weight 0.1 per step.
    pub smoothed_loss: f64,
    /// Gradient norm before clipping; absent if it overflowed and the step was skipped.
    pub grad_norm: Option<f64>,
    /// Learning rate.
    pub lr: f64,
    /// Loss scale.
    pub loss_scale: f64,
    /// Number of skipped steps so far.
    pub skipped: u64,
    /// Number of tokens so far.
    pub tokens: u64,
    /// Change of the loss scale after this step, or an overflow that leaves it as it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scale_event: Option<ScaleEvent>,
    /// Throughput of this step by wall time, tok/s.
    pub tokens_per_s: f64,
    /// Seconds of training so far, in all processes of the run.
    #[serde(default)]
    pub seconds: f64,
    /// Anonymous resident memory in bytes; absent if unknown.
    pub memory: Option<u64>,
    /// Mean loss on held-out text after the update, nats/token, if it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub validation_loss: Option<f64>,
    /// Last step of a timed run, decided in this step; the decay begins after it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_step: Option<u64>,
    /// Parts that do not learn from this step on, if they are others than before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_learning: Option<NotLearning>,
    /// Experts that no token has chosen so far, if these are others than before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unused_experts: Option<Vec<UnusedExperts>>,
    /// True if a signal stopped the run before the step was validated and sampled. A resumed run does that first, and
    /// then replaces the line.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub pending: bool,
}

impl LogLine {
    /// Adds what the line tells of learning.
    pub fn tell(&self, learning: &mut Learning) {
        let change = (self.not_learning.as_ref(), self.unused_experts.as_deref());
        learning.add(self.step, self.grad_norm.is_some(), change);
        learning.add_loss(self.loss, self.smoothed_loss);
    }
}

/// Description of a run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RunFile {
    /// Tool and version.
    pub tool: String,
    /// Machine of the run, or of its last process.
    pub machine: Machine,
    /// Number of threads.
    pub threads: usize,
    /// Number of parameters.
    pub parameters: u64,
    /// Number of parameters that train, those of adapters included; absent from runs of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trainable_parameters: Option<u64>,
    /// Command that began the run, without its options; absent from runs of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_by: Option<String>,
    /// Precision policy.
    pub policy: String,
    /// Predicted bytes by purpose.
    pub memory: BTreeMap<String, u64>,
    /// Sum of the predicted bytes.
    pub predicted_peak_memory: u64,
    /// Peak anonymous memory of the last process in bytes; absent if unknown.
    pub measured_peak_memory: Option<u64>,
    /// Total number of steps.
    pub steps: u64,
    /// The data in numbers; absent from runs of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<DataReport>,
    /// Identity of the initial model and the teacher; absent from runs of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub models: Option<String>,
    /// Mean KL of the merged model from the adapter form, nats/token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub merged_kl: Option<f64>,
    /// Mean KL of the quantized model from the trained form, nats/token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quantized_kl: Option<f64>,
    /// Step at which a signal stopped the run, which can be resumed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stopped_at: Option<u64>,
    /// Outcome: `running` (also after a kill), `done` once the results are written, or the error that ended the run.
    pub outcome: String,
}

impl RunFile {
    /// Writes the description into the run's folder.
    ///
    /// # Errors
    /// I/O.
    pub fn write(&self, run: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(self)? + "\n";
        Ok(write_file_atomic(&Output::owned(run.join(RUN)), text.as_bytes())?)
    }
}

/// Says how a run ended that learned so: [`DONE`], or `done, but` with what did not learn.
pub(crate) fn outcome_of(learning: &Learning) -> String {
    learning.summary().map_or_else(|| DONE.to_owned(), |summary| format!("{DONE}, but {summary}"))
}

/// State of a run, by its lock and its description.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RunState {
    /// A process trains it; its id and start.
    Living(String),
    /// It has ended, and its results are written.
    Done,
    /// A signal stopped it after so many steps.
    Stopped(u64),
    /// It was killed: no process trains it, and it has not ended.
    Killed,
    /// An error ended it.
    Failed(String),
    /// Its description is missing.
    Unknown,
}

impl RunState {
    /// Finds the state of the run in a folder with the description `about`.
    ///
    /// # Errors
    /// A path that cannot be resolved.
    pub fn of(run: &Path, about: Option<&RunFile>) -> Result<Self> {
        if let Some(owner) = mantissa_store::writer_of(run)? {
            return Ok(RunState::Living(owner));
        }
        Ok(match about {
            None => RunState::Unknown,
            Some(about) if about.outcome == DONE => RunState::Done,
            Some(about) if about.outcome == RUNNING => RunState::Killed,
            Some(RunFile { stopped_at: Some(step), .. }) => RunState::Stopped(*step),
            Some(about) => RunState::Failed(about.outcome.clone()),
        })
    }

    /// Word for tables and JSON.
    pub fn word(&self) -> &'static str {
        match self {
            RunState::Living(_) => "running",
            RunState::Done => "done",
            RunState::Stopped(_) => "stopped",
            RunState::Killed => "killed",
            RunState::Failed(_) => "failed",
            RunState::Unknown => "unknown",
        }
    }
}

/// Returns the step of the newest checkpoint in a run's folder.
pub fn last_checkpoint(run: &Path) -> Option<u64> {
    let entries = std::fs::read_dir(run.join(CHECKPOINTS)).ok()?;
    entries.flatten().filter_map(|entry| steps_of(&entry.file_name().to_string_lossy())).max()
}

/// Returns the number of steps of a checkpoint's file name.
pub(crate) fn steps_of(name: &str) -> Option<u64> {
    let digits = name.strip_prefix("step-")?.strip_suffix(".safetensors")?;
    (digits.len() >= 10 && digits.bytes().all(|b| b.is_ascii_digit())).then(|| digits.parse().ok())?
}

/// True if a data file holds tokens instead of text.
pub(crate) fn is_token_file(file: &Path) -> bool {
    file.extension().is_some_and(|extension| extension == "safetensors")
}

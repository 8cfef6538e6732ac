//! Files of a run: checkpoints, logs, and its description.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::Result;
use mantissa_store::{Output, disk, regular, sealed, write_file_atomic};
use mantissa_train::scaling::ScaleEvent;
use mantissa_train::{TrainError, Trainer};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::owned::{RunFault, RunFolder};
use mantissa_jobs::machine::Machine;

/// Settings with all defaults.
pub const CONFIG: &str = "config.toml";
/// Maximum size of the settings and of `run.json`.
pub(super) const MAX_FILE: u64 = 16 << 20;
/// Log with a JSON object per step.
pub const LOG: &str = "log.jsonl";
/// Telemetry with a JSON object per observed step.
pub const TELEMETRY: &str = "telemetry.jsonl";
/// Continuations of prompts, with a JSON object per prompt.
pub const SAMPLES: &str = "samples.jsonl";
/// Description of the run: a [`RunFile`].
pub const RUN: &str = "run.json";

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
    /// True if a signal stopped the run before the step was validated and sampled. A resumed run does that first, and
    /// then replaces the line.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub pending: bool,
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

/// Returns the number of steps of a checkpoint's file name.
pub(super) fn steps_of(name: &str) -> Option<u64> {
    let digits = name.strip_prefix("step-")?.strip_suffix(".safetensors")?;
    (digits.len() >= 10 && digits.bytes().all(|b| b.is_ascii_digit())).then(|| digits.parse().ok())?
}

/// Checkpoints of a run.
pub(super) struct Checkpoints {
    pub(super) folder: RunFolder,
    pub(super) keep: usize,
    /// Step of the checkpoint that is kept besides.
    pub(super) best: Option<u64>,
}

impl Checkpoints {
    /// Loads the newest sound checkpoint; returns a warning for each damaged one.
    ///
    /// # Errors
    /// [`RunFault::NoSound`], a checkpoint with other settings, I/O.
    pub(super) fn load_last(&self, trainer: &mut Trainer, resolved: &str) -> Result<Vec<String>> {
        let all = self.folder.checkpoints();
        let mut damaged = Vec::new();
        for (steps, path) in all.iter().rev() {
            match trainer.load(path, resolved) {
                Ok(()) => {
                    let resumes = format!("is damaged; resuming from the checkpoint of step {steps}");
                    return Ok(damaged
                        .iter()
                        .map(|path: &&PathBuf| format!("{}: {resumes}", path.display()))
                        .collect());
                }
                Err(TrainError::Store(error)) if sealed::is_damage(&error) => damaged.push(path),
                Err(error) => return Err(error.into()),
            }
        }
        Err(RunFault::NoSound { run: self.folder.dir().to_owned(), count: all.len() }.into())
    }

    /// Loads the checkpoint of `step`; false if it is lost or damaged, and the trainer must not be used then.
    ///
    /// # Errors
    /// A checkpoint with other settings, I/O.
    pub(super) fn load(&self, step: u64, trainer: &mut Trainer, resolved: &str) -> Result<bool> {
        let all = self.folder.checkpoints();
        let Some((_, path)) = all.iter().find(|(steps, _)| *steps == step) else { return Ok(false) };
        match trainer.load(path, resolved) {
            Ok(()) => Ok(true),
            Err(TrainError::Store(error)) if sealed::is_damage(&error) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Writes a checkpoint, then removes those beyond `keep`, but not the best.
    ///
    /// # Errors
    /// I/O; older checkpoints then remain.
    pub(super) fn write(&mut self, trainer: &Trainer, resolved: &str) -> Result<()> {
        let now = trainer.progress().steps;
        let path = self.folder.checkpoint(now)?;
        trainer.save(&Output::owned(&path), resolved)?;
        // Checkpoints of later steps are damaged, otherwise the run would have resumed from them.
        let (later, mut old): (Vec<_>, Vec<_>) =
            self.folder.checkpoints().into_iter().partition(|(steps, _)| *steps > now);
        old.truncate(old.len().saturating_sub(self.keep));
        old.retain(|(steps, _)| Some(*steps) != self.best);
        for (_, path) in later.iter().chain(&old) {
            let io = |error| mantissa_store::Error::Io { path: path.clone(), operation: "remove", error };
            disk::remove_file(path).map_err(io)?;
        }
        if let Some(folder) = path.parent().filter(|_| !(later.is_empty() && old.is_empty())) {
            // Removed durably before they leave the list: after a power cut they would return as foreign
            // files.
            let io = |error| mantissa_store::Error::Io {
                path: folder.to_owned(),
                operation: "fsync folder",
                error,
            };
            disk::sync_path(folder).map_err(io)?;
        }
        Ok(())
    }
}

/// Returns the last step of a log; 0 without a log.
///
/// # Errors
/// I/O.
pub(super) fn logged_steps(path: &Path) -> Result<u64> {
    let bytes = read_log(path)?;
    Ok(bytes.split(|&b| b == b'\n').filter_map(step_of).max().unwrap_or(0))
}

fn read_log(path: &Path) -> Result<Vec<u8>> {
    Ok(regular::read_optional(path, u64::MAX, "a log of mantissa train")?.unwrap_or_default())
}

/// Returns the step of a line; `None` if it is not a JSON object with a step.
fn step_of(line: &[u8]) -> Option<u64> {
    let object = line.trim_ascii_start().starts_with(b"{");
    serde_json::from_slice::<Step>(line).ok().filter(|_| object).map(|line| line.step)
}

/// JSON Lines log with a field `step` per line.
pub(super) struct Log {
    path: PathBuf,
    file: fs::File,
}

#[derive(Deserialize)]
struct Step {
    step: u64,
}

impl Log {
    /// Opens the log after the lines of the first `steps` steps, which are passed to `each`: steps after the last
    /// checkpoint are repeated.
    ///
    /// # Errors
    /// I/O.
    pub(super) fn open<T: DeserializeOwned>(path: &Path, steps: u64, each: impl FnMut(T)) -> Result<Self> {
        let io = |operation: &'static str| {
            let path = path.to_owned();
            move |error| mantissa_store::Error::Io { path, operation, error }
        };
        let bytes = read_log(path)?;
        // An incomplete last line of a killed process, or a damaged line, is not an object.
        let kept = |line: &&[u8]| step_of(line).is_some_and(|step| step <= steps);
        let kept: Vec<_> = bytes.split(|&b| b == b'\n').filter(kept).collect();
        let text: Vec<u8> = kept.iter().flat_map(|line| [line, &b"\n"[..]].concat()).collect();
        if text != bytes {
            write_file_atomic(&Output::owned(path), &text)?;
        }
        let file = disk::open_append(path).map_err(io("open"))?;
        kept.iter().filter_map(|line| serde_json::from_slice(line).ok()).for_each(each);
        Ok(Log { path: path.to_owned(), file })
    }

    /// Appends a line.
    ///
    /// # Errors
    /// I/O.
    pub(super) fn write(&mut self, line: &impl Serialize) -> Result<()> {
        let text = serde_json::to_string(line)? + "\n";
        Ok(disk::append(&self.file, &self.path, text.as_bytes())
            .map_err(|error| self.error("write", error))?)
    }

    /// Replaces the last line, durably and atomically.
    ///
    /// # Errors
    /// I/O; the log is then unchanged.
    pub(super) fn replace_last(&mut self, line: &impl Serialize) -> Result<()> {
        let bytes = read_log(&self.path)?;
        let whole = bytes.strip_suffix(b"\n").unwrap_or(&bytes);
        let kept = whole.iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
        let text = [&whole[..kept], serde_json::to_string(line)?.as_bytes(), b"\n"].concat();
        write_file_atomic(&Output::owned(&self.path), &text)?;
        self.file = disk::open_append(&self.path).map_err(|error| self.error("open", error))?;
        Ok(())
    }

    /// Makes the lines durable.
    ///
    /// # Errors
    /// I/O.
    pub(super) fn sync(&self) -> Result<()> {
        Ok(disk::sync_data(&self.file, &self.path).map_err(|error| self.error("fsync", error))?)
    }

    fn error(&self, operation: &'static str, error: io::Error) -> mantissa_store::Error {
        mantissa_store::Error::Io { path: self.path.clone(), operation, error }
    }
}

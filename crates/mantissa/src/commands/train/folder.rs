//! Files that a run writes: checkpoints, logs, and its description.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::Result;
use mantissa_store::{Output, disk, sealed, write_file_atomic};
use mantissa_train::{TrainError, Trainer};
use serde::{Deserialize, Serialize};

use super::owned::{RunFault, RunFolder};
use crate::machine::Machine;

/// The settings with all defaults.
pub const CONFIG: &str = "config.toml";
/// A JSON object for every step.
pub const LOG: &str = "log.jsonl";
/// A JSON object for every step whose tensors were looked at.
pub const TELEMETRY: &str = "telemetry.jsonl";
/// What the run says of itself: a [`RunFile`].
pub const RUN: &str = "run.json";

/// A line of the log.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LogLine {
    /// Number of the step, from 1.
    pub step: u64,
    /// Mean loss of its tokens before the update, nats.
    pub loss: f64,
    /// Exponential mean of the losses, of which each counts a tenth.
    pub smoothed_loss: f64,
    /// Norm of the gradients before clipping; absent where one overflowed and the update was left out.
    pub grad_norm: Option<f64>,
    /// Learning rate.
    pub lr: f64,
    /// What the loss was multiplied by.
    pub loss_scale: f64,
    /// Steps so far whose update was left out.
    pub skipped: u64,
    /// Tokens so far.
    pub tokens: u64,
    /// Tokens of this step by its wall time.
    pub tokens_per_s: f64,
    /// Anonymous resident memory, bytes; absent where the system does not say.
    pub memory: Option<u64>,
    /// Loss of the validation data, where this step measured it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub validation_loss: Option<f64>,
}

/// What a run says of itself.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RunFile {
    /// Tool and version.
    pub tool: String,
    /// Where it runs, or ran last.
    pub machine: Machine,
    /// Threads of a step.
    pub threads: usize,
    /// Parameters of the model.
    pub parameters: u64,
    /// Precision policy.
    pub policy: String,
    /// Bytes by name, predicted.
    pub memory: BTreeMap<String, u64>,
    /// Their sum.
    pub predicted_peak_memory: u64,
    /// Largest anonymous memory of the last process, bytes; absent where the system does not say.
    pub measured_peak_memory: Option<u64>,
    /// Steps that the run is to have.
    pub steps: u64,
    /// `running`, which a killed run still says; `done`; or the error that ended it.
    pub outcome: String,
}

impl RunFile {
    /// Writes it into the folder of the run.
    ///
    /// # Errors
    /// I/O.
    pub fn write(&self, run: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(self)? + "\n";
        Ok(write_file_atomic(&Output::owned(run.join(RUN)), text.as_bytes())?)
    }
}

/// Steps of the checkpoint of this file name.
pub(super) fn steps_of(name: &str) -> Option<u64> {
    let digits = name.strip_prefix("step-")?.strip_suffix(".safetensors")?;
    (digits.len() >= 10 && digits.bytes().all(|b| b.is_ascii_digit())).then(|| digits.parse().ok())?
}

/// The checkpoints of a run.
pub(super) struct Checkpoints {
    pub(super) folder: RunFolder,
    pub(super) keep: usize,
}

impl Checkpoints {
    /// Loads the newest that is sound; gives a warning for each damaged one.
    ///
    /// # Errors
    /// [`RunFault::NoSound`], a checkpoint of other settings, I/O.
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

    /// Writes one, and removes those that are too many once it is in place.
    ///
    /// # Errors
    /// I/O; those that were there are then still there.
    pub(super) fn write(&mut self, trainer: &Trainer, resolved: &str) -> Result<()> {
        let now = trainer.progress().steps;
        let path = self.folder.checkpoint(now)?;
        trainer.save(&Output::owned(&path), resolved)?;
        // Those of later steps are damaged, or the run would have been resumed from them.
        let (later, mut old): (Vec<_>, Vec<_>) =
            self.folder.checkpoints().into_iter().partition(|(steps, _)| *steps > now);
        old.truncate(old.len().saturating_sub(self.keep));
        for (_, path) in later.iter().chain(&old) {
            let io = |error| mantissa_store::Error::Io { path: path.clone(), operation: "remove", error };
            disk::remove_file(path).map_err(io)?;
        }
        if let Some(folder) = path.parent().filter(|_| !(later.is_empty() && old.is_empty())) {
            // Before they are no longer listed: after a power cut they would come back as files of others.
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

/// Largest step of a log, 0 where there is no log.
///
/// # Errors
/// I/O.
pub(super) fn logged_steps(path: &Path) -> Result<u64> {
    let bytes = read_log(path)?;
    Ok(bytes.split(|&b| b == b'\n').filter_map(step_of).max().unwrap_or(0))
}

fn read_log(path: &Path) -> Result<Vec<u8>> {
    match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        bytes => Ok(bytes.map_err(|error| mantissa_store::Error::Io {
            path: path.to_owned(),
            operation: "read",
            error,
        })?),
    }
}

/// Step of a line; `None` where it is no JSON object with one.
fn step_of(line: &[u8]) -> Option<u64> {
    let object = line.trim_ascii_start().starts_with(b"{");
    serde_json::from_slice::<Step>(line).ok().filter(|_| object).map(|line| line.step)
}

/// A log, a JSON object with a field `step` on each line.
pub(super) struct Log {
    path: PathBuf,
    file: fs::File,
    last: Option<String>,
}

#[derive(Deserialize)]
struct Step {
    step: u64,
}

impl Log {
    /// Opens it behind the lines of the first `steps` steps: what was done after the last checkpoint is done again.
    ///
    /// # Errors
    /// I/O.
    pub(super) fn open(path: &Path, steps: u64) -> Result<Self> {
        let io = |operation: &'static str| {
            let path = path.to_owned();
            move |error| mantissa_store::Error::Io { path, operation, error }
        };
        let bytes = read_log(path)?;
        // What a killed process has left of its last line is no object, nor is a line that was damaged since.
        let kept = |line: &&[u8]| step_of(line).is_some_and(|step| step <= steps);
        let kept: Vec<_> = bytes.split(|&b| b == b'\n').filter(kept).collect();
        let text: Vec<u8> = kept.iter().flat_map(|line| [line, &b"\n"[..]].concat()).collect();
        if text != bytes {
            write_file_atomic(&Output::owned(path), &text)?;
        }
        let file = disk::open_append(path).map_err(io("open"))?;
        let last = kept.last().map(|line| String::from_utf8_lossy(line).into_owned());
        Ok(Log { path: path.to_owned(), file, last })
    }

    /// The last line that was there.
    pub(super) fn last<'a, T: Deserialize<'a>>(&'a self) -> Option<T> {
        serde_json::from_str(self.last.as_deref()?).ok()
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

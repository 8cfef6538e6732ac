//! The folder of a run: its checkpoints, logs, and what it says of itself.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::Result;
use mantissa_store::{Output, StagedFile, disk, write_file_atomic};
use mantissa_train::Trainer;
use serde::{Deserialize, Serialize};

use crate::error::BadInput;
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

/// Makes the folder of the run; refuses to touch one that is there unless that is asked for.
///
/// # Errors
/// [`BadInput`], I/O.
pub(super) fn begin(run: &Path, resume: bool, restart: bool) -> Result<()> {
    let io = |operation: &'static str| {
        let path = run.to_owned();
        move |error| mantissa_store::Error::Io { path, operation, error }
    };
    let checkpoints = Checkpoints { dir: run.join("checkpoints"), keep: 1 };
    let there = checkpoints.dir.exists() && !checkpoints.all()?.is_empty();
    match (there, resume, restart) {
        (true, false, false) => {
            let found = "a run that is begun already";
            return Err(BadInput::new(run.display().to_string(), found, "--resume or --restart").into());
        }
        (false, true, _) => {
            return Err(
                BadInput::new(run.display().to_string(), "no checkpoint", "a run to go on with").into()
            );
        }
        (_, false, true) => {
            for name in ["checkpoints", "model"] {
                let dir = run.join(name);
                if dir.exists() {
                    fs::remove_dir_all(dir).map_err(io("remove the old run"))?;
                }
            }
            for name in [LOG, TELEMETRY, RUN, "tokens.safetensors"] {
                let _ = fs::remove_file(run.join(name));
            }
        }
        _ => {}
    }
    fs::create_dir_all(run.join("checkpoints")).map_err(io("create"))?;
    Ok(())
}

/// The checkpoints of a run.
pub(super) struct Checkpoints {
    pub(super) dir: PathBuf,
    pub(super) keep: usize,
}

impl Checkpoints {
    /// All of them, the oldest first.
    fn all(&self) -> Result<Vec<PathBuf>> {
        let io =
            |error| mantissa_store::Error::Io { path: self.dir.clone(), operation: "list folder", error };
        let entries = fs::read_dir(&self.dir).map_err(io)?;
        let paths = entries.map(|entry| Ok(entry.map_err(io)?.path())).collect::<Result<Vec<_>>>()?;
        let name =
            |path: &PathBuf| path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        let ours = |path: &PathBuf| name(path).starts_with("step-") && name(path).ends_with(".safetensors");
        let mut all: Vec<_> = paths.into_iter().filter(ours).collect();
        all.sort();
        Ok(all)
    }

    /// # Errors
    /// [`BadInput`] where there is none.
    pub(super) fn last(&self) -> Result<PathBuf> {
        let none = || BadInput::new(self.dir.display().to_string(), "no checkpoint", "at least one");
        Ok(self.all()?.pop().ok_or_else(none)?)
    }

    /// Writes one, and removes those that are too many once it is in place.
    ///
    /// # Errors
    /// I/O; those that were there are then still there.
    pub(super) fn write(&self, trainer: &Trainer, resolved: &str) -> Result<()> {
        let path = self.dir.join(format!("step-{:010}.safetensors", trainer.progress().steps));
        trainer.save(&Output::owned(&path), resolved)?;
        let all = self.all()?;
        for old in &all[..all.len().saturating_sub(self.keep)] {
            let io = |error| mantissa_store::Error::Io { path: old.clone(), operation: "remove", error };
            disk::remove_file(old).map_err(io)?;
        }
        Ok(())
    }
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
        let text = match fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
            Err(error) => return Err(io("read")(error).into()),
        };
        // What a killed process has left of its last line is no object.
        let kept = |line: &&str| serde_json::from_str::<Step>(line).is_ok_and(|line| line.step <= steps);
        let kept: Vec<_> = text.lines().filter(kept).collect();
        let staged = StagedFile::begin(&Output::owned(path))?;
        staged.write(kept.iter().map(|line| format!("{line}\n")).collect::<String>().as_bytes())?;
        staged.commit()?;
        let file = fs::OpenOptions::new().append(true).open(path).map_err(io("open"))?;
        Ok(Log { path: path.to_owned(), file, last: kept.last().map(|line| (*line).to_owned()) })
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

//! Event files of TensorBoard: what the log has, for `tensorboard --logdir` and `wandb sync`.

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use mantissa_store::{EventFile, disk};

use crate::error::{JobError, Result};
use crate::run_files::LogLine;

/// Name of the event file, which tools find by `.tfevents.`.
const FILE: &str = "events.out.tfevents.0.mantissa";

/// Events of a run.
pub(crate) struct Events {
    file: EventFile,
    /// Seconds since 1970 at which the run would have begun without a break.
    begin: f64,
}

/// Returns the folder of a run's events: TensorBoard shows each folder as a run of its own.
pub fn folder(dir: &Path, run: &Path) -> PathBuf {
    let run = std::path::absolute(run).unwrap_or_else(|_| run.to_owned());
    dir.join(run.file_name().unwrap_or_else(|| "run".as_ref()))
}

impl Events {
    /// Opens the events of the run at `run` in a folder of `dir`, after `steps` steps that took `seconds`.
    ///
    /// # Errors
    /// A folder with the events of another run; I/O.
    pub(crate) fn open(dir: &Path, run: &Path, settings: &str, steps: u64, seconds: f64) -> Result<Self> {
        let folder = folder(dir, run);
        disk::create_folders(&folder).map_err(|error| -> JobError {
            mantissa_store::Error::Io { path: folder.clone(), operation: "create folder", error }.into()
        })?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64());
        let run = std::path::absolute(run)?.display().to_string();
        // Markdown shows indented text as it is.
        let settings: String = settings.lines().map(|line| format!("    {line}\n")).collect();
        let texts = [("settings", settings.as_str())];
        let file = EventFile::open(&folder.join(FILE), &run, &texts, steps, now - seconds)?;
        Ok(Events { file, begin: now - seconds })
    }

    /// True if a step of the log is in no event yet.
    pub(crate) fn lacks(&self, step: u64) -> bool {
        self.file.last_step().is_none_or(|last| step > last)
    }

    /// Writes a step.
    ///
    /// # Errors
    /// I/O.
    pub(crate) fn write(&mut self, line: &LogLine) -> Result<()> {
        let always = [
            ("train/loss", Some(line.loss)),
            ("train/smoothed_loss", Some(line.smoothed_loss)),
            ("train/grad_norm", line.grad_norm),
            ("train/learning_rate", Some(line.lr)),
            ("train/loss_scale", Some(line.loss_scale).filter(|scale| *scale != 1.0)),
            ("train/skipped_steps", Some(line.skipped as f64)),
            ("train/tokens", Some(line.tokens as f64)),
            ("train/tokens_per_s", Some(line.tokens_per_s)),
            ("train/memory_bytes", line.memory.map(|bytes| bytes as f64)),
            ("validation/loss", line.validation_loss),
        ];
        let scalars: Vec<_> = always.into_iter().filter_map(|(tag, value)| Some((tag, value?))).collect();
        Ok(self.file.scalars(line.step, self.begin + line.seconds, &scalars)?)
    }

    /// Makes the events durable.
    ///
    /// # Errors
    /// I/O.
    pub(crate) fn sync(&self) -> Result<()> {
        Ok(self.file.sync()?)
    }
}

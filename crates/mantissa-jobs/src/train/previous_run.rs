//! Previous run in the folder: what it tells a user whose command cannot start or resume there.

use std::path::{Path, PathBuf};

use mantissa_store::regular;
use mantissa_train::TrainError;
use mantissa_train::config::differences;

use super::start::StartMode;
use crate::error::JobError;
use crate::run_fault::RunFault;
use crate::run_files::{ADAPTER, CHECKPOINTS, CONFIG, DONE, MAX_FILE, MODEL, RUN, RunFile, steps_of};
use crate::text::counted;

/// Run that the folder holds, compared with the settings of the command.
pub(crate) struct PreviousRun {
    run: PathBuf,
    /// Description of a run that has ended and written its model.
    finished: Option<RunFile>,
    /// True if the settings are the same.
    is_same: bool,
    /// Keys with other values.
    differences: Vec<String>,
    /// True if the settings are the same and there is a checkpoint.
    resumable: bool,
    /// Option of the command that names another folder.
    out: &'static str,
}

impl PreviousRun {
    /// Reads the run at `run`; `resolved` are the settings of the command, and `out` its option that names another folder.
    pub(crate) fn read(run: &Path, resolved: &str, out: &'static str) -> Self {
        let text = |name| regular::read(&run.join(name), MAX_FILE, "a file of a run").ok();
        let about: Option<RunFile> = text(RUN).and_then(|text| serde_json::from_slice(&text).ok());
        let written = run.join(MODEL).join("config.json").is_file()
            || run.join(ADAPTER).join("adapter_config.json").is_file();
        let finished = about.filter(|about| about.outcome == DONE && written);
        let settings = text(CONFIG).and_then(|text| String::from_utf8(text).ok()).unwrap_or_default();
        let checkpoints = std::fs::read_dir(run.join(CHECKPOINTS)).into_iter().flatten().flatten();
        let mut names = checkpoints.map(|entry| entry.file_name());
        let is_same = settings == resolved;
        let resumable = is_same && names.any(|name| steps_of(&name.to_string_lossy()).is_some());
        PreviousRun {
            run: run.to_owned(),
            finished,
            is_same,
            differences: differences(&settings, resolved),
            resumable,
            out,
        }
    }

    /// Returns the mode of starting that `requested` means here: the command that began a run also resumes it.
    pub(crate) fn how(&self, requested: StartMode) -> StartMode {
        match requested {
            StartMode::New if self.resumable && self.finished.is_none() => StartMode::Continue,
            _ => requested,
        }
    }

    /// Returns the description of a finished run of the same settings.
    pub(crate) fn finished_alike(&self) -> Option<&RunFile> {
        self.finished.as_ref().filter(|_| self.is_same)
    }

    /// Replaces an error that the previous run explains.
    pub(crate) fn explain(mut self, error: JobError) -> JobError {
        if matches!(error, JobError::Run(RunFault::Begun { .. })) {
            return if self.finished.is_some() || !self.differences.is_empty() {
                self.fault()
            } else {
                error
            };
        }
        match error {
            JobError::Train(TrainError::Settings { differences, .. }) => {
                self.differences = differences;
                self.fault()
            }
            error => error,
        }
    }

    fn fault(self) -> JobError {
        let found = match self.differences.as_slice() {
            [] => self.state(),
            differences => format!("{} with other settings ({})", self.state(), differences.join(", ")),
        };
        let further = self.further();
        RunFault::Other { run: self.run, found, out: self.out, further }.into()
    }

    /// Makes the error for a finished run of the same settings that differs by `difference`.
    pub(crate) fn differs(self, difference: &str) -> JobError {
        let found = format!("{} {difference}", self.state());
        let further = self.further();
        RunFault::Other { run: self.run, found, out: self.out, further }.into()
    }

    /// Says how to go on from the model of a finished run, whose schedule has ended.
    fn further(&self) -> String {
        let model = self.run.join(MODEL);
        match self.finished {
            Some(_) if model.is_dir() && self.out.starts_with("--out") => {
                format!("; to train its model further, name {} as MODEL of another run", model.display())
            }
            Some(_) if model.is_dir() => format!(
                "; to train its model further, name it in another run: init = \"{}\" in [model], instead of architecture or config",
                model.display()
            ),
            _ => String::new(),
        }
    }

    fn state(&self) -> String {
        match &self.finished {
            Some(about) => format!("one that finished its {}", counted(about.steps, "step")),
            None => "one that has begun".to_owned(),
        }
    }
}

//! Earlier run in the folder: what it tells a user whose command cannot start or resume there.

use std::path::{Path, PathBuf};

use mantissa_train::TrainError;
use mantissa_train::config::differences;

use super::folder::{CONFIG, RUN, RunFile};
use super::owned::{ADAPTER, MODEL, RunFault};

/// Run that the folder holds, compared with the settings of the command.
pub(super) struct Earlier {
    run: PathBuf,
    /// Steps of a run that has ended and written its model.
    finished: Option<u64>,
    /// Keys with other values.
    differences: Vec<String>,
}

impl Earlier {
    /// Reads the run at `run`; `resolved` are the settings of the command.
    pub(super) fn read(run: &Path, resolved: &str) -> Self {
        let about = std::fs::read_to_string(run.join(RUN)).ok();
        let about: Option<RunFile> = about.and_then(|text| serde_json::from_str(&text).ok());
        let written = run.join(MODEL).join("config.json").is_file()
            || run.join(ADAPTER).join("adapter_config.json").is_file();
        let finished = about.filter(|about| about.outcome == "done" && written).map(|about| about.steps);
        let settings = std::fs::read_to_string(run.join(CONFIG)).unwrap_or_default();
        Earlier { run: run.to_owned(), finished, differences: differences(&settings, resolved) }
    }

    /// Replaces an error that the earlier run explains.
    pub(super) fn explain(mut self, error: anyhow::Error) -> anyhow::Error {
        if matches!(error.downcast_ref(), Some(RunFault::Begun { .. })) {
            return if self.finished.is_some() || !self.differences.is_empty() {
                self.fault()
            } else {
                error
            };
        }
        match error.downcast::<TrainError>() {
            Ok(TrainError::Settings { differences, .. }) => {
                self.differences = differences;
                self.fault()
            }
            Ok(error) => error.into(),
            Err(error) => error,
        }
    }

    fn fault(self) -> anyhow::Error {
        let state = match self.finished {
            Some(steps) => format!("one that finished its {steps} steps"),
            None => "one that has begun".to_owned(),
        };
        let found = match self.differences.as_slice() {
            [] => state,
            differences => format!("{state} with other settings ({})", differences.join(", ")),
        };
        RunFault::Other { run: self.run, found }.into()
    }
}

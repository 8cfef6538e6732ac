//! Checkpoints of a training run: the newest ones and the best.

use std::path::PathBuf;

use mantissa_store::{Output, disk, sealed};
use mantissa_train::{TrainError, Trainer};

use super::run_folder::RunFolder;
use crate::error::Result;
use crate::run_fault::RunFault;

/// Checkpoints of a run.
pub(crate) struct Checkpoints {
    pub(crate) folder: RunFolder,
    pub(crate) keep: usize,
    /// Step of the checkpoint that is kept besides.
    pub(crate) best: Option<u64>,
}

impl Checkpoints {
    /// Loads the newest sound checkpoint; returns a warning for each damaged one.
    ///
    /// # Errors
    /// [`RunFault::NoSound`], a checkpoint with other settings, I/O.
    pub(crate) fn load_last(&self, trainer: &mut Trainer, resolved: &str) -> Result<Vec<String>> {
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
    pub(crate) fn load(&self, step: u64, trainer: &mut Trainer, resolved: &str) -> Result<bool> {
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
    pub(crate) fn write(&mut self, trainer: &mut Trainer, resolved: &str) -> Result<()> {
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

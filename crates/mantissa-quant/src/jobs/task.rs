//! Steps that every job has, and the [`Destination`] in which jobs differ.

use std::path::{Path, PathBuf};
use std::time::Duration;

use mantissa_store::convention::ModelFiles;
use mantissa_store::{Committed, Manifest, Output};
use serde_json::{Map, Value, json};

use super::describe::Contents;
use crate::assess;
use crate::convert;
use crate::error::{QuantError, Result};
use crate::journal::Journal;
use crate::plan::Plan;
use crate::progress::Tell;
use crate::quality::{Quality, Verification};
use crate::shared::Shared;
use crate::transform::Prepared;

/// Result of a run.
#[derive(Debug)]
pub struct Outcome {
    /// Contents of `quality.json`.
    pub quality: Quality,
    /// Output in its place.
    pub committed: Committed,
    /// Number of units resumed from an unfinished run.
    pub resumed: usize,
    /// Time to sync a file of weights to disk after it was written. `None` for a folder, whose tensors are synced as
    /// they are written.
    pub synced: Option<Duration>,
    /// Verification before the output was put in place, with its duration, if the plan asks for it.
    pub verification: Option<(Verification, Duration)>,
}

/// Output while it is written.
pub(super) trait Destination: Sized {
    /// Writes the weights and the files that describe them.
    fn fill(&mut self, task: &Task<'_>, progress: &mut Tell<'_>) -> Result<Contents>;

    /// Path that opens the staged model.
    fn staged(&self) -> PathBuf;

    /// Returns the journal, if an unfinished run can be resumed.
    fn journal(&mut self) -> Option<&mut Journal> {
        None
    }

    /// Returns the work folder that is kept if the quality gate fails.
    fn kept(&self) -> Option<&Path> {
        None
    }

    /// Writes `quality.json` and the manifest, and syncs all files to disk.
    fn seal(&mut self, quality: &Quality, run: Map<String, Value>) -> Result<()>;

    /// Returns the result of the transform, once the output is filled.
    fn prepared(&self) -> Option<&Prepared> {
        None
    }

    /// Keeps finished work for the next run, or removes it, because another output of the same run failed.
    fn leave(self, _keep: bool) {}

    /// Puts the output in place of the old one.
    fn publish(self) -> Result<Published>;

    /// Keeps or removes the work folder after `error`. May wrap the error with what is kept.
    fn abandon(self, error: QuantError) -> QuantError {
        error
    }
}

/// An output that was put in place.
pub(super) struct Published {
    pub(super) committed: Committed,
    pub(super) resumed: usize,
    pub(super) synced: Option<Duration>,
}

/// A plan with its source and output.
#[derive(Clone, Copy)]
pub(super) struct Task<'a> {
    pub(super) plan: &'a Plan,
    pub(super) source: &'a ModelFiles,
    pub(super) out: &'a Output,
    /// Output of the same run whose layers have the same codes and scales.
    pub(super) shared: Option<&'a Shared<'a>>,
}

/// Returns the bytes of all tensors in the files at `staged`.
///
/// # Errors
/// [`QuantError::Bytes`] if the plan expects others.
pub(super) fn written_bytes(plan: &Plan, staged: &Path) -> Result<u64> {
    let files = ModelFiles::open(staged)?;
    let got = match files.gguf() {
        // Numbers of keys are no tensors of the file.
        Some(model) => {
            let listed = |name: &str| model.architecture().is_some_and(|row| row.listed_as(name).is_some());
            model.tensors().iter().filter(|tensor| !listed(&tensor.name)).map(|tensor| tensor.len).sum()
        }
        None => files.checkpoint().total_bytes(),
    };
    let expected = plan.output_bytes();
    match expected == got {
        true => Ok(got),
        false => Err(QuantError::Bytes { path: staged.to_owned(), expected, got }),
    }
}

impl Task<'_> {
    pub(super) fn run<D: Destination>(&self, mut to: D, progress: &mut Tell<'_>) -> Result<Outcome> {
        match self.finish(&mut to, progress) {
            Ok((quality, verification)) => {
                let Published { committed, resumed, synced } = to.publish()?;
                Ok(Outcome { quality, committed, resumed, synced, verification })
            }
            Err(error) => Err(to.abandon(error)),
        }
    }

    /// Performs all steps but the last renames.
    pub(super) fn finish<D: Destination>(
        &self,
        to: &mut D,
        progress: &mut Tell<'_>,
    ) -> Result<(Quality, Option<(Verification, Duration)>)> {
        let contents = to.fill(self, progress)?;
        self.complete(to, contents, progress)
    }

    /// Performs the steps between the fill and the last renames: evaluation, tasks, quality gate, manifest, verification.
    pub(super) fn complete<D: Destination>(
        &self,
        to: &mut D,
        contents: Contents,
        progress: &mut Tell<'_>,
    ) -> Result<(Quality, Option<(Verification, Duration)>)> {
        let Task { plan, source, out, .. } = *self;
        let mut quality = Quality::new(plan, source, contents);
        let staged = to.staged();
        quality.bytes = written_bytes(plan, &staged)?;
        quality.evaluation = assess::figures(plan, source, &staged, to.journal(), progress)?;
        convert::prove(plan, source, &staged)?;
        assess::gate(plan, &quality, out.path(), to.kept())?;
        // Only an output within --max-kl is worth the time of the tasks.
        if plan.tasks.is_some() {
            quality.tasks = assess::tasks(plan, source, &staged, to.journal(), progress)?;
            assess::gate(plan, &quality, out.path(), to.kept())?;
        }
        to.seal(&quality, self.run_fields()?)?;
        let verification = assess::sealed(plan, &quality, &staged, out.path())?;
        Ok((quality, verification))
    }

    /// Returns the manifest's description of this run, after the descriptions of the runs that made the source.
    ///
    /// # Errors
    /// The source's manifest is malformed.
    pub(super) fn run_fields(&self) -> Result<Map<String, Value>> {
        let plan = self.plan;
        let fields = json!({
            "command": plan.job.command(),
            "recipe": plan.job.label(),
            "method": plan.method_name(),
            "weights": plan.weights.to_string(),
            "activations": plan.activation_names(),
            "kv": plan.cache(),
            "container": plan.container.name(),
        });
        let fields = fields.as_object().cloned().unwrap_or_default();
        Ok(Manifest::run_after(self.source.dir(), fields)?)
    }
}

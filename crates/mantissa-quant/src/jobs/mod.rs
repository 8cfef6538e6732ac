//! Execution of plans. Every job has the same steps: start a work folder beside the output, fill it, evaluate and
//! verify it, and put it in place. Jobs differ in their [`Destination`].

pub(crate) mod convert;
mod describe;
mod folder;
mod gguf_file;
mod quantize;
pub(crate) mod recalibrate;
pub(crate) mod several;
mod tensors;

use std::path::{Path, PathBuf};
use std::time::Duration;

use mantissa_store::convention::ModelFiles;
use mantissa_store::{Committed, Manifest, Output, refuse_overlap};
use serde_json::{Map, Value, json};

use crate::assess;
use crate::error::{QuantError, Result};
use crate::journal::{Journal, Start};
use crate::plan::Plan;
use crate::progress::{Progress, Tell};
use crate::quality::Quality;
use crate::shared::Shared;
use crate::transform::Prepared;
use crate::verify::verification::Verification;

use describe::Contents;
use folder::Folder;
use gguf_file::GgufFiles;

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
trait Destination: Sized {
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
struct Published {
    committed: Committed,
    resumed: usize,
    synced: Option<Duration>,
}

/// A plan with its source and output.
#[derive(Clone, Copy)]
struct Task<'a> {
    plan: &'a Plan,
    source: &'a ModelFiles,
    out: &'a Output,
    /// Output of the same run whose layers have the same codes and scales.
    shared: Option<&'a Shared<'a>>,
}

/// Executes `plan` and writes the output to `out`. `progress` is called at every step; `Break` interrupts the run.
///
/// A folder has a journal: when a run ends, its finished work is on disk, and the next run with the same plan resumes
/// it. A GGUF file starts over. Only a kill between the last renames can leave a GGUF file, old or new, without
/// `quality.json` and manifest. The next start completes it.
///
/// # Errors
/// [`QuantError::Store`] for files, [`QuantError::Tensor`] for values that a scheme cannot represent,
/// [`QuantError::Interrupted`] if `progress` ends the run, [`QuantError::Gate`] if the quality loss exceeds a limit
/// of [`Plan::evaluation`] or [`Plan::tasks`]; wrapped in [`QuantError::Unfinished`] if a work folder is kept. The old content of `out`,
/// if any, is then still in place.
pub fn run(
    plan: &Plan,
    source: &ModelFiles,
    out: &Output,
    start: Start,
    progress: &mut (dyn FnMut(Progress<'_>) -> std::ops::ControlFlow<()> + Send),
) -> Result<Outcome> {
    refuse_overlap(source.dir(), out.path())?;
    let task = Task { plan, source, out, shared: None };
    match &plan.gguf {
        Some(layout) => task.run(GgufFiles::begin(&task, layout)?, progress),
        None => task.run(Folder::begin(&task, start)?, progress),
    }
}

/// Returns the bytes of all tensors in the files at `staged`.
///
/// # Errors
/// [`QuantError::Bytes`] if the plan expects others.
fn written_bytes(plan: &Plan, staged: &Path) -> Result<u64> {
    let files = ModelFiles::open(staged)?;
    let got = match files.gguf() {
        Some(model) => model.tensors().iter().map(|tensor| tensor.len).sum(),
        None => files.checkpoint().total_bytes(),
    };
    let expected = plan.output_bytes();
    match expected == got {
        true => Ok(got),
        false => Err(QuantError::Bytes { path: staged.to_owned(), expected, got }),
    }
}

impl Task<'_> {
    fn run<D: Destination>(&self, mut to: D, progress: &mut Tell<'_>) -> Result<Outcome> {
        match self.finish(&mut to, progress) {
            Ok((quality, verification)) => {
                let Published { committed, resumed, synced } = to.publish()?;
                Ok(Outcome { quality, committed, resumed, synced, verification })
            }
            Err(error) => Err(to.abandon(error)),
        }
    }

    /// Performs all steps but the last renames.
    fn finish<D: Destination>(
        &self,
        to: &mut D,
        progress: &mut Tell<'_>,
    ) -> Result<(Quality, Option<(Verification, Duration)>)> {
        let contents = to.fill(self, progress)?;
        self.complete(to, contents, progress)
    }

    /// Performs the steps between the fill and the last renames: evaluation, tasks, quality gate, manifest, verification.
    fn complete<D: Destination>(
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

    /// Returns the manifest's description of this run, after those of the runs that made the source.
    ///
    /// # Errors
    /// The source's manifest is malformed.
    fn run_fields(&self) -> Result<Map<String, Value>> {
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

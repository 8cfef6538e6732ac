//! Carries out plans. Every job runs in the same frame: it begins a work folder beside the output, fills it, measures and verifies
//! what lies there, and only then puts it in place. What differs is the [`Destination`].

pub(crate) mod convert;
mod describe;
mod folder;
mod gguf_file;
mod quantize;
pub(crate) mod recalibrate;
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
use crate::verify::verification::Verification;

use describe::Found;
use folder::Folder;
use gguf_file::GgufFiles;

/// Result of a run.
#[derive(Debug)]
pub struct Outcome {
    /// Description and measured loss of the output.
    pub quality: Quality,
    /// The output in its place.
    pub committed: Committed,
    /// Copied tensors and layers that were taken over from an unfinished run.
    pub resumed: usize,
    /// Time that it took to make one file of weights durable after all of it was written. `None` for a folder, whose tensors are
    /// made durable as they are written.
    pub synced: Option<Duration>,
    /// Verification before the output was put in place, and the time it took, if the plan asks for it.
    pub verification: Option<(Verification, Duration)>,
}

/// The files of an output while they are written.
trait Destination: Sized {
    /// Writes the weights and the files that describe them.
    fn fill(&mut self, task: &Task<'_>, progress: &mut Tell<'_>) -> Result<Found>;

    /// Path that opens the staged model.
    fn staged(&self) -> PathBuf;

    /// Journal of the work done, if an unfinished run can be resumed.
    fn journal(&mut self) -> Option<&mut Journal> {
        None
    }

    /// Work folder that outlives a failed quality gate.
    fn kept(&self) -> Option<&Path> {
        None
    }

    /// Writes `quality.json` and the manifest, and makes all files durable.
    fn seal(&mut self, quality: &Quality, run: Map<String, Value>) -> Result<()>;

    /// Puts the output in place of the old one.
    fn publish(self) -> Result<Published>;

    /// Keeps or removes the work folder after `error`, which it may wrap in what is kept.
    fn abandon(self, error: QuantError) -> QuantError {
        error
    }
}

/// An output in its place.
struct Published {
    committed: Committed,
    resumed: usize,
    synced: Option<Duration>,
}

/// A plan, its source and the place of its output.
#[derive(Clone, Copy)]
struct Task<'a> {
    plan: &'a Plan,
    source: &'a ModelFiles,
    out: &'a Output,
}

/// Carries out `plan` into `out`. `progress` is told every step and may end the run between two of them.
///
/// A folder is journaled: everything done so far is durable when a run ends, and the next run with the same plan resumes it. A GGUF
/// file begins anew. Only a kill between the renames at the end may leave a GGUF file, the old or the new, without `quality.json`
/// and manifest; the next start completes it.
///
/// # Errors
/// [`QuantError::Store`] for files, [`QuantError::Tensor`] for values that a scheme cannot hold, [`QuantError::Interrupted`] if
/// `progress` ends the run, [`QuantError::Gate`] if the output loses more than [`Plan::evaluation`] allows; wrapped in
/// [`QuantError::Unfinished`] if a work folder is kept. The old content of `out`, if any, is then still in place.
pub fn run(
    plan: &Plan,
    source: &ModelFiles,
    out: &Output,
    start: Start,
    progress: &mut (dyn FnMut(Progress<'_>) -> std::ops::ControlFlow<()> + Send),
) -> Result<Outcome> {
    refuse_overlap(source.dir(), out.path())?;
    let task = Task { plan, source, out };
    match &plan.gguf {
        Some(layout) => task.run(GgufFiles::begin(&task, layout)?, progress),
        None => task.run(Folder::begin(&task, start)?, progress),
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

    /// Everything but the last renames.
    fn finish<D: Destination>(
        &self,
        to: &mut D,
        progress: &mut Tell<'_>,
    ) -> Result<(Quality, Option<(Verification, Duration)>)> {
        let Task { plan, source, out } = *self;
        let mut quality = Quality::new(plan, source, to.fill(self, progress)?);
        let staged = to.staged();
        quality.evaluation = assess::figures(plan, source, &staged, to.journal(), progress)?;
        convert::prove(plan, source, &staged)?;
        assess::gate(plan, &quality, out.path(), to.kept())?;
        to.seal(&quality, self.run_fields()?)?;
        let verification = assess::sealed(plan, &quality, &staged, out.path())?;
        Ok((quality, verification))
    }

    /// Description of this run in the manifest, after those of the runs that made the source.
    ///
    /// # Errors
    /// A malformed manifest of the source.
    fn run_fields(&self) -> Result<Map<String, Value>> {
        let plan = self.plan;
        let fields = json!({
            "command": plan.job.command(),
            "recipe": plan.job.label(),
            "method": plan.job.method_name(),
            "weights": plan.weights.to_string(),
            "activations": plan.activations.as_ref().map(ToString::to_string),
            "kv": plan.cache(),
            "container": plan.container.name(),
        });
        let fields = fields.as_object().cloned().unwrap_or_default();
        Ok(Manifest::run_after(self.source.dir(), fields)?)
    }
}

//! Several outputs of one source and recipe, each in its own format.
//!
//! Outputs are filled one after another. Formats that store the layers under the same schemes share their solution: the
//! first output of such a group solves the layers, and the others read codes and scales from its finished work folder.
//! Every output has the bytes of a run of its own. All are evaluated, sealed and verified before the first is put in
//! place, and each has its own journal, so an unfinished run resumes.

use std::path::{Path, PathBuf};

use mantissa_model::LinearInfo;
use mantissa_num::Scheme;
use mantissa_store::convention::{Experts, ModelFiles};
use mantissa_store::{ErrorClass, Output, refuse_overlap};
use serde_json::{Map, Value};

use super::describe::Contents;
use super::folder::Folder;
use super::gguf_file::GgufFiles;
use super::task::{Destination, Outcome, Published, Task};
use crate::error::{QuantError, Result};
use crate::journal::{Journal, Start};
use crate::plan::Plan;
use crate::progress::{Progress, Tell};
use crate::quality::Quality;
use crate::shared::Shared;
use crate::transform::Prepared;

/// Returns the description of the layers' solution, equal for plans whose outputs share it; `None` if the solution
/// cannot be read back from the output.
fn solution(plan: &Plan) -> Option<String> {
    let facts = plan.container.facts();
    // Trained scales differ from the method's.
    let special = plan.job.tuning().is_some()
        || facts.one_file
        || facts.square_scales
        || facts.experts == Experts::Stacked;
    let whole = |(info, scheme): (&LinearInfo, &Scheme)| {
        scheme.format.trellis().is_none() && plan.outliers(info) == 0 && scheme.format.scale().is_some()
    };
    if special || !plan.quantized().all(whole) {
        return None;
    }
    let Plan { linears, uses, activations, by_group, rotations, untied, .. } = plan;
    Some(format!("{linears:?} {uses:?} {activations:?} {by_group} {rotations:?} {untied:?}"))
}

/// Returns for each plan the index of the plan that solves its layers: its own, or an earlier one.
pub fn sharing(plans: &[Plan]) -> Vec<usize> {
    let solutions: Vec<_> = plans.iter().map(solution).collect();
    let first = |i: usize| {
        let same = |j: &usize| solutions[i].is_some() && solutions[*j] == solutions[i];
        (0..i).find(same).unwrap_or(i)
    };
    (0..plans.len()).map(first).collect()
}

/// An output in any format while it is written.
enum To<'a> {
    Folder(Box<Folder>),
    Gguf(Box<GgufFiles<'a>>),
}

impl<'a> To<'a> {
    fn begin(task: &Task<'a>, start: Start) -> Result<Self> {
        refuse_overlap(task.source.dir(), task.out.path())?;
        Ok(match &task.plan.gguf {
            Some(layout) => To::Gguf(Box::new(GgufFiles::begin(task, layout)?)),
            None => To::Folder(Box::new(Folder::begin(task, start)?)),
        })
    }
}

impl Destination for To<'_> {
    fn fill(&mut self, task: &Task<'_>, progress: &mut Tell<'_>) -> Result<Contents> {
        match self {
            To::Folder(to) => to.fill(task, progress),
            To::Gguf(to) => to.fill(task, progress),
        }
    }

    fn staged(&self) -> PathBuf {
        match self {
            To::Folder(to) => to.staged(),
            To::Gguf(to) => to.staged(),
        }
    }

    fn journal(&mut self) -> Option<&mut Journal> {
        match self {
            To::Folder(to) => to.journal(),
            To::Gguf(to) => to.journal(),
        }
    }

    fn kept(&self) -> Option<&Path> {
        match self {
            To::Folder(to) => to.kept(),
            To::Gguf(to) => to.kept(),
        }
    }

    fn seal(&mut self, quality: &Quality, run: Map<String, Value>) -> Result<()> {
        match self {
            To::Folder(to) => to.seal(quality, run),
            To::Gguf(to) => to.seal(quality, run),
        }
    }

    fn prepared(&self) -> Option<&Prepared> {
        match self {
            To::Folder(to) => to.prepared(),
            To::Gguf(to) => to.prepared(),
        }
    }

    fn leave(self, keep: bool) {
        match self {
            To::Folder(to) => to.leave(keep),
            To::Gguf(to) => to.leave(keep),
        }
    }

    fn publish(self) -> Result<Published> {
        match self {
            To::Folder(to) => to.publish(),
            To::Gguf(to) => to.publish(),
        }
    }

    fn abandon(self, error: QuantError) -> QuantError {
        match self {
            To::Folder(to) => to.abandon(error),
            To::Gguf(to) => to.abandon(error),
        }
    }
}

/// Executes the plans of one source and writes each output. `progress` counts the work of all of them.
///
/// # Errors
/// As [`run`](super::run). No output is put in place unless all are complete.
pub fn run_all(
    plans: &[Plan],
    source: &ModelFiles,
    outs: &[Output],
    start: Start,
    progress: &mut (dyn FnMut(Progress<'_>) -> std::ops::ControlFlow<()> + Send),
) -> Result<Vec<Outcome>> {
    let mut tasks = Vec::with_capacity(plans.len());
    let mut all = Vec::with_capacity(plans.len());
    for (plan, out) in plans.iter().zip(outs) {
        let task = Task { plan, source, out, shared: None };
        match To::begin(&task, start) {
            Ok(to) => all.push(to),
            Err(error) => {
                all.into_iter().for_each(|to: To<'_>| to.leave(false));
                return Err(error);
            }
        }
        tasks.push(task);
    }
    let mut at = 0;
    let done = match fill(&tasks, &sharing(plans), &mut all, &mut at, progress) {
        Ok(contents) => complete(&tasks, &mut all, contents, &mut at, progress),
        Err(error) => Err(error),
    };
    let qualities = done.map_err(|error| abandon(all.drain(..), at, error))?;
    let mut outcomes = Vec::with_capacity(plans.len());
    for (to, (quality, verification)) in all.into_iter().zip(qualities) {
        let Published { committed, resumed, synced } = to.publish()?;
        outcomes.push(Outcome { quality, committed, resumed, synced, verification });
    }
    Ok(outcomes)
}

/// Fills the outputs; `at` is the index of the one being filled, `first` the index of the plan that solves its layers.
fn fill(
    tasks: &[Task<'_>],
    first: &[usize],
    all: &mut [To<'_>],
    at: &mut usize,
    progress: &mut Tell<'_>,
) -> Result<Vec<Contents>> {
    let (mut filled, mut before): (Vec<Contents>, u64) = (Vec::with_capacity(tasks.len()), 0);
    for (i, task) in tasks.iter().enumerate() {
        *at = i;
        let (others, rest) = all.split_at_mut(i);
        let Some(to) = rest.first_mut() else { break };
        let giver = first.get(i).filter(|&&j| j < i).and_then(|&j| others.get(j).zip(filled.get(j)));
        let shared = giver.and_then(|(of, contents)| Some((of, contents, of.prepared()?)));
        let shared =
            shared.map(|(of, contents, prepared)| Shared::open(&of.staged(), &contents.layers, prepared));
        let shared = shared.transpose()?;
        let mut tell = |at: Progress<'_>| progress(Progress { done: before + at.done, ..at });
        let contents = to.fill(&Task { shared: shared.as_ref(), ..*task }, &mut tell)?;
        drop(shared);
        before += task.plan.work_bytes();
        filled.push(contents);
    }
    Ok(filled)
}

/// Report and verification of a complete output.
type Completed = (Quality, Option<(crate::quality::Verification, std::time::Duration)>);

/// Evaluates, seals and verifies the outputs.
fn complete(
    tasks: &[Task<'_>],
    all: &mut [To<'_>],
    contents: Vec<Contents>,
    at: &mut usize,
    progress: &mut Tell<'_>,
) -> Result<Vec<Completed>> {
    let mut done = Vec::with_capacity(tasks.len());
    for (i, ((task, to), contents)) in tasks.iter().zip(all).zip(contents).enumerate() {
        *at = i;
        done.push(task.complete(to, contents, progress)?);
    }
    Ok(done)
}

/// Gives up all outputs after the `failed` one: finished work is kept if the next run can use it.
fn abandon<'a>(all: impl Iterator<Item = To<'a>>, failed: usize, error: QuantError) -> QuantError {
    let keep = error.class() == ErrorClass::Environment || matches!(error, QuantError::Gate(_));
    let mut at_fault = None;
    for (i, to) in all.enumerate() {
        if i == failed {
            at_fault = Some(to);
        } else {
            to.leave(keep);
        }
    }
    match at_fault {
        Some(to) => to.abandon(error),
        None => error,
    }
}

//! Execution of plans: progress, an orderly stop, and what the outcome tells.

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::path::Path;

use mantissa_quant::{Evaluation, Outcome, Plan, QuantError, RESUMED, Start, TaskRuns, run as run_plan};
use mantissa_store::Output;
use mantissa_store::convention::ModelFiles;

use crate::choose::predict;
use crate::error::Result;
use crate::host::Host;
use crate::progress::{Meter, Unit};
use crate::tasks::note_guessing;

/// Work in bytes of the source's files. Plans count their work in values, of which a quantized source stores several in a byte.
#[derive(Clone, Copy)]
struct Read {
    work: u64,
    stored: u64,
}

impl Read {
    /// Measures the `work` of this many `outputs`, each of which reads the source.
    fn of(work: u64, outputs: u64, source: &ModelFiles) -> Self {
        Read { work, stored: source.checkpoint().stored_bytes().saturating_mul(outputs) }
    }

    fn total(self) -> u64 {
        if self.work == 0 { 0 } else { self.stored }
    }

    fn part(self, done: u64) -> u64 {
        let part = u128::from(done) * u128::from(self.stored) / u128::from(self.work.max(1));
        u64::try_from(part).unwrap_or(u64::MAX)
    }
}

/// Progress whose remaining time leaves out what takes no time beside solving layers: copies, and what an earlier run has
/// solved.
struct Paced {
    /// Names of tensors that are copied.
    copied: BTreeSet<String>,
    /// Predicted seconds of all layers, where they are solved.
    seconds: Option<f64>,
    /// Bytes of the whole work, of its last step, and of what was copied and what an earlier run solved.
    total: u64,
    last: u64,
    copies: u64,
    resumed: u64,
}

impl Paced {
    /// Begins the work of `plans`, `total` bytes; names its predicted time, where layers are solved.
    fn new(plans: &[Plan], total: u64, progress: &Meter, host: &Host) -> Self {
        // Layers that formats share are solved once.
        let seconds = || plans.iter().map(|plan| predict::writing_seconds(plan, host.threads));
        let seconds = plans.iter().any(Plan::runs_text).then(|| seconds().fold(0.0, f64::max));
        seconds.into_iter().for_each(|seconds| progress.expect(seconds));
        let copied = plans.iter().flat_map(|plan| &plan.copied).map(|meta| meta.name.clone());
        Paced { copied: copied.collect(), seconds, total, last: 0, copies: 0, resumed: 0 }
    }

    /// Shows that `part` bytes are done.
    fn show(&mut self, progress: &Meter, at: &mantissa_quant::Progress<'_>, part: u64) {
        let step = part.saturating_sub(self.last);
        self.last = part;
        if self.copied.contains(at.tensor) {
            self.copies += step;
            progress.begin_at(part);
        } else if at.tensor == RESUMED {
            self.resumed += step;
            let solved = self.total.saturating_sub(self.copies).max(1);
            let left = 1.0 - self.resumed as f64 / solved as f64;
            self.seconds.into_iter().for_each(|seconds| progress.expect(seconds * left.max(0.0)));
            progress.begin_at(part);
        } else {
            progress.set(part);
        }
    }
}

/// Runs the plan until it ends or the host asks for a stop.
///
/// # Errors
/// As [`run_plan`].
pub fn run(plan: &Plan, source: &ModelFiles, out: &Output, start: Start, host: &Host) -> Result<Outcome> {
    let read = Read::of(plan.work_bytes(), 1, source);
    let mut progress = host.progress(read.total(), Unit::Bytes);
    progress.followed_by(next(plan, true));
    let mut work = Paced::new(std::slice::from_ref(plan), read.total(), &progress, host);
    let (mut evaluating, mut answering) = (false, false);
    let step = &mut |at: mantissa_quant::Progress<'_>| {
        if at.tokens.is_some() && !std::mem::replace(&mut evaluating, true) {
            progress.finish();
            progress = host.progress(plan.evaluation().map_or(0, Evaluation::work), Unit::Items("tokens"));
            progress.followed_by(next(plan, false));
        }
        if at.items.is_some() && !std::mem::replace(&mut answering, true) {
            progress.finish();
            progress = host.progress(plan.tasks().map_or(0, TaskRuns::work), Unit::Items("items"));
        }
        progress.message(at.tensor);
        match at.items.or(at.tokens) {
            Some(done) => progress.set(done),
            None => work.show(&progress, &at, read.part(at.done)),
        }
        if host.stops() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let outcome = host.orderly(|| run_plan(plan, source, out, start, step), QuantError::is_interruption);
    progress.finish();
    let outcome = outcome?;
    tell(&outcome, host);
    Ok(outcome)
}

/// Names the measurements that follow the writing of the output, or its evaluation on a text; empty if none does.
fn next(plan: &Plan, writing: bool) -> &'static str {
    match (writing && plan.evaluation().is_some(), plan.tasks().is_some()) {
        (true, true) => "the evaluation and the tasks",
        (true, false) => "the evaluation",
        (false, true) => "the tasks",
        (false, false) => "",
    }
}

/// Runs the plans of one source like [`run`]; no output is put in place unless all are complete.
///
/// # Errors
/// As [`run`].
pub fn run_all(
    plans: &[Plan],
    source: &ModelFiles,
    outs: &[Output],
    start: Start,
    host: &Host,
) -> Result<Vec<Outcome>> {
    let read = Read::of(plans.iter().map(Plan::work_bytes).sum(), plans.len() as u64, source);
    let progress = host.progress(read.total(), Unit::Bytes);
    let mut work = Paced::new(plans, read.total(), &progress, host);
    let step = &mut |at: mantissa_quant::Progress<'_>| {
        progress.message(at.tensor);
        if at.tokens.is_none() && at.items.is_none() {
            work.show(&progress, &at, read.part(at.done));
        }
        if host.stops() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let outcomes = host
        .orderly(|| mantissa_quant::run_all(plans, source, outs, start, step), QuantError::is_interruption);
    progress.finish();
    let outcomes = outcomes?;
    outcomes.iter().for_each(|outcome| tell(outcome, host));
    Ok(outcomes)
}

/// Notes tasks that cannot show a loss; warns of an old output that could not be removed.
fn tell(outcome: &Outcome, host: &Host) {
    outcome.quality.tasks.iter().for_each(|task| note_guessing(&task.task, &task.score, host));
    if let Some(path) = &outcome.committed.leftover {
        host.warn(&format!("{}: the replaced output could not be removed", path.display()));
    }
}

/// Returns the warning about the work folder of another job.
pub fn left_by_another(path: &Path) -> String {
    let what =
        "left by another command that was killed; fix: rerun that command to resume it, or remove the folder";
    format!("{}: {what}", path.display())
}

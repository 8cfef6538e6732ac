//! Execution of plans: progress, an orderly stop, and what the outcome tells.

use std::ops::ControlFlow;
use std::path::Path;

use mantissa_quant::{Evaluation, Outcome, Plan, QuantError, Start, TaskRuns, run as run_plan};
use mantissa_store::Output;
use mantissa_store::convention::ModelFiles;

use crate::error::Result;
use crate::host::Host;
use crate::progress::Unit;
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

/// Runs the plan until it ends or the host asks for a stop.
///
/// # Errors
/// As [`run_plan`].
pub fn run(plan: &Plan, source: &ModelFiles, out: &Output, start: Start, host: &Host) -> Result<Outcome> {
    let read = Read::of(plan.work_bytes(), 1, source);
    let mut progress = host.progress(read.total(), Unit::Bytes);
    progress.followed_by(next(plan, true));
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
        progress.set(at.items.or(at.tokens).unwrap_or_else(|| read.part(at.done)));
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
    let step = &mut |at: mantissa_quant::Progress<'_>| {
        progress.message(at.tensor);
        if at.tokens.is_none() && at.items.is_none() {
            progress.set(read.part(at.done));
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

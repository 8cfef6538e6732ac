//! Last steps before an output is put in place: evaluation, tasks, quality gate and verification.

mod table_cost;

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use mantissa_store::ErrorClass;
use mantissa_store::convention::ModelFiles;

use crate::error::{Exceeded, GateFailure, NotVerified, QuantError, Result};
use crate::journal::Journal;
use crate::load::{load_check, load_check_of_ids};
use crate::measure::figures::Evaluation;
use crate::measure::tasks::TaskRun;
use crate::plan::{Check, Plan};
use crate::progress::{Progress, Tell};
use crate::quality::{Figures, Quality, TaskScore, Verification};
use crate::verify::{Against, verify_against};

/// Evaluates the complete output at `staged`, if `plan` asks for it. Figures that an earlier run recorded in `journal`
/// for the same text are reused.
///
/// # Errors
/// Errors of [`Figures::measure`].
pub(crate) fn figures(
    plan: &Plan,
    source: &ModelFiles,
    staged: &Path,
    journal: Option<&mut Journal>,
    progress: &mut Tell<'_>,
) -> Result<Option<Figures>> {
    let Some(Evaluation { text, sequences, .. }) = &plan.evaluation else { return Ok(None) };
    if let Some(left) = journal.as_ref().and_then(|journal| journal.figures(text)) {
        return Ok(Some(left));
    }
    let artifact = ModelFiles::open(staged)?;
    let tell = from_threads(plan, progress, |done, tokens| Progress {
        done,
        tensor: "evaluation",
        tokens: Some(tokens),
        items: None,
    });
    let mut figures = Figures::measure(&artifact, source, text, sequences, plan.threads(), &tell)?;
    let total = plan.evaluation.as_ref().map_or(0, Evaluation::work);
    let tell = |_| tell(total);
    figures.kl_without_tables = table_cost::kl_without(plan, source, &artifact, sequences, &tell)?;
    if let Some(journal) = journal {
        journal.record_figures(&figures)?;
    }
    Ok(Some(figures))
}

/// Lets the threads of a measurement report how far it is; `step` makes the progress from the bytes written and that.
fn from_threads<'a>(
    plan: &Plan,
    progress: &'a mut Tell<'_>,
    step: impl Fn(u64, u64) -> Progress<'static> + Sync + 'a,
) -> impl Fn(u64) -> ControlFlow<()> + Sync + 'a {
    let (done, progress) = (plan.work_bytes(), Mutex::new(progress));
    move |at| {
        let mut progress = progress.lock().unwrap_or_else(PoisonError::into_inner);
        progress(step(done, at))
    }
}

/// Runs the tasks of `plan` on the complete output at `staged` and on its source. Scores that an earlier run recorded in
/// `journal` for the same tasks are reused.
///
/// # Errors
/// Errors of [`TaskRuns::measure`](crate::TaskRuns).
pub(crate) fn tasks(
    plan: &Plan,
    source: &ModelFiles,
    staged: &Path,
    mut journal: Option<&mut Journal>,
    progress: &mut Tell<'_>,
) -> Result<Vec<TaskScore>> {
    let Some(runs) = &plan.tasks else { return Ok(Vec::new()) };
    let left = journal.as_ref().map(|journal| journal.scores().to_vec()).unwrap_or_default();
    let known = |run: &TaskRun| {
        let score = left.iter().rfind(|score| run.is_of(score))?;
        Some(TaskScore { task: run.task.name.clone(), ..score.clone() })
    };
    let record = |score: &TaskScore| journal.as_mut().map_or(Ok(()), |journal| journal.record_score(score));
    let artifact = ModelFiles::open(staged)?;
    let tell = from_threads(plan, progress, |done, items| Progress {
        done,
        tensor: "tasks",
        tokens: None,
        items: Some(items),
    });
    runs.measure((&artifact, source), plan.threads(), known, record, &tell)
}

/// Returns the limit that the measured loss exceeds, if one.
pub(crate) fn exceeded(plan: &Plan, quality: &Quality) -> Option<Exceeded> {
    let exceeds = |found: f64, allowed: f64| found.is_nan() || found > allowed;
    let max_kl = plan.evaluation.as_ref().and_then(|evaluation| evaluation.max_kl);
    if let (Some(allowed), Some(found)) = (max_kl, &quality.evaluation)
        && exceeds(found.kl, allowed)
    {
        return Some(Exceeded::Kl { allowed, kl: found.kl, se: found.kl_se });
    }
    let allowed = plan.tasks.as_ref()?.max_accuracy_drop?;
    quality.tasks.iter().find_map(|found| {
        // Subtracted, so that no change is not -0.
        let drop = 0.0 - found.score.reference.as_ref()?.delta_accuracy;
        let task = found.task.clone();
        exceeds(drop, allowed).then_some(Exceeded::Accuracy { task, allowed, drop })
    })
}

/// Checks that the measured loss is within the limits. `kept` is the folder where the parts of the output stay
/// otherwise.
///
/// # Errors
/// [`QuantError::Gate`].
pub(crate) fn gate(plan: &Plan, quality: &Quality, out: &Path, kept: Option<&Path>) -> Result<()> {
    let Some(exceeded) = exceeded(plan, quality) else { return Ok(()) };
    let (out, kept) = (out.to_owned(), kept.map(PathBuf::from));
    Err(QuantError::Gate(Box::new(GateFailure { quality: quality.clone(), exceeded, out, kept })))
}

/// Opens the sealed output at `staged` and, if `plan` asks for it, verifies it. Returns the verification and its
/// duration.
///
/// # Errors
/// [`QuantError::NotLoadable`], [`QuantError::NotVerified`]: the output must not be put at `out`. I/O.
pub(crate) fn sealed(
    plan: &Plan,
    quality: &Quality,
    staged: &Path,
    out: &Path,
) -> Result<Option<(Verification, Duration)>> {
    // A tokenizer that the source has and that cannot be read is kept, with a note.
    let opaque = plan.gguf.as_ref().is_some_and(|layout| layout.opaque_tokenizer);
    let checked = if opaque { load_check_of_ids(staged) } else { load_check(staged) };
    if let Err(error) = checked {
        return Err(match error.class() {
            ErrorClass::Environment => error,
            ErrorClass::Input => QuantError::NotLoadable { out: out.to_owned(), error: Box::new(error) },
        });
    }
    let Check::Verify(reference) = &plan.check else { return Ok(None) };
    let begin = Instant::now();
    // A recipe has just read the dense source and recorded its errors; a conversion has recorded none.
    let recorded = plan.job.recipe().is_none();
    let against = Against { reference: reference.as_deref(), recorded, text: None };
    let verification = verify_against(staged, &against, plan.threads(), &|_| ControlFlow::Continue(()))?;
    if !verification.ok {
        let (quality, out) = (quality.clone(), out.to_owned());
        return Err(QuantError::NotVerified(Box::new(NotVerified { quality, verification, out })));
    }
    Ok(Some((verification, begin.elapsed())))
}

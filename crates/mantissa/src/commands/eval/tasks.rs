//! Text output of `mantissa eval --task`: accuracy on tasks with right and wrong answers.

use std::io::{self, Write};

use mantissa_eval::tasks::Answer;
use mantissa_jobs::{TaskEvaluation, TaskResult};

use super::super::tasks::score_table;
use crate::output::labelled;

/// Flipped answers that are printed for each task.
const SHOWN: usize = 5;

/// Prints the result.
///
/// # Errors
/// As `out`.
pub(super) fn human(out: &mut dyn Write, report: &TaskEvaluation) -> io::Result<()> {
    if let Some(adapter) = &report.adapter {
        labelled(out, "adapter", &adapter.display().to_string())?;
    }
    if let Some(kv) = &report.kv {
        labelled(out, "KV cache", kv)?;
    }
    let scores = report
        .tasks
        .iter()
        .map(|TaskResult { task, summary }| (&**task, &summary.score, &summary.groups[..]));
    score_table(scores, report.reference.as_ref().map(|_| "reference")).write(out)?;
    for TaskResult { task, summary } in &report.tasks {
        for flip in summary.flips.iter().take(SHOWN) {
            let way = if flip.gained { "now right" } else { "now wrong" };
            writeln!(out, "{task} {}: {way}{}", flip.id, answered(&flip.reference, &flip.model))?;
        }
        let more = summary.flips.len().saturating_sub(SHOWN);
        if more > 0 {
            writeln!(out, "{task}: {more} more answers flipped (--per-item FILE has all)")?;
        }
    }
    Ok(())
}

/// Describes both answers.
fn answered(reference: &Answer, model: &Answer) -> String {
    let of = |answer: &Answer| match (&answer.text, answer.chosen) {
        (Some(text), _) => format!("{:?}", text.trim()),
        (None, Some(chosen)) => format!("choice {}", chosen + 1),
        (None, None) => String::new(),
    };
    format!(", {} after {} of the reference", of(model), of(reference))
}

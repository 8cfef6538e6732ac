//! A worker's part of plans: it solves layers, and writes nothing but their solutions into the folder of the job.

use std::ops::ControlFlow;

use mantissa_ranks::RankError;
use mantissa_store::convention::ModelFiles;

use super::gguf_file::importance;
use super::several::sharing;
use crate::error::Result;
use crate::fold::Folded;
use crate::layers::Layers;
use crate::plan::Plan;
use crate::progress::{Progress, Tell};
use crate::transform;

/// Solves layers of `plans` that no other worker of their team solves, until all are solved. `progress` is called at
/// every step; `Break` interrupts.
///
/// # Errors
/// As [`run`](super::run), but for the output.
pub fn take_part(
    plans: &[Plan],
    source: &ModelFiles,
    progress: &mut (dyn FnMut(Progress<'_>) -> ControlFlow<()> + Send),
) -> Result<()> {
    let solved_by = sharing(plans);
    let own = plans.iter().enumerate().filter(|(i, _)| solved_by[*i] == *i);
    own.map(|(_, plan)| plan).try_for_each(|plan| part_of(plan, source, progress))
}

fn part_of(plan: &Plan, source: &ModelFiles, progress: &mut Tell<'_>) -> Result<()> {
    let mut told = |stage: &str| {
        let tensor = format!("{}: {stage}", plan.job.method_name());
        progress(Progress { done: 0, tensor: &tensor, tokens: None, items: None })
    };
    let (prepared, importance) = match plan.gguf.is_some() {
        true => (transform::Prepared::default(), importance(plan, source, progress)?),
        false => (transform::prepare(plan, source, &mut told)?, None),
    };
    let folded = match plan.gguf.is_some() {
        true => Folded::plain(source),
        false => Folded::new(source, &prepared.folds),
    };
    // Nothing is stored: solutions come from the folder of the job.
    let none = || Err(RankError::Gone("of a layer before".to_owned()).into());
    let layers = Layers::new(plan, &folded, Box::new(none)).prepared(&prepared);
    let mut layers = layers.with_importance(importance.as_deref());
    let label = plan.job.method_name();
    let mut tick = || progress(Progress { done: 0, tensor: &label, tokens: None, items: None });
    layers.take_part(&mut tick)
}

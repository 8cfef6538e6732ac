//! Execution of plans. Every job has the same steps: start a work folder beside the output, fill it, evaluate and
//! verify it, and put it in place. Jobs differ in their [`Destination`](task::Destination).

mod describe;
mod folder;
mod gguf_file;
mod part;
mod quantize;
pub(crate) mod recalibrate;
pub(crate) mod several;
mod task;

use mantissa_store::convention::ModelFiles;
use mantissa_store::{Output, refuse_overlap};

use crate::error::Result;
use crate::journal::Start;
use crate::plan::Plan;
use crate::progress::Progress;

use folder::Folder;
use gguf_file::GgufFiles;
use task::Task;

pub use part::take_part;
pub use quantize::require_modules;
pub use task::Outcome;

/// Executes `plan` and writes the output to `out`. `progress` is called at every step; `Break` interrupts the run.
///
/// A folder has a journal: when a run ends, its finished work is on disk, and the next run with the same plan resumes
/// it. A GGUF file starts over. Only a kill between the last renames can leave a GGUF file, old or new, without
/// `quality.json` and manifest. The next start completes it.
///
/// # Errors
/// [`QuantError::Store`](crate::QuantError::Store) for files, [`QuantError::Tensor`](crate::QuantError::Tensor) for values that a scheme cannot represent,
/// [`QuantError::Interrupted`](crate::QuantError::Interrupted) if `progress` ends the run, [`QuantError::Gate`](crate::QuantError::Gate) if the quality loss exceeds a limit
/// of [`Plan::evaluation`] or [`Plan::tasks`]; wrapped in [`QuantError::Unfinished`](crate::QuantError::Unfinished) if a work folder is kept. The old content of `out`,
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

//! Commands that load a quantized model in the engines whose rules it keeps.

use std::path::Path;

use anyhow::Result;
use mantissa_advise::subject;
use mantissa_plan::contract::{Server, Target, lint};

use crate::commands::ending::{quoted, serve};
use crate::commands::model;
use crate::context::Context;
use crate::memory::PROCESS;

/// Names the engines that load the model at `path`, each with its command; none if the model cannot be read.
pub fn commands(path: &Path, context: &Context) -> Vec<(String, String)> {
    let Ok(targets) = targets(path, context) else { return Vec::new() };
    let quoted = quoted(path);
    let command = |target: Target| (target.server.title().to_owned(), serve(&target, &quoted));
    targets.into_iter().map(command).collect()
}

/// Returns the engines whose rules the model keeps on one GPU that has what its formats need.
fn targets(path: &Path, context: &Context) -> Result<Vec<Target>> {
    let files = model::open_quietly(path)?;
    let needs = subject::bytes_of_artifact(&files, None)?;
    context.require_memory("report: rules of the engines", PROCESS.saturating_add(needs))?;
    let subject = subject::of_artifact(&files, None)?;
    let targets = Server::NAMES.into_iter().map(|(server, _)| Target { server, tp: 1, gpu: None });
    Ok(targets.filter(|target| !lint(&subject, target).fails()).collect())
}

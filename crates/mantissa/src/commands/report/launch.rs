//! Commands that load a quantized model in the engines whose rules it keeps, on one GPU that has what its formats need.

use std::path::Path;

use anyhow::Result;
use mantissa_advise::subject;
use mantissa_jobs::memory::PROCESS;
use mantissa_plan::contract::{ENGINES, EngineTarget, Evidence, Subject, cells, lint};

use crate::commands::model;
use crate::commands::next_steps::serve;
use crate::context::Context;

/// Programs that load a model.
#[derive(Default)]
pub struct Launch {
    /// All of them, by name.
    pub loads_in: Vec<&'static str>,
    /// Commands of the engines among them.
    pub commands: Vec<Start>,
}

/// Command that loads a model in an engine.
pub struct Start {
    /// Name of the engine.
    pub engine: &'static str,
    /// Ground of the claim that it loads the model: a test with its versions, or the source code of the engine.
    pub ground: String,
    /// The command.
    pub command: String,
}

impl Launch {
    /// Finds the programs that load the model at `path`; none if the model cannot be read.
    pub fn of(path: &Path, context: &Context) -> Self {
        let Ok(subject) = subject_of(path, context) else { return Launch::default() };
        let targets = ENGINES.into_iter().map(|engine| EngineTarget { engine, tp: 1, gpu: None });
        let kept = targets.filter(|target| !lint(&subject, target).fails());
        let cells = cells(&subject);
        let start = |target: EngineTarget| {
            let engine = target.engine.title;
            let cell = cells.iter().find(|cell| cell.name == engine);
            let ground = cell.map_or_else(String::new, |cell| ground(&cell.evidence));
            Start { engine, ground, command: serve(&target, &subject.convention, path) }
        };
        Launch { commands: kept.map(start).collect(), loads_in: cells.iter().map(|cell| cell.name).collect() }
    }
}

/// Says why an engine counts as loading a model.
fn ground(evidence: &Evidence) -> String {
    match evidence {
        Evidence::Loaded(load) => format!("Loaded in a test with {} ({}).", load.version, load.date),
        Evidence::Source { .. } => "By its source code; not loaded in a test.".to_owned(),
        Evidence::Own => String::new(),
    }
}

/// Describes the model at `path` for the rules of the engines.
fn subject_of(path: &Path, context: &Context) -> Result<Subject> {
    let files = model::open_quietly(path)?;
    let needs = subject::bytes_of_artifact(&files, None)?;
    context.require_memory("report: rules of the engines", PROCESS.saturating_add(needs))?;
    Ok(subject::of_artifact(&files, None)?)
}

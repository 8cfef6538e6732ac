//! `mantissa lint`: checks that a model will load and compute correctly in an engine.

mod text;

use std::io::{self, Write};
use std::path::Path;

use anyhow::Result;
use mantissa_jobs::names::TargetName;
use mantissa_jobs::{Job, Lint};
use mantissa_plan::contract::{ENGINES, Engine, EngineTarget, Report};
use mantissa_store::Paths;

use super::execute::Execute;
use super::fixes::GivenLine;
use super::model::ModelPath;
use super::next_steps::quoted;
use crate::context::Context;
use crate::help::Group;
use crate::output::paragraph;

/// Check that a model will load and compute correctly in an engine
///
/// Checks shapes, group sizes and tensor parallelism; shared scales of fused layers (qkv, gate_up);
/// zero-point versions, read from the data; names against the config; the head; and kernel support of a GPU
/// generation. Every rule names its source.
///
/// Reads the weights but runs nothing. With --reference, the q and k rows of a GGUF file are compared with
/// the source model. Exit code 1 if the model will not load or will compute wrong results.
#[derive(clap::Args)]
#[command(after_help = "EXAMPLES
  mantissa lint demo
  mantissa lint demo --for vllm
  mantissa lint path/to/quantized --for vllm:tp=4,gpu=h100 --for sglang --json
  mantissa lint path/to/model.gguf --for llama.cpp --reference path/to/model")]
pub struct Args {
    /// Model folder or .gguf file
    model: ModelPath,
    /// Engine with its options (repeatable) [default: all]
    #[arg(long = "for", value_name = "ENGINE", value_parser = target, long_help = for_help())]
    targets: Vec<EngineTarget>,
    /// Source model, for checks that compare with it
    #[arg(long, value_name = "SOURCE")]
    reference: Option<ModelPath>,
}

/// Describes `--for` with the options of each engine.
fn for_help() -> String {
    let others = || ENGINES.into_iter().filter(|engine| engine.name != Engine::MANTISSA.name);
    let list = |splits: bool| {
        let names: Vec<_> =
            others().filter(|engine| engine.splits_tensors() == splits).map(|engine| engine.name).collect();
        match names.split_last() {
            Some((last, [])) => format!("{last} takes"),
            Some((last, names)) => format!("{} and {last} take", names.join(", ")),
            None => "none takes".to_owned(),
        }
    };
    format!(
        "Engine with its options (repeatable) [default: all]\n\nWithout it, every engine that reads the format and its schemes is checked, with one line for each. {} :tp=N,gpu=NAME; {} :gpu=NAME.",
        list(true),
        list(false)
    )
}

/// Parses an engine on the command line.
///
/// # Errors
/// A message with the accepted values.
pub fn target(text: &str) -> Result<EngineTarget, String> {
    EngineTarget::parse(text).map_err(|error| error.to_string())
}

impl Args {
    /// Returns the job.
    fn job(&self) -> Lint {
        Lint {
            model: self.model.job_path().clone(),
            targets: self.targets.iter().copied().map(TargetName).collect(),
            reference: self.reference.as_ref().map(|model| model.job_path().clone()),
        }
    }
}

impl Execute for Args {
    const GROUP: Group = Group::Measure;

    fn paths(&self, paths: &mut Paths) -> Result<()> {
        *paths = self.job().paths();
        Ok(())
    }

    /// # Errors
    /// Unreadable files; [`GateFailed`](crate::error::GateFailed) if a rule is broken.
    fn run(&self, context: &Context) -> Result<()> {
        let found = self.job().check(&GivenLine, context)?;
        context.report(&found, |out| match self.targets.is_empty() {
            true => overview(out, self.model.typed(), &found.reports),
            false => found.reports.iter().try_for_each(|report| text::report(out, report)),
        })?;
        // The report has them already.
        context.refuse_warnings(&found.warnings())?;
        Ok(found.require_ok(self.model.typed())?)
    }
}

/// Prints one line for each engine that reads the model, and names the others.
fn overview(out: &mut dyn Write, model: &Path, reports: &[Report]) -> io::Result<()> {
    reports.iter().try_for_each(|report| text::overview(out, report))?;
    let read = |name: &str| reports.iter().any(|report| report.target == name);
    let others = ENGINES.into_iter().map(|engine| engine.name).filter(|name| !read(name));
    let others: Vec<_> = others.collect();
    if let [first, ..] = others.as_slice() {
        paragraph(out, 0, &format!("does not load in {}", others.join(", ")))?;
        writeln!(out, "reasons: mantissa lint {} --for {first}", quoted(model))?;
    }
    Ok(())
}

//! `mantissa lint`: checks that a model will load and compute correctly in an engine.

mod text;

use std::io::{self, Write};
use std::path::Path;

use anyhow::Result;
use mantissa_advise::subject;
use mantissa_jobs::lint::line;
use mantissa_jobs::memory::PROCESS;
use mantissa_plan::contract::{ENGINES, EngineTarget, Report, Subject, lint};
use mantissa_store::Paths;
use serde::Serialize;

use super::execute::Execute;
use super::fixes;
use super::model::{self, ModelPath};
use super::next_steps::quoted;
use crate::context::Context;
use crate::error::GateFailed;
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
    ///
    /// Without it, every engine that reads the format and its schemes is checked, with one line for each. vllm,
    /// sglang, lmdeploy and tensorrt-llm take :tp=N,gpu=NAME; llama.cpp, transformers, mlx and exllamav2 take
    /// :gpu=NAME.
    #[arg(long = "for", value_name = "ENGINE", value_parser = target)]
    targets: Vec<EngineTarget>,
    /// Source model, for checks that compare with it
    #[arg(long, value_name = "SOURCE")]
    reference: Option<ModelPath>,
}

/// Parses an engine on the command line.
///
/// # Errors
/// A message with the accepted values.
pub fn target(text: &str) -> Result<EngineTarget, String> {
    EngineTarget::parse(text).map_err(|error| error.to_string())
}

#[derive(Serialize)]
struct Linted<'a> {
    model: &'a Path,
    convention: &'static str,
    ok: bool,
    reports: &'a [Report],
}

impl Execute for Args {
    const GROUP: Group = Group::Measure;

    fn paths(&self, paths: &mut Paths) -> Result<()> {
        self.model.paths(paths);
        self.reference.iter().for_each(|model| model.paths(paths));
        Ok(())
    }

    /// # Errors
    /// Unreadable files; [`GateFailed`] if a rule is broken.
    fn run(&self, context: &Context) -> Result<()> {
        let files = model::open(&self.model, context)?;
        let reference = self.reference.as_ref().map(|path| model::open_quietly(path)).transpose()?;
        let needs = subject::bytes_of_artifact(&files, reference.as_ref())?;
        context.require_memory("lint", PROCESS.saturating_add(needs))?;
        let subject = subject::of_artifact(&files, reference.as_ref())?;
        let source = self.reference.as_ref().zip(reference.as_ref());
        let source = source.filter(|(_, files)| !files.is_quantized() && files.gguf().is_none());
        let targets = if self.targets.is_empty() { readers(&subject) } else { self.targets.clone() };
        let checked = |target: &EngineTarget| {
            let mut report = lint(&subject, target);
            let source = source.map(|(path, files)| (path.typed(), files));
            fixes::of_artifact(&mut report, target, (self.model.typed(), &files, &subject), source);
            report
        };
        let reports: Vec<_> = targets.iter().map(checked).collect();
        let ok = !reports.iter().any(Report::fails);
        let linted =
            Linted { model: &self.model, convention: files.convention_name(), ok, reports: &reports };
        context.report(&linted, |out| match self.targets.is_empty() {
            true => overview(out, self.model.typed(), &reports),
            false => reports.iter().try_for_each(|report| text::report(out, report)),
        })?;
        let warnings = reports.iter().flat_map(|report| &report.findings).filter(|f| !f.severity.fails());
        // The report has them already.
        context.refuse_warnings(&warnings.map(line).collect::<Vec<_>>())?;
        conclude(self.model.typed(), &reports)
    }
}

/// Returns the engines that read the format and the schemes of a model, each on one GPU.
fn readers(subject: &Subject) -> Vec<EngineTarget> {
    // What was observed in the files decides whether they are sound, not which engines read their kind.
    let bare = Subject { planned: true, examined: Vec::new(), observations: Vec::new(), ..subject.clone() };
    let targets = ENGINES.into_iter().map(|engine| EngineTarget { engine, tp: 1, gpu: None });
    targets.filter(|target| !lint(&bare, target).fails()).collect()
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

/// Fails with the names of the broken rules, if any; the report has the findings.
fn conclude(model: &Path, reports: &[Report]) -> Result<()> {
    let broken = |report: &Report| {
        let failing = report.findings.iter().filter(|finding| finding.severity.fails());
        let mut rules: Vec<_> = failing.map(|finding| finding.rule).collect();
        rules.dedup();
        let noun = if rules.len() == 1 { "rule" } else { "rules" };
        format!("{} {noun} broken for {}: {}", rules.len(), report.target, rules.join(", "))
    };
    let broken: Vec<_> = reports.iter().filter(|report| report.fails()).map(broken).collect();
    match broken.is_empty() {
        true => Ok(()),
        false => Err(GateFailed::new(format!("{}: {}", model.display(), broken.join("; "))).into()),
    }
}

//! `mantissa lint`: whether a model will load and compute rightly in an engine.

use std::io::{self, Write};
use std::path::Path;

use anyhow::Result;
use mantissa_advise::subject;
use mantissa_plan::contract::{Finding, Report, Severity, Target, lint};
use mantissa_quant::Plan;
use mantissa_store::Paths;
use mantissa_store::convention::ModelFiles;
use serde::Serialize;

use super::model::{self, ModelPath};
use crate::app::Context;
use crate::error::GateFailed;
use crate::memory::PROCESS;

/// Layers of one finding that are listed for people; the JSON has all.
const LISTED: usize = 4;

/// Check a model against the serving contract of an engine: shapes, groups and tensor parallelism, scales of layers that run
/// joined, zero-point versions read from the data, names against the config, the head, kernels of a GPU generation. Every
/// rule says where it was read.
///
/// The weights are read; nothing is run. With --reference the rows of q and k of a GGUF file are compared with the source.
/// Exit 1 where a rule is broken under which the model does not load or computes something else.
#[derive(clap::Args)]
#[command(after_help = "EXAMPLES
  mantissa lint path/to/quantized --for vllm:tp=4,gpu=h100
  mantissa lint path/to/quantized --for vllm --for sglang --json
  mantissa lint path/to/model.gguf --for llama.cpp --reference path/to/model")]
pub struct Args {
    /// A model folder or GGUF file
    model: ModelPath,
    /// The engine, and how it runs: vllm, sglang, lmdeploy or tensorrt-llm with :tp=N,gpu=NAME, llama.cpp, transformers, mlx,
    /// exllamav2
    #[arg(long = "for", value_name = "SERVER[:tp=N,gpu=NAME]", required = true, value_parser = target)]
    targets: Vec<Target>,
    /// The model that it was made from
    #[arg(long, value_name = "SOURCE")]
    reference: Option<ModelPath>,
}

/// An engine on the command line.
///
/// # Errors
/// A message that says what is allowed.
pub fn target(text: &str) -> Result<Target, String> {
    Target::parse(text).map_err(|error| error.to_string())
}

#[derive(Serialize)]
struct Linted<'a> {
    model: &'a Path,
    convention: &'static str,
    ok: bool,
    reports: &'a [Report],
}

/// Adds what the command reads and writes.
pub fn paths(args: &Args, paths: &mut Paths) {
    args.model.paths(paths);
    args.reference.iter().for_each(|model| model.paths(paths));
}

/// Runs the command.
///
/// # Errors
/// What cannot be read; [`GateFailed`] where a rule is broken.
pub fn run(args: &Args, context: &Context) -> Result<()> {
    let files = model::open(&args.model, context)?;
    let reference = args.reference.as_ref().map(|path| model::open_quietly(path)).transpose()?;
    let needs = subject::bytes_of_artifact(&files, reference.as_ref())?;
    context.require_memory("lint", PROCESS.saturating_add(needs))?;
    let subject = subject::of_artifact(&files, reference.as_ref())?;
    let reports: Vec<_> = args.targets.iter().map(|target| lint(&subject, target)).collect();
    let ok = !reports.iter().any(Report::fails);
    let linted = Linted { model: &args.model, convention: files.convention_name(), ok, reports: &reports };
    context.report(&linted, |out| reports.iter().try_for_each(|report| human(out, report)))?;
    let warnings = reports.iter().flat_map(|report| &report.findings).filter(|f| !f.severity.fails());
    context.warn_all(&warnings.map(line).collect::<Vec<_>>())?;
    refuse(&reports)
}

/// Fails for the gravest finding of `reports`, if there is one.
fn refuse(reports: &[Report]) -> Result<()> {
    let failing: Vec<_> = reports.iter().filter(|report| report.fails()).collect();
    let Some(report) = failing.first() else { return Ok(()) };
    let all: usize = failing.iter().map(|r| r.findings.iter().filter(|f| f.severity.fails()).count()).sum();
    let more = if all > 1 { format!(" (and {} more)", all - 1) } else { String::new() };
    let first = report.findings.first().map(line).unwrap_or_default();
    Err(GateFailed::new(format!("lint for {}: {first}{more}", report.target)).into())
}

/// Refuses a plan whose output an engine would not run, before any work; tells what it would run slowly.
///
/// # Errors
/// [`GateFailed`].
pub fn check_plan(plan: &Plan, source: &ModelFiles, targets: &[Target], context: &Context) -> Result<()> {
    let subject = subject::of_plan(plan, source);
    let reports: Vec<_> = targets.iter().map(|target| lint(&subject, target)).collect();
    let warnings = reports.iter().flat_map(|report| &report.findings).filter(|f| !f.severity.fails());
    context.warn_all(&warnings.map(line).collect::<Vec<_>>())?;
    refuse(&reports)
}

fn line(finding: &Finding) -> String {
    let Finding { rule, tensor, found, requires, cure, .. } = finding;
    format!("{tensor}: found {found}, allowed {requires} [{rule}]; {cure}")
}

fn human(out: &mut dyn Write, report: &Report) -> io::Result<()> {
    let Report { target, rules, findings, unchecked } = report;
    let count = |severity| findings.iter().filter(|f| f.severity == severity).count();
    match (findings.len(), report.fails()) {
        (0, _) => writeln!(out, "{target}: {rules} rules hold")?,
        (_, true) => writeln!(
            out,
            "{target}: NOT served rightly (does not load: {}, wrong results: {}, warnings: {})",
            count(Severity::Refused),
            count(Severity::Wrong),
            count(Severity::Warning)
        )?,
        (n, false) => writeln!(out, "{target}: {n} warnings")?,
    }
    for of_rule in findings.chunk_by(|a, b| a.rule == b.rule) {
        let first = &of_rule[0];
        writeln!(out, "  {} ({})", first.rule, first.severity.text())?;
        writeln!(out, "    requires  {}", first.requires)?;
        for finding in of_rule.iter().take(LISTED) {
            writeln!(out, "    found     {}: {}", finding.tensor, finding.found)?;
        }
        if of_rule.len() > LISTED {
            writeln!(out, "    found     … and {} more", of_rule.len() - LISTED)?;
        }
        writeln!(out, "    cure      {}", first.cure)?;
        writeln!(out, "    source    {}", first.source)?;
    }
    unchecked.iter().try_for_each(|why| writeln!(out, "  not checked: {why}"))
}

//! `mantissa lint`: checks that a model will load and compute correctly in an engine.

use std::io::{self, Write};
use std::path::Path;

use anyhow::Result;
use mantissa_advise::subject;
use mantissa_plan::contract::{Finding, Report, Severity, Target, lint};
use mantissa_quant::Plan;
use mantissa_store::Paths;
use mantissa_store::convention::ModelFiles;
use serde::Serialize;

use super::fixes;
use super::model::{self, ModelPath};
use crate::context::Context;
use crate::error::GateFailed;
use crate::memory::PROCESS;

/// Layers listed per finding in the text output; the JSON lists all.
const LISTED: usize = 4;

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
  mantissa lint demo --for vllm
  mantissa lint path/to/quantized --for vllm:tp=4,gpu=h100 --for sglang --json
  mantissa lint path/to/model.gguf --for llama.cpp --reference path/to/model")]
pub struct Args {
    /// Model folder or .gguf file
    model: ModelPath,
    /// Engine with its options (repeatable)
    ///
    /// vllm, sglang, lmdeploy and tensorrt-llm take :tp=N,gpu=NAME; llama.cpp, transformers, mlx and
    /// exllamav2 take :gpu=NAME.
    #[arg(long = "for", value_name = "ENGINE", required = true, value_parser = target)]
    targets: Vec<Target>,
    /// Source model, for checks that compare with it
    #[arg(long, value_name = "SOURCE")]
    reference: Option<ModelPath>,
}

/// Parses an engine on the command line.
///
/// # Errors
/// A message with the accepted values.
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

/// Adds the paths that the command reads and writes.
pub fn paths(args: &Args, paths: &mut Paths) {
    args.model.paths(paths);
    args.reference.iter().for_each(|model| model.paths(paths));
}

/// Runs the command.
///
/// # Errors
/// Unreadable files; [`GateFailed`] if a rule is broken.
pub fn run(args: &Args, context: &Context) -> Result<()> {
    let files = model::open(&args.model, context)?;
    let reference = args.reference.as_ref().map(|path| model::open_quietly(path)).transpose()?;
    let needs = subject::bytes_of_artifact(&files, reference.as_ref())?;
    context.require_memory("lint", PROCESS.saturating_add(needs))?;
    let subject = subject::of_artifact(&files, reference.as_ref())?;
    let source = args.reference.as_ref().zip(reference.as_ref());
    let source = source.filter(|(_, files)| !files.is_quantized() && files.gguf().is_none());
    let reports: Vec<_> = args
        .targets
        .iter()
        .map(|target| {
            let mut report = lint(&subject, target);
            let source = source.map(|(path, files)| (&**path, files));
            fixes::of_artifact(&mut report, target, (&*args.model, &files, &subject), source);
            report
        })
        .collect();
    let ok = !reports.iter().any(Report::fails);
    let linted = Linted { model: &args.model, convention: files.convention_name(), ok, reports: &reports };
    context.report(&linted, |out| reports.iter().try_for_each(|report| human(out, report)))?;
    let warnings = reports.iter().flat_map(|report| &report.findings).filter(|f| !f.severity.fails());
    context.warn_all(&warnings.map(line).collect::<Vec<_>>())?;
    refuse(&reports)
}

/// Fails with the most severe finding of `reports`, if any.
fn refuse(reports: &[Report]) -> Result<()> {
    let failing: Vec<_> = reports.iter().filter(|report| report.fails()).collect();
    let Some(report) = failing.first() else { return Ok(()) };
    let all: usize = failing.iter().map(|r| r.findings.iter().filter(|f| f.severity.fails()).count()).sum();
    let more = if all > 1 { format!(" (and {} more)", all - 1) } else { String::new() };
    // The fix comes last, so that it can be copied to the end of the line.
    let first =
        report.findings.first().map(|f| format!("{}{more}; fix: {}", said(f), f.fix)).unwrap_or_default();
    Err(GateFailed::new(format!("lint for {}: {first}", report.target)).into())
}

/// Refuses a plan whose output an engine would not run, before any work; warns about slow paths.
///
/// # Errors
/// [`GateFailed`] with the most severe finding.
pub fn check_plan(plan: &Plan, source: &ModelFiles, targets: &[Target], context: &Context) -> Result<()> {
    let subject = subject::of_plan(plan, source);
    let reports: Vec<_> = targets
        .iter()
        .map(|target| {
            let mut report = lint(&subject, target);
            fixes::of_plan(&mut report, target, plan, source);
            report
        })
        .collect();
    let warnings = reports.iter().flat_map(|report| &report.findings).filter(|f| !f.severity.fails());
    context.warn_all(&warnings.map(line).collect::<Vec<_>>())?;
    refuse(&reports)
}

fn line(finding: &Finding) -> String {
    format!("{}; fix: {}", said(finding), finding.fix)
}

fn said(finding: &Finding) -> String {
    let Finding { rule, tensor, found, requires, .. } = finding;
    format!("{tensor}: expected {requires}, got {found} [{rule}]")
}

fn human(out: &mut dyn Write, report: &Report) -> io::Result<()> {
    let Report { target, rules, findings, unchecked } = report;
    let count = |severity| findings.iter().filter(|f| f.severity == severity).count();
    match (findings.len(), report.fails()) {
        (0, _) => writeln!(out, "{target}: ok ({rules} rules)")?,
        (_, true) => writeln!(
            out,
            "{target}: FAIL (does not load: {}, wrong results: {}, warnings: {})",
            count(Severity::Refused),
            count(Severity::Wrong),
            count(Severity::Warning)
        )?,
        (1, false) => writeln!(out, "{target}: 1 warning")?,
        (n, false) => writeln!(out, "{target}: {n} warnings")?,
    }
    for of_rule in findings.chunk_by(|a, b| a.rule == b.rule) {
        human_rule(out, of_rule)?;
    }
    unchecked.iter().try_for_each(|why| writeln!(out, "  not checked: {why}"))
}

/// Prints the findings of one rule.
fn human_rule(out: &mut dyn Write, findings: &[Finding]) -> io::Result<()> {
    let first = &findings[0];
    writeln!(out, "  {} ({})", first.rule, first.severity.text())?;
    writeln!(out, "    expected  {}", first.requires)?;
    for finding in findings.iter().take(LISTED) {
        writeln!(out, "    got       {}: {}", finding.tensor, finding.found)?;
    }
    if findings.len() > LISTED {
        writeln!(out, "    got       … and {} more", findings.len() - LISTED)?;
    }
    writeln!(out, "    fix       {}", first.fix)?;
    writeln!(out, "    source    {}", first.source)
}

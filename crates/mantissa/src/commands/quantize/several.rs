//! Several formats of one quantized model.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context as _, Result};
use mantissa_quant::{Check, Options, Plan, Start, TaskRuns, sharing};
use mantissa_store::convention::{Container, ModelFiles};
use mantissa_store::{Paths, disk};
use serde::Serialize;

use super::super::adapt;
use super::super::choose::{self, predict};
use super::super::coverage;
use super::super::outcome::carry_out_all;
use super::super::parse::kind_of;
use super::super::record;
use super::args::Args;
use super::done::{Done, human, layer_notes};
use super::planned::{options, plan};
use super::preview::DryRun;
use super::request::Request;
use crate::context::Context;
use crate::error::BadInput;
use crate::output::labelled;

/// Name of a GGUF file among several outputs.
const GGUF_NAME: &str = "model.gguf";

#[derive(Serialize)]
struct Several<'a> {
    /// For each output the format whose layers it has, solved for that format.
    solved_for: Vec<[&'static str; 2]>,
    seconds: f64,
    outputs: Vec<Done<'a>>,
}

/// Report of `--dry-run`.
#[derive(Serialize)]
struct Previews<'a> {
    outputs: Vec<DryRun<'a>>,
}

/// Returns the place of the output in `container`.
fn place(out: &Path, container: Container) -> PathBuf {
    out.join(if container.facts().one_file { GGUF_NAME } else { container.name() })
}

/// Adds the outputs to the paths that the command writes.
///
/// # Errors
/// A format is given twice.
pub(super) fn paths(out: &Path, formats: &[Container], paths: &mut Paths) -> Result<()> {
    different(formats)?;
    formats.iter().for_each(|format| paths.write("--out", place(out, *format), kind_of(*format)));
    Ok(())
}

/// Refuses a format that is given twice.
fn different(formats: &[Container]) -> Result<()> {
    let twice = (1..formats.len()).find(|&i| formats[..i].contains(&formats[i]));
    let found = |i: usize| format!("{} twice", formats[i].name());
    twice.map_or(Ok(()), |i| Err(BadInput::new("--format", found(i), "each format once").into()))
}

/// Plans an output for each format.
fn plans(args: &Args, request: &Request, source: &ModelFiles, context: &Context) -> Result<Vec<Plan>> {
    let formats = &args.formats;
    different(formats)?;
    if request.chosen.is_some() {
        let calibrated = if request.recipe.needs_calibration() { " --calibration default" } else { "" };
        let fix = format!("--recipe {}{calibrated}", request.recipe.label());
        let error = BadInput::new(
            "--format",
            "several formats for a recipe to be chosen",
            "a --recipe, or one --format",
        );
        return Err(error.with_fix(fix).into());
    }
    let options = options(args, request, source, context)?;
    let of_format = |format: &Container| {
        let rebuild = options.rebuild.clone();
        let rebuild = rebuild.map(|rebuild| record::with(rebuild, &format!("--format={}", format.name())));
        let options = Options { container: Some(*format), rebuild, ..options.clone() };
        plan(args, source, request.recipe.clone(), options, context)
    };
    formats.iter().map(of_format).collect()
}

/// Runs the command for several formats; `tasks` run on every output.
///
/// # Errors
/// As the command; no output appears unless all are complete.
pub(super) fn run(
    args: &Args,
    request: &Request,
    (source, tasks): (&ModelFiles, Option<TaskRuns>),
    context: &Context,
) -> Result<()> {
    let mut plans = plans(args, request, source, context)?;
    args.recipe.iter().for_each(|recipe| choose::note_name(recipe, context));
    let another = args.calibration.is_text();
    let evaluation = args.measure.evaluation(&args.model, source, another, context)?;
    let (mut least, mut tokens) = (Vec::with_capacity(plans.len()), 0);
    for plan in &mut plans {
        plan.evaluation.clone_from(&evaluation);
        plan.tasks.clone_from(&tasks);
        least.push(adapt::fit_plan(plan, "quantize", args.verify, context)?);
        tokens = plan.calibration_tokens();
        if args.verify {
            plan.check = Check::Verify(Some(args.model.to_path_buf()));
        }
    }
    if args.dry_run {
        let of = |(plan, least)| {
            let seconds = predict::seconds(plan, tokens, context.threads);
            DryRun::of(plan, source, request, (args.verify, least, seconds))
        };
        let report = Previews { outputs: plans.iter().zip(least).map(of).collect() };
        return context.report(&report, |out| report.outputs.iter().try_for_each(|one| one.human(out)));
    }
    for plan in &plans {
        context.warn_all(&plan.notes)?;
    }
    if let Some(first) = plans.first() {
        let found = coverage::find(first, source, args.traffic.as_deref(), context)?;
        plans.iter_mut().for_each(|plan| plan.coverage.clone_from(&found));
    }
    disk::create_folders(&request.out).with_context(|| request.out.display().to_string())?;
    let places: Vec<_> = args.formats.iter().map(|format| place(&request.out, *format)).collect();
    let outs = places.iter().map(|path| context.output(path)).collect::<Result<Vec<_>>>()?;
    let begin = if args.restart { Start::Restart } else { Start::Resume };
    let start = Instant::now();
    let outcomes = carry_out_all(&plans, source, &outs, begin, context)?;
    let time = start.elapsed();
    let name = |i: usize| plans[i].container.name();
    let solved_for = sharing(&plans).into_iter().enumerate().map(|(i, of)| [name(i), name(of)]).collect();
    let outputs = plans.iter().zip(&outcomes).zip(&places);
    let outputs = outputs
        .map(|((plan, outcome), path)| Done::new((args, request, source), (plan, outcome), path, time));
    let report = Several { solved_for, seconds: time.as_secs_f64(), outputs: outputs.collect() };
    context.report(&report, |out| human_all(out, &report, args.layers))?;
    outcomes.iter().try_for_each(|outcome| context.warn_all(&layer_notes(&outcome.quality)))
}

fn human_all(out: &mut dyn Write, report: &Several<'_>, layers: bool) -> io::Result<()> {
    for done in &report.outputs {
        human(out, done, layers)?;
        writeln!(out)?;
    }
    for [format, of] in &report.solved_for {
        if format != of {
            labelled(out, "layers", &format!("{format} has the codes and scales of {of}"))?;
        }
    }
    labelled(out, "time", &format!("{:.2} s in all", report.seconds))
}

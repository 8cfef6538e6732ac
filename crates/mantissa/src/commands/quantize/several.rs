//! Several formats of one quantized model.

use std::io::{self, Write};
use std::path::PathBuf;

use anyhow::Result;
use mantissa_jobs::choose::{self, predict};
use mantissa_jobs::{PreparedQuantize, ResolvedQuantize, finished};
use mantissa_quant::{Outcome, sharing};
use mantissa_store::convention::Container;
use serde::Serialize;

use super::args::Args;
use super::carry_out;
use super::done::{Done, human, layer_notes};
use super::preview::DryRun;
use crate::context::Context;
use crate::output::labelled;

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

/// Runs the command for several formats.
///
/// # Errors
/// As the command; no output appears unless all are complete.
pub(super) fn run(
    args: &Args,
    resolved: &ResolvedQuantize,
    prepared: &mut PreparedQuantize<'_>,
    context: &Context,
) -> Result<()> {
    args.recipe.iter().for_each(|recipe| choose::note_name(recipe, context));
    choose::note_calibration(&args.calibration.value(), &resolved.job.weights.calibration, context);
    if args.dry_run {
        let (plans, source) = (&prepared.plans, &prepared.source);
        let of = |(plan, least): (_, &u64)| {
            let seconds = predict::seconds(plan, prepared.calibration_tokens, context.threads);
            DryRun::of(plan, source, resolved, (args.verify, *least, seconds))
        };
        let report = Previews { outputs: plans.iter().zip(&prepared.least_memory).map(of).collect() };
        return context.report(&report, |out| report.outputs.iter().try_for_each(|one| one.human(out)));
    }
    let places = resolved.job.places()?;
    let (outcomes, time) = match finished_already(prepared, resolved, &places, context)? {
        Some(outcomes) => (outcomes, None),
        None => match carry_out(args, resolved, prepared, context)? {
            Some((outcomes, time)) => (outcomes, Some(time)),
            None => return Ok(()),
        },
    };
    let plans = &prepared.plans;
    let name = |i: usize| plans[i].container.name();
    let solved_for = sharing(plans).into_iter().enumerate().map(|(i, of)| [name(i), name(of)]).collect();
    let outputs = plans.iter().zip(&outcomes).zip(&places);
    let outputs = outputs.map(|((plan, outcome), (path, _))| {
        Done::new((args, resolved, &prepared.source), (plan, outcome), path, time)
    });
    let report = Several {
        solved_for,
        seconds: time.map_or(0.0, |time| time.as_secs_f64()),
        outputs: outputs.collect(),
    };
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

/// Finds the finished outputs of the job; `None` if one of them is missing.
fn finished_already(
    prepared: &PreparedQuantize<'_>,
    resolved: &ResolvedQuantize,
    places: &[(PathBuf, Container)],
    context: &Context,
) -> Result<Option<Vec<Outcome>>> {
    let mut found = Vec::with_capacity(places.len());
    for (plan, (path, _)) in prepared.plans.iter().zip(places) {
        match finished::output_of_plan(plan, &prepared.source, path, resolved.job.restart, context)? {
            Some(outcome) => found.push(outcome),
            None => return Ok(None),
        }
    }
    Ok(Some(found))
}

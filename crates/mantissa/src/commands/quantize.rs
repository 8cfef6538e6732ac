//! `mantissa quantize`: makes a verified quantized model from a dense one.

mod args;
mod done;
mod preview;
mod several;

use anyhow::Result;
use mantissa_jobs::choose::{self, predict};
use mantissa_jobs::{Job, PreparedQuantize, ResolvedQuantize, finished};
use mantissa_quant::{Plan, Recipe, SchemeShare, dequantized_source};
use mantissa_store::Paths;
use mantissa_store::convention::ModelFiles;

pub use self::args::Args;
pub use self::done::{ALREADY, fallback_line, in_files, larger};
use self::done::{Done, human, layer_notes};
use self::preview::{DryRun, share_line, shorter};
use super::coverage;
use super::execute::Execute;
use super::fixes::GivenLine;
use super::model;
use super::outcome::tell_failure;
use super::workers::Engaged;
use crate::context::Context;
use crate::help::Group;
use crate::output::bytes;

impl Execute for Args {
    const GROUP: Group = Group::Quantize;

    /// # Errors
    /// Invalid recipe arguments.
    fn paths(&self, paths: &mut Paths) -> Result<()> {
        if !self.dry_run {
            *paths = self.resolved(None)?.job.paths();
            // With several formats an output is refused before any work.
            if self.formats.len() < 2 {
                paths.answer_finished("--out");
            }
            return Ok(());
        }
        self.model.paths(paths);
        self.calibration.paths(paths);
        self.measure.paths(paths);
        [&self.imatrix, &self.traffic].into_iter().flatten().for_each(|path| paths.read(path));
        self.recipe.iter().filter(|recipe| Recipe::is_file(recipe)).for_each(|recipe| paths.read(recipe));
        Ok(())
    }

    /// # Errors
    /// Input that cannot be quantized, before anything is written; I/O;
    /// [`QuantError::Gate`](mantissa_quant::QuantError::Gate) if the loss exceeds --max-kl or
    /// --max-accuracy-drop,
    /// [`QuantError::NotVerified`](mantissa_quant::QuantError::NotVerified) if the output does not verify. An old
    /// output then stays in place.
    fn run(&self, context: &Context) -> Result<()> {
        // Only a preview has not found recipe and output yet; a choice needs the model.
        let source = (self.dry_run && self.recipe.is_none()).then(|| model::open_quietly(&self.model));
        let source = source.transpose()?.map(dequantized_source).transpose()?;
        let resolved = self.resolved(source.as_ref())?.clone().with_seed(context.seed);
        drop(source);
        let mut prepared = resolved.job.prepare(&GivenLine, context)?;
        if self.formats.len() > 1 {
            return several::run(self, &resolved, &mut prepared, context);
        }
        let Some((plan, least)) = prepared.plans.first().zip(prepared.least_memory.first()) else {
            return Ok(());
        };
        // Measures the speed of this machine, so only where it is shown.
        let shown = self.dry_run || resolved.chosen.is_some();
        let seconds = shown.then(|| predict::seconds(plan, prepared.calibration_tokens, context.threads));
        announce(self, &resolved, plan, (seconds, prepared.peak_bytes()), context);
        if let (true, Some(seconds)) = (self.dry_run, seconds) {
            let report = DryRun::of(plan, &prepared.source, &resolved, (self.verify, *least, seconds));
            return context.report(&report, |out| report.human(out));
        }
        if let Some(outcome) = finished::output_of_plan(
            plan,
            &prepared.source,
            &resolved.job.out,
            resolved.job.restart,
            context,
        )? {
            let done =
                Done::new((self, &resolved, &prepared.source), (plan, &outcome), &resolved.job.out, None);
            context.report(&done, |out| human(out, &done, self.layers))?;
            return context.warn_all(&layer_notes(&outcome.quality));
        }
        context.note(&share_note(plan, &prepared.source));
        let Some((outcomes, time)) = carry_out(self, &resolved, &mut prepared, context)? else {
            return Ok(());
        };
        let (Some(plan), Some(outcome)) = (prepared.plans.first(), outcomes.first()) else { return Ok(()) };
        let done =
            Done::new((self, &resolved, &prepared.source), (plan, outcome), &resolved.job.out, Some(time));
        context.report(&done, |out| human(out, &done, self.layers))?;
        context.warn_all(&layer_notes(&outcome.quality))
    }
}

/// Outcomes of the plans, and the time that they took.
type Completed = (Vec<mantissa_quant::Outcome>, std::time::Duration);

/// Runs a planned quantization, alone or with other workers; reports an output that failed a limit or verification. `None`
/// if an engine runs it instead.
fn carry_out(
    args: &Args,
    resolved: &ResolvedQuantize,
    prepared: &mut PreparedQuantize<'_>,
    context: &Context,
) -> Result<Option<Completed>> {
    // Units of several plans have no common numbers.
    let units = prepared.plans.first().filter(|_| prepared.plans.len() == 1).and_then(Plan::units);
    let engaged = args.workers.engage(&resolved.job, &resolved.job.out, units, context)?;
    match &engaged {
        Engaged::Alone => {}
        Engaged::Scripted => return Ok(None),
        Engaged::Crew(crew) => prepared.share(&crew.team, context)?,
    }
    prepared.warn(context)?;
    let coverage = prepared.coverage(context)?;
    coverage.iter().try_for_each(|found| coverage::show(found, context))?;
    let report = tell_failure(prepared.run(coverage, context), context)?;
    if let Engaged::Crew(crew) = engaged {
        crew.finish(context);
    }
    Ok(Some((report.outcomes, report.time)))
}

/// Prints what a short name stands for and what was chosen, with the predictions for `plan`.
fn announce(
    args: &Args,
    resolved: &ResolvedQuantize,
    plan: &Plan,
    (seconds, peak): (Option<f64>, u64),
    context: &Context,
) {
    args.recipe.iter().for_each(|recipe| choose::note_name(recipe, context));
    choose::note_calibration(&args.calibration.value(), &resolved.job.weights.calibration, context);
    let (Some(choice), Some(seconds)) = (&resolved.chosen, seconds) else { return };
    context.note(&format!("recipe {} in {}: {}", choice.recipe, choice.format.name(), choice.why));
    let (out, size) = (resolved.job.out.display(), bytes(plan.output_bytes()));
    let time = predict::duration(seconds);
    context.note(&format!("output {out}: {size}; {time} and {} of memory (predicted)", bytes(peak)));
    shorter(plan, seconds, context.threads).iter().for_each(|way| context.note(way));
}

/// Returns the share of the parameters that the plan quantizes, and the expected bytes of each scheme.
fn share_note(plan: &Plan, source: &ModelFiles) -> String {
    let share = plan.share(source);
    let scheme = |scheme: &SchemeShare| {
        format!("{} {}", scheme.scheme.as_deref().unwrap_or("unquantized"), bytes(scheme.bytes))
    };
    let schemes = share.schemes.iter().map(scheme).collect::<Vec<_>>().join(", ");
    format!("{}; expected {} ({schemes})", share_line(&share), bytes(plan.output_bytes()))
}

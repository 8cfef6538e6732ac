//! `mantissa quantize`: makes a verified quantized model from a dense one.

mod args;
mod done;
mod preview;
mod request;
mod several;

use std::time::Instant;

use anyhow::Result;
use mantissa_model::Products;
use mantissa_num::Rounding;
use mantissa_quant::calibrate::CalibrationSet;
use mantissa_quant::{
    Check, Importance, Options, Plan, Recipe, SchemeShare, Start, as_in_gguf, dequantized_source,
};
use mantissa_store::convention::ModelFiles;
use mantissa_store::{DEFAULT_SHARD_BYTES, Paths};

pub use self::args::Args;
use self::args::{Factors, Round};
pub use self::done::fallback_line;
use self::done::{Done, human, layer_notes};
use self::preview::{DryRun, share_line};
use self::request::{Request, measure_on_default};
use super::adapt;
use super::choose::predict;
use super::coverage;
use super::lint;
use super::model;
use super::outcome::carry_out;
use super::parse::kind_of;
use crate::context::Context;
use crate::error::BadInput;
use crate::output::bytes;

/// Adds the paths that the command reads and writes.
///
/// # Errors
/// Invalid recipe arguments.
pub fn paths(args: &Args, paths: &mut Paths) -> Result<()> {
    args.model.paths(paths);
    args.calibration.paths(paths);
    args.measure.paths(paths);
    [&args.imatrix, &args.traffic].into_iter().flatten().for_each(|path| paths.read(path));
    let file = args.recipe.iter().filter(|recipe| Recipe::is_file(recipe) && args.recipe_text.is_none());
    file.for_each(|recipe| paths.read(recipe));
    if !args.dry_run {
        let source = args.recipe.is_none().then(|| model::open_quietly(&args.model)).transpose()?;
        let request = Request::of(args, source.as_ref())?;
        match args.formats.as_slice() {
            several @ [_, _, ..] => several::paths(&request.out, several, paths)?,
            _ => paths.write("--out", &request.out, kind_of(request.container())),
        }
    }
    Ok(())
}

/// Runs the command.
///
/// # Errors
/// Input that cannot be quantized, before anything is written; I/O;
/// [`QuantError::Gate`](mantissa_quant::QuantError::Gate) if the loss exceeds --max-kl or
/// --max-accuracy-drop,
/// [`QuantError::NotVerified`](mantissa_quant::QuantError::NotVerified) if the output does not verify. An old
/// output then stays in place.
pub fn run(args: &Args, context: &Context) -> Result<()> {
    let source = dequantized_source(model::open(&args.model, context)?)?;
    let request = Request::of(args, Some(&source))?;
    let source = match args.formats.len() <= 1 && request.container().facts().one_file {
        true => as_in_gguf(source)?,
        false => source,
    };
    // A bad task file is refused before a calibration text is read.
    let tasks = args.measure.tasks(&args.model, &source, context)?;
    if args.formats.len() > 1 {
        return several::run(args, request, (&source, tasks), context);
    }
    let options = options(args, request, &source, context)?;
    let tokens = options.calibration.as_ref().map_or(0, CalibrationSet::tokens);
    let mut plan = plan(args, &source, request.recipe.clone(), options, context)?;
    let another = args.calibration.is_text();
    plan.evaluation = args.measure.evaluation(&args.model, &source, another, context)?;
    plan.tasks = tasks;
    if request.chosen.is_some() && plan.evaluation.is_none() {
        measure_on_default(&mut plan, &source, args.verify, context)?;
    }
    let least = adapt::fit_plan(&mut plan, "quantize", args.verify, context)?;
    let peak = plan.peak_bytes(args.verify);
    // Measures the speed of this machine, so only where it is shown.
    let shown = args.dry_run || request.chosen.is_some();
    let seconds = shown.then(|| predict::seconds(&plan, tokens, context.threads));
    request.announce(args, &plan, (seconds, peak), context);
    if let (true, Some(seconds)) = (args.dry_run, seconds) {
        let report = DryRun::of(&plan, &source, request, (args.verify, least, seconds));
        return context.report(&report, |out| report.human(out));
    }
    context.note(&share_note(&plan, &source));
    context.warn_all(&plan.notes)?;
    if args.verify {
        plan.check = Check::Verify(Some(args.model.to_path_buf()));
    }
    plan.coverage = coverage::find(&plan, &source, args.traffic.as_deref(), context)?;
    let start = Instant::now();
    let begin = if args.restart { Start::Restart } else { Start::Resume };
    let outcome = carry_out(&plan, &source, &context.output(&request.out)?, begin, context)?;
    let done = Done::new((args, request, &source), (&plan, &outcome), &request.out, start.elapsed());
    context.report(&done, |out| human(out, &done, args.layers))?;
    context.warn_all(&layer_notes(&outcome.quality))
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

/// Makes the plan, and refuses one whose output an engine of the arguments would not run.
fn plan(
    args: &Args,
    source: &ModelFiles,
    mut recipe: Recipe,
    options: Options,
    context: &Context,
) -> Result<Plan> {
    let container = options.container.unwrap_or_else(|| recipe.container());
    args.tables.apply(&mut recipe, source, container)?;
    let plan = Plan::new(source, recipe, options)?;
    lint::check_plan(&plan, source, &args.targets, context)?;
    Ok(plan)
}

/// Makes the options of the plan.
fn options(args: &Args, request: &Request, source: &ModelFiles, context: &Context) -> Result<Options> {
    let rounding = match args.round {
        Round::Nearest => Rounding::NearestEven,
        Round::Stochastic => Rounding::Stochastic { seed: context.seed },
    };
    let calibration = request.calibration(args);
    let loaded = calibration.load_apart(source, args.measure.split(), args.hold_out, context)?;
    if loaded.is_none() && (args.hold_out > 0 || args.traffic.is_some()) {
        let option = if args.hold_out > 0 { "--hold-out" } else { "--traffic" };
        let allowed = "--calibration or --calibration-tokens with it";
        return Err(BadInput::new(option, "neither", allowed).into());
    }
    let (calibration, held_out) = loaded.unzip();
    Ok(Options {
        threads: context.threads,
        container: request.format,
        max_shard_bytes: args.max_shard_size.unwrap_or(DEFAULT_SHARD_BYTES),
        max_gguf_bytes: args.max_shard_size,
        rounding,
        calibration,
        held_out: held_out.unwrap_or_default(),
        products: match args.calibration_dtype {
            Factors::F32 => Products::F32,
            Factors::Bf16 => Products::Bf16,
        },
        route_all_experts: args.route_all_experts,
        importance: args.imatrix.as_deref().map(Importance::read).transpose()?,
        rebuild: Some(request.rebuild(args, context)?),
        ..Options::default()
    })
}

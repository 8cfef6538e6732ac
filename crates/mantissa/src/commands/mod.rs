//! Commands, one module each. To add one: a module, a variant of [`Command`], and arms in [`paths()`] and
//! [`run()`].

mod adapt;
mod adapter;
mod bench;
mod calibration;
mod cast;
mod choose;
mod completions;
mod conversations;
mod convert;
mod coverage;
mod default_text;
mod demo;
mod destination;
mod diagnose;
mod diff;
mod distill;
mod doctor;
mod ending;
mod eval;
mod explain;
mod finetune;
mod fit;
mod fixes;
mod generated;
mod imatrix;
mod inspect;
mod lint;
mod man;
mod model;
mod outcome;
mod parse;
mod plan;
mod quantize;
mod rebuild;
mod recalibrate;
mod recipes;
mod render_chat;
mod report;
mod run;
mod running;
mod schemes;
mod serve;
mod signature;
mod synth;
mod tables;
mod tasks;
mod text;
mod tokenizer;
mod train;
mod verify;

use anyhow::Result;
use clap::Subcommand;

use mantissa_quant::Rebuild;
use mantissa_store::Paths;

pub use self::outcome::left_by_another;
pub use self::rebuild::record;
use crate::context::Context;
use crate::memory::PROCESS;

/// Command to run.
#[derive(Subcommand)]
pub enum Command {
    Demo(demo::Args),
    Inspect(inspect::Args),
    Plan(Box<plan::Args>),
    Explain(explain::Args),
    Quantize(Box<quantize::Args>),
    Fit(Box<fit::Args>),
    Eval(Box<eval::Args>),
    Diff(diff::Args),
    Imatrix(imatrix::Args),
    Run(Box<run::Args>),
    Serve(Box<serve::Args>),
    Bench(bench::Args),
    Verify(verify::Args),
    Convert(Box<convert::Args>),
    Rebuild(Box<rebuild::Args>),
    Recalibrate(Box<recalibrate::Args>),
    Lint(lint::Args),
    Doctor(doctor::Args),
    Diagnose(Box<diagnose::Args>),
    Train(train::Args),
    Finetune(Box<finetune::Args>),
    Distill(Box<distill::Args>),
    Report(report::Args),
    Tokenizer(tokenizer::Args),
    Cast(cast::Args),
    Recipes(recipes::Args),
    Schemes(schemes::Args),
    Completions(completions::Args),
    Man(man::Args),
    #[command(hide = true)]
    RenderChat(render_chat::Args),
    #[command(hide = true)]
    Synth(synth::Args),
}

/// Returns the paths that `command` reads and writes, for checks before it runs.
///
/// # Errors
/// Arguments or settings that do not determine them.
pub fn paths(command: &Command) -> Result<Paths> {
    let mut paths = Paths::default();
    add_paths(command, &mut paths)?;
    Ok(paths)
}

/// Adds the paths that `command` reads and writes.
fn add_paths(command: &Command, p: &mut Paths) -> Result<()> {
    match command {
        Command::Demo(args) => demo::paths(args, p),
        Command::Inspect(args) => inspect::paths(args, p),
        Command::Plan(args) => plan::paths(args, p),
        Command::Explain(args) => explain::paths(args, p),
        Command::Quantize(args) => quantize::paths(args, p)?,
        Command::Fit(args) => fit::paths(args, p)?,
        Command::Eval(args) => eval::paths(args, p),
        Command::Diff(args) => diff::paths(args, p),
        Command::Imatrix(args) => imatrix::paths(args, p),
        Command::Run(args) => run::paths(args, p),
        Command::Serve(args) => serve::paths(args, p),
        Command::Bench(args) => bench::paths(args, p),
        Command::Verify(args) => verify::paths(args, p),
        Command::Convert(args) => convert::paths(args, p)?,
        Command::Rebuild(args) => rebuild::paths(args, p)?,
        Command::Recalibrate(args) => recalibrate::paths(args, p),
        Command::Lint(args) => lint::paths(args, p),
        Command::Doctor(args) => doctor::paths(args, p),
        Command::Diagnose(args) => diagnose::paths(args, p),
        Command::Train(args) => train::paths(args, p)?,
        Command::Finetune(args) => finetune::paths(args, p),
        Command::Distill(args) => distill::paths(args, p),
        Command::Report(args) => report::paths(args, p),
        Command::Tokenizer(args) => tokenizer::paths(args, p),
        Command::Cast(args) => cast::paths(args, p),
        Command::Synth(args) => synth::paths(args, p),
        Command::Recipes(_)
        | Command::Schemes(_)
        | Command::Completions(_)
        | Command::Man(_)
        | Command::RenderChat(_) => {}
    }
    Ok(())
}

/// Returns the command line that `command` replays, if it replays one.
///
/// # Errors
/// As [`paths`].
pub fn recorded(command: &Command) -> Result<Option<Rebuild>> {
    match command {
        Command::Rebuild(args) => Ok(Some(rebuild::replayed(args)?)),
        _ => Ok(None),
    }
}

/// Runs `command` of the program that `program` describes.
///
/// # Errors
/// As the command; [`exit_of`](crate::error::exit_of) turns each into an exit code.
pub fn run(command: Command, program: fn() -> clap::Command, context: &Context) -> Result<()> {
    // `recipes` and `schemes` have no ceiling; chat templates have their own.
    if !matches!(command, Command::Recipes(_) | Command::Schemes(_) | Command::RenderChat(_)) {
        context.require_memory("this process", PROCESS)?;
    }
    match command {
        Command::Demo(args) => demo::run(&args, context),
        Command::Inspect(args) => inspect::run(&args, context),
        Command::Plan(args) => plan::run(&args, context),
        Command::Explain(args) => explain::run(&args, context),
        Command::Quantize(args) => quantize::run(&args, context),
        Command::Fit(args) => fit::run(&args, context),
        Command::Eval(args) => eval::run(&args, context),
        Command::Diff(args) => diff::run(&args, context),
        Command::Imatrix(args) => imatrix::run(&args, context),
        Command::Run(args) => run::run(&args, context),
        Command::Serve(args) => serve::run(&args, context),
        Command::Bench(args) => bench::run(&args, context),
        Command::Verify(args) => verify::run(&args, context),
        Command::Convert(args) => convert::run(&args, context),
        Command::Rebuild(args) => rebuild::run(*args, program, context),
        Command::Recalibrate(args) => recalibrate::run(&args, context),
        Command::Lint(args) => lint::run(&args, context),
        Command::Doctor(args) => doctor::run(&args, context),
        Command::Diagnose(args) => diagnose::run(&args, context),
        Command::Train(args) => train::run(&args, context),
        Command::Finetune(args) => finetune::run(&args, context),
        Command::Distill(args) => distill::run(&args, context),
        Command::Report(args) => report::run(&args, context),
        Command::Tokenizer(args) => tokenizer::run(&args, context),
        Command::Cast(args) => cast::run(&args, context),
        Command::Recipes(args) => recipes::run(&args, context),
        Command::Schemes(args) => schemes::run(&args, context),
        Command::Completions(args) => completions::run(&args, &program(), context),
        Command::Man(args) => man::run(&args, program(), context),
        Command::RenderChat(args) => render_chat::run(&args, context),
        Command::Synth(args) => synth::run(&args, context),
    }
}

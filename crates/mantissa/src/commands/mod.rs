//! One module per command. A command is added by its module, a variant of [`Command`] and an arm of [`run()`].

mod calibration;
mod cast;
mod conversations;
mod convert;
mod coverage;
mod demo;
mod doctor;
mod eval;
mod fit;
mod imatrix;
mod inspect;
mod lint;
mod model;
mod outcome;
mod quantize;
mod recalibrate;
mod recipes;
mod render_chat;
mod report;
mod run;
mod schemes;
mod synth;
mod text;
mod tokenizer;
mod train;
mod verify;

use anyhow::Result;
use clap::Subcommand;

use crate::app::Context;
use crate::memory::PROCESS;

/// The command to run.
#[derive(Subcommand)]
pub enum Command {
    Demo(demo::Args),
    Inspect(inspect::Args),
    Quantize(quantize::Args),
    Fit(Box<fit::Args>),
    Eval(Box<eval::Args>),
    Imatrix(imatrix::Args),
    Run(Box<run::Args>),
    Verify(verify::Args),
    Convert(convert::Args),
    Recalibrate(recalibrate::Args),
    Lint(lint::Args),
    Doctor(doctor::Args),
    Train(train::Args),
    Report(report::Args),
    Tokenizer(tokenizer::Args),
    Cast(cast::Args),
    Recipes(recipes::Args),
    Schemes(schemes::Args),
    #[command(hide = true)]
    RenderChat(render_chat::Args),
    #[command(hide = true)]
    Synth(synth::Args),
}

/// Runs `command`.
///
/// # Errors
/// As the command; [`exit_of`](crate::error::exit_of) turns any of them into an exit code.
pub fn run(command: Command, context: &Context) -> Result<()> {
    // Lists of what there is have no ceiling; chat templates have their own.
    if !matches!(command, Command::Recipes(_) | Command::Schemes(_) | Command::RenderChat(_)) {
        context.require_memory("this process", PROCESS)?;
    }
    match command {
        Command::Demo(args) => demo::run(&args, context),
        Command::Inspect(args) => inspect::run(&args, context),
        Command::Quantize(args) => quantize::run(&args, context),
        Command::Fit(args) => fit::run(&args, context),
        Command::Eval(args) => eval::run(&args, context),
        Command::Imatrix(args) => imatrix::run(&args, context),
        Command::Run(args) => run::run(&args, context),
        Command::Verify(args) => verify::run(&args, context),
        Command::Convert(args) => convert::run(&args, context),
        Command::Recalibrate(args) => recalibrate::run(&args, context),
        Command::Lint(args) => lint::run(&args, context),
        Command::Doctor(args) => doctor::run(&args, context),
        Command::Train(args) => train::run(&args, context),
        Command::Report(args) => report::run(&args, context),
        Command::Tokenizer(args) => tokenizer::run(&args, context),
        Command::Cast(args) => cast::run(&args, context),
        Command::Recipes(args) => recipes::run(&args, context),
        Command::Schemes(args) => schemes::run(&args, context),
        Command::RenderChat(args) => render_chat::run(&args, context),
        Command::Synth(args) => synth::run(&args, context),
    }
}

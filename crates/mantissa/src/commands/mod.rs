//! Commands, one module each, whose `Args` implement [`Execute`]. Steps to add one: ARCHITECTURE.md, "To add something".

mod adapter;
mod bench;
mod calibration;
mod cast;
mod compare;
mod completions;
mod convert;
mod coverage;
mod demo;
mod diagnose;
mod diff;
mod distill;
mod doctor;
mod engines;
mod eval;
mod execute;
mod explain;
mod finetune;
mod fit;
mod fixes;
mod imatrix;
mod inspect;
mod lint;
mod load_preview;
mod losses;
mod man;
mod model;
mod next_steps;
mod outcome;
mod parse;
mod plan;
mod pull;
mod quantize;
mod rebuild;
mod recalibrate;
mod recipes;
mod render_chat;
mod report;
mod run;
mod schemes;
mod serve;
mod speculate;
mod synth;
mod tables;
mod tasks;
mod text;
mod tokenizer;
mod train;
mod verify;
mod worker;
mod workers;

use anyhow::Result;
use clap::Subcommand;
use mantissa_jobs::RenderChat;
use mantissa_jobs::memory::PROCESS;
use mantissa_store::Paths;

use self::execute::Execute;
pub use self::serve::grammar_process;
use crate::context::Context;
use crate::help::Group;
pub use mantissa_jobs::execute::left_by_another;

/// Defines [`Command`] and its functions from the list of commands.
macro_rules! commands {
    ($($(#[$attribute:meta])* $name:ident: $module:ident,)*) => {
        /// Command to run.
        #[derive(Subcommand)]
        pub enum Command {
            $($(#[$attribute])* $name(Box<$module::Args>),)*
        }

        impl Command {
            /// Returns the paths that the command reads and writes, for checks before it runs.
            ///
            /// # Errors
            /// Arguments or settings that do not determine them.
            pub fn paths(&self) -> Result<Paths> {
                let mut paths = Paths::default();
                match self {
                    $(Self::$name(args) => args.paths(&mut paths)?,)*
                }
                Ok(paths)
            }

            /// Runs the command.
            ///
            /// # Errors
            /// As the command; [`exit_of`](crate::error::exit_of) turns each into an exit code.
            pub fn run(&self, context: &Context) -> Result<()> {
                if self.facts().ceiling {
                    context.require_memory("this process", PROCESS)?;
                }
                match self {
                    $(Self::$name(args) => args.run(context),)*
                }
            }

            fn facts(&self) -> &'static Facts {
                match self {
                    $(Self::$name(_) => const { &Facts::of::<$module::Args>(stringify!($module)) },)*
                }
            }
        }

        /// Facts of every command, in the order of the help.
        const FACTS: &[Facts] = &[$(Facts::of::<$module::Args>(stringify!($module)),)*];
    };
}

commands! {
    Demo: demo,
    Pull: pull,
    Plan: plan,
    Explain: explain,
    Inspect: inspect,
    Recipes: recipes,
    Schemes: schemes,
    Quantize: quantize,
    Fit: fit,
    Imatrix: imatrix,
    Recalibrate: recalibrate,
    Convert: convert,
    Cast: cast,
    Rebuild: rebuild,
    Worker: worker,
    Run: run,
    Serve: serve,
    Eval: eval,
    Compare: compare,
    Diff: diff,
    Bench: bench,
    Verify: verify,
    Lint: lint,
    Doctor: doctor,
    Diagnose: diagnose,
    Report: report,
    Train: train,
    Finetune: finetune,
    Distill: distill,
    Tokenizer: tokenizer,
    Completions: completions,
    Man: man,
    #[command(hide = true)]
    RenderChat: render_chat,
    #[command(hide = true)]
    Synth: synth,
}

/// Facts of a command that hold for all arguments.
struct Facts {
    /// Name of the module; of the command, but for a hyphen.
    module: &'static str,
    group: Group,
    ceiling: bool,
    trains: bool,
}

impl Facts {
    const fn of<A: Execute>(module: &'static str) -> Self {
        Facts { module, group: A::GROUP, ceiling: A::CEILING, trains: A::TRAINS }
    }

    /// Finds the facts of the command `name`.
    fn named(name: &str) -> Option<&'static Self> {
        FACTS.iter().find(|facts| facts.module == name.replace('-', "_"))
    }
}

/// Returns what renders chat templates for all commands.
pub fn chat_renderer() -> Box<dyn RenderChat> {
    Box::new(render_chat::Processes)
}

/// Returns the group of a command in the help.
pub fn group(command: &str) -> Group {
    Facts::named(command).map_or(Group::Shell, |facts| facts.group)
}

/// True if rerunning the command resumes a run that was stopped.
pub fn trains(command: &str) -> bool {
    Facts::named(command).is_some_and(|facts| facts.trains)
}

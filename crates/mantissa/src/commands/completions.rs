//! `mantissa completions`: prints a completion script for a shell.

use anyhow::Result;
use clap::Command;
use clap_complete::{Shell, generate};
use serde::Serialize;

use crate::context::Context;

/// Print a completion script for a shell
///
/// bash: save it as ~/.local/share/bash-completion/completions/mantissa. zsh: as _mantissa in a folder of
/// $fpath. fish: as ~/.config/fish/completions/mantissa.fish.
#[derive(clap::Args)]
#[command(after_help = "EXAMPLES
  mantissa completions bash > mantissa.bash
  mantissa completions zsh > _mantissa
  mantissa completions fish > mantissa.fish")]
pub struct Args {
    /// Shell
    #[arg(value_enum)]
    shell: Shell,
}

#[derive(Serialize)]
struct Report {
    shell: String,
    script: String,
}

/// Runs the command for `program`.
///
/// # Errors
/// Standard output cannot be written.
pub fn run(args: &Args, program: &Command, context: &Context) -> Result<()> {
    let mut script = Vec::new();
    generate(args.shell, &mut visible(program), program.get_name(), &mut script);
    let script = String::from_utf8_lossy(&script).into_owned();
    let report = Report { shell: args.shell.to_string(), script };
    context.report(&report, |out| out.write_all(report.script.as_bytes()))
}

/// Returns the program without its hidden commands.
fn visible(program: &Command) -> Command {
    let commands = program.get_subcommands().filter(|command| !command.is_hide_set()).cloned();
    let visible = Command::new(env!("CARGO_PKG_NAME")).args(program.get_arguments().cloned());
    visible.subcommands(commands.collect::<Vec<_>>())
}

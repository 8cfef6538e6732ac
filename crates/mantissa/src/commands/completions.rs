//! `mantissa completions`: prints a completion script for a shell.

use anyhow::Result;
use clap::Command;
use clap_complete::{Shell, generate};
use serde::Serialize;

use super::execute::Execute;
use crate::context::Context;
use crate::help::Group;

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

impl Execute for Args {
    const GROUP: Group = Group::Shell;

    /// Runs the command for `program`.
    ///
    /// # Errors
    /// Standard output cannot be written.
    fn run(&self, context: &Context) -> Result<()> {
        let program = context.program();
        let mut script = Vec::new();
        generate(self.shell, &mut visible(&program), program.get_name(), &mut script);
        let script = String::from_utf8_lossy(&script).into_owned();
        let report = Report { shell: self.shell.to_string(), script };
        context.report_script(&report, &report.script)
    }
}

/// Returns the program without its hidden commands.
fn visible(program: &Command) -> Command {
    let commands = program.get_subcommands().filter(|command| !command.is_hide_set()).cloned();
    let visible = Command::new(env!("CARGO_PKG_NAME")).args(program.get_arguments().cloned());
    visible.subcommands(commands.collect::<Vec<_>>())
}

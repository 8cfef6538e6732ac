//! `mantissa man`: prints man pages.

use anyhow::Result;
use clap::Command;
use clap_mangen::Man;
use serde::Serialize;

use super::execute::Execute;
use crate::context::Context;
use crate::error::BadInput;
use crate::help::Group;

/// Print a man page in roff
///
/// Without COMMAND the page of mantissa itself. To install them, save each as mantissa.1 or
/// mantissa-COMMAND.1 in ~/.local/share/man/man1.
#[derive(clap::Args)]
#[command(after_help = "EXAMPLES
  mantissa man > mantissa.1
  mantissa man quantize > mantissa-quantize.1")]
pub struct Args {
    /// Command [default: mantissa itself]
    command: Option<String>,
}

#[derive(Serialize)]
struct Report<'a> {
    name: &'a str,
    page: String,
}

impl Execute for Args {
    const GROUP: Group = Group::Shell;

    /// Runs the command for `program`.
    ///
    /// # Errors
    /// An unknown command; standard output cannot be written.
    fn run(&self, context: &Context) -> Result<()> {
        let mut program = context.program().disable_help_subcommand(true);
        program.build();
        let command = match &self.command {
            None => program,
            Some(name) => find(&program, name)?,
        };
        let name = command.get_display_name().unwrap_or_else(|| command.get_name()).to_owned();
        let report = Report { name: &name, page: page(command)? };
        context.report_script(&report, &report.page)
    }
}

fn find(program: &Command, name: &str) -> Result<Command> {
    let commands = || program.get_subcommands().filter(|command| !command.is_hide_set());
    commands().find(|command| command.get_name() == name).cloned().ok_or_else(|| {
        let names: Vec<_> = commands().map(Command::get_name).collect();
        BadInput::new("man", format!("\"{name}\""), names.join(", ")).into()
    })
}

/// Returns the page in roff, with the examples as they are in the help.
fn page(command: Command) -> Result<String> {
    let examples = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    let mut page = Vec::new();
    // The page has every flag; of those without a short help it would print only the name.
    let command = command.after_help(None).mut_args(|arg| arg.hide_short_help(false));
    Man::new(command).render(&mut page)?;
    let page = String::from_utf8_lossy(&page).into_owned();
    // In roff a backslash escapes, and a leading period or quote is a request.
    let escaped = |line: &str| format!("\\&{}\n", line.replace('\\', "\\e").replace('-', "\\-"));
    let examples: String = examples.trim_start_matches("EXAMPLES\n").lines().map(escaped).collect();
    Ok(format!("{page}.SH EXAMPLES\n.nf\n{examples}.fi\n"))
}

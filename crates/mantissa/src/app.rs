//! Command-line frame: argument parsing, dispatch and exit codes.

use std::error::Error;
use std::ffi::OsString;
use std::io::{self, Write};
use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind, set_hook};
use std::process::ExitCode;

use anyhow::Result;
use clap::error::ErrorKind;
use clap::{CommandFactory, FromArgMatches, Parser};
use mantissa_plan::contract::Engine;

use crate::commands::{self, Command};
use crate::context::{Common, Context, Kept, Services, Shown};
use crate::error::{Exit, exit_of, print_error, resumes};
use crate::help;
use crate::interrupt;
use crate::output;
use crate::progress::Terminal;
use crate::usage;
use mantissa_jobs::{Progress, embedded};

/// Quantize LLMs, measure the loss, verify the files, run them
#[derive(Parser)]
#[command(name = NAME, version, arg_required_else_help = true, arg(help::flag()))]
#[command(after_help = "EXAMPLES
  mantissa demo
  mantissa inspect demo
  mantissa quantize demo --recipe rtn-int4-g128 --out demo-int4
  mantissa eval demo --text story.txt --context 256

mantissa help docs lists the pages of the documentation.

Exit codes: 0 done, 1 a quality gate failed, 2 bad input or usage,
3 environment (I/O, memory, disk), 130 SIGINT, 143 SIGTERM.")]
struct Cli {
    #[command(flatten)]
    common: Common,
    #[command(subcommand)]
    command: Command,
}

/// Name of the program.
pub const NAME: &str = "mantissa";

/// Returns the description of all commands and flags.
pub fn command() -> clap::Command {
    Cli::command()
}

/// Runs the command line of this process.
pub fn main() -> ExitCode {
    main_with(std::env::args_os().collect()).into()
}

/// Runs a command line, whose first word is the program's name, as this whole process: signals and panics are handled as
/// the program handles them.
pub fn main_with(arguments: Vec<OsString>) -> Exit {
    set_hook(Box::new(report_panic));
    // Before any other thread: this process forks.
    if let Some(exit) = commands::grammar_process(&arguments) {
        return exit;
    }
    let exit = guarded(|| run(arguments));
    embedded::remove();
    // Ends the other processes of a launcher, which would wait for this one.
    mantissa_ranks::MpiLink::abort_unless_left(exit as i32);
    exit
}

/// Turns a panic (a bug) into an exit code; the panic hook has reported it.
fn guarded(work: impl FnOnce() -> Exit) -> Exit {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or(Exit::Environment)
}

fn run(arguments: Vec<OsString>) -> Exit {
    if let Some(page) = help::page_of(&arguments, &command()) {
        return print(&page);
    }
    let arguments = model_first(help::without_subcommand(arguments));
    // An argument `demo` unpacks the embedded model, which a signal must not leave behind.
    if let Err(error) = interrupt::watch() {
        print_error(&format!("signals: expected a handler, got I/O error `{error}`"));
        return Exit::Environment;
    }
    let _left = trains(&arguments).then(|| interrupt::leaving(resumes(false).to_owned()));
    let (cli, aliases) = match parse(&arguments) {
        Ok(parsed) => parsed,
        Err(error) => return usage(&error, &arguments),
    };
    let quiet = cli.common.quiet;
    match work(cli, &aliases, &arguments, Shown { progress: Box::new(Terminal::new(quiet)), kept: None }) {
        Ok(()) => Exit::Done,
        Err(error) => {
            let exit = exit_of(&error);
            if exit != Exit::Done {
                print_error(&format!("{error:#}"));
            }
            exit
        }
    }
}

/// Runs a command that was parsed from `arguments`.
fn work(cli: Cli, aliases: &[String], arguments: &[OsString], shown: Shown) -> Result<()> {
    let paths = cli.command.paths()?;
    let services = Services { program: command, chat: commands::chat_renderer(), shown };
    let context = Context::new(cli.common, services, paths, &job_text(arguments))?;
    aliases.iter().for_each(|alias| context.note(alias));
    mantissa_kernels::init()?;
    let result = cli.command.run(&context);
    interrupt::settle();
    mantissa_store::take_others().iter().for_each(|path| context.warn(&commands::left_by_another(path)));
    result
}

/// Runs the command that `arguments` name after the program's own name within another program, and returns its JSON report;
/// empty for a command that has none. It handles no signal and prints nothing: `progress` shows what the command does, and may
/// ask it to stop.
///
/// # Errors
/// [`Failed`] for arguments or inputs that cannot be used, I/O, a quality gate, or a stop.
pub fn call(arguments: Vec<OsString>, progress: Box<dyn Progress>) -> Result<String, Failed> {
    let arguments = model_first(arguments);
    let failed = |exit, message, report| Failed { exit, message, report };
    let (cli, aliases) = parse(&arguments).map_err(|error| match error.source() {
        Some(store) if store.is::<mantissa_store::Error>() => {
            failed(Exit::Environment, store.to_string(), String::new())
        }
        _ => failed(Exit::Input, usage::line(&error, &arguments, &command()), String::new()),
    })?;
    let kept = Kept::default();
    let shown = Shown { progress, kept: Some(kept.clone()) };
    match work(cli, &aliases, &arguments, shown) {
        Ok(()) => Ok(kept.take()),
        Err(error) => Err(failed(exit_of(&error), format!("{error:#}"), kept.take())),
    }
}

/// A command that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failed {
    /// Exit code that the program would have.
    pub exit: Exit,
    /// Message, as the program prints it after `error: `.
    pub message: String,
    /// JSON report of a command that ran before it failed, as at a quality gate; else empty.
    pub report: String,
}

/// Puts the model given by `-m` or `--model`, the flags of other programs, where a command takes it: before all else.
fn model_first(mut arguments: Vec<OsString>) -> Vec<OsString> {
    let flag = arguments.iter().take_while(|argument| *argument != "--").position(|argument| {
        argument
            .to_str()
            .is_some_and(|text| ["-m", "--model"].contains(&text) || text.starts_with("--model="))
    });
    let Some(flag) = flag else { return arguments };
    let names = command();
    let subcommand = |argument: &OsString| names.find_subcommand(argument);
    let Some(at) = arguments.iter().skip(1).position(|argument| subcommand(argument).is_some()) else {
        return arguments;
    };
    let at = at + 1;
    let takes_model = subcommand(&arguments[at]).is_some_and(|found| {
        let own = |arg: &clap::Arg| arg.get_short() == Some('m') || arg.get_long() == Some("model");
        found.get_positionals().next().is_some_and(|first| first.get_id() == "model")
            && !found.get_arguments().any(own)
    });
    if !takes_model || flag <= at {
        return arguments;
    }
    let joined = arguments[flag].to_str().and_then(|text| text.strip_prefix("--model=")).map(OsString::from);
    let model = match joined {
        Some(model) => model,
        None if flag + 1 < arguments.len() => arguments.remove(flag + 1),
        // The parser names the flag that lacks its value.
        None => return arguments,
    };
    arguments.remove(flag);
    arguments.insert(at + 1, model);
    arguments
}

/// True if the arguments are those of a command that trains, which its own rerun resumes.
fn trains(arguments: &[OsString]) -> bool {
    let names = command();
    let named = arguments.iter().skip(1).find_map(|argument| names.find_subcommand(argument));
    named.is_some_and(|command| commands::trains(command.get_name()))
}

/// Parses the command line; returns the notes on engines named by an alias as well.
fn parse(arguments: &[OsString]) -> Result<(Cli, Vec<String>), clap::Error> {
    let mut matches = command().try_get_matches_from(arguments)?;
    let typed = matches.subcommand().and_then(|(_, sub)| sub.try_get_raw("targets").ok().flatten());
    let aliases = typed.into_iter().flatten().filter_map(|typed| {
        let name = typed.to_str()?.split(':').next()?;
        let engine = Engine::named(name).filter(|engine| !engine.name.eq_ignore_ascii_case(name))?;
        Some(format!("--for {name}: stands for {}", engine.name))
    });
    let aliases = aliases.collect();
    Ok((Cli::from_arg_matches_mut(&mut matches)?, aliases))
}

/// Returns the arguments that affect the output, and the working folder. Together with the inputs they identify a
/// rerun of the same command.
fn job_text(arguments: &[OsString]) -> String {
    // Options that do not change the output, with the number of their values.
    const PLAIN: [&str; 6] = ["--quiet", "--overwrite", "--resume", "--restart", "--json", "--layers"];
    const VALUED: [&str; 3] = ["--threads", "-t", "--memory"];
    let mut text = std::env::current_dir().map_or_else(|_| String::new(), |dir| dir.display().to_string());
    let mut skip = false;
    for argument in arguments.iter().skip(1) {
        let shown = argument.to_string_lossy();
        let name = shown.split_once('=').map_or(&*shown, |(name, _)| name);
        if std::mem::take(&mut skip) || PLAIN.contains(&name) {
            continue;
        }
        if VALUED.contains(&name) {
            skip = !shown.contains('=');
            continue;
        }
        text += &format!("\n{argument:?}");
    }
    text
}

/// Prints help and version to standard output, and a usage error as one line.
fn usage(error: &clap::Error, arguments: &[OsString]) -> Exit {
    match error.kind() {
        ErrorKind::DisplayHelp => print(&help::page(command(), commands::group, arguments)),
        ErrorKind::DisplayVersion => print(&error.render().to_string()),
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            // A failure to write to standard error cannot be reported anywhere.
            let _ =
                io::stderr().lock().write_all(help::page(command(), commands::group, arguments).as_bytes());
            Exit::Input
        }
        _ => {
            // Parsing an argument `demo` unpacks the embedded model.
            if let Some(environment) = error.source().filter(|source| source.is::<mantissa_store::Error>()) {
                print_error(&environment.to_string());
                return Exit::Environment;
            }
            print_error(&usage::line(error, arguments, &command()));
            Exit::Input
        }
    }
}

/// Prints a text to standard output.
fn print(text: &str) -> Exit {
    match output::to_stdout_unchanged(|out| out.write_all(text.as_bytes())) {
        Ok(()) => Exit::Done,
        Err(error) => exit_of(&error),
    }
}

fn report_panic(info: &PanicHookInfo<'_>) {
    let payload = info.payload();
    let text =
        payload.downcast_ref::<&str>().copied().or(payload.downcast_ref::<String>().map(String::as_str));
    let place = info.location().map(|l| format!(" ({}:{})", l.file(), l.line())).unwrap_or_default();
    print_error(&format!("internal: {}{place}; this is a bug, please report it", text.unwrap_or("panic")));
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    #[test]
    fn the_command_tree_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_command_shows_examples() {
        let command = Cli::command();
        for sub in command.get_subcommands() {
            let help = sub.clone().render_long_help().to_string();
            assert!(help.contains("EXAMPLES\n  mantissa "), "{}: {help}", sub.get_name());
        }
    }

    #[test]
    fn json_does_not_swallow_a_positional() {
        for arguments in [["mantissa", "inspect", "--json", "m"], ["mantissa", "--json", "inspect", "m"]] {
            let cli = Cli::try_parse_from(arguments).unwrap();
            assert_eq!(cli.common.json, Some(PathBuf::from("-")));
        }
        let cli = Cli::try_parse_from(["mantissa", "schemes", "--json=out.json"]).unwrap();
        assert_eq!(cli.common.json, Some(PathBuf::from("out.json")));
    }

    #[test]
    fn a_job_is_identified_by_what_decides_its_output() {
        let job = |text: &str| job_text(&text.split(' ').map(OsString::from).collect::<Vec<_>>());
        let same = job("mantissa cast a --out b");
        for other in [
            "--threads 3",
            "-t 3",
            "--threads=3",
            "--quiet",
            "--json",
            "--json=x",
            "--memory 1G",
            "--overwrite",
        ] {
            assert_eq!(job(&format!("mantissa cast {other} a --out b")), same, "{other}");
        }
        assert_ne!(job("mantissa cast a --out b --seed 1"), same);
    }

    #[test]
    fn a_model_may_be_named_by_a_flag() {
        let first = |text: &str| {
            let moved = model_first(text.split(' ').map(OsString::from).collect());
            moved.iter().map(|part| part.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
        };
        for given in ["run -m a -p b", "run -p b -m a", "run --model a -p b", "run -p b --model=a"] {
            assert_eq!(first(&format!("mantissa {given}")), "mantissa run a -p b", "{given}");
        }
        assert_eq!(first("mantissa --quiet serve -m a"), "mantissa --quiet serve a");
        assert_eq!(first("mantissa run -m a b"), "mantissa run a b");
        for kept in ["run a -- -m b", "run a -m", "recipes -m a", "nothing -m a"] {
            assert_eq!(first(&format!("mantissa {kept}")), format!("mantissa {kept}"));
        }
    }

    #[test]
    fn a_panic_is_an_exit_code() {
        assert_eq!(guarded(|| panic!("on purpose")), Exit::Environment);
        assert_eq!(guarded(|| Exit::Gate), Exit::Gate);
    }
}

//! Command-line frame: argument parsing, common options, dispatch and exit codes.

use std::error::Error;
use std::ffi::OsString;
use std::io::{self, Write};
use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind, set_hook};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::Result;
use clap::error::ErrorKind;
use clap::{Args, Parser};
use mantissa_eval::TokenError;
use mantissa_store::{Kind, Output, Permits};
use serde::Serialize;

use crate::commands::{self, Command};
use crate::embedded;
use crate::error::{BadInput, Exit, GateFailed, OverMemory, exit_of, one_line, print_error};
use crate::interrupt;
use crate::memory::{self, Limit};
use crate::output::{self, parse_bytes};
use crate::progress::{Progress, Unit, anonymous_memory};

/// Quantize LLMs, measure the loss, verify the files, run them
#[derive(Parser)]
#[command(name = "mantissa", version, arg_required_else_help = true)]
#[command(after_help = "EXAMPLES
  mantissa demo
  mantissa inspect demo
  mantissa quantize demo --recipe rtn-int4-g128 --out demo-int4
  mantissa eval demo --text story.txt --context 256

Exit codes: 0 done, 1 a quality gate failed, 2 bad input or usage, 3 environment (I/O, memory, disk), 130 and 143 stopped by
SIGINT and SIGTERM.")]
struct Cli {
    #[command(flatten)]
    common: Common,
    #[command(subcommand)]
    command: Command,
}

// No doc comment: clap would use it as the description of the command it is flattened into.
#[derive(Args)]
#[command(next_help_heading = "Common options")]
struct Common {
    /// Print the result as one JSON object on standard output and nothing else
    ///
    /// With =FILE, write the JSON to FILE and print the text output as usual.
    #[arg(long, global = true, value_name = "FILE", num_args = 0..=1, require_equals = true, default_missing_value = "-")]
    json: Option<PathBuf>,
    /// Hide progress and warnings
    #[arg(long, global = true)]
    quiet: bool,
    /// Number of threads [default: all cores]
    ///
    /// Results do not depend on it.
    #[arg(long, global = true, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Seed of all random numbers
    #[arg(long, global = true, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Memory ceiling, such as 12G, 800M or 4Gi [default: available memory]
    ///
    /// K, M, G, T are powers of 1000; Ki, Mi, Gi, Ti powers of 1024. A command that would need more fails
    /// before it starts (exit code 3). `recipes` and `schemes` need about 3 MB and have no ceiling.
    #[arg(long, global = true, value_name = "SIZE", value_parser = parse_bytes)]
    memory: Option<u64>,
    /// Treat warnings as errors (exit code 1)
    #[arg(long, global = true)]
    strict: bool,
    /// Replace existing outputs
    ///
    /// Without it, a command replaces only outputs that the same command wrote from the same inputs.
    #[arg(long, global = true)]
    overwrite: bool,
}

/// Common options and services of a command run.
pub struct Context {
    /// Number of threads, at least 1.
    pub threads: usize,
    /// Seed of all random numbers.
    pub seed: u64,
    /// Memory ceiling in bytes.
    pub memory: Option<u64>,
    quiet: bool,
    strict: bool,
    json: Json,
    permits: Permits,
    /// Bytes that tokenizing texts left allocated in the process.
    texts: AtomicU64,
}

/// Destination of the JSON report.
enum Json {
    Nowhere,
    Stdout,
    File(PathBuf),
}

impl Json {
    fn new(argument: Option<PathBuf>) -> Result<Self> {
        Ok(match argument {
            None => Json::Nowhere,
            Some(path) if path.as_os_str() == "-" => Json::Stdout,
            Some(path) if path.as_os_str().is_empty() => {
                return Err(BadInput::new("--json=", "an empty name", "--json or --json=FILE").into());
            }
            Some(path) => Json::File(path),
        })
    }
}

impl Context {
    /// Checks all paths of the command line `arguments` against each other, before any work.
    fn new(common: Common, command: &Command, arguments: &[OsString]) -> Result<Self> {
        let json = Json::new(common.json)?;
        let mut paths = commands::paths(command)?;
        if let Json::File(path) = &json {
            paths.write("--json", path, Kind::File);
        }
        let permits = paths.check(&job_text(arguments), common.overwrite)?;
        let threads = common.threads.map_or_else(mantissa_kernels::available_threads, usize::from);
        let Common { quiet, seed, memory, strict, .. } = common;
        Ok(Context { threads, seed, memory, quiet, strict, json, permits, texts: AtomicU64::new(0) })
    }

    /// Returns the output at `path`, one of the paths that the command declared.
    ///
    /// # Errors
    /// The command did not declare it: a bug.
    pub fn output(&self, path: &Path) -> Result<Output> {
        let output = self.permits.output(path);
        output
            .ok_or_else(|| anyhow::anyhow!("internal: {} is not among the command's outputs", path.display()))
    }

    /// Starts a progress display on standard error.
    pub fn progress(&self, total: u64, unit: Unit) -> Progress {
        Progress::new(total, unit, self.quiet)
    }

    /// Prints a warning on one line of standard error, unless `--quiet`.
    pub fn warn(&self, message: &str) {
        if !self.quiet {
            // A failure to write to standard error cannot be reported anywhere.
            let _ = writeln!(io::stderr().lock(), "warning: {}", one_line(message));
        }
    }

    /// Prints a note on one line of standard error, unless `--quiet`.
    pub fn note(&self, message: &str) {
        if !self.quiet {
            // A failure to write to standard error cannot be reported anywhere.
            let _ = writeln!(io::stderr().lock(), "{}", one_line(message));
        }
    }

    /// True if warnings are errors (`--strict`).
    pub fn is_strict(&self) -> bool {
        self.strict
    }

    /// Prints every warning; fails under `--strict` if there is one.
    ///
    /// # Errors
    /// [`GateFailed`] with the first warning and the number of warnings.
    pub fn warn_all(&self, warnings: &[String]) -> Result<()> {
        warnings.iter().for_each(|warning| self.warn(warning));
        match warnings {
            [first, ..] if self.strict => {
                let count = warnings.len();
                Err(GateFailed::new(format!("--strict: expected no warnings, got {count}; first: {first}"))
                    .into())
            }
            _ => Ok(()),
        }
    }

    /// True if text output goes to standard output: false if `--json` without a file uses it.
    pub fn prints_text(&self) -> bool {
        !matches!(self.json, Json::Stdout)
    }

    /// Writes the result: JSON if `--json` asks for it, and the text of `human` to standard output unless the
    /// JSON goes there.
    ///
    /// # Errors
    /// The JSON file or standard output cannot be written.
    pub fn report<T: Serialize>(
        &self,
        json: &T,
        human: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> Result<()> {
        let text = || serde_json::to_string_pretty(json).map(|text| text + "\n");
        if let Json::File(path) = &self.json {
            mantissa_store::write_file_atomic(&self.output(path)?, text()?.as_bytes())?;
        }
        if let Json::Stdout = self.json {
            let text = text()?;
            return output::to_stdout(|out| out.write_all(text.as_bytes()));
        }
        output::to_stdout(human)
    }

    /// Returns the smallest `--memory` that accepts work of `needs` bytes: texts that the process holds count too.
    pub fn least_memory(&self, needs: u64) -> u64 {
        needs.saturating_add(self.texts.load(Ordering::Relaxed))
    }

    /// Refuses work whose predicted peak memory exceeds `--memory` or, without it, the available memory.
    /// `needs` excludes the bytes that tokenizing texts left allocated; they are added.
    ///
    /// # Errors
    /// [`OverMemory`] with both sizes.
    pub fn require_memory(&self, what: &str, needs: u64) -> Result<()> {
        let (allowed, limit) = self.ceiling();
        let needs = match limit {
            Limit::Option => self.least_memory(needs),
            // The process already holds this memory, so it is not part of the available memory.
            Limit::Available => needs,
        };
        if needs > allowed {
            return Err(OverMemory { what: what.into(), needs, allowed, limit }.into());
        }
        Ok(())
    }

    /// Refuses work that needs `more` memory than the process holds now.
    ///
    /// # Errors
    /// [`OverMemory`] with both sizes.
    pub fn require_more_memory(&self, what: &str, more: u64) -> Result<()> {
        let (allowed, limit) = self.ceiling();
        let needs = held(limit).saturating_add(more);
        if needs > allowed {
            return Err(OverMemory { what: what.into(), needs, allowed, limit }.into());
        }
        Ok(())
    }

    /// Returns the bytes that the process may still allocate.
    pub fn memory_left(&self) -> u64 {
        let (allowed, limit) = self.ceiling();
        allowed.saturating_sub(held(limit))
    }

    /// Makes the error of work that needs `more` than the `left` bytes of [`memory_left`](Self::memory_left).
    pub fn over_memory(&self, what: &str, more: u64, left: u64) -> anyhow::Error {
        let (allowed, limit) = self.ceiling();
        let held = if limit == Limit::Option { allowed.saturating_sub(left) } else { 0 };
        OverMemory { what: what.into(), needs: more.saturating_add(held), allowed, limit }.into()
    }

    /// Runs `read`, which tokenizes texts; memory that stays allocated is added to later requirements.
    ///
    /// # Errors
    /// Those of `read`; [`OverMemory`] if it runs out of memory.
    pub fn reading_texts<T>(&self, read: impl FnOnce() -> Result<T>) -> Result<T> {
        let before = anonymous_memory().unwrap_or(0);
        let result = read();
        let left = anonymous_memory().unwrap_or(0).saturating_sub(before);
        self.texts.fetch_add(left, Ordering::Relaxed);
        result.map_err(|error| match error.downcast::<TokenError>() {
            Ok(TokenError::Memory { what, needs, allowed }) => self.over_memory(&what, needs, allowed),
            Ok(error) => error.into(),
            Err(error) => error,
        })
    }

    fn ceiling(&self) -> (u64, Limit) {
        match self.memory {
            Some(allowed) => (allowed, Limit::Option),
            None => (memory::available().unwrap_or(u64::MAX), Limit::Available),
        }
    }
}

/// Returns the bytes of a limit that the process already holds.
fn held(limit: Limit) -> u64 {
    match limit {
        Limit::Option => anonymous_memory().unwrap_or(0).max(memory::PROCESS),
        Limit::Available => 0,
    }
}

/// Runs the command line of this process.
pub fn main() -> ExitCode {
    set_hook(Box::new(report_panic));
    let exit = guarded(|| run(std::env::args_os()));
    embedded::remove();
    exit.into()
}

/// Turns a panic (a bug) into an exit code; the panic hook has reported it.
fn guarded(work: impl FnOnce() -> Exit) -> Exit {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or(Exit::Environment)
}

fn run(arguments: impl Iterator<Item = OsString>) -> Exit {
    let arguments: Vec<OsString> = arguments.collect();
    let cli = match Cli::try_parse_from(&arguments) {
        Ok(cli) => cli,
        Err(error) => return usage(&error),
    };
    let result = Context::new(cli.common, &cli.command, &arguments).and_then(|context| {
        interrupt::watch()?;
        mantissa_kernels::init()?;
        let result = commands::run(cli.command, &context);
        mantissa_store::take_others().iter().for_each(|path| context.warn(&commands::left_by_another(path)));
        result
    });
    match result {
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

/// Returns the arguments that affect the output, and the working folder. Together with the inputs they identify a
/// rerun of the same command.
fn job_text(arguments: &[OsString]) -> String {
    // Options that do not change the output, with the number of their values.
    const PLAIN: [&str; 5] = ["--quiet", "--overwrite", "--resume", "--restart", "--json"];
    const VALUED: [&str; 2] = ["--threads", "--memory"];
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
fn usage(error: &clap::Error) -> Exit {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            let text = error.render().to_string();
            match output::to_stdout(|out| out.write_all(text.as_bytes())) {
                Ok(()) => Exit::Done,
                Err(error) => exit_of(&error),
            }
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            let _ = error.print();
            Exit::Input
        }
        _ => {
            // Parsing an argument `demo` unpacks the embedded model.
            if let Some(environment) = error.source().filter(|source| source.is::<mantissa_store::Error>()) {
                print_error(&environment.to_string());
                return Exit::Environment;
            }
            print_error(&usage_line(&error.render().to_string()));
            Exit::Input
        }
    }
}

/// Returns clap's message and tips without its usage paragraph.
fn usage_line(rendered: &str) -> String {
    let paragraphs = rendered.trim().strip_prefix("error: ").unwrap_or(rendered).split("\n\n");
    let kept = paragraphs.filter(|p| !p.starts_with("Usage:") && !p.starts_with("For more information"));
    let kept: Vec<String> = kept
        .map(|p| p.split('\n').map(str::trim).filter(|l| !l.is_empty()).collect::<Vec<_>>().join(" "))
        .collect();
    kept.join("; ") + "; fix: see --help"
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
    use super::*;
    use clap::CommandFactory;

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
        for other in
            ["--threads 3", "--threads=3", "--quiet", "--json", "--json=x", "--memory 1G", "--overwrite"]
        {
            assert_eq!(job(&format!("mantissa cast {other} a --out b")), same, "{other}");
        }
        assert_ne!(job("mantissa cast a --out b --seed 1"), same);
    }

    #[test]
    fn usage_errors_take_one_line() {
        let error = Cli::try_parse_from(["mantissa", "schemes", "--jsom"]).err().unwrap();
        let line = usage_line(&error.render().to_string());
        assert!(line.starts_with("unexpected argument '--jsom' found") && line.contains("--json"), "{line}");
        assert!(!line.contains('\n') && !line.contains("Usage"), "{line}");
    }

    #[test]
    fn a_panic_is_an_exit_code() {
        assert_eq!(guarded(|| panic!("on purpose")), Exit::Environment);
        assert_eq!(guarded(|| Exit::Gate), Exit::Gate);
    }
}

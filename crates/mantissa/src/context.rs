//! Options and services that all commands share.

use std::io::{self, Write};
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::Result;
use clap::Args;
use mantissa_jobs::{Allowed, Host, Progress, RenderChat};
use mantissa_store::{Kind, Output, Paths};
use serde::Serialize;

use crate::error::BadInput;
use crate::help;
use crate::output::{self, parse_bytes};
use crate::terminal;

// No doc comment: clap would use it as the description of the command it is flattened into.
#[derive(Args)]
#[command(next_help_heading = help::COMMON)]
pub(crate) struct Common {
    /// Print the result as JSON, or write it to FILE
    ///
    /// Without =FILE, one JSON object goes to standard output and nothing else. With =FILE, the text output is
    /// printed as usual.
    #[arg(long, global = true, value_name = "FILE", num_args = 0..=1, require_equals = true, default_missing_value = "-")]
    pub(crate) json: Option<PathBuf>,
    /// Hide progress and warnings
    #[arg(long, global = true)]
    pub(crate) quiet: bool,
    /// Number of threads [default: all cores]
    ///
    /// Results do not depend on it.
    #[arg(long, short_alias = 't', global = true, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Seed of all random numbers
    #[arg(long, global = true, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Memory ceiling, such as 12G [default: available]
    ///
    /// K, M, G, T are powers of 1000; Ki, Mi, Gi, Ti powers of 1024. Commands that calibrate put its states into a
    /// temporary file, then they and `convert` and `eval` use fewer threads. What still needs more fails before it
    /// starts (exit code 3). `recipes` and `schemes` need about 3 MB and have no ceiling.
    #[arg(long, global = true, value_name = "SIZE", value_parser = parse_bytes)]
    memory: Option<u64>,
    /// Treat warnings as errors (exit code 1)
    #[arg(long, global = true, hide_short_help = true)]
    strict: bool,
    /// Replace existing outputs
    ///
    /// Without it, a command replaces only outputs that the same command wrote from the same inputs.
    #[arg(long, global = true)]
    overwrite: bool,
}

/// Common options and services of a command run: those of its [`Host`], whose errors become those of the command line,
/// and the report.
pub struct Context {
    host: Host,
    /// Seed of all random numbers.
    pub seed: u64,
    /// Describes all commands and flags.
    program: fn() -> clap::Command,
    quiet: bool,
    json: Json,
}

impl Deref for Context {
    type Target = Host;

    fn deref(&self) -> &Host {
        &self.host
    }
}

/// JSON report that is kept for another part of this process.
#[derive(Clone, Default)]
pub(crate) struct Kept(Arc<Mutex<String>>);

impl Kept {
    /// Takes what was kept.
    pub(crate) fn take(&self) -> String {
        std::mem::take(&mut *self.text())
    }

    fn text(&self) -> MutexGuard<'_, String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Display of a command that runs.
pub(crate) struct Shown {
    /// Its progress.
    pub(crate) progress: Box<dyn Progress>,
    /// Place of the JSON report, instead of standard output.
    pub(crate) kept: Option<Kept>,
}

/// What the command line gives its commands.
pub(crate) struct Services {
    /// Describes all commands and flags.
    pub(crate) program: fn() -> clap::Command,
    /// Renders chat templates.
    pub(crate) chat: Box<dyn RenderChat>,
    /// How the run is shown.
    pub(crate) shown: Shown,
}

/// Destination of the JSON report.
enum Json {
    Nowhere,
    Stdout,
    File(PathBuf),
    Kept(Kept),
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
    /// Checks `paths`, all those of the command line, against each other, before any work. `job` identifies a rerun of the
    /// same command.
    pub(crate) fn new(common: Common, services: Services, mut paths: Paths, job: &str) -> Result<Self> {
        let Services { program, chat, shown: Shown { progress, kept } } = services;
        let json = kept.map_or_else(|| Json::new(common.json), |kept| Ok(Json::Kept(kept)))?;
        if let Json::File(path) = &json {
            paths.write("--json", path, Kind::File);
        }
        let permits = paths.check(job, common.overwrite)?;
        let threads = common.threads.map_or_else(mantissa_kernels::available_threads, usize::from);
        let Common { quiet, seed, memory, strict, .. } = common;
        let allowed = Allowed { threads, memory, strict };
        Ok(Context {
            host: Host::new(allowed, permits, progress).with_chat(chat),
            seed,
            program,
            quiet,
            json,
        })
    }

    /// Describes all commands and flags.
    pub fn program(&self) -> clap::Command {
        (self.program)()
    }

    /// Returns the output at `path`, one of the paths that the command declared.
    ///
    /// # Errors
    /// The command did not declare it: a bug.
    pub fn output(&self, path: &Path) -> Result<Output> {
        Ok(self.host.output(path)?)
    }

    /// Prints every warning, those of many layers merged; fails under `--strict` if there is one.
    ///
    /// # Errors
    /// As [`Host::warn_all`].
    pub fn warn_all(&self, warnings: &[String]) -> Result<()> {
        Ok(self.host.warn_all(warnings)?)
    }

    /// Fails under `--strict` if there is a warning; prints none.
    ///
    /// # Errors
    /// As [`Host::refuse_warnings`].
    pub fn refuse_warnings(&self, warnings: &[String]) -> Result<()> {
        Ok(self.host.refuse_warnings(warnings)?)
    }

    /// True if notes and warnings are printed: not with `--quiet`.
    pub fn prints_notes(&self) -> bool {
        !self.quiet
    }

    /// True if text output goes to standard output: false if `--json` without a file uses it.
    pub fn prints_text(&self) -> bool {
        !matches!(self.json, Json::Stdout | Json::Kept(_))
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
        match &self.json {
            Json::Stdout => {
                let text = text()?;
                output::to_stdout_unchanged(|out| out.write_all(terminal::json(&text).as_bytes()))
            }
            Json::Kept(kept) => {
                *kept.text() = text()?;
                Ok(())
            }
            Json::Nowhere | Json::File(_) => output::to_stdout(human),
        }
    }

    /// As [`report`](Self::report), for a text of this program that other programs read.
    ///
    /// # Errors
    /// As [`report`](Self::report).
    pub fn report_script<T: Serialize>(&self, json: &T, script: &str) -> Result<()> {
        if self.prints_text() {
            output::to_stdout_unchanged(|out| out.write_all(script.as_bytes()))?;
        }
        match self.json {
            Json::Nowhere => Ok(()),
            Json::Stdout | Json::File(_) | Json::Kept(_) => self.report(json, |_| Ok(())),
        }
    }

    /// Refuses work whose predicted peak memory exceeds `--memory` or, without it, the available memory.
    ///
    /// # Errors
    /// As [`Host::require_memory`].
    pub fn require_memory(&self, what: &str, needs: u64) -> Result<()> {
        Ok(self.host.require_memory(what, needs)?)
    }

    /// Refuses work that needs `more` memory than the process holds now. Returns the predicted peak.
    ///
    /// # Errors
    /// As [`Host::require_more_memory`].
    pub fn require_more_memory(&self, what: &str, more: u64) -> Result<u64> {
        Ok(self.host.require_more_memory(what, more)?)
    }

    /// Makes the error of work that needs `more` than the `left` bytes of [`Host::memory_left`].
    pub fn over_memory(&self, what: &str, more: u64, left: u64) -> anyhow::Error {
        self.host.over_memory(what, more, left).into()
    }
}

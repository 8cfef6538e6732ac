//! Options and services that all commands share.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use anyhow::Result;
use clap::Args;
use mantissa_eval::TokenError;
use mantissa_quant::Rebuild;
use mantissa_store::{Kind, Output, Paths, Permits};
use serde::Serialize;

use crate::error::{BadInput, GateFailed, OverMemory};
use crate::help;
use crate::memory::{self, Limit};
use crate::notes::merged;
use crate::output::{self, parse_bytes};
use crate::progress::{Progress, Unit, anonymous_memory};
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
    quiet: bool,
    /// Number of threads [default: all cores]
    ///
    /// Results do not depend on it.
    #[arg(long, global = true, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
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

/// Bytes by which the memory that tokenized texts leave allocated differs between runs: measured: 12 kB over
/// twelve runs on two cores, and more threads hold more.
const TEXTS_VARY: u64 = 1 << 20;

/// Common options and services of a command run.
pub struct Context {
    /// Number of threads, at least 1.
    pub threads: usize,
    /// Seed of all random numbers.
    pub seed: u64,
    /// Memory ceiling in bytes.
    pub memory: Option<u64>,
    /// Command line to record with an output.
    pub job: Rebuild,
    /// Describes all commands and flags.
    program: fn() -> clap::Command,
    /// True while a command runs within another, which reports.
    silent: AtomicBool,
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
    /// Checks `paths`, all those of the command line, against each other, before any work. `job` identifies a rerun of
    /// the same command.
    pub(crate) fn new(
        common: Common,
        program: fn() -> clap::Command,
        mut paths: Paths,
        job: &str,
    ) -> Result<Self> {
        let json = Json::new(common.json)?;
        if let Json::File(path) = &json {
            paths.write("--json", path, Kind::File);
        }
        let permits = paths.check(job, common.overwrite)?;
        let threads = common.threads.map_or_else(mantissa_kernels::available_threads, usize::from);
        let Common { quiet, seed, memory, strict, .. } = common;
        Ok(Context {
            threads,
            seed,
            memory,
            job: Rebuild::default(),
            program,
            silent: AtomicBool::new(false),
            quiet,
            strict,
            json,
            permits,
            texts: AtomicU64::new(0),
        })
    }

    /// Describes all commands and flags.
    pub fn program(&self) -> clap::Command {
        (self.program)()
    }

    /// Sets the command line to record, and its seed.
    pub(crate) fn for_job(mut self, job: Rebuild) -> Self {
        self.seed = job.seed;
        self.job = job;
        self
    }

    /// Runs a command without its report.
    ///
    /// # Errors
    /// Those of `run`.
    pub fn without_report<T>(&self, run: impl FnOnce() -> Result<T>) -> Result<T> {
        self.silent.store(true, Ordering::Relaxed);
        let result = run();
        self.silent.store(false, Ordering::Relaxed);
        result
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
        Progress::new(total, unit, self.quiet, false)
    }

    /// Starts a progress display whose steps have figures of their own.
    pub fn progress_with_status(&self, total: u64, unit: Unit) -> Progress {
        Progress::new(total, unit, self.quiet, true)
    }

    /// Prints a warning on one line of standard error, unless `--quiet`.
    pub fn warn(&self, message: &str) {
        if !self.quiet {
            terminal::to_stderr(&format!("warning: {message}"));
        }
    }

    /// Prints a note on one line of standard error, unless `--quiet`.
    pub fn note(&self, message: &str) {
        if !self.quiet {
            terminal::to_stderr(message);
        }
    }

    /// True if warnings are errors (`--strict`).
    pub fn is_strict(&self) -> bool {
        self.strict
    }

    /// Prints every warning, those of many layers merged; fails under `--strict` if there is one.
    ///
    /// # Errors
    /// As [`refuse_warnings`](Self::refuse_warnings).
    pub fn warn_all(&self, warnings: &[String]) -> Result<()> {
        merged(warnings).iter().for_each(|warning| self.warn(warning));
        self.refuse_warnings(warnings)
    }

    /// Fails under `--strict` if there is a warning; prints none.
    ///
    /// # Errors
    /// [`GateFailed`] with the first warning and the number of warnings.
    pub fn refuse_warnings(&self, warnings: &[String]) -> Result<()> {
        match warnings {
            [first, ..] if self.strict => {
                let count = warnings.len();
                Err(GateFailed::new(format!("--strict: expected no warnings, got {count}; first: {first}"))
                    .into())
            }
            _ => Ok(()),
        }
    }

    /// True if notes and warnings are printed: not with `--quiet`.
    pub fn prints_notes(&self) -> bool {
        !self.quiet
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
        if self.silent.load(Ordering::Relaxed) {
            return Ok(());
        }
        let text = || serde_json::to_string_pretty(json).map(|text| text + "\n");
        if let Json::File(path) = &self.json {
            mantissa_store::write_file_atomic(&self.output(path)?, text()?.as_bytes())?;
        }
        if let Json::Stdout = self.json {
            let text = text()?;
            return output::to_stdout_unchanged(|out| out.write_all(terminal::json(&text).as_bytes()));
        }
        output::to_stdout(human)
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
            Json::Stdout | Json::File(_) => self.report(json, |_| Ok(())),
        }
    }

    /// Returns a `--memory` that accepts work of `needs` bytes, the smallest one unless texts were read: they count
    /// with [`TEXTS_VARY`] more than this process holds, because a second process may hold more.
    pub fn least_memory(&self, needs: u64) -> u64 {
        match self.texts.load(Ordering::Relaxed) {
            0 => needs,
            texts => needs.saturating_add(texts).saturating_add(TEXTS_VARY),
        }
    }

    /// Refuses work whose predicted peak memory exceeds `--memory` or, without it, the available memory.
    /// `needs` excludes the bytes that tokenizing texts left allocated; they are added.
    ///
    /// # Errors
    /// [`OverMemory`] with both sizes.
    pub fn require_memory(&self, what: &str, needs: u64) -> Result<()> {
        let (allowed, limit) = self.ceiling();
        let needs = match limit {
            Limit::Option => needs.saturating_add(self.texts.load(Ordering::Relaxed)),
            // The process already holds this memory, so it is not part of the available memory.
            Limit::Available => needs,
        };
        if needs > allowed {
            return Err(OverMemory { what: what.into(), needs, allowed, limit, fix: None }.into());
        }
        Ok(())
    }

    /// True if [`require_memory`](Self::require_memory) accepts work of `needs` bytes.
    pub fn has_memory(&self, needs: u64) -> bool {
        self.require_memory("", needs).is_ok()
    }

    /// Refuses work that was made as small as possible, like [`require_memory`](Self::require_memory); the error names
    /// the least that is accepted.
    ///
    /// # Errors
    /// [`OverMemory`] with both sizes.
    pub fn require_least_memory(&self, what: &str, needs: u64) -> Result<()> {
        let (allowed, limit) = self.ceiling();
        if self.has_memory(needs) {
            return Ok(());
        }
        // Rounded up, so that the printed value is accepted.
        let least = self.least_memory(needs);
        let fix = format!("--memory {}k is the least that is accepted", least.div_ceil(1000));
        Err(OverMemory { what: what.into(), needs: least, allowed, limit, fix: Some(fix) }.into())
    }

    /// Refuses work that needs `more` memory than the process holds now. Returns the predicted peak.
    ///
    /// # Errors
    /// [`OverMemory`] with both sizes.
    pub fn require_more_memory(&self, what: &str, more: u64) -> Result<u64> {
        let (allowed, limit) = self.ceiling();
        let needs = held(limit).saturating_add(more);
        if needs > allowed {
            return Err(OverMemory { what: what.into(), needs, allowed, limit, fix: None }.into());
        }
        Ok(held(Limit::Option).saturating_add(more))
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
        OverMemory { what: what.into(), needs: more.saturating_add(held), allowed, limit, fix: None }.into()
    }

    /// Runs `read`, which tokenizes texts; memory that stays allocated is added to later requirements. The kernel
    /// counts pages late, so a `read` without a text would add a random number of them: callers leave it out.
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

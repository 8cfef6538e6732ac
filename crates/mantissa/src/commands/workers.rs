//! Workers of one job: their flags, those that this process starts, and the script for an engine that starts them.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

use anyhow::{Context as _, Result};
use mantissa_jobs::workers::{Shared, make_folder};
use mantissa_ranks::{JobFolder, Part, Rank, Team};
use mantissa_store::disk::folder_of;

use super::engines::{self, Engine, Launch};
use super::fixes::Line;
use crate::context::Context;
use crate::error::BadInput;
use crate::output::counted;
use crate::program;

/// Flags of commands whose work several workers can divide.
#[derive(clap::Args)]
#[command(next_help_heading = "Workers")]
pub struct WorkersArgs {
    /// Divide the work among N processes
    ///
    /// On this machine; with --engine on the machines that it gives. The result is the same for any number. Threads and
    /// memory are divided as well.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=4096), hide_short_help = true)]
    workers: Option<u16>,
    /// Folder that the workers share [default: OUT.job]
    ///
    /// `mantissa worker DIR` works on it, on any machine that has the folder and the model. The default is removed
    /// when the work is complete, one that is named is kept.
    #[arg(long, value_name = "DIR", hide_short_help = true)]
    job: Option<PathBuf>,
}

/// Flags of commands that an engine can start on many machines.
#[derive(clap::Args)]
#[command(next_help_heading = "Workers")]
pub struct EngineArgs {
    #[command(flatten)]
    workers: WorkersArgs,
    /// Print the script that starts the workers
    ///
    /// slurm (sbatch), mpi (mpiexec), ray, k8s (a Job for kubectl). Its first process is this command, with --job.
    #[arg(long, value_name = "ENGINE", value_parser = engines::parse, hide_short_help = true)]
    engine: Option<&'static Engine>,
    /// Submit the script of --engine
    #[arg(long, requires = "engine", hide_short_help = true)]
    submit: bool,
}

/// Division of the work of a command.
pub enum Engaged {
    /// Not at all.
    Alone,
    /// A script was printed or submitted: nothing is left to do here.
    Scripted,
    /// Among this process and others.
    Crew(Box<Crew>),
}

/// Workers on one job, of which this process is one.
pub struct Crew {
    /// The team.
    pub team: Team,
    folder: JobFolder,
    /// Local workers.
    children: Vec<Child>,
    /// True if the folder stays.
    named: bool,
}

impl WorkersArgs {
    /// True if the work is to be divided.
    pub fn are_asked_for(&self) -> bool {
        self.workers.is_some() || self.job.is_some()
    }

    /// Makes the folder of `job`, whose output is `out`, and starts the workers that are asked for; `None` if none are.
    ///
    /// # Errors
    /// A folder of another job; inputs that cannot be read; I/O.
    pub fn engage<J: Shared>(&self, job: &J, out: &Path, context: &Context) -> Result<Option<Crew>> {
        if !self.are_asked_for() {
            return Ok(None);
        }
        let folder = self.folder(job, out, context)?;
        let count = usize::from(self.workers.unwrap_or(1));
        let mut crew = Crew {
            team: Team::join(folder.units(), Part { rank: Rank::from_environment()?, ..Part::default() }),
            folder,
            children: Vec::new(),
            named: self.job.is_some(),
        };
        let threads = (context.threads / count).max(1);
        let memory = context.memory.map(|bytes| bytes / count as u64);
        for _ in 1..count {
            crew.children.push(start(crew.folder.path(), threads, memory)?);
        }
        Ok(Some(crew))
    }

    fn folder<J: Shared>(&self, job: &J, out: &Path, context: &Context) -> Result<JobFolder> {
        let path = self.job.clone().unwrap_or_else(|| default_folder(out));
        Ok(make_folder(job, &path, context)?)
    }
}

impl EngineArgs {
    /// True if the work is to be divided.
    pub fn are_asked_for(&self) -> bool {
        self.workers.are_asked_for()
    }

    /// Engages workers as [`WorkersArgs::engage`] does, or prints the script that starts them on an engine. `units` is the
    /// number of the job's independent units.
    ///
    /// # Errors
    /// As [`WorkersArgs::engage`]; a script that cannot be submitted.
    pub fn engage<J: Shared>(
        &self,
        job: &J,
        out: &Path,
        units: Option<usize>,
        context: &Context,
    ) -> Result<Engaged> {
        if let Some(engine) = self.engine {
            let folder = self.workers.folder(job, out, context)?;
            self.script(engine, &folder, units, context)?;
            return Ok(Engaged::Scripted);
        }
        Ok(self
            .workers
            .engage(job, out, context)?
            .map_or(Engaged::Alone, |crew| Engaged::Crew(Box::new(crew))))
    }

    /// Prints or submits the script of an engine.
    fn script(
        &self,
        engine: &Engine,
        folder: &JobFolder,
        units: Option<usize>,
        context: &Context,
    ) -> Result<()> {
        let Some(workers) = self.workers.workers.filter(|workers| *workers > 1) else {
            let what = format!("--engine {} without --workers", engine.name);
            return Err(
                BadInput::new("--workers", what, "at least 2: the processes that the engine starts").into()
            );
        };
        let job = std::path::absolute(folder.path())?;
        let launch = Launch {
            program: program::words()?,
            workers: usize::from(workers),
            directory: folder.record.directory.clone(),
            finish: Line::given().for_engine(&job).words(),
            job,
        };
        let script = (engine.script)(&launch);
        if !self.submit {
            return context.report(&Scripted { engine: engine.name, units, script: &script }, |out| {
                out.write_all(script.as_bytes())
            });
        }
        let submitted = submit(engine, &script)?;
        let report = Scripted { engine: engine.name, units, script: &script };
        context.report(&report, |out| writeln!(out, "{}", submitted.trim()))
    }
}

/// Report of a script.
#[derive(serde::Serialize)]
struct Scripted<'a> {
    engine: &'a str,
    /// Number of units that can be computed in any order.
    #[serde(skip_serializing_if = "Option::is_none")]
    units: Option<usize>,
    script: &'a str,
}

/// Folder of a job that is not named: beside its output.
fn default_folder(out: &Path) -> PathBuf {
    let mut name = out.file_name().unwrap_or_default().to_owned();
    name.push(".job");
    folder_of(out).join(name)
}

/// Starts a worker on this machine.
fn start(folder: &Path, threads: usize, memory: Option<u64>) -> Result<Child> {
    let mut command = program::command()?;
    let (threads, parent) = (threads.to_string(), std::process::id().to_string());
    command.arg("worker").arg(folder).args(["--quiet", "--threads", &threads, "--of", &parent]);
    command.args(memory.map(|bytes| format!("--memory={bytes}")));
    // Faults that a test injects are for this process, and so is the rank.
    for name in ["MANTISSA_FAULT", "MANTISSA_TRACE"].into_iter().chain(Rank::variables()) {
        command.env_remove(name);
    }
    let command = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    command.spawn().context("start a worker")
}

/// Runs the program of `engine` that takes the script, and returns what it prints.
fn submit(engine: &Engine, script: &str) -> Result<String> {
    let [program, arguments @ ..] = engine.submit else { return Ok(String::new()) };
    let mut child = std::process::Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|error| {
            let what = format!("`{program}`, which cannot be started ({error})");
            BadInput::new("--submit", what, "the engine's program on this machine")
                .with_fix("print the script without --submit and submit it where the engine is")
        })?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(script.as_bytes())?;
    }
    let output = child.wait_with_output()?;
    if !output.status.success() {
        let what = format!("{} of `{program}`", output.status);
        let fix = "read its message above; print the script without --submit to see what was submitted";
        return Err(BadInput::new("--submit", what, "exit status: 0").with_fix(fix).into());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

impl Crew {
    /// Ends the local workers, tells of those that failed, and removes the folder unless it was named.
    pub fn finish(mut self, context: &Context) {
        let workers = self.children.len() + 1;
        for (number, mut child) in self.children.drain(..).enumerate() {
            let ended = child.try_wait().ok().flatten();
            end(&mut child);
            if ended.is_some_and(|status| !status.success()) {
                let mut said = String::new();
                if let Some(mut stderr) = child.stderr.take() {
                    // What can be read is told.
                    let _ = stderr.read_to_string(&mut said);
                }
                let why = said.lines().last().unwrap_or("no message");
                context.warn(&format!("worker {} of {workers} ended early: {why}", number + 2));
            }
        }
        let solved = counted(self.team.computed() as u64, "unit");
        let others = if workers > 1 { ", the others the rest" } else { "" };
        context.note(&format!("{}; this one solved {solved}{others}", counted(workers as u64, "worker")));
        match self.named {
            true => context.note(&format!("{}: can be removed", self.folder.path().display())),
            false => {
                // The work is done: what another process still does there is no failure.
                if let Err(error) = self.folder.clone().remove() {
                    context.warn(&format!("the folder of the job was not removed: {error}"));
                }
            }
        }
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        self.children.iter_mut().for_each(end);
    }
}

/// Ends a worker. What it has not finished is lost, and nothing else.
fn end(child: &mut Child) {
    // One that has ended by itself cannot be ended.
    let _ = child.kill();
    let _ = child.wait();
}

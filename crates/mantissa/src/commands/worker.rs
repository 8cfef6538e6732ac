//! `mantissa worker`: computes units of a job that other processes share.

use std::ops::Range;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Result;
use mantissa_jobs::workers;
use mantissa_ranks::{Part, Rank, Team};
use mantissa_store::Paths;
use rustix::process::getppid;
use serde::Serialize;

use super::execute::Execute;
use crate::context::Context;
use crate::error::Exit;
use crate::help::Group;
use crate::output::counted;

/// Time between two looks for the process that started this one.
const LOOK: Duration = Duration::from_millis(200);

/// Work on a job that quantize, convert or eval shares
///
/// Computes units, pieces of the work that wait for no other, until all are computed. Any number of workers may run on any
/// machines that have the folder, the model and the same version of mantissa; one that is killed loses its unit, which
/// another computes. The command that made the folder (--job, --workers or --engine) writes the output.
///
/// Reads its rank from the environment of MPI, Slurm, torchrun or Kubernetes, so that workers begin apart.
#[derive(clap::Args)]
#[command(after_help = "EXAMPLES
  mantissa quantize demo --recipe rtn-int4-g128 --out demo-w --job demo-w.job
  mantissa worker demo-w.job
  mantissa worker demo-w.job --audit 1%")]
pub struct Args {
    /// Folder of the job
    job: PathBuf,
    /// Compute one unit, by its number from 0
    #[arg(long, value_name = "K", conflicts_with = "units")]
    unit: Option<usize>,
    /// Compute the units from A to before B
    #[arg(long, value_name = "A..B", value_parser = range)]
    units: Option<Range<usize>>,
    /// Compute a part of others' units again, to compare
    ///
    /// A percentage such as 1%. A difference is an error that names both workers: one of the two machines computes wrongly.
    #[arg(long, value_name = "PART", value_parser = part)]
    audit: Option<f64>,
    /// Process that started this worker, with which it ends
    #[arg(long, value_name = "PID", hide = true)]
    of: Option<u32>,
}

/// Report of a worker.
#[derive(Serialize)]
struct Done {
    job: PathBuf,
    rank: Option<usize>,
    /// Units that this worker computed.
    computed: usize,
    /// Units of others that it computed again, with equal results.
    audited: usize,
    seconds: f64,
}

impl Execute for Args {
    const GROUP: Group = Group::Quantize;

    fn paths(&self, paths: &mut Paths) -> Result<()> {
        paths.read(&self.job);
        Ok(())
    }

    /// # Errors
    /// No folder of a job, or one of another version; other inputs; as the job, but for its output.
    fn run(&self, context: &Context) -> Result<()> {
        let start = Instant::now();
        if let Some(parent) = self.of {
            end_with(parent);
        }
        let folder = workers::open_folder(&self.job, context)?;
        let rank = Rank::from_environment()?;
        let only = self.units.clone().or(self.unit.map(|unit| unit..unit + 1));
        let part = Part { rank, only, audit: self.audit.unwrap_or(0.0) };
        let team = Team::join(folder.units(), part);
        workers::work(&folder, &team, context)?;
        let done = Done {
            job: self.job.clone(),
            rank: rank.map(|rank| rank.index),
            computed: team.computed(),
            audited: team.audited(),
            seconds: start.elapsed().as_secs_f64(),
        };
        context.report(&done, |out| {
            let audited = match done.audited {
                0 => String::new(),
                audited => format!(", {} computed again with equal results", counted(audited as u64, "unit")),
            };
            writeln!(
                out,
                "{}: {} computed{audited}",
                done.job.display(),
                counted(done.computed as u64, "unit")
            )
        })
    }
}

/// Ends this process when `parent`, which started it, has ended: a kill of one process ends all of its crew. What is not
/// finished is lost, and nothing else.
fn end_with(parent: u32) {
    let is_child = move || getppid().is_some_and(|pid| pid.as_raw_nonzero().get().cast_unsigned() == parent);
    // Without the thread the worker ends when the job is complete.
    let _ = std::thread::Builder::new().name("parent".to_owned()).spawn(move || {
        while is_child() {
            std::thread::sleep(LOOK);
        }
        std::process::exit(Exit::Environment as i32);
    });
}

/// Reads a range of units such as `0..16`.
fn range(text: &str) -> Result<Range<usize>, String> {
    let parsed = text.split_once("..").and_then(|(start, end)| Some(start.parse().ok()?..end.parse().ok()?));
    let range = parsed.filter(|range: &Range<usize>| !range.is_empty());
    range.ok_or_else(|| format!("expected A..B with A below B, such as 0..16, got {text}"))
}

/// Reads a part such as `1%`.
fn part(text: &str) -> Result<f64, String> {
    let parsed = text.strip_suffix('%').and_then(|number| number.parse::<f64>().ok());
    let part = parsed.filter(|percent| (0.0..=100.0).contains(percent)).map(|percent| percent / 100.0);
    part.ok_or_else(|| format!("expected a percentage from 0% to 100%, got {text}"))
}

//! Jobs that several workers do together: the folder that they share, and a worker's part.
//!
//! Whoever makes the job also writes its output. Workers compute units and write nothing but their results.

use std::path::{Path, PathBuf};

use mantissa_quant::{Plan, QuantError, take_part};
use mantissa_ranks::{JobFolder, Team};
use mantissa_store::convention::ModelFiles;
use serde_json::Value;

use crate::convert::Convert;
use crate::error::{BadInput, InPlace, Result};
use crate::evaluate::Evaluate;
use crate::fit::Fit;
use crate::host::Host;
use crate::job::{Job, from_json, to_json};
use crate::lint::AsStated;
use crate::progress::Unit;
use crate::quantize::Quantize;
use crate::record::Recordable;

/// Job whose work several workers can divide.
pub trait Shared: Job {
    /// Returns what decides the results, besides the contents of the inputs.
    ///
    /// # Errors
    /// A field that JSON cannot hold: a bug.
    fn decides(&self) -> Result<Value>;

    /// Computes units of the job that no other worker of `team` computes, until all have a result.
    ///
    /// # Errors
    /// As [`run`](crate::Job::run), but for the output.
    fn take_part(&self, team: &Team, host: &Host) -> Result<()>;
}

impl Shared for Quantize {
    fn decides(&self) -> Result<Value> {
        Ok(to_json(&self.without_places())?)
    }

    fn take_part(&self, team: &Team, host: &Host) -> Result<()> {
        let mut prepared = self.prepare(&AsStated, host)?;
        prepared.share(team, host)?;
        part_of_plans(&prepared.plans, &prepared.source, host)
    }
}

impl Shared for Convert {
    fn decides(&self) -> Result<Value> {
        Ok(to_json(&self.without_places())?)
    }

    fn take_part(&self, team: &Team, host: &Host) -> Result<()> {
        let mut prepared = self.prepare(host)?;
        prepared.share(team, host)?;
        part_of_plans(std::slice::from_ref(&prepared.plan), &prepared.source, host)
    }
}

impl Shared for Evaluate {
    fn decides(&self) -> Result<Value> {
        let written = Evaluate { per_window: None, logits: None, per_item: None, ..self.clone() };
        Ok(to_json(&written)?)
    }

    fn take_part(&self, team: &Team, host: &Host) -> Result<()> {
        self.take_part_with(team, host)
    }
}

impl Shared for Fit {
    fn decides(&self) -> Result<Value> {
        let written = Fit { out: PathBuf::new(), measurements: None, save_recipe: None, ..self.clone() };
        Ok(to_json(&written)?)
    }

    fn take_part(&self, team: &Team, host: &Host) -> Result<()> {
        self.prepare(host)?.take_part(team, host)
    }
}

/// Kind of a shared job, by its name in a record.
struct Kind {
    name: &'static str,
    take_part: fn(&str, Value, &Team, &Host) -> Result<()>,
}

impl Kind {
    const fn of<J: Shared>() -> Self {
        let take_part = |place: &str, value: Value, team: &Team, host: &Host| {
            from_json::<J>(place, value)?.take_part(team, host)
        };
        Kind { name: J::NAME, take_part }
    }
}

/// Jobs that workers can divide.
const KINDS: [Kind; 4] =
    [Kind::of::<Quantize>(), Kind::of::<Convert>(), Kind::of::<Evaluate>(), Kind::of::<Fit>()];

/// Makes the folder at `path` for workers of `job`, or joins one that was made for the same job and inputs.
///
/// # Errors
/// The folder belongs to another job; inputs that cannot be read; I/O; a stop.
pub fn make_folder<J: Shared>(job: &J, path: &Path, host: &Host) -> Result<JobFolder> {
    let (value, decides) = (to_json(job)?, job.decides()?);
    Ok(JobFolder::create(path, (value, &decides), &job.inputs(), &mut || !host.stops())?)
}

/// Opens the folder at `path` for a worker, and checks that the job's inputs are on this machine.
///
/// # Errors
/// No folder of a job; another version; inputs with other content; another current folder than the job's.
pub fn open_folder(path: &Path, host: &Host) -> Result<JobFolder> {
    let folder = JobFolder::open(path)?;
    let here = std::env::current_dir().at(".")?;
    let expected = &folder.record.directory;
    if here != *expected {
        let wrong =
            BadInput::new("current folder", here.display().to_string(), expected.display().to_string());
        return Err(wrong
            .with_fix(format!("cd {} first: the job's paths start there", expected.display()))
            .into());
    }
    folder.require_inputs(&mut || !host.stops())?;
    Ok(folder)
}

/// Computes units of the job in `folder` that no other worker of `team` computes, until all have a result.
///
/// # Errors
/// A job of another kind; as the job, but for its output.
pub fn work(folder: &JobFolder, team: &Team, host: &Host) -> Result<()> {
    let (place, job) = (folder.path().display().to_string(), folder.record.job.clone());
    let name = job.get("job").and_then(Value::as_str).unwrap_or_default().to_owned();
    let kind = KINDS.iter().find(|kind| kind.name == name).ok_or_else(|| {
        let allowed = KINDS.map(|kind| kind.name).join(" or ");
        BadInput::new(format!("{place}: job"), format!("\"{name}\""), allowed)
    })?;
    (kind.take_part)(&place, job, team, host)
}

/// Solves layers of `plans` that no other worker solves, until the host asks for a stop.
fn part_of_plans(plans: &[Plan], source: &ModelFiles, host: &Host) -> Result<()> {
    let progress = host.progress(0, Unit::Items("units"));
    let step = &mut |at: mantissa_quant::Progress<'_>| {
        progress.message(at.tensor);
        match host.stops() {
            true => std::ops::ControlFlow::Break(()),
            false => std::ops::ControlFlow::Continue(()),
        }
    };
    let done = host.orderly(|| take_part(plans, source, step), QuantError::is_interruption);
    progress.finish();
    Ok(done?)
}

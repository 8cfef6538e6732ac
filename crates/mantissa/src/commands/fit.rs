//! `mantissa fit`: chooses scheme and method of every layer by measured KL, under a budget.

mod args;
mod done;
mod page;

use std::path::{Path, PathBuf};

use anyhow::Result;
use mantissa_jobs::{Job, choose, finished};
use mantissa_ranks::Team;
use mantissa_store::{Kind, Paths};

pub use self::args::Args;

use self::done::{Complete, Done, human};
use super::execute::Execute;
use super::fixes::GivenLine;
use super::outcome::tell_failure;
use super::workers::Engaged;
use crate::context::Context;
use crate::help::Group;

impl Execute for Args {
    const GROUP: Group = Group::Quantize;

    /// # Errors
    /// Invalid recipe arguments.
    fn paths(&self, paths: &mut Paths) -> Result<()> {
        *paths = self.resolved(0)?.paths();
        self.html.iter().for_each(|path| paths.write("--html", path, Kind::File));
        Ok(())
    }

    /// # Errors
    /// A budget that no choice meets; input that cannot be quantized; I/O;
    /// [`GateFailed`](crate::error::GateFailed) if an engine would refuse the result or it does not verify.
    fn run(&self, context: &Context) -> Result<()> {
        let job = self.resolved(context.seed)?;
        let others: Vec<&Path> = self.html.iter().chain(&job.save_recipe).map(PathBuf::as_path).collect();
        if let Some(outcome) = finished::output_of_job(&job.out, &others, context)? {
            let complete = Complete::new(&outcome);
            return context.report(&complete, |out| complete.human(out));
        }
        choose::note_calibration(&self.calibration.value(), &job.calibration, context);
        if self.workers.are_asked_for() {
            job.require_divisible()?;
        }
        // Candidates that follow others have no numbers.
        let crew = match self.workers.engage(&job, &job.out, None, context)? {
            Engaged::Alone => None,
            Engaged::Scripted => return Ok(()),
            Engaged::Crew(crew) => Some(crew),
        };
        let team = crew.as_ref().map_or_else(Team::alone, |crew| crew.team.clone());
        let found = job.prepare(context).and_then(|prepared| prepared.run_with(&team, &GivenLine, context));
        let report = tell_failure(found, context)?;
        if let Some(crew) = crew {
            crew.finish(context);
        }
        let done = Done::new(self, &job, &report);
        if let Some(file) = &self.html {
            page::page(self.model.named(), &done).write(&context.output(file)?)?;
        }
        context.report(&done, |out| human(out, &done, self.layers))
    }
}

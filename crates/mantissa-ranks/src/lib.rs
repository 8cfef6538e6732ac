//! Ranks of one job. Workers on one machine or many share its *units* through a folder: a unit is a piece of the job
//! whose result is bytes that depend on the job and its inputs alone, so whoever computes it, and how often, makes no
//! difference. An engine that exists (MPI, Slurm, Ray, Kubernetes, a shell) starts the workers, and starts them again
//! after a crash; here is what makes a unit safe to repeat: results under content keys that appear whole ([`UnitFolder`]),
//! leases that end with their holder ([`Team`]), and the rank that the launcher gives ([`Rank`]).
//!
//! No numerics, no scheduler, no network.
#![forbid(unsafe_code)]

// Layer: errors and the launcher's environment.
mod error;
mod launch;

// Layer: files of one unit.
mod lease;
mod result;

// Layer: the folder of a job.
mod folder;

// Layer: workers.
mod team;

pub use error::{Disagreement, RankError, Result};
pub use folder::{InputFile, JobFolder, JobRecord, UnitFolder};
pub use launch::Rank;
pub use result::UnitResult;
pub use team::{Part, Team, Unit};

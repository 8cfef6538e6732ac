//! Ranks of one job. Workers on one machine or many share its *units* through a folder: a unit is a piece of the job
//! whose result is bytes that depend on the job and its inputs alone, so whoever computes it, and how often, makes no
//! difference. An engine that exists (MPI, Slurm, Ray, Kubernetes, a shell) starts the workers, and starts them again
//! after a crash; here is what makes a unit safe to repeat: results under content keys that appear whole ([`UnitFolder`]),
//! leases that end with their holder ([`Team`]), and the rank that the launcher gives ([`Rank`]).
//!
//! Ranks that work in step, as in training, send each other bytes over a [`Link`]: between threads of a process, or between
//! processes by the MPI that started them.
//!
//! No numerics, no scheduler, no network protocol.
#![deny(unsafe_code)]

// Layer: errors, the launcher's environment, and values as bytes.
mod error;
mod exchange;
mod launch;

// Layer: messages between ranks.
mod link;
mod memory;
#[allow(unsafe_code, reason = "functions of a library that is found at run time")]
mod mpi;

// Layer: files of one unit.
mod lease;
mod result;

// Layer: the folder of a job.
mod folder;

// Layer: workers.
mod team;

pub use error::{Disagreement, RankError, Result};
pub use exchange::{Reader, Writer};
pub use folder::{InputFile, JobFolder, JobRecord, UnitFolder};
pub use launch::Rank;
pub use link::{Alone, Link, SharedLink, Traffic};
pub use memory::MemoryLink;
pub use mpi::MpiLink;
pub use result::UnitResult;
pub use team::{Part, Team, Unit, ranges};

//! Long work as values, which the binary, Python and workers on other machines make and run alike.
//!
//! A [`Job`] is resolved once from arguments, is never changed afterwards, and is serialized with its name and version
//! ([`job::to_json`], [`job::from_json`]). A [`Host`] runs it: it grants threads, memory and outputs, shows progress and
//! asks for a stop ([`Progress`]). This crate has no terminal, no command line and no signal handler.
#![forbid(unsafe_code)]

// Layer: text and memory.
pub mod memory;
pub mod notes;
mod text;

// Layer: errors and progress.
mod error;
mod progress;

// Layer: hosts and jobs.
mod host;
pub mod job;

pub use error::{
    BadInput, ChatFailed, Class, GateFailed, InPlace, JobError, OverMemory, RecordError, Stopped, resumes,
};
pub use host::{Allowed, Host, Leaving, RenderChat};
pub use job::{Job, JobOutput};
pub use progress::{Gauge, Meter, Polling, Progress, Silent, Unit};
pub use text::{bytes, count};

//! Outputs that appear only when they are complete.
//!
//! An output is written below `new` in a work folder beside the target, `.NAME.mantissa-partial-PID`
//! ([`crate::work`]). There it is sealed (digests, manifest, fsync) and may be opened and verified. Renames then
//! publish it. If it replaces something ([`crate::output`]), the two are exchanged in one step, so that a reader sees
//! either the old or the new output. After a kill at any time one of them is whole. The next start on the same target
//! finishes a publication that began and removes what was replaced.
//!
//! An advisory lock beside the target excludes a second writer. So the holder knows that any other work folder of the
//! target belongs to a dead process. It removes or resumes ([`Staging::resume`]) the work folders of its own plan and leaves
//! the others.

mod begun;
mod durable;
mod exchange;
mod file;
mod folder;
mod intent;
mod names;
mod set;

pub use begun::take_others;
pub(crate) use durable::write_new;
pub use file::{StagedFile, write_file_atomic};
pub use folder::{Committed, Staging};
pub use intent::interrupted_publication;
pub use set::{FileSet, StagedSet};

#[cfg(test)]
mod tests;

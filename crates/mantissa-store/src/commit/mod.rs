//! Outputs that appear only when they are complete.
//!
//! An output is written below `new` in a work folder beside the target, `.NAME.mantissa-partial-PID`
//! ([`crate::work`]). There it is sealed (digests, manifest, fsync) and may be opened and verified. Renames then
//! publish it. If it replaces something ([`crate::output`]), the two are exchanged in one step, so that a reader sees
//! either the old or the new output. After a kill at any time one of them is whole. The next start on the same target
//! finishes a publication that began and removes what was replaced.
//!
//! An advisory lock beside the target excludes a second writer. So the holder knows that any other work folder of the
//! target belongs to a dead process. It removes or resumes ([`Staging::resume`]) those of its own plan and leaves the
//! others.

mod file;
mod folder;
mod intent;
mod set;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

pub use file::{StagedFile, write_file_atomic};
pub use folder::{Committed, Staging};
pub use intent::interrupted_publication;
pub use set::{FileSet, StagedSet};

use crate::disk;
use crate::error::{Error, Result};
use crate::lock::Lock;
use crate::output::Output;
use crate::target::Target;
use crate::unpublished::Unpublished;
use crate::work::{self, Left, Work};

/// Name of the folder within a work folder that holds what is to be published.
const NEW: &str = "new";

/// Name of the folder within a work folder that holds what was replaced.
const OLD: &str = "old";

/// Purpose of the work folders of this module, in their names.
const PURPOSE: &str = "partial";

/// Common start of every kind of output: its locked target, with a work folder.
#[derive(Debug)]
struct Begun {
    output: Output,
    target: Target,
    work: Work,
    /// Work folders that were removed at the start.
    cleaned: Vec<PathBuf>,
    /// Work folders of other plans, which were left.
    others: Vec<PathBuf>,
    resumed: bool,
    // Fields are dropped in this order: the lock last.
    unpublished: Unpublished,
    _lock: Option<Lock>,
}

impl Begun {
    /// Locks the target, cleans up after dead processes, and creates a work folder marked with `key`, or takes over
    /// the first with that key that `fits` accepts.
    fn new(output: &Output, key: &str, fits: &mut dyn FnMut(&Path) -> bool) -> Result<Self> {
        let target = Target::prepare(output.path())?;
        let lock = if output.is_owned() { None } else { Some(Lock::acquire(&target)?) };
        let Cleaned { removed: cleaned, others, adopted } = clean_up(&target, key, fits)?;
        let resumed = adopted.is_some();
        let (work, unpublished) = match adopted {
            Some(left) => {
                let work = Work::adopt(left);
                let unpublished = Unpublished::folder(work.path());
                (work, unpublished)
            }
            None => Work::create(&target, PURPOSE, key)?,
        };
        unpublished.keep(resumed);
        let begun = Begun {
            output: output.clone(),
            target,
            work,
            cleaned,
            others,
            resumed,
            unpublished,
            _lock: lock,
        };
        Ok(begun)
    }

    /// True if a publication of several files has begun and is neither complete nor undone.
    fn is_publishing(&self) -> bool {
        intent::is_under_way(self.target.parent(), self.work.path())
    }

    fn new_path(&self) -> PathBuf {
        self.work.path().join(NEW)
    }

    /// Creates the folder for the new output.
    fn create_new_folder(&self) -> Result<()> {
        let path = self.new_path();
        disk::create_folder(&path).map_err(|e| Error::io(&path, "create folder", e))
    }
}

/// Work folders of other plans that this process found and has not reported yet.
static OTHERS: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

fn tell_other(path: &Path) {
    OTHERS.lock().unwrap_or_else(PoisonError::into_inner).push(path.to_owned());
}

/// Takes the list of work folders of other plans that this process found beside its outputs and left in place, for a
/// message to the user.
pub fn take_others() -> Vec<PathBuf> {
    std::mem::take(&mut *OTHERS.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Result of the search for work folders of dead processes.
#[derive(Debug, Default, PartialEq, Eq)]
struct Cleaned {
    removed: Vec<PathBuf>,
    others: Vec<PathBuf>,
    adopted: Option<Left>,
}

/// Completes interrupted publications and removes work folders with the plan's `key`, except the first that `fits`
/// accepts. Leaves those of other plans. The caller holds the lock, so their owners are dead.
fn clean_up(target: &Target, key: &str, fits: &mut dyn FnMut(&Path) -> bool) -> Result<Cleaned> {
    let mut cleaned = Cleaned::default();
    for left in work::left(target, PURPOSE)? {
        let settled = folder::settle(target, &left.path)? || intent::settle(target, &left.path)?;
        match &left.key {
            _ if settled => {}
            None => {}
            Some(of) if of != key => {
                tell_other(&left.path);
                cleaned.others.push(left.path);
                continue;
            }
            Some(_) if cleaned.adopted.is_none() && fits(&left.path) => {
                cleaned.adopted = Some(left);
                continue;
            }
            Some(_) => {}
        }
        work::remove_marked(&left.path)?;
        cleaned.removed.push(left.path);
    }
    Ok(cleaned)
}

/// Creates a file that must not exist, writes it and makes it durable.
pub(crate) fn write_new(path: &Path, bytes: &[u8]) -> Result<()> {
    let file = create_new(path)?;
    disk::append(&file, path, bytes).map_err(|e| Error::io(path, "write", e))?;
    disk::sync(&file, path).map_err(|e| Error::io(path, "fsync", e))
}

fn create_new(path: &Path) -> Result<File> {
    disk::create_new(path).map_err(|e| Error::io(path, "create", e))
}

fn sync_file(path: &Path) -> Result<()> {
    disk::sync_path(path).map_err(|e| Error::io(path, "fsync", e))
}

fn sync_folder(path: &Path) -> Result<()> {
    disk::sync_path(path).map_err(|e| Error::io(path, "fsync folder", e))
}

/// Syncs a folder and every folder below it.
fn sync_folders(path: &Path) -> Result<()> {
    for entry in fs::read_dir(path).map_err(|e| Error::io(path, "list folder", e))? {
        let entry = entry.map_err(|e| Error::io(path, "list folder", e))?;
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            sync_folders(&entry.path())?;
        }
    }
    sync_folder(path)
}

#[cfg(test)]
mod tests;

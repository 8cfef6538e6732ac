//! Start of every kind of output: its lock, its work folder, and what dead processes left.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use super::names::{NEW, PURPOSE};
use super::{exchange, intent};
use crate::disk;
use crate::error::{Error, Result};
use crate::lock::Lock;
use crate::mark::remove_marked;
use crate::nested::{Form, refuse_inside};
use crate::output::Output;
use crate::target::{Target, resolve};
use crate::unpublished::Unpublished;
use crate::work::{self, Left, Work};

/// Common start of every kind of output: its locked target, with a work folder.
#[derive(Debug)]
pub(super) struct Begun {
    pub(super) output: Output,
    pub(super) target: Target,
    pub(super) work: Work,
    /// Work folders that were removed at the start.
    pub(super) cleaned: Vec<PathBuf>,
    /// Work folders of other plans, which were left.
    pub(super) others: Vec<PathBuf>,
    pub(super) resumed: bool,
    // Fields are dropped in this order: the lock last.
    pub(super) unpublished: Unpublished,
    _lock: Option<Lock>,
}

impl Begun {
    /// Locks the target, cleans up after dead processes, and creates a work folder marked with `key`, or takes over
    /// the first with that key that `fits` accepts.
    pub(super) fn new(
        output: &Output,
        form: Form,
        key: &str,
        fits: &mut dyn FnMut(&Path) -> bool,
    ) -> Result<Self> {
        let mut lock = None;
        if !output.is_owned() {
            // Looked for before any folder is made, and again under the lock.
            refuse_inside(&resolve(output.path())?, form)?;
            let taken = Target::prepare(output.path()).and_then(|target| Lock::acquire(&target));
            // Also where taking it failed: an outer output may have replaced the folders that were made for it.
            refuse_inside(&resolve(output.path())?, form)?;
            lock = Some(taken?);
        }
        let target = Target::prepare(output.path())?;
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
    pub(super) fn is_publishing(&self) -> bool {
        intent::is_under_way(self.target.parent(), self.work.path())
    }

    pub(super) fn new_path(&self) -> PathBuf {
        self.work.path().join(NEW)
    }

    /// Creates the folder for the new output.
    pub(super) fn create_new_folder(&self) -> Result<()> {
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
/// accepts. Leaves the work folders of other plans. The caller holds the lock, so their owners are dead.
fn clean_up(target: &Target, key: &str, fits: &mut dyn FnMut(&Path) -> bool) -> Result<Cleaned> {
    let mut cleaned = Cleaned::default();
    for left in work::left(target, PURPOSE)? {
        let settled = exchange::settle(target, &left.path)? || intent::settle(target, &left.path)?;
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
        remove_marked(&left.path)?;
        cleaned.removed.push(left.path);
    }
    Ok(cleaned)
}

//! Exchange of an output folder with the one that it replaces, and its settlement after a kill.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::durable::{sync_folder, write_new};
use super::names::{NEW, OLD};
use crate::disk;
use crate::error::{Error, Result};
use crate::regular;
use crate::target::Target;

/// File in a work folder that holds the inode of the new output before it is exchanged with the old one.
pub(super) const EXCHANGED: &str = "exchanged";

/// Maximum size of that record: an inode in decimal.
const MAX_EXCHANGED: u64 = 64;

/// Exchanges the folder `new` with the old output at `path`, which is then in the work folder `work`.
pub(super) fn exchange(new: &Path, path: &Path, work: &Path) -> Result<()> {
    // Lets the next start tell the old output in our work folder from a new one.
    let inode = fs::metadata(new).map_err(|e| Error::io(new, "look up", e))?.ino();
    write_new(&work.join(EXCHANGED), inode.to_string().as_bytes())?;
    sync_folder(work)?;
    match disk::exchange(new, path) {
        Ok(Some(())) => Ok(()),
        Ok(None) => replace_in_two_steps(new, path, &work.join(OLD)),
        Err(error) => Err(Error::io(path, "exchange with the old output", error)),
    }
}

/// Moves the old output aside and the new one in, on file systems that cannot exchange them.
fn replace_in_two_steps(new: &Path, path: &Path, aside: &Path) -> Result<()> {
    disk::rename_to_free(path, aside).map_err(|e| Error::io(path, "move the old output aside", e))?;
    disk::rename_to_free(new, path).map_err(|error| {
        // If this fails too, the next start restores the old output.
        let _ = disk::rename_to_free(aside, path);
        Error::io(path, "rename into place", error)
    })
}

/// Cleans up an exchange that a dead process began: restores an old output that was moved aside. Returns true if the
/// work folder holds only what was replaced.
pub(super) fn settle(target: &Target, work: &Path) -> Result<bool> {
    let (path, aside) = (target.path(), work.join(OLD));
    let Ok(recorded) = regular::read(&work.join(EXCHANGED), MAX_EXCHANGED, "a record of an exchange") else {
        return Ok(false);
    };
    if fs::symlink_metadata(&aside).is_ok() && fs::symlink_metadata(&path).is_err() {
        disk::rename_to_free(&aside, &path).map_err(|e| Error::io(&aside, "put back", e))?;
        sync_folder(target.parent())?;
        return Ok(false);
    }
    let inode = |path: &Path| fs::metadata(path).map(|found| found.ino()).ok();
    let recorded: Option<u64> =
        std::str::from_utf8(&recorded).ok().and_then(|inode| inode.trim().parse().ok());
    // An exchange that did not happen leaves the new output here.
    Ok(recorded.is_some() && inode(&work.join(NEW)) != recorded)
}

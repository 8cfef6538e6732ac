//! Publication of several files, recorded beforehand so that the next start completes it after a kill.
//!
//! The intent lists each new file by name and inode, in the order in which they are moved into place, and the old
//! files that are moved away first. A step is done if the file with its name has the recorded inode, so repeating the
//! list is safe. Old files are moved into the work folder, not deleted, so that an error halfway can move them back.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::durable::{sync_folder, write_new};
use super::names::{NEW, OLD, PURPOSE};
use crate::disk;
use crate::error::{Error, OutputFault, Result};
use crate::mark::is_marked;
use crate::regular;
use crate::target::Target;

/// Name of the intent within a work folder.
const INTENT: &str = "publish.json";

/// Maximum size of the intent. A file takes about 100 bytes.
const MAX_INTENT: u64 = 64 << 20;

/// Files of a publication.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Intent {
    /// Old files that are moved away first, by name, each with its inode.
    pub(super) retired: Vec<(String, u64)>,
    /// New files by name, in the order in which they are moved into place. Each has its inode and the inode of the
    /// old file it replaces, if any.
    pub(super) files: Vec<(String, u64, Option<u64>)>,
}

/// Completed step, to be undone after an error.
enum Done {
    Moved(PathBuf, PathBuf),
    Exchanged(PathBuf, PathBuf),
}

impl Intent {
    /// Writes it into the work folder, durably.
    pub(super) fn write(&self, work: &Path) -> Result<()> {
        let value = json!({ "retired": self.retired, "files": self.files });
        write_new(&work.join(INTENT), format!("{value:#}\n").as_bytes())?;
        let old = work.join(OLD);
        disk::create_folder(&old).map_err(|e| Error::io(&old, "create folder", e))?;
        sync_folder(work)
    }

    fn read(work: &Path) -> Option<Self> {
        let bytes = regular::read(&work.join(INTENT), MAX_INTENT, "a record of a publication").ok()?;
        let value: Value = serde_json::from_slice(&bytes).ok()?;
        let name = |value: &Value| Some(plain_name(value.as_str()?)?.to_owned());
        let retired =
            value["retired"].as_array()?.iter().map(|pair| Some((name(&pair[0])?, pair[1].as_u64()?)));
        let files = value["files"].as_array()?.iter();
        let files = files.map(|entry| Some((name(&entry[0])?, entry[1].as_u64()?, entry[2].as_u64())));
        Some(Intent { retired: retired.collect::<Option<_>>()?, files: files.collect::<Option<_>>()? })
    }

    /// Runs the steps that are not done yet; after an error, undoes the steps of this call.
    pub(super) fn carry_out(&self, parent: &Path, work: &Path) -> Result<()> {
        let mut done = Vec::new();
        let result = self.steps(parent, work, &mut done);
        if result.is_err() {
            for step in done.iter().rev() {
                // Report the first error; the next start completes the rest.
                let _ = match step {
                    Done::Moved(from, to) => disk::rename_to_free(to, from),
                    Done::Exchanged(a, b) => disk::exchange(a, b).map(|_| ()),
                };
            }
        }
        result
    }

    fn steps(&self, parent: &Path, work: &Path, done: &mut Vec<Done>) -> Result<()> {
        for (name, inode) in &self.retired {
            let (at, aside) = (parent.join(name), work.join(OLD).join(name));
            if inode_of(&at) == Some(*inode) {
                disk::rename_to_free(&at, &aside)
                    .map_err(|e| Error::io(&at, "move the old file aside", e))?;
                done.push(Done::Moved(at, aside));
            }
        }
        for (name, inode, old) in &self.files {
            let (new, at) = (work.join(NEW).join(name), parent.join(name));
            let there = inode_of(&at);
            if there == Some(*inode) {
                continue;
            }
            if inode_of(&new) != Some(*inode) || (there.is_some() && there != *old) {
                return Err(Error::output(&at, OutputFault::Changed));
            }
            put(&new, &at, there.is_some(), done)?;
        }
        sync_folder(parent)
    }

    /// True if a step has been done.
    fn has_begun(&self, parent: &Path, work: &Path) -> bool {
        self.retired.iter().any(|(name, inode)| inode_of(&work.join(OLD).join(name)) == Some(*inode))
            || self.files.iter().any(|(name, inode, _)| inode_of(&parent.join(name)) == Some(*inode))
    }

    /// True if every new file is in place.
    fn is_done(&self, parent: &Path) -> bool {
        self.files.iter().all(|(name, inode, _)| inode_of(&parent.join(name)) == Some(*inode))
    }
}

/// Moves a file into place, atomically if it replaces one.
fn put(new: &Path, at: &Path, there: bool, done: &mut Vec<Done>) -> Result<()> {
    let io = |error| Error::io(at, "rename into place", error);
    if !there {
        disk::rename_to_free(new, at).map_err(io)?;
        done.push(Done::Moved(new.to_owned(), at.to_owned()));
        return Ok(());
    }
    match disk::exchange(new, at).map_err(io)? {
        Some(()) => done.push(Done::Exchanged(new.to_owned(), at.to_owned())),
        // Without exchange, the step deletes the old file and cannot be undone.
        None => disk::rename(new, at).map_err(io)?,
    }
    Ok(())
}

/// Completes a publication that a dead process began. Returns true if the work folder then holds only what was
/// replaced.
pub(super) fn settle(target: &Target, work: &Path) -> Result<bool> {
    let Some(intent) = Intent::read(work) else { return Ok(false) };
    if !intent.has_begun(target.parent(), work) {
        return Ok(false);
    }
    intent.carry_out(target.parent(), work).map_err(|error| match error {
        Error::Output { path, fault: OutputFault::Changed } => {
            Error::output(&path, OutputFault::Stuck { work: work.to_owned() })
        }
        error => error,
    })?;
    Ok(true)
}

/// True if a publication has begun and is neither complete nor undone.
pub(super) fn is_under_way(parent: &Path, work: &Path) -> bool {
    Intent::read(work).is_some_and(|intent| intent.has_begun(parent, work) && !intent.is_done(parent))
}

/// Finds the work folder of an interrupted publication of the single-file or split model at `path`. Files of the
/// model may be missing or mixed with files of the previous model. Rerunning the command that wrote it completes it.
pub fn interrupted_publication(path: &Path) -> Option<PathBuf> {
    let parent = disk::folder_of(path);
    let name = path.file_name()?.to_str()?;
    let marker = format!(".mantissa-{PURPOSE}-");
    for entry in fs::read_dir(parent).ok()?.flatten() {
        let folder = entry.file_name().to_string_lossy().into_owned();
        let Some((output, _)) = folder.strip_prefix('.').and_then(|rest| rest.split_once(&marker)) else {
            continue;
        };
        let work = entry.path();
        let Some(intent) = Intent::read(&work).filter(|_| is_marked(&work, output)) else { continue };
        let concerns = intent.files.iter().any(|(file, ..)| file == name) || output == name;
        if concerns && intent.has_begun(parent, &work) && !intent.is_done(parent) {
            return Some(work);
        }
    }
    None
}

/// A file name without folders.
fn plain_name(name: &str) -> Option<&str> {
    (!name.is_empty() && !name.contains('/') && name != "." && name != "..").then_some(name)
}

pub(super) fn inode_of(path: &Path) -> Option<u64> {
    fs::symlink_metadata(path).ok().map(|found| found.ino())
}

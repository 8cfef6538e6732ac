//! Outputs that appear only when they are complete.
//!
//! Files are written beside the target under the name `.NAME.mantissa-partial-PID`; [`Staging::commit`] syncs
//! them, writes the manifest last, and renames. Where the target exists, the two are exchanged in one step
//! (`RENAME_EXCHANGE`), so that a reader sees the old folder or the new one, and a kill at any time leaves one of
//! them whole. File systems without exchange (some network ones) get two renames, old aside and new in: a kill
//! between them leaves no target, and the next start puts the old one back.
//!
//! An advisory lock beside the target keeps a second writer out. Whoever holds it knows that any other partial of
//! the same target is an orphan of a killed process, and removes it.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;
use serde_json::{Map, Value};

use crate::error::{Error, Result};
use crate::hash::{FileDigest, hash_file};
use crate::lock::Lock;
use crate::manifest::{MANIFEST_NAME, Manifest, files_under};
use crate::target::{Target, require_replaceable};

/// An output folder being written. Dropped without [`Self::commit`], it removes what was written.
#[derive(Debug)]
pub struct Staging {
    target: Target,
    partial: PathBuf,
    recorded: BTreeMap<String, FileDigest>,
    cleaned: Vec<PathBuf>,
    published: bool,
    _lock: Lock,
}

/// What [`Staging::commit`] did.
#[derive(Debug)]
pub struct Committed {
    /// The output folder, links resolved.
    pub path: PathBuf,
    /// The manifest now in it.
    pub manifest: Manifest,
    /// The replaced folder, where it could not be removed; the next start on the same target tries again.
    pub leftover: Option<PathBuf>,
}

impl Staging {
    /// Begins writing the output folder `target`, whose parents are created if they do not exist.
    ///
    /// # Errors
    /// [`Error::Output`] when another process writes it or when a folder is there that holds anything but a
    /// model, [`Error::WrongKind`] when it is a file, [`Error::Io`].
    pub fn begin(target: &Path) -> Result<Self> {
        let target = Target::prepare(target)?;
        let lock = Lock::acquire(&target)?;
        let cleaned = clean_up(&target)?;
        require_replaceable(&target.path())?;
        let partial = target.sibling(&format!("partial-{}", std::process::id()));
        fs::create_dir(&partial).map_err(|e| Error::io(&partial, "create folder", e))?;
        Ok(Self { target, partial, recorded: BTreeMap::new(), cleaned, published: false, _lock: lock })
    }

    /// The folder to write into.
    pub fn path(&self) -> &Path {
        &self.partial
    }

    /// Partial outputs of killed processes that were removed, or put back, at the start.
    pub fn cleaned(&self) -> &[PathBuf] {
        &self.cleaned
    }

    /// Gives the digest of a file that was hashed when it was finished, so that [`Self::commit`] need not read it
    /// again. `file` is relative to [`Self::path`].
    pub fn record(&mut self, file: impl Into<String>, digest: FileDigest) {
        self.recorded.insert(file.into(), digest);
    }

    /// Makes every file durable, writes the manifest with `run` in it, and puts the folder in place.
    ///
    /// # Errors
    /// [`Error::Output`] when the target has meanwhile become something that may not be replaced, [`Error::Io`];
    /// the old output is then still in place, unless only the final sync of the parent failed.
    pub fn commit(mut self, run: Map<String, Value>) -> Result<Committed> {
        let manifest = self.seal(run)?;
        let path = self.target.path();
        require_replaceable(&path)?;
        let old = replace(&self.partial, &path, &self.target)?;
        self.published = true;
        sync_folder(self.target.parent())?;
        let leftover = old.filter(|old| fs::remove_dir_all(old).is_err());
        Ok(Committed { path, manifest, leftover })
    }

    /// Digests and syncs what was written, and writes the manifest.
    fn seal(&self, run: Map<String, Value>) -> Result<Manifest> {
        let mut files = BTreeMap::new();
        for file in files_under(&self.partial)? {
            let path = self.partial.join(&file);
            sync_file(&path)?;
            let digest = self.digest(&file, &path)?;
            files.insert(file, digest);
        }
        let manifest = Manifest::new(files, run);
        write_new(&self.partial.join(MANIFEST_NAME), manifest.to_json().as_bytes())?;
        sync_folders(&self.partial)?;
        Ok(manifest)
    }

    fn digest(&self, file: &str, path: &Path) -> Result<FileDigest> {
        let len = fs::metadata(path).map_err(|e| Error::io(path, "read length", e))?.len();
        match self.recorded.get(file) {
            Some(&digest) if digest.len == len => Ok(digest),
            _ => hash_file(path),
        }
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if !self.published {
            // Nothing to report to; what stays is cleaned at the next start.
            let _ = fs::remove_dir_all(&self.partial);
        }
    }
}

/// An output file being written. Dropped without [`Self::commit`], it removes what was written.
#[derive(Debug)]
pub struct StagedFile {
    target: Target,
    partial: PathBuf,
    cleaned: Vec<PathBuf>,
    published: bool,
    _lock: Lock,
}

impl StagedFile {
    /// Begins writing the output file `target`, whose parents are created if they do not exist.
    ///
    /// # Errors
    /// [`Error::Output`] when another process writes it, [`Error::WrongKind`] when something other than a regular
    /// file is there, [`Error::Io`].
    pub fn begin(target: &Path) -> Result<Self> {
        let target = Target::prepare(target)?;
        let lock = Lock::acquire(&target)?;
        let cleaned = clean_up(&target)?;
        require_file_or_nothing(&target.path())?;
        let partial = target.sibling(&format!("partial-{}", std::process::id()));
        Ok(Self { target, partial, cleaned, published: false, _lock: lock })
    }

    /// The path to write to; no file is there yet.
    pub fn path(&self) -> &Path {
        &self.partial
    }

    /// Partial outputs of killed processes that were removed at the start.
    pub fn cleaned(&self) -> &[PathBuf] {
        &self.cleaned
    }

    /// Makes the file durable and puts it in place of the target.
    ///
    /// # Errors
    /// [`Error::Io`]; the old file is then still in place, unless only the final sync of the parent failed.
    pub fn commit(mut self) -> Result<()> {
        let path = self.target.path();
        sync_file(&self.partial)?;
        require_file_or_nothing(&path)?;
        fs::rename(&self.partial, &path).map_err(|e| Error::io(&path, "rename into place", e))?;
        self.published = true;
        sync_folder(self.target.parent())
    }
}

impl Drop for StagedFile {
    fn drop(&mut self) {
        if !self.published {
            let _ = fs::remove_file(&self.partial);
        }
    }
}

/// Writes one file so that a reader sees its old content or all of the new.
///
/// # Errors
/// As [`StagedFile::begin`] and [`StagedFile::commit`].
pub fn write_file_atomic(path: &Path, bytes: &[u8]) -> Result<()> {
    let staged = StagedFile::begin(path)?;
    write_new(staged.path(), bytes)?;
    staged.commit()
}

/// Creates a file that must not exist, writes it and makes it durable.
pub(crate) fn write_new(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut file = File::create_new(path).map_err(|e| Error::io(path, "create", e))?;
    file.write_all(bytes).map_err(|e| Error::io(path, "write", e))?;
    file.sync_all().map_err(|e| Error::io(path, "fsync", e))
}

/// Removes partial outputs, and puts back an old one that a kill between two renames has left aside.
/// The caller holds the lock, so their owners are dead.
fn clean_up(target: &Target) -> Result<Vec<PathBuf>> {
    let mut cleaned = Vec::new();
    for aside in target.siblings_of_any_process("old")? {
        let gone = fs::symlink_metadata(target.path()).is_err();
        let settled = if gone { fs::rename(&aside, target.path()) } else { remove(&aside) };
        settled.map_err(|e| Error::io(&aside, "clean up", e))?;
        cleaned.push(aside);
    }
    for partial in target.siblings_of_any_process("partial")? {
        remove(&partial).map_err(|e| Error::io(&partial, "clean up", e))?;
        cleaned.push(partial);
    }
    Ok(cleaned)
}

fn remove(path: &Path) -> io::Result<()> {
    if fs::symlink_metadata(path)?.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }
}

/// Puts the folder `new` at `path`; gives where the old one is now, if there was one.
fn replace(new: &Path, path: &Path, target: &Target) -> Result<Option<PathBuf>> {
    if fs::symlink_metadata(path).is_err() {
        fs::rename(new, path).map_err(|e| Error::io(path, "rename into place", e))?;
        return Ok(None);
    }
    match renameat_with(CWD, new, CWD, path, RenameFlags::EXCHANGE) {
        Ok(()) => Ok(Some(new.to_owned())),
        Err(Errno::NOSYS | Errno::INVAL | Errno::OPNOTSUPP) => {
            replace_in_two_steps(new, path, target).map(Some)
        }
        Err(error) => Err(Error::io(path, "exchange with the old output", error.into())),
    }
}

fn replace_in_two_steps(new: &Path, path: &Path, target: &Target) -> Result<PathBuf> {
    let aside = target.sibling(&format!("old-{}", std::process::id()));
    fs::rename(path, &aside).map_err(|e| Error::io(path, "move the old output aside", e))?;
    match fs::rename(new, path) {
        Ok(()) => Ok(aside),
        Err(error) => {
            // If this fails too, the next start puts it back.
            let _ = fs::rename(&aside, path);
            Err(Error::io(path, "rename into place", error))
        }
    }
}

fn require_file_or_nothing(path: &Path) -> Result<()> {
    match fs::symlink_metadata(path) {
        Ok(metadata) if !metadata.is_file() => {
            let found = if metadata.is_dir() { "a folder" } else { "a device, pipe or socket" };
            Err(Error::WrongKind { path: path.to_owned(), found, expected: "a file or nothing" })
        }
        _ => Ok(()),
    }
}

fn sync_file(path: &Path) -> Result<()> {
    let synced = File::open(path).and_then(|file| file.sync_all());
    synced.map_err(|e| Error::io(path, "fsync", e))
}

fn sync_folder(path: &Path) -> Result<()> {
    let synced = File::open(path).and_then(|folder| folder.sync_all());
    synced.map_err(|e| Error::io(path, "fsync folder", e))
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
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use super::*;

    fn folder_with(path: &Path, text: &str) {
        fs::create_dir(path).unwrap();
        fs::write(path.join("config.json"), text).unwrap();
    }

    fn config_of(path: &Path) -> String {
        fs::read_to_string(path.join("config.json")).unwrap()
    }

    #[test]
    fn two_step_replacement_gives_the_new_and_keeps_the_old_aside() {
        let dir = tempfile::tempdir().unwrap();
        let target = Target::prepare(&dir.path().join("out")).unwrap();
        let new = dir.path().join("new");
        folder_with(&target.path(), "old");
        folder_with(&new, "new");
        let aside = replace_in_two_steps(&new, &target.path(), &target).unwrap();
        assert_eq!((config_of(&target.path()), config_of(&aside)), ("new".into(), "old".into()));
        assert_eq!(clean_up(&target).unwrap(), std::slice::from_ref(&aside));
        assert!(!aside.exists());
    }

    #[test]
    fn a_failed_second_step_puts_the_old_back() {
        let dir = tempfile::tempdir().unwrap();
        let target = Target::prepare(&dir.path().join("out")).unwrap();
        folder_with(&target.path(), "old");
        let error = replace_in_two_steps(&dir.path().join("absent"), &target.path(), &target).unwrap_err();
        assert!(matches!(error, Error::Io { operation: "rename into place", .. }), "{error}");
        assert_eq!(config_of(&target.path()), "old");
    }

    #[test]
    fn a_kill_between_the_two_steps_is_undone_at_the_next_start() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("out");
        folder_with(&dir.path().join(".out.mantissa-old-4000000"), "old");
        folder_with(&dir.path().join(".out.mantissa-partial-4000000"), "new, incomplete");
        let staging = Staging::begin(&out).unwrap();
        assert_eq!(config_of(&out), "old");
        assert_eq!(staging.cleaned().len(), 2);
    }
}

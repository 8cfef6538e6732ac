//! Outputs that appear only when they are complete.
//!
//! Files are written beside the target under the name `.NAME.mantissa-partial-PID`; [`Staging::commit`] syncs
//! them, writes the manifest last, and renames. Where the target exists, the two are exchanged in one step
//! (`RENAME_EXCHANGE`), so that a reader sees the old folder or the new one, and a kill at any time leaves one of
//! them whole. File systems without exchange (some network ones) get two renames, old aside and new in: a kill
//! between them leaves no target, and the next start puts the old one back.
//!
//! An advisory lock beside the target keeps a second writer out. Whoever holds it knows that any other partial of
//! the same target is an orphan of a killed process, and removes it, or goes on with it ([`Staging::resume`]).

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;
use serde_json::{Map, Value};

use crate::error::{Error, Result};
use crate::failpoint;
use crate::hash::{FileDigest, hash_file};
use crate::journal::JOURNAL_NAME;
use crate::lock::Lock;
use crate::manifest::{MANIFEST_NAME, Manifest, files_under};
use crate::reader::Source;
use crate::target::{Target, require_replaceable};
use crate::unpublished::Unpublished;

/// Bytes copied at a time.
const COPY: usize = 1 << 20;

/// An output folder being written. Dropped without [`Self::commit`], it removes what was written unless told to
/// [keep](Self::keep) it.
#[derive(Debug)]
pub struct Staging {
    target: Target,
    partial: PathBuf,
    recorded: BTreeMap<String, FileDigest>,
    cleaned: Vec<PathBuf>,
    kept: bool,
    published: bool,
    unpublished: Unpublished,
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
        Self::resume(target, &mut |_| false).map(|(staging, _)| staging)
    }

    /// As [`Self::begin`], but goes on in the folder that a dead process has left and that `fits` accepts; says whether
    /// there was one. Of such a folder the weight files and the journal are left, which the caller must check.
    ///
    /// # Errors
    /// As [`Self::begin`].
    pub fn resume(target: &Path, fits: &mut dyn FnMut(&Path) -> bool) -> Result<(Self, bool)> {
        let target = Target::prepare(target)?;
        let lock = Lock::acquire(&target)?;
        let partial = target.sibling(&format!("partial-{}", std::process::id()));
        let (cleaned, orphan) = clean_up(&target, fits)?;
        require_replaceable(&target.path())?;
        let unpublished = Unpublished::new(&partial, lock.path());
        let resumed = orphan.is_some();
        match orphan {
            Some(orphan) => {
                failpoint::write(|| fs::rename(&orphan, &partial))
                    .map_err(|e| Error::io(&orphan, "take over", e))?;
            }
            None => failpoint::write(|| fs::create_dir(&partial))
                .map_err(|e| Error::io(&partial, "create folder", e))?,
        }
        // A folder that was taken over stays if anything goes wrong before the caller decides.
        let staging = Self {
            target,
            partial,
            recorded: BTreeMap::new(),
            cleaned,
            kept: resumed,
            published: false,
            unpublished,
            _lock: lock,
        };
        staging.unpublished.keep(resumed);
        if resumed {
            remove_all_but_weights(&staging.partial)?;
        }
        Ok((staging, resumed))
    }

    /// Whether what was written stays for [`Self::resume`] where this is dropped without [`Self::commit`], or the process
    /// is told to end.
    pub fn keep(&mut self, kept: bool) {
        self.kept = kept;
        self.unpublished.keep(kept);
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

    /// Writes a file of the folder, which must not exist.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn write(&mut self, file: &str, bytes: &[u8]) -> Result<()> {
        write_new(&self.partial.join(file), bytes)?;
        self.record(file, FileDigest::of(bytes));
        Ok(())
    }

    /// Copies the regular file at `from` into the folder, where it must not exist, under the name `file`.
    ///
    /// # Errors
    /// [`Error::Missing`], [`Error::WrongKind`], [`Error::Io`] naming the file that could not be read or written.
    pub fn copy(&mut self, from: &Path, file: &str) -> Result<()> {
        let source = Source::open(from, "a file to copy")?;
        let path = self.partial.join(file);
        let mut out = create_new(&path)?;
        let mut piece = vec![0; COPY.min(usize::try_from(source.len()).unwrap_or(COPY))];
        let mut at = 0;
        while at < source.len() {
            let n = piece.len().min(usize::try_from(source.len() - at).unwrap_or(COPY));
            source.read_exact(at, &mut piece[..n], "read to copy")?;
            failpoint::write(|| out.write_all(&piece[..n])).map_err(|e| Error::io(&path, "write", e))?;
            at += n as u64;
        }
        Ok(())
    }

    /// Makes every file durable, writes the manifest with `run` in it, and puts the folder in place. A journal is
    /// removed.
    ///
    /// # Errors
    /// [`Error::Output`] when the target has meanwhile become something that may not be replaced, [`Error::Io`];
    /// the old output is then still in place, unless only the final sync of the parent failed.
    pub fn commit(mut self, run: Map<String, Value>) -> Result<Committed> {
        let manifest = self.seal(run)?;
        let path = self.target.path();
        require_replaceable(&path)?;
        self.remove_journal()?;
        // Without its journal nothing can go on from here.
        self.keep(false);
        let old = self.unpublished.publish(|| replace(&self.partial, &path, &self.target))?;
        self.published = true;
        sync_folder(self.target.parent())?;
        let leftover = old.filter(|old| fs::remove_dir_all(old).is_err());
        Ok(Committed { path, manifest, leftover })
    }

    /// Digests and syncs what was written, and writes the manifest.
    fn seal(&self, run: Map<String, Value>) -> Result<Manifest> {
        let mut files = BTreeMap::new();
        for file in files_under(&self.partial)?.into_iter().filter(|file| file != JOURNAL_NAME) {
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

    /// The last step before the output is put in place: a kill in between loses what was done and nothing else.
    fn remove_journal(&self) -> Result<()> {
        let journal = self.partial.join(JOURNAL_NAME);
        match failpoint::write(|| fs::remove_file(&journal)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(Error::io(&journal, "remove", error)),
            Ok(()) => sync_folder(&self.partial),
        }
    }

    fn digest(&self, file: &str, path: &Path) -> Result<FileDigest> {
        let len =
            failpoint::read(|| fs::metadata(path)).map_err(|e| Error::io(path, "read length", e))?.len();
        match self.recorded.get(file) {
            Some(&digest) if digest.len == len => Ok(digest),
            _ => hash_file(path),
        }
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if !self.published && !self.kept {
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
    unpublished: Unpublished,
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
        let (cleaned, _) = clean_up(&target, &mut |_| false)?;
        require_file_or_nothing(&target.path())?;
        let partial = target.sibling(&format!("partial-{}", std::process::id()));
        let unpublished = Unpublished::new(&partial, lock.path());
        Ok(Self { target, partial, cleaned, published: false, unpublished, _lock: lock })
    }

    /// The path to write to; no file is there yet.
    pub fn path(&self) -> &Path {
        &self.partial
    }

    /// Partial outputs of killed processes that were removed at the start.
    pub fn cleaned(&self) -> &[PathBuf] {
        &self.cleaned
    }

    /// Writes all of the file, which must not have been created yet, and makes it durable.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn write(&self, bytes: &[u8]) -> Result<()> {
        write_new(&self.partial, bytes)
    }

    /// Makes the file durable and puts it in place of the target.
    ///
    /// # Errors
    /// [`Error::Io`]; the old file is then still in place, unless only the final sync of the parent failed.
    pub fn commit(mut self) -> Result<()> {
        let path = self.target.path();
        sync_file(&self.partial)?;
        require_file_or_nothing(&path)?;
        let put = || failpoint::write(|| fs::rename(&self.partial, &path));
        self.unpublished.publish(put).map_err(|e| Error::io(&path, "rename into place", e))?;
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
    staged.write(bytes)?;
    staged.commit()
}

/// Creates a file that must not exist, writes it and makes it durable.
pub(crate) fn write_new(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut file = create_new(path)?;
    failpoint::write(|| file.write_all(bytes)).map_err(|e| Error::io(path, "write", e))?;
    failpoint::write(|| file.sync_all()).map_err(|e| Error::io(path, "fsync", e))
}

fn create_new(path: &Path) -> Result<File> {
    failpoint::write(|| File::create_new(path)).map_err(|e| Error::io(path, "create", e))
}

/// Removes partial outputs but the first folder that `fits`, and puts back an old output that a kill between two renames
/// has left aside. The caller holds the lock, so their owners are dead.
fn clean_up(target: &Target, fits: &mut dyn FnMut(&Path) -> bool) -> Result<(Vec<PathBuf>, Option<PathBuf>)> {
    let mut cleaned = Vec::new();
    let mut kept = None;
    for aside in target.siblings_of_any_process("old")? {
        let gone = fs::symlink_metadata(target.path()).is_err();
        let settled = if gone { fs::rename(&aside, target.path()) } else { remove(&aside) };
        settled.map_err(|e| Error::io(&aside, "clean up", e))?;
        cleaned.push(aside);
    }
    for partial in target.siblings_of_any_process("partial")? {
        let folder = fs::symlink_metadata(&partial).is_ok_and(|m| m.is_dir());
        if kept.is_none() && folder && fits(&partial) {
            kept = Some(partial);
            continue;
        }
        remove(&partial).map_err(|e| Error::io(&partial, "clean up", e))?;
        cleaned.push(partial);
    }
    Ok((cleaned, kept))
}

/// What a new run of the same work writes again.
fn remove_all_but_weights(partial: &Path) -> Result<()> {
    for entry in fs::read_dir(partial).map_err(|e| Error::io(partial, "list folder", e))? {
        let path = entry.map_err(|e| Error::io(partial, "list folder", e))?.path();
        let weights = path.extension().is_some_and(|extension| extension == "safetensors");
        if !weights && path.file_name().is_none_or(|name| name != JOURNAL_NAME) {
            remove(&path).map_err(|e| Error::io(&path, "clean up", e))?;
        }
    }
    Ok(())
}

fn remove(path: &Path) -> io::Result<()> {
    if fs::symlink_metadata(path)?.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }
}

/// Puts the folder `new` at `path`; gives where the old one is now, if there was one.
fn replace(new: &Path, path: &Path, target: &Target) -> Result<Option<PathBuf>> {
    if fs::symlink_metadata(path).is_err() {
        failpoint::write(|| fs::rename(new, path)).map_err(|e| Error::io(path, "rename into place", e))?;
        return Ok(None);
    }
    let exchanged = failpoint::write(|| Ok(renameat_with(CWD, new, CWD, path, RenameFlags::EXCHANGE)?));
    let unsupported = [Errno::NOSYS, Errno::INVAL, Errno::OPNOTSUPP].map(|errno| Some(errno.raw_os_error()));
    match exchanged {
        Ok(()) => Ok(Some(new.to_owned())),
        Err(error) if unsupported.contains(&error.raw_os_error()) => {
            replace_in_two_steps(new, path, target).map(Some)
        }
        Err(error) => Err(Error::io(path, "exchange with the old output", error)),
    }
}

fn replace_in_two_steps(new: &Path, path: &Path, target: &Target) -> Result<PathBuf> {
    let aside = target.sibling(&format!("old-{}", std::process::id()));
    failpoint::write(|| fs::rename(path, &aside))
        .map_err(|e| Error::io(path, "move the old output aside", e))?;
    match failpoint::write(|| fs::rename(new, path)) {
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
    let synced = failpoint::write(|| File::open(path).and_then(|file| file.sync_all()));
    synced.map_err(|e| Error::io(path, "fsync", e))
}

fn sync_folder(path: &Path) -> Result<()> {
    let synced = failpoint::write(|| File::open(path).and_then(|folder| folder.sync_all()));
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
        assert_eq!(clean_up(&target, &mut |_| false).unwrap(), (vec![aside.clone()], None));
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

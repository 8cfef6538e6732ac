//! A folder as an output, with a manifest of hashes in it.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::begun::Begun;
use super::durable::{create_new, sync_file, sync_folder, sync_folders, write_new};
use super::exchange::{EXCHANGED, exchange};
use crate::disk;
use crate::error::{Error, Result};
use crate::failpoint;
use crate::hash::{FileDigest, hash_file};
use crate::manifest::{MANIFEST_NAME, Manifest, files_under};
use crate::mark::remove_marked;
use crate::nested::Form;
use crate::output::{Found, Output};
use crate::reader::RegularFile;

/// Bytes copied at a time.
const COPY: usize = 1 << 20;

/// Output folder being written. Dropping it without [`Self::publish`] removes what was written, unless told to
/// [keep](Self::keep) it.
#[derive(Debug)]
pub struct Staging {
    begun: Begun,
    path: PathBuf,
    before: Found,
    recorded: BTreeMap<String, FileDigest>,
    sealed: Option<Manifest>,
    kept: bool,
    published: bool,
}

/// A published output folder.
#[derive(Debug)]
pub struct Committed {
    /// Output folder, links resolved.
    pub path: PathBuf,
    /// The manifest now in it.
    pub manifest: Manifest,
    /// Work folder with the replaced output, if it could not be removed; the next start on the same target retries.
    pub leftover: Option<PathBuf>,
}

impl Staging {
    /// Begins writing the output folder `output`; creates missing parent folders.
    ///
    /// # Errors
    /// [`Error::Output`] if another process writes it or an existing folder may not be replaced, [`Error::WrongKind`]
    /// if it is a file, [`Error::Io`].
    pub fn begin(output: &Output) -> Result<Self> {
        Self::resume(output, output.key(), &mut |_| false).map(|(staging, _)| staging)
    }

    /// Like [`Self::begin`], but resumes the first work folder of a dead process that has the plan's `key` and that
    /// `fits` accepts, given the folder of its journal. Returns true if there was one. Only the weight files and the
    /// journal of such a folder are kept; the caller must check them.
    ///
    /// # Errors
    /// As [`Self::begin`].
    pub fn resume(output: &Output, key: &str, fits: &mut dyn FnMut(&Path) -> bool) -> Result<(Self, bool)> {
        let begun = Begun::new(output, Form::Tree, key, fits)?;
        let resumed = begun.resumed;
        let path = begun.new_path();
        let before = match output.check_folder(&begun.target.path()) {
            Ok(before) => before,
            Err(error) => {
                if !resumed {
                    let _ = begun.work.remove();
                }
                return Err(error);
            }
        };
        // A folder that was taken over is kept if an error occurs before the caller decides.
        let staging = Self {
            begun,
            path,
            before,
            recorded: BTreeMap::new(),
            sealed: None,
            kept: resumed,
            published: false,
        };
        if resumed {
            staging.remove_all_but_weights()?;
        }
        if !staging.path.is_dir() {
            staging.begun.create_new_folder()?;
        }
        Ok((staging, resumed))
    }

    /// Sets if the work is kept for [`Self::resume`] when this is dropped without [`Self::publish`] or the process is
    /// told to end.
    pub fn keep(&mut self, kept: bool) {
        self.kept = kept;
        self.begun.unpublished.keep(kept);
    }

    /// The folder to write into.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The work folder, in which a journal is kept; it is not part of the output.
    pub fn work(&self) -> &Path {
        self.begun.work.path()
    }

    /// Work folders of killed processes that were removed, or whose output was restored, at the start.
    pub fn cleaned(&self) -> &[PathBuf] {
        &self.begun.cleaned
    }

    /// Work folders that killed processes with other plans have left for this output. They are never removed.
    pub fn others(&self) -> &[PathBuf] {
        &self.begun.others
    }

    /// Sets the digest of a file that was hashed when it was finished, so that [`Self::seal`] need not read it again.
    /// `file` is relative to [`Self::path`].
    pub fn record(&mut self, file: impl Into<String>, digest: FileDigest) {
        self.recorded.insert(file.into(), digest);
    }

    /// Writes a file in the folder, which must not exist yet.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn write(&mut self, file: &str, bytes: &[u8]) -> Result<()> {
        write_new(&self.path.join(file), bytes)?;
        self.record(file, FileDigest::of(bytes));
        Ok(())
    }

    /// Copies the regular file at `from` into the folder as `file`, which must not exist there.
    ///
    /// # Errors
    /// [`Error::Missing`], [`Error::WrongKind`], [`Error::Io`] with the file that could not be read or written.
    pub fn copy(&mut self, from: &Path, file: &str) -> Result<()> {
        let source = RegularFile::open(from, "a file to copy")?;
        let path = self.path.join(file);
        // Of a file within a folder.
        if let Some(folder) = path.parent().filter(|folder| *folder != self.path && !folder.exists()) {
            disk::create_folder(folder).map_err(|e| Error::io(folder, "create", e))?;
        }
        let out = create_new(&path)?;
        let mut piece = vec![0; COPY.min(usize::try_from(source.len()).unwrap_or(COPY))];
        let mut at = 0;
        while at < source.len() {
            let n = piece.len().min(usize::try_from(source.len() - at).unwrap_or(COPY));
            source.read_exact(at, &mut piece[..n], "read to copy")?;
            disk::append(&out, &path, &piece[..n]).map_err(|e| Error::io(&path, "write", e))?;
            at += n as u64;
        }
        Ok(())
    }

    /// Makes every file durable and writes the manifest with `run` in it. The folder is then complete and can be
    /// opened and verified before [`Self::publish`].
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn seal(&mut self, run: Map<String, Value>) -> Result<()> {
        let mut files = BTreeMap::new();
        for file in files_under(&self.path)? {
            let path = self.path.join(&file);
            sync_file(&path)?;
            let digest = self.digest(&file, &path)?;
            files.insert(file, digest);
        }
        let manifest = Manifest::new(files, run);
        write_new(&self.path.join(MANIFEST_NAME), manifest.to_json().as_bytes())?;
        self.begun.output.mark_folder(&self.path)?;
        sync_folders(&self.path)?;
        self.sealed = Some(manifest);
        Ok(())
    }

    /// Moves the sealed folder to the target.
    ///
    /// # Errors
    /// [`Error::Output`] if the target changed since the work began, [`Error::Io`]. The old output is then still in
    /// place, unless only the final sync of the parent failed.
    pub fn publish(mut self) -> Result<Committed> {
        let Some(manifest) = self.sealed.take() else {
            return Err(Error::io(&self.path, "publish before sealing", io::ErrorKind::InvalidInput.into()));
        };
        let Begun { output, target, unpublished, .. } = &self.begun;
        let path = target.path();
        output.require_unchanged(&path, &self.before)?;
        unpublished.publish(|| self.replace(&path))?;
        self.published = true;
        // The work is finished and cannot be resumed, even if the sync fails.
        let synced = sync_folder(target.parent());
        let work = self.begun.work.path().to_owned();
        let leftover = remove_marked(&work).is_err().then_some(work);
        synced?;
        Ok(Committed { path, manifest, leftover })
    }

    /// [Seals](Self::seal) and [publishes](Self::publish) the folder.
    ///
    /// # Errors
    /// As [`Self::seal`] and [`Self::publish`].
    pub fn commit(mut self, run: Map<String, Value>) -> Result<Committed> {
        self.seal(run)?;
        self.publish()
    }

    fn digest(&self, file: &str, path: &Path) -> Result<FileDigest> {
        let len =
            failpoint::read(|| fs::metadata(path)).map_err(|e| Error::io(path, "read length", e))?.len();
        match self.recorded.get(file) {
            Some(&digest) if digest.len == len => Ok(digest),
            _ => hash_file(path),
        }
    }

    /// Moves the new folder to `path`. The old one, if any, is then in the work folder.
    fn replace(&self, path: &Path) -> Result<()> {
        let new = &self.path;
        if self.before.is_empty() {
            let put = match disk::rename_to_free(new, path) {
                // Empty folders may have appeared since, made by a process that was refused.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => {
                    remove_empty(path).and_then(|()| disk::rename_to_free(new, path))
                }
                put => put,
            };
            return put.map_err(|e| Error::io(path, "rename into place", e));
        }
        exchange(new, path, self.begun.work.path())
    }

    /// Removes what a new run of the same work writes again.
    fn remove_all_but_weights(&self) -> Result<()> {
        let work = self.begun.work.path();
        let exchanged = work.join(EXCHANGED);
        disk::remove_file_if_there(&exchanged).map_err(|e| Error::io(&exchanged, "clean up", e))?;
        if !self.path.is_dir() {
            return Ok(());
        }
        for entry in fs::read_dir(&self.path).map_err(|e| Error::io(&self.path, "list folder", e))? {
            let path = entry.map_err(|e| Error::io(&self.path, "list folder", e))?.path();
            if path.extension().is_none_or(|extension| extension != "safetensors") {
                disk::remove_all(&path).map_err(|e| Error::io(&path, "clean up", e))?;
            }
        }
        Ok(())
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if !self.published && !self.kept {
            // Drop cannot report errors; the next start removes leftovers.
            let _ = self.begun.work.remove();
        }
    }
}

/// Removes a folder and the folders in it; fails if there is a file.
fn remove_empty(path: &Path) -> io::Result<()> {
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        match entry.file_type()?.is_dir() {
            true => remove_empty(&entry.path())?,
            false => return Err(io::ErrorKind::DirectoryNotEmpty.into()),
        }
    }
    disk::remove_folder(path)
}

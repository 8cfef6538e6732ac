//! Paths that may be written, and rules for replacing outputs.
//!
//! Replacing deletes the old output. So a file or folder is replaced only if the same job wrote it and it is
//! unchanged since, or with `--overwrite`. Even then every file of a folder must be listed in its
//! `mantissa-manifest.json`.
//!
//! A job is a command line with its inputs. An output keeps the key of its job in the extended attribute
//! [`ATTRIBUTE`], not in its content: the same inputs give the same bytes wherever they are written. Copies and file
//! systems without attributes lose the key; such an output is replaced only with `--overwrite`.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::getxattr;

use crate::disk;
use crate::error::{Error, OutputFault, Result};
use crate::failpoint;
use crate::hash::FileDigest;
use crate::manifest::{MANIFEST_NAME, Manifest, files_under, verify_manifest};
use crate::nested::refuse_around;
use crate::target::resolve;

/// Name of the extended attribute that holds the key of the job that wrote a file or folder.
pub const ATTRIBUTE: &str = "user.mantissa.job";

/// Longest attribute read, in bytes.
const MAX_ATTRIBUTE: usize = 256;

/// Key of a job: a hash of a command line and of the identities of its inputs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobKey(String);

impl JobKey {
    /// Key of the job that `text` describes completely.
    pub fn of(text: &str) -> Self {
        let mut hex = FileDigest::of(text.as_bytes()).hex();
        hex.truncate(32);
        JobKey(hex)
    }

    /// The key as text.
    pub fn key(&self) -> &str {
        &self.0
    }
}

/// A path that may be written.
#[derive(Clone, Debug)]
pub struct Output {
    path: PathBuf,
    rule: Rule,
}

#[derive(Clone, Debug)]
enum Rule {
    New,
    Job { job: JobKey, overwrite: bool },
    Owned,
}

impl Output {
    /// Path at which nothing may exist except an empty folder.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Output { path: path.into(), rule: Rule::New }
    }

    /// Path written by `job`, which replaces only its own output or, with `overwrite`, any output.
    pub fn of_job(path: impl Into<PathBuf>, job: JobKey, overwrite: bool) -> Self {
        Output { path: path.into(), rule: Rule::Job { job, overwrite } }
    }

    /// Path inside a folder that only this process uses and has locked: a training run, a work folder. Anything there
    /// may be replaced, and no further lock is taken.
    pub fn owned(path: impl Into<PathBuf>) -> Self {
        Output { path: path.into(), rule: Rule::Owned }
    }

    /// The path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Path `path` under the same rule, for a file that belongs to this output, such as the manifest beside a GGUF
    /// file.
    pub fn at(&self, path: impl Into<PathBuf>) -> Self {
        Output { path: path.into(), rule: self.rule.clone() }
    }

    /// Checks early, before hours of work, that a folder may be written here.
    ///
    /// # Errors
    /// As [`crate::Staging::begin`], which checks again.
    pub fn require_folder_writable(&self) -> Result<()> {
        self.check_folder(&resolve(&self.path)?).map(drop)
    }

    pub(crate) fn is_owned(&self) -> bool {
        matches!(self.rule, Rule::Owned)
    }

    /// Key of the writer, for the mark of a work folder.
    pub(crate) fn key(&self) -> &str {
        match &self.rule {
            Rule::Job { job, .. } => job.key(),
            Rule::New | Rule::Owned => "",
        }
    }

    /// True if the file at `path` is an output of this very job, unchanged since.
    pub(crate) fn wrote_file(&self, path: &Path) -> bool {
        let Rule::Job { job, .. } = &self.rule else { return false };
        fs::metadata(path).is_ok_and(|found| attribute(path).as_deref() == Some(&*file_mark(job, &found)))
    }

    /// True if the folder at `path` carries the key of this very job.
    pub(crate) fn marks(&self, path: &Path) -> bool {
        matches!(&self.rule, Rule::Job { job, .. } if attribute(path).as_deref() == Some(job.key()))
    }

    /// True if the folder at `path` is an output of this very job, unchanged since.
    fn wrote_folder(&self, path: &Path) -> Result<bool> {
        Ok(self.marks(path) && verify_manifest(path)?.is_empty())
    }

    /// Sets the key of the job on a file that is written and not yet in place. Call it before the last fsync: after a
    /// power cut, an output without its key could not be replaced by its own job.
    pub(crate) fn mark_file(&self, staged: &Path) -> Result<()> {
        let Rule::Job { job, .. } = &self.rule else { return Ok(()) };
        let found = fs::metadata(staged).map_err(|e| Error::io(staged, "look up", e))?;
        mark(staged, &file_mark(job, &found))
    }

    /// Sets the key of the job on a folder that is written and not yet in place, before its last fsync.
    pub(crate) fn mark_folder(&self, staged: &Path) -> Result<()> {
        match &self.rule {
            Rule::Job { job, .. } => mark(staged, job.key()),
            Rule::New | Rule::Owned => Ok(()),
        }
    }

    /// Refuses to write the folder `path` over anything that may not be replaced; returns what may be.
    ///
    /// # Errors
    /// [`Error::Output`], [`Error::WrongKind`] if it is not a folder, [`Error::Io`].
    pub(crate) fn check_folder(&self, path: &Path) -> Result<Found> {
        match fs::symlink_metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Found::nothing()),
            Err(error) => return Err(Error::io(path, "look up", error)),
            Ok(metadata) if metadata.is_dir() => {}
            Ok(_) => {
                let (found, expected) = ("a file", "a folder or nothing");
                return Err(Error::WrongKind { path: path.to_owned(), found, expected });
            }
        }
        if !self.is_owned() {
            refuse_around(path, || files_under(path))?;
        }
        let found = Found::folder(path)?;
        match &self.rule {
            _ if found.is_empty() => {}
            Rule::Owned => {}
            Rule::Job { overwrite: true, .. } => require_listed(path, &found)?,
            _ if self.wrote_folder(path)? => {}
            _ => {
                // What `--overwrite` would refuse as well is said at once.
                require_listed(path, &found)?;
                return Err(Error::output(path, OutputFault::Exists { what: "a folder" }));
            }
        }
        Ok(found)
    }

    /// Refuses to write the file `path` over anything that may not be replaced; returns what may be.
    ///
    /// # Errors
    /// As [`Self::check_folder`].
    pub(crate) fn check_file(&self, path: &Path) -> Result<Found> {
        let Some(found) = require_file_or_nothing(path)? else { return Ok(Found::nothing()) };
        match &self.rule {
            Rule::Owned | Rule::Job { overwrite: true, .. } => {}
            _ if self.wrote_file(path) => {}
            _ => return Err(Error::output(path, OutputFault::Exists { what: "a file" })),
        }
        Ok(Found { there: true, files: vec![(String::new(), identity(&found))] })
    }

    /// Refuses the path if it has changed from `found`, the state checked before the work began.
    ///
    /// # Errors
    /// [`OutputFault::Changed`], [`Error::Io`].
    pub(crate) fn require_unchanged(&self, path: &Path, before: &Found) -> Result<()> {
        let now = match fs::symlink_metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Found::nothing(),
            Err(error) => return Err(Error::io(path, "look up", error)),
            Ok(found) if found.is_dir() => Found::folder(path)?,
            Ok(found) => Found { there: true, files: vec![(String::new(), identity(&found))] },
        };
        // A process that was refused because its output lies inside this one may have made the folder.
        if self.is_owned() || now == *before || (now.is_empty() && before.is_empty()) {
            return Ok(());
        }
        Err(Error::output(path, OutputFault::Changed))
    }
}

/// Files at an output's path, each with its identity: inode, length and time of change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    /// True if anything exists there, even an empty folder.
    pub(crate) there: bool,
    files: Vec<(String, [i64; 4])>,
}

impl Found {
    /// True if no file is lost by replacing it: nothing, or an empty folder.
    pub(crate) fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    fn nothing() -> Self {
        Found { there: false, files: Vec::new() }
    }

    fn folder(path: &Path) -> Result<Self> {
        let names = files_under(path)?;
        let with_identity = |name: String| {
            let file = path.join(&name);
            let found = fs::symlink_metadata(&file).map_err(|e| Error::io(&file, "look up", e))?;
            Ok((name, identity(&found)))
        };
        Ok(Found { there: true, files: names.into_iter().map(with_identity).collect::<Result<_>>()? })
    }
}

fn identity(found: &fs::Metadata) -> [i64; 4] {
    [found.ino().cast_signed(), found.len().cast_signed(), found.mtime(), found.mtime_nsec()]
}

/// True if the file at `path` is an output of some job, unchanged since.
pub(crate) fn is_output(path: &Path) -> bool {
    let Some(mark) = attribute(path) else { return false };
    let (Some((job, _)), Ok(found)) = (mark.split_once(' '), fs::metadata(path)) else { return false };
    mark == file_mark(&JobKey(job.to_owned()), &found)
}

/// Value of a file's attribute: its job, and length and time of change, which differ once it is edited.
fn file_mark(job: &JobKey, found: &fs::Metadata) -> String {
    format!("{} {} {}.{:09}", job.key(), found.len(), found.mtime(), found.mtime_nsec())
}

fn attribute(path: &Path) -> Option<String> {
    let mut bytes = [0; MAX_ATTRIBUTE];
    let len = getxattr(path, ATTRIBUTE, &mut bytes[..]).ok()?;
    String::from_utf8(bytes.get(..len)?.to_vec()).ok()
}

/// Marks an output as ours. Without attributes on the file system it is replaced only with `--overwrite`.
fn mark(path: &Path, text: &str) -> Result<()> {
    disk::mark(path, ATTRIBUTE, text).map_err(|e| Error::io(path, "set an attribute", e))
}

/// Refuses to replace a folder unless its manifest lists every file in it.
fn require_listed(path: &Path, found: &Found) -> Result<()> {
    if !found.files.iter().any(|(name, _)| name == MANIFEST_NAME) {
        return Err(Error::output(path, OutputFault::NoManifest));
    }
    let listed = Manifest::read(path)?.files;
    let ours = |name: &str| name == MANIFEST_NAME || listed.contains_key(name);
    match found.files.iter().find(|(name, _)| !ours(name)) {
        Some((entry, _)) => Err(Error::output(path, OutputFault::NotOurs { entry: entry.clone() })),
        None => Ok(()),
    }
}

/// Looks up the file at `path`; fails for anything other than a file.
pub(crate) fn require_file_or_nothing(path: &Path) -> Result<Option<fs::Metadata>> {
    match failpoint::read(|| fs::symlink_metadata(path)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Error::io(path, "look up", error)),
        Ok(metadata) if metadata.is_file() => Ok(Some(metadata)),
        Ok(metadata) => {
            let found = if metadata.is_dir() { "a folder" } else { "a device, pipe or socket" };
            Err(Error::WrongKind { path: path.to_owned(), found, expected: "a file or nothing" })
        }
    }
}

//! The files of a GGUF output until they are in their places: those of weights, and `quality.json` and manifest beside the first.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use mantissa_store::gguf::split_paths;
use mantissa_store::{Error, MANIFEST_NAME, StagedFile, beside, write_file_atomic};

use crate::error::Result;
use crate::quality::QUALITY_NAME;

/// Files being written.
pub(super) struct Output {
    paths: Vec<PathBuf>,
    weights: Vec<StagedFile>,
    beside: [PathBuf; 2],
    staged_beside: [StagedFile; 2],
}

impl Output {
    /// Begins the `count` files of the model `out`.
    ///
    /// # Errors
    /// As [`StagedFile::begin`].
    pub(super) fn begin(out: &Path, count: usize) -> Result<Self> {
        let paths = split_paths(out, count)?;
        let weights =
            paths.iter().map(|path| StagedFile::begin(path)).collect::<std::result::Result<_, Error>>()?;
        let beside = [QUALITY_NAME, MANIFEST_NAME].map(|name| beside(&paths[0], name));
        let staged_beside = [StagedFile::begin(&beside[0])?, StagedFile::begin(&beside[1])?];
        Ok(Output { paths, weights, beside, staged_beside })
    }

    /// Where the files of weights are written.
    pub(super) fn staged(&self) -> Vec<&Path> {
        self.weights.iter().map(StagedFile::path).collect()
    }

    /// The file that a model is opened by, in its place.
    pub(super) fn first(&self) -> &Path {
        &self.paths[0]
    }

    /// Names of the files of weights.
    pub(super) fn names(&self) -> Vec<String> {
        let name =
            |path: &PathBuf| path.file_name().and_then(|name| name.to_str()).unwrap_or_default().to_owned();
        self.paths.iter().map(name).collect()
    }

    /// Puts the weights, and then what lies beside them, in place of the old ones. One file is exchanged in one step. Of several
    /// the old first goes first and the new first comes last: a kill between them leaves a model that does not open, never parts of
    /// two.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub(super) fn publish(self, quality: &[u8], manifest: &[u8]) -> Result<()> {
        let Output { paths, weights, beside, staged_beside } = self;
        staged_beside[0].write(quality)?;
        staged_beside[1].write(manifest)?;
        // What lies beside another file's content would be a lie for as long as it stands there.
        let old = beside.each_ref().map(|path| std::fs::read(path).ok());
        beside.iter().rev().try_for_each(|path| remove(path))?;
        let in_place = || std::fs::metadata(&paths[0]).ok().map(|found| found.ino());
        let before = in_place();
        if weights.len() > 1 {
            remove(&paths[0])?;
        }
        if let Err(error) = weights.into_iter().rev().try_for_each(StagedFile::commit) {
            drop(staged_beside);
            if before == in_place() {
                for (path, old) in beside.iter().zip(old) {
                    // The error that is told is the first.
                    let _ = old.map(|old| write_file_atomic(path, &old));
                }
            }
            return Err(error.into());
        }
        Ok(staged_beside.into_iter().try_for_each(StagedFile::commit)?)
    }
}

/// Removes a file, where there is one.
fn remove(path: &Path) -> Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(Error::Io { path: path.to_owned(), operation: "remove the old one", error }.into())
        }
        _ => Ok(()),
    }
}

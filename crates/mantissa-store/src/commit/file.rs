//! One file as an output.

use std::path::{Path, PathBuf};

use super::begun::Begun;
use super::durable::{sync_file, sync_folder, write_new};
use crate::disk;
use crate::error::{Error, Result};
use crate::nested::Form;
use crate::output::{Found, Output};

/// An output file being written. Dropped without [`Self::commit`], it removes what was written.
#[derive(Debug)]
pub struct StagedFile {
    begun: Begun,
    path: PathBuf,
    before: Found,
}

impl StagedFile {
    /// Begins writing the file `output`; creates missing parent folders.
    ///
    /// # Errors
    /// [`Error::Output`] if another process writes it or an existing file may not be replaced, [`Error::WrongKind`]
    /// if something other than a regular file exists there, [`Error::Io`].
    pub fn begin(output: &Output) -> Result<Self> {
        let begun = Begun::new(output, Form::File, output.key(), &mut |_| false)?;
        begun.create_new_folder()?;
        let path = begun.new_path().join(begun.target.name());
        let before = match output.check_file(&begun.target.path()) {
            Ok(before) => before,
            Err(error) => {
                // Nothing was written yet; the original error matters more.
                let _ = begun.work.remove();
                return Err(error);
            }
        };
        Ok(Self { begun, path, before })
    }

    /// The path to write to; no file is there yet.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes the whole file, which must not exist yet, and makes it durable.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn write(&self, bytes: &[u8]) -> Result<()> {
        write_new(&self.path, bytes)
    }

    /// Makes the file durable and moves it to the target.
    ///
    /// # Errors
    /// [`Error::Output`] if the target changed since the work began, [`Error::Io`]. The old file is then still in
    /// place, unless only the final sync of the parent failed.
    pub fn commit(self) -> Result<()> {
        let Begun { output, target, unpublished, .. } = &self.begun;
        let path = target.path();
        output.mark_file(&self.path)?;
        sync_file(&self.path)?;
        output.require_unchanged(&path, &self.before)?;
        let put = || match self.before.there {
            true => disk::rename(&self.path, &path),
            false => disk::rename_to_free(&self.path, &path),
        };
        // The drop removes the work folder, which now holds only its mark.
        unpublished.publish(put).map_err(|e| Error::io(&path, "rename into place", e))?;
        sync_folder(target.parent())
    }
}

impl Drop for StagedFile {
    fn drop(&mut self) {
        // Drop cannot report errors; the next start removes leftovers.
        let _ = self.begun.work.remove();
    }
}

/// Writes one file so that a reader sees its old content or all of the new.
///
/// # Errors
/// As [`StagedFile::begin`] and [`StagedFile::commit`].
pub fn write_file_atomic(output: &Output, bytes: &[u8]) -> Result<()> {
    let staged = StagedFile::begin(output)?;
    staged.write(bytes)?;
    staged.commit()
}

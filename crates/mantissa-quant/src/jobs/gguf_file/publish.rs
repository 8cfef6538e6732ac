//! Files of a GGUF output until they are in place: weights, and `quality.json` and manifest beside the first.

use std::fs;
use std::path::{Path, PathBuf};

use mantissa_store::gguf::{is_part_of, split_paths};
use mantissa_store::{Error, FileSet, MANIFEST_NAME, StagedSet, beside, disk};

use crate::error::Result;
use crate::quality::QUALITY_NAME;

/// Files being written, in a work folder beside the output.
pub(super) struct Output {
    staged: StagedSet,
    parts: Vec<String>,
    beside: [String; 2],
}

impl Output {
    /// Starts the `count` files of the model `out`.
    ///
    /// # Errors
    /// Errors of [`StagedSet::begin`].
    pub(super) fn begin(out: &mantissa_store::Output, count: usize) -> Result<Self> {
        let paths = split_paths(out.path(), count)?;
        let parts: Vec<String> = paths.iter().map(|path| name_of(path)).collect();
        let names = [QUALITY_NAME, MANIFEST_NAME].map(|name| name_of(&beside(&paths[0], name)));
        let set = FileSet { parts: parts.clone(), beside: names.to_vec() };
        let staged = StagedSet::begin(out, set, &|| obsolete(out.path(), &parts))?;
        Ok(Output { staged, parts, beside: names })
    }

    /// Returns the paths of the staged weight files.
    pub(super) fn staged(&self) -> Vec<PathBuf> {
        self.parts.iter().map(|name| self.staged.path().join(name)).collect()
    }

    /// Returns the final path of the file that opens the model.
    pub(super) fn first(&self) -> PathBuf {
        self.staged.place(&self.parts[0])
    }

    /// Returns the names of the weight files.
    pub(super) fn names(&self) -> Vec<String> {
        self.parts.clone()
    }

    /// Writes the files beside the weights and syncs all files to disk.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub(super) fn seal(&self, quality: &[u8], manifest: &[u8]) -> Result<()> {
        self.staged.write(&self.beside[0], quality)?;
        self.staged.write(&self.beside[1], manifest)?;
        Ok(self.staged.seal()?)
    }

    /// Puts the weights, then the files beside them, in place of the old ones. Returns the work folder if it could not
    /// be removed.
    ///
    /// # Errors
    /// Errors of [`StagedSet::publish`].
    pub(super) fn publish(self) -> Result<Option<PathBuf>> {
        Ok(self.staged.publish()?)
    }
}

/// Returns existing files of the model `out` that are not among `parts`: an older output with another number of parts,
/// and the files beside its first. The first parts come first.
fn obsolete(out: &Path, parts: &[String]) -> std::result::Result<Vec<String>, Error> {
    let own = name_of(out);
    let parent = disk::folder_of(out);
    let entries = match fs::read_dir(parent) {
        Ok(entries) => entries,
        // The folder is created with the output.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => {
            return Err(Error::Io { path: parent.to_owned(), operation: "list folder", error });
        }
    };
    let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    let names: Vec<String> = names.collect();
    let other = |name: &&String| (**name == own || is_part_of(&own, name)) && !parts.contains(name);
    let mut files: Vec<String> = names.iter().filter(other).cloned().collect();
    files.sort();
    let beside_them: Vec<String> = files
        .iter()
        .flat_map(|file| [QUALITY_NAME, MANIFEST_NAME].map(|name| format!("{file}.{name}")))
        .filter(|name| names.contains(name))
        .collect();
    files.extend(beside_them);
    Ok(files)
}

fn name_of(path: &Path) -> String {
    path.file_name().and_then(|name| name.to_str()).unwrap_or_default().to_owned()
}

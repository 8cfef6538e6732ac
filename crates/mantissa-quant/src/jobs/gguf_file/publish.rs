//! The files of a GGUF output until they are in their places: those of weights, and `quality.json` and manifest beside the first.

use std::fs;
use std::path::{Path, PathBuf};

use mantissa_store::gguf::{is_part_of, split_paths};
use mantissa_store::{Error, FileSet, MANIFEST_NAME, StagedSet, beside};

use crate::error::Result;
use crate::quality::QUALITY_NAME;

/// Files being written, in a work folder beside their places.
pub(super) struct Output {
    staged: StagedSet,
    parts: Vec<String>,
    beside: [String; 2],
}

impl Output {
    /// Begins the `count` files of the model `out`.
    ///
    /// # Errors
    /// As [`StagedSet::begin`].
    pub(super) fn begin(out: &mantissa_store::Output, count: usize) -> Result<Self> {
        let paths = split_paths(out.path(), count)?;
        let parts: Vec<String> = paths.iter().map(|path| name_of(path)).collect();
        let names = [QUALITY_NAME, MANIFEST_NAME].map(|name| name_of(&beside(&paths[0], name)));
        let set = FileSet { parts: parts.clone(), beside: names.to_vec() };
        let staged = StagedSet::begin(out, set, &|| obsolete(out.path(), &parts))?;
        Ok(Output { staged, parts, beside: names })
    }

    /// Paths at which the weight files are written.
    pub(super) fn staged(&self) -> Vec<PathBuf> {
        self.parts.iter().map(|name| self.staged.path().join(name)).collect()
    }

    /// The file that the model is opened by, in its place.
    pub(super) fn first(&self) -> PathBuf {
        self.staged.place(&self.parts[0])
    }

    /// Names of the files of weights.
    pub(super) fn names(&self) -> Vec<String> {
        self.parts.clone()
    }

    /// Writes what lies beside the weights and makes all files durable.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub(super) fn seal(&self, quality: &[u8], manifest: &[u8]) -> Result<()> {
        self.staged.write(&self.beside[0], quality)?;
        self.staged.write(&self.beside[1], manifest)?;
        Ok(self.staged.seal()?)
    }

    /// Puts the weights, and then what lies beside them, in place of the old ones; gives the work folder where that could not be
    /// removed.
    ///
    /// # Errors
    /// As [`StagedSet::publish`].
    pub(super) fn publish(self) -> Result<Option<PathBuf>> {
        Ok(self.staged.publish()?)
    }
}

/// Names of files of the model `out` that exist and are none of `parts`: of an older output in another number of parts, with what
/// lies beside its first. Parts that are opened first come first.
fn obsolete(out: &Path, parts: &[String]) -> std::result::Result<Vec<String>, Error> {
    let own = name_of(out);
    let parent = out.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let entries = match fs::read_dir(parent) {
        Ok(entries) => entries,
        // It is created with the output.
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

//! Output paths: resolution, and overlap with inputs.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};

use crate::disk;
use crate::error::{Error, OutputFault, Result};
use crate::failpoint;

/// Word between the name of an output and the purpose of what lies beside it.
const SIBLING: &str = ".mantissa-";

/// Refuses an output that is the input, lies inside it or contains it. Neither the output nor its parents need exist.
/// Links are resolved first.
///
/// # Errors
/// [`Error::Output`] if they overlap, [`Error::Missing`] if the input does not exist, [`Error::Io`].
pub fn refuse_overlap(input: &Path, output: &Path) -> Result<()> {
    let from =
        fs::canonicalize(input).map_err(|e| Error::opening(input, "an existing input", "resolve", e))?;
    let to = resolve(output)?;
    let relation = if to == from {
        "is"
    } else if to.starts_with(&from) {
        "lies inside"
    } else if from.starts_with(&to) {
        "contains"
    } else {
        return Ok(());
    };
    let input = input.to_string_lossy().into_owned();
    Err(Error::output(output, OutputFault::Overlap { relation, input }))
}

/// Output path split into an existing, canonical folder and a name in it.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    parent: PathBuf,
    name: OsString,
}

impl Target {
    /// Resolves a path, following a link, and creates its parent folders.
    pub(crate) fn prepare(path: &Path) -> Result<Self> {
        let resolved = resolve(path)?;
        let (Some(parent), Some(name)) = (resolved.parent(), resolved.file_name()) else {
            return Err(Error::output(path, OutputFault::NoName));
        };
        disk::create_folders(parent).map_err(|e| Error::io(parent, "create folder", e))?;
        Ok(Self { parent: parent.to_owned(), name: name.to_owned() })
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.parent.join(&self.name)
    }

    pub(crate) fn parent(&self) -> &Path {
        &self.parent
    }

    /// `.NAME.mantissa-SUFFIX`, beside the target.
    pub(crate) fn sibling(&self, suffix: &str) -> PathBuf {
        self.parent.join(self.sibling_name(suffix))
    }

    /// The last part of the path.
    pub(crate) fn name(&self) -> String {
        self.name.to_string_lossy().into_owned()
    }

    /// Folders `.NAME.mantissa-PURPOSE-PID` and `.NAME.mantissa-PURPOSE-PID-N` of any process, sorted. The name proves nothing.
    pub(crate) fn siblings(&self, purpose: &str) -> Result<Vec<PathBuf>> {
        let prefix = self.sibling_name(&format!("{purpose}-"));
        let prefix = prefix.as_encoded_bytes();
        let numbers = |rest: &[u8]| {
            rest.split(|&b| b == b'-').all(|part| !part.is_empty() && part.iter().all(u8::is_ascii_digit))
        };
        let list_error = |e| Error::io(&self.parent, "list folder", e);
        let mut found = Vec::new();
        for entry in failpoint::read(|| fs::read_dir(&self.parent)).map_err(list_error)? {
            let entry = entry.map_err(list_error)?;
            let name = entry.file_name();
            let named = name.as_encoded_bytes().strip_prefix(prefix).is_some_and(numbers);
            if named && entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                found.push(self.parent.join(name));
            }
        }
        found.sort();
        Ok(found)
    }

    fn sibling_name(&self, suffix: &str) -> OsString {
        let mut name = OsString::from(".");
        name.push(&self.name);
        name.push(SIBLING);
        name.push(suffix);
        name
    }
}

/// True if a work folder or a lock of any process lies beside `output`. The name proves nothing.
pub fn has_siblings(output: &Path) -> bool {
    let mut start = OsString::from(".");
    start.push(output.file_name().unwrap_or_default());
    start.push(SIBLING);
    let mut entries = fs::read_dir(disk::folder_of(output)).into_iter().flatten().flatten();
    entries.any(|entry| entry.file_name().as_encoded_bytes().starts_with(start.as_encoded_bytes()))
}

/// Canonical form of `path`, whose last parts need not exist.
pub(crate) fn resolve(path: &Path) -> Result<PathBuf> {
    let absolute = std::path::absolute(path).map_err(|e| Error::io(path, "resolve", e))?;
    let mut missing: Vec<OsString> = Vec::new();
    let mut existing = absolute.as_path();
    loop {
        match fs::symlink_metadata(existing) {
            Ok(_) => break,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(Error::io(path, "resolve", error)),
        }
        // `..` after a missing part is undefined, and `file_name` is None for it.
        let last = match existing.components().next_back() {
            Some(Component::Normal(name)) => name.to_owned(),
            _ => return Err(Error::output(path, OutputFault::NoName)),
        };
        let Some(parent) = existing.parent() else {
            return Err(Error::output(path, OutputFault::NoName));
        };
        missing.push(last);
        existing = parent;
    }
    // A dangling link exists and does not resolve: fail instead of writing through it.
    let mut resolved = fs::canonicalize(existing).map_err(|e| Error::io(path, "resolve link", e))?;
    resolved.extend(missing.into_iter().rev());
    Ok(resolved)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use super::*;

    #[test]
    fn paths_resolve_without_existing() {
        let dir = tempfile::tempdir().unwrap();
        let base = fs::canonicalize(dir.path()).unwrap();
        assert_eq!(resolve(&dir.path().join("a/b")).unwrap(), base.join("a/b"));
        assert!(matches!(resolve(&dir.path().join("a/../b")), Err(Error::Output { .. })));
        std::os::unix::fs::symlink("nowhere", dir.path().join("link")).unwrap();
        assert!(matches!(resolve(&dir.path().join("link")), Err(Error::Io { .. })));
    }
}

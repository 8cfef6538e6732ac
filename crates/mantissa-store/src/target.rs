//! Output paths: where they really are, whether they touch the input, and what may be replaced there.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};

use crate::error::{Error, OutputFault, Result};
use crate::failpoint;
use crate::manifest::{MANIFEST_NAME, Manifest, files_under};

/// Refuses an output that is the input, lies inside it or contains it; neither the output nor its parents need
/// exist. Links are resolved first.
///
/// # Errors
/// [`Error::Output`] when they overlap, [`Error::Missing`] when the input does not exist, [`Error::Io`].
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

/// An output path taken apart: an existing, canonical folder and a name in it.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    parent: PathBuf,
    name: OsString,
}

impl Target {
    /// Resolves a path, through a link where it is one, and creates its parent folders.
    pub(crate) fn prepare(path: &Path) -> Result<Self> {
        let resolved = resolve(path)?;
        let (Some(parent), Some(name)) = (resolved.parent(), resolved.file_name()) else {
            return Err(Error::output(path, OutputFault::NoName));
        };
        failpoint::write(|| fs::create_dir_all(parent)).map_err(|e| Error::io(parent, "create folder", e))?;
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

    /// Siblings `.NAME.mantissa-KIND-PID` of any process, sorted.
    pub(crate) fn siblings_of_any_process(&self, kind: &str) -> Result<Vec<PathBuf>> {
        let prefix = self.sibling_name(&format!("{kind}-"));
        let prefix = prefix.as_encoded_bytes();
        let list_error = |e| Error::io(&self.parent, "list folder", e);
        let mut found = Vec::new();
        for entry in failpoint::read(|| fs::read_dir(&self.parent)).map_err(list_error)? {
            let name = entry.map_err(list_error)?.file_name();
            let pid = name.as_encoded_bytes().strip_prefix(prefix);
            if pid.is_some_and(|pid| !pid.is_empty() && pid.iter().all(u8::is_ascii_digit)) {
                found.push(self.parent.join(name));
            }
        }
        found.sort();
        Ok(found)
    }

    fn sibling_name(&self, suffix: &str) -> OsString {
        let mut name = OsString::from(".");
        name.push(&self.name);
        name.push(format!(".mantissa-{suffix}"));
        name
    }
}

/// Whether a folder at `path` may be replaced: nothing there, an empty folder, or a folder of which every file is
/// either listed in its manifest or, beside a `config.json`, one that model folders hold.
///
/// Replacing deletes what was there, so one file of unknown origin is enough to refuse.
pub(crate) fn require_replaceable(path: &Path) -> Result<()> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(Error::io(path, "look up", error)),
        Ok(metadata) if metadata.is_dir() => {}
        Ok(_) => {
            let (found, expected) = ("a file", "a folder or nothing");
            return Err(Error::WrongKind { path: path.to_owned(), found, expected });
        }
    }
    let files = files_under(path)?;
    let has = |name: &str| files.binary_search_by(|file| file.as_str().cmp(name)).is_ok();
    if files.is_empty() {
        return Ok(());
    }
    if !has(MANIFEST_NAME) && !has("config.json") {
        return Err(Error::output(path, OutputFault::NotAModel));
    }
    let listed = if has(MANIFEST_NAME) { Manifest::read(path)?.files } else { Default::default() };
    let ours = |file: &str| file == MANIFEST_NAME || listed.contains_key(file) || is_model_file(file);
    match files.iter().find(|file| !ours(file)) {
        Some(entry) => Err(Error::output(path, OutputFault::NotOurs { entry: entry.clone() })),
        None => Ok(()),
    }
}

/// Files that Hugging Face model folders hold and that a download brings back.
fn is_model_file(file: &str) -> bool {
    const NAMES: [&str; 16] = [
        ".gitattributes",
        "LICENSE",
        "README.md",
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        "config.json",
        "generation_config.json",
        "merges.txt",
        "preprocessor_config.json",
        "quantization_config.json",
        "quantize_config.json",
        "recipe.yaml",
        "special_tokens_map.json",
        "tokenizer_config.json",
        "vocab.json",
    ];
    let weights = [".safetensors", ".safetensors.index.json"];
    let tokenizer = ["tokenizer.json", "tokenizer.model"];
    !file.contains('/') && (NAMES.contains(&file) || weights.iter().any(|end| file.ends_with(end)))
        || tokenizer.contains(&file)
        || file.starts_with(".cache/huggingface/")
}

/// The canonical path of `path`, of which the last parts need not exist.
fn resolve(path: &Path) -> Result<PathBuf> {
    let absolute = std::path::absolute(path).map_err(|e| Error::io(path, "resolve", e))?;
    let mut missing: Vec<OsString> = Vec::new();
    let mut existing = absolute.as_path();
    loop {
        match fs::symlink_metadata(existing) {
            Ok(_) => break,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(Error::io(path, "resolve", error)),
        }
        // `..` after a missing part has no meaning yet, and `file_name` is None for it.
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
    // A dangling link exists and does not resolve: an error, where writing through it would surprise.
    let mut resolved = fs::canonicalize(existing).map_err(|e| Error::io(path, "resolve link", e))?;
    resolved.extend(missing.into_iter().rev());
    Ok(resolved)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use super::*;

    #[test]
    fn model_files_are_known_by_name() {
        for file in ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"] {
            assert!(is_model_file(file), "{file}");
        }
        for file in ["tokenizer.json", ".cache/huggingface/download/x"] {
            assert!(is_model_file(file), "{file}");
        }
        for file in ["thesis.tex", ".git/config", "src/config.json", "notes.json", "deep/model.safetensors"] {
            assert!(!is_model_file(file), "{file}");
        }
    }

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

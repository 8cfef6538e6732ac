//! Base of an adapter that fits no other: LoftQ (Li et al. 2023, arXiv:2310.08659) changes the weights that it makes the
//! adapter for. The manifest beside the adapter records where the base was written and the SHA-256 of its weights.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use crate::error::{Error, Result};
use crate::hash::hash_file;
use crate::manifest::{MANIFEST_NAME, Manifest};
use crate::shard_plan::SINGLE_NAME;

/// Field of the manifest's run.
const FIELD: &str = "own_base";

/// Base that an adapter was made for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnBase {
    /// Folder that it was written to.
    pub path: PathBuf,
    /// SHA-256 of its weights in hexadecimal.
    pub sha256: String,
}

impl OwnBase {
    /// Describes the base in the folder `dir`, whose weights are one file.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn of(dir: &Path) -> Result<Self> {
        Ok(OwnBase { path: dir.to_owned(), sha256: digest(dir)? })
    }

    /// Adds the base to the fields of a run.
    pub fn record(&self, run: &mut Map<String, Value>) {
        let fields = json!({ "path": self.path.display().to_string(), "sha256": self.sha256 });
        run.insert(FIELD.to_owned(), fields);
    }

    /// Returns the base recorded beside the adapter in `dir`; `None` if it fits the model that it was trained on.
    ///
    /// # Errors
    /// As [`Manifest::read`]; [`Error::Field`] for a record that is malformed.
    pub fn recorded(dir: &Path) -> Result<Option<Self>> {
        let path = dir.join(MANIFEST_NAME);
        if !path.is_file() {
            return Ok(None);
        }
        let manifest = Manifest::read(dir)?;
        let Some(fields) = manifest.run.get(FIELD) else { return Ok(None) };
        let text = |name: &str| fields.get(name).and_then(Value::as_str).map(str::to_owned);
        match (text("path"), text("sha256")) {
            (Some(path), Some(sha256)) => Ok(Some(OwnBase { path: path.into(), sha256 })),
            _ => {
                let hint = "fix: write the adapter again with mantissa finetune";
                Err(Error::field(&path, FIELD, "another value", "an object of path and sha256", hint))
            }
        }
    }

    /// True if the model folder `dir` has the weights of this base.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn is_at(&self, dir: &Path) -> Result<bool> {
        Ok(dir.join(SINGLE_NAME).is_file() && digest(dir)? == self.sha256)
    }
}

/// Returns the hash of the weights in a folder: as its manifest has it, else of the file.
fn digest(dir: &Path) -> Result<String> {
    let known = || Some(Manifest::read(dir).ok()?.files.get(SINGLE_NAME)?.hex());
    match known() {
        Some(hash) => Ok(hash),
        None => Ok(hash_file(&dir.join(SINGLE_NAME))?.hex()),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_base_is_recorded_and_found_by_its_weights() {
        let temp = tempfile::tempdir().unwrap();
        let (base, other, adapter) = (temp.path().join("b"), temp.path().join("o"), temp.path().join("a"));
        for dir in [&base, &other, &adapter] {
            std::fs::create_dir(dir).unwrap();
        }
        std::fs::write(base.join(SINGLE_NAME), "one").unwrap();
        std::fs::write(other.join(SINGLE_NAME), "two").unwrap();
        let own = OwnBase::of(&base).unwrap();
        assert_eq!(OwnBase::recorded(&adapter).unwrap(), None);
        let mut run = Map::new();
        own.record(&mut run);
        let manifest = Manifest::new(Default::default(), run.clone());
        std::fs::write(adapter.join(MANIFEST_NAME), manifest.to_json()).unwrap();
        assert_eq!(OwnBase::recorded(&adapter).unwrap(), Some(own.clone()));
        assert!(own.is_at(&base).unwrap() && !own.is_at(&other).unwrap() && !own.is_at(&adapter).unwrap());
        run.insert(FIELD.to_owned(), json!(3));
        let manifest = Manifest::new(Default::default(), run);
        std::fs::write(adapter.join(MANIFEST_NAME), manifest.to_json()).unwrap();
        assert!(OwnBase::recorded(&adapter).unwrap_err().to_string().contains("own_base"));
    }
}

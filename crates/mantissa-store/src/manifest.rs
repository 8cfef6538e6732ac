//! `mantissa-manifest.json`: length and SHA-256 of every file of an output folder, written last.
//!
//! A folder with a manifest was complete when it got its name. The manifest holds no time and no host, so that the
//! same inputs give the same bytes. Its field `sha256` is a digest of its other fields, so that a changed name or number
//! is found like a changed file.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Component, Path, PathBuf};

use serde_json::{Map, Value, json};

use crate::error::{Error, Result};
use crate::failpoint;
use crate::hash::{FileDigest, hash_file};
use crate::json;
use crate::shown::Shown;

/// File name of the manifest within an output folder.
pub const MANIFEST_NAME: &str = "mantissa-manifest.json";

/// Longest manifest read, in bytes.
const MAX_MANIFEST_BYTES: u64 = 64 << 20;

/// Field of a run that holds the runs before it.
const HISTORY: &str = "history";

/// The layout version that this crate writes, and the only one it reads.
const VERSION: u64 = 1;

/// Field with the digest of the others.
const SEAL: &str = "sha256";

/// Program and version, as files and replies name what made them.
pub const TOOL: &str = concat!("mantissa ", env!("CARGO_PKG_VERSION"));

/// Fields of a manifest. A line of its own after `tool`, [`SEAL`] is left out of recorded hashes such as the hashes of files.
const FIELDS: [&str; 5] = ["version", "tool", SEAL, "files", "run"];

/// Path of the manifest of the model folder or single file `model`.
pub fn manifest_path(model: &Path) -> PathBuf {
    companion_path(model, MANIFEST_NAME)
}

/// Path of the file `name` of the model folder or single file `model`, which need not exist: in the folder, or
/// [beside the file](beside).
pub fn companion_path(model: &Path, name: &str) -> PathBuf {
    let is_file = || model.is_file() || model.extension().is_some_and(|extension| extension == "gguf");
    if !model.is_dir() && is_file() { beside(model, name) } else { model.join(name) }
}

/// Path of the file `name` that belongs to the single file `model`: `model.name`.
pub fn beside(model: &Path, name: &str) -> PathBuf {
    let mut path = model.as_os_str().to_owned();
    path.push(".");
    path.push(name);
    path.into()
}

/// Record of an output folder: its files, and the runs that made them.
#[derive(Clone, Debug, PartialEq)]
pub struct Manifest {
    /// Program and version, for example `mantissa 0.1.0`.
    pub tool: String,
    /// Every other file of the folder, by its path relative to the folder with `/` between parts.
    pub files: BTreeMap<String, FileDigest>,
    /// Fields that the caller records of the run: recipe, source and so on.
    pub run: Map<String, Value>,
    /// Result of checking the digest of its own fields when it was read.
    pub seal: Seal,
}

/// Digest of a manifest's own fields, compared with the fields.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Seal {
    /// The fields are those that were written.
    Intact,
    /// There is no digest: an earlier version wrote the manifest.
    Missing,
    /// A field was changed.
    Broken {
        /// Digest of the fields, hexadecimal.
        found: String,
        /// Digest that the manifest states.
        expected: String,
    },
}

impl Seal {
    /// Compares the digest in `value` with its other fields.
    fn of(value: &Value) -> Self {
        let found = digest_of(value);
        match &value[SEAL] {
            Value::Null if value.get(SEAL).is_none() => Seal::Missing,
            Value::String(expected) if *expected == found => Seal::Intact,
            other => {
                let text = other.as_str().map_or_else(|| other.to_string(), str::to_owned);
                Seal::Broken { found, expected: text }
            }
        }
    }
}

/// Returns the SHA-256 of all fields but [`SEAL`], whatever the order of keys and the spaces between them.
fn digest_of(value: &Value) -> String {
    let mut fields = value.clone();
    if let Value::Object(fields) = &mut fields {
        fields.remove(SEAL);
    }
    fields.sort_all_objects();
    FileDigest::of(fields.to_string().as_bytes()).hex()
}

impl Manifest {
    /// A manifest of these files, by this version of the program.
    pub fn new(files: BTreeMap<String, FileDigest>, run: Map<String, Value>) -> Self {
        let tool = TOOL.to_owned();
        Self { tool, files, run, seal: Seal::Intact }
    }

    /// Reads the manifest of the folder `dir`.
    ///
    /// # Errors
    /// [`Error::Missing`] when there is none, [`Error::Json`] or [`Error::Field`] when it is malformed or a file
    /// in it lies outside the folder.
    pub fn read(dir: &Path) -> Result<Self> {
        Self::read_file(&dir.join(MANIFEST_NAME))
    }

    /// Reads the manifest at `path`, such as one beside a single file.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn read_file(path: &Path) -> Result<Self> {
        let value = json::read_strict(path, MAX_MANIFEST_BYTES, "a manifest (mantissa-manifest.json)")?;
        Self::from_value(path, &value)
    }

    /// Reads the runs that made the model at `model`, a folder or a single file, from its manifest, oldest first.
    /// Each has the fields of the run (`command` and so on), `tool`, and under `weights` the SHA-256 of each weight
    /// file it wrote, which shows if the next run found them unchanged. Empty without a manifest.
    ///
    /// # Errors
    /// As [`Self::read`], except for a missing manifest.
    pub fn history(model: &Path) -> Result<Vec<Value>> {
        match Self::read_file(&manifest_path(model)) {
            Ok(manifest) => Ok(manifest.into_history()),
            Err(Error::Missing { .. }) => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    }

    /// Fields of `run`, a run on the model at `source`, with the source's own history under `history`, if known. This
    /// tells a fine-tuned, then quantized model from a quantized, then fine-tuned one.
    ///
    /// # Errors
    /// As [`Self::history`].
    pub fn run_after(source: &Path, mut run: Map<String, Value>) -> Result<Map<String, Value>> {
        let history = Self::history(source)?;
        if !history.is_empty() {
            run.insert(HISTORY.to_owned(), history.into());
        }
        Ok(run)
    }

    fn into_history(mut self) -> Vec<Value> {
        let mut runs = match self.run.remove(HISTORY) {
            Some(Value::Array(runs)) => runs,
            _ => Vec::new(),
        };
        let is_weights = |name: &str| name.ends_with(".safetensors") || name.ends_with(".gguf");
        let weights = self.files.iter().filter(|(name, _)| is_weights(name));
        let weights: Map<_, _> = weights.map(|(name, digest)| (name.clone(), digest.hex().into())).collect();
        self.run.insert("tool".to_owned(), self.tool.into());
        self.run.insert("weights".to_owned(), weights.into());
        runs.push(self.run.into());
        runs
    }

    /// Difference between the fields and their digest, if there is one.
    pub fn altered(&self) -> Option<Mismatch> {
        match self.seal.clone() {
            Seal::Broken { found, expected } => Some(Mismatch::Manifest { found, expected }),
            Seal::Intact | Seal::Missing => None,
        }
    }

    /// Compares the listed files with those in the folder `dir`; empty if nothing differs.
    ///
    /// # Errors
    /// [`Error::Io`] if an existing file cannot be read.
    pub fn compare(&self, dir: &Path) -> Result<Vec<Mismatch>> {
        let mut found = Vec::new();
        for (file, &expected) in &self.files {
            found.extend(compare(dir, file, expected)?);
        }
        Ok(found)
    }

    /// Text of the manifest file.
    pub fn to_json(&self) -> String {
        let files: Map<String, Value> = self
            .files
            .iter()
            .map(|(name, digest)| (name.clone(), json!({"bytes": digest.len, "sha256": digest.hex()})))
            .collect();
        let fields = json!({"version": VERSION, "tool": self.tool, "files": files, "run": self.run});
        let seal = digest_of(&fields);
        let value =
            json!({"version": VERSION, "tool": self.tool, SEAL: seal, "files": files, "run": self.run});
        format!("{value:#}\n")
    }

    fn from_value(path: &Path, value: &Value) -> Result<Self> {
        let bad =
            |field: &str, allowed: &str| Error::field(path, field, "another value or none", allowed, "");
        if value["version"].as_u64() != Some(VERSION) {
            return Err(bad("version", "1"));
        }
        // Without this, a manifest whose digest has another name would count as one without a digest.
        let known = |name: &&String| FIELDS.contains(&name.as_str());
        if let Some(name) = value.as_object().and_then(|fields| fields.keys().find(|name| !known(name))) {
            return Err(Error::field(path, name, "an unknown field", FIELDS.join(", "), ""));
        }
        let tool = value["tool"].as_str().ok_or_else(|| bad("tool", "a string"))?.to_owned();
        let run = value["run"].as_object().ok_or_else(|| bad("run", "an object"))?.clone();
        let listed = value["files"].as_object().ok_or_else(|| bad("files", "an object"))?;
        let files =
            listed.iter().map(|(name, entry)| file_entry(path, name, entry)).collect::<Result<_>>()?;
        Ok(Self { tool, files, run, seal: Seal::of(value) })
    }
}

/// Difference between a folder and its manifest.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Mismatch {
    /// A listed file is not there.
    #[error("{}: expected the file that the manifest lists, got none", Shown(.file))]
    Missing {
        /// Its name.
        file: String,
    },
    /// A file has another length.
    #[error("{}: expected {expected} bytes as in the manifest, got {found}", Shown(.file))]
    Length {
        /// Its name.
        file: String,
        /// Bytes now.
        found: u64,
        /// Bytes in the manifest.
        expected: u64,
    },
    /// A file of the right length has other content.
    #[error("{}: expected SHA-256 {expected} as in the manifest, got {found}", Shown(.file))]
    Hash {
        /// Its name.
        file: String,
        /// SHA-256 now, hexadecimal.
        found: String,
        /// SHA-256 in the manifest, hexadecimal.
        expected: String,
    },
    /// A field of the manifest itself was changed.
    #[error("{MANIFEST_NAME}: sha256: expected {found}, the digest of its other fields, got {}", Shown(.expected))]
    Manifest {
        /// Digest of the fields, hexadecimal.
        found: String,
        /// Digest that the manifest states.
        expected: String,
    },
    /// A file that the manifest does not list; the listed files may still be intact.
    #[error("{}: the manifest does not list this file", Shown(.file))]
    Unlisted {
        /// Its name.
        file: String,
    },
}

impl Mismatch {
    /// Difference between the file at `path` and its entry in a manifest; `None` if they agree.
    ///
    /// # Errors
    /// [`Error::Io`] when a file that exists cannot be read.
    pub fn of_file(path: &Path, expected: FileDigest) -> Result<Option<Self>> {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        compare(path.parent().unwrap_or(Path::new("")), &name, expected)
    }
}

/// Compares every file of the folder `dir` with its manifest; empty when nothing differs.
///
/// # Errors
/// As [`Manifest::read`], and [`Error::Io`] when a file that exists cannot be read.
pub fn verify_manifest(dir: &Path) -> Result<Vec<Mismatch>> {
    let manifest = Manifest::read(dir)?;
    let mut found: Vec<_> = manifest.altered().into_iter().collect();
    found.extend(manifest.compare(dir)?);
    let unlisted =
        files_under(dir)?.into_iter().filter(|f| f != MANIFEST_NAME && !manifest.files.contains_key(f));
    found.extend(unlisted.map(|file| Mismatch::Unlisted { file }));
    Ok(found)
}

/// Every file below `dir`, relative to it, sorted. Links are listed and not followed.
pub(crate) fn files_under(dir: &Path) -> Result<Vec<String>> {
    let mut files = Vec::new();
    let mut folders = vec![String::new()];
    while let Some(folder) = folders.pop() {
        let path = dir.join(&folder);
        for entry in
            failpoint::read(|| fs::read_dir(&path)).map_err(|e| Error::io(&path, "list folder", e))?
        {
            let entry = entry.map_err(|e| Error::io(&path, "list folder", e))?;
            let kind = entry.file_type().map_err(|e| Error::io(&entry.path(), "read type", e))?;
            let name = format!("{folder}{}", entry.file_name().to_string_lossy());
            if kind.is_dir() { folders.push(format!("{name}/")) } else { files.push(name) }
        }
    }
    files.sort();
    Ok(files)
}

fn compare(dir: &Path, file: &str, expected: FileDigest) -> Result<Option<Mismatch>> {
    let name = || file.to_owned();
    let path = dir.join(file);
    // Compare the length first: a truncated file need not be hashed.
    match fs::metadata(&path) {
        Ok(metadata) if metadata.is_file() && metadata.len() != expected.len => {
            return Ok(Some(Mismatch::Length {
                file: name(),
                found: metadata.len(),
                expected: expected.len,
            }));
        }
        _ => {}
    }
    match hash_file(&path) {
        Ok(digest) if digest == expected => Ok(None),
        Ok(digest) => {
            Ok(Some(Mismatch::Hash { file: name(), found: digest.hex(), expected: expected.hex() }))
        }
        Err(Error::Missing { .. } | Error::WrongKind { .. }) => Ok(Some(Mismatch::Missing { file: name() })),
        Err(error) => Err(error),
    }
}

fn file_entry(path: &Path, name: &str, entry: &Value) -> Result<(String, FileDigest)> {
    let inside = Path::new(name).components().all(|part| matches!(part, Component::Normal(_)));
    if name.is_empty() || !inside {
        return Err(Error::field(path, "files", name, "paths inside the folder", ""));
    }
    let len = entry["bytes"].as_u64();
    let sha256 = entry["sha256"].as_str().and_then(FileDigest::parse_hex);
    match (len, sha256) {
        (Some(len), Some(sha256)) => Ok((name.to_owned(), FileDigest { len, sha256 })),
        _ => {
            let allowed = "{\"bytes\": integer, \"sha256\": 64 hexadecimal digits}";
            Err(Error::field(path, format!("files.{name}"), "another value", allowed, ""))
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use super::*;

    fn sample() -> Manifest {
        let files = BTreeMap::from([("a/b.json".to_owned(), FileDigest::of(b"x"))]);
        Manifest::new(files, Map::from_iter([("recipe".to_owned(), json!("rtn"))]))
    }

    #[test]
    fn text_round_trips() {
        let manifest = sample();
        let value = serde_json::from_str(&manifest.to_json()).unwrap();
        assert_eq!(Manifest::from_value(Path::new("m"), &value).unwrap(), manifest);
    }

    #[test]
    fn a_run_keeps_those_before_it_in_their_order() {
        let dir = tempfile::tempdir().unwrap();
        let command = |name: &str| Map::from_iter([("command".to_owned(), json!(name))]);
        assert_eq!(Manifest::run_after(dir.path(), command("train")).unwrap(), command("train"));
        let weights = BTreeMap::from([("model.safetensors".to_owned(), FileDigest::of(b"w"))]);
        let mut run = command("train");
        for next in ["quantize", "convert"] {
            let text = Manifest::new(weights.clone(), run).to_json();
            fs::write(dir.path().join(MANIFEST_NAME), text).unwrap();
            run = Manifest::run_after(dir.path(), command(next)).unwrap();
        }
        let text = Manifest::new(BTreeMap::new(), run).to_json();
        fs::write(dir.path().join(format!("m.gguf.{MANIFEST_NAME}")), text).unwrap();
        let history = Manifest::history(&dir.path().join("m.gguf")).unwrap();
        let commands: Vec<_> = history.iter().map(|run| run["command"].as_str().unwrap()).collect();
        assert_eq!(commands, ["train", "quantize", "convert"]);
        assert_eq!(history[1]["weights"]["model.safetensors"], FileDigest::of(b"w").hex());
        assert!(history.iter().all(|run| run.get(HISTORY).is_none()));
        fs::write(dir.path().join(MANIFEST_NAME), "{").unwrap();
        assert!(Manifest::history(dir.path()).is_err());
    }

    /// A flipped bit anywhere makes the manifest unreadable, changes a file's entry, or breaks the digest.
    #[test]
    fn every_flipped_bit_is_found() {
        let mut run = Map::from_iter([("recipe".to_owned(), json!("rtn")), ("kv".to_owned(), Value::Null)]);
        run.insert("numbers".to_owned(), json!([0.1, 1e-30, -7, 12_345_678_901_u64, true]));
        let files = BTreeMap::from([("a/b.json".to_owned(), FileDigest::of(b"x"))]);
        let good = Manifest::new(files, run).to_json();
        let value = |bytes: &[u8]| json::parse_strict(bytes, Path::new("m"), MAX_MANIFEST_BYTES).ok();
        let read = |bytes: &[u8]| Manifest::from_value(Path::new("m"), &value(bytes)?).ok();
        assert_eq!(read(good.as_bytes()).unwrap().seal, Seal::Intact);
        let (mut bytes, mut same) = (good.clone().into_bytes(), 0);
        for bit in 0..8 * bytes.len() {
            bytes[bit / 8] ^= 1 << (bit % 8);
            let altered = read(&bytes).is_none_or(|manifest| manifest.altered().is_some());
            // 1E-30 is the same number as 1e-30.
            same += usize::from(!altered);
            assert!(altered || value(&bytes) == value(good.as_bytes()), "bit {bit}: {bytes:?}");
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
        assert_eq!(same, 1);
        // Other spaces and another order of the keys are no change.
        let value: Value = serde_json::from_str(&good).unwrap();
        let Value::Object(fields) = value else { panic!("{good}") };
        let turned: Map<_, _> = fields.into_iter().rev().collect();
        assert_eq!(read(Value::Object(turned).to_string().as_bytes()).unwrap().seal, Seal::Intact);
        // Manifests of earlier versions have no digest.
        let old: String = good.lines().filter(|line| !line.starts_with("  \"sha256\"")).collect();
        assert_eq!(read(old.as_bytes()).unwrap().seal, Seal::Missing);
    }

    #[test]
    fn malformed_manifests_are_refused() {
        let good = sample().to_json();
        for (from, to) in [
            ("\"version\": 1", "\"version\": 2"),
            ("a/b.json", "../b.json"),
            ("a/b.json", "/etc/passwd"),
            ("\"bytes\": 1", "\"bytes\": -1"),
            ("\"sha256\": \"2d", "\"sha256\": \"zz"),
            ("\"run\": {", "\"ran\": {"),
            ("  \"sha256\": \"", "  \"sha257\": \""),
        ] {
            let text = good.replace(from, to);
            assert_ne!(text, good, "{from} occurs");
            let value = serde_json::from_str(&text).unwrap();
            let error = Manifest::from_value(Path::new("m"), &value).unwrap_err();
            assert!(matches!(error, Error::Field(_)), "{error}");
        }
    }
}

//! Folder of a job that workers share: `job.json` with the job and the digests of its inputs, and `units/` with leases
//! and results.
//!
//! The name of a result is a hash of the program's version, the job, the *content* of its inputs and the unit. A copy of
//! the model on another machine gives the same names, and results of another job are never taken for this one's.

use std::collections::BTreeSet;
use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use mantissa_store::{Error, FileDigest, Output, disk, hash_file_while, json, regular, write_file_atomic};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::{RankError, Result};
use crate::lease::Worker;

/// Name of the record in the folder.
const RECORD: &str = "job.json";

/// Folder of the units.
const UNITS: &str = "units";

/// Largest record in bytes: a model has thousands of files at most.
const MAX_RECORD: u64 = 64 << 20;

/// Bytes that are hashed at a time.
const PIECE: usize = 1 << 20;

/// Deepest folder inside an input that is a folder.
const DEPTH: usize = 4;

/// Input of a job: a file, by its content.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InputFile {
    /// Path as the job names it, or below a folder that it names.
    pub path: PathBuf,
    /// Digest of the content.
    pub digest: FileDigest,
    /// Number of the job's input that it belongs to, and its path there: what tells two files of one name apart.
    role: (usize, PathBuf),
    /// Identity on the machine that made the record.
    identity: Vec<i64>,
}

/// Contents of `job.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JobRecord {
    /// Version of the program.
    pub version: String,
    /// Folder that relative paths of the job start from.
    pub directory: PathBuf,
    /// The job with its name and version.
    pub job: Value,
    /// Digest of what decides the results besides the inputs: the job without its places.
    decides: String,
    /// Machine on which the identities hold.
    system: String,
    /// Files that the job reads.
    pub inputs: Vec<InputFile>,
}

impl JobRecord {
    /// Returns the key of the job: a digest of its version, what decides its results, and its inputs.
    pub fn key(&self) -> String {
        let inputs = self.inputs.iter().map(|input| {
            let (number, path) = &input.role;
            format!("{number} {} {}", path.display(), input.digest.hex())
        });
        let parts = [self.version.clone(), self.decides.clone()].into_iter().chain(inputs);
        FileDigest::of_pieces(parts.map(|part| part + "\n")).hex()
    }
}

/// Folder of a job.
#[derive(Clone, Debug)]
pub struct JobFolder {
    path: PathBuf,
    /// The job and its inputs.
    pub record: JobRecord,
}

impl JobFolder {
    /// Makes the folder `path` for `job`, or joins one that was made for the same job and inputs. `decides` is the part of
    /// the job that decides its results; `inputs` are the files and folders that it reads, of which every file is hashed.
    /// `continues` is asked between pieces.
    ///
    /// # Errors
    /// The folder belongs to another job; an input cannot be read; I/O; `continues` is false.
    pub fn create(
        path: &Path,
        (job, decides): (Value, &Value),
        inputs: &[PathBuf],
        continues: &mut dyn FnMut() -> bool,
    ) -> Result<Self> {
        let record = JobRecord {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            directory: std::env::current_dir().map_err(|error| Error::Io {
                path: ".".into(),
                operation: "look up",
                error,
            })?,
            job,
            decides: FileDigest::of(decides.to_string().as_bytes()).hex(),
            system: Worker::this().host_digits(),
            inputs: hashed(inputs, path, continues)?,
        };
        let made = JobFolder { path: path.to_owned(), record };
        if Self::read(path)?.is_none() {
            require_new(path)?;
        }
        let io = |error| Error::Io { path: path.to_owned(), operation: "create", error };
        disk::create_folders(&path.join(UNITS)).map_err(io)?;
        // Another process may have made it meanwhile.
        if let Some(found) = Self::read(path)? {
            return match found.key() == made.record.key() {
                true => Ok(JobFolder { record: found, ..made }),
                false => Err(other_job(path)),
            };
        }
        let text = serde_json::to_vec_pretty(&made.record).unwrap_or_default();
        write_file_atomic(&Output::owned(path.join(RECORD)), &text)?;
        Ok(made)
    }

    /// Opens the folder of a job, and checks that its inputs are on this machine with the same content.
    ///
    /// # Errors
    /// No such folder; a malformed record, or one of another version; [`RankError::Input`].
    pub fn open(path: &Path) -> Result<Self> {
        let missing = || Error::Missing { path: path.to_owned(), expected: "the folder of a job" };
        let record = Self::read(path)?.ok_or_else(missing)?;
        if record.version != env!("CARGO_PKG_VERSION") {
            let allowed = format!("\"{}\", the version of this program", env!("CARGO_PKG_VERSION"));
            let hint = "fix: run workers of the version that made the job, or make it again";
            let found = record.version;
            return Err(Error::field(&path.join(RECORD), "version", found, allowed, hint).into());
        }
        Ok(JobFolder { path: path.to_owned(), record })
    }

    /// Checks that every input is on this machine with the content that the job was made for. Files are hashed once on
    /// each machine; relative paths start from the current folder.
    ///
    /// # Errors
    /// [`RankError::Input`]; I/O.
    pub fn require_inputs(&self, continues: &mut dyn FnMut() -> bool) -> Result<()> {
        let here = Worker::this().host_digits();
        let known = self.path.join(format!("inputs-{here}.json"));
        let mut checked: BTreeSet<Vec<i64>> = match regular::read_optional(&known, MAX_RECORD, "a record")? {
            Some(bytes) => serde_json::from_slice(&bytes).unwrap_or_default(),
            None => BTreeSet::new(),
        };
        let before = checked.len();
        for input in &self.record.inputs {
            let differs = |got: String| RankError::Input {
                folder: self.path.clone(),
                input: input.path.display().to_string(),
                expected: input.digest.hex(),
                got,
            };
            let Ok(found) = fs::metadata(&input.path) else { return Err(differs("no file".to_owned())) };
            let identity = identity(&found);
            if (self.record.system == here && identity == input.identity) || checked.contains(&identity) {
                continue;
            }
            let digest = digest_of(&input.path, continues)?;
            if digest != input.digest {
                return Err(differs(digest.hex()));
            }
            checked.insert(identity);
        }
        if checked.len() > before {
            let text = serde_json::to_vec(&checked).unwrap_or_default();
            write_file_atomic(&Output::owned(known), &text)?;
        }
        Ok(())
    }

    /// Returns the folder of the units.
    pub fn units(&self) -> UnitFolder {
        UnitFolder { path: self.path.join(UNITS), key: self.record.key() }
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the folder with all results.
    ///
    /// # Errors
    /// I/O.
    pub fn remove(self) -> Result<()> {
        let io = |error| Error::Io { path: self.path.clone(), operation: "remove", error };
        // The record goes last but for what is empty: a folder without it would not be known as ours.
        disk::remove_all(&self.path.join(UNITS)).map_err(io)?;
        disk::remove_file_if_there(&self.path.join(RECORD)).map_err(io)?;
        Ok(disk::remove_all(&self.path).map_err(io)?)
    }

    fn read(path: &Path) -> Result<Option<JobRecord>> {
        let file = path.join(RECORD);
        let Some(bytes) = regular::read_optional(&file, MAX_RECORD, "the record of a job")? else {
            return Ok(None);
        };
        let value = json::parse_strict(&bytes, &file, MAX_RECORD)?;
        let malformed = |error: serde_json::Error| {
            let hint = "fix: make the job again in another folder";
            Error::field(&file, "job", error.to_string(), "the record of a job", hint)
        };
        Ok(Some(serde_json::from_value(value).map_err(malformed)?))
    }
}

/// Results and leases of units.
#[derive(Clone, Debug)]
pub struct UnitFolder {
    path: PathBuf,
    key: String,
}

impl UnitFolder {
    /// Path of the result of `unit`.
    pub(crate) fn result(&self, unit: &str) -> PathBuf {
        self.path.join(self.stem(unit) + ".unit")
    }

    /// Path of the lease of `unit`.
    pub(crate) fn lease(&self, unit: &str) -> PathBuf {
        self.path.join(self.stem(unit) + ".lease")
    }

    /// Makes a folder for files of this process that are no results.
    ///
    /// # Errors
    /// I/O.
    pub(crate) fn scratch(&self) -> Result<PathBuf> {
        let worker = Worker::this();
        let path = self.path.join(format!("scratch-{}-{}", worker.host_digits(), std::process::id()));
        let io = |error| Error::Io { path: path.clone(), operation: "create", error };
        disk::create_folders(&path).map_err(io)?;
        Ok(path)
    }

    /// Returns the names of the results that are there.
    ///
    /// # Errors
    /// I/O.
    pub(crate) fn results(&self) -> Result<BTreeSet<PathBuf>> {
        let io = |error| Error::Io { path: self.path.clone(), operation: "list folder", error };
        let mut found = BTreeSet::new();
        for entry in fs::read_dir(&self.path).map_err(io)? {
            let path = entry.map_err(io)?.path();
            if path.extension().is_some_and(|end| end == "unit") {
                found.insert(path);
            }
        }
        Ok(found)
    }

    fn stem(&self, unit: &str) -> String {
        FileDigest::of_pieces([&self.key, "\n", unit]).hex()[..32].to_owned()
    }
}

fn other_job(path: &Path) -> RankError {
    let hint = "fix: choose another folder with --job, or remove this one";
    Error::field(
        &path.join(RECORD),
        "job",
        "another job, or other inputs",
        "this job with these inputs",
        hint,
    )
    .into()
}

/// Refuses a path that holds anything but a folder that is empty or whose making was interrupted.
fn require_new(path: &Path) -> Result<()> {
    let others = |entries: fs::ReadDir| {
        let names = entries.filter_map(|entry| Some(entry.ok()?.file_name().to_string_lossy().into_owned()));
        let ours = |name: &String| {
            name == UNITS || name.starts_with(&format!(".{RECORD}")) || name.starts_with("inputs-")
        };
        names.filter(|name| !ours(name)).count()
    };
    match fs::read_dir(path).map(|entries| others(entries) > 0) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Ok(false) => Ok(()),
        Ok(true) => {
            let (found, expected) = ("a folder without job.json", "nothing, or the folder of this job");
            Err(Error::WrongKind { path: path.to_owned(), found, expected }.into())
        }
        Err(error) => Err(Error::Io { path: path.to_owned(), operation: "list folder", error }.into()),
    }
}

/// Hashes the files of `inputs`, of folders those inside except the folder of the job, in the order of the inputs.
fn hashed(inputs: &[PathBuf], job: &Path, continues: &mut dyn FnMut() -> bool) -> Result<Vec<InputFile>> {
    let job = fs::canonicalize(job).ok();
    let mut all = Vec::new();
    for (number, input) in inputs.iter().enumerate() {
        let mut files = BTreeSet::new();
        collect(input, DEPTH, job.as_deref(), &mut files)?;
        for path in files {
            let io = |error| Error::Io { path: path.clone(), operation: "look up", error };
            let before = fs::metadata(&path).map_err(io)?;
            let digest = digest_of(&path, continues)?;
            let below = path.strip_prefix(input).unwrap_or(&path).to_owned();
            all.push(InputFile { identity: identity(&before), digest, role: (number, below), path });
        }
    }
    Ok(all)
}

/// Hashes the file at `path`; fails if `continues` says no.
fn digest_of(path: &Path, continues: &mut dyn FnMut() -> bool) -> Result<FileDigest> {
    let digest = hash_file_while(path, &mut vec![0; PIECE], &mut |_| continues())?;
    digest.ok_or(RankError::Interrupted)
}

/// Adds the files at `path` to `files`; hidden ones are no part of a model.
fn collect(path: &Path, depth: usize, job: Option<&Path>, files: &mut BTreeSet<PathBuf>) -> Result<()> {
    let io = |operation| move |error| Error::Io { path: path.to_owned(), operation, error };
    let found = fs::metadata(path).map_err(|e| Error::opening(path, "an input of the job", "look up", e))?;
    if !found.is_dir() {
        files.insert(path.to_owned());
        return Ok(());
    }
    let is_job = || job.is_some_and(|job| fs::canonicalize(path).is_ok_and(|path| path == job));
    if depth == 0 || is_job() {
        return Ok(());
    }
    for entry in fs::read_dir(path).map_err(io("list folder"))? {
        let entry = entry.map_err(io("list folder"))?;
        if !entry.file_name().as_encoded_bytes().starts_with(b".") {
            collect(&entry.path(), depth - 1, job, files)?;
        }
    }
    Ok(())
}

/// Device, inode, length, and times of modification and change in seconds and nanoseconds: equal as long as a file is
/// unchanged on one machine.
fn identity(found: &Metadata) -> Vec<i64> {
    let (device, inode, len) = (found.dev(), found.ino(), found.len());
    let times = [found.mtime(), found.mtime_nsec(), found.ctime(), found.ctime_nsec()];
    [device, inode, len].map(u64::cast_signed).into_iter().chain(times).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn create(path: &Path, decides: &str, inputs: &[PathBuf]) -> Result<JobFolder> {
        let job = serde_json::json!({ "job": "copy", "version": 1, "out": path });
        JobFolder::create(path, (job, &decides.into()), inputs, &mut || true)
    }

    #[test]
    fn keys_follow_contents_and_not_places_or_times() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        for name in ["a", "b"] {
            fs::create_dir_all(at(name).join("sub")).unwrap();
            fs::write(at(name).join("model"), "weights").unwrap();
            fs::write(at(name).join("sub/tokenizer"), "t").unwrap();
            fs::write(at(name).join(".hidden"), name).unwrap();
        }
        let a = create(&at("job-a"), "d", &[at("a")]).unwrap();
        let b = create(&at("job-b"), "d", &[at("b")]).unwrap();
        assert_eq!(a.record.key(), b.record.key());
        assert_eq!(a.record.inputs.len(), 2);
        assert_ne!(a.record.key(), create(&at("job-c"), "e", &[at("a")]).unwrap().record.key());
        // The same job joins, another is refused.
        assert_eq!(create(&at("job-a"), "d", &[at("b")]).unwrap().record, a.record);
        fs::write(at("b/model"), "weightz").unwrap();
        let said = create(&at("job-a"), "d", &[at("b")]).unwrap_err().to_string();
        assert!(said.contains("job.json: job: expected this job with these inputs"), "{said}");
    }

    /// The same files in other roles, such as two calibration texts, are another job.
    #[test]
    fn keys_follow_the_roles_of_inputs() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        for name in ["a", "b"] {
            fs::create_dir_all(at(name)).unwrap();
            fs::write(at(name).join("text"), name).unwrap();
        }
        let inputs = ["a/text", "b/text"].map(&at);
        let first = create(&at("job"), "d", &inputs).unwrap();
        let [a, b] = inputs;
        assert_ne!(first.record.key(), create(&at("other"), "d", &[b.clone(), a]).unwrap().record.key());
        assert!(create(&at("job"), "d", &[b, at("a/text")]).is_err());
    }

    #[test]
    fn an_interrupted_start_and_end_are_gone_on_with() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::create_dir_all(at("job/units")).unwrap();
        fs::write(at("job/.job.json.mantissa-1"), "{").unwrap();
        let job = create(&at("job"), "d", &[]).unwrap();
        fs::remove_dir(at("job/units")).unwrap();
        assert_eq!(create(&at("job"), "d", &[]).unwrap().record, job.record);
        assert!(at("job/units").is_dir());
        // A folder that lies in an input is no part of it.
        fs::write(folder.path().join("model"), "m").unwrap();
        let inside = create(&at("inside"), "d", &[folder.path().to_owned()]).unwrap();
        assert_eq!(create(&at("inside"), "d", &[folder.path().to_owned()]).unwrap().record, inside.record);
        job.remove().unwrap();
        assert!(!at("job").exists());
    }

    #[test]
    fn inputs_of_other_content_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::write(at("model"), "weights").unwrap();
        create(&at("job"), "d", &[at("model")]).unwrap();
        let job = || JobFolder::open(&at("job")).unwrap().require_inputs(&mut || true);
        job().unwrap();
        // The same bytes at another time, as a copy has them.
        fs::write(at("copy"), "weights").unwrap();
        fs::rename(at("copy"), at("model")).unwrap();
        job().unwrap();
        fs::write(at("model"), "Weights").unwrap();
        let said = job().unwrap_err().to_string();
        assert!(
            said.contains("expected the file that the job was made for") && said.contains("; fix: "),
            "{said}"
        );
        fs::remove_file(at("model")).unwrap();
        assert!(job().unwrap_err().to_string().contains("got no file"));
    }

    #[test]
    fn a_stranger_s_folder_stays() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("notes"), "n").unwrap();
        let said = create(folder.path(), "d", &[]).unwrap_err().to_string();
        assert!(said.contains("expected nothing, or the folder of this job"), "{said}");
        let none = JobFolder::open(folder.path()).unwrap_err().to_string();
        assert!(none.contains("expected the folder of a job"), "{none}");
        fs::write(folder.path().join(RECORD), "{\"job\": 1}").unwrap();
        let said = JobFolder::open(folder.path()).unwrap_err().to_string();
        assert!(said.contains("job.json") && said.contains("; fix: "), "{said}");
    }
}

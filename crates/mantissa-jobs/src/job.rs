//! Jobs: immutable values that are serialized with their name and version, and run by a host.

use std::path::PathBuf;

use mantissa_store::{Kind, Paths};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::{RecordError, Result};
use crate::host::{Allowed, Host};
use crate::progress::Progress;

/// Output of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobOutput {
    /// Option that names it in messages, such as `--out`.
    pub option: &'static str,
    /// Path as given.
    pub path: PathBuf,
    /// Kind of the output.
    pub kind: Kind,
}

/// Long work as a value: it is resolved once from arguments and never changed afterwards.
///
/// Threads, the memory ceiling and the display are the host's. Everything that decides a byte of the output is in the
/// value, so that the same value makes the same bytes on every machine.
pub trait Job: Serialize + DeserializeOwned + Send + Sync {
    /// Name in serialized jobs, such as `quantize`.
    const NAME: &'static str;

    /// Version of the fields; raised whenever an older value would be read otherwise.
    const VERSION: u32;

    /// Result of the job.
    type Report;

    /// Returns the files and folders that the job reads.
    fn inputs(&self) -> Vec<PathBuf>;

    /// Returns the paths that the job writes.
    fn outputs(&self) -> Vec<JobOutput>;

    /// Returns the predicted peak of anonymous memory in bytes on `host`.
    ///
    /// # Errors
    /// Inputs that cannot be read.
    fn memory(&self, host: &Host) -> Result<u64>;

    /// Runs the job.
    ///
    /// # Errors
    /// Inputs that cannot be used; I/O; a quality gate; a stop that the host asked for.
    fn run(&self, host: &Host) -> Result<Self::Report>;

    /// Returns inputs and outputs, for checks before the job runs.
    fn paths(&self) -> Paths {
        let mut paths = Paths::default();
        self.inputs().into_iter().for_each(|path| paths.read(path));
        self.outputs().into_iter().for_each(|output| paths.write(output.option, output.path, output.kind));
        paths
    }
}

/// Checks the paths of `job` against each other and makes a host that may write its outputs. The same job may replace its
/// own output; another's only with `overwrite`.
///
/// # Errors
/// An output that is an input, that may not be replaced, or that coincides with another.
pub fn host<J: Job>(job: &J, allowed: Allowed, overwrite: bool, progress: Box<dyn Progress>) -> Result<Host> {
    let permits = job.paths().check(&to_json(job)?.to_string(), overwrite)?;
    Ok(Host::new(allowed, permits, progress))
}

/// Serialized job.
#[derive(Serialize)]
struct Written<'a, J> {
    job: &'static str,
    version: u32,
    #[serde(flatten)]
    value: &'a J,
}

/// Name and version of a serialized job.
#[derive(Deserialize)]
struct Header {
    job: String,
    version: u32,
}

/// Serializes a job with its name and version: an object with the fields `job` and `version` before its own.
///
/// # Errors
/// A field that JSON cannot hold: a bug.
pub fn to_json<J: Job>(job: &J) -> Result<Value, RecordError> {
    let written = Written { job: J::NAME, version: J::VERSION, value: job };
    serde_json::to_value(&written).map_err(|error| malformed::<J>("job", &error))
}

/// Reads a job from what [`to_json`] wrote; `place` names it in errors.
///
/// # Errors
/// Another job, another version, or fields that are none of the job's.
pub fn from_json<J: Job>(place: &str, mut value: Value) -> Result<J, RecordError> {
    let header = Header::deserialize(&value).map_err(|error| malformed::<J>(place, &error))?;
    if header.job != J::NAME {
        return Err(RecordError::Name { place: place.into(), expected: J::NAME, got: header.job });
    }
    if header.version != J::VERSION {
        return Err(RecordError::Version {
            place: place.into(),
            name: J::NAME,
            expected: J::VERSION,
            got: header.version,
        });
    }
    // The job itself may refuse fields that it does not know.
    if let Some(fields) = value.as_object_mut() {
        fields.retain(|name, _| name != "job" && name != "version");
    }
    serde_json::from_value(value).map_err(|error| malformed::<J>(place, &error))
}

fn malformed<J: Job>(place: &str, error: &serde_json::Error) -> RecordError {
    RecordError::Malformed { place: place.into(), name: J::NAME, message: error.to_string() }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct CopyFile {
        from: PathBuf,
        out: PathBuf,
    }

    impl Job for CopyFile {
        const NAME: &'static str = "copy";
        const VERSION: u32 = 2;
        type Report = ();

        fn inputs(&self) -> Vec<PathBuf> {
            vec![self.from.clone()]
        }

        fn outputs(&self) -> Vec<JobOutput> {
            vec![JobOutput { option: "--out", path: self.out.clone(), kind: Kind::File }]
        }

        fn memory(&self, _: &Host) -> Result<u64> {
            Ok(0)
        }

        fn run(&self, _: &Host) -> Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_job_is_read_back_and_another_is_refused() {
        let job = CopyFile { from: "a".into(), out: "b".into() };
        let value = to_json(&job).unwrap();
        assert_eq!(value.to_string(), r#"{"job":"copy","version":2,"from":"a","out":"b"}"#);
        assert_eq!(from_json::<CopyFile>("j", value.clone()).unwrap(), job);
        let changed = |field: &str, to: Value| {
            let mut other = value.clone();
            other[field] = to;
            from_json::<CopyFile>("j.json", other).unwrap_err().to_string()
        };
        assert!(changed("version", 1.into()).starts_with("j.json: version: expected 2, got 1; fix: "));
        assert!(changed("job", "move".into()).starts_with("j.json: job: expected copy, got move; fix: "));
        assert!(changed("mode", 1.into()).starts_with("j.json: expected a job copy, got `unknown field"));
        assert!(changed("version", "x".into()).starts_with("j.json: expected a job copy, got `"));
    }
}

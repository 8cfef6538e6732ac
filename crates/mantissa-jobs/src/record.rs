//! Jobs recorded in `quality.json`: the values that make the same weights again, without the places of files.

use mantissa_quant::Recorded;
use serde_json::Value;

use crate::error::{RecordError, Result};
use crate::job::{Job, to_json};

/// Job that an output records, so that its weights can be made again.
pub trait Recordable: Job {
    /// Returns the job without the places of source, output and files, and without what decides no byte of the weights.
    #[must_use]
    fn without_places(&self) -> Self;

    /// Returns the record of the job.
    ///
    /// # Errors
    /// A field that JSON cannot hold: a bug.
    fn record(&self) -> Result<Recorded> {
        match to_json(&self.without_places())? {
            Value::Object(fields) => Ok(Recorded::Job(fields)),
            other => {
                let message = format!("expected an object, got {other}");
                Err(RecordError::Malformed { place: "job".into(), name: Self::NAME, message }.into())
            }
        }
    }
}

/// Returns the name of a file without its folder; a name may end in a key.
pub fn file_name(named: &str) -> String {
    let name = std::path::Path::new(named).file_name();
    name.map_or_else(|| named.to_owned(), |name| name.to_string_lossy().into_owned())
}

//! Logs of a training run: JSON Lines that a resumed run continues after its checkpoint.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use mantissa_store::{Output, disk, regular, write_file_atomic};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::run_files::LogLine;

/// Returns the last step of a log; 0 without a log.
///
/// # Errors
/// I/O.
pub(crate) fn logged_steps(path: &Path) -> Result<u64> {
    let bytes = read_log(path)?;
    Ok(bytes.split(|&b| b == b'\n').filter_map(step_of).max().unwrap_or(0))
}

/// Returns the seconds of training that a log has at a step; 0 without it.
///
/// # Errors
/// I/O.
pub(crate) fn logged_seconds(path: &Path, steps: u64) -> Result<f64> {
    let bytes = read_log(path)?;
    let mut lines =
        bytes.split(|&b| b == b'\n').filter(|line| step_of(line).is_some_and(|step| step <= steps));
    let seconds = lines.next_back().and_then(|line| serde_json::from_slice::<Seconds>(line).ok());
    Ok(seconds.map_or(0.0, |line| line.seconds))
}

/// Returns the lines of a run's log, without those that are damaged.
///
/// # Errors
/// I/O.
pub(crate) fn log_lines(path: &Path) -> Result<Vec<LogLine>> {
    let bytes = read_log(path)?;
    Ok(bytes.split(|&b| b == b'\n').filter_map(|line| serde_json::from_slice(line).ok()).collect())
}

fn read_log(path: &Path) -> Result<Vec<u8>> {
    Ok(regular::read_optional(path, u64::MAX, "a log of mantissa train")?.unwrap_or_default())
}

/// Returns the step of a line; `None` if it is not a JSON object with a step.
fn step_of(line: &[u8]) -> Option<u64> {
    let object = line.trim_ascii_start().starts_with(b"{");
    serde_json::from_slice::<Step>(line).ok().filter(|_| object).map(|line| line.step)
}

/// JSON Lines log with a field `step` per line.
pub(crate) struct Log {
    path: PathBuf,
    file: fs::File,
}

#[derive(Deserialize)]
struct Step {
    step: u64,
}

#[derive(Deserialize)]
struct Seconds {
    #[serde(default)]
    seconds: f64,
}

impl Log {
    /// Opens the log after the lines of the first `steps` steps, which are passed to `each`: steps after the last
    /// checkpoint are repeated.
    ///
    /// # Errors
    /// I/O.
    pub(crate) fn open<T: DeserializeOwned>(path: &Path, steps: u64, each: impl FnMut(T)) -> Result<Self> {
        let io = |operation: &'static str| {
            let path = path.to_owned();
            move |error| mantissa_store::Error::Io { path, operation, error }
        };
        let bytes = read_log(path)?;
        // An incomplete last line of a killed process, or a damaged line, is not an object.
        let kept = |line: &&[u8]| step_of(line).is_some_and(|step| step <= steps);
        let kept: Vec<_> = bytes.split(|&b| b == b'\n').filter(kept).collect();
        let text: Vec<u8> = kept.iter().flat_map(|line| [line, &b"\n"[..]].concat()).collect();
        if text != bytes {
            write_file_atomic(&Output::owned(path), &text)?;
        }
        let file = disk::open_append(path).map_err(io("open"))?;
        kept.iter().filter_map(|line| serde_json::from_slice(line).ok()).for_each(each);
        Ok(Log { path: path.to_owned(), file })
    }

    /// Appends a line.
    ///
    /// # Errors
    /// I/O.
    pub(crate) fn write(&mut self, line: &impl Serialize) -> Result<()> {
        let text = serde_json::to_string(line)? + "\n";
        Ok(disk::append(&self.file, &self.path, text.as_bytes())
            .map_err(|error| self.error("write", error))?)
    }

    /// Replaces the last line, durably and atomically.
    ///
    /// # Errors
    /// I/O; the log is then unchanged.
    pub(crate) fn replace_last(&mut self, line: &impl Serialize) -> Result<()> {
        let bytes = read_log(&self.path)?;
        let whole = bytes.strip_suffix(b"\n").unwrap_or(&bytes);
        let kept = whole.iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
        let text = [&whole[..kept], serde_json::to_string(line)?.as_bytes(), b"\n"].concat();
        write_file_atomic(&Output::owned(&self.path), &text)?;
        self.file = disk::open_append(&self.path).map_err(|error| self.error("open", error))?;
        Ok(())
    }

    /// Makes the lines durable.
    ///
    /// # Errors
    /// I/O.
    pub(crate) fn sync(&self) -> Result<()> {
        Ok(disk::sync_data(&self.file, &self.path).map_err(|error| self.error("fsync", error))?)
    }

    fn error(&self, operation: &'static str, error: io::Error) -> mantissa_store::Error {
        mantissa_store::Error::Io { path: self.path.clone(), operation, error }
    }
}

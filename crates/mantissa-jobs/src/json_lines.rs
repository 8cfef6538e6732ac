//! Reads JSON Lines files, which may be long, damaged or foreign.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use mantissa_store::regular;
use serde::de::DeserializeOwned;

use crate::error::{BadInput, Result};

/// Maximum line length in bytes.
const MAX_LINE: u64 = 64 << 20;

/// Passes the object of every line to `take`. The last line may be incomplete: the run is in progress or was
/// killed.
///
/// # Errors
/// I/O, and [`BadInput`] with the line that is too long or malformed.
pub fn read<T: DeserializeOwned>(path: &Path, mut take: impl FnMut(T) -> Result<()>) -> Result<()> {
    let io = |error| mantissa_store::Error::Io { path: path.to_owned(), operation: "read", error };
    let mut file = BufReader::new(regular::open(path, "a log of mantissa train")?);
    let mut line = Vec::new();
    for number in 1u64.. {
        line.clear();
        if (&mut file).take(MAX_LINE + 1).read_until(b'\n', &mut line).map_err(io)? == 0 {
            break;
        }
        let fault = |found: String, allowed: String| {
            BadInput::new(format!("{}: line {number}", path.display()), found, allowed)
        };
        if line.len() as u64 > MAX_LINE {
            return Err(fault("a longer one".to_owned(), format!("at most {MAX_LINE} bytes")).into());
        }
        match serde_json::from_slice(&line) {
            Ok(value) => take(value)?,
            Err(_) if line.last() != Some(&b'\n') => break,
            Err(error) => {
                return Err(fault(error.to_string(), "a log entry of mantissa train".to_owned()).into());
            }
        }
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn steps(text: &str) -> Result<Vec<u64>, String> {
        let temp = tempfile::TempDir::new().unwrap();
        let path = temp.path().join("log.jsonl");
        std::fs::write(&path, text).unwrap();
        let mut all = Vec::new();
        let take = |line: std::collections::BTreeMap<String, u64>| {
            all.push(line["step"]);
            Ok(())
        };
        read(&path, take).map(|()| all).map_err(|e| e.to_string())
    }

    #[test]
    fn only_the_last_line_may_be_cut_off() {
        assert_eq!(steps("{\"step\":1}\n{\"step\":2}\n{\"st").unwrap(), [1, 2]);
        assert_eq!(steps("").unwrap(), [0; 0]);
        let error = steps("{\"step\":1}\n{\"st\n{\"step\":2}\n").unwrap_err();
        assert!(error.contains("log.jsonl: line 2: expected"), "{error}");
    }
}

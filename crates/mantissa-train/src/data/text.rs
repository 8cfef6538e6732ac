//! Documents from files of text or of JSON lines.

use std::path::Path;

use mantissa_store::Error;
use serde_json::Value;

use super::DataError;

/// How documents lie in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TextFormat {
    /// UTF-8 text, cut at a separator where there is one; each part stripped of white space.
    Text {
        /// What stands between documents.
        split: Option<String>,
    },
    /// A JSON object on each line, one of whose fields is the document.
    JsonLines {
        /// The field.
        field: String,
    },
}

/// Files up to this size are read.
const MAX_FILE: u64 = 8 << 30;

/// Gives every document of `path` that is not empty to `each`, and their number back.
///
/// # Errors
/// [`DataError`] for a file that cannot be read, is not UTF-8 or has a line without the field; whatever `each` raises.
pub fn documents(
    path: &Path,
    format: &TextFormat,
    mut each: impl FnMut(&str) -> Result<(), DataError>,
) -> Result<usize, DataError> {
    let text = read(path)?;
    let mut count = 0;
    let mut give = |document: &str| {
        if document.is_empty() {
            return Ok(());
        }
        count += 1;
        each(document)
    };
    match format {
        TextFormat::Text { split: None } => give(text.trim())?,
        TextFormat::Text { split: Some(separator) } => {
            text.split(separator.as_str()).try_for_each(|document| give(document.trim()))?;
        }
        TextFormat::JsonLines { field } => {
            for (i, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
                give(json_field(path, i + 1, line, field)?.trim())?;
            }
        }
    }
    Ok(count)
}

fn json_field(path: &Path, line: usize, text: &str, field: &str) -> Result<String, DataError> {
    let fault = |found: String| DataError::Field {
        file: path.display().to_string(),
        field: format!("line {line}"),
        found,
        allowed: format!("a JSON object with a string \"{field}\""),
    };
    match serde_json::from_str::<Value>(text) {
        Err(error) => Err(fault(error.to_string())),
        Ok(mut value) => match value.get_mut(field).map(Value::take) {
            Some(Value::String(document)) => Ok(document),
            _ => Err(fault("none".to_owned())),
        },
    }
}

fn read(path: &Path) -> Result<String, DataError> {
    let io = |error| Error::Io { path: path.to_owned(), operation: "read text", error };
    let fault = |found: String, allowed: String| DataError::Field {
        file: path.display().to_string(),
        field: "text".to_owned(),
        found,
        allowed,
    };
    let missing = || fault("no such file".to_owned(), "a UTF-8 text".to_owned());
    let size = match std::fs::metadata(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Err(missing()),
        found => found.map_err(io)?.len(),
    };
    if size > MAX_FILE {
        return Err(fault(format!("{size} bytes"), format!("at most {MAX_FILE}; cut it into several files")));
    }
    let bytes = std::fs::read(path).map_err(io)?;
    String::from_utf8(bytes).map_err(|error| {
        fault(format!("no UTF-8 at byte {}", error.utf8_error().valid_up_to()), "a UTF-8 text".to_owned())
    })
}

//! Documents from files of text or of JSON lines.

use std::path::Path;

use mantissa_store::{Error, Part, TextFile};
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

/// Longest document that is read: more than any tokenizer takes.
const MAX_DOCUMENT: u64 = 64 << 20;

/// Gives every document of `path` that is not empty to `each`, one at a time, and their number back.
///
/// # Errors
/// [`DataError`] for a file that cannot be read, is not UTF-8, has a document of more than 64 MiB or a line without the field;
/// whatever `each` raises.
pub fn documents(
    path: &Path,
    format: &TextFormat,
    each: impl FnMut(&str) -> Result<(), DataError>,
) -> Result<usize, DataError> {
    documents_within(path, format, u64::MAX, each)
}

/// [`documents`] of which none takes more than `memory` bytes.
///
/// # Errors
/// As [`documents`]; [`DataError::Memory`].
pub fn documents_within(
    path: &Path,
    format: &TextFormat,
    memory: u64,
    mut each: impl FnMut(&str) -> Result<(), DataError>,
) -> Result<usize, DataError> {
    let mut file = open(path)?;
    let mut count = 0;
    let mut give = |document: &str| {
        if document.is_empty() {
            return Ok(());
        }
        count += 1;
        each(document)
    };
    let most = MAX_DOCUMENT.min(memory);
    for number in 1.. {
        let part = match format {
            TextFormat::Text { split: None } => file.piece(most as usize + 1, most, |_| None)?,
            TextFormat::Text { split: Some(separator) } => file.part(separator, most)?,
            TextFormat::JsonLines { .. } => file.part("\n", most)?,
        };
        match (part, format) {
            (Part::End, _) => break,
            (Part::TooLong, _) => return Err(too_long(path, number, most, memory)),
            (Part::Text(line), TextFormat::JsonLines { .. }) if line.trim().is_empty() => {}
            (Part::Text(line), TextFormat::JsonLines { field }) => {
                if (line.len() as u64).saturating_mul(JSON_BYTES) > memory {
                    let needs = line.len() as u64 * JSON_BYTES;
                    return Err(DataError::Memory { file: named(path), needs, allowed: memory });
                }
                give(json_field(path, number, line, field)?.trim())?;
            }
            (Part::Text(document), _) => give(document.trim())?,
        }
    }
    Ok(count)
}

/// Bytes of memory for each byte of a line of JSON while it is read: lists of numbers have the shortest values.
const JSON_BYTES: u64 = 40;

/// Opens a text.
///
/// # Errors
/// A file that is not there or is none.
pub(super) fn open(path: &Path) -> Result<TextFile, DataError> {
    TextFile::open(path).map_err(|error| match error {
        Error::Missing { .. } => DataError::Field {
            file: named(path),
            field: "text".to_owned(),
            found: "no such file".to_owned(),
            allowed: "a UTF-8 text".to_owned(),
        },
        error => error.into(),
    })
}

pub(super) fn named(path: &Path) -> String {
    path.display().to_string()
}

/// The error of a document that is not read to its end.
pub(super) fn too_long(path: &Path, number: usize, most: u64, memory: u64) -> DataError {
    if most == memory {
        return DataError::Memory { file: named(path), needs: most.saturating_add(1), allowed: memory };
    }
    DataError::Field {
        file: named(path),
        field: format!("document {number}"),
        found: format!("more than {most} bytes"),
        allowed: format!("at most {most}; cut texts into documents (split)"),
    }
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

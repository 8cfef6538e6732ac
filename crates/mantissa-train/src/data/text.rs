//! Reads documents from text and JSONL files.

use std::path::Path;

use mantissa_store::{Error, TextFile, TextPart};
use serde_json::Value;

use super::DataError;

/// Layout of documents in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TextFormat {
    /// UTF-8 text, split at a separator if given; each document is stripped of white space.
    Text {
        /// Separator between documents.
        split: Option<String>,
    },
    /// JSON Lines: one object per line, with the document in one of its fields.
    JsonLines {
        /// Name of the field.
        field: String,
    },
}

/// Maximum document size in bytes, more than any tokenizer accepts.
const MAX_DOCUMENT: u64 = 64 << 20;

/// Documents of a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// Documents with text.
    pub documents: usize,
    /// Records of JSON Lines that are white space alone.
    pub empty: usize,
    /// Line of the first of them, from 1.
    pub first_empty: Option<usize>,
}

/// Passes every non-empty document of `path` to `each`, one at a time; returns their number.
///
/// # Errors
/// [`DataError`] for a file that is unreadable or not UTF-8, a document over 64 MiB, or a line without the
/// field; errors of `each`.
pub fn documents(
    path: &Path,
    format: &TextFormat,
    each: impl FnMut(&str) -> Result<(), DataError>,
) -> Result<usize, DataError> {
    Ok(documents_within(path, format, u64::MAX, each)?.documents)
}

/// Reads documents like [`documents`], with at most `memory` bytes per document; also counts empty records.
///
/// # Errors
/// As [`documents`], and [`DataError::Memory`].
pub fn documents_within(
    path: &Path,
    format: &TextFormat,
    memory: u64,
    mut each: impl FnMut(&str) -> Result<(), DataError>,
) -> Result<Found, DataError> {
    let mut file = open(path)?;
    let mut found = Found::default();
    let mut give = |document: &str, record: Option<usize>| {
        if document.is_empty() {
            // What lies between two separators is no record.
            found.empty += usize::from(record.is_some());
            found.first_empty = found.first_empty.or(record);
            return Ok(());
        }
        found.documents += 1;
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
            (TextPart::End, _) => break,
            (TextPart::TooLong, _) => return Err(too_long(path, number, most, memory)),
            (TextPart::Text(line), TextFormat::JsonLines { .. }) if line.trim().is_empty() => {}
            (TextPart::Text(line), TextFormat::JsonLines { field }) => {
                if (line.len() as u64).saturating_mul(JSON_BYTES) > memory {
                    let needs = line.len() as u64 * JSON_BYTES;
                    return Err(DataError::Memory { file: named(path), needs, allowed: memory });
                }
                give(json_field(path, number, line, field)?.trim(), Some(number))?;
            }
            (TextPart::Text(document), _) => give(document.trim(), None)?,
        }
    }
    Ok(found)
}

/// Bytes of memory per byte of a JSON line while parsing: lists of numbers have the shortest values.
const JSON_BYTES: u64 = 40;

/// Opens a text file.
///
/// # Errors
/// A missing path or one that is not a file.
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

/// Makes the error for a document that is too long to read.
pub(super) fn too_long(path: &Path, number: usize, most: u64, memory: u64) -> DataError {
    if most == memory {
        return DataError::Memory { file: named(path), needs: most.saturating_add(1), allowed: memory };
    }
    DataError::Field {
        file: named(path),
        field: format!("document {number}"),
        found: format!("more than {most} bytes"),
        allowed: format!("at most {most} bytes; fix: split texts into documents (data.split)"),
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
            _ => Err(fault("another value".to_owned())),
        },
    }
}

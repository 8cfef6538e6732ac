//! Reads documents from text and JSONL files.

use std::path::Path;

use mantissa_store::{Error, Shown, TextFile, TextPart};
use serde_json::Value;

use super::DataError;
use super::records::{FORMS, Records, record_word, refuse_table, renaming};

/// Layout of documents in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TextFormat {
    /// UTF-8 text, split at a separator if given; each document is stripped of white space.
    Text {
        /// Separator between documents.
        split: Option<String>,
    },
    /// JSON Lines or a JSON list: objects with the document in one of their fields.
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
    let separator = match format {
        TextFormat::JsonLines { field } => {
            let mut records = Records::open(path, memory)?;
            let held = records.held();
            while let Some((number, text)) = records.next(path, most, memory)? {
                let needs = (text.len() as u64).saturating_mul(JSON_BYTES).saturating_add(held);
                if needs > memory {
                    return Err(DataError::Memory { file: named(path), needs, allowed: memory });
                }
                give(json_field(path, number, text, field)?.trim(), Some(number))?;
            }
            return Ok(found);
        }
        TextFormat::Text { split } => split,
    };
    let mut file = open(path)?;
    for number in 1.. {
        let part = match separator {
            None => file.piece(most as usize + 1, most, |_| None)?,
            Some(separator) => file.part(separator, most)?,
        };
        match part {
            TextPart::End => break,
            TextPart::TooLong => return Err(too_long(path, number, most, memory)),
            TextPart::Text(document) => give(document.trim(), None)?,
        }
    }
    Ok(found)
}

/// Bytes of memory per byte of a JSON line while parsing: lists of numbers have the shortest values.
const JSON_BYTES: u64 = 40;

/// Opens a text file.
///
/// # Errors
/// A missing path or one that is not a file; a table.
pub(super) fn open(path: &Path) -> Result<TextFile, DataError> {
    refuse_table(path)?;
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

fn json_field(path: &Path, record: usize, text: &str, field: &str) -> Result<String, DataError> {
    let place = format!("{} {record}", record_word(path));
    let fault = |field: String, found: String, allowed: String| DataError::Field {
        file: path.display().to_string(),
        field,
        found,
        allowed,
    };
    let object = || format!("a JSON object with a text \"{field}\"");
    let mut value = serde_json::from_str::<Value>(text)
        .map_err(|error| fault(place.clone(), error.to_string(), object()))?;
    let Value::Object(fields) = &mut value else {
        return Err(fault(place, kind(&value).to_owned(), object()));
    };
    match fields.remove(field) {
        Some(Value::String(document)) => Ok(document),
        Some(other) => Err(fault(format!("{place}: {field}"), kind(&other).to_owned(), "a text".to_owned())),
        None => {
            let names: Vec<_> = fields.keys().take(8).map(|name| format!("\"{}\"", Shown(name))).collect();
            let found = match names.as_slice() {
                [] => "no field".to_owned(),
                names => format!("the fields {}", names.join(", ")),
            };
            if let Some(renaming) = renaming(fields.keys()) {
                return Err(fault(place, format!("{found}; fix: {renaming}"), format!("one of {FORMS}")));
            }
            let dialogue = ["messages", "prompt", "conversations", "instruction"];
            let fix = match dialogue.iter().any(|name| fields.contains_key(*name)) {
                true => "set data.chat to true (--set data.chat=true)",
                false => "name the field of the text (--set data.field=NAME)",
            };
            Err(fault(place, format!("{found}; fix: {fix}"), object()))
        }
    }
}

/// Names the kind of a JSON value.
pub(super) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(text) if text.is_empty() => "an empty text",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

//! Records of data: lines of JSON Lines, or items of a JSON list.

use std::ops::Range;
use std::path::Path;

use mantissa_store::{Shown, TextFile, TextPart};

use super::DataError;
use super::text::{named, open, too_long};

/// Forms that records of conversations may have, for messages.
pub(super) const FORMS: &str = "{\"messages\": [{\"role\": …, \"content\": …}, …]}, {\"prompt\": …, \"completion\": …}, {\"instruction\": …, \"input\": …, \"output\": …} (Alpaca), {\"conversations\": [{\"from\": …, \"value\": …}, …]} (ShareGPT) or {\"text\": …}";

/// Names that data sets give to a question, best known first.
const ASKED: [&str; 13] = [
    "prompt",
    "instruction",
    "question",
    "query",
    "problem",
    "user",
    "human",
    "input",
    "source",
    "document",
    "article",
    "request",
    "q",
];
/// Names that data sets give to its answer, best known first.
const ANSWERS: [&str; 14] = [
    "completion",
    "output",
    "answer",
    "response",
    "reply",
    "assistant",
    "gpt",
    "bot",
    "solution",
    "target",
    "chosen",
    "summary",
    "result",
    "a",
];

/// Says which fields of a record to rename so that it is a prompt with its completion, or an instruction with its output; `None`
/// if no two fields are such a pair, or they are named so.
pub(super) fn renaming<'f>(fields: impl Iterator<Item = &'f String> + Clone) -> Option<String> {
    let find = |names: &[&str]| {
        names.iter().find_map(|name| fields.clone().find(|field| field.trim().eq_ignore_ascii_case(name)))
    };
    let (asked, answer) = (find(&ASKED)?, find(&ANSWERS)?);
    // Alpaca's form has an input beside the instruction.
    let named = if asked == "instruction" { ["instruction", "output"] } else { ["prompt", "completion"] };
    let renamed = [asked, answer].into_iter().zip(named).filter(|(from, to)| from != to);
    let renamed: Vec<_> = renamed.map(|(from, to)| format!("\"{}\" to \"{to}\"", Shown(from))).collect();
    (!renamed.is_empty()).then(|| format!("rename {}", renamed.join(" and ")))
}

/// Returns the extension of a file in lower case.
fn extension(path: &Path) -> String {
    path.extension().map(|extension| extension.to_string_lossy().to_lowercase()).unwrap_or_default()
}

/// True if a file holds records: JSON Lines, or JSON.
pub fn is_records(path: &Path) -> bool {
    ["jsonl", "ndjson", "json"].contains(&&*extension(path))
}

/// Returns the word for a record of a file in messages: a line of JSON Lines, an item of a JSON list.
pub fn record_word(path: &Path) -> &'static str {
    if extension(path) == "json" { "item" } else { "line" }
}

/// Formats of tables, by extension, with the reader of pandas that opens them.
const TABLES: [(&str, &str, &str); 7] = [
    ("parquet", "Parquet", "read_parquet"),
    ("csv", "CSV", "read_csv"),
    ("tsv", "TSV", "read_table"),
    ("arrow", "Arrow", "read_feather"),
    ("feather", "Feather", "read_feather"),
    ("xlsx", "Excel", "read_excel"),
    ("orc", "ORC", "read_orc"),
];

/// Refuses a table, whose bytes or separators would be trained on as text.
///
/// # Errors
/// [`DataError::Field`] with the forms that are read and the command that converts it.
pub fn refuse_table(path: &Path) -> Result<(), DataError> {
    let found = TABLES.into_iter().find(|(end, ..)| *end == extension(path));
    let Some((_, name, reader)) = found else { return Ok(()) };
    let file = named(path);
    let target = path.with_extension("jsonl");
    // A name with quotes is left to the user.
    let [from, to] = [path, &target].map(|path| path.display().to_string().replace(['\'', '"', '\\'], "?"));
    Err(DataError::Field {
        field: "format".to_owned(),
        found: format!(
            "{name}; fix: python -c \"import pandas; pandas.{reader}('{from}').to_json('{to}', orient='records', lines=True)\""
        ),
        allowed: format!("a text, or JSON Lines or a JSON list of {FORMS}"),
        file,
    })
}

/// Reader of records.
pub(super) enum Records {
    /// JSON Lines, read one at a time.
    Lines {
        /// File.
        file: TextFile,
        /// Last line.
        line: String,
        /// Its number.
        number: usize,
    },
    /// Text of a file that may be one JSON list, held as a whole.
    Held {
        /// Text.
        text: String,
        /// Place after the last record.
        at: usize,
        /// True if the text is a list.
        is_list: bool,
        /// Number of the last record.
        number: usize,
    },
}

impl Records {
    /// Opens a file of records.
    ///
    /// # Errors
    /// As [`open`]; [`DataError::Memory`] for JSON of more than `memory` bytes.
    pub(super) fn open(path: &Path, memory: u64) -> Result<Self, DataError> {
        let file = open(path)?;
        if extension(path) != "json" {
            return Ok(Records::Lines { file, line: String::new(), number: 0 });
        }
        let size = file.size().unwrap_or(memory);
        let Some(text) = file.whole(memory)? else {
            return Err(DataError::Memory {
                file: named(path),
                needs: size.saturating_add(1),
                allowed: memory,
            });
        };
        let begin = text.len() - text.trim_start().len();
        let is_list = text[begin..].starts_with('[');
        Ok(Records::Held { at: begin + usize::from(is_list), text, is_list, number: 0 })
    }

    /// Bytes that are held besides a record.
    pub(super) fn held(&self) -> u64 {
        match self {
            Records::Lines { .. } => 0,
            Records::Held { text, .. } => text.len() as u64,
        }
    }

    /// Returns the next record that is not blank, with its number from 1.
    ///
    /// # Errors
    /// A line of more than `most` bytes; I/O; a text that is not UTF-8; what follows the items of a list.
    pub(super) fn next(
        &mut self,
        path: &Path,
        most: u64,
        memory: u64,
    ) -> Result<Option<(usize, &str)>, DataError> {
        match self {
            Records::Lines { file, line, number } => loop {
                *number += 1;
                match file.part("\n", most)? {
                    TextPart::End => return Ok(None),
                    TextPart::TooLong => return Err(too_long(path, *number, most, memory)),
                    TextPart::Text(part) if part.trim().is_empty() => {}
                    TextPart::Text(part) => {
                        line.clear();
                        line.push_str(part);
                        return Ok(Some((*number, line.as_str())));
                    }
                }
            },
            Records::Held { text, at, is_list, number } => {
                let found = if *is_list { item(text, *at) } else { line(text, *at) };
                let Some((record, next)) = found else {
                    return match text[*at..].trim() {
                        "" | "]" => Ok(None),
                        _ if !*is_list => Ok(None),
                        rest => Err(unexpected(path, *number, rest)),
                    };
                };
                *at = next;
                *number += 1;
                if record.len() as u64 > most {
                    return Err(too_long(path, *number, most, memory));
                }
                Ok(Some((*number, &text[record])))
            }
        }
    }
}

/// Makes the error of what stands between items or after a list.
fn unexpected(path: &Path, number: usize, rest: &str) -> DataError {
    let shown: String = rest.chars().take(20).collect();
    DataError::Field {
        file: named(path),
        field: format!("after item {number}"),
        found: format!("{shown:?}"),
        allowed: "\",\" and another item, or \"]\" at the end".to_owned(),
    }
}

/// Returns the next line that is not blank, and the place after it.
fn line(text: &str, at: usize) -> Option<(Range<usize>, usize)> {
    let rest = &text[at..];
    let begin = at + rest.len() - rest.trim_start().len();
    if begin == text.len() {
        return None;
    }
    let end = text[begin..].find('\n').map_or(text.len(), |length| begin + length);
    Some((begin..end, end))
}

/// Returns the next item of a list whose text before `at` is read, and the place after it and its comma. The item need not be
/// valid JSON: brackets and quotes alone are counted.
fn item(text: &str, at: usize) -> Option<(Range<usize>, usize)> {
    let rest = &text[at..];
    let begin = at + rest.len() - rest.trim_start().len();
    let (mut depth, mut quoted, mut escaped) = (0usize, false, false);
    for (i, byte) in text.bytes().enumerate().skip(begin) {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if quoted => escaped = true,
            b'"' => quoted = !quoted,
            _ if quoted => {}
            b'{' | b'[' => depth += 1,
            b'}' | b']' if depth > 0 => depth -= 1,
            b',' if depth == 0 && i > begin => return Some((begin..i, i + 1)),
            b']' | b',' if depth == 0 => return (i > begin).then_some((begin..i, i)),
            _ => {}
        }
    }
    // A list that is cut off: its last item says so when it is parsed.
    (begin < text.len()).then_some((begin..text.len(), text.len()))
}

/// Returns the first record in the first bytes of a file, as far as they hold it.
pub fn first_record<'t>(path: &Path, start: &'t str) -> &'t str {
    let start = start.strip_prefix('\u{feff}').unwrap_or(start).trim_start();
    let range = match start.strip_prefix('[') {
        Some(_) if extension(path) == "json" => item(start, 1),
        _ => line(start, 0),
    };
    range.map_or("", |(range, _)| &start[range])
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn all(name: &str, text: &str) -> Result<Vec<(usize, String)>, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        let mut records = Records::open(&path, 1 << 20).map_err(|error| error.to_string())?;
        let mut all = Vec::new();
        while let Some((number, text)) =
            records.next(&path, 1 << 10, 1 << 20).map_err(|error| error.to_string())?
        {
            all.push((number, text.trim().to_owned()));
        }
        Ok(all)
    }

    #[test]
    fn lines_and_lists_are_records() {
        let list = "\u{feff}[\n  {\"a\": \"x, ] \\\" }\"},\n  {\"a\": [1, {\"b\": 2}]}\n]\n";
        let found = all("x.json", list).unwrap();
        assert_eq!(found[0], (1, "{\"a\": \"x, ] \\\" }\"}".to_owned()));
        assert_eq!((found[1].1.as_str(), found.len()), ("{\"a\": [1, {\"b\": 2}]}", 2));
        for name in ["x.json", "x.jsonl", "x.NDJSON"] {
            let found = all(name, "\u{feff}{\"a\": 1}\r\n\n{\"a\": 2}").unwrap();
            assert_eq!(found.len(), 2, "{name}: {found:?}");
            assert_eq!(found[1].1, "{\"a\": 2}", "{name}");
        }
        assert_eq!(all("x.json", "[]").unwrap(), []);
        assert_eq!(all("x.json", " ").unwrap(), []);
        assert_eq!(all("x.json", "[{\"a\": 1}, {\"b\"").unwrap()[1].1, "{\"b\"");
        assert!(all("x.json", "[1] 2").unwrap_err().contains("after item 1"));
        let error = all("x.json", &format!("[\"{}\"]", "a".repeat(2000))).unwrap_err();
        assert!(error.contains("more than 1024 bytes"), "{error}");
    }

    #[test]
    fn pairs_of_other_names_are_told_apart_from_texts() {
        let told = |fields: &[&str]| {
            let fields: Vec<String> = fields.iter().map(|field| (*field).to_owned()).collect();
            renaming(fields.iter())
        };
        let prompt = |asked: &str, answer: &str| {
            Some(format!("rename \"{asked}\" to \"prompt\" and \"{answer}\" to \"completion\""))
        };
        for pair in
            [["question", "answer"], ["input", "output"], ["query", "response"], ["Question", "Answer"]]
        {
            assert_eq!(told(&pair), prompt(pair[0], pair[1]));
        }
        assert_eq!(told(&["id", "context", "question", "answer"]), prompt("question", "answer"));
        assert_eq!(told(&["prompt", "response"]).unwrap(), "rename \"response\" to \"completion\"");
        assert_eq!(told(&["instruction", "input", "response"]).unwrap(), "rename \"response\" to \"output\"");
        for none in
            [&["prompt", "completion"][..], &["instruction", "output"], &["title", "body"], &["answer"], &[]]
        {
            assert_eq!(told(none), None, "{none:?}");
        }
    }

    #[test]
    fn tables_are_refused_with_their_conversion() {
        for (name, part) in [("a.csv", "read_csv('a.csv').to_json('a.jsonl'"), ("b.PARQUET", "read_parquet(")]
        {
            let error = refuse_table(Path::new(name)).unwrap_err().to_string();
            assert!(error.contains(part) && error.contains("\"instruction\""), "{error}");
        }
        assert!(refuse_table(Path::new("a.txt")).is_ok() && refuse_table(Path::new("a")).is_ok());
    }

    #[test]
    fn the_first_record_tells_the_form() {
        let first = |name: &str, text| first_record(Path::new(name), text);
        assert_eq!(first("x.json", "\u{feff} [ {\"a\": 1}, {\"b\""), "{\"a\": 1}");
        assert_eq!(first("x.jsonl", "\n{\"a\": 1}\n{}"), "{\"a\": 1}");
        assert_eq!(first("x.json", "[{\"a\": [1, 2"), "{\"a\": [1, 2");
        assert_eq!(first("x.json", ""), "");
    }
}

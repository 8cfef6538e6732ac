//! Task files: JSON Lines, one item a line.
//!
//! - Choice by log-likelihood: `{"prompt": TEXT, "choices": [TEXT, …], "answer": INDEX}`.
//! - Generation: `{"prompt": TEXT, "target": TEXT or [TEXT, …], "match": RULE, "stop": [TEXT, …], "max_tokens": N}`.
//!
//! Both may have `"id"` and `"group"`; other keys are ignored.

use std::collections::BTreeMap;

use mantissa_store::{ErrorClass, Shown};
use serde::Deserialize;
use serde::de::IgnoredAny;

use super::accept::Accept;
use super::{Item, Question};

/// Largest number of items of a task.
const MAX_ITEMS: usize = 1 << 20;

/// Largest number of choices of an item.
const MAX_CHOICES: usize = 1000;

/// New tokens of a generation where the item does not say.
const NEW_TOKENS: usize = 64;

/// Largest number of new tokens of a generation.
const MAX_NEW_TOKENS: usize = 1 << 16;

/// Error of a task file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TaskError {
    /// A line is not an item.
    #[error(
        "{file}: line {line}: {field}: expected {allowed}, got {found}; fix: mantissa help reference/tasks"
    )]
    Item {
        /// Task file.
        file: String,
        /// Line, from 1.
        line: usize,
        /// Key of the item.
        field: &'static str,
        /// Accepted form.
        allowed: String,
        /// What the line holds.
        found: String,
    },
    /// The file has no item.
    #[error("{file}: expected at least one item, each a JSON object on a line of its own, got none")]
    Empty {
        /// Task file.
        file: String,
    },
    /// The file has too many items.
    #[error("{file}: expected at most {MAX_ITEMS} items, got more")]
    TooMany {
        /// Task file.
        file: String,
    },
}

impl TaskError {
    /// Returns who has to act: the input or the environment is at fault.
    pub fn class(&self) -> ErrorClass {
        ErrorClass::Input
    }
}

/// Fields of a line.
#[derive(Deserialize)]
struct Line {
    id: Option<String>,
    group: Option<String>,
    prompt: String,
    choices: Option<Vec<String>>,
    answer: Option<usize>,
    target: Option<Targets>,
    #[serde(rename = "match")]
    accept: Option<String>,
    stop: Option<Vec<String>>,
    max_tokens: Option<usize>,
}

/// One target or several.
#[derive(Deserialize)]
#[serde(untagged)]
enum Targets {
    One(String),
    Several(Vec<String>),
}

/// Reads the items of a task from the text of `file`. Empty lines are skipped.
///
/// # Errors
/// [`TaskError`], with the line and the field.
pub fn items(file: &str, text: &str) -> Result<Vec<Item>, TaskError> {
    let mut items = Vec::new();
    for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        if items.len() == MAX_ITEMS {
            return Err(TaskError::TooMany { file: file.to_owned() });
        }
        items.push(item(&At { file, line: index + 1 }, line)?);
    }
    if items.is_empty() { Err(TaskError::Empty { file: file.to_owned() }) } else { Ok(items) }
}

/// Place of a line, for errors.
struct At<'a> {
    file: &'a str,
    line: usize,
}

impl At<'_> {
    fn error(&self, field: &'static str, allowed: impl Into<String>, found: impl Into<String>) -> TaskError {
        let file = self.file.to_owned();
        TaskError::Item { file, line: self.line, field, allowed: allowed.into(), found: found.into() }
    }
}

/// Names of fields in files of other programs, with the names here.
const FOREIGN: [(&str, &str); 7] = [
    ("question", "prompt"),
    ("query", "prompt"),
    ("input", "prompt"),
    ("context", "prompt"),
    ("options", "choices"),
    ("label", "answer"),
    ("gold", "answer"),
];

/// Returns a field of another program that stands for a missing one, with its name here.
fn renamed(text: &str) -> Option<(&'static str, &'static str)> {
    let found: BTreeMap<String, IgnoredAny> = serde_json::from_str(text).ok()?;
    let stands = |(theirs, ours): &&(&str, &str)| found.contains_key(*theirs) && !found.contains_key(*ours);
    FOREIGN.iter().find(stands).copied()
}

fn item(at: &At<'_>, text: &str) -> Result<Item, TaskError> {
    let allowed = "an object with a prompt, and choices with an answer or a target";
    let line: Line = serde_json::from_str(text).map_err(|error| {
        let renamed = renamed(text)
            .map_or_else(String::new, |(theirs, ours)| format!(": \"{theirs}\" is here \"{ours}\""));
        at.error("item", allowed, format!("{error}{renamed}"))
    })?;
    let question = match line.choices {
        Some(choices) => choice(at, choices, line.answer)?,
        None => generation(at, line.target, line.accept, line.stop, line.max_tokens)?,
    };
    let id = line.id.unwrap_or_else(|| at.line.to_string());
    Ok(Item { line: at.line, id, group: line.group, prompt: line.prompt, question })
}

fn choice(at: &At<'_>, choices: Vec<String>, answer: Option<usize>) -> Result<Question, TaskError> {
    if !(2..=MAX_CHOICES).contains(&choices.len()) {
        let allowed = format!("2 to {MAX_CHOICES} choices");
        return Err(at.error("choices", allowed, choices.len().to_string()));
    }
    if let Some(empty) = choices.iter().position(String::is_empty) {
        return Err(at.error("choices", "texts that are not empty", format!("an empty choice {empty}")));
    }
    let last = choices.len() - 1;
    match answer {
        Some(answer) if answer <= last => Ok(Question::Choice { choices, answer }),
        found => {
            let found = found.map_or_else(|| "nothing".to_owned(), |answer| answer.to_string());
            Err(at.error("answer", format!("an index from 0 to {last}"), found))
        }
    }
}

fn generation(
    at: &At<'_>,
    target: Option<Targets>,
    accept: Option<String>,
    stop: Option<Vec<String>>,
    tokens: Option<usize>,
) -> Result<Question, TaskError> {
    let accept = match accept {
        None => Accept::default(),
        Some(name) => Accept::named(&name).ok_or_else(|| {
            let names: Vec<_> = Accept::ALL.iter().map(|(name, _)| *name).collect();
            at.error("match", names.join(", "), Shown(&name).to_string())
        })?,
    };
    let targets = match target {
        Some(Targets::One(target)) => vec![target],
        Some(Targets::Several(targets)) => targets,
        None => Vec::new(),
    };
    if targets.is_empty() && !accept.needs_no_target() {
        return Err(at.error("target", "a text or a list of texts (or choices with an answer)", "nothing"));
    }
    let stop = stop.unwrap_or_default();
    if stop.iter().any(String::is_empty) {
        return Err(at.error("stop", "texts that are not empty", "an empty text"));
    }
    let tokens = tokens.unwrap_or(NEW_TOKENS);
    if !(1..=MAX_NEW_TOKENS).contains(&tokens) {
        return Err(at.error("max_tokens", format!("1 to {MAX_NEW_TOKENS}"), tokens.to_string()));
    }
    Ok(Question::Generate { targets, accept, stop, tokens })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use super::*;

    #[test]
    fn both_kinds_are_read() {
        let text = r#"
{"id": "a", "group": "g", "prompt": "1+1=", "choices": ["2", "3"], "answer": 0, "note": "ignored"}

{"prompt": "2+2=", "target": "4", "stop": ["\n"], "max_tokens": 4}
{"prompt": "{", "match": "json"}"#;
        let found = items("t.jsonl", text).unwrap();
        assert_eq!(
            found.iter().map(|item| (item.line, &*item.id)).collect::<Vec<_>>(),
            [(2, "a"), (4, "4"), (5, "5")]
        );
        assert_eq!(found[0].question, Question::Choice { choices: vec!["2".into(), "3".into()], answer: 0 });
        let (targets, stop) = (vec!["4".to_owned()], vec!["\n".to_owned()]);
        assert_eq!(found[1].question, Question::Generate { targets, accept: Accept::Exact, stop, tokens: 4 });
    }

    #[test]
    fn errors_name_line_and_field() {
        let error = |text: &str| items("t.jsonl", text).unwrap_err().to_string();
        let starts = |text: &str, start: &str| {
            let error = error(text);
            assert!(error.starts_with(start), "{error}");
        };
        starts("", "t.jsonl: expected at least one item");
        starts("\n[1]", "t.jsonl: line 2: item: expected an object");
        starts(r#"{"choices": ["a","b"], "answer": 0}"#, "t.jsonl: line 1: item:");
        starts(
            r#"{"prompt": "p", "choices": ["a"], "answer": 0}"#,
            "t.jsonl: line 1: choices: expected 2 to",
        );
        starts(r#"{"prompt": "p", "choices": ["a",""], "answer": 0}"#, "t.jsonl: line 1: choices:");
        starts(
            r#"{"prompt": "p", "choices": ["a","b"], "answer": 2}"#,
            "t.jsonl: line 1: answer: expected an index from 0 to 1, got 2",
        );
        starts(r#"{"prompt": "p", "choices": ["a","b"]}"#, "t.jsonl: line 1: answer:");
        starts(r#"{"prompt": "p"}"#, "t.jsonl: line 1: target:");
        starts(
            r#"{"prompt": "p", "target": "x", "match": "near"}"#,
            "t.jsonl: line 1: match: expected exact,",
        );
        starts(r#"{"prompt": "p", "target": "x", "stop": [""]}"#, "t.jsonl: line 1: stop:");
        starts(r#"{"prompt": "p", "target": "x", "max_tokens": 0}"#, "t.jsonl: line 1: max_tokens:");
        let foreign = error(r#"{"question": "p", "choices": ["a","b"], "answer": 0}"#);
        assert!(foreign.contains("\"question\" is here \"prompt\""), "{foreign}");
        assert!(foreign.ends_with("; fix: mantissa help reference/tasks"), "{foreign}");
    }
}

//! Topics: a question, and the lines of its answer as texts with placeholders.

use std::sync::LazyLock;

use serde::Deserialize;

use super::expression::{Expression, Scope};
use super::lists;
use super::template::{parse, render};
use super::value::{Fault, Row, Subject, Value};

/// Standing question. The texts are in `texts/*.toml`; `template.rs` has their grammar.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Topic {
    /// Name on the command line.
    pub name: String,
    /// Question.
    pub question: String,
    /// Lines of the answer.
    pub(super) lines: Vec<Line>,
    /// Command that measures it; MODEL stands for the model.
    pub measure: String,
    /// Numbers of the statements about it that are often made and wrong.
    #[serde(default)]
    pub corrections: Vec<u32>,
    /// Questions of the engineers' guide that it answers, by section.
    #[serde(default)]
    pub answers: Vec<String>,
}

/// Line of an answer.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum Line {
    /// Text, always there.
    Plain(String),
    /// Text under a condition, or for each row of a list.
    Made(Made),
}

/// Text that makes no line, one or several.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Made {
    /// Text.
    pub(super) text: String,
    /// Condition; evaluated for each row of a list.
    #[serde(rename = "if")]
    pub(super) condition: Option<String>,
    /// Rows.
    pub(super) each: Option<Each>,
}

/// Rows of which each makes a line.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum Each {
    /// Rows of a list of [`lists`], with its arguments.
    List(String),
    /// Rows of one field, `$a`, or several: `$a`, `$b`, …
    Rows(Vec<Cells>),
}

/// Fields of a row.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum Cells {
    /// One field.
    One(String),
    /// Several.
    Several(Vec<String>),
}

/// Names of the fields of rows that stand in the text.
const LETTERS: [&str; 6] = ["a", "b", "c", "d", "e", "f"];

impl Cells {
    /// Returns the fields: numbers, or words.
    fn row(&self) -> Row {
        let value = |text: &String| match text.parse::<f64>() {
            Ok(number) => Value::Number(number),
            Err(_) => Value::text(text),
        };
        let cells = match self {
            Cells::One(cell) => std::slice::from_ref(cell),
            Cells::Several(cells) => cells,
        };
        LETTERS.into_iter().zip(cells.iter().map(value)).collect()
    }
}

impl Each {
    /// Returns the rows.
    fn rows(&self, subject: &Subject<'_>) -> Result<Vec<Row>, Fault> {
        let text = match self {
            Each::Rows(rows) => return Ok(rows.iter().map(Cells::row).collect()),
            Each::List(text) => text,
        };
        let Expression::Named(name, texts) = Expression::parse(text)? else {
            return Err(Fault::Syntax(text.clone(), "expected a list"));
        };
        let list = lists::find(&name).ok_or_else(|| Fault::Unknown(name.clone()))?;
        let row = Row::new();
        let scope = Scope { subject, row: &row };
        list(subject, &scope.arguments(&name, &texts)?)
    }
}

impl Line {
    /// Adds the lines that it makes to `lines`.
    fn render(&self, subject: &Subject<'_>, lines: &mut Vec<String>) -> Result<(), Fault> {
        let (text, condition, rows) = match self {
            Line::Plain(text) => (text, None, vec![Row::new()]),
            Line::Made(made) => {
                let rows =
                    made.each.as_ref().map_or_else(|| Ok(vec![Row::new()]), |each| each.rows(subject))?;
                (&made.text, made.condition.as_deref().map(Expression::parse).transpose()?, rows)
            }
        };
        let pieces = parse(text)?;
        for row in &rows {
            let scope = Scope { subject, row };
            if condition.as_ref().map_or(Ok(true), |c| Ok(c.evaluate(&scope)?.holds()))? {
                lines.push(render(&pieces, &scope)?);
            }
        }
        Ok(())
    }
}

impl Topic {
    /// Renders the lines of the answer.
    ///
    /// # Errors
    /// The first [`Fault`] of a text.
    #[cfg(test)]
    pub(super) fn checked(&self, subject: &Subject<'_>) -> Result<Vec<String>, Fault> {
        let mut lines = Vec::new();
        self.lines.iter().try_for_each(|line| line.render(subject, &mut lines))?;
        Ok(lines)
    }

    /// Renders the lines of the answer; a line with a fault, which a test excludes, says the fault.
    pub(super) fn lines(&self, subject: &Subject<'_>) -> Vec<String> {
        let mut lines = Vec::new();
        for line in &self.lines {
            if let Err(fault) = line.render(subject, &mut lines) {
                lines.push(format!("[{fault}]"));
            }
        }
        lines
    }
}

/// Texts of topics, in the order of the list.
pub(super) const TEXTS: [&str; 5] = [
    include_str!("texts/inference.toml"),
    include_str!("texts/formats.toml"),
    include_str!("texts/methods.toml"),
    include_str!("texts/practice.toml"),
    include_str!("texts/training.toml"),
];

/// Topics of one kind: a file of `texts/`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Group {
    /// Title.
    #[serde(rename = "group")]
    pub title: String,
    /// Topics.
    #[serde(rename = "topic")]
    pub topics: Vec<Topic>,
}

/// Every group; a file that does not parse, which a test excludes, is left out.
static GROUPS: LazyLock<Vec<Group>> =
    LazyLock::new(|| TEXTS.iter().filter_map(|text| toml::from_str(text).ok()).collect());

/// Returns every group of topics.
pub fn groups() -> &'static [Group] {
    &GROUPS
}

/// Returns every topic.
pub fn topics() -> impl Iterator<Item = &'static Topic> {
    groups().iter().flat_map(|group| &group.topics)
}

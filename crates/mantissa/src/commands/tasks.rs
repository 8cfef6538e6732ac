//! Task files of a command, and how scores are shown.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::Result;
use mantissa_eval::EvalError;
use mantissa_eval::tasks::{self, Encoded, Group, Item, Score, Task};
use mantissa_model::{Bos, Tokenizer};
use mantissa_quant::{TaskRun, TaskRuns, TaskScore};
use mantissa_store::convention::ModelFiles;
use mantissa_store::{FileDigest, Paths};

use super::model::{ModelPath, load_tokenizer};
use super::render_chat;
use super::text::{bound, read_text};
use crate::context::Context;
use crate::output::{Align, Table, labelled};
use crate::report::{Html, Page, table};

/// Built-in tasks: name and text.
const BUILT_IN: [(&str, &str); 4] = [
    ("cloze", include_str!("../../tasks/cloze.jsonl")),
    ("retrieval", include_str!("../../tasks/retrieval.jsonl")),
    ("arithmetic", include_str!("../../tasks/arithmetic.jsonl")),
    ("format", include_str!("../../tasks/format.jsonl")),
];

/// Returns the text of a built-in task.
fn built_in(path: &Path) -> Option<&'static str> {
    BUILT_IN.iter().find(|(name, _)| path.as_os_str() == *name).map(|(_, text)| *text)
}

/// Adds the task files that are read.
pub fn paths(given: &[PathBuf], paths: &mut Paths) {
    given.iter().filter(|path| built_in(path).is_none()).for_each(|path| paths.read(path));
}

/// Returns the items of the built-in retrieval task.
///
/// # Errors
/// None: the task is part of the program.
pub fn retrieval() -> Result<Vec<Item>> {
    let text = built_in(Path::new("retrieval")).unwrap_or_default();
    Ok(tasks::items("retrieval", text)?)
}

/// Task as read from its file.
pub struct Read {
    /// Path as given, or name of a built-in task.
    path: PathBuf,
    /// SHA-256 of the file.
    sha256: String,
    items: Vec<Item>,
}

impl Read {
    /// Reads a built-in task or a file.
    ///
    /// # Errors
    /// A file that cannot be read; an item that is not valid, with its line.
    pub fn new(path: &Path) -> Result<Self> {
        let name = path.display().to_string();
        let of = |text: &str| {
            Ok::<_, anyhow::Error>((FileDigest::of(text.as_bytes()), tasks::items(&name, text)?))
        };
        let (digest, items) = match built_in(path) {
            Some(text) => of(text)?,
            None => of(&read_text(path)?)?,
        };
        Ok(Read { path: path.to_owned(), sha256: digest.hex(), items })
    }

    /// Tokenizes the items for `model`; with `chat` each prompt is rendered as a message of the user.
    ///
    /// # Errors
    /// A prompt that the chat template or the tokenizer refuses; a choice without a token of its own.
    pub fn encode(self, model: &ModelPath, tokenizer: &Tokenizer, chat: bool, bos: Bos) -> Result<Task> {
        let name = self.path.display().to_string();
        let encoded = self.items.iter().map(|item| encoded(&name, item, model, tokenizer, (chat, bos)));
        Ok(Task { encoded: encoded.collect::<Result<_>>()?, name, items: self.items })
    }
}

fn encoded(
    task: &str,
    item: &Item,
    model: &ModelPath,
    tokenizer: &Tokenizer,
    (chat, bos): (bool, Bos),
) -> Result<Encoded> {
    let rendered = match chat {
        true => Some(render_chat::conversation(model, tokenizer, None, &item.prompt)?),
        false => None,
    };
    // A chat template writes the special tokens itself.
    let bos = if chat { Bos::Never } else { bos };
    tasks::encode(item, rendered.as_deref(), tokenizer, bos).map_err(|error| {
        let error = EvalError::Item { line: item.line, error: Box::new(error) };
        anyhow::Error::from(error).context(task.to_owned())
    })
}

/// Tasks that a command runs on its output before it appears.
#[derive(clap::Args)]
pub struct OutputTasks {
    /// Also compare the accuracy on a task; can be repeated
    ///
    /// FILE.jsonl, or a built-in task: cloze, retrieval, arithmetic, format. Output and source answer each item before
    /// the output appears; quality.json records both accuracies, as eval --task --reference measures them.
    #[arg(long, value_name = "TASK", help_heading = "Evaluation")]
    task: Vec<PathBuf>,
    /// Use each prompt of a task as a chat message of the user
    ///
    /// MODEL's chat template renders it.
    #[arg(long, requires = "task", help_heading = "Evaluation", hide_short_help = true)]
    chat: bool,
    /// Fail if the accuracy of a task falls by more, such as 0.02
    ///
    /// Against the source. The output then stays away from --out, and the exit code is 1.
    #[arg(long, value_name = "SHARE", value_parser = bound, requires = "task", help_heading = "Evaluation", hide_short_help = true)]
    max_accuracy_drop: Option<f64>,
}

impl OutputTasks {
    /// Adds the task files to the inputs of a command.
    pub fn paths(&self, files: &mut Paths) {
        paths(&self.task, files);
    }

    /// Reads the tasks and tokenizes them for `source`, the opened `model`; `None` without one.
    ///
    /// # Errors
    /// A task that cannot be read or run, with its line.
    pub fn runs(
        &self,
        model: &ModelPath,
        source: &ModelFiles,
        context: &Context,
    ) -> Result<Option<TaskRuns>> {
        if self.task.is_empty() {
            return Ok(None);
        }
        let read = self.task.iter().map(|path| Read::new(path)).collect::<Result<Vec<_>>>()?;
        let runs = context.reading_texts(|| {
            let tokenizer = load_tokenizer(source, context)?;
            let run = |read: Read| {
                let (sha256, chat) = (read.sha256.clone(), self.chat);
                let file = read.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                let task = read.encode(model, &tokenizer, chat, Bos::Auto)?;
                task.check_context(super::model::context_length(source)?)
                    .map_err(|error| anyhow::Error::from(error).context(task.name.clone()))?;
                // quality.json names no folder.
                Ok(TaskRun { task: Task { name: file, ..task }, sha256, chat })
            };
            read.into_iter().map(run).collect::<Result<Vec<_>>>()
        })?;
        Ok(Some(TaskRuns::new(source, runs, self.max_accuracy_drop)?))
    }
}

/// Notes a reference that does not answer better than by guessing.
pub fn note_guessing(task: &str, score: &Score, context: &Context) {
    let Some(compared) = &score.reference else { return };
    // Standard error of guessing; generated text is never right by chance.
    let noise = (score.chance * (1.0 - score.chance) / score.items as f64).sqrt();
    if compared.accuracy <= score.chance + 2.0 * noise {
        context.note(&format!(
            "{task}: the reference answers no better than by guessing ({:.1} %, chance {:.1} %): this task cannot show a loss",
            100.0 * compared.accuracy,
            100.0 * score.chance
        ));
    }
}

/// Makes a table of scores, groups below their task. `reference` heads the column of the model that they are compared
/// with, if they are.
pub fn score_table<'a>(
    scores: impl IntoIterator<Item = (&'a str, &'a Score, &'a [Group])>,
    reference: Option<&'static str>,
) -> Table {
    let mut columns = vec![
        ("task", Align::Left),
        ("items", Align::Right),
        ("accuracy, %", Align::Right),
        ("chance", Align::Right),
        ("per character, %", Align::Right),
    ];
    if let Some(reference) = reference {
        columns.extend([
            (reference, Align::Right),
            ("change, points", Align::Right),
            ("gained", Align::Right),
            ("lost", Align::Right),
            ("Δ loss of the answer", Align::Right),
        ]);
    }
    let mut table = Table::new(columns).optional(["per character, %", "chance", "Δ loss of the answer"]);
    for (task, score, groups) in scores {
        table.row(row(task, score));
        for group in groups {
            table.row(row(&format!("  {}", group.group), &group.score));
        }
    }
    table
}

/// Makes the table of the scores of an output, compared with its source.
fn output_table(scores: &[TaskScore]) -> Table {
    score_table(scores.iter().map(|task| (&*task.task, &task.score, &task.groups[..])), Some("source"))
}

/// Formats a share in percent.
fn percent(share: f64) -> String {
    format!("{:.1}", 100.0 * share)
}

/// Formats a share in percent with its standard error.
fn percent_se(mean: f64, se: Option<f64>) -> String {
    with_se(percent(mean), se)
}

/// Formats a difference of shares in points with its standard error.
fn points(mean: f64, se: Option<f64>) -> String {
    with_se(format!("{:+.1}", 100.0 * mean), se)
}

fn with_se(mean: String, se: Option<f64>) -> String {
    se.map_or_else(|| mean.clone(), |se| format!("{mean} ± {}", percent(se)))
}

/// Formats a difference of losses with its standard error; `-` if there is none.
fn nats(mean: Option<f64>, se: Option<f64>) -> String {
    let Some(mean) = mean else { return "-".to_owned() };
    se.map_or_else(|| format!("{mean:+.3}"), |se| format!("{mean:+.3} ± {se:.3}"))
}

fn row(name: &str, score: &Score) -> Vec<String> {
    let norm = score.accuracy_norm.map(|norm| percent_se(norm, score.accuracy_norm_se));
    let mut cells = vec![
        name.to_owned(),
        score.items.to_string(),
        percent_se(score.accuracy, score.accuracy_se),
        percent(score.chance),
        norm.unwrap_or_else(|| "-".to_owned()),
    ];
    if let Some(compared) = &score.reference {
        cells.extend([
            percent(compared.accuracy),
            points(compared.delta_accuracy, compared.delta_accuracy_se),
            compared.gained.to_string(),
            compared.lost.to_string(),
            nats(compared.delta_answer_nll, compared.delta_answer_nll_se),
        ]);
    }
    cells
}

/// Describes the score of an output in a line: accuracy of source and output, change, flips.
pub fn line(task: &TaskScore) -> String {
    let score = &task.score;
    let mut text = format!("{}: accuracy {} %", task.task, percent_se(score.accuracy, score.accuracy_se));
    if let Some(compared) = &score.reference {
        let change = points(compared.delta_accuracy, compared.delta_accuracy_se);
        text += &format!(", source {} %: {change} points", percent(compared.accuracy));
        text += &format!(" ({} gained, {} lost of {} items)", compared.gained, compared.lost, score.items);
        if compared.delta_answer_nll.is_some() {
            let loss = nats(compared.delta_answer_nll, compared.delta_answer_nll_se);
            text += &format!("; Δ loss of the answer {loss} nats");
        }
    }
    text
}

/// Prints the scores of an output, one line each.
///
/// # Errors
/// As `out`.
pub fn human(out: &mut dyn Write, scores: &[TaskScore]) -> io::Result<()> {
    scores.iter().try_for_each(|score| labelled(out, "task", &line(score)))
}

/// Appends the section of the scores of an output, if there are any.
pub fn section(page: &mut Page, scores: &[TaskScore]) {
    if scores.is_empty() {
        return;
    }
    page.push(Html::heading("Tasks"));
    page.push(Html::paragraph(
        "Accuracy of source and output on the same items, with standard errors over items. Gained: answers that are now \
         right; lost: answers that are now wrong. Δ loss of the answer: change of -ln p of the right choice, nats.",
    ));
    page.push(table("Accuracy on tasks", &output_table(scores)));
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn built_in_tasks_are_sound() {
        for (name, text) in BUILT_IN {
            let items = tasks::items(name, text).unwrap();
            assert!(items.len() >= 100, "{name}");
            let ids: std::collections::BTreeSet<_> = items.iter().map(|item| &item.id).collect();
            assert_eq!(ids.len(), items.len(), "{name}: each item has its own name");
            assert!(items.iter().all(|item| item.group.is_some()), "{name}");
        }
        assert!(built_in(Path::new("cloze")).is_some() && built_in(Path::new("cloze.jsonl")).is_none());
    }
}

//! Task files of a command, and how scores are shown.

use std::io::{self, Write};
use std::path::PathBuf;

use mantissa_eval::tasks::{Group, Score};
use mantissa_jobs::tasks::OutputTasks;
use mantissa_quant::TaskScore;

use super::text::bound;
use crate::output::{Align, Table, labelled};
use crate::report::{Html, Page, table};

/// Tasks that a command runs on its output before it appears.
#[derive(clap::Args)]
pub struct OutputTaskArgs {
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

impl OutputTaskArgs {
    /// Returns the options as a job has them.
    pub fn value(&self) -> OutputTasks {
        let (chat, max_accuracy_drop) = (self.chat, self.max_accuracy_drop);
        OutputTasks { files: self.task.clone(), chat, max_accuracy_drop }
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

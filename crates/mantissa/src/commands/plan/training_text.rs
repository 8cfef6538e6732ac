//! Words and tables of a plan of training.

use std::io::{self, Write};

use mantissa_plan::recommend::TrainAnswer;
use mantissa_plan::training::{Exchange, Run, Zero};

use super::args::What;
use super::asked::Asked;
use super::text;
use crate::commands::next_steps::quoted;
use crate::output::{Align, Table, bytes, labelled, paragraph};

/// Returns the table of recipes.
pub fn table(answer: &TrainAnswer) -> Table {
    let right = Align::Right;
    let mut table = Table::new([
        ("recipe", Align::Left),
        ("bytes/trained param", right),
        ("mantissa train", right),
        ("state", right),
        ("activations", right),
        ("total", right),
        ("recomputed", right),
        ("fits", Align::Left),
        ("about", Align::Left),
    ])
    .optional(["activations", "mantissa train", "about"]);
    for row in &answer.rows {
        let fits = match (row.fits, row.needs_recompute) {
            (false, _) => "no",
            (true, true) => "recomputed",
            (true, false) => "yes",
        };
        table.row([
            row.name.to_owned(),
            format!("{:.2}", row.bytes_per_parameter),
            row.trainer_bytes.map_or_else(|| "-".to_owned(), |bytes| format!("{bytes:.2}")),
            bytes((row.bytes.state + row.bytes.frozen) as u64),
            bytes(row.bytes.activations as u64),
            bytes(row.bytes.total() as u64),
            bytes(row.recomputed.total() as u64),
            fits.to_owned(),
            row.about.to_owned(),
        ]);
    }
    table
}

/// Returns the table of what devices exchange in a step; `None` without a link.
pub fn exchanges(answer: &TrainAnswer) -> Option<Table> {
    let right = Align::Right;
    let columns = [
        ("exchange of a step", Align::Left),
        ("sent", right),
        ("seconds", right),
        ("mantissa train", Align::Left),
    ];
    let mut table = Table::new(columns);
    for Exchange { way, trained, sent, seconds } in &answer.exchanges {
        let has = if *trained { "yes" } else { "no" };
        table.row([(*way).to_owned(), bytes(*sent as u64), format!("{seconds:.3}"), has.to_owned()]);
    }
    (!answer.exchanges.is_empty()).then_some(table)
}

/// Describes the run.
pub fn run_words(run: &Run) -> String {
    let zero = match run.zero {
        Zero::None => String::new(),
        stage => format!(", ZeRO-{}", stage as u32),
    };
    let devices =
        if run.devices == 1 { String::new() } else { format!(" on each of {} devices{zero}", run.devices) };
    let sequences =
        if run.batch == 1 { "one sequence".to_owned() } else { format!("{} sequences", run.batch) };
    format!("{sequences} of {} tokens{devices}", run.sequence)
}

pub(super) fn print(
    asked: &Asked<'_>,
    run: &Run,
    answer: &TrainAnswer,
    out: &mut dyn Write,
) -> io::Result<()> {
    paragraph(out, 0, &asked.title())?;
    let words = format!(
        "Training on {}. All figures are predicted; total: with flash attention; recomputed: only the inputs of layers are stored.",
        run_words(run)
    );
    paragraph(out, 0, &words)?;
    writeln!(out)?;
    table(answer).write(out)?;
    writeln!(out)?;
    if let Some(table) = exchanges(answer) {
        table.write(out)?;
        writeln!(out)?;
    }
    labelled(out, "choose", &headline(answer))?;
    answer.reasons.iter().try_for_each(|reason| labelled(out, "because", reason))?;
    answer.changes.iter().try_for_each(|change| labelled(out, "changes", change))?;
    let speed =
        format!("{} tokens/s on one device with 16-bit products", text::interval(answer.tokens_per_s));
    labelled(out, "speed", &speed)?;
    labelled(out, "measure", &measures(asked))?;
    match &asked.args.html {
        // Not wrapped, to be copied.
        Some(file) => writeln!(out, "page        {}", file.display()),
        None => Ok(()),
    }
}

/// Returns the command that states the memory of such a run.
fn measures(asked: &Asked<'_>) -> String {
    let Some(adapter) = asked.args.train.and_then(What::adapter) else {
        return "mantissa train --init small --data text.txt > run.toml; mantissa train run.toml --dry-run"
            .to_owned();
    };
    let model = asked.args.subject.model().map_or_else(|| "MODEL".to_owned(), |model| quoted(model.typed()));
    format!("mantissa finetune {model} --adapter {adapter} --data FILE.jsonl --out DIR --dry-run")
}

/// Names the choice.
pub fn headline(answer: &TrainAnswer) -> String {
    let Some(name) = answer.recipe else { return "nothing fits".to_owned() };
    let row = answer.chosen();
    let policy = row.and_then(|row| row.policy);
    let takes = row
        .and_then(|row| row.trainer_bytes)
        .map_or_else(String::new, |bytes| format!(" ({bytes:.2} bytes per parameter in mantissa train)"));
    let policy =
        policy.map_or_else(String::new, |policy| format!("; mantissa train --show-policy {policy}{takes}"));
    let about = row.map_or("", |row| row.about);
    format!("{name}: {about}{policy}")
}

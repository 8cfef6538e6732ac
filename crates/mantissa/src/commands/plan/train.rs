//! Plans of training.

use std::io::{self, Write};

use anyhow::Result;
use clap::ValueEnum;
use mantissa_plan::recommend::{TrainAnswer, train};
use mantissa_plan::training::{Recompute, Run, Zero};

use super::{Asked, Report, context_of, page};
use crate::context::Context;
use crate::output::{Align, Table, bytes, labelled, paragraph};

/// Trained part of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum What {
    /// Every weight
    Full,
    /// Low-rank adapters on bf16 weights
    Lora,
    /// Low-rank adapters on NF4 weights
    Qlora,
}

/// Flags of training.
#[derive(clap::Args)]
pub struct TrainArgs {
    /// Stage of ZeRO, 0 to 3
    #[arg(long, value_name = "STAGE", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=3), help_heading = "Training")]
    zero: u32,
    /// Rank of adapters
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u64).range(1..=4096), help_heading = "Training")]
    rank: u64,
    /// Store attention scores too (no flash attention)
    #[arg(long, help_heading = "Training", hide_short_help = true)]
    store_scores: bool,
}

/// Runs the command for training.
///
/// # Errors
/// I/O.
pub fn run(asked: &Asked<'_>, what: What, context: &Context) -> Result<()> {
    let args = asked.args;
    let run = Run {
        sequence: context_of(args.context, 2048, asked.shape)?,
        batch: args.batch,
        devices: args.devices,
        zero: Zero::stage(args.training.zero).unwrap_or_default(),
        recompute: if args.training.store_scores { Recompute::Nothing } else { Recompute::Scores },
    };
    let adapters = what != What::Full;
    let answer = train(asked.shape, asked.device, &run, args.training.rank, adapters, asked.memory);
    if let Some(file) = &args.html {
        page::training(asked, &run, &answer).write(&context.output(file)?)?;
    }
    let report = Report {
        model: asked.shape,
        parameters: asked.shape.parameters(),
        active_parameters: asked.shape.active_parameters(),
        hardware: asked.device,
        predicted: true,
        load: None,
        inference: None,
        training: Some(&answer),
        page: args.html.as_ref(),
    };
    context.report(&report, |out| print(asked, &run, &answer, out))
}

/// Returns the table of recipes.
pub fn table(answer: &TrainAnswer) -> Table {
    let right = Align::Right;
    let mut table = Table::new([
        ("recipe", Align::Left),
        ("bytes/param", right),
        ("state", right),
        ("activations", right),
        ("total", right),
        ("recomputed", right),
        ("fits", Align::Left),
        ("about", Align::Left),
    ])
    .optional(["activations", "about"]);
    for row in &answer.rows {
        let fits = match (row.fits, row.needs_recompute) {
            (false, _) => "no",
            (true, true) => "recomputed",
            (true, false) => "yes",
        };
        table.row([
            row.name.to_owned(),
            format!("{:.2}", row.bytes_per_parameter),
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

fn print(asked: &Asked<'_>, run: &Run, answer: &TrainAnswer, out: &mut dyn Write) -> io::Result<()> {
    paragraph(out, 0, &asked.title())?;
    let text = format!(
        "Training on {}. All figures are predicted; total: with flash attention; recomputed: only the inputs of layers are stored.",
        run_words(run)
    );
    paragraph(out, 0, &text)?;
    writeln!(out)?;
    table(answer).write(out)?;
    writeln!(out)?;
    labelled(out, "choose", &headline(answer))?;
    answer.reasons.iter().try_for_each(|reason| labelled(out, "because", reason))?;
    answer.changes.iter().try_for_each(|change| labelled(out, "changes", change))?;
    let speed =
        format!("{} tokens/s on one device with 16-bit products", super::text::interval(answer.tokens_per_s));
    labelled(out, "speed", &speed)?;
    labelled(out, "measure", "mantissa train --init small > run.toml; mantissa train run.toml --dry-run")?;
    match &asked.args.html {
        // Not wrapped, to be copied.
        Some(file) => writeln!(out, "page        {}", file.display()),
        None => Ok(()),
    }
}

/// Names the choice.
pub fn headline(answer: &TrainAnswer) -> String {
    let Some(name) = answer.recipe else { return "nothing fits".to_owned() };
    let row = answer.rows.iter().find(|row| row.name == name);
    let policy = row.and_then(|row| row.policy);
    let policy = policy.map_or_else(String::new, |policy| format!("; mantissa train --show-policy {policy}"));
    let about = row.map_or("", |row| row.about);
    format!("{name}: {about}{policy}")
}

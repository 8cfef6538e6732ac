//! `mantissa doctor`: finds the fault of a checkpoint with garbled output.

use std::io::{self, Write};

use anyhow::Result;
use mantissa_advise::doctor::{Diagnosis, Gain, Trial, Whole};
use mantissa_jobs::{Doctor, Job};
use mantissa_store::Paths;

use super::execute::Execute;
use super::model::ModelPath;
use super::text::TextArgs;
use crate::context::Context;
use crate::help::Group;
use crate::output::{Align, Table, number, paragraph};

/// Garbled output? Find the fault of a checkpoint
///
/// Tries known disagreements between writers and readers of checkpoints, and reports the one that repairs the
/// model: zero points off by one, nibble order, permuted q and k rows, reciprocal, swapped or transposed
/// scales, gate and up swapped, norms off by one, and a missing or extra BOS.
///
/// With --reference (the source model), every tensor is compared with the source's under the error bound of
/// its scheme, and every layer runs on the same input in both models. The report names the first tensor at
/// fault, the config field, or the tokenizer.
///
/// Without --reference, every alternative is tried on the model, on each layer and on each tensor, and judged
/// by the loss on a text (--text, or a built-in text), and so are rope_theta and rms_norm_eps. An alternative counts
/// only if it improves the loss beyond doubt. Swapped gate and up and zero points off by one also show in the weights.
/// Exit code 1 if a fault is found.
#[derive(clap::Args)]
#[command(after_help = "EXAMPLES
  mantissa doctor demo
  mantissa doctor path/to/quantized --reference path/to/model
  mantissa doctor path/to/model.gguf --text sample.txt --context 128 --json")]
pub struct Args {
    /// Model folder or .gguf file
    model: ModelPath,
    /// Source model to compare with
    #[arg(long, value_name = "SOURCE")]
    reference: Option<ModelPath>,
    #[command(flatten)]
    text: TextArgs,
}

impl Args {
    /// Returns the job.
    fn job(&self) -> Doctor {
        Doctor {
            model: self.model.job_path().clone(),
            reference: self.reference.as_ref().map(|model| model.job_path().clone()),
            text: self.text.value(),
        }
    }
}

impl Execute for Args {
    const GROUP: Group = Group::Measure;

    fn paths(&self, paths: &mut Paths) -> Result<()> {
        *paths = self.job().paths();
        Ok(())
    }

    /// # Errors
    /// Unreadable files or a model that cannot run; [`GateFailed`](crate::error::GateFailed) if a fault is found.
    fn run(&self, context: &Context) -> Result<()> {
        let report = self.job().run(context)?;
        context.report(&report, |out| human(out, &report.diagnosis))?;
        if let Some(why) = report.diagnosis.undecided {
            context.warn_all(&[format!("undecided: {why}")])?;
        }
        Ok(report.require_sound()?)
    }
}

fn human(out: &mut dyn Write, found: &Diagnosis) -> io::Result<()> {
    if let Some(base) = &found.baseline {
        let baseline = format!(
            "unchanged: perplexity {:.4} on {} tokens, {:.4} at the best temperature ({:.4} from token frequencies alone); \
             top-1 accuracy {:.1} %",
            base.ppl,
            base.tokens,
            base.calibrated_nll.exp(),
            base.token_entropy.exp(),
            100.0 * base.hits
        );
        paragraph(out, 2, &baseline)?;
    }
    trials(out, found)?;
    layers(out, found)?;
    tensors(out, found)?;
    if let Some(whole) = &found.whole {
        let Whole { kl, expected, .. } = whole;
        writeln!(
            out,
            "end to end: KL {kl:.4} nats/token to the source, {expected:.4} expected from rounding"
        )?;
    }
    verdict(out, found)
}

/// Prints the conclusion.
fn verdict(out: &mut dyn Write, found: &Diagnosis) -> io::Result<()> {
    match (&found.fault, found.undecided) {
        (None, Some(_)) => writeln!(out, "undecided"),
        (None, None) if found.whole.is_some() => {
            writeln!(out, "no fault found: output matches the source within its schemes")
        }
        (None, None) => {
            let rule = "no fault found: no alternative is better than the unchanged model by 0.1 nats and 5 standard errors";
            paragraph(out, 2, rule)
        }
        (Some(fault), _) => {
            writeln!(out, "fault   {}", fault.tensor)?;
            writeln!(out, "cause   {}", fault.cause)?;
            writeln!(out, "fix     {}", fault.fix)?;
            match fault.layers.as_slice() {
                [] => Ok(()),
                layers => writeln!(out, "layers  {layers:?}"),
            }
        }
    }
}

fn trials(out: &mut dyn Write, found: &Diagnosis) -> io::Result<()> {
    if found.trials.is_empty() {
        return Ok(());
    }
    let mut table = Table::new([
        ("tried", Align::Left),
        ("on", Align::Left),
        ("tensors", Align::Right),
        ("perplexity", Align::Right),
        ("Δ loss at best temperature", Align::Right),
        ("Δ top-1", Align::Right),
        ("", Align::Left),
    ])
    .optional(["Δ top-1", "tensors", "perplexity"]);
    found.trials.iter().for_each(|trial| table.row(trial_cells(trial)));
    table.write(out)?;
    if !found.not_applicable.is_empty() {
        paragraph(out, 2, &format!("not applicable: {}", found.not_applicable.join(", ")))?;
    }
    writeln!(out)
}

fn trial_cells(trial: &Trial) -> [String; 7] {
    let cell = |of: fn(&Gain) -> String| trial.gain.as_ref().map_or("not finite".to_owned(), of);
    [
        trial.alternative.to_owned(),
        trial.scope.clone(),
        trial.tensors.to_string(),
        match trial.unchanged_ppl {
            Some(unchanged) => {
                format!("{} (unchanged: {})", number(trial.ppl, 6), number(Some(unchanged), 6))
            }
            None => number(trial.ppl, 6),
        },
        cell(|gain| format!("{:+.4} ± {:.4}", gain.delta, gain.se)),
        cell(|gain| format!("{:+.1} %", 100.0 * gain.hits)),
        if trial.decisive { "repairs" } else { "" }.to_owned(),
    ]
}

fn layers(out: &mut dyn Write, found: &Diagnosis) -> io::Result<()> {
    if found.layers.is_empty() {
        return Ok(());
    }
    let mut table = Table::new([
        ("layer", Align::Right),
        ("part", Align::Left),
        ("deviation", Align::Right),
        ("expected from rounding", Align::Right),
        ("", Align::Left),
    ]);
    for row in &found.layers {
        let verdict = if row.faulty { "faulty" } else { "" };
        let cell = |x: f64| format!("{x:.4}");
        let part = row.part.to_owned();
        table.row([row.layer.to_string(), part, cell(row.deviation), cell(row.expected), verdict.to_owned()]);
    }
    table.write(out)?;
    writeln!(out)
}

/// Prints tensors that deviate from the source by more than their schemes explain.
fn tensors(out: &mut dyn Write, found: &Diagnosis) -> io::Result<()> {
    let differ: Vec<_> = found.tensors.iter().filter(|row| row.faulty).collect();
    if differ.is_empty() {
        return Ok(());
    }
    let mut table = Table::new([
        ("tensor", Align::Left),
        ("error", Align::Right),
        ("expected from rounding", Align::Right),
        ("best alternative", Align::Left),
    ])
    .optional(["expected from rounding"]);
    for row in &differ {
        let best = row.best.map_or("none".to_owned(), |(name, error)| format!("{name}: {error:.4}"));
        let best = if row.diagonal { format!("{best}; equals the source up to scales") } else { best };
        table.row([row.tensor.clone(), format!("{:.4}", row.error), format!("{:.4}", row.expected), best]);
    }
    table.write(out)?;
    writeln!(out)
}

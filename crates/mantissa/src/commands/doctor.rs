//! `mantissa doctor`: finds the fault of a checkpoint with garbled output.

use std::io::{self, Write};
use std::path::Path;

use anyhow::Result;
use mantissa_advise::doctor::{
    Diagnosis, Fault, Gain, Trial, Verdict, Whole, against, bytes_against, examine, steps,
};
use mantissa_eval::{Sequence, TextOptions, sequences_from_text};
use mantissa_model::{Bos, Tokenizer};
use mantissa_quant::{as_in_gguf, model_config};
use mantissa_store::Paths;
use mantissa_store::convention::ModelFiles;
use serde::Serialize;

use super::execute::Execute;
use super::loaded_models::{self, Use};
use super::model::{self, ModelPath};
use super::text::TextArgs;
use crate::context::Context;
use crate::error::{BadInput, GateFailed};
use crate::help::Group;
use crate::output::{Align, Table, number, paragraph};
use crate::progress::Unit;
use mantissa_jobs::embedded;

/// Tokens per window of the built-in text, and number of windows.
const WINDOW: usize = 128;
const WINDOWS: usize = 8;

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

#[derive(Serialize)]
struct Report<'a> {
    model: &'a Path,
    convention: &'static str,
    verdict: Verdict,
    #[serde(flatten)]
    diagnosis: &'a Diagnosis,
}

impl Execute for Args {
    const GROUP: Group = Group::Measure;

    fn paths(&self, paths: &mut Paths) -> Result<()> {
        self.model.paths(paths);
        self.text.paths(paths);
        self.reference.iter().for_each(|model| model.paths(paths));
        Ok(())
    }

    /// # Errors
    /// Unreadable files or a model that cannot run; [`GateFailed`] if a fault is found.
    fn run(&self, context: &Context) -> Result<()> {
        let files = model::open(&self.model, context)?;
        let given = self.text.sequences(&self.model, false, context)?;
        let config = model_config(&files)?;
        let total = if self.reference.is_some() { config.num_hidden_layers } else { steps(&config) };
        let progress = context.progress(total as u64, Unit::Items("steps"));
        let told = |done: usize| progress.set(done as u64);
        let diagnosis = match &self.reference {
            Some(path) => compare(&files, path, &given.unwrap_or_default(), context, &told)?,
            None => {
                let sequences = match given {
                    Some(sequences) => sequences,
                    None => context.reading_texts(|| prose(&self.model, context))?,
                };
                // The unchanged model, and one altered reading of it.
                let path: &Path = &self.model;
                let used = Use::evaluation(&sequences, context.threads);
                loaded_models::require_memory_and(15, &[path, path], used, context)?;
                examine(&files, &sequences, context.threads, &told)?
            }
        };
        progress.finish();
        let report = Report {
            model: &self.model,
            convention: files.convention_name(),
            verdict: diagnosis.verdict(),
            diagnosis: &diagnosis,
        };
        context.report(&report, |out| human(out, &diagnosis))?;
        if let Some(why) = diagnosis.undecided {
            context.warn_all(&[format!("undecided: {why}")])?;
        }
        let Some(Fault { tensor, alternative, cause, fix, .. }) = &diagnosis.fault else { return Ok(()) };
        let repaired = alternative.map_or(String::new(), |name| format!(" (repaired by: {name})"));
        Err(GateFailed::new(format!("{tensor}: {cause}{repaired}; fix: {fix}")).into())
    }
}

/// Compares the model with its source at `path`.
fn compare(
    files: &ModelFiles,
    path: &Path,
    sequences: &[Sequence],
    context: &Context,
    progress: &dyn Fn(usize),
) -> Result<Diagnosis> {
    let reference = model::open_quietly(path)?;
    let reference = if files.gguf().is_some() { as_in_gguf(reference)? } else { reference };
    let needs = bytes_against(files, &reference, context.threads)?;
    context.require_memory("doctor", model::BASE.saturating_add(needs))?;
    Ok(against(files, &reference, sequences, context.threads, progress)?)
}

/// Tokenizes the built-in texts with the model's tokenizer.
///
/// # Errors
/// No tokenizer, or not enough memory.
pub(super) fn prose(model: &Path, context: &Context) -> Result<Vec<Sequence>> {
    let files = model::open_quietly(model)?;
    let longest = embedded::DOMAINS.iter().map(|domain| domain.held_out.len()).max().unwrap_or(0) as u64;
    let needs = Tokenizer::bytes_to_load(files.dir()).saturating_add(longest * Tokenizer::ENCODING);
    context.require_more_memory("doctor: tokenizer and built-in text", needs)?;
    let tokenizer = Tokenizer::load(files.dir()).map_err(|error| {
        let found = format!("no tokenizer for the built-in text ({error})");
        BadInput::new(
            model.display().to_string(),
            found,
            "a tokenizer, --tokens FILE.json, or --reference SOURCE",
        )
    })?;
    let window = WINDOW.min(model::context_length(&files)?);
    let options = TextOptions { split: None, docs: None, context: window, stride: None, bos: Bos::Auto };
    let text = embedded::DOMAINS.iter().map(|domain| domain.held_out).collect::<Vec<_>>();
    let mut all = Vec::new();
    for text in text {
        let text = text.split(embedded::SEPARATOR).next().unwrap_or(text);
        all.extend(sequences_from_text("built-in text", text, &tokenizer, &options)?);
    }
    all.truncate(WINDOWS);
    Ok(all)
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
        number(trial.ppl, 6),
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

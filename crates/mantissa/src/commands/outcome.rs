//! Carrying out a plan that writes a model, and what is said of it: shared by `quantize`, `convert` and `fit`.

use std::io::{self, Write};
use std::ops::ControlFlow;
use std::path::Path;

use anyhow::Result;
use mantissa_eval::Sequence;
use mantissa_quant::verify::Verification;
use mantissa_quant::{
    Evaluation, Figures, GateFailure, LayerReport, NotVerified, Outcome, Plan, Quality, QuantError, Start,
    run as run_plan,
};
use mantissa_store::convention::ModelFiles;
use mantissa_store::{Output, Paths};
use serde::Serialize;

use super::model::ModelPath;
use super::text::{TextArgs, bound};
use crate::app::Context;
use crate::interrupt;
use crate::output::{Align, Table, number};
use crate::progress::Unit;

/// On what the output is run against the source before it is put in place, and what it may lose there.
#[derive(clap::Args)]
pub struct MeasureArgs {
    #[command(flatten)]
    text: TextArgs,
    /// Put nothing at --out and fail (exit 1) when KL on that text exceeds this many nats
    #[arg(long, value_name = "NATS", value_parser = bound, requires = "measured_on")]
    max_kl: Option<f64>,
}

impl MeasureArgs {
    /// Adds the files of the text to the inputs of a command.
    pub fn paths(&self, paths: &mut Paths) {
        self.text.paths(paths);
    }

    /// Where texts are cut into documents.
    pub fn split(&self) -> Option<&str> {
        self.text.split()
    }

    /// The windows, cut by the tokenizer of `model`; `None` where no text is given.
    ///
    /// # Errors
    /// A text that cannot be read or cut.
    pub fn sequences(&self, model: &ModelPath, context: &Context) -> Result<Option<Vec<Sequence>>> {
        self.text.sequences(model, false, context)
    }

    /// The evaluation of an output on `sequences` of the text alone, which reports call `part`.
    ///
    /// # Errors
    /// Windows that the model cannot run.
    pub fn evaluation_on(
        &self,
        source: &ModelFiles,
        part: &str,
        sequences: Vec<Sequence>,
    ) -> Result<Evaluation> {
        let name = format!("{}{part}", self.text.name());
        Ok(Evaluation::new(source, &name, sequences, self.max_kl)?)
    }

    /// The evaluation of the output against `source`, the opened `model`; `None` where no text is given.
    /// `other_text` says that another text is cut by the same options.
    ///
    /// # Errors
    /// A text that cannot be read or cut, windows that the model cannot run.
    pub fn evaluation(
        &self,
        model: &ModelPath,
        source: &ModelFiles,
        other_text: bool,
        context: &Context,
    ) -> Result<Option<Evaluation>> {
        let Some(sequences) = self.text.sequences(model, other_text, context)? else { return Ok(None) };
        Ok(Some(self.evaluation_on(source, "", sequences)?))
    }
}

/// An output that was not put in place.
#[derive(Serialize)]
struct Rejected<'a> {
    output: Option<&'a Path>,
    max_kl: f64,
    /// Where the work is kept.
    kept: Option<&'a Path>,
    #[serde(flatten)]
    quality: &'a Quality,
}

/// An output that did not verify.
#[derive(Serialize)]
struct Unverified<'a> {
    output: Option<&'a Path>,
    verification: &'a Verification,
    #[serde(flatten)]
    quality: &'a Quality,
}

/// Runs the plan, to its end or to the next signal.
///
/// # Errors
/// As [`run_plan`]. What an output lost that is too much to put it in place is reported before.
pub fn carry_out(
    plan: &Plan,
    source: &ModelFiles,
    out: &Output,
    start: Start,
    context: &Context,
) -> Result<Outcome> {
    let mut progress = context.progress(plan.work_bytes(), Unit::Bytes);
    let mut evaluating = false;
    let step = &mut |at: mantissa_quant::Progress<'_>| {
        if at.tokens.is_some() && !std::mem::replace(&mut evaluating, true) {
            progress.finish();
            let tokens = plan.evaluation.as_ref().map_or(0, Evaluation::work);
            progress = context.progress(tokens, Unit::Items("tokens"));
        }
        progress.message(at.tensor);
        progress.set(at.tokens.unwrap_or(at.done));
        if interrupt::received().is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let outcome =
        interrupt::orderly(|| run_plan(plan, source, out, start, step), QuantError::is_interruption);
    progress.finish();
    match &outcome {
        Err(QuantError::Gate(failure)) => reject(failure, context)?,
        Err(QuantError::NotVerified(failure)) => unverified(failure, context)?,
        _ => {}
    }
    let outcome = outcome?;
    if let Some(path) = &outcome.committed.leftover {
        context.warn(&format!("{}: the replaced output could not be removed", path.display()));
    }
    Ok(outcome)
}

/// A warning of the work folder of another command.
pub fn left_by_another(path: &Path) -> String {
    let what =
        "left by another command that was killed; rerun that command to resume it, or remove the folder";
    format!("{}: {what}", path.display())
}

/// Reports a finished output that did not verify and was not put in place.
fn unverified(failure: &NotVerified, context: &Context) -> Result<()> {
    let NotVerified { quality, verification, .. } = failure;
    let rejected = Unverified { output: None, verification, quality };
    context.report(&rejected, |out| {
        layer_table(out, quality)?;
        super::verify::human(out, verification)
    })
}

/// Says what an output lost that is not put in place.
fn reject(failure: &GateFailure, context: &Context) -> Result<()> {
    let GateFailure { quality, allowed, kept, .. } = failure;
    let rejected = Rejected { output: None, max_kl: *allowed, kept: kept.as_deref(), quality };
    context.report(&rejected, |out| {
        layer_table(out, quality)?;
        quality.evaluation.iter().try_for_each(|figures| human_figures(out, figures))
    })
}

/// Bits per weight of the quantized layers, for people: as stored, and by their schemes where that is another figure.
pub fn linear_bits(scheme: f64, stored: Option<f64>) -> String {
    match stored.filter(|stored| differ(scheme, *stored)) {
        Some(stored) => format!("{stored:.3} bits per weight as stored ({scheme:.3} by scheme)"),
        None => format!("{scheme:.3} bits per weight"),
    }
}

/// Whether two figures are printed as different ones.
fn differ(scheme: f64, stored: f64) -> bool {
    format!("{scheme:.3}") != format!("{stored:.3}")
}

/// Layers with their schemes and errors, for people.
///
/// # Errors
/// As `out`.
pub fn layer_table(out: &mut dyn Write, quality: &Quality) -> io::Result<()> {
    let apart = |layer: &LayerReport| {
        layer.stored_bits_per_weight.is_some_and(|stored| differ(layer.bits_per_weight, stored))
    };
    let stored = quality.layers.iter().any(apart);
    let mut columns = vec![
        ("layer", Align::Left),
        ("scheme", Align::Left),
        ("method", Align::Left),
        ("bits", Align::Right),
        ("SQNR dB", Align::Right),
        ("relative error", Align::Right),
        ("max error", Align::Right),
        ("of RTN's output error", Align::Right),
    ];
    if stored {
        columns.insert(4, ("stored", Align::Right));
    }
    let mut table = Table::new(columns);
    for layer in &quality.layers {
        let mut cells = vec![
            layer.module.clone(),
            layer.scheme.clone(),
            layer.method.clone() + if layer.fallback.is_some() { " (fallback)" } else { "" },
            format!("{:.3}", layer.bits_per_weight),
            layer.error.sqnr_db.map_or_else(|| "exact".to_owned(), |db| format!("{db:.2}")),
            number(Some(layer.error.relative_error), 3),
            number(Some(layer.error.max_abs_error), 3),
            number(layer.judged.map(|judged| judged.solved / judged.nearest), 3),
        ];
        if stored {
            let bits = layer.stored_bits_per_weight;
            cells.insert(4, bits.map_or_else(|| "-".to_owned(), |bits| format!("{bits:.3}")));
        }
        table.row(cells);
    }
    table.write(out)?;
    writeln!(out)
}

/// What an output lost, for people.
///
/// # Errors
/// As `out`.
pub fn human_figures(out: &mut dyn Write, f: &Figures) -> io::Result<()> {
    writeln!(
        out,
        "perplexity  {:.4}  (NLL {:.6} ± {:.6} nats, {} tokens, {} windows of {})",
        f.ppl, f.nll, f.nll_se, f.predicted, f.text.windows, f.text.name
    )?;
    writeln!(out, "KL          {:.6} ± {:.6} nats  (p99 {:.4})", f.kl, f.kl_se, f.kl_p99)?;
    writeln!(
        out,
        "bf16 KL     {:.6} ± {:.6} nats  (the noise floor)",
        f.noise_floor_kl, f.noise_floor_kl_se
    )?;
    writeln!(out, "top-1       {:.2} ± {:.2} %", 100.0 * f.top1, 100.0 * f.top1_se)?;
    writeln!(out, "ΔNLL        {:+.6} ± {:.6} nats", f.delta_nll, f.delta_nll_se)
}

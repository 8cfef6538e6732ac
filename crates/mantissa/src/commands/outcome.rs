//! Options and results of what quantizes, converts or fits: limits of the loss, tables of layers, figures.

use std::io::{self, Write};
use std::path::Path;

use anyhow::Result;
use mantissa_eval::stats::with_error;
use mantissa_eval::verdict::Verdict;
use mantissa_jobs::measured_text::Measure;
use mantissa_jobs::{JobError, default_text};
use mantissa_quant::verify::Verification;
use mantissa_quant::{Exceeded, Figures, GateFailure, LayerReport, NotVerified, Quality, QuantError};
use mantissa_store::Paths;
use serde::Serialize;

use super::tasks::{self, OutputTaskArgs};
use super::text::{TextArgs, bound};
use crate::context::Context;
use crate::output::{Align, Table, counted, labelled, number, paragraph};

/// Options of the evaluation that runs before an output appears.
#[derive(clap::Args)]
pub struct MeasureArgs {
    #[command(flatten)]
    text: TextArgs,
    /// Fail if the KL on that text is higher (nats/token)
    ///
    /// The output then stays away from --out, and the exit code is 1. Without a text it is measured on the built-in one.
    #[arg(long, value_name = "NATS", value_parser = bound, help_heading = "Evaluation")]
    max_kl: Option<f64>,
    #[command(flatten)]
    tasks: OutputTaskArgs,
}

impl MeasureArgs {
    /// Returns the options as a job has them.
    pub fn value(&self) -> Measure {
        Measure { text: self.text.value(), max_kl: self.max_kl, tasks: self.tasks.value() }
    }

    /// Adds the text files to the inputs of a command.
    pub fn paths(&self, paths: &mut Paths) {
        self.value().inputs().into_iter().for_each(|path| paths.read(path));
    }
}

/// JSON report of an output rejected by `--max-kl` or `--max-accuracy-drop`.
#[derive(Serialize)]
struct Rejected<'a> {
    output: Option<&'a Path>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_kl: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_accuracy_drop: Option<f64>,
    /// Work folder that keeps the result.
    kept: Option<&'a Path>,
    #[serde(flatten)]
    quality: &'a Quality,
}

/// JSON report of an output that did not verify.
#[derive(Serialize)]
struct Unverified<'a> {
    output: Option<&'a Path>,
    verification: &'a Verification,
    #[serde(flatten)]
    quality: &'a Quality,
}

/// Reports a finished output that failed a limit or verification.
///
/// # Errors
/// Those of `outcome`.
pub fn tell_failure<T>(outcome: Result<T, JobError>, context: &Context) -> Result<T> {
    if let Err(JobError::Quant(error)) = outcome.as_ref().map_err(JobError::innermost) {
        match &**error {
            QuantError::Gate(failure) => reject(failure, context)?,
            QuantError::NotVerified(failure) => unverified(failure, context)?,
            _ => {}
        }
    }
    Ok(outcome?)
}

/// Reports a finished output that did not verify and stays away from `--out`.
fn unverified(failure: &NotVerified, context: &Context) -> Result<()> {
    let NotVerified { quality, verification, .. } = failure;
    let rejected = Unverified { output: None, verification, quality };
    context.report(&rejected, |out| {
        super::verify::human(out, verification)?;
        layer_table(out, quality, false)
    })
}

/// Reports the quality loss of an output that stays away from `--out`.
fn reject(failure: &GateFailure, context: &Context) -> Result<()> {
    let GateFailure { quality, exceeded, kept, .. } = failure;
    let (max_kl, max_accuracy_drop) = match exceeded {
        Exceeded::Kl { allowed, .. } => (Some(*allowed), None),
        Exceeded::Accuracy { allowed, .. } => (None, Some(*allowed)),
    };
    let rejected = Rejected { output: None, max_kl, max_accuracy_drop, kept: kept.as_deref(), quality };
    context.report(&rejected, |out| {
        quality.evaluation.iter().try_for_each(|figures| human_figures(out, figures))?;
        tasks::human(out, &quality.tasks)?;
        layer_table(out, quality, false)
    })
}

/// Formats the bits per weight of the quantized layers: as stored, and by scheme if that differs.
pub fn linear_bits(scheme: f64, stored: Option<f64>) -> String {
    match stored.filter(|stored| differ(scheme, *stored)) {
        Some(stored) => format!("{stored:.3} bits per weight as stored ({scheme:.3} by scheme)"),
        None => format!("{scheme:.3} bits per weight"),
    }
}

/// True if two figures print differently.
fn differ(scheme: f64, stored: f64) -> bool {
    format!("{scheme:.3}") != format!("{stored:.3}")
}

/// Layers that are listed without `--layers`.
const WORST: usize = 10;

/// Returns the rows with the largest `error`, unless `all` are shown or there are few, with the line above the table.
pub fn worst<'a, T>(
    rows: &'a [T],
    (all, named, by): (bool, &str, &str),
    error: impl Fn(&T) -> f64,
) -> (Vec<&'a T>, String) {
    let mut rows: Vec<&T> = rows.iter().collect();
    let count = rows.len();
    if all || count <= WORST {
        return (rows, format!("{count} {named}:"));
    }
    // Stable: equal rows stay in the order of the model.
    rows.sort_by(|a, b| error(b).total_cmp(&error(a)));
    rows.truncate(WORST);
    (rows, format!("{WORST} of {count} {named}, largest {by} first (--layers lists all):"))
}

/// Prints the ten layers with the largest relative errors, or `all`.
///
/// # Errors
/// As `out`.
pub fn layer_table(out: &mut dyn Write, quality: &Quality, all: bool) -> io::Result<()> {
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
        ("rel. error", Align::Right),
        ("max error", Align::Right),
    ];
    let by_output = ranks_by_output(quality);
    // The last cell, so that tables without it drop it.
    if by_output {
        columns.push((VS_RTN, Align::Right));
    }
    if stored {
        columns.insert(4, ("stored", Align::Right));
    }
    let optional = ["max error", "stored", "method", "SQNR dB", "rel. error", "bits"];
    let mut table = Table::new(columns).optional(optional);
    let by = if by_output { VS_RTN } else { "relative error" };
    let (layers, heading) =
        worst(&quality.layers, (all, "layers", by), |layer| layer.ranked_error(by_output));
    layers.iter().for_each(|layer| table.row(layer_cells(layer, stored)));
    writeln!(out, "\n{heading}")?;
    table.write(out)?;
    if by_output { paragraph(out, 2, VS_RTN_MEANS) } else { Ok(()) }
}

/// Column of the output error relative to RTN's.
pub const VS_RTN: &str = "error vs RTN";

/// Legend of [`VS_RTN`].
pub const VS_RTN_MEANS: &str = "error vs RTN: squared error of the layer's outputs on the calibration inputs, where RTN \
     has 1; a method that lowers it may raise rel. error, that of the weights";

/// True if layers are ranked by the error of their outputs: a method compared itself with RTN.
pub fn ranks_by_output(quality: &Quality) -> bool {
    quality.layers.iter().any(|layer| layer.judged.is_some())
}

/// Returns the cells of a layer, with its bits per weight as stored if `stored`.
fn layer_cells(layer: &LayerReport, stored: bool) -> Vec<String> {
    let mut cells = vec![
        layer.module.clone(),
        layer.scheme.clone(),
        layer.method.clone() + if layer.fallback.is_some() { " (fallback)" } else { "" },
        format!("{:.3}", layer.bits_per_weight),
        layer.error.sqnr_db.map_or_else(|| "exact".to_owned(), |db| format!("{db:.2}")),
        number(Some(layer.error.relative_error), 3),
        number(Some(layer.error.max_abs_error), 3),
        number(layer.error_vs_rtn(), 3),
    ];
    if stored {
        let bits = layer.stored_bits_per_weight;
        cells.insert(4, bits.map_or_else(|| "-".to_owned(), |bits| format!("{bits:.3}")));
    }
    cells
}

/// Prints the quality loss.
///
/// # Errors
/// As `out`.
pub fn human_figures(out: &mut dyn Write, f: &Figures) -> io::Result<()> {
    let text = default_text::shown(&f.text.name);
    let [tokens, windows] =
        [(f.predicted, "token"), (f.text.windows as u64, "window")].map(|(n, of)| counted(n, of));
    labelled(out, "text", &format!("{text}: {tokens} in {windows}"))?;
    let source = (f.nll - f.delta_nll).exp();
    let windows = f.text.windows;
    let shown = |mean: &str, error: f64, unit: &str| with_error(mean, &format!("{error:.6}"), unit, windows);
    let nats = |mean: f64, error: f64| shown(&format!("{mean:.6}"), error, "nats/token");
    let nll = shown(&format!("{:.6}", f.nll), f.nll_se, "nats");
    labelled(out, "perplexity", &format!("{:.4}, source {source:.4}  (NLL {nll})", f.ppl))?;
    let word = Verdict::new((f.kl, f.kl_se), (f.noise_floor_kl, f.noise_floor_kl_se)).word();
    labelled(out, "KL", &format!("{}, {word}  (p99 {:.4})", nats(f.kl, f.kl_se), f.kl_p99))?;
    if let Some(without) = f.kl_without_tables {
        let cost = f.kl - without;
        let all =
            format!("{cost:+.6} nats/token by embedding and head ({without:.6} with those of the source)");
        labelled(out, "of that KL", &all)?;
    }
    // That of a bf16 source is 0.
    if f.noise_floor_kl > 0.0 {
        let floor = nats(f.noise_floor_kl, f.noise_floor_kl_se);
        labelled(out, "bf16 KL", &format!("{floor}  (noise floor)"))?;
    }
    let percent = |share: f64| format!("{:.2}", 100.0 * share);
    labelled(out, "top-1", &with_error(&percent(f.top1), &percent(f.top1_se), "%", windows))?;
    labelled(out, "Δ loss", &shown(&format!("{:+.6}", f.delta_nll), f.delta_nll_se, "nats/token"))
}

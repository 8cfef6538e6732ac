//! Report of `fit`.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use mantissa_jobs::{Fit, FitPoint, FitReport, FitUnit, Served};
use mantissa_quant::verify::Verification;
use mantissa_quant::{Outcome, Quality};
use serde::Serialize;

use super::args::Args;
use crate::commands::next_steps::NextSteps;
use crate::commands::outcome::{human_figures, linear_bits, worst};
use crate::commands::quantize::{ALREADY, in_files, larger};
use crate::commands::{tasks, verify};
use crate::output::{Align, Table, bytes, counted, labelled, number, paragraph, written};

/// Report of a job that had nothing to do: what its output records. The search is not recorded.
#[derive(Serialize)]
pub(super) struct Complete<'a> {
    output: &'a Path,
    already_complete: bool,
    #[serde(flatten)]
    quality: &'a Quality,
}

impl<'a> Complete<'a> {
    /// Describes the output that was there.
    pub(super) fn new(outcome: &'a Outcome) -> Self {
        Complete { output: &outcome.committed.path, already_complete: true, quality: &outcome.quality }
    }

    /// Prints it.
    ///
    /// # Errors
    /// As `out`.
    pub(super) fn human(&self, out: &mut dyn Write) -> io::Result<()> {
        let quality = self.quality;
        let (output, format) = (self.output.display(), &quality.container);
        labelled(
            out,
            "output",
            &format!("{output}: {} in format {format}", counted(quality.layers.len() as u64, "layer")),
        )?;
        labelled(out, "size", &bytes(quality.bytes))?;
        let linear = linear_bits(quality.linear_bits_per_weight, quality.linear_stored_bits_per_weight);
        labelled(out, "bits", &format!("{linear} in linear layers"))?;
        quality.evaluation.iter().try_for_each(|figures| human_figures(out, figures))?;
        tasks::human(out, &quality.tasks)?;
        labelled(out, "time", ALREADY)
    }
}

#[derive(Serialize)]
pub(super) struct Done<'a> {
    pub(super) output: &'a Path,
    /// False: the output was made now.
    already_complete: bool,
    /// Methods of the layers, which are those of the figures too.
    #[serde(skip)]
    pub(super) method: String,
    pub(super) units: &'a [FitUnit],
    /// Predicted KL: the sum over the units' own KL.
    pub(super) predicted_kl: f64,
    /// Lower bound of that sum over all choices within the budget.
    pub(super) predicted_kl_bound: f64,
    /// Best choices of every size, by the sum of the units' own KL.
    pub(super) front: &'a [FitPoint],
    /// Recipes left out, with the reason.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) left_out: &'a Vec<String>,
    /// Reasons why methods are not mixed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) apart: &'a Vec<String>,
    /// Number of windows used for the choice.
    pub(super) windows: usize,
    /// True if the units' KL are scaled to sum to that of the whole model under their method and scheme.
    #[serde(skip)]
    pub(super) scaled: bool,
    #[serde(flatten)]
    pub(super) quality: &'a Quality,
    pub(super) verification: Option<&'a Verification>,
    /// Bytes of what serves, if the budget is memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) served: Option<&'a Served>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) page: Option<&'a PathBuf>,
    source_bytes: u64,
    #[serde(flatten)]
    next_steps: NextSteps,
}

impl<'a> Done<'a> {
    /// Describes the output of `job`, as the command line asks.
    pub(super) fn new(args: &'a Args, job: &'a Fit, report: &'a FitReport) -> Self {
        let outcome = &report.outcome;
        let output = written(&job.out, report.container, outcome);
        let source = &report.source;
        Done {
            output,
            already_complete: false,
            method: report.method.clone(),
            units: &report.units,
            predicted_kl: report.predicted_kl,
            predicted_kl_bound: report.predicted_kl_bound,
            front: &report.front,
            left_out: &report.left_out,
            apart: &report.apart,
            windows: report.windows,
            scaled: job.methods.len() > 1,
            quality: &outcome.quality,
            verification: outcome.verification.as_ref().map(|(verification, _)| verification),
            served: report.served.as_ref(),
            page: args.html.as_ref(),
            source_bytes: source.checkpoint().stored_bytes(),
            next_steps: NextSteps::new(&report.plan, &args.model, source, output, &args.targets),
        }
    }
}

pub(super) fn human(out: &mut dyn Write, done: &Done<'_>, layers: bool) -> io::Result<()> {
    let quality = done.quality;
    let (output, format) = (done.output.display(), &quality.container);
    labelled(
        out,
        "output",
        &format!("{output}: {} in format {format}", counted(quality.layers.len() as u64, "layer")),
    )?;
    let (tensors, source) = (bytes(quality.bytes), bytes(done.source_bytes));
    let grown = larger(quality.bytes, done.source_bytes);
    let size = format!("{tensors} of tensors from {source}{grown}{}", in_files(quality));
    labelled(out, "size", &size)?;
    let linear = linear_bits(quality.linear_bits_per_weight, quality.linear_stored_bits_per_weight);
    labelled(out, "bits", &format!("{linear} in linear layers by {}", done.method))?;
    if done.front.len() > 1 {
        let point = |p: &FitPoint| {
            format!("{:.2} bits {} ({})", p.bits_per_weight, number(Some(p.predicted_kl), 3), p.method)
        };
        let points: Vec<_> = done.front.iter().map(point).collect();
        labelled(out, "front", &format!("predicted KL by size: {}", points.join(", ")))?;
    }
    done.apart.iter().try_for_each(|why| labelled(out, "apart", why))?;
    done.served.iter().try_for_each(|served| labelled(out, "memory", &served.to_string()))?;
    let (sum, bound) = (done.predicted_kl, done.predicted_kl_bound);
    labelled(
        out,
        "predicted",
        &format!("KL {sum:.6} nats/token, the sum over units (lower bound {bound:.6})"),
    )?;
    quality.evaluation.iter().try_for_each(|figures| human_figures(out, figures))?;
    tasks::human(out, &quality.tasks)?;
    done.verification.map_or(Ok(()), |verification| verify::human(out, verification))?;
    unit_table(out, done, layers)?;
    done.next_steps.human(out)?;
    // Not wrapped, to be copied.
    done.page.map_or(Ok(()), |page| writeln!(out, "page        {}", page.display()))
}

/// Prints the ten units with the largest KL, or all.
fn unit_table(out: &mut dyn Write, done: &Done<'_>, all: bool) -> io::Result<()> {
    let (rows, heading) = worst(done.units, (all, "units", "KL"), |row| row.candidates[row.chosen].kl);
    writeln!(out, "\n{heading}")?;
    unit_columns(rows).write(out)?;
    let windows = match done.windows {
        1 => "one window (± is no standard error)".to_owned(),
        windows => format!("{windows} windows"),
    };
    let scaled = if done.scaled { ", scaled per method and scheme to the KL of the whole model" } else { "" };
    paragraph(out, 0, &format!("KL of each unit alone quantized (nats/token), on {windows}{scaled}"))
}

/// Lists units with their chosen scheme and method, its KL, and the KL of the others.
pub(super) fn unit_columns<'a>(rows: impl IntoIterator<Item = &'a FitUnit>) -> Table {
    let columns = [
        ("unit", Align::Left),
        ("chosen", Align::Left),
        ("method", Align::Left),
        ("bits", Align::Right),
        ("KL", Align::Right),
        ("±", Align::Right),
        ("KL of other candidates", Align::Left),
    ];
    let mut table = Table::new(columns).optional(["±", "bits"]);
    for row in rows {
        let chosen = &row.candidates[row.chosen];
        let others = row.candidates.iter().enumerate().filter(|(at, _)| *at != row.chosen);
        let others = others.map(|(_, other)| format!("{} {}", row.named(other), number(Some(other.kl), 3)));
        table.row([
            row.unit.clone(),
            row.scheme.clone(),
            row.method.clone(),
            format!("{:.3}", row.bits_per_weight),
            number(Some(chosen.kl), 3),
            number(Some(chosen.kl_se), 2),
            others.collect::<Vec<_>>().join(", "),
        ]);
    }
    table
}

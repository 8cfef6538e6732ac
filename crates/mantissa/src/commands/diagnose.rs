//! `mantissa diagnose`: examines a model on a text and names remedies.

mod page;

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::Result;
use mantissa_advise::diagnose::{InputStats, Report};
use mantissa_jobs::names::AsText;
use mantissa_jobs::run_files::{LOG, RUN};
use mantissa_jobs::{Diagnose, DiagnoseReport, Job};
use mantissa_model::KvPolicy;
use mantissa_store::{Kind, Paths};
use serde::Serialize;

use super::calibration::CalibrationArgs;
use super::execute::Execute;
use super::model::ModelPath;
use super::next_steps::quoted;
use super::text::{TextArgs, bound};
use crate::context::Context;
use crate::help::Group;
use crate::output::{Align, Table, labelled, paragraph};

/// Find what quantization will break, or has broken, and the remedy
///
/// Runs the model over a text and examines it: outlier channels, spiking tokens, values beyond FP16, stored
/// ranges of inputs and of the KV cache that do not fit the text, experts that it never reaches. Each
/// finding has a place, figures, a remedy, and the command that applies it.
///
/// With --calibration, ranges of that text are tried on --text. With --reference (the source), the model is
/// also compared with it. Exit code 1 if something is found. doctor searches for faults of files; this
/// command for what precision does to a model.
#[derive(clap::Args)]
#[command(after_help = "EXAMPLES
  mantissa diagnose demo
  mantissa diagnose path/to/model --text sample.txt --calibration calib.txt
  mantissa diagnose path/to/quantized --text sample.txt \\
      --reference path/to/model --json")]
pub struct Args {
    /// Model folder or .gguf file
    model: ModelPath,
    /// Source model to compare with
    #[arg(long, value_name = "SOURCE")]
    reference: Option<ModelPath>,
    #[command(flatten)]
    text: TextArgs,
    #[command(flatten)]
    calibration: CalibrationArgs,
    /// Scheme of the KV cache to try; can be repeated
    ///
    /// As in eval --kv: int8-head, fp8-e4m3-head, int4-head-asym and so on. KL on the text against a cache in f32,
    /// and how many facts from earlier in a prompt are retrieved.
    #[arg(long, value_name = "POLICY")]
    kv: Vec<KvPolicy>,
    /// Bound of the KL to --reference, nats/token
    ///
    /// Beyond it the cache and then the inputs are relaxed, to find what it is owed to.
    #[arg(long, value_name = "NATS", value_parser = bound, requires = "reference")]
    max_kl: Option<f64>,
    /// Print the figures of every layer
    #[arg(long)]
    layers: bool,
    /// Write an HTML page as well
    #[arg(long, value_name = "FILE", value_parser = super::parse::page_path())]
    html: Option<PathBuf>,
}

#[derive(Serialize)]
struct Json<'a> {
    #[serde(flatten)]
    found: &'a DiagnoseReport,
    #[serde(skip_serializing_if = "Option::is_none")]
    page: Option<&'a PathBuf>,
}

impl Args {
    /// Returns the job.
    fn job(&self, seed: u64) -> Diagnose {
        Diagnose {
            model: self.model.job_path().clone(),
            reference: self.reference.as_ref().map(|model| model.job_path().clone()),
            text: self.text.value(),
            calibration: self.calibration.value(),
            kv: self.kv.iter().cloned().map(AsText).collect(),
            max_kl: self.max_kl,
            seed,
        }
    }
}

impl Execute for Args {
    const GROUP: Group = Group::Measure;

    fn paths(&self, paths: &mut Paths) -> Result<()> {
        *paths = self.job(0).paths();
        self.html.iter().for_each(|file| paths.write("--html", file, Kind::File));
        Ok(())
    }

    /// # Errors
    /// Unreadable files or a model that cannot run; [`GateFailed`](crate::error::GateFailed) if something is found.
    fn run(&self, context: &Context) -> Result<()> {
        let found = self.job(context.seed).run(context)?;
        if let Some(file) = &self.html {
            page::page(self, &found).write(&context.output(file)?)?;
        }
        let json = Json { found: &found, page: self.html.as_ref() };
        context.report(&json, |out| human(out, &found.report, self))?;
        Ok(found.require_nothing()?)
    }
}

fn human(out: &mut dyn Write, report: &Report, args: &Args) -> io::Result<()> {
    if args.layers {
        inputs(report).write(out)?;
        writeln!(out)?;
    }
    examined(report).write(out)?;
    for skipped in &report.skipped {
        paragraph(out, 2, &format!("not examined: {} ({})", skipped.name, skipped.lacks))?;
    }
    for finding in &report.findings {
        writeln!(out)?;
        labelled(out, "finding", finding.examination)?;
        labelled(out, "place", &finding.place.to_string())?;
        labelled(out, "found", &finding.found)?;
        labelled(out, "remedy", &finding.remedy)?;
        labelled(out, "command", &finding.command)?;
    }
    if report.findings.is_empty() {
        writeln!(out)?;
        writeln!(out, "nothing found on {} tokens", report.tokens)?;
    }
    if report.knows_nothing() {
        labelled(out, "but", &ignorance(report))?;
    }
    if let Some(run) = run_of(args.model.named()) {
        writeln!(
            out,
            "run         mantissa train --autopsy {} examines a step of its training",
            quoted(run)
        )?;
    }
    // Not wrapped, to be copied.
    args.html.as_ref().map_or(Ok(()), |page| writeln!(out, "page        {}", page.display()))
}

/// Says how much worse the model predicts the text than the frequencies of its tokens do.
fn ignorance(report: &Report) -> String {
    let perplexity = report.nll.map_or_else(|| "not finite".to_owned(), |nll| format!("{:.1}", nll.exp()));
    format!(
        "its perplexity is {perplexity}, worse than that of the token frequencies of this text, {:.1}: the model is damaged, untrained, or made for other text (mantissa doctor looks for wrong files)",
        report.nll_of_frequencies.exp()
    )
}

/// Returns the folder of the training run that a model is of: its own, or the one that it lies in.
fn run_of(model: &Path) -> Option<&Path> {
    let is_run = |folder: &&Path| folder.join(RUN).is_file() && folder.join(LOG).is_file();
    model.ancestors().take(2).find(is_run)
}

/// Lists the examinations that ran.
fn examined(report: &Report) -> Table {
    // The question is last, since only a last column is wrapped where the terminal is narrow.
    let mut table = Table::new([("examination", Align::Left), ("", Align::Left), ("question", Align::Left)]);
    for ran in &report.examined {
        let verdict = match ran.findings {
            0 => "nothing found".to_owned(),
            1 => "1 finding".to_owned(),
            n => format!("{n} findings"),
        };
        table.row([ran.name.to_owned(), verdict, ran.question.to_owned()]);
    }
    table
}

/// Lists what the pass has shown of every input.
fn inputs(report: &Report) -> Table {
    let mut table = Table::new([
        ("layer", Align::Right),
        ("input of", Align::Left),
        ("amax", Align::Right),
        ("channel", Align::Right),
        ("× median", Align::Right),
        ("token × median", Align::Right),
        ("kurtosis", Align::Right),
        ("rotated", Align::Right),
        ("int8 by token", Align::Right),
        ("rotated", Align::Right),
        ("by tensor", Align::Right),
    ])
    .optional(["kurtosis", "channel"]);
    for layer in &report.layers {
        layer.inputs.iter().for_each(|input| table.row(cells(layer.layer, input)));
    }
    table
}

fn cells(layer: usize, input: &InputStats) -> [String; 11] {
    let percent = |error: f64| format!("{:.2} %", 100.0 * error);
    [
        layer.to_string(),
        short(input).to_owned(),
        format!("{:.2}", input.amax),
        input.channel.to_string(),
        format!("{:.1}", input.channel_ratio),
        format!("{:.1}", input.token_ratio),
        format!("{:.1}", input.kurtosis),
        input.kurtosis_rotated.map_or_else(String::new, |kurtosis| format!("{kurtosis:.1}")),
        percent(input.error_by_token),
        input.error_rotated.map_or_else(String::new, percent),
        percent(input.error_by_tensor),
    ]
}

/// Returns the last part of the name of the first module that reads an input.
fn short(input: &InputStats) -> &str {
    let module = input.modules.first().map_or("", String::as_str);
    module.rsplit('.').next().unwrap_or(module)
}

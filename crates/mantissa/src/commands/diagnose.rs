//! `mantissa diagnose`: examines a model on a text and names remedies.

mod page;

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::Result;
use mantissa_advise::diagnose::{Finding, InputStats, Names, Report, Request, diagnose, steps};
use mantissa_eval::Sequence;
use mantissa_jobs::default_text;
use mantissa_model::{KvPolicy, Tokenizer};
use mantissa_quant::{Quality, model_config};
use mantissa_store::{Kind, Paths};
use serde::Serialize;

use super::calibration::CalibrationArgs;
use super::doctor;
use super::execute::Execute;
use super::loaded_models::{self, Use};
use super::model::{self, ModelPath};
use super::next_steps::quoted;
use super::tasks;
use super::text::{TextArgs, bound};
use crate::context::Context;
use crate::error::GateFailed;
use crate::help::Group;
use crate::output::{Align, Table, labelled, paragraph};
use crate::progress::Unit;

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
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

#[derive(Serialize)]
struct Json<'a> {
    model: &'a Path,
    convention: &'static str,
    #[serde(flatten)]
    report: &'a Report,
    #[serde(skip_serializing_if = "Option::is_none")]
    page: Option<&'a PathBuf>,
}

impl Execute for Args {
    const GROUP: Group = Group::Measure;

    fn paths(&self, paths: &mut Paths) -> Result<()> {
        self.model.paths(paths);
        self.text.paths(paths);
        self.calibration.paths(paths);
        self.reference.iter().for_each(|model| model.paths(paths));
        self.html.iter().for_each(|file| paths.write("--html", file, Kind::File));
        Ok(())
    }

    /// # Errors
    /// Unreadable files or a model that cannot run; [`GateFailed`] if something is found.
    fn run(&self, context: &Context) -> Result<()> {
        let files = model::open(&self.model, context)?;
        let reference = self.reference.as_ref().map(|path| model::open_quietly(path)).transpose()?;
        let windows = match self.text.sequences(&self.model, self.calibration.is_text(), context)? {
            Some(windows) => windows,
            None => context.reading_texts(|| doctor::prose(&self.model, context))?,
        };
        let calibration = self.calibration.load(&files, self.text.split(), context)?;
        let calibration: Option<Vec<Sequence>> = calibration
            .map(|set| set.windows.into_iter().map(|tokens| Sequence { tokens, from: 1 }).collect());
        let used = Use::evaluation(&windows, context.threads);
        let opened: &Path = &self.model;
        let models: Vec<&Path> = std::iter::once(opened).chain(self.reference.as_deref()).collect();
        loaded_models::require_memory_and(25, &models, used, context)?;
        let tokenizer = Tokenizer::load(files.dir()).ok();
        let retrieval = if self.kv.is_empty() { Vec::new() } else { tasks::retrieval()? };
        let request = Request {
            files: &files,
            windows: &windows,
            calibration: calibration.as_deref(),
            reference: reference.as_ref(),
            tokenizer: tokenizer.as_ref(),
            kv: &self.kv,
            retrieval: &retrieval,
            max_kl: self.max_kl,
            names: names(self, &files),
            threads: context.threads,
        };
        let total = steps(&model_config(&files)?, calibration.is_some());
        let progress = context.progress(total as u64, Unit::Items("steps"));
        let report = diagnose(&request, &|done| progress.set(done as u64))?;
        progress.finish();
        let json = Json {
            model: self.model.named(),
            convention: files.convention_name(),
            report: &report,
            page: self.html.as_ref(),
        };
        if let Some(file) = &self.html {
            page::page(self, json.convention, &report).write(&context.output(file)?)?;
        }
        context.report(&json, |out| human(out, &report, self))?;
        let Some(first) = report.findings.first() else { return Ok(()) };
        let more = match report.findings.len() {
            1 => String::new(),
            n => format!(" ({} more)", n - 1),
        };
        let message =
            format!("{}: {}: {}{more}; fix: {}", first.examination, place(first), first.found, first.command);
        Err(GateFailed::new(message).into())
    }
}

/// Returns the names of the model and its texts in commands.
fn names(args: &Args, files: &mantissa_store::convention::ModelFiles) -> Names {
    let typed = quoted(args.model.typed());
    let stem = args.model.typed().display().to_string();
    let stem = stem.trim_end_matches('/').trim_end_matches(".gguf").to_owned();
    let source = match &args.reference {
        Some(source) => quoted(source.typed()),
        None if files.config().is_some_and(|config| config.get("quantization_config").is_some()) => {
            "SOURCE".to_owned()
        }
        None => typed.clone(),
    };
    let (text, calibrate) = args.text.options().unwrap_or_else(|| {
        let default = default_text::NAME;
        (format!("--text {default}"), format!("--calibration {default}"))
    });
    let quality = Quality::read(files.dir()).ok().flatten();
    let weights =
        quality.as_ref().map_or_else(|| "int8-channel".to_owned(), |quality| quality.weights.clone());
    let again = args.reference.is_some().then(|| {
        let recipe = quality.as_ref().map_or("bf16", |quality| quality.recipe.as_str());
        let calibration = match quality.as_ref().and_then(|quality| quality.calibration.as_ref()) {
            Some(_) => format!(" {calibrate}"),
            None => String::new(),
        };
        let out = quoted(Path::new(&format!("{stem}-again")));
        format!("mantissa quantize {source} --recipe {recipe}{calibration} --out {out}")
    });
    Names { model: typed, stem: quoted(Path::new(&stem)), source, text, calibrate, weights, again }
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
        labelled(out, "place", &place(finding))?;
        labelled(out, "found", &finding.found)?;
        labelled(out, "remedy", &finding.remedy)?;
        labelled(out, "command", &finding.command)?;
    }
    if report.findings.is_empty() {
        writeln!(out)?;
        writeln!(out, "nothing found on {} tokens", report.tokens)?;
    }
    // Not wrapped, to be copied.
    args.html.as_ref().map_or(Ok(()), |page| writeln!(out, "page        {}", page.display()))
}

/// Lists the examinations that ran.
fn examined(report: &Report) -> Table {
    let mut table = Table::new([("examination", Align::Left), ("question", Align::Left), ("", Align::Left)]);
    for ran in &report.examined {
        let verdict = match ran.findings {
            0 => "nothing found".to_owned(),
            1 => "1 finding".to_owned(),
            n => format!("{n} findings"),
        };
        table.row([ran.name.to_owned(), ran.question.to_owned(), verdict]);
    }
    table
}

/// Describes the place of a finding.
fn place(finding: &Finding) -> String {
    let place = &finding.place;
    let layer = place.layer.map_or_else(String::new, |layer| format!("layer {layer}, "));
    let channel = place.channel.map_or_else(String::new, |channel| format!(", channel {channel}"));
    format!("{layer}{}{channel}", place.part)
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

//! `mantissa inspect`: shows the content of a checkpoint.

use std::io::{self, Write};

use anyhow::Result;
use mantissa_jobs::Job;
use mantissa_jobs::inspect::{Inspect, InspectReport, InspectedTensor, SchemeTotal, Stats};
use mantissa_store::end_tokens::EndToken;
use mantissa_store::{Paths, Shown};
use serde_json::Value;

use super::execute::Execute;
use super::model::ModelPath;
use crate::context::Context;
use crate::help::Group;
use crate::output::{self, Align, Table, bytes, count, counted, number};

/// Show tensors, schemes, parameters, size and bits per weight
///
/// MODEL is a Hugging Face folder (dense or quantized), a .gguf file, or one bare .safetensors file, which
/// needs no config and no known architecture. Reads headers only, unless --stats asks for value statistics.
#[derive(clap::Args)]
#[command(after_help = "EXAMPLES
  mantissa inspect demo
  mantissa inspect path/to/model
  mantissa inspect path/to/model --tensors --stats
  mantissa inspect path/to/model.safetensors --json")]
pub struct Args {
    /// Model folder, .gguf or .safetensors file, or demo
    model: ModelPath,
    /// List every tensor
    #[arg(long)]
    tensors: bool,
    /// Show range, moments and outliers of float tensors
    ///
    /// Reads all weights; quantized ones are dequantized.
    #[arg(long)]
    stats: bool,
}

impl Execute for Args {
    const GROUP: Group = Group::Start;

    fn paths(&self, paths: &mut Paths) -> Result<()> {
        self.job().inputs().into_iter().for_each(|path| paths.read(path));
        Ok(())
    }

    fn run(&self, context: &Context) -> Result<()> {
        let report = self.job().run(context)?;
        context.report(&report, |out| print(self, &report, out))?;
        context.warn_all(&report.warnings)
    }
}

impl Args {
    fn job(&self) -> Inspect {
        Inspect { model: self.model.job_path().clone(), stats: self.stats }
    }
}

fn print(args: &Args, report: &InspectReport, out: &mut dyn Write) -> io::Result<()> {
    print_summary(report, out)?;
    writeln!(out)?;
    print_totals(&report.by_scheme, out)?;
    if args.tensors || args.stats {
        writeln!(out)?;
        print_tensors(&report.tensors, out)?;
    }
    if args.stats {
        writeln!(out)?;
        print_stats(
            report.tensors.iter().filter_map(|t| Some((t.entry.name.as_str(), t.stats.as_ref()?))),
            out,
        )?;
    }
    Ok(())
}

fn print_summary(report: &InspectReport, out: &mut dyn Write) -> io::Result<()> {
    let mut line = |name: &str, text: String| {
        write!(out, "{name:<14} ")?;
        output::paragraph(out, 15, &text)
    };
    line("model", report.model.display().to_string())?;
    match (&report.architecture, &report.model_type) {
        (Some(architecture), _) => line("architecture", architecture.to_string())?,
        (None, Some(name)) => line("architecture", format!("{} (unknown)", Shown(name)))?,
        (None, None) => {}
    }
    line("format", report.convention.into())?;
    line("parameters", format!("{} ({})", count(report.parameters), report.parameters))?;
    line(
        "size",
        format!("{} of tensors in {}", bytes(report.bytes), counted(report.files as u64, "weight file")),
    )?;
    let shown = |bits: Option<f64>| bits.map_or("-".into(), |bits| format!("{bits:.3}"));
    line("bits/weight", format!("{} over all tensors", shown(report.bits_per_weight)))?;
    if let Some(bits) = report.linear_bits_per_weight {
        line("", format!("{bits:.3} over decoder linears, scales and zero points included"))?;
    }
    if let Some(kv) = &report.kv_cache {
        line("KV cache", kv.clone())?;
    }
    if !report.end_tokens.is_empty() {
        let token = |token: &EndToken| match &token.text {
            Some(text) => format!("{} {}", token.id, Shown(text)),
            None => token.id.to_string(),
        };
        line("end tokens", report.end_tokens.iter().map(token).collect::<Vec<_>>().join(", "))?;
    }
    if !report.history.is_empty() {
        line("made by", report.history.iter().map(made_by).collect::<Vec<_>>().join(", then "))?;
    }
    report.notes.iter().try_for_each(|note| line("note", note.clone()))
}

/// Describes one command of the history, with its recipe or steps.
fn made_by(run: &Value) -> String {
    let command = Shown(run["command"].as_str().unwrap_or("another run")).to_string();
    match (run["recipe"].as_str(), run["steps"].as_u64()) {
        // A conversion's recipe repeats the command's name.
        (Some(recipe), _) if recipe != command => format!("{command} {}", Shown(recipe)),
        (None, Some(steps)) => format!("{command} ({})", counted(steps, "step")),
        _ => command,
    }
}

fn print_totals(totals: &[SchemeTotal], out: &mut dyn Write) -> io::Result<()> {
    let mut table = Table::new([
        ("stored as", Align::Left),
        ("tensors", Align::Right),
        ("parameters", Align::Right),
        ("bytes", Align::Right),
        ("bits/weight", Align::Right),
    ])
    .optional(["bytes", "tensors"]);
    for total in totals {
        table.row([
            total.scheme.clone(),
            total.tensors.to_string(),
            total.parameters.to_string(),
            total.bytes.to_string(),
            number(total.bits_per_weight, 5),
        ]);
    }
    table.write(out)
}

fn print_tensors(tensors: &[InspectedTensor], out: &mut dyn Write) -> io::Result<()> {
    let mut table = Table::new([
        ("tensor", Align::Left),
        ("stored as", Align::Left),
        ("shape", Align::Left),
        ("bytes", Align::Right),
        ("bits/weight", Align::Right),
    ])
    .optional(["bytes", "bits/weight"]);
    for InspectedTensor { entry, bits_per_weight, .. } in tensors {
        table.row([
            Shown(&entry.name).to_string(),
            entry.scheme.clone().unwrap_or_else(|| entry.dtype.into()),
            output::shape(&entry.shape),
            entry.bytes.to_string(),
            number(*bits_per_weight, 5),
        ]);
    }
    table.write(out)
}

/// Prints one line per tensor.
fn print_stats<'a>(
    tensors: impl Iterator<Item = (&'a str, &'a Stats)>,
    out: &mut dyn Write,
) -> io::Result<()> {
    let mut table = Table::new([
        ("tensor", Align::Left),
        ("min", Align::Right),
        ("max", Align::Right),
        ("mean", Align::Right),
        ("std", Align::Right),
        ("kurtosis", Align::Right),
        ("amax/rms", Align::Right),
        ("row amax min..median..max", Align::Right),
        ("zeros %", Align::Right),
        ("NaN", Align::Right),
        ("Inf", Align::Right),
    ])
    .optional(["zeros %", "row amax min..median..max", "mean", "kurtosis", "Inf", "NaN", "min", "max"]);
    tensors.for_each(|(name, stats)| table.row(cells(name, stats)));
    table.write(out)
}

fn cells(name: &str, s: &Stats) -> [String; 11] {
    let float = |v: Option<f32>| number(v.map(f64::from), 4);
    let spread = s.row_amax.as_ref().map(|r| [r.min, r.median, r.max].map(|v| float(Some(v))).join(".."));
    [
        Shown(name).to_string(),
        float(s.min),
        float(s.max),
        number(s.mean, 3),
        number(s.std, 4),
        number(s.kurtosis, 4),
        number(s.outlier_ratio, 4),
        spread.unwrap_or_else(|| "-".into()),
        number(s.zeros.map(|z| 100.0 * z), 3),
        s.nan.to_string(),
        s.inf.to_string(),
    ]
}

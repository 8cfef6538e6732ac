//! `mantissa inspect`: shows the content of a checkpoint.

mod architecture;
mod experts;
mod inventory;
mod model;
mod stats;

use std::io::{self, Write};
use std::path::PathBuf;

use anyhow::Result;
use mantissa_advise::subject::bytes_of_weight;
use mantissa_model::ModelConfig;
use mantissa_store::Shown;
use mantissa_store::{Manifest, Paths};
use serde::Serialize;
use serde_json::Value;

use self::architecture::Architecture;
use self::inventory::{Entry, Inventory, bits};
use self::model::Model;
use self::stats::Stats;
use super::execute::Execute;
use super::model::{ModelPath, interrupted};
use crate::context::Context;
use crate::help::Group;
use crate::output::{self, Align, Table, bytes, count, number};
use crate::progress::Unit;
use mantissa_jobs::memory::PROCESS;

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

#[derive(Serialize)]
struct Report {
    model: PathBuf,
    model_type: Option<String>,
    architecture: Option<Architecture>,
    convention: &'static str,
    /// Number of logical weights, without scales, zero points and shapes of quantized tensors.
    parameters: u64,
    /// Size of all tensors in bytes.
    bytes: u64,
    files: usize,
    /// Bits per weight over all tensors, embedding, head and norms included.
    bits_per_weight: Option<f64>,
    /// Bits per weight of the decoder's linear layers, scales and zero points included; `None` for an unknown
    /// architecture.
    linear_bits_per_weight: Option<f64>,
    /// KV cache scheme, if the checkpoint has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    kv_cache: Option<String>,
    by_scheme: Vec<Total>,
    /// Commands that made the model, oldest first, from its manifest.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    history: Vec<Value>,
    notes: Vec<String>,
    warnings: Vec<String>,
    tensors: Vec<TensorReport>,
}

/// Totals of one dtype or scheme.
#[derive(Serialize)]
struct Total {
    scheme: String,
    tensors: usize,
    parameters: u64,
    bytes: u64,
    bits_per_weight: Option<f64>,
}

#[derive(Serialize)]
struct TensorReport {
    #[serde(flatten)]
    entry: Entry,
    bits_per_weight: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stats: Option<Stats>,
}

impl Execute for Args {
    const GROUP: Group = Group::Start;

    fn paths(&self, paths: &mut Paths) -> Result<()> {
        self.model.paths(paths);
        paths.read(self.model.as_file());
        Ok(())
    }

    fn run(&self, context: &Context) -> Result<()> {
        let mut warnings = Vec::new();
        let path = self.model.as_file();
        warnings.extend(interrupted(path));
        let model = Model::open(path, &mut warnings)?;
        let config = architecture::config(model.checkpoint(), path, &mut warnings)?;
        context.require_more_memory(&path.display().to_string(), 0)?;
        if let (Model::Known(files), Some(_)) = (&model, &config) {
            // Scales and codes are read to find the scheme of each kind of layer.
            let needs = bytes_of_weight(files).unwrap_or(0);
            context.require_memory("inspect", PROCESS.saturating_add(needs))?;
        }
        let inventory = Inventory::read(&model, config.as_ref(), &mut warnings)?;
        let mut notes = model.notes();
        if let (Model::Known(files), Some(config)) = (&model, &config) {
            architecture::compare(config, files, &inventory.entries, &mut notes, &mut warnings);
        }
        let kv_cache = match (&model, &config) {
            (Model::Known(files), Some(config)) => match mantissa_quant::stored_kv_scheme(files, config) {
                Ok(found) => {
                    let stored = found.map_or_else(Some, |scheme| scheme.map(|scheme| scheme.to_string()));
                    stored.or_else(|| files.kv_policy().map(str::to_owned))
                }
                Err(error) => {
                    warnings.push(error.to_string());
                    None
                }
            },
            _ => None,
        };
        let stats = if self.stats { measure(&model, &inventory.entries, context)? } else { Vec::new() };
        let report = assemble(self, &model, config.as_ref(), inventory, stats, notes, warnings);
        let history = Manifest::history(path)?;
        let report = Report { kv_cache, history, ..report };
        context.report(&report, |out| print(self, &report, out))?;
        context.warn_all(&report.warnings)
    }
}

fn measure(model: &Model, entries: &[Entry], context: &Context) -> Result<Vec<Option<Stats>>> {
    let needs = entries.iter().map(|entry| stats::memory(entry, context.threads)).max().unwrap_or(0);
    context.require_memory("inspect --stats", needs)?;
    let progress = context.progress(entries.iter().map(|entry| entry.bytes).sum(), Unit::Bytes);
    let mut all = Vec::with_capacity(entries.len());
    for entry in entries {
        progress.message(Shown(&entry.name).to_string());
        all.push(stats::of_entry(model, entry, context.threads)?);
        progress.add(entry.bytes);
    }
    progress.finish();
    Ok(all)
}

fn assemble(
    args: &Args,
    model: &Model,
    config: Option<&ModelConfig>,
    inventory: Inventory,
    stats: Vec<Option<Stats>>,
    notes: Vec<String>,
    mut warnings: Vec<String>,
) -> Report {
    let checkpoint = model.checkpoint();
    warnings.splice(0..0, checkpoint.warnings().iter().cloned());
    let entries = inventory.entries;
    let stored = checkpoint.total_bytes();
    let linear_bits_per_weight = match (model, config) {
        (Model::Known(files), Some(config)) => architecture::linear_bits(config, files, &entries),
        _ => None,
    };
    let parameters = match (model, config) {
        // Packed codes of an unknown format cannot be counted, but the architecture gives the count.
        (Model::Raw(_), Some(config)) => config.parameters(),
        _ => entries.iter().map(|entry| entry.parameters).sum(),
    };
    let by_scheme = totals(&entries);
    let mut stats = stats.into_iter();
    let tensors = entries.into_iter().map(|entry| TensorReport {
        bits_per_weight: bits(entry.bytes, entry.parameters),
        stats: stats.next().flatten(),
        entry,
    });
    Report {
        model: args.model.named().to_owned(),
        model_type: checkpoint.config().and_then(|c| c["model_type"].as_str()).map(str::to_owned),
        architecture: config.map(Architecture::of),
        convention: model.convention(),
        parameters,
        bytes: stored,
        files: checkpoint.files().count(),
        bits_per_weight: bits(stored, parameters),
        linear_bits_per_weight,
        kv_cache: None,
        by_scheme,
        history: Vec::new(),
        notes,
        warnings,
        tensors: tensors.collect(),
    }
}

fn totals(entries: &[Entry]) -> Vec<Total> {
    let mut totals: Vec<Total> = Vec::new();
    for entry in entries {
        let name = entry.scheme.as_deref().unwrap_or(entry.dtype);
        let at = totals.iter().position(|total| total.scheme == name).unwrap_or_else(|| {
            let scheme = name.to_owned();
            totals.push(Total { scheme, tensors: 0, parameters: 0, bytes: 0, bits_per_weight: None });
            totals.len() - 1
        });
        let total = &mut totals[at];
        total.tensors += 1;
        total.parameters += entry.parameters;
        total.bytes += entry.bytes;
        total.bits_per_weight = bits(total.bytes, total.parameters);
    }
    totals
}

fn print(args: &Args, report: &Report, out: &mut dyn Write) -> io::Result<()> {
    print_summary(report, out)?;
    writeln!(out)?;
    print_totals(&report.by_scheme, out)?;
    if args.tensors || args.stats {
        writeln!(out)?;
        print_tensors(&report.tensors, out)?;
    }
    if args.stats {
        writeln!(out)?;
        stats::print(
            report.tensors.iter().filter_map(|t| Some((t.entry.name.as_str(), t.stats.as_ref()?))),
            out,
        )?;
    }
    Ok(())
}

fn print_summary(report: &Report, out: &mut dyn Write) -> io::Result<()> {
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
    line("size", format!("{} in {}", bytes(report.bytes), plural(report.files, "weight file")))?;
    let shown = |bits: Option<f64>| bits.map_or("-".into(), |bits| format!("{bits:.3}"));
    line("bits/weight", format!("{} over all tensors", shown(report.bits_per_weight)))?;
    if let Some(bits) = report.linear_bits_per_weight {
        line("", format!("{bits:.3} over decoder linears, scales and zero points included"))?;
    }
    if let Some(kv) = &report.kv_cache {
        line("KV cache", kv.clone())?;
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
        (None, Some(steps)) => format!("{command} ({})", plural(steps as usize, "step")),
        _ => command,
    }
}

fn plural(n: usize, name: &str) -> String {
    if n == 1 { format!("{n} {name}") } else { format!("{n} {name}s") }
}

fn print_totals(totals: &[Total], out: &mut dyn Write) -> io::Result<()> {
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

fn print_tensors(tensors: &[TensorReport], out: &mut dyn Write) -> io::Result<()> {
    let mut table = Table::new([
        ("tensor", Align::Left),
        ("stored as", Align::Left),
        ("shape", Align::Left),
        ("bytes", Align::Right),
        ("bits/weight", Align::Right),
    ])
    .optional(["bytes", "bits/weight"]);
    for TensorReport { entry, bits_per_weight, .. } in tensors {
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

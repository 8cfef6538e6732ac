//! `mantissa report`: one self-contained page of a training run or a quantized artifact.

mod artifact;
mod health;
mod lines;
mod training;

use std::path::{Path, PathBuf};

use anyhow::Result;
use mantissa_quant::{Quality, quality_path};
use mantissa_store::{Kind, Paths};
use serde::Serialize;

use super::train::folder;
use crate::app::Context;
use crate::error::BadInput;
use crate::memory::PROCESS;

/// Make one HTML page of a run: of training from its logs, of quantization from its quality.json.
///
/// The page is one file that loads nothing: curves and tables, light and dark, also on a phone. Of training it shows loss, learning
/// rate, gradient norm, loss scale, speed, the health of every tensor, settings, machine and memory; of an artifact its layers,
/// errors, bits and figures. It may be made while a run is under way.
#[derive(clap::Args)]
#[command(after_help = "EXAMPLES
  mantissa report runs/first
  mantissa report model-int4 --out int4.html")]
pub struct Args {
    /// Folder of a training run, or a quantized model: a folder or a .gguf file
    run: PathBuf,
    /// The page; without it report.html in the run's folder, or NAME.report.html beside the model
    #[arg(long)]
    out: Option<PathBuf>,
}

#[derive(Serialize)]
struct Done {
    report: PathBuf,
    kind: &'static str,
    bytes: u64,
}

/// Adds what the command reads and writes.
pub fn paths(args: &Args, paths: &mut Paths) {
    if args.run.is_file() {
        paths.watch(&args.run);
    }
    paths.watch(quality_path(&args.run));
    for name in [folder::LOG, folder::TELEMETRY, folder::RUN, folder::CONFIG] {
        paths.watch(args.run.join(name));
    }
    paths.write("--out", place(args), Kind::File);
}

/// Runs the command.
///
/// # Errors
/// A folder with nothing to report on, files that are not what they should be, I/O.
pub fn run(args: &Args, context: &Context) -> Result<()> {
    context.require_memory("report", needed(&args.run))?;
    let (kind, page) = if is_training(&args.run) {
        ("training", training::page(&args.run)?)
    } else if let Some(quality) = Quality::read(&args.run)? {
        ("artifact", artifact::page(&name(&args.run), &quality))
    } else {
        let found = format!("neither {} nor {}", folder::LOG, quality_path(&args.run).display());
        let what = args.run.display().to_string();
        return Err(BadInput::new(what, found, "the folder of a training run, or a quantized model").into());
    };
    let out = place(args);
    page.write(&context.output(&out)?)?;
    let done = Done { report: out, kind, bytes: page.html().len() as u64 };
    context.report(&done, |out| writeln!(out, "{}", done.report.display()))
}

/// True for the folder of a training run.
fn is_training(run: &Path) -> bool {
    run.join(folder::LOG).is_file()
}

/// The page's path.
fn place(args: &Args) -> PathBuf {
    match &args.out {
        Some(out) => out.clone(),
        None if is_training(&args.run) => args.run.join("report.html"),
        None => beside(&args.run),
    }
}

/// Bytes of memory for each byte of a log, whose numbers become points of curves and text again.
const OF_LOG: u64 = 6;

/// The same of JSON that is read as a tree.
const OF_JSON: u64 = 24;

/// Predicted peak memory.
fn needed(run: &Path) -> u64 {
    let size = |path: &Path| std::fs::metadata(path).map_or(0, |file| file.len());
    let logs: u64 = [folder::LOG, folder::TELEMETRY].iter().map(|name| size(&run.join(name))).sum();
    let json = size(&run.join(folder::RUN)).saturating_add(size(&quality_path(run)));
    PROCESS.saturating_add(logs.saturating_mul(OF_LOG)).saturating_add(json.saturating_mul(OF_JSON))
}

/// The last part of a path.
fn name(path: &Path) -> String {
    let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    path.file_name().map_or_else(|| path.display().to_string(), |name| name.to_string_lossy().into_owned())
}

/// Beside a model, whose own files are listed in its manifest.
fn beside(model: &Path) -> PathBuf {
    let path = model.canonicalize().unwrap_or_else(|_| model.to_owned());
    path.with_file_name(format!("{}.report.html", name(model)))
}

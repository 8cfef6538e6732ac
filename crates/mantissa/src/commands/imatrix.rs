//! `mantissa imatrix`: the importance of the columns of a model's weights, found on a text.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use anyhow::Result;
use mantissa_quant::{Importance, QuantError, model_config};
use mantissa_store::{Kind, Paths};
use serde::Serialize;

use super::calibration::CalibrationArgs;
use super::model::{self, ModelPath};
use super::text::separator;
use crate::app::Context;
use crate::error::BadInput;
use crate::interrupt;
use crate::output::count;
use crate::progress::Unit;

/// Find the importance of the columns of a model's weights on a text: the mean square of what each linear layer reads. The
/// result is an importance matrix in llama.cpp's GGUF encoding, which its llama-quantize takes as --imatrix, and so does
/// `mantissa quantize`.
#[derive(clap::Args)]
#[command(after_help = "EXAMPLES
  mantissa imatrix path/to/model --calibration text.txt --out imatrix.gguf
  mantissa quantize path/to/model --recipe q4_k_m --imatrix imatrix.gguf --out path/to/model-q4_k_m.gguf")]
pub struct Args {
    /// A model: a Hugging Face folder or a GGUF file
    model: ModelPath,
    #[command(flatten)]
    calibration: CalibrationArgs,
    /// The file to write
    #[arg(long, value_name = "FILE.gguf")]
    out: PathBuf,
    /// Cut the text into documents at this separator first
    #[arg(long, value_name = "SEP", value_parser = separator)]
    split: Option<String>,
}

#[derive(Serialize)]
struct Report<'a> {
    output: &'a Path,
    weights: usize,
    windows: usize,
    tokens: usize,
}

/// Adds what the command reads and writes.
pub fn paths(args: &Args, paths: &mut Paths) {
    args.model.paths(paths);
    args.calibration.paths(paths);
    paths.write("--out", &args.out, Kind::File);
}

/// Runs the command.
///
/// # Errors
/// A model or text that cannot be used; I/O.
pub fn run(args: &Args, context: &Context) -> Result<()> {
    let source = model::open(&args.model, context)?;
    let config = model_config(&source)?;
    let set = args.calibration.load(&source, args.split.as_deref(), context)?;
    let set = set.ok_or_else(|| {
        BadInput::new("--calibration", "nothing", "a text, or token windows by --calibration-tokens")
    })?;
    let needs = Importance::bytes_needed(&config, &set, context.threads);
    context.require_memory("imatrix", model::BASE.saturating_add(needs))?;
    let progress = context.progress(config.num_hidden_layers as u64, Unit::Items("layers"));
    let tick = &mut |layer: usize| {
        progress.set(layer as u64);
        if interrupt::received().is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let found = interrupt::orderly(
        || Importance::collect(&source, &config, &set, context.threads, tick),
        QuantError::is_interruption,
    );
    progress.finish();
    let found = found?;
    found.write(&context.output(&args.out)?)?;
    let (windows, tokens) = (set.windows.len(), set.tokens());
    let report = Report { output: &args.out, weights: found.entries.len(), windows, tokens };
    context.report(&report, |out| {
        writeln!(
            out,
            "{}: importance of {} weights on {} tokens of {}",
            args.out.display(),
            report.weights,
            count(tokens as u64),
            found.name
        )
    })
}

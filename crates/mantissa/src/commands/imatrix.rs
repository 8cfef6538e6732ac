//! `mantissa imatrix`: computes an importance matrix on a text.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use anyhow::Result;
use mantissa_jobs::adapt;
use mantissa_quant::{Importance, QuantError, model_config};
use mantissa_store::{Kind, Paths};
use serde::Serialize;

use super::calibration::CalibrationArgs;
use super::execute::Execute;
use super::model::{self, ModelPath};
use super::text::separator;
use crate::context::Context;
use crate::error::BadInput;
use crate::help::Group;
use crate::interrupt;
use crate::output::count;
use crate::progress::Unit;

/// Calibration that the command needs.
const CALIBRATION: &str =
    "--calibration or --calibration-tokens (--calibration default is the built-in text)";

/// Compute an importance matrix for GGUF K- and IQ-types
///
/// Writes llama.cpp's GGUF encoding, which llama-quantize and `mantissa quantize` take as --imatrix.
#[derive(clap::Args)]
#[command(after_help = "EXAMPLES
  mantissa imatrix demo --calibration story.txt --length 128 --samples 4 \\
      --out imatrix.gguf
  mantissa quantize demo --recipe q4_k_m --imatrix imatrix.gguf \\
      --out demo-q4_k_m.gguf")]
pub struct Args {
    /// Hugging Face folder, .gguf file, or demo
    model: ModelPath,
    #[command(flatten)]
    calibration: CalibrationArgs,
    /// Importance matrix to write
    #[arg(long, value_name = "FILE.gguf")]
    out: PathBuf,
    /// Separator between documents of the text
    #[arg(long, value_name = "SEP", value_parser = separator, help_heading = "Calibration", hide_short_help = true)]
    split: Option<String>,
}

#[derive(Serialize)]
struct Report<'a> {
    output: &'a Path,
    weights: usize,
    windows: usize,
    tokens: usize,
}

impl Execute for Args {
    const GROUP: Group = Group::Quantize;

    fn paths(&self, paths: &mut Paths) -> Result<()> {
        self.model.paths(paths);
        self.calibration.paths(paths);
        paths.write("--out", &self.out, Kind::File);
        Ok(())
    }

    /// # Errors
    /// A model or text that cannot be used; I/O.
    fn run(&self, context: &Context) -> Result<()> {
        let source = model::open(&self.model, context)?;
        let config = model_config(&source)?;
        let set = self.calibration.load(&source, self.split.as_deref(), context)?;
        let set = set.ok_or_else(|| BadInput::new("imatrix", "neither", CALIBRATION))?;
        let needs = |limits| model::BASE.saturating_add(Importance::bytes_needed(&config, &set, limits));
        let limits = adapt::fit_calibration("imatrix", context, needs)?;
        let progress = context.progress(config.num_hidden_layers as u64, Unit::Items("layers"));
        let tick = &mut |layer: usize| {
            progress.set(layer as u64);
            if interrupt::received().is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let found = interrupt::orderly(
            || Importance::collect(&source, &config, &set, limits, tick),
            QuantError::is_interruption,
        );
        progress.finish();
        let found = found?;
        found.write(&context.output(&self.out)?)?;
        let (windows, tokens) = (set.windows.len(), set.tokens());
        let report = Report { output: &self.out, weights: found.entries.len(), windows, tokens };
        context.report(&report, |out| {
            writeln!(
                out,
                "{}: importance of {} weights, from {} tokens of {}",
                self.out.display(),
                report.weights,
                count(tokens as u64),
                found.name
            )
        })
    }
}

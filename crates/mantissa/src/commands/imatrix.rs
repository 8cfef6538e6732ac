//! `mantissa imatrix`: computes an importance matrix on a text.

use std::path::{Path, PathBuf};

use anyhow::Result;
use mantissa_jobs::{Imatrix, ImatrixReport, Job};
use mantissa_store::Paths;
use serde::Serialize;

use super::calibration::CalibrationArgs;
use super::execute::Execute;
use super::model::ModelPath;
use super::text::separator;
use crate::context::Context;
use crate::help::Group;
use crate::output::count;

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

impl Args {
    /// Returns the job.
    fn job(&self, seed: u64) -> Imatrix {
        Imatrix {
            source: self.model.job_path().clone(),
            calibration: self.calibration.value(),
            split: self.split.clone(),
            out: self.out.clone(),
            seed,
        }
    }
}

impl Execute for Args {
    const GROUP: Group = Group::Quantize;

    fn paths(&self, paths: &mut Paths) -> Result<()> {
        *paths = self.job(0).paths();
        Ok(())
    }

    /// # Errors
    /// A model or text that cannot be used; I/O.
    fn run(&self, context: &Context) -> Result<()> {
        let ImatrixReport { text, weights, windows, tokens } = self.job(context.seed).run(context)?;
        let report = Report { output: &self.out, weights, windows, tokens };
        context.report(&report, |out| {
            let (out_path, tokens) = (self.out.display(), count(tokens as u64));
            writeln!(out, "{out_path}: importance of {weights} weights, from {tokens} tokens of {text}")
        })
    }
}

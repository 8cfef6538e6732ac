//! `mantissa recalibrate`: recomputes stored scales of a quantized model on another text.

use std::path::{Path, PathBuf};

use anyhow::Result;
use mantissa_jobs::{Job, Recalibrate, RecalibrateReport, parse_observer};
use mantissa_model::KvPolicy;
use mantissa_store::Paths;
use serde::Serialize;

use super::calibration::CalibrationArgs;
use super::execute::Execute;
use super::model::ModelPath;
use super::text::TextArgs;
use crate::context::Context;
use crate::help::Group;

/// Recompute the static activation and KV cache scales of a model
///
/// Covers static input scales, NVFP4's global input scale, and scales or levels of the KV cache. Weights keep
/// their bytes. The model runs with its stored weights and no other quantization. quality.json is copied
/// without the figures that were measured with the old scales.
#[derive(clap::Args)]
#[command(after_help = "EXAMPLES
  mantissa quantize demo --out demo-kv \\
      --recipe rtn-int8-channel+kv-fp8-e4m3-tensor@static \\
      --calibration story.txt --length 256
  mantissa recalibrate demo-kv --calibration story.txt --length 128 \\
      --out demo-kv-2
  mantissa recalibrate path/to/native --kv nuq4-1%,pre-rope \\
      --calibration text.txt --out with-levels")]
// Their earlier names, which take every window of a text instead of --samples.
#[command(mut_arg("text", |arg| arg.hide(true)), mut_arg("tokens", |arg| arg.hide(true)))]
#[command(mut_arg("context", |arg| arg.hide(true)), mut_arg("stride", |arg| arg.hide(true)))]
#[command(mut_arg("bos", |arg| arg.hide(true)), mut_arg("limit", |arg| arg.hide(true)))]
#[command(mut_arg("docs", |arg| arg.hide(true)))]
pub struct Args {
    /// Quantized model folder
    model: ModelPath,
    #[command(flatten)]
    calibration: CalibrationArgs,
    #[command(flatten)]
    text: TextArgs,
    /// Observer of static scales
    ///
    /// max, mse, kl, moving-average, percentile, or percentile-P such as percentile-99.9.
    #[arg(long, value_name = "OBSERVER", value_parser = observer, default_value = "max", help_heading = "Scales")]
    observer: String,
    /// Store KV cache levels for this policy
    ///
    /// nuq4, nuq3-1% and so on, as in run --kv; needs the native format.
    #[arg(long, value_name = "POLICY", help_heading = "Scales")]
    kv: Option<KvPolicy>,
    /// Output folder
    #[arg(long, value_name = "DIR", help_heading = "Output")]
    out: PathBuf,
}

/// Checks an observer.
fn observer(text: &str) -> Result<String, String> {
    parse_observer(text).map(|_| text.to_owned())
}

#[derive(Serialize)]
struct Report<'a> {
    output: &'a Path,
    input_scales: usize,
    cache_scales: usize,
    /// True if KV cache levels were learned.
    cache_levels: bool,
    windows: usize,
    tokens: usize,
}

impl Args {
    /// Returns the job.
    fn job(&self, seed: u64) -> Recalibrate {
        Recalibrate {
            source: self.model.job_path().clone(),
            calibration: self.calibration.value(),
            text: self.text.value(),
            observer: self.observer.clone(),
            kv: self.kv.as_ref().map(ToString::to_string),
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
        let found = self.job(context.seed).run(context)?;
        let RecalibrateReport { input_scales, cache_scales, cache_levels, windows, tokens } = found;
        let report = Report { output: &self.out, input_scales, cache_scales, cache_levels, windows, tokens };
        context.report(&report, |out| {
            writeln!(
                out,
                "{}: {input_scales} activation scales and {cache_scales} KV cache scales{} from {tokens} tokens; weights unchanged",
                self.out.display(),
                if cache_levels { ", and KV cache levels," } else { "" }
            )
        })
    }
}

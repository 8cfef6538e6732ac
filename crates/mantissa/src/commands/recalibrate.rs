//! `mantissa recalibrate`: recomputes stored scales of a quantized model on another text.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use anyhow::Result;
use mantissa_jobs::adapt;
use mantissa_model::{KvPolicy, ModelConfig};
use mantissa_quant::calibrate::{Calibration, CalibrationSet, Limits};
use mantissa_quant::input_scales::{OBSERVERS, Observer, Share};
use mantissa_quant::memory::level_bytes;
use mantissa_quant::{QuantError, Recalibration, model_config};
use mantissa_store::convention::ModelFiles;
use mantissa_store::{Kind, Paths};
use serde::Serialize;

use super::calibration::CalibrationArgs;
use super::execute::Execute;
use super::model::{self, ModelPath};
use super::text::TextArgs;
use crate::context::Context;
use crate::error::BadInput;
use crate::help::Group;
use crate::interrupt;
use crate::progress::Unit;

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
    observer: Observer,
    /// Store KV cache levels for this policy
    ///
    /// nuq4, nuq3-1% and so on, as in run --kv; needs the native format.
    #[arg(long, value_name = "POLICY", help_heading = "Scales")]
    kv: Option<KvPolicy>,
    /// Output folder
    #[arg(long, value_name = "DIR", help_heading = "Output")]
    out: PathBuf,
}

/// Parses an observer: a name, or a percentile such as `percentile-99.9`.
///
/// # Errors
/// A message with the accepted values.
fn observer(text: &str) -> Result<Observer, String> {
    let named = OBSERVERS.iter().find(|(name, _)| *name == text).map(|(_, observer)| *observer);
    let given = || {
        let percent = text.strip_prefix("percentile-")?.parse().ok()?;
        Share::of_percent(percent).map(Observer::Percentile)
    };
    named.or_else(given).ok_or_else(|| {
        let names: Vec<_> = OBSERVERS.iter().map(|(name, _)| *name).collect();
        format!("expected {}, percentile-P with P from 50 to 100, got \"{text}\"", names.join(", "))
    })
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

impl Execute for Args {
    const GROUP: Group = Group::Quantize;

    fn paths(&self, paths: &mut Paths) -> Result<()> {
        self.model.paths(paths);
        self.calibration.paths(paths);
        self.text.paths(paths);
        paths.write("--out", &self.out, Kind::Folder);
        Ok(())
    }

    /// # Errors
    /// A model or text that cannot be used; I/O.
    fn run(&self, context: &Context) -> Result<()> {
        let source = model::open(&self.model, context)?;
        let config = model_config(&source)?;
        let set = calibration(self, &source, context)?;
        let others = level_bytes(&config, &set)
            .saturating_add(source.checkpoint().total_bytes())
            .saturating_add(model::BASE);
        let needs = |limits| Calibration::held_bytes(&config, &set, limits).saturating_add(others);
        let limits = adapt::fit_calibration("recalibrate", context, needs)?;
        let found = collect(self, &source, &config, &set, limits, context)?;
        found.write(&source, &set, &context.output(&self.out)?)?;
        let (windows, tokens) = (set.windows.len(), set.tokens());
        let cache_levels = found.has_levels();
        let (input_scales, cache_scales) = (found.inputs, found.cache);
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

/// Loads the windows: samples of --calibration, or all of --text or --tokens.
fn calibration(args: &Args, source: &ModelFiles, context: &Context) -> Result<CalibrationSet> {
    let samples = args.calibration.load(source, args.text.split(), context)?;
    let windows = args.text.sequences(&args.model, args.calibration.is_text(), context)?;
    match (samples, windows) {
        (Some(samples), None) => Ok(samples),
        (None, Some(windows)) => {
            let windows = windows.into_iter().map(|sequence| sequence.tokens).collect();
            Ok(CalibrationSet::new(args.text.name(), windows))
        }
        (given, _) => {
            let found = if given.is_some() { "--text or --tokens as well" } else { "neither" };
            let allowed =
                "--calibration or --calibration-tokens (--calibration default is the built-in text)";
            Err(BadInput::new("recalibrate", found, allowed).into())
        }
    }
}

/// Runs the model on the windows and collects the new scales.
fn collect(
    args: &Args,
    source: &ModelFiles,
    config: &ModelConfig,
    set: &CalibrationSet,
    limits: Limits,
    context: &Context,
) -> Result<Recalibration> {
    let progress = context.progress(0, Unit::Items("steps"));
    let mut done = 0;
    let tick = &mut || {
        done += 1;
        progress.set(done);
        if interrupt::received().is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let how = (args.observer, args.kv.as_ref());
    let found = interrupt::orderly(
        || Recalibration::collect(source, config, set, how, limits, tick),
        QuantError::is_interruption,
    );
    progress.finish();
    Ok(found?)
}

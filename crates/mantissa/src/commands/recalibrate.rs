//! `mantissa recalibrate`: new scales for the same weights.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use anyhow::Result;
use mantissa_model::KvPolicy;
use mantissa_quant::calibrate::{Calibration, CalibrationSet};
use mantissa_quant::input_scales::{OBSERVERS, Observer, Share};
use mantissa_quant::memory::level_bytes;
use mantissa_quant::{QuantError, Recalibration, model_config};
use mantissa_store::{Kind, Paths};
use serde::Serialize;

use super::model::{self, ModelPath};
use super::text::TextArgs;
use crate::app::Context;
use crate::error::BadInput;
use crate::interrupt;
use crate::progress::Unit;

/// Find the stored scales of a quantized model anew on another text: static scales of inputs, NVFP4's scale of all inputs, and
/// scales or levels of a KV cache. Weights keep their bytes.
///
/// The model runs with its weights as they are stored and nothing else quantized. quality.json is taken over without the figures
/// that were measured with the old scales.
#[derive(clap::Args)]
#[command(after_help = "EXAMPLES
  mantissa quantize demo --recipe rtn-int8-channel+kv-fp8-e4m3-tensor@static --calibration README.md --out demo-kv
  mantissa recalibrate demo-kv --text other.txt --out demo-kv-2
  mantissa recalibrate path/to/native --kv nuq4-1%,pre-rope --text calibration.txt --out path/to/with-levels")]
pub struct Args {
    /// A quantized model folder
    model: ModelPath,
    #[command(flatten)]
    text: TextArgs,
    /// What static scales of inputs are taken from
    #[arg(long, value_name = "OBSERVER", value_parser = observer, default_value = "max")]
    observer: Observer,
    /// Store levels of keys and values for this policy, of nuq4, nuq3-1% … as in run --kv, with a model in the native container
    #[arg(long, value_name = "POLICY")]
    kv: Option<KvPolicy>,
    /// The folder to write
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
}

/// An observer on the command line: a name, or a percentile such as `percentile-99.9`.
///
/// # Errors
/// A message that says what is allowed.
fn observer(text: &str) -> Result<Observer, String> {
    let named = OBSERVERS.iter().find(|(name, _)| *name == text).map(|(_, observer)| *observer);
    let given = || {
        let percent = text.strip_prefix("percentile-")?.parse().ok()?;
        Share::of_percent(percent).map(Observer::Percentile)
    };
    named.or_else(given).ok_or_else(|| {
        let names: Vec<_> = OBSERVERS.iter().map(|(name, _)| *name).collect();
        format!("found \"{text}\", allowed {}, percentile-P with P from 50 to 100", names.join(", "))
    })
}

#[derive(Serialize)]
struct Report<'a> {
    output: &'a Path,
    input_scales: usize,
    cache_scales: usize,
    /// Whether levels of keys and values were found.
    cache_levels: bool,
    windows: usize,
    tokens: usize,
}

/// Adds what the command reads and writes.
pub fn paths(args: &Args, paths: &mut Paths) {
    args.model.paths(paths);
    args.text.paths(paths);
    paths.write("--out", &args.out, Kind::Folder);
}

/// Runs the command.
///
/// # Errors
/// A model or text that cannot be used; I/O.
pub fn run(args: &Args, context: &Context) -> Result<()> {
    let source = model::open(&args.model, context)?;
    let config = model_config(&source)?;
    let sequences = args.text.sequences(&args.model, false, context)?;
    let sequences = sequences
        .ok_or_else(|| BadInput::new("recalibrate", "neither --text nor --tokens", "one of them"))?;
    let windows = sequences.into_iter().map(|sequence| sequence.tokens).collect();
    let set = CalibrationSet { name: args.text.name(), windows };
    let needs = Calibration::held_bytes(&config, &set, context.threads)
        .saturating_add(level_bytes(&config, &set))
        .saturating_add(source.checkpoint().total_bytes())
        .saturating_add(model::BASE);
    context.require_memory("recalibrate", needs)?;
    let progress = context.progress(0, Unit::Items("steps"));
    let mut done = 0;
    let tick = &mut || {
        done += 1;
        progress.set(done);
        if interrupt::received().is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let found = interrupt::orderly(
        || {
            let how = (args.observer, args.kv.as_ref());
            Recalibration::collect(&source, &config, &set, how, context.threads, tick)
        },
        QuantError::is_interruption,
    );
    progress.finish();
    let found = found?;
    found.write(&source, &set, &context.output(&args.out)?)?;
    let (windows, tokens) = (set.windows.len(), set.tokens());
    let cache_levels = found.has_levels();
    let (input_scales, cache_scales) = (found.inputs, found.cache);
    let report = Report { output: &args.out, input_scales, cache_scales, cache_levels, windows, tokens };
    context.report(&report, |out| {
        writeln!(
            out,
            "{}: {input_scales} scales of inputs and {cache_scales} of keys and values{} found on {tokens} tokens; weights as they were",
            args.out.display(),
            if cache_levels { ", and levels of these," } else { "" }
        )
    })
}

//! `mantissa eval`: what a model loses, in nats, with standard errors.

use std::io::{self, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use anyhow::Result;
use mantissa_eval::{Evaluation, Sequence};
use mantissa_model::{AttentionOperands, Decoder, KvPolicy};
use mantissa_num::Accumulator;
use mantissa_store::{
    Dtype, Kind, Output, Paths, SafetensorsWriter, StagedFile, TensorSpec, write_file_atomic,
};
use serde::Serialize;
use serde_json::{Value, json};

use super::calibration::CalibrationArgs;
use super::model::{self, ModelPath, Use};
use super::text::{TextArgs, bound};
use crate::app::Context;
use crate::error::{BadInput, GateFailed};
use crate::progress::Unit;

/// Measure perplexity on a text or on token windows, and, with --reference, KL divergence, top-1 agreement and the change
/// of loss against another model, each with its standard error.
///
/// NLL is the mean over predicted tokens of -ln p, in nats; KL is KL(reference || model) over the same positions. Standard
/// errors take windows (documents) as the independent unit; differences are paired position by position.
#[derive(clap::Args)]
#[command(after_help = "EXAMPLES
  mantissa eval demo --text README.md --context 256
  mantissa eval path/to/model --text story.txt
  mantissa eval demo --reference demo --text README.md --context 256 --kv int4-head-asym,window=64 --prefill 32
  mantissa eval path/to/model --text stories.txt --split '<|endoftext|>' --docs 1..64 --json
  mantissa eval path/to/quantized --reference path/to/model --tokens windows.json:eval --max-kl 0.05")]
pub struct Args {
    /// A Hugging Face folder, dense or quantized, a .gguf file, or demo, the embedded model
    model: ModelPath,
    #[command(flatten)]
    text: TextArgs,
    /// Compare with this model
    #[arg(long, value_name = "MODEL")]
    reference: Option<ModelPath>,
    /// Store keys and values of MODEL so: a scheme (int8-head, int4-g32-asym …), or keys=SCHEME,values=SCHEME,window=N,sinks=N,
    /// scales=f16,channel-keys,pre-rope,rotate; without --prefill every position of a window is quantized;
    /// nuq4-1% and the like find their levels on --calibration, unless MODEL brings them
    #[arg(long, value_name = "SCHEME")]
    kv: Option<KvPolicy>,
    #[command(flatten)]
    calibration: CalibrationArgs,
    /// Run MODEL as text is generated: N tokens of each window at once and the others one by one, which count
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    prefill: Option<u32>,
    /// Round the operands of MODEL's attention: int8 or fp8 for all of them, or q=SCHEME,k=SCHEME,v=SCHEME,p=ELEMENT for queries,
    /// keys, values and weights, and rotate, smooth
    #[arg(long, value_name = "OPERANDS")]
    attention_operands: Option<AttentionOperands>,
    /// Add the products of MODEL's FP8 weights and FP8 inputs as a matrix unit does: f32, hopper (14 bits), hopper-128 (and f32
    /// every 128 products)
    #[arg(long, value_name = "UNIT")]
    accumulator: Option<Accumulator>,
    /// Write the sums of each window to this JSON file
    #[arg(long, value_name = "FILE")]
    per_window: Option<PathBuf>,
    /// Write the logits of all windows (F32 [windows, tokens, vocabulary]) and their ids to this safetensors file
    #[arg(long, value_name = "FILE.safetensors")]
    logits: Option<PathBuf>,
    /// Fail (exit 1) when KL exceeds this many nats
    #[arg(long, value_name = "NATS", value_parser = bound, requires = "reference")]
    max_kl: Option<f64>,
    /// Fail (exit 1) when perplexity grows by more than this share of the reference's, such as 0.02
    #[arg(long, value_name = "SHARE", value_parser = bound, requires = "reference")]
    max_ppl_increase: Option<f64>,
}

#[derive(Serialize)]
struct Report<'a> {
    model: &'a Path,
    convention: &'static str,
    nll: f64,
    nll_se: f64,
    ppl: f64,
    tokens: u64,
    windows: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    reference: Option<&'a Path>,
    #[serde(flatten)]
    comparison: &'a Option<mantissa_eval::Comparison>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kv: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prefill: Option<u32>,
    kv_bytes_per_token: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    attention_operands: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    accumulator: Option<String>,
    seconds: f64,
}

/// Adds what the command reads and writes.
pub fn paths(args: &Args, paths: &mut Paths) {
    args.model.paths(paths);
    args.text.paths(paths);
    args.calibration.paths(paths);
    args.reference.iter().for_each(|model| model.paths(paths));
    args.per_window.iter().for_each(|path| paths.write("--per-window", path, Kind::File));
    args.logits.iter().for_each(|path| paths.write("--logits", path, Kind::File));
}

/// Runs the command.
///
/// # Errors
/// Input that cannot be read or evaluated; [`GateFailed`] past a gate.
pub fn run(args: &Args, context: &Context) -> Result<()> {
    let sequences = args.text.sequences(&args.model, false, context)?;
    let sequences =
        sequences.ok_or_else(|| BadInput::new("eval", "neither --text nor --tokens", "one of them"))?;
    let mut used = Use::evaluation(&sequences, context.threads);
    used.kv = args.kv.as_ref();
    used.calibration = Some(&args.calibration);
    used.cached = args.prefill.is_some();
    if args.logits.is_some() {
        // Logits that are written are held for a whole window, as numbers and as bytes.
        used.logits = used.longest.saturating_mul(2);
    }
    let (mut model, reference) = match &args.reference {
        None => {
            let [model] = model::load_all([&*args.model], used, context)?;
            (model, None)
        }
        Some(path) => {
            let [model, reference] = model::load_all([&*args.model, &**path], used, context)?;
            (model, Some(reference))
        }
    };
    simulate(args, &mut model.decoder)?;
    if let Some(path) = &args.logits {
        write_logits(&context.output(path)?, &model.decoder, &sequences)?;
    }
    let total = sequences.iter().map(|s| s.tokens.len() as u64).sum();
    let progress = context.progress(total, Unit::Items("tokens"));
    let start = std::time::Instant::now();
    let compared = reference.as_ref().map(|r| &r.decoder);
    let told = |done| {
        progress.set(done);
        ControlFlow::Continue(())
    };
    let (decoder, threads) = (&model.decoder, context.threads);
    let result = match args.prefill {
        None => mantissa_eval::evaluate_while(decoder, compared, &sequences, threads, &told),
        Some(prefill) => {
            let prefill = prefill as usize;
            mantissa_eval::evaluate_decoding(decoder, compared, &sequences, threads, prefill, &told)
        }
    }?;
    progress.finish();
    if let Some(path) = &args.per_window {
        write_file_atomic(&context.output(path)?, format!("{:#}\n", per_window(&result)).as_bytes())?;
    }
    let report = Report {
        model: args.model.named(),
        convention: model.files.convention_name(),
        nll: result.nll,
        nll_se: result.nll_se,
        ppl: result.ppl,
        tokens: result.tokens,
        windows: result.windows.len(),
        reference: args.reference.as_ref().map(ModelPath::named),
        comparison: &result.comparison,
        kv: args.kv.as_ref().map(KvPolicy::to_string).or_else(|| model.files.kv_policy().map(str::to_owned)),
        prefill: args.prefill,
        kv_bytes_per_token: model.decoder.kv_bytes_per_token(),
        attention_operands: args.attention_operands.as_ref().map(AttentionOperands::to_string),
        accumulator: args.accumulator.map(|accumulator| accumulator.to_string()),
        seconds: start.elapsed().as_secs_f64(),
    };
    context.report(&report, |out| human(out, &report))?;
    gates(args, &result)
}

/// Sets what of the arithmetic is to be simulated.
fn simulate(args: &Args, decoder: &mut Decoder) -> Result<()> {
    if let Some(operands) = &args.attention_operands {
        decoder.set_attention_operands(operands)?;
    }
    match args.accumulator {
        Some(accumulator) if decoder.set_accumulator(accumulator) == 0 => {
            let allowed = "FP8 weights with FP8 inputs, such as those of quantize --recipe fp8";
            Err(BadInput::new("--accumulator", "a model without products of FP8 by FP8", allowed).into())
        }
        _ => Ok(()),
    }
}

fn human(out: &mut dyn Write, r: &Report<'_>) -> io::Result<()> {
    writeln!(
        out,
        "perplexity  {:.4}  (NLL {:.6} ± {:.6} nats, {} tokens, {} windows)",
        r.ppl, r.nll, r.nll_se, r.tokens, r.windows
    )?;
    if let Some(kv) = &r.kv {
        writeln!(out, "KV cache    {kv}: {} bytes per token", r.kv_bytes_per_token)?;
    }
    if let Some(operands) = &r.attention_operands {
        writeln!(out, "attention   {operands}")?;
    }
    if let Some(accumulator) = &r.accumulator {
        writeln!(out, "accumulator {accumulator}")?;
    }
    if let Some(c) = r.comparison {
        writeln!(
            out,
            "KL          {:.6} ± {:.6} nats  (median {:.6}, p99 {:.4}, max {:.3})",
            c.kl, c.kl_se, c.kl_median, c.kl_p99, c.kl_max
        )?;
        writeln!(out, "top-1       {:.2} ± {:.2} %", 100.0 * c.top1, 100.0 * c.top1_se)?;
        writeln!(
            out,
            "ΔNLL        {:+.6} ± {:.6} nats  (reference {:.6})",
            c.delta_nll, c.delta_nll_se, c.reference_nll
        )?;
    }
    writeln!(out, "{:.0} tokens/s", r.tokens as f64 / r.seconds)
}

fn per_window(result: &Evaluation) -> Value {
    let windows: Vec<_> = result
        .windows
        .iter()
        .map(|w| {
            let mut window = json!({ "tokens": w.nll.count, "nll_sum": w.nll.sum });
            if result.comparison.is_some() {
                window["reference_nll_sum"] = json!(w.reference_nll.sum);
                window["kl_sum"] = json!(w.kl.sum);
                window["top1_count"] = json!(w.top1.sum);
            }
            window
        })
        .collect();
    json!({ "windows": windows })
}

fn write_logits(output: &Output, decoder: &Decoder, sequences: &[Sequence]) -> Result<()> {
    let length = sequences.first().map_or(0, |s| s.tokens.len());
    if let Some(i) = sequences.iter().position(|s| s.tokens.len() != length) {
        let found = format!("window {i} of {} tokens", sequences[i].tokens.len());
        return Err(BadInput::new("--logits", found, format!("windows of one length ({length})")).into());
    }
    let vocabulary = decoder.config().vocab_size;
    let staged = StagedFile::begin(output)?;
    let specs = vec![
        TensorSpec::new("logits", Dtype::F32, vec![sequences.len(), length, vocabulary]),
        TensorSpec::new("input_ids", Dtype::I64, vec![sequences.len(), length]),
    ];
    let mut writer = SafetensorsWriter::create(staged.path(), specs, Default::default())?;
    for (i, sequence) in sequences.iter().enumerate() {
        let logits: Vec<u8> =
            mantissa_eval::logits(decoder, i, sequence)?.iter().flat_map(|v| v.to_le_bytes()).collect();
        writer.write_range("logits", (i * logits.len()) as u64, &logits)?;
        let ids: Vec<u8> = sequence.tokens.iter().flat_map(|&t| i64::from(t).to_le_bytes()).collect();
        writer.write_range("input_ids", (i * ids.len()) as u64, &ids)?;
    }
    writer.finish()?;
    Ok(staged.commit()?)
}

/// Whether a figure is more than what is allowed, or none.
fn exceeds(found: f64, allowed: f64) -> bool {
    found.is_nan() || found > allowed
}

fn gates(args: &Args, result: &Evaluation) -> Result<()> {
    let Some(c) = &result.comparison else { return Ok(()) };
    if let Some(max) = args.max_kl.filter(|max| exceeds(c.kl, *max)) {
        return Err(GateFailed::new(format!("KL: found {:.6} nats, allowed {max}", c.kl)).into());
    }
    let increase = c.delta_nll.exp() - 1.0;
    if let Some(max) = args.max_ppl_increase.filter(|max| exceeds(increase, *max)) {
        return Err(GateFailed::new(format!(
            "perplexity: found an increase of {increase:.6}, allowed {max}"
        ))
        .into());
    }
    Ok(())
}

//! `mantissa eval`: perplexity and quality loss with standard errors.

mod tasks;

use std::io::{self, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use anyhow::Result;
use mantissa_eval::{Comparison, Evaluated, Evaluation, Sequence};
use mantissa_model::{AttentionOperands, Decoder, KvPolicy};
use mantissa_num::Accumulator;
use mantissa_runtime::FastModel;
use mantissa_store::convention::ModelFiles;
use mantissa_store::{
    Dtype, Kind, Output, Paths, SafetensorsWriter, StagedFile, TensorSpec, write_file_atomic,
};
use serde::Serialize;
use serde_json::{Value, json};

use super::adapt;
use super::adapter::{self, AdapterArgs};
use super::calibration::CalibrationArgs;
use super::model::{self, ModelPath};
use super::run::Engine;
use super::running::{self, Model, Use};
use super::text::{TextArgs, bound};
use crate::context::Context;
use crate::error::{BadInput, GateFailed};
use crate::output::labelled;
use crate::progress::Unit;

/// Measure perplexity, KL, top-1 agreement, or accuracy on tasks
///
/// KL and top-1 agreement need --reference. NLL is the mean of -ln p over predicted tokens, in nats; KL is KL(reference || model) over the same
/// positions. Standard errors take windows (documents) as the independent unit; differences are paired per
/// position.
#[derive(clap::Args)]
#[command(after_help = "EXAMPLES
  mantissa eval demo --text story.txt --context 256
  mantissa eval demo-int4 --reference demo --text story.txt --context 256
  mantissa eval demo --reference demo --text story.txt --context 256 \\
      --kv int4-head-asym,window=64 --prefill 32
  mantissa eval path/to/model --text stories.txt --split '<|endoftext|>' \\
      --docs 1..64 --json
  mantissa eval path/to/quantized --reference path/to/model \\
      --tokens windows.json:eval --max-kl 0.05
  mantissa eval demo-int4 --reference demo --task cloze --task retrieval")]
pub struct Args {
    /// Hugging Face folder, .gguf file, or demo
    ///
    /// demo is the model inside the binary.
    model: ModelPath,
    #[command(flatten)]
    text: TextArgs,
    #[command(flatten)]
    tasks: tasks::TaskArgs,
    /// Model to compare with
    #[arg(long, value_name = "MODEL", help_heading = "Evaluation")]
    reference: Option<ModelPath>,
    /// Quantize the KV cache of MODEL
    ///
    /// A scheme (int8-head, int4-g32-asym …), or
    /// keys=SCHEME,values=SCHEME,window=N,sinks=N,scales=f16,channel-keys,pre-rope,rotate. Without --prefill,
    /// every position of a window is quantized. nuq4-1% and similar learn their levels on --calibration,
    /// unless MODEL has them.
    #[arg(long, value_name = "SCHEME", help_heading = "Simulation")]
    kv: Option<KvPolicy>,
    #[command(flatten)]
    calibration: CalibrationArgs,
    /// Decode like generation, with N tokens as the prompt
    ///
    /// The rest of each window is decoded one by one, and only those tokens count.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), help_heading = "Simulation", hide_short_help = true)]
    prefill: Option<u32>,
    /// Simulate attention operand dtypes of MODEL
    ///
    /// int8 or fp8 for all operands, or q=SCHEME,k=SCHEME,v=SCHEME,p=ELEMENT for queries, keys, values and
    /// attention weights, plus rotate, smooth.
    #[arg(long, value_name = "OPERANDS", help_heading = "Simulation", hide_short_help = true)]
    attention_operands: Option<AttentionOperands>,
    /// Simulate an FP8 accumulator for MODEL's FP8 matmuls
    ///
    /// f32, hopper (14 bits) or hopper-128 (14 bits, added to f32 every 128 products).
    #[arg(long, value_name = "UNIT", help_heading = "Simulation", hide_short_help = true)]
    accumulator: Option<Accumulator>,
    /// Kernels that run MODEL
    ///
    /// fast measures the engine of run, through its KV cache. The reference model always runs on reference.
    #[arg(long, value_enum, value_name = "ENGINE", default_value_t = Engine::Reference, help_heading = "Evaluation")]
    engine: Engine,
    #[command(flatten, next_help_heading = "Evaluation")]
    adapter: AdapterArgs,
    /// Write the sums of each window to this JSON file
    #[arg(long, value_name = "FILE", help_heading = "Output", hide_short_help = true)]
    per_window: Option<PathBuf>,
    /// Write all logits to this safetensors file
    ///
    /// F32 [windows, tokens, vocabulary], and the token ids.
    #[arg(long, value_name = "FILE", help_heading = "Output", hide_short_help = true)]
    logits: Option<PathBuf>,
    /// Fail if the KL is higher (nats/token)
    ///
    /// Exit code 1.
    #[arg(long, value_name = "NATS", value_parser = bound, requires = "reference", help_heading = "Evaluation")]
    max_kl: Option<f64>,
    /// Fail if perplexity grows by more, such as 0.02
    ///
    /// A share of the reference's perplexity. Exit code 1.
    #[arg(long, value_name = "SHARE", value_parser = bound, requires = "reference", help_heading = "Evaluation")]
    max_ppl_increase: Option<f64>,
}

#[derive(Serialize)]
struct Report<'a> {
    model: &'a Path,
    #[serde(skip_serializing_if = "Option::is_none")]
    adapter: Option<&'a Path>,
    convention: &'static str,
    engine: Engine,
    nll: f64,
    nll_se: f64,
    ppl: f64,
    tokens: u64,
    windows: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    reference: Option<&'a Path>,
    /// Format of the reference, if it is quantized itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    reference_format: Option<&'static str>,
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

/// Adds the paths that the command reads and writes.
pub fn paths(args: &Args, paths: &mut Paths) {
    args.model.paths(paths);
    args.text.paths(paths);
    args.tasks.paths(paths);
    args.calibration.paths(paths);
    args.adapter.paths(paths);
    args.reference.iter().for_each(|model| model.paths(paths));
    args.per_window.iter().for_each(|path| paths.write("--per-window", path, Kind::File));
    args.logits.iter().for_each(|path| paths.write("--logits", path, Kind::File));
}

/// Runs the command.
///
/// # Errors
/// Input that cannot be read or evaluated; [`GateFailed`] if a bound is exceeded.
pub fn run(args: &Args, context: &Context) -> Result<()> {
    if args.tasks.given() {
        return tasks::run(args, context);
    }
    let sequences = args.text.sequences(&args.model, false, context)?;
    let none = || {
        BadInput::new("eval", "none of them", "--text, --tokens or --task")
            .with_fix("--text default, the built-in text")
    };
    let sequences = sequences.ok_or_else(none)?;
    let mut used = Use::evaluation(&sequences, context.threads);
    used.cached = args.prefill.is_some();
    if args.logits.is_some() {
        // Logits to write are held for a whole window, as numbers and as bytes.
        used.logits = used.longest.saturating_mul(2);
    }
    let adapter = args.adapter.open()?;
    used.adapter = adapter.as_ref();
    let (model, reference, threads) = load(args, used, context)?;
    if let (Some(path), Loaded::Reference(model)) = (&args.logits, &model) {
        write_logits(&context.output(path)?, &model.decoder, &sequences)?;
    }
    let start = std::time::Instant::now();
    let result = evaluate(args, (model.evaluated(), reference.as_ref()), &sequences, threads, context)?;
    if let Some(path) = &args.per_window {
        write_file_atomic(&context.output(path)?, format!("{:#}\n", per_window(&result)).as_bytes())?;
    }
    let report = Report {
        model: args.model.named(),
        adapter: args.adapter.named(),
        convention: model.files().convention_name(),
        engine: args.engine,
        nll: result.nll,
        nll_se: result.nll_se,
        ppl: result.ppl,
        tokens: result.tokens,
        windows: result.windows.len(),
        reference: args.reference.as_ref().map(ModelPath::named),
        reference_format: quantized_reference(reference.as_ref(), context),
        comparison: &result.comparison,
        kv: kv_name(args, &model),
        prefill: args.prefill,
        kv_bytes_per_token: model.kv_bytes_per_token(),
        attention_operands: args.attention_operands.as_ref().map(AttentionOperands::to_string),
        accumulator: args.accumulator.map(|accumulator| accumulator.to_string()),
        seconds: start.elapsed().as_secs_f64(),
    };
    context.report(&report, |out| human(out, &report))?;
    gates(args, &result)
}

/// Returns the KV cache policy given, or that of the model.
fn kv_name(args: &Args, model: &Loaded) -> Option<String> {
    let given = args.kv.as_ref().map(KvPolicy::to_string);
    given.or_else(|| model.files().kv_policy().map(str::to_owned))
}

/// Notes that the reference is quantized itself, and returns its format.
fn quantized_reference(reference: Option<&Model>, context: &Context) -> Option<&'static str> {
    let format = reference.map(|model| &model.files).filter(|files| files.is_quantized())?.convention_name();
    context.note(&format!(
        "the reference is itself quantized ({format}): the comparison leaves out what its quantization lost"
    ));
    Some(format)
}

/// Model to evaluate.
enum Loaded {
    Reference(Box<Model>),
    Fast(Box<(FastModel, ModelFiles)>),
}

impl Loaded {
    fn files(&self) -> &ModelFiles {
        match self {
            Loaded::Reference(model) => &model.files,
            Loaded::Fast(fast) => &fast.1,
        }
    }

    fn evaluated(&self) -> Evaluated<'_> {
        match self {
            Loaded::Reference(model) => Evaluated::Reference(&model.decoder),
            Loaded::Fast(fast) => Evaluated::Fast(&fast.0),
        }
    }

    fn kv_bytes_per_token(&self) -> f64 {
        match self {
            Loaded::Reference(model) => model.decoder.kv_bytes_per_token(),
            Loaded::Fast(fast) => fast.0.kv_bytes_per_token(),
        }
    }
}

/// Loads the model and, if given, the reference, for the work that `used` describes. Returns the number of threads that
/// memory allows.
fn load<'a>(args: &'a Args, mut used: Use<'a>, context: &Context) -> Result<(Loaded, Option<Model>, usize)> {
    used.kv = args.kv.as_ref();
    used.calibration = Some(&args.calibration);
    let both: Vec<&Path> = [Some(&*args.model), args.reference.as_deref()].into_iter().flatten().collect();
    let needs = |threads| running::bytes_of(&both, Use { threads, ..used });
    used.threads = adapt::fit_threads(used.threads, context, needs)?;
    if args.engine == Engine::Fast {
        return load_fast(args, &both, used, context);
    }
    let loaded = |mut model: Model| {
        simulate(args, &mut model.decoder)?;
        Ok::<_, anyhow::Error>(Loaded::Reference(Box::new(model)))
    };
    let Some(path) = &args.reference else {
        let [model] = running::load_all([&*args.model], used, context)?;
        return Ok((loaded(model)?, None, used.threads));
    };
    let [model, reference] = running::load_all([&*args.model, &**path], used, context)?;
    Ok((loaded(model)?, Some(reference), used.threads))
}

/// Loads the model for the fast engine; windows run side by side, each on one thread.
fn load_fast(
    args: &Args,
    both: &[&Path],
    used: Use<'_>,
    context: &Context,
) -> Result<(Loaded, Option<Model>, usize)> {
    let simulated = [
        (args.attention_operands.is_some(), "--attention-operands"),
        (args.accumulator.is_some(), "--accumulator"),
        (args.logits.is_some(), "--logits"),
    ];
    if let Some((_, option)) = simulated.iter().find(|(given, _)| *given) {
        return Err(BadInput::new(*option, "--engine fast", "--engine reference with it").into());
    }
    running::require_memory(both, used, context)?;
    let files = model::open(&args.model, context)?;
    let mut fast = adapter::fast(&files, used.adapter, 1)?;
    if let Some(policy) = &args.kv {
        fast.set_kv(policy)?;
    }
    let reference = match &args.reference {
        None => None,
        Some(path) => {
            let files = model::open(path, context)?;
            Some(Model { decoder: Decoder::load(&files)?, files })
        }
    };
    Ok((Loaded::Fast(Box::new((fast, files))), reference, used.threads))
}

/// Runs the evaluation with a progress display.
fn evaluate(
    args: &Args,
    (model, reference): (Evaluated<'_>, Option<&Model>),
    sequences: &[Sequence],
    threads: usize,
    context: &Context,
) -> Result<Evaluation> {
    let total = sequences.iter().map(|s| s.tokens.len() as u64).sum();
    let progress = context.progress(total, Unit::Items("tokens"));
    let told = |done| {
        progress.set(done);
        ControlFlow::Continue(())
    };
    let (compared, prefill) = (reference.map(|r| &r.decoder), args.prefill.map(|prefill| prefill as usize));
    let result = mantissa_eval::evaluate_while(model, compared, sequences, threads, prefill, &told)?;
    progress.finish();
    Ok(result)
}

/// Sets the simulated arithmetic.
fn simulate(args: &Args, decoder: &mut Decoder) -> Result<()> {
    if let Some(operands) = &args.attention_operands {
        decoder.set_attention_operands(operands)?;
    }
    match args.accumulator {
        Some(accumulator) if decoder.set_accumulator(accumulator) == 0 => {
            let allowed =
                "a model with FP8 weights and activations, such as those of quantize --recipe fp8-dynamic";
            Err(BadInput::new("--accumulator", "a model without FP8 matmuls", allowed).into())
        }
        _ => Ok(()),
    }
}

fn human(out: &mut dyn Write, r: &Report<'_>) -> io::Result<()> {
    let nll = format!("NLL {:.6} ± {:.6} nats, {} tokens, {} windows", r.nll, r.nll_se, r.tokens, r.windows);
    labelled(out, "perplexity", &format!("{:.4}  ({nll})", r.ppl))?;
    if let Some(adapter) = r.adapter {
        labelled(out, "adapter", &adapter.display().to_string())?;
    }
    if let Some(kv) = &r.kv {
        labelled(out, "KV cache", &format!("{kv}: {} bytes per token", r.kv_bytes_per_token))?;
    }
    if let Some(operands) = &r.attention_operands {
        labelled(out, "attention", operands)?;
    }
    if let Some(accumulator) = &r.accumulator {
        labelled(out, "accumulator", accumulator)?;
    }
    r.comparison.iter().try_for_each(|c| human_comparison(out, c))?;
    writeln!(out, "{:.0} tok/s", r.tokens as f64 / r.seconds)
}

fn human_comparison(out: &mut dyn Write, c: &Comparison) -> io::Result<()> {
    let spread = format!("median {:.6}, p99 {:.4}, max {:.3}", c.kl_median, c.kl_p99, c.kl_max);
    labelled(out, "KL", &format!("{:.6} ± {:.6} nats/token  ({spread})", c.kl, c.kl_se))?;
    labelled(out, "top-1", &format!("{:.2} ± {:.2} %", 100.0 * c.top1, 100.0 * c.top1_se))?;
    let loss = format!("{:+.6} ± {:.6} nats/token", c.delta_nll, c.delta_nll_se);
    labelled(out, "Δ loss", &format!("{loss}  (reference {:.6})", c.reference_nll))
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

/// True if `found` exceeds the bound or is not a number.
fn exceeds(found: f64, allowed: f64) -> bool {
    found.is_nan() || found > allowed
}

fn gates(args: &Args, result: &Evaluation) -> Result<()> {
    let Some(c) = &result.comparison else { return Ok(()) };
    if let Some(max) = args.max_kl.filter(|max| exceeds(c.kl, *max)) {
        return Err(GateFailed::new(format!("KL: expected at most {max} nats/token, got {:.6}", c.kl)).into());
    }
    let increase = c.delta_nll.exp() - 1.0;
    if let Some(max) = args.max_ppl_increase.filter(|max| exceeds(increase, *max)) {
        return Err(GateFailed::new(format!(
            "perplexity: expected an increase of at most {max}, got {increase:.6}"
        ))
        .into());
    }
    Ok(())
}

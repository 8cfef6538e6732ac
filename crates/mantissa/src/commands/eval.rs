//! `mantissa eval`: what a model loses, in nats, with standard errors.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::Result;
use mantissa_eval::{Evaluation, Sequence, TextOptions, parse_docs, sequences_from_text, token_file};
use mantissa_model::{Bos, Decoder, Tokenizer};
use mantissa_store::{Dtype, SafetensorsWriter, StagedFile, TensorSpec, write_file_atomic};
use serde::Serialize;
use serde_json::{Value, json};

use super::model::{self, ModelPath, Use};
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
  mantissa eval path/to/model --text story.txt
  mantissa eval path/to/model --text stories.txt --split '<|endoftext|>' --docs 1..64 --json
  mantissa eval path/to/quantized --reference path/to/model --tokens windows.json:eval --max-kl 0.05")]
pub struct Args {
    /// A Hugging Face folder, dense or quantized, or a .gguf file
    model: ModelPath,
    /// UTF-8 text to evaluate on
    #[arg(long, value_name = "TEXT", conflicts_with = "tokens")]
    text: Option<PathBuf>,
    /// Token windows instead of text: a list of lists of ids, or, with KEY, an object of such lists; used as they are
    #[arg(long, value_name = "FILE.json[:KEY]")]
    tokens: Option<String>,
    /// Compare with this model
    #[arg(long, value_name = "MODEL")]
    reference: Option<ModelPath>,
    /// Longest window in tokens, BOS included [default: the model's context]
    #[arg(long, value_name = "N")]
    context: Option<usize>,
    /// Distance of overlapping windows [default: end to end]
    #[arg(long, value_name = "N")]
    stride: Option<usize>,
    /// Whether a BOS stands before each window; auto does what the tokenizer does
    #[arg(long, value_enum, default_value_t = BosArg::Auto)]
    bos: BosArg,
    /// Cut the text into documents at this separator; each is stripped and one window
    #[arg(long, value_name = "SEP")]
    split: Option<String>,
    /// Documents to take, counted from 1, both ends included
    #[arg(long, value_name = "A..B", requires = "split")]
    docs: Option<String>,
    /// Stop after this many predicted tokens
    #[arg(long, value_name = "TOKENS")]
    limit: Option<usize>,
    /// Write the sums of each window to this JSON file
    #[arg(long, value_name = "FILE")]
    per_window: Option<PathBuf>,
    /// Write the logits of all windows (F32 [windows, tokens, vocabulary]) and their ids to this safetensors file
    #[arg(long, value_name = "FILE.safetensors")]
    logits: Option<PathBuf>,
    /// Fail (exit 1) when KL exceeds this many nats
    #[arg(long, value_name = "NATS", requires = "reference")]
    max_kl: Option<f64>,
    /// Fail (exit 1) when perplexity grows by more than this share of the reference's, such as 0.02
    #[arg(long, value_name = "SHARE", requires = "reference")]
    max_ppl_increase: Option<f64>,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum BosArg {
    Auto,
    Always,
    Never,
}

impl From<BosArg> for Bos {
    fn from(bos: BosArg) -> Self {
        match bos {
            BosArg::Auto => Bos::Auto,
            BosArg::Always => Bos::Always,
            BosArg::Never => Bos::Never,
        }
    }
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
    seconds: f64,
}

/// Runs the command.
///
/// # Errors
/// Input that cannot be read or evaluated; [`GateFailed`] past a gate.
pub fn run(args: &Args, context: &Context) -> Result<()> {
    let sequences = limited(sequences(args, context)?, args.limit);
    let longest = sequences.iter().map(|s| s.tokens.len()).max().unwrap_or(0);
    // Logits that are written are held for a whole window, as numbers and as bytes.
    let logits = if args.logits.is_some() { longest.saturating_mul(2) } else { mantissa_eval::ROWS };
    let threads = context.threads.min(sequences.len());
    let used = Use { pass: longest, longest, threads, cached: false, logits };
    let (model, reference) = match &args.reference {
        None => {
            let [model] = model::load_all([&args.model], used, context)?;
            (model, None)
        }
        Some(path) => {
            let [model, reference] = model::load_all([&args.model, path], used, context)?;
            (model, Some(reference))
        }
    };
    if let Some(path) = &args.logits {
        write_logits(path, &model.decoder, &sequences)?;
    }
    let total = sequences.iter().map(|s| s.tokens.len() as u64).sum();
    let progress = context.progress(total, Unit::Items("tokens"));
    let start = std::time::Instant::now();
    let compared = reference.as_ref().map(|r| &r.decoder);
    let result = mantissa_eval::evaluate(&model.decoder, compared, &sequences, context.threads, &|done| {
        progress.set(done);
    })?;
    progress.finish();
    if let Some(path) = &args.per_window {
        write_file_atomic(path, format!("{:#}\n", per_window(&result)).as_bytes())?;
    }
    let report = Report {
        model: &args.model,
        convention: model.files.convention_name(),
        nll: result.nll,
        nll_se: result.nll_se,
        ppl: result.ppl,
        tokens: result.tokens,
        windows: result.windows.len(),
        reference: args.reference.as_deref(),
        comparison: &result.comparison,
        seconds: start.elapsed().as_secs_f64(),
    };
    context.report(&report, |out| human(out, &report))?;
    gates(args, &result)
}

fn sequences(args: &Args, context: &Context) -> Result<Vec<Sequence>> {
    if let Some(tokens) = &args.tokens {
        return Ok(token_file(tokens)?);
    }
    let Some(path) = &args.text else {
        return Err(BadInput::new("eval", "neither --text nor --tokens", "one of them").into());
    };
    let text = read_text(path)?;
    let files = model::open(&args.model, context)?;
    let limit = model::context_length(&files)?;
    if let Some(context) = args.context.filter(|&context| context > limit) {
        let allowed = format!("2 to {limit} (max_position_embeddings)");
        return Err(BadInput::new("--context", context.to_string(), allowed).into());
    }
    let options = TextOptions {
        split: args.split.clone(),
        docs: args.docs.as_deref().map(parse_docs).transpose()?,
        context: args.context.unwrap_or(limit),
        stride: args.stride,
        bos: args.bos.into(),
    };
    let tokenizer = Tokenizer::load(files.dir())?;
    Ok(sequences_from_text(&path.display().to_string(), &text, &tokenizer, &options)?)
}

/// Reads a text file.
fn read_text(path: &Path) -> Result<String> {
    let name = path.display().to_string();
    let bytes = std::fs::read(path).map_err(|error| mantissa_store::Error::Io {
        path: path.into(),
        operation: "read text",
        error,
    });
    let bytes = match bytes {
        Err(mantissa_store::Error::Io { error, .. }) if error.kind() == io::ErrorKind::NotFound => {
            return Err(BadInput::new(name, "no such file", "a UTF-8 text").into());
        }
        other => other?,
    };
    String::from_utf8(bytes).map_err(|e| {
        BadInput::new(name, format!("no UTF-8 at byte {}", e.utf8_error().valid_up_to()), "a UTF-8 text")
            .into()
    })
}

/// The first sequences that together predict `limit` tokens; the last is cut.
fn limited(mut sequences: Vec<Sequence>, limit: Option<usize>) -> Vec<Sequence> {
    let Some(mut left) = limit else { return sequences };
    sequences.retain_mut(|s| {
        let predicted = s.tokens.len().saturating_sub(s.from).min(left);
        left -= predicted;
        s.tokens.truncate(s.from + predicted);
        predicted > 0
    });
    sequences
}

fn human(out: &mut dyn Write, r: &Report<'_>) -> io::Result<()> {
    writeln!(
        out,
        "perplexity  {:.4}  (NLL {:.6} ± {:.6} nats, {} tokens, {} windows)",
        r.ppl, r.nll, r.nll_se, r.tokens, r.windows
    )?;
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

fn write_logits(path: &Path, decoder: &Decoder, sequences: &[Sequence]) -> Result<()> {
    let length = sequences.first().map_or(0, |s| s.tokens.len());
    if let Some(i) = sequences.iter().position(|s| s.tokens.len() != length) {
        let found = format!("window {i} of {} tokens", sequences[i].tokens.len());
        return Err(BadInput::new("--logits", found, format!("windows of one length ({length})")).into());
    }
    let vocabulary = decoder.config().vocab_size;
    let staged = StagedFile::begin(path)?;
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

fn gates(args: &Args, result: &Evaluation) -> Result<()> {
    let Some(c) = &result.comparison else { return Ok(()) };
    if let Some(max) = args.max_kl.filter(|max| c.kl > *max) {
        return Err(GateFailed::new(format!("KL: found {:.6} nats, allowed {max}", c.kl)).into());
    }
    let increase = c.delta_nll.exp() - 1.0;
    if let Some(max) = args.max_ppl_increase.filter(|max| increase > *max) {
        return Err(GateFailed::new(format!(
            "perplexity: found an increase of {increase:.6}, allowed {max}"
        ))
        .into());
    }
    Ok(())
}

//! `mantissa eval`: perplexity and quality loss with standard errors.

mod args;
mod load;
mod tasks;

use std::io::{self, Write};
use std::ops::ControlFlow;
use std::path::Path;

use anyhow::Result;
use mantissa_eval::{Comparison, Evaluated, Evaluation, Sequence};
use mantissa_model::{AttentionOperands, Decoder};
use mantissa_store::{
    Dtype, Kind, Output, Paths, SafetensorsWriter, StagedFile, TensorSpec, write_file_atomic,
};
use serde::Serialize;
use serde_json::{Value, json};

pub use self::args::Args;

use self::load::{Loaded, exceeds, kv_name, load, quantized_reference};
use super::execute::Execute;
use super::loaded_models::{Model, Use};
use super::run::Engine;
use crate::context::Context;
use crate::error::{BadInput, GateFailed};
use crate::help::Group;
use crate::output::labelled;
use crate::progress::Unit;

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

impl Execute for Args {
    const GROUP: Group = Group::Measure;

    fn paths(&self, paths: &mut Paths) -> Result<()> {
        self.model.paths(paths);
        self.text.paths(paths);
        self.tasks.paths(paths);
        self.calibration.paths(paths);
        self.adapter.paths(paths);
        self.reference.iter().for_each(|model| model.paths(paths));
        self.per_window.iter().for_each(|path| paths.write("--per-window", path, Kind::File));
        self.logits.iter().for_each(|path| paths.write("--logits", path, Kind::File));
        Ok(())
    }

    /// # Errors
    /// Input that cannot be read or evaluated; [`GateFailed`] if a bound is exceeded.
    fn run(&self, context: &Context) -> Result<()> {
        if self.tasks.given() {
            return tasks::run(self, context);
        }
        let sequences = self.text.sequences(&self.model, false, context)?;
        let none = || {
            BadInput::new("eval", "none of them", "--text, --tokens or --task")
                .with_fix("--text default, the built-in text")
        };
        let sequences = sequences.ok_or_else(none)?;
        let mut used = Use::evaluation(&sequences, context.threads);
        used.cached = self.prefill.is_some();
        if self.logits.is_some() {
            // Logits to write are held for a whole window, as numbers and as bytes.
            used.logits = used.longest.saturating_mul(2);
        }
        let adapter = self.adapter.open()?;
        used.adapter = adapter.as_ref();
        let (model, reference, threads) = load(self, used, context)?;
        if let (Some(path), Loaded::Reference(model)) = (&self.logits, &model) {
            write_logits(&context.output(path)?, &model.decoder, &sequences)?;
        }
        let start = std::time::Instant::now();
        let result = evaluate(self, (model.evaluated(), reference.as_ref()), &sequences, threads, context)?;
        if let Some(path) = &self.per_window {
            write_file_atomic(&context.output(path)?, format!("{:#}\n", per_window(&result)).as_bytes())?;
        }
        let report = Report {
            model: self.model.named(),
            adapter: self.adapter.named(),
            convention: model.files().convention_name(),
            engine: self.engine,
            nll: result.nll,
            nll_se: result.nll_se,
            ppl: result.ppl,
            tokens: result.tokens,
            windows: result.windows.len(),
            reference: self.reference.as_ref().map(|model| model.named()),
            reference_format: quantized_reference(reference.as_ref(), context),
            comparison: &result.comparison,
            kv: kv_name(self, &model),
            prefill: self.prefill,
            kv_bytes_per_token: model.kv_bytes_per_token(),
            attention_operands: self.attention_operands.as_ref().map(AttentionOperands::to_string),
            accumulator: self.accumulator.map(|accumulator| accumulator.to_string()),
            seconds: start.elapsed().as_secs_f64(),
        };
        context.report(&report, |out| human(out, &report))?;
        gates(self, &result)
    }
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

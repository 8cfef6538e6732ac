//! Evaluation on a text: perplexity, and KL, top-1 agreement and loss against a reference.

use std::ops::{ControlFlow, Range};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use mantissa_eval::stats::note;
use mantissa_eval::{Comparison, Evaluation, Sequence, WindowResult};
use mantissa_model::Decoder;
use mantissa_ranks::{Team, ranges};
use mantissa_store::{Dtype, Output, SafetensorsWriter, StagedFile, TensorSpec, write_file_atomic};
use serde::Serialize;
use serde_json::{Value, json};

use super::groups;
use super::models::{Models, exceeds};
use super::value::Evaluate;
use crate::error::{BadInput, GateFailed, Result};
use crate::host::Host;
use crate::model::ModelPath;
use crate::names::Engine;
use crate::progress::Unit;
use crate::sessions::f16_bytes_per_token;

/// Result of an evaluation on a text.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TextEvaluation {
    /// Model as named.
    pub model: PathBuf,
    /// Folder of the adapter.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub adapter: Option<PathBuf>,
    /// Checkpoint format of the model.
    pub convention: &'static str,
    /// Engine that ran the model.
    pub engine: Engine,
    /// Mean negative log-likelihood, nats/token.
    pub nll: f64,
    /// Its standard error over windows.
    pub nll_se: f64,
    /// Perplexity.
    pub ppl: f64,
    /// Number of predicted tokens.
    pub tokens: u64,
    /// Number of windows.
    pub windows: usize,
    /// Note on the errors, if they are no standard errors.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// Reference as named.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reference: Option<PathBuf>,
    /// Format of the reference, if it is quantized itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reference_format: Option<&'static str>,
    /// Comparison with the reference.
    #[serde(flatten)]
    pub comparison: Option<Comparison>,
    /// Policy of the KV cache.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv: Option<String>,
    /// Tokens of each window that are the prompt.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill: Option<u32>,
    /// Bytes of a token in the cache.
    pub kv_bytes_per_token: f64,
    /// The same in f16, where that is defined.
    #[serde(skip)]
    pub kv_f16_bytes_per_token: Option<f64>,
    /// Simulated operands of attention.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attention_operands: Option<String>,
    /// Simulated accumulator.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accumulator: Option<String>,
    /// Seconds of the evaluation, without loading.
    pub seconds: f64,
}

/// Evaluates the model on `sequences`, and writes what the job asks for.
pub(super) fn run(
    job: &Evaluate,
    models: &Models,
    sequences: &[Sequence],
    (team, host): (&Team, &Host),
) -> Result<TextEvaluation> {
    if let (Some(path), Some(decoder)) = (&job.logits, models.decoder()) {
        write_logits(&host.output(path)?, decoder, sequences)?;
    }
    let start = Instant::now();
    let result = evaluate(job, models, sequences, (team, host))?;
    if let Some(path) = &job.per_window {
        write_file_atomic(&host.output(path)?, format!("{:#}\n", per_window(&result)).as_bytes())?;
    }
    Ok(TextEvaluation {
        model: job.model.named().to_owned(),
        adapter: job.adapter.clone(),
        convention: models.files().convention_name(),
        engine: job.engine,
        nll: result.nll,
        nll_se: result.nll_se,
        ppl: result.ppl,
        tokens: result.tokens,
        windows: result.windows.len(),
        note: note(result.windows.len()),
        reference: job.reference.as_ref().map(ModelPath::named).map(Into::into),
        reference_format: models.quantized_reference(host),
        comparison: result.comparison,
        kv: models.kv_name(job.kv.as_deref()),
        prefill: job.prefill,
        kv_bytes_per_token: models.kv_bytes_per_token(),
        kv_f16_bytes_per_token: f16_bytes_per_token(models.files()),
        attention_operands: job.attention_operands.as_ref().map(|text| text.to_string()),
        accumulator: job.accumulator.as_ref().map(|text| text.to_string()),
        seconds: start.elapsed().as_secs_f64(),
    })
}

/// Runs the evaluation, alone or with other workers.
fn evaluate(
    job: &Evaluate,
    models: &Models,
    sequences: &[Sequence],
    who: (&Team, &Host),
) -> Result<Evaluation> {
    let found = windows(job, models, sequences, who)?;
    let prefill = job.prefill.map(|prefill| prefill as usize);
    Ok(mantissa_eval::summarize(found, models.reference.is_some(), prefill)?)
}

/// Evaluates the windows with a progress display. A worker that computes a part of them returns that part.
fn windows(
    job: &Evaluate,
    models: &Models,
    sequences: &[Sequence],
    (team, host): (&Team, &Host),
) -> Result<Vec<WindowResult>> {
    let total = sequences.iter().map(|s| s.tokens.len() as u64).sum();
    let progress = host.progress(total, Unit::Items("tokens"));
    let before = AtomicU64::new(0);
    let told = |done| {
        progress.set(before.load(Ordering::Relaxed) + done);
        ControlFlow::Continue(())
    };
    let compared = models.reference.as_ref().map(|reference| &reference.decoder);
    let prefill = job.prefill.map(|prefill| prefill as usize);
    let run = |range: Range<usize>| {
        let windows = (sequences, range);
        mantissa_eval::evaluate_windows(models.evaluated(), compared, windows, models.threads, prefill, &told)
    };
    let found = match team.is_shared() {
        false => run(0..sequences.len())?,
        true => {
            let groups = ranges(sequences.len(), groups::GROUPS);
            let tokens = |group: &Range<usize>| -> u64 {
                sequences[group.clone()].iter().map(|s| s.tokens.len() as u64).sum()
            };
            let mut compute = |group: Range<usize>| {
                let found = run(group.clone())?;
                before.fetch_add(tokens(&group), Ordering::Relaxed);
                Ok(found)
            };
            shared_windows(&groups, (team, host), &mut compute)?
        }
    };
    progress.finish();
    Ok(found)
}

/// Computes the results of `groups` of windows with the other workers of `team`; those of all windows follow in order.
fn shared_windows(
    groups: &[Range<usize>],
    work: (&Team, &Host),
    run: &mut dyn FnMut(Range<usize>) -> Result<Vec<WindowResult>>,
) -> Result<Vec<WindowResult>> {
    let names: Vec<String> = groups.iter().map(|group| format!("windows {group:?}")).collect();
    let write = |found: &Vec<WindowResult>| Ok(serde_json::to_vec(found)?);
    let read = |group: usize, bytes: &[u8]| {
        let found = serde_json::from_slice::<Vec<WindowResult>>(bytes).ok();
        found.filter(|found| found.len() == groups[group].len())
    };
    let found = groups::shared(&names, &mut |group| run(groups[group].clone()), write, read, work)?;
    Ok(found.into_iter().flatten().collect())
}

/// Computes windows that no other worker of `team` computes, until all have a result.
pub(super) fn take_part(
    job: &Evaluate,
    models: &Models,
    sequences: &[Sequence],
    (team, host): (&Team, &Host),
) -> Result<()> {
    windows(job, models, sequences, (team, host)).map(drop)
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

/// Fails if KL or perplexity exceed their bounds.
pub(super) fn gates(job: &Evaluate, found: &TextEvaluation) -> Result<(), GateFailed> {
    let Some(c) = &found.comparison else { return Ok(()) };
    if let Some(max) = job.max_kl.filter(|max| exceeds(c.kl, *max)) {
        return Err(GateFailed::new(format!("KL: expected at most {max} nats/token, got {:.6}", c.kl)));
    }
    let increase = c.delta_nll.exp() - 1.0;
    if let Some(max) = job.max_ppl_increase.filter(|max| exceeds(increase, *max)) {
        let found = format!("perplexity: expected an increase of at most {max}, got {increase:.6}");
        return Err(GateFailed::new(found));
    }
    Ok(())
}

//! Models that run: loaded side by side within the memory ceiling.

use std::path::Path;

use anyhow::Result;
use mantissa_eval::Sequence;
use mantissa_model::{Buffers, Decoder, KvCache, KvPolicy};
use mantissa_quant::model_config;
use mantissa_store::AdapterFiles;
use mantissa_store::convention::ModelFiles;

use super::adapter;
use super::calibration::CalibrationArgs;
use super::model::{BASE, open, open_quietly};
use crate::context::Context;

/// Model ready to run.
pub struct Model {
    /// Files of the model.
    pub files: ModelFiles,
    /// Loaded decoder.
    pub decoder: Decoder,
}

/// Planned use of a model, for predicting memory.
#[derive(Clone, Copy)]
pub struct Use<'a> {
    /// Tokens of the longest pass, whose hidden states are held at once.
    pub pass: usize,
    /// Tokens of the longest sequence.
    pub longest: usize,
    /// Number of concurrent passes.
    pub threads: usize,
    /// True if a KV cache is kept.
    pub cached: bool,
    /// Rows of logits held by each pass.
    pub logits: usize,
    /// KV cache policy of the first model, if other than its own.
    pub kv: Option<&'a KvPolicy>,
    /// Calibration options for a KV policy that learns levels.
    pub calibration: Option<&'a CalibrationArgs>,
    /// Adapter of the first model.
    pub adapter: Option<&'a AdapterFiles>,
}

/// Opens and loads models that run side by side, if memory holds them together.
///
/// # Errors
/// As [`open`] and [`Decoder::load`]; not enough memory.
pub fn load_all<const N: usize>(paths: [&Path; N], used: Use<'_>, context: &Context) -> Result<[Model; N]> {
    let opened: Vec<_> = paths.iter().map(|path| open(path, context)).collect::<Result<_>>()?;
    require(&opened, used, context)?;
    let load = |(i, files)| {
        let adapter = used.adapter.filter(|_| i == 0);
        Ok(Model { decoder: adapter::decoder(&files, adapter)?, files })
    };
    let mut models: Vec<Model> = opened.into_iter().enumerate().map(load).collect::<Result<_>>()?;
    if let (Some(policy), Some(model)) = (used.kv, models.first_mut()) {
        set_kv(model, policy, used.calibration, context)?;
    }
    models.try_into().map_err(|_| anyhow::anyhow!("as many models as paths"))
}

/// Sets the KV cache policy of `model`, learning its levels on a text if needed.
fn set_kv(
    model: &mut Model,
    policy: &KvPolicy,
    calibration: Option<&CalibrationArgs>,
    context: &Context,
) -> Result<()> {
    let set = match calibration {
        Some(args) if policy.is_calibrated() => args.load(&model.files, None, context)?,
        _ => None,
    };
    let Some(set) = set else {
        let stored = policy.is_calibrated() && model.files.kv_policy() == Some(&policy.to_string());
        return if stored { Ok(()) } else { Ok(model.decoder.set_kv(policy)?) };
    };
    let (config, tokens) = (model.decoder.config(), set.windows.iter().map(Vec::len));
    let (longest, all) = (tokens.clone().max().unwrap_or(0), tokens.sum::<usize>() as u64);
    // Hidden states of all tokens, and keys and values of one layer, each with a weight and an index.
    let each = (config.hidden_size as u64).saturating_add(6 * config.key_value_width() as u64);
    let needs = Buffers::bytes_needed(config, longest, longest).saturating_add(all.saturating_mul(4 * each));
    context.require_more_memory("calibration of the KV cache", needs)?;
    Ok(model.decoder.set_kv_calibrated(policy, &set.windows)?)
}

/// Checks that memory holds models that run side by side, without loading them.
///
/// # Errors
/// As [`ModelFiles::open`]; not enough memory.
pub fn require_memory(paths: &[&Path], used: Use<'_>, context: &Context) -> Result<()> {
    require(&paths.iter().map(|path| open_quietly(path)).collect::<Result<Vec<_>>>()?, used, context)
}

/// Predicts the memory of models that run side by side, without loading them.
///
/// # Errors
/// As [`ModelFiles::open`].
pub fn bytes_of(paths: &[&Path], used: Use<'_>) -> Result<u64> {
    let models: Vec<_> = paths.iter().map(|path| open_quietly(path)).collect::<Result<_>>()?;
    Ok(needed(&models, used)?.1)
}

/// Checks memory like [`require_memory`], with `percent` added to the prediction.
///
/// # Errors
/// As [`require_memory`].
pub fn require_memory_and(percent: u64, paths: &[&Path], used: Use<'_>, context: &Context) -> Result<()> {
    let models: Vec<_> = paths.iter().map(|path| open_quietly(path)).collect::<Result<_>>()?;
    let (what, needs) = needed(&models, used)?;
    context.require_memory(&what, needs.saturating_add(needs / 100 * percent))
}

/// Checks that memory holds the models of these files side by side.
///
/// # Errors
/// Not enough memory.
pub fn require(models: &[ModelFiles], used: Use<'_>, context: &Context) -> Result<()> {
    let (what, needs) = needed(models, used)?;
    context.require_memory(&what, needs)
}

fn needed(models: &[ModelFiles], used: Use<'_>) -> Result<(String, u64)> {
    let mut needs = BASE;
    for (i, files) in models.iter().enumerate() {
        let used = if i == 0 { used } else { Use { kv: None, adapter: None, ..used } };
        needs = needs.saturating_add(bytes_needed(files, used)?);
    }
    let names: Vec<_> = models.iter().map(|files| files.dir().display().to_string()).collect();
    Ok((format!("{}: weights, buffers and cache", names.join(" and ")), needs))
}

impl Use<'_> {
    /// Describes an evaluation on `sequences` with up to `threads` concurrent passes.
    pub fn evaluation(sequences: &[Sequence], threads: usize) -> Self {
        let longest = sequences.iter().map(|s| s.tokens.len()).max().unwrap_or(0);
        let threads = threads.min(sequences.len());
        Use {
            pass: longest,
            longest,
            threads,
            cached: false,
            logits: mantissa_eval::ROWS,
            kv: None,
            calibration: None,
            adapter: None,
        }
    }
}

fn bytes_needed(files: &ModelFiles, used: Use<'_>) -> Result<u64> {
    let config = model_config(files)?;
    let buffers = Buffers::bytes_needed(&config, used.pass, used.longest);
    let logits = (used.logits as u64).saturating_mul(config.vocab_size as u64).saturating_mul(4);
    let cache = match used.kv {
        _ if !used.cached => 0,
        Some(policy) => KvCache::bytes_needed_under(&config, used.longest, policy)?,
        None => KvCache::bytes_needed(&config, used.longest),
    };
    // A tensor is held as stored bytes and, if quantized, as one byte per code.
    let largest = files.checkpoint().tensors().map(|meta| meta.len).max().unwrap_or(0);
    let widest = config.decoder_linears().map(|l| (l.rows * l.cols) as u64).max().unwrap_or(0);
    let passing = largest.saturating_add(widest);
    let per_pass = buffers.saturating_add(logits).saturating_add(cache).saturating_mul(used.threads as u64);
    let weights = files.checkpoint().total_bytes().saturating_add(passing);
    let adapter = adapter::bytes_needed(files, used.adapter)?;
    Ok(weights.saturating_add(per_pass).saturating_add(adapter))
}

//! Models that run: loaded side by side within the memory ceiling.

use std::path::Path;

use anyhow::Result;
use mantissa_eval::Sequence;
use mantissa_jobs::ModelUse;
use mantissa_model::{Buffers, Decoder, KvPolicy};
use mantissa_store::AdapterFiles;
use mantissa_store::convention::ModelFiles;

use super::adapter;
use super::calibration::CalibrationArgs;
use super::model::{open, open_quietly};
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
    let opened: Vec<_> = paths.iter().map(|path| open(path, context)).collect::<Result<_, _>>()?;
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
    require(&opened(paths)?, used, context)
}

/// Checks memory like [`require_memory`], with `percent` added to the prediction.
///
/// # Errors
/// As [`require_memory`].
pub fn require_memory_and(percent: u64, paths: &[&Path], used: Use<'_>, context: &Context) -> Result<()> {
    let (what, needs) = needed(&opened(paths)?, used)?;
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

fn opened(paths: &[&Path]) -> Result<Vec<ModelFiles>> {
    Ok(paths.iter().map(|path| open_quietly(path)).collect::<Result<_, _>>()?)
}

fn needed(models: &[ModelFiles], used: Use<'_>) -> Result<(String, u64)> {
    Ok(used.value().needed(&models.iter().collect::<Vec<_>>())?)
}

impl<'a> Use<'a> {
    /// Describes an evaluation on `sequences` with up to `threads` concurrent passes.
    pub fn evaluation(sequences: &[Sequence], threads: usize) -> Self {
        let ModelUse { pass, longest, threads, cached, logits, kv, adapter, .. } =
            ModelUse::evaluation(sequences, threads);
        Use { pass, longest, threads, cached, logits, kv, calibration: None, adapter }
    }

    /// Returns the use without the calibration of the cache.
    fn value(self) -> ModelUse<'a> {
        let Use { pass, longest, threads, cached, logits, kv, adapter, .. } = self;
        ModelUse { pass, longest, threads, cached, logits, kv, calibration: None, adapter }
    }
}

//! Opening a model for a command: its files, its notes, its decoder under the memory ceiling.

use std::path::{Path, PathBuf};

use anyhow::Result;
use mantissa_model::{Buffers, Decoder, KvCache};
use mantissa_quant::model_config;
use mantissa_store::convention::ModelFiles;

use crate::app::Context;
use crate::error::BadInput;

/// A model ready to run.
pub struct Model {
    /// Its files.
    pub files: ModelFiles,
    /// Its decoder.
    pub decoder: Decoder,
}

/// Opens the files of a model and tells its notes.
///
/// # Errors
/// As [`ModelFiles::open`]; under `--strict`, for notes.
pub fn open(path: &Path, context: &Context) -> Result<ModelFiles> {
    if path.as_os_str() == "demo" && !path.exists() {
        return Err(BadInput::new(
            "MODEL",
            "\"demo\"",
            "a model folder (the embedded model is not there yet)",
        )
        .into());
    }
    let files = ModelFiles::open(path)?;
    let notes: Vec<_> =
        files.notes().into_iter().chain(files.checkpoint().warnings().iter().cloned()).collect();
    context.warn_all(&notes)?;
    Ok(files)
}

/// How a model is to be run.
#[derive(Clone, Copy)]
pub struct Use {
    /// Tokens of the longest pass, whose hidden states are held at a time.
    pub pass: usize,
    /// Tokens of the longest sequence.
    pub longest: usize,
    /// Passes at a time.
    pub threads: usize,
    /// Whether keys and values of the sequence are kept.
    pub cached: bool,
    /// Rows of logits held by each pass.
    pub logits: usize,
}

/// Opens and loads models that are to be run side by side, after asking whether memory holds them together.
///
/// # Errors
/// As [`open`] and [`Decoder::load`]; where there is not enough memory.
pub fn load_all<const N: usize>(paths: [&Path; N], used: Use, context: &Context) -> Result<[Model; N]> {
    let mut opened = Vec::with_capacity(N);
    let mut needs = BASE;
    for path in paths {
        let files = open(path, context)?;
        needs = needs.saturating_add(bytes_needed(&files, used)?);
        opened.push(files);
    }
    let names: Vec<_> = paths.iter().map(|path| path.display().to_string()).collect();
    context.require_memory(&format!("{}: weights, buffers and cache", names.join(" and ")), needs)?;
    let load = |files| Ok(Model { decoder: Decoder::load(&files)?, files });
    let models: Vec<_> = opened.into_iter().map(load).collect::<Result<_>>()?;
    models.try_into().map_err(|_| anyhow::anyhow!("as many models as paths"))
}

/// Memory of the process beside models and buffers: code tables, tokenizer, allocator.
const BASE: u64 = 8 << 20;

fn bytes_needed(files: &ModelFiles, used: Use) -> Result<u64> {
    let config = model_config(files)?;
    let buffers = Buffers::bytes_needed(&config, used.pass, used.longest);
    let logits = (used.logits as u64).saturating_mul(config.vocab_size as u64).saturating_mul(4);
    let cache = if used.cached { KvCache::bytes_needed(&config, used.longest) } else { 0 };
    // A tensor passes through its stored bytes and, where it is quantized, through one byte per code.
    let largest = files.checkpoint().tensors().map(|meta| meta.len).max().unwrap_or(0);
    let widest = config.linears().iter().map(|l| (l.rows * l.cols) as u64).max().unwrap_or(0);
    let passing = largest.saturating_add(widest);
    let per_pass = buffers.saturating_add(logits).saturating_mul(used.threads as u64);
    let weights = files.checkpoint().total_bytes().saturating_add(passing);
    Ok(weights.saturating_add(per_pass).saturating_add(cache))
}

/// Tokens that a model was made for.
///
/// # Errors
/// As [`model_config`].
pub fn context_length(files: &ModelFiles) -> Result<usize> {
    Ok(model_config(files)?.max_position_embeddings)
}

/// The path of a model as given.
pub type ModelPath = PathBuf;

//! Predicted memory of a verification.

use std::collections::BTreeMap;

use mantissa_model::{Buffers, LinearInfo, ModelConfig, Tokenizer, load_config};
use mantissa_store::convention::ModelFiles;

use super::logits::{LOGIT_TOKENS, MAX_LOGIT_PARAMETERS};
use crate::error::Result;
use crate::source::PANEL;

/// Code tables, buffers for hashing and comparing files, and holes of the heap; measured.
const BASE: u64 = 8 << 20;

/// Names, shapes and digests per tensor, in the lists of both readers.
const PER_TENSOR: u64 = 2 << 10;

/// Bytes per weight of a trellis: values between the rotations and the weight, in both readers.
const ROTATED: u64 = 22;

/// Predicts the peak memory of [`verify_against`](super::verify_against) without a text; figures need the memory of an
/// evaluation.
///
/// # Errors
/// The configuration cannot be read.
pub fn verify_bytes(files: &ModelFiles, source: Option<&ModelFiles>, threads: usize) -> Result<u64> {
    let config = load_config(files)?;
    let all = [Some(files), source];
    let tensors: usize = all.into_iter().flatten().map(|files| files.checkpoint().tensors().count()).sum();
    let stored = stored_by_module(files);
    let trellis = files.checkpoint().tensors().any(|meta| meta.name.ends_with(".trellis"));
    let coded = |info: &LinearInfo| !files.is_dense(&format!("{}.weight", info.module));
    let tables = config.tables().into_iter().filter(coded);
    let weight = config.decoder_linears().chain(tables).map(|info| {
        // Experts stored as one tensor are read as one.
        let stored = stored.get(info.module.as_str()).copied().unwrap_or_else(|| largest(files));
        checking(&info, stored, trellis, threads)
    });
    let weight = weight.max().unwrap_or(0);
    let mut needs = weight.max(copying(files, &config));
    if config.parameters() <= MAX_LOGIT_PARAMETERS {
        // If a transform changed the source, it is compared with the original.
        needs = all.into_iter().flatten().map(|files| comparing(files, &config)).fold(needs, u64::max);
    }
    // One tokenizer at a time is read.
    let tokenizers = all.into_iter().flatten().map(|files| Tokenizer::bytes_to_load(files.dir()));
    let needs = tokenizers.fold(needs, u64::max);
    Ok(BASE + tensors as u64 * PER_TENSOR + needs)
}

/// Returns the stored bytes of every module, including modules within it.
pub fn stored_by_module(files: &ModelFiles) -> BTreeMap<&str, u64> {
    let mut stored = BTreeMap::new();
    for meta in files.checkpoint().tensors() {
        for (dot, _) in meta.name.match_indices('.') {
            *stored.entry(&meta.name[..dot]).or_insert(0) += meta.len;
        }
    }
    stored
}

/// Bytes of checking a weight of `stored` bytes: both readers, and the rows that each thread decodes and compares.
fn checking(info: &LinearInfo, stored: u64, trellis: bool, threads: usize) -> u64 {
    let weights = (info.rows * info.cols) as u64;
    // Tensors, unpacked and transposed; one byte per code, four per scale.
    let readers = 3 * stored + 2 * weights + weights / 2;
    let rotated = if trellis { ROTATED * weights } else { 0 };
    let panel = (PANEL.max(info.cols) as u64) * 24;
    readers + rotated + panel * threads as u64
}

/// Bytes of comparing a tensor that a transform changes with the source's.
fn copying(files: &ModelFiles, config: &ModelConfig) -> u64 {
    let table = config.vocab_size as u64 * config.hidden_size as u64;
    let plain = |name: &str| name.ends_with("norm.weight") || name.contains("embed") || name.contains("head");
    let read = files.checkpoint().tensors().filter(|meta| plain(&meta.name)).map(|meta| meta.len).max();
    2 * read.unwrap_or(0).min(8 * table) + 4 * read.map_or(0, |_| config.hidden_size as u64)
}

/// Bytes of comparing logits: a model in f32, and the logits of both readers.
fn comparing(files: &ModelFiles, config: &ModelConfig) -> u64 {
    let table = config.vocab_size as u64 * config.hidden_size as u64;
    let tables = files.checkpoint().tensors().filter(|meta| meta.numel() == table);
    let stored = tables.map(|meta| meta.len).max().unwrap_or(2 * table);
    let model: u64 = logits_buffers(config, stored).iter().map(|(_, bytes)| bytes).sum();
    let length = LOGIT_TOKENS.min(config.max_position_embeddings);
    let logits = (2 * 4 * length as u64).saturating_mul(config.vocab_size as u64);
    model.saturating_add(logits).saturating_add(Buffers::bytes_needed(config, length, length))
}

/// Returns the bytes of the largest tensor.
fn largest(files: &ModelFiles) -> u64 {
    files.checkpoint().tensors().map(|meta| meta.len).max().unwrap_or(0)
}

/// Share that holes of the heap add to a loaded model; measured.
const HOLES_OF_MODEL: f64 = 0.05;

/// Memory of the second of two models whose logits are compared, decoded to f32. The first is smaller and freed before.
/// The embedding has `stored` bytes.
pub(crate) fn logits_buffers(config: &ModelConfig, stored: u64) -> Vec<(&'static str, u64)> {
    let linears: u64 = config.decoder_linears().map(|info| (info.rows * info.cols) as u64 * 4).sum();
    let table = config.vocab_size as u64 * config.hidden_size as u64;
    let passing = stored + 8 * table;
    let kept = if config.tie_word_embeddings { linears } else { linears + 4 * table };
    let buffers = if config.tie_word_embeddings && passing > 4 * table + linears {
        vec![("embedding being loaded", passing)]
    } else if config.tie_word_embeddings {
        vec![("embedding", 4 * table), ("linear layers", linears)]
    } else {
        vec![("linear layers and embedding", kept), ("head being loaded", passing)]
    };
    let model: u64 = buffers.iter().map(|(_, bytes)| bytes).sum();
    let holes = ("holes of the heap", (model as f64 * HOLES_OF_MODEL) as u64);
    buffers.into_iter().chain([holes]).collect()
}

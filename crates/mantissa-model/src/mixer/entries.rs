//! Entries of compressed attention in each layer of a configuration.

use serde_json::Value;

use crate::fields::{ConfigError, Fields, MAX_POSITIONS, MAX_WIDTH};

/// Entries of a layer of compressed attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Compression {
    /// Tokens of an entry.
    pub ratio: usize,
    /// True if entries overlap by a block and are chosen by an indexer; false if queries attend to all.
    pub overlaps: bool,
}

/// Indexer that chooses entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompressedIndex {
    /// Heads of its queries; keys have one.
    pub heads: usize,
    /// Width of a head; the last values are rotated, as many as in the attention.
    pub dim: usize,
    /// Entries that a query attends to.
    pub chosen: usize,
}

impl CompressedIndex {
    /// Parses the indexer, whose heads rotate as many values as those of the attention.
    pub(super) fn parse(fields: Fields<'_>, rotated: usize) -> Result<Self, ConfigError> {
        let size = |field, limit: u64, default| {
            Ok::<usize, ConfigError>(fields.optional_size(field, 1..=limit)?.unwrap_or(default))
        };
        let heads = size("index_n_heads", MAX_WIDTH, 64)?;
        let index = CompressedIndex {
            heads,
            dim: size("index_head_dim", MAX_WIDTH / heads as u64, 128)?,
            chosen: size("index_topk", MAX_POSITIONS, 512)?,
        };
        match index.dim < rotated {
            true => Err(fields.error("index_head_dim", format!("at least the rotated width {rotated}"))),
            false => Ok(index),
        }
    }
}

/// Most tokens of an entry.
const MAX_RATIO: u64 = 1 << 16;

/// Kinds of layers in `layer_types`, with the values of `compress_ratios` and the defaults of `compress_rates`.
const KINDS: [(&str, u64); 3] =
    [("sliding_attention", 0), ("compressed_sparse_attention", 4), ("heavily_compressed_attention", 128)];

/// Parses the compressed entries of each of `layers` layers; `None` for layers that attend to the window alone.
pub(crate) fn layers(fields: Fields<'_>, layers: usize) -> Result<Vec<Option<Compression>>, ConfigError> {
    let rate = |kind: usize, older: &'static str| -> Result<usize, ConfigError> {
        let (name, default) = KINDS[kind];
        let stated = match fields.object("compress_rates")? {
            Some(rates) => rates.optional_size(name, 1..=MAX_RATIO)?,
            None => None,
        };
        let older = fields.optional_size(older, 1..=MAX_RATIO)?;
        Ok(older.or(stated).unwrap_or(default as usize))
    };
    let sparse = Compression { ratio: rate(1, "compress_rate_csa")?, overlaps: true };
    let heavy = Compression { ratio: rate(2, "compress_rate_hca")?, overlaps: false };
    let all = [None, Some(sparse), Some(heavy)];
    let listed = |field: &'static str, allowed: String, kind: &dyn Fn(&Value) -> Option<usize>| {
        let list = fields.get(field).and_then(Value::as_array).filter(|list| list.len() >= layers);
        let kinds: Option<Vec<usize>> = list.and_then(|list| list.iter().take(layers).map(kind).collect());
        kinds.ok_or_else(|| fields.error(field, allowed))
    };
    let kinds = if fields.get("layer_types").is_some() {
        let allowed = format!("{layers} of {}", KINDS.map(|(name, _)| name).join(", "));
        let kind = |value: &Value| {
            KINDS.iter().position(|(name, _)| value.as_str().is_some_and(|text| text == *name))
        };
        listed("layer_types", allowed, &kind)?
    } else if fields.get("compress_ratios").is_some() {
        let allowed = format!("at least {layers} of 0, 4 and 128");
        let kind = |value: &Value| KINDS.iter().position(|(_, ratio)| value.as_u64() == Some(*ratio));
        listed("compress_ratios", allowed, &kind)?
    } else {
        // Two heavily compressed layers, then in turns.
        (0..layers).map(|layer| if layer < 2 || layer.is_multiple_of(2) { 2 } else { 1 }).collect()
    };
    Ok(kinds.into_iter().map(|kind| all[kind]).collect())
}

/// Parses the width of the rotated part of heads of width `head_dim`, at their end.
pub(crate) fn rotated(fields: Fields<'_>, head_dim: usize) -> Result<usize, ConfigError> {
    let (field, rotated) = match fields.optional_positive("partial_rotary_factor")? {
        Some(factor) => ("partial_rotary_factor", (head_dim as f64 * factor) as usize),
        None => {
            let stated = fields.optional_size("qk_rope_head_dim", 2..=MAX_WIDTH)?;
            ("qk_rope_head_dim", stated.unwrap_or(head_dim / 8))
        }
    };
    match rotated >= 2 && rotated <= head_dim && rotated.is_multiple_of(2) {
        true => Ok(rotated),
        false => Err(fields.error(field, format!("an even part of the head width {head_dim}"))),
    }
}

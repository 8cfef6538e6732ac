//! Compressed attention of a configuration: entries of each layer, and the mixer.

use serde_json::Value;

use super::rules::{Around, MixerRules, all_have_mlp};
use super::{Mixing, Recurrent};
use crate::config::fields::{ConfigError, Fields, MAX_POSITIONS, MAX_WIDTH};

/// Sizes of compressed attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CompressedAttention {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Query heads.
    pub heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Width of the rotated part of a head, at its end, even.
    pub rotated: usize,
    /// Width of the latent of the queries.
    pub q_rank: usize,
    /// Groups of heads of the output projection.
    pub groups: usize,
    /// Values that each group is projected to.
    pub group_rank: usize,
    /// Last tokens that a query attends to, itself included.
    pub window: usize,
    /// Indexer of layers with overlapping entries.
    pub index: CompressedIndex,
    /// Entries of the layer; `None` if it attends to the window alone.
    pub compression: Option<Compression>,
    /// Epsilon of the norms.
    pub eps: f32,
}

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

/// Most tokens of an entry.
const MAX_RATIO: u64 = 1 << 16;

/// Kinds of layers in `layer_types`, with the values of `compress_ratios` and the defaults of `compress_rates`.
const KINDS: [(&str, u64); 3] =
    [("sliding_attention", 0), ("compressed_sparse_attention", 4), ("heavily_compressed_attention", 128)];

/// Attention to a window and to compressed entries in every layer, by `layer_types`, or else `compress_ratios`
/// (DeepSeek-V4).
pub(crate) const COMPRESSED: MixerRules =
    MixerRules { mixer, halves: |_, layers| Ok(all_have_mlp(vec![Mixing::Recurrent; layers])), layers: None };

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

/// Parses the mixer, without the entries of a layer.
fn mixer(
    fields: Fields<'_>,
    &Around { hidden, heads, head_dim, eps }: &Around,
) -> Result<Recurrent, ConfigError> {
    let size = |field, limit: u64, default| {
        Ok::<usize, ConfigError>(fields.optional_size(field, 1..=limit)?.unwrap_or(default))
    };
    let rotated = rotated(fields, head_dim)?;
    let groups = size("o_groups", heads as u64, 8)?;
    if !heads.is_multiple_of(groups) {
        return Err(fields.error("o_groups", format!("a divisor of num_attention_heads, which is {heads}")));
    }
    let index_heads = size("index_n_heads", MAX_WIDTH, 64)?;
    let index = CompressedIndex {
        heads: index_heads,
        dim: size("index_head_dim", MAX_WIDTH / index_heads as u64, 128)?,
        chosen: size("index_topk", MAX_POSITIONS, 512)?,
    };
    if index.dim < rotated {
        return Err(fields.error("index_head_dim", format!("at least the rotated width {rotated}")));
    }
    Ok(Recurrent::CompressedAttention(CompressedAttention {
        hidden,
        heads,
        head_dim,
        rotated,
        q_rank: size("q_lora_rank", MAX_WIDTH, 1024)?,
        groups,
        group_rank: size("o_lora_rank", MAX_WIDTH / groups as u64, 1024)?,
        window: size("sliding_window", MAX_POSITIONS, 128)?,
        index,
        compression: None,
        eps,
    }))
}

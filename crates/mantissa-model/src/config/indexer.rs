//! Indexer of sparse attention of a configuration.

use serde_json::Value;

use crate::fields::{ConfigError, Fields, MAX_POSITIONS, MAX_WIDTH};
use crate::sizes::Latent;
use mantissa_arch::Architecture;

/// Indexer that chooses the tokens that a query attends to (DeepSeek Sparse Attention, arXiv 2512.02556, sec. 2.1). A
/// layer without an indexer of its own uses the choice of the last layer before it that has one.
#[derive(Clone, Debug, PartialEq)]
pub struct Indexer {
    /// Heads of its queries; keys have one.
    pub heads: usize,
    /// Width of a head; its first values are rotated, as many as in latent attention.
    pub dim: usize,
    /// Tokens that a query attends to. Queries that see no more attend to all.
    pub chosen: usize,
    /// True if the rotated pairs are adjacent in the weights, not half the rotated part apart.
    pub interleaved: bool,
    /// True for layers with an indexer of their own.
    pub own: Vec<bool>,
}

impl Indexer {
    /// Epsilon of the LayerNorm of the keys.
    pub const EPS: f32 = 1e-6;

    pub(super) fn parse(
        fields: Fields<'_>,
        architecture: &Architecture,
        latent: Option<Latent>,
        layers: usize,
    ) -> Result<Option<Self>, ConfigError> {
        let (Some(rules), Some(latent)) =
            (architecture.latent.as_ref().and_then(|rules| rules.indexer), latent)
        else {
            return Ok(None);
        };
        if latent.q_rank.is_none() {
            return Err(
                fields.error("q_lora_rank", "an integer: the indexer reads the latent of the queries")
            );
        }
        let heads = fields.optional_size("index_n_heads", 1..=MAX_WIDTH)?.unwrap_or(rules.heads);
        let widest = MAX_WIDTH / heads as u64;
        let dim = match fields.optional_size("index_head_dim", latent.rotated as u64..=widest)? {
            Some(dim) => dim,
            None if rules.dim >= latent.rotated => rules.dim,
            None => return Err(fields.error("index_head_dim", "at least qk_rope_head_dim")),
        };
        let own = if rules.shared { own_layers(fields, layers)? } else { vec![true; layers] };
        Ok(Some(Indexer {
            heads,
            dim,
            chosen: fields.optional_size("index_topk", 1..=MAX_POSITIONS)?.unwrap_or(rules.chosen),
            interleaved: rules.interleaved,
            own,
        }))
    }
}

/// Parses which layers have an indexer of their own.
fn own_layers(fields: Fields<'_>, layers: usize) -> Result<Vec<bool>, ConfigError> {
    let own = |value: &Value| match value.as_str() {
        Some("full") => Some(true),
        Some("shared") => Some(false),
        _ => None,
    };
    let letter = |letter| match letter {
        'F' => Some(true),
        'S' => Some(false),
        _ => None,
    };
    let of_list = |value: &Value| value.as_array()?.iter().map(own).collect::<Option<Vec<bool>>>();
    let (field, listed) = match (fields.get("indexer_types"), fields.get("index_topk_pattern")) {
        (Some(value), _) => ("indexer_types", of_list(value)),
        (None, Some(Value::String(text))) => ("index_topk_pattern", text.chars().map(letter).collect()),
        (None, Some(value)) => ("index_topk_pattern", of_list(value)),
        (None, None) => {
            let limits = 0..=u64::from(u32::MAX);
            let period = fields.optional_size("index_topk_freq", limits.clone())?.unwrap_or(1).max(1);
            let offset = fields.optional_size("index_skip_topk_offset", limits)?.unwrap_or(2);
            let own = (0..layers).map(|layer| (layer + 1).saturating_sub(offset).is_multiple_of(period));
            ("index_skip_topk_offset", Some(own.collect()))
        }
    };
    let allowed = || format!("{layers} of full or shared (F or S in a pattern), the first full");
    let own = listed.filter(|own: &Vec<bool>| own.len() == layers && own.first() == Some(&true));
    own.ok_or_else(|| fields.error(field, allowed()))
}

//! Layers of a model made of blocks: each has one half of a layer.

use serde_json::Value;

use super::Mixing;
use crate::config::fields::{ConfigError, Fields, MAX_LAYERS};

/// Kind of a layer in a model made of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Block {
    Recurrent,
    Attention,
    Mlp,
    Experts,
}

impl Block {
    pub(crate) fn mixing(self) -> Mixing {
        match self {
            Block::Recurrent => Mixing::Recurrent,
            Block::Attention => Mixing::Attention,
            Block::Mlp | Block::Experts => Mixing::None,
        }
    }
}

/// Parses the layers of a model made of blocks, by `layers_block_type` or `layer_types`, or else by
/// `hybrid_override_pattern` (`M` a mixer, `*` attention, `-` an MLP, `E` experts).
pub(crate) fn blocks(fields: Fields<'_>) -> Result<Vec<Block>, ConfigError> {
    for field in ["layers_block_type", "layer_types"] {
        let Some(value) = fields.get(field) else { continue };
        let wrong = || fields.error(field, "a list of linear_attention, full_attention, mlp and moe");
        let parse = |block: &Value| match block.as_str() {
            Some("linear_attention" | "mamba") => Ok(Block::Recurrent),
            Some("full_attention" | "attention") => Ok(Block::Attention),
            Some("mlp") => Ok(Block::Mlp),
            Some("moe") => Ok(Block::Experts),
            _ => Err(wrong()),
        };
        let types = value.as_array().filter(|types| !types.is_empty() && types.len() as u64 <= MAX_LAYERS);
        return types.ok_or_else(wrong)?.iter().map(parse).collect();
    }
    let layers = fields.size("num_hidden_layers", 1..=MAX_LAYERS)?;
    let field = "hybrid_override_pattern";
    let wrong = || fields.error(field, format!("{layers} of M, *, - and E"));
    let parse = |block: char| match block {
        'M' => Ok(Block::Recurrent),
        '*' => Ok(Block::Attention),
        '-' => Ok(Block::Mlp),
        'E' => Ok(Block::Experts),
        _ => Err(wrong()),
    };
    let pattern = fields.text(field)?.filter(|text| text.chars().count() == layers).ok_or_else(wrong)?;
    pattern.chars().map(parse).collect()
}

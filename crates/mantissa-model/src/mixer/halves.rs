//! Halves of each layer of a model: token mixing, and an MLP.

use serde_json::Value;

use crate::fields::{ConfigError, Fields, MAX_LAYERS};

/// Token mixing of a layer: its first half.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mixing {
    /// Attention, with keys and values in the cache.
    Attention,
    /// A [`Recurrent`](super::Recurrent) mixer, with a state of constant size in the cache.
    Recurrent,
    /// Attention and a [`Recurrent`](super::Recurrent) mixer on the same input, whose results are added.
    Both,
    /// None: the layer is an MLP.
    None,
}

impl Mixing {
    /// True if the layer has attention, and so keys and values.
    pub fn attends(self) -> bool {
        matches!(self, Mixing::Attention | Mixing::Both)
    }

    /// True if the layer has a recurrent mixer, and so a state.
    pub fn recurs(self) -> bool {
        matches!(self, Mixing::Recurrent | Mixing::Both)
    }
}

/// Halves of each layer.
pub(crate) struct Halves {
    pub(crate) mixing: Vec<Mixing>,
    pub(crate) has_mlp: Vec<bool>,
}

/// Halves of layers which all have attention and an MLP.
pub(crate) fn all_attend(layers: usize) -> Halves {
    all_have_mlp(vec![Mixing::Attention; layers])
}

/// Halves of layers which all have an MLP.
pub(crate) fn all_have_mlp(mixing: Vec<Mixing>) -> Halves {
    Halves { has_mlp: vec![true; mixing.len()], mixing }
}

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

//! Known ways in which readers and writers of a checkpoint disagree, as data.

use serde::Serialize;

/// Known disagreement between writer and reader, which the doctor tries to undo.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Alternative {
    /// Zero points increased by one.
    ZeroPointUp,
    /// Zero points decreased by one.
    ZeroPointDown,
    /// The two 4-bit codes of each byte swapped.
    NibbleOrder,
    /// Codes stored in adjacent pairs, read as the two halves of a block.
    HalfSplit,
    /// Codes stored as the two halves of a block, read in adjacent pairs.
    Adjacent,
    /// Rows of q and k de-interleaved: the halves of each head put apart.
    RowsApart,
    /// Rows of q and k interleaved.
    RowsInterleaved,
    /// Reciprocal of the global scale.
    GlobalReciprocal,
    /// Global scales of gate and up swapped.
    GlobalSwapped,
    /// Reciprocal of the stored input scale.
    InputReciprocal,
    /// Reciprocals of the block scales.
    ScaleReciprocal,
    /// Block scales transposed: they were written column by column.
    ScalesTransposed,
    /// gate and up swapped.
    GateUpSwapped,
    /// One added to every norm weight.
    NormPlusOne,
    /// One subtracted from every norm weight.
    NormMinusOne,
    /// BOS token added if absent, removed if present.
    OtherBos,
}

/// Description of an alternative.
pub struct Entry {
    /// Alternative described.
    pub alternative: Alternative,
    /// Name in tables and JSON.
    pub name: &'static str,
    /// Likely cause if this alternative repairs the model.
    pub cause: &'static str,
    /// Fix, as printed.
    pub fix: &'static str,
}

/// Every alternative, in the order of the trials.
pub const ALTERNATIVES: [Entry; 16] = [
    Entry {
        alternative: Alternative::ZeroPointUp,
        name: "zero points + 1",
        cause: "zero points are stored minus one (GPTQ v1), but checkpoint_format says otherwise",
        fix: "set checkpoint_format to \"gptq\"",
    },
    Entry {
        alternative: Alternative::ZeroPointDown,
        name: "zero points - 1",
        cause: "zero points are stored unchanged (GPTQ v2), but checkpoint_format says otherwise",
        fix: "set checkpoint_format to \"gptq_v2\"",
    },
    Entry {
        alternative: Alternative::NibbleOrder,
        name: "nibbles swapped",
        cause: "the two codes of each byte are in the opposite nibble order to what the format requires",
        fix: "pack the codes again in the format's order",
    },
    Entry {
        alternative: Alternative::HalfSplit,
        name: "pairs as halves",
        cause: "codes were packed in adjacent pairs, but the format stores the two halves of a block in shared bytes",
        fix: "pack the codes again in the format's order",
    },
    Entry {
        alternative: Alternative::Adjacent,
        name: "halves as pairs",
        cause: "codes were packed as block halves (GGUF's layout), but the format stores adjacent pairs",
        fix: "pack the codes again in the format's order",
    },
    Entry {
        alternative: Alternative::RowsApart,
        name: "q and k rows apart",
        cause: "q and k rows are interleaved (GGUF's llama layout), but the file should have Hugging Face's order",
        fix: "convert again with the permutation undone",
    },
    Entry {
        alternative: Alternative::RowsInterleaved,
        name: "q and k rows interleaved",
        cause: "a GGUF file of the llama architecture was written without the permutation of q and k",
        fix: "convert again with the architecture's permutation",
    },
    Entry {
        alternative: Alternative::GlobalReciprocal,
        name: "1 / global scale",
        cause: "the global scale is stored as a multiplier where the format has a divisor, or vice versa",
        fix: "store the reciprocal",
    },
    Entry {
        alternative: Alternative::GlobalSwapped,
        name: "global scales of gate and up swapped",
        cause: "the global scales of gate and up are swapped",
        fix: "swap them",
    },
    Entry {
        alternative: Alternative::InputReciprocal,
        name: "1 / input scale",
        cause: "the stored input scale is a multiplier where the format has a divisor, or vice versa",
        fix: "store the reciprocal",
    },
    Entry {
        alternative: Alternative::ScaleReciprocal,
        name: "1 / block scales",
        cause: "block scales are stored as reciprocals (a name ending in _inv does not mean that they are)",
        fix: "store the multipliers",
    },
    Entry {
        alternative: Alternative::ScalesTransposed,
        name: "block scales transposed",
        cause: "block scales were written group by group instead of row by row",
        fix: "transpose them",
    },
    Entry {
        alternative: Alternative::GateUpSwapped,
        name: "gate and up swapped",
        cause: "gate and up are swapped, for example by splitting a fused weight in the wrong order",
        fix: "swap the two tensors",
    },
    Entry {
        alternative: Alternative::NormPlusOne,
        name: "norms + 1",
        cause: "norm weights are stored minus one (Gemma's form), but the architecture uses them unchanged",
        fix: "add 1 to every norm",
    },
    Entry {
        alternative: Alternative::NormMinusOne,
        name: "norms - 1",
        cause: "norm weights are stored plus one, but the architecture adds 1 itself",
        fix: "subtract 1 from every norm",
    },
    Entry {
        alternative: Alternative::OtherBos,
        name: "the other BOS",
        cause: "the tokenizer adds a BOS token that the model was trained without, or omits one that it needs",
        fix: "set add_bos_token in tokenizer_config.json (tokenizer.ggml.add_bos_token in GGUF)",
    },
];

/// Smallest set of layers that an alternative changes together when only some layers share a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unit {
    /// One linear layer.
    Linear,
    /// q and k: attention scores are unchanged if both are permuted.
    Rotated,
    /// gate and up.
    Joined,
    /// Norms, which are no linear layers.
    Norms,
    /// The tokenized text.
    Text,
}

impl Alternative {
    /// Returns the unit that changes together.
    pub(super) fn unit(self) -> Unit {
        match self {
            Alternative::RowsApart | Alternative::RowsInterleaved => Unit::Rotated,
            Alternative::GateUpSwapped | Alternative::GlobalSwapped => Unit::Joined,
            Alternative::NormPlusOne | Alternative::NormMinusOne => Unit::Norms,
            Alternative::OtherBos => Unit::Text,
            _ => Unit::Linear,
        }
    }

    /// Returns the description.
    pub fn entry(self) -> &'static Entry {
        let found = ALTERNATIVES.iter().find(|entry| entry.alternative == self);
        found.unwrap_or(&ALTERNATIVES[0])
    }

    /// Finds the alternative with this name.
    pub(super) fn named(name: &str) -> Option<Self> {
        ALTERNATIVES.iter().find(|entry| entry.name == name).map(|entry| entry.alternative)
    }

    /// Returns the shift of norm weights; `None` for alternatives that change linear layers.
    pub(super) fn of_norms(self) -> Option<f32> {
        match self {
            Alternative::NormPlusOne => Some(1.0),
            Alternative::NormMinusOne => Some(-1.0),
            _ => None,
        }
    }
}

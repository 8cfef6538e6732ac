//! The ways in which readers and writers of a checkpoint disagree, as data.

use serde::Serialize;

/// A disagreement, and its undoing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Alternative {
    /// Zero points one higher.
    ZeroPointUp,
    /// Zero points one lower.
    ZeroPointDown,
    /// The two codes of a byte in the other order.
    NibbleOrder,
    /// Codes that are stored in neighbouring pairs, read as the halves of a block.
    HalfSplit,
    /// Codes that are stored as the halves of a block, read in neighbouring pairs.
    Adjacent,
    /// Rows of q and k in heads whose halves are interleaved, put apart.
    RowsApart,
    /// The same, interleaved.
    RowsInterleaved,
    /// The scale of the whole tensor as its reciprocal.
    GlobalReciprocal,
    /// The scale of the whole tensor of the layer that it is joined with (gate and up).
    GlobalSwapped,
    /// The stored scale of the inputs as its reciprocal.
    InputReciprocal,
    /// Block scales as their reciprocals.
    ScaleReciprocal,
    /// Block scales that were written column by column.
    ScalesTransposed,
    /// gate and up in each other's place.
    GateUpSwapped,
    /// Norms that are stored less one.
    NormPlusOne,
    /// Norms that are stored plus one.
    NormMinusOne,
    /// A beginning-of-sequence token where there is none, or none where there is one.
    OtherBos,
}

/// What is known of an alternative.
pub struct Entry {
    /// It.
    pub alternative: Alternative,
    /// Its name in tables.
    pub name: &'static str,
    /// What has gone wrong where it repairs the model.
    pub cause: &'static str,
    /// What helps.
    pub cure: &'static str,
}

/// Every alternative, in the order in which they are tried.
pub const ALTERNATIVES: [Entry; 16] = [
    Entry {
        alternative: Alternative::ZeroPointUp,
        name: "zero points + 1",
        cause: "zero points stored less one, as GPTQ v1 has them, under a label that says otherwise",
        cure: "set checkpoint_format to \"gptq\"",
    },
    Entry {
        alternative: Alternative::ZeroPointDown,
        name: "zero points - 1",
        cause: "zero points stored as they are, as GPTQ v2 has them, under a label that says otherwise",
        cure: "set checkpoint_format to \"gptq_v2\"",
    },
    Entry {
        alternative: Alternative::NibbleOrder,
        name: "nibbles swapped",
        cause: "the two codes of a byte are packed high nibble first where the convention has low first, or the other way",
        cure: "pack the codes again in the convention's order",
    },
    Entry {
        alternative: Alternative::HalfSplit,
        name: "pairs as halves",
        cause: "codes packed in neighbouring pairs were written where a block's halves share bytes",
        cure: "pack the codes again in the convention's order",
    },
    Entry {
        alternative: Alternative::Adjacent,
        name: "halves as pairs",
        cause: "codes whose bytes hold the halves of a block, as GGUF has them, were written as neighbouring pairs",
        cure: "pack the codes again in the convention's order",
    },
    Entry {
        alternative: Alternative::RowsApart,
        name: "q and k rows apart",
        cause: "rows of q and k are interleaved, as GGUF's llama has them, in a file that should have Hugging Face's order",
        cure: "convert again with the permutation undone",
    },
    Entry {
        alternative: Alternative::RowsInterleaved,
        name: "q and k rows interleaved",
        cause: "a GGUF file of the llama architecture was written without the permutation of q and k",
        cure: "convert again with the permutation of the architecture",
    },
    Entry {
        alternative: Alternative::GlobalReciprocal,
        name: "1 / global scale",
        cause: "the global scale is stored as a multiplier where the convention has the divisor, or the other way",
        cure: "store the reciprocal",
    },
    Entry {
        alternative: Alternative::GlobalSwapped,
        name: "global scales of gate and up swapped",
        cause: "the global scales of gate and up stand in each other's place",
        cure: "swap them",
    },
    Entry {
        alternative: Alternative::InputReciprocal,
        name: "1 / input scale",
        cause: "the stored scale of the inputs is a multiplier where the convention has the divisor, or the other way",
        cure: "store the reciprocal",
    },
    Entry {
        alternative: Alternative::ScaleReciprocal,
        name: "1 / block scales",
        cause: "block scales are stored as reciprocals (a name ending in _inv does not mean that they are)",
        cure: "store the multipliers",
    },
    Entry {
        alternative: Alternative::ScalesTransposed,
        name: "block scales transposed",
        cause: "block scales were written group by group instead of row by row",
        cure: "transpose them",
    },
    Entry {
        alternative: Alternative::GateUpSwapped,
        name: "gate and up swapped",
        cause: "gate and up stand in each other's place, as where a fused weight was cut in the wrong order",
        cure: "swap the two tensors",
    },
    Entry {
        alternative: Alternative::NormPlusOne,
        name: "norms + 1",
        cause: "norms are stored less one (Gemma's way) for an architecture that multiplies with them as they are",
        cure: "add 1 to every norm",
    },
    Entry {
        alternative: Alternative::NormMinusOne,
        name: "norms - 1",
        cause: "norms are stored plus one for an architecture that adds 1 itself",
        cure: "subtract 1 from every norm",
    },
    Entry {
        alternative: Alternative::OtherBos,
        name: "the other BOS",
        cause: "the tokenizer puts a beginning-of-sequence token where the model was trained without, or leaves it out",
        cure: "set add_bos_token in tokenizer_config.json (tokenizer.ggml.add_bos_token in GGUF)",
    },
];

/// The layers that an alternative must change together, where not all of them share a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unit {
    /// Each by itself.
    Linear,
    /// q and k: their products keep their values when both are permuted.
    Rotated,
    /// gate and up.
    Joined,
    /// Norms, which stand outside linear layers.
    Norms,
    /// The text.
    Text,
}

impl Alternative {
    /// What changes together.
    pub(super) fn unit(self) -> Unit {
        match self {
            Alternative::RowsApart | Alternative::RowsInterleaved => Unit::Rotated,
            Alternative::GateUpSwapped | Alternative::GlobalSwapped => Unit::Joined,
            Alternative::NormPlusOne | Alternative::NormMinusOne => Unit::Norms,
            Alternative::OtherBos => Unit::Text,
            _ => Unit::Linear,
        }
    }

    /// What is known of it.
    pub fn entry(self) -> &'static Entry {
        let found = ALTERNATIVES.iter().find(|entry| entry.alternative == self);
        found.unwrap_or(&ALTERNATIVES[0])
    }

    /// The alternative of this name.
    pub(super) fn named(name: &str) -> Option<Self> {
        ALTERNATIVES.iter().find(|entry| entry.name == name).map(|entry| entry.alternative)
    }

    /// Whether it changes norms instead of linear layers, and by how much.
    pub(super) fn of_norms(self) -> Option<f32> {
        match self {
            Alternative::NormPlusOne => Some(1.0),
            Alternative::NormMinusOne => Some(-1.0),
            _ => None,
        }
    }
}

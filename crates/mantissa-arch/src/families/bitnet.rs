//! BitNet b1.58.

use super::llama::{LLAMA, ROPE};
use crate::architecture::Architecture;
use crate::family::Family;
use crate::gguf;
use crate::rules::{BiasRules, RopeRules};

/// Rows of the family.
pub(super) static FAMILY: Family = Family {
    models: &[
        // BitNet b1.58: norms before the output and the down projection, ternary weights.
        Architecture {
            name: "bitnet",
            class: "BitNetForCausalLM",
            biases: BiasRules::ATTENTION,
            activation: "relu2",
            sub_norms: true,
            ternary: true,
            rope: RopeRules { theta: 500_000.0, ..ROPE },
            ..LLAMA
        },
    ],
    gguf: &[
        // llama.cpp has SiLU where the file does not say otherwise.
        gguf::Architecture {
            name: "bitnet",
            model_types: &["bitnet"],
            other_activation: Some("relu2"),
            weight_factors: true,
            tied: gguf::Presence::Required,
            ..gguf::PLAIN
        },
    ],
    wrappers: &[],
};

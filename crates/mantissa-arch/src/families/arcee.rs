//! Arcee (AFM).

use super::llama::LLAMA;
use crate::architecture::Architecture;
use crate::family::Family;
use crate::features::MlpForm;
use crate::gguf;

/// Rows of the family.
pub(super) static FAMILY: Family = Family {
    models: &[
        // Arcee (AFM): squared ReLU, no gate.
        Architecture {
            name: "arcee",
            class: "ArceeForCausalLM",
            activation: "relu2",
            mlp: MlpForm::Plain,
            ..LLAMA
        },
    ],
    gguf: &[gguf::Architecture {
        name: "arcee",
        model_types: &["arcee"],
        activation: "relu2",
        rows: gguf::Rows::Interleaved,
        biases: &[gguf::ATTENTION_BIAS, gguf::Bias { tensors: &["ffn_up", "ffn_down"], ..gguf::MLP_BIAS }],
        rope_factors: true,
        ..gguf::PLAIN
    }],
    wrappers: &[],
};

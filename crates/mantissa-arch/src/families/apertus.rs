//! Apertus (Swiss AI).

use super::llama::{LLAMA, ROPE};
use crate::architecture::Architecture;
use crate::family::Family;
use crate::features::{Activation, HeadNorms, MlpForm};
use crate::gguf;
use crate::kinds::{NormKind, VectorKind, XieluPart};
use crate::names::{MixerNames, Names};
use crate::rules::{BiasRules, Eps, RopeRules};

/// Rows of the family.
pub(super) static FAMILY: Family = Family {
    models: &[
        // xIELU with parameters for each layer, no gate, QK norms.
        Architecture {
            name: "apertus",
            class: "ApertusForCausalLM",
            names: Names {
                norms: &[(NormKind::Input, "attention_layernorm"), (NormKind::Post, "feedforward_layernorm")],
                mixer: MixerNames { sides: &[], vectors: XIELU_NAMES },
                ..Names::LLAMA
            },
            eps: Eps::Default(1e-5),
            head_norms: HeadNorms::Each,
            activation: Activation::Xielu,
            mlp: MlpForm::Plain,
            biases: BiasRules::ATTENTION,
            // No default matches the published models, which scale the rotation.
            rope: RopeRules { theta: 12_000_000.0, required: true, ..ROPE },
            ..LLAMA
        },
    ],
    gguf: &[gguf::Architecture {
        name: "apertus",
        model_types: &["apertus"],
        activation: "xielu",
        own_names: &[("attention_layernorm", "attn_norm"), ("feedforward_layernorm", "ffn_norm")],
        listed: &["xielu.alpha_p", "xielu.alpha_n", "xielu.beta", "xielu.eps"],
        biases: &[gguf::ATTENTION_BIAS],
        rope_factors: true,
        ..gguf::PLAIN
    }],
    wrappers: &[],
};

/// Names of the parameters of xIELU.
const XIELU_NAMES: &[(VectorKind, &str)] = &[
    (VectorKind::Xielu(XieluPart::Positive), "mlp.act_fn.alpha_p"),
    (VectorKind::Xielu(XieluPart::Negative), "mlp.act_fn.alpha_n"),
    (VectorKind::Xielu(XieluPart::Slope), "mlp.act_fn.beta"),
    (VectorKind::Xielu(XieluPart::Eps), "mlp.act_fn.eps"),
];

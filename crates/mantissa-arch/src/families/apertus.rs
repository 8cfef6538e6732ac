//! Apertus (Swiss AI).

use super::llama::{LLAMA, ROPE};
use crate::architecture::Architecture;
use crate::family::Family;
use crate::features::{HeadNorms, MlpForm};
use crate::gguf;
use crate::kinds::{NormKind, VectorKind};
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
            activation: "xielu",
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
        own_names: &[
            ("attention_layernorm", "attn_norm"),
            ("feedforward_layernorm", "ffn_norm"),
            ("mlp.act_fn.alpha_p", "xielu.alpha_p"),
            ("mlp.act_fn.alpha_n", "xielu.alpha_n"),
            ("mlp.act_fn.beta", "xielu.beta"),
            ("mlp.act_fn.eps", "xielu.eps"),
        ],
        listed: &["xielu.alpha_p", "xielu.alpha_n", "xielu.beta", "xielu.eps"],
        biases: &[gguf::ATTENTION_BIAS],
        rope_factors: true,
        ..gguf::PLAIN
    }],
    wrappers: &[],
};

/// Names of the parameters of xIELU.
const XIELU_NAMES: &[(VectorKind, &str)] = &[
    (VectorKind::Activation("alpha_p"), "mlp.act_fn.alpha_p"),
    (VectorKind::Activation("alpha_n"), "mlp.act_fn.alpha_n"),
    (VectorKind::Activation("beta"), "mlp.act_fn.beta"),
    (VectorKind::Activation("eps"), "mlp.act_fn.eps"),
];

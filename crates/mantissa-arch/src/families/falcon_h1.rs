//! Falcon-H1.

use super::granite::{GGUF_STATE_SPACE, GRANITE_MIXER_NAMES};
use super::llama::LLAMA;
use crate::architecture::Architecture;
use crate::family::Family;
use crate::gguf::{self, Stated};
use crate::kinds::{LinearKind, NormKind};
use crate::names::Names;
use crate::rules::{BiasRules, Eps, LogitScale, ScaleRules};

/// Rows of the family.
pub(super) static FAMILY: Family = Family {
    models: &[
        // Falcon-H1: Mamba-2 and attention on the same input in every layer, constant factors.
        Architecture {
            name: "falcon_h1",
            class: "FalconH1ForCausalLM",
            fixed_flags: &[
                ("attention_bias", false),
                ("mlp_bias", false),
                ("mamba_proj_bias", false),
                ("projectors_bias", false),
            ],
            names: FALCON_H1_NAMES,
            eps: Eps::Default(1e-5),
            biases: BiasRules::NONE,
            scales: Some(ScaleRules {
                embedding: Some("embedding_multiplier"),
                residual: None,
                attention: None,
                logits: Some(LogitScale { field: "lm_head_multiplier", default: 1.0, divides: false }),
            }),
            multipliers: true,
            recurrent: Some("parallel state space"),
            ..LLAMA
        },
    ],
    gguf: &[
        // Constant factors are multiplied into the weights of a file.
        gguf::Architecture {
            name: "falcon-h1",
            model_types: &["falcon_h1"],
            own_names: &[("pre_ff_layernorm.weight", "ffn_norm")],
            recurrence: Some(gguf::Recurrence {
                layers: gguf::MixerLayers::Every,
                types: gguf::LayerTypes::None,
                fields: &[
                    GGUF_STATE_SPACE,
                    &[
                        ("mamba_d_ssm", Stated::Size("ssm.inner_size")),
                        ("mamba_rms_norm", Stated::Tensor("ssm_norm.weight")),
                        // llama.cpp norms after the gate.
                        ("mamba_norm_before_gate", Stated::Fixed(gguf::Fixed::Flag(false))),
                    ],
                ],
                ..gguf::Recurrence::PLAIN
            }),
            columns_of_heads: true,
            ..gguf::PLAIN
        },
    ],
    wrappers: &[],
};

/// Names of Falcon-H1.
pub(super) const FALCON_H1_NAMES: Names = Names {
    final_norm: "model.final_layernorm",
    norms: &[(NormKind::Post, "pre_ff_layernorm")],
    linears: &[
        (LinearKind::Gate, "feed_forward.gate_proj"),
        (LinearKind::Up, "feed_forward.up_proj"),
        (LinearKind::Down, "feed_forward.down_proj"),
        (LinearKind::MixIn, "mamba.in_proj"),
        (LinearKind::MixOut, "mamba.out_proj"),
    ],
    mixer: GRANITE_MIXER_NAMES,
    ..Names::LLAMA
};

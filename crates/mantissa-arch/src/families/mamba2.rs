//! Mamba-2 (Dao & Gu 2024).

use super::granite::{GGUF_EXPANSION, GGUF_STATE_SPACE};
use super::llama::{LLAMA, ROPE};
use super::nemotron_h::NEMOTRON_H_NAMES;
use crate::architecture::Architecture;
use crate::family::Family;
use crate::gguf::{self, Stated};
use crate::rules::{BiasRules, Eps, NoRope, RopeRules};

/// Rows of the family.
pub(super) static FAMILY: Family = Family {
    models: &[
        // Every layer is a Mamba-2 mixer: no attention, no MLP, no limit of the context. Configs of state-spaces, with
        // `d_model` and `n_layer`, are not read: transformers converts them.
        Architecture {
            name: "mamba2",
            class: "Mamba2ForCausalLM",
            aliases: &[
                ("rms_norm_eps", "layer_norm_epsilon"),
                ("mamba_n_heads", "num_heads"),
                ("mamba_d_head", "head_dim"),
                ("mamba_n_groups", "n_groups"),
                ("mamba_d_state", "state_size"),
                ("mamba_d_conv", "conv_kernel"),
                ("mamba_expand", "expand"),
                ("mamba_conv_bias", "use_conv_bias"),
                ("mamba_proj_bias", "use_bias"),
                // `head_dim` is the width of a mixer's head; there are no others.
                ("head_dim", "attention_head_dim"),
            ],
            // The context is the one that llama.cpp's converter states.
            defaults: &[
                ("max_position_embeddings", 1 << 20),
                ("num_attention_heads", 1),
                ("head_dim", 2),
                ("intermediate_size", 0),
            ],
            names: NEMOTRON_H_NAMES,
            eps: Eps::Default(1e-5),
            biases: BiasRules::NONE,
            rope: RopeRules { no_rope: NoRope::All, ..ROPE },
            recurrent: Some("state space alone"),
            ..LLAMA
        },
    ],
    gguf: &[gguf::Architecture {
        name: "mamba2",
        model_types: &["mamba2"],
        renamed: &[("rms_norm_eps", "layer_norm_epsilon")],
        biases: &[],
        unrotated: gguf::Unrotated::All,
        recurrence: Some(gguf::Recurrence {
            layers: gguf::MixerLayers::Every,
            types: gguf::LayerTypes::None,
            fields: &[
                // There are none: the file has 0.
                &[
                    ("num_attention_heads", Stated::Removed),
                    ("num_key_value_heads", Stated::Removed),
                    ("intermediate_size", Stated::Removed),
                ],
                GGUF_STATE_SPACE,
                GGUF_EXPANSION,
            ],
            doubled: true,
            ..gguf::Recurrence::PLAIN
        }),
        columns_of_heads: true,
        ..gguf::PLAIN
    }],
    wrappers: &[],
};

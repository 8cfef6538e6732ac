//! GPT-2.

use super::llama::LLAMA;
use crate::architecture::Architecture;
use crate::family::Family;
use crate::features::{MlpForm, NormForm, QkvForm};
use crate::gguf;
use crate::kinds::{LinearKind, NormKind};
use crate::names::Names;
use crate::rules::{BiasRules, Eps, FeedForward, Flag, HeadDim};

/// Rows of the family.
pub(super) static FAMILY: Family = Family {
    models: &[
        // GPT-2: learned positions, joined projections stored `[in, out]`.
        Architecture {
            name: "gpt2",
            class: "GPT2LMHeadModel",
            aliases: &[
                ("hidden_size", "n_embd"),
                ("num_hidden_layers", "n_layer"),
                ("num_attention_heads", "n_head"),
                ("intermediate_size", "n_inner"),
                ("max_position_embeddings", "n_positions"),
                ("rms_norm_eps", "layer_norm_epsilon"),
                ("hidden_act", "activation_function"),
            ],
            fixed_flags: &[
                ("scale_attn_weights", true),
                ("scale_attn_by_inverse_layer_idx", false),
                ("add_cross_attention", false),
            ],
            names: GPT2_NAMES,
            tied: true,
            norm: NormForm::Layer,
            eps: Eps::Default(1e-5),
            activation: "gelu_pytorch_tanh",
            head_dim: HeadDim::Divided,
            feed_forward: FeedForward::Multiple(4),
            qkv: QkvForm::Joined,
            mlp: MlpForm::Plain,
            biases: BiasRules::all(Flag::Fixed(true)),
            learned_positions: true,
            conv1d: true,
            ..LLAMA
        },
    ],
    gguf: &[gguf::Architecture {
        name: "gpt2",
        model_types: &["gpt2"],
        activation: "gelu_new",
        activation_field: "activation_function",
        renamed: &[
            ("hidden_size", "n_embd"),
            ("num_hidden_layers", "n_layer"),
            ("num_attention_heads", "n_head"),
            ("intermediate_size", "n_inner"),
            ("max_position_embeddings", "n_positions"),
            ("rms_norm_eps", "layer_norm_epsilon"),
        ],
        layer_norms: true,
        tensors: &["attn_qkv.weight"],
        biases: &[],
        ..gguf::PLAIN
    }],
    wrappers: &[],
};

/// Names of GPT-2.
pub(super) const GPT2_NAMES: Names = Names {
    root: "transformer.",
    embedding: "wte",
    positions: "wpe",
    final_norm: "ln_f",
    layers: "h.",
    attention: "attn",
    norms: &[(NormKind::Input, "ln_1"), (NormKind::Post, "ln_2")],
    linears: &[
        (LinearKind::Qkv, "attn.c_attn"),
        (LinearKind::O, "attn.c_proj"),
        (LinearKind::Up, "mlp.c_fc"),
        (LinearKind::Down, "mlp.c_proj"),
    ],
    ..Names::LLAMA
};

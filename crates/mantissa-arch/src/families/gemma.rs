//! Gemma 1 to 3.

use super::llama::{LLAMA, LLAVA_WRAPPER, ROPE};
use crate::architecture::Architecture;
use crate::family::Family;
use crate::features::{HeadNorms, NormForm, NormPlaces};
use crate::gguf;
use crate::kinds::NormKind;
use crate::names::Names;
use crate::rules::{BiasRules, Eps, HeadDim, QueryScale, RopeRules, Softcaps, Windows};
use crate::wrapper::Wrapper;

/// Rows of the family.
pub(super) static FAMILY: Family = Family {
    models: &[
        GEMMA,
        GEMMA2,
        // Gemma 3 (text): as Gemma 2 without default caps; QK norms, rotary parameters of its own for layers with a window.
        Architecture {
            name: "gemma3_text",
            class: "Gemma3ForCausalLM",
            head_norms: HeadNorms::Each,
            softcaps: Some(Softcaps { attention: None, logits: None }),
            windows: Windows::ButLast {
                fields: &["sliding_window_pattern", "_sliding_window_pattern"],
                default: 6,
            },
            rope: RopeRules { theta: 1_000_000.0, local_theta: Some(10_000.0), ..ROPE },
            ..GEMMA2
        },
    ],
    gguf: &[
        GGUF_GEMMA,
        gguf::Architecture {
            name: "gemma2",
            model_types: &["gemma2"],
            keys: &["attn_logit_softcapping", "final_logit_softcapping"],
            windows: gguf::Windows::Periodic { period: 2, stated: true, only_with: None },
            wide_scale: Some(46),
            ..GGUF_GEMMA2
        },
        gguf::Architecture {
            name: "gemma3",
            model_types: &["gemma3_text"],
            keys: &["final_logit_softcapping"],
            windows: gguf::Windows::Periodic { period: 6, stated: true, only_with: None },
            wide_scale: Some(62),
            local_theta: gguf::LocalTheta::Default(10_000.0),
            ..GGUF_GEMMA2
        },
    ],
    wrappers: &[
        // Fields that google's configs leave out are those of `Gemma3TextConfig`.
        Wrapper {
            name: "gemma3",
            class: "Gemma3ForConditionalGeneration",
            text_models: &[("gemma3_text", "gemma3_text")],
            defaults: &[
                ("vocab_size", 262_208),
                ("hidden_size", 2304),
                ("intermediate_size", 9216),
                ("num_hidden_layers", 26),
                ("num_attention_heads", 8),
                ("num_key_value_heads", 4),
                ("max_position_embeddings", 131_072),
            ],
            tied: true,
            ..LLAVA_WRAPPER
        },
    ],
};

/// Names of Gemma 2 and 3.
pub(super) const GEMMA2_NAMES: Names =
    Names { norms: &[(NormKind::Post, "pre_feedforward_layernorm")], ..Names::LLAMA };

/// Gemma: scaled embedding, norms that add 1 to their weights, GELU.
pub(super) const GEMMA: Architecture = Architecture {
    name: "gemma",
    class: "GemmaForCausalLM",
    fixed_flags: &[("use_bidirectional_attention", false)],
    tied: true,
    norm: NormForm::RmsPlusOne,
    eps: Eps::Default(1e-6),
    activation: "gelu_pytorch_tanh",
    gelu_is_tanh: true,
    head_dim: HeadDim::Default(256),
    biases: BiasRules::ATTENTION,
    scaled_embedding: true,
    ..LLAMA
};

/// Gemma 2: norms before and after attention and MLP, capped scores and logits, a window on every other layer.
pub(super) const GEMMA2: Architecture = Architecture {
    name: "gemma2",
    class: "Gemma2ForCausalLM",
    aliases: &[("hidden_act", "hidden_activation")],
    names: GEMMA2_NAMES,
    norm_places: NormPlaces::Both,
    gelu_is_tanh: false,
    windows: Windows::Even,
    default_window: Some(4096),
    query_scale: QueryScale::Field("query_pre_attn_scalar", 256.0),
    softcaps: Some(Softcaps { attention: Some(50.0), logits: Some(30.0) }),
    ..GEMMA
};

/// Gemma: norms hold 1 plus the weight.
pub(super) const GGUF_GEMMA: gguf::Architecture = gguf::Architecture {
    name: "gemma",
    model_types: &["gemma"],
    activation: "gelu_pytorch_tanh",
    norms_plus_one: true,
    ..gguf::PLAIN
};

/// Gemma 2 and 3.
pub(super) const GGUF_GEMMA2: gguf::Architecture =
    gguf::Architecture { activation_field: "hidden_activation", post_attention_norm: true, ..GGUF_GEMMA };

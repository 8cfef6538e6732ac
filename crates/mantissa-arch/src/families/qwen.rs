//! Qwen2 and Qwen3, dense and with experts, and the vision models around them.

use super::llama::LLAMA;
use super::mistral::EXPERTS;
use crate::architecture::Architecture;
use crate::family::Family;
use crate::features::HeadNorms;
use crate::gguf;
use crate::rules::{BiasRules, ExpertLayers, ExpertRules, Flag, HeadDim, SharedRules, Windows};
use crate::stack::StackForm;
use crate::wrapper::{TextPlace, Wrapper};

/// Rows of the family.
pub(super) static FAMILY: Family = Family {
    models: &[
        QWEN2,
        // QK norms.
        Architecture {
            name: "qwen3",
            class: "Qwen3ForCausalLM",
            biases: BiasRules::ATTENTION,
            head_norms: HeadNorms::Each,
            head_dim: HeadDim::IfAbsent(128),
            ..QWEN2
        },
        // Qwen1.5-MoE and Qwen2-MoE: a shared expert with a gate.
        Architecture {
            name: "qwen2_moe",
            class: "Qwen2MoeForCausalLM",
            biases: BiasRules { qkv: Flag::Field("qkv_bias", true), ..BiasRules::NONE },
            experts: Some(ExpertRules { shared: SharedRules::Gated, ..QWEN_EXPERTS }),
            ..QWEN_MOE
        },
        Architecture {
            name: "qwen3_moe",
            class: "Qwen3MoeForCausalLM",
            head_norms: HeadNorms::Each,
            ..QWEN_MOE
        },
    ],
    gguf: &[
        gguf::Architecture {
            name: "qwen2",
            model_types: &["qwen2"],
            biases: &[
                gguf::Bias { tensors: gguf::QKV, presence: gguf::Presence::Optional, ..gguf::ATTENTION_BIAS },
                gguf::MLP_BIAS,
            ],
            ..gguf::PLAIN
        },
        gguf::Architecture {
            name: "qwen2moe",
            model_types: &["qwen2_moe"],
            biases: &[
                gguf::Bias { field: "qkv_bias", tensors: gguf::QKV, presence: gguf::Presence::Optional },
                gguf::Bias { tensors: &["attn_output"], ..gguf::ATTENTION_BIAS },
                gguf::MLP_BIAS,
            ],
            experts: gguf::Experts::Every {
                count: "num_experts",
                width: "moe_intermediate_size",
                normalized: Some(false),
                shared: Some("shared_expert_intermediate_size"),
            },
            ..gguf::PLAIN
        },
        gguf::Architecture { name: "qwen3", model_types: &["qwen3"], ..gguf::PLAIN },
        gguf::Architecture {
            name: "qwen3moe",
            model_types: &["qwen3_moe"],
            experts: gguf::Experts::Every {
                count: "num_experts",
                width: "moe_intermediate_size",
                normalized: Some(true),
                shared: None,
            },
            ..gguf::PLAIN
        },
    ],
    wrappers: &[
        // The published configs have the text model's fields outside.
        Wrapper {
            name: "qwen2_5_vl",
            class: "Qwen2_5_VLForConditionalGeneration",
            text_models: &[("qwen2_5_vl_text", "qwen2"), ("qwen2_5_vl", "qwen2")],
            places: &[TextPlace::PLAIN, TextPlace::BESIDE],
            ..QWEN3_VL_WRAPPER
        },
        QWEN3_VL_WRAPPER,
        Wrapper {
            name: "qwen3_vl_moe",
            class: "Qwen3VLMoeForConditionalGeneration",
            text_models: &[("qwen3_vl_moe_text", "qwen3_moe")],
            defaults: &[("norm_topk_prob", 1)],
            fused: Some(StackForm::Columns),
            ..QWEN3_VL_WRAPPER
        },
    ],
};

/// Qwen2 and Qwen2.5: biases on q, k and v.
pub(super) const QWEN2: Architecture = Architecture {
    name: "qwen2",
    class: "Qwen2ForCausalLM",
    biases: BiasRules { qkv: Flag::Fixed(true), ..BiasRules::NONE },
    windows: Windows::Late,
    default_window: Some(4096),
    ..LLAMA
};

/// Experts of the Qwen mixtures; transformers 5 writes the alias.
pub(super) const QWEN_EXPERTS: ExpertRules = ExpertRules {
    count: "num_experts",
    count_alias: Some("num_local_experts"),
    width: "moe_intermediate_size",
    layers: ExpertLayers::Sparse,
    normalize: Flag::Field("norm_topk_prob", false),
    ..EXPERTS
};

/// The Qwen mixtures.
pub(super) const QWEN_MOE: Architecture = Architecture {
    fixed_flags: &[("use_sliding_window", false)],
    biases: BiasRules::ATTENTION,
    experts: Some(QWEN_EXPERTS),
    ..LLAMA
};

pub(super) const QWEN_TOWERS: &[&str] = &["visual", "model.visual"];

/// Qwen3-VL. Text has the same position in all three dimensions of its rotation, which makes it the plain one.
pub(super) const QWEN3_VL_WRAPPER: Wrapper = Wrapper {
    name: "qwen3_vl",
    class: "Qwen3VLForConditionalGeneration",
    towers: QWEN_TOWERS,
    text_models: &[("qwen3_vl_text", "qwen3")],
    defaults: &[],
    places: &[TextPlace::BESIDE],
    tied: false,
    fused: None,
};

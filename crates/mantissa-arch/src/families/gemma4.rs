//! Gemma 4.

use super::gemma::{GEMMA2, GEMMA2_NAMES, GGUF_GEMMA2};
use super::llama::ROPE;
use super::mistral::EXPERTS;
use super::qwen::QWEN3_VL_WRAPPER;
use crate::architecture::Architecture;
use crate::attention::AttentionRules;
use crate::family::Family;
use crate::features::{DenseMlp, HeadNorms, NormForm};
use crate::gguf;
use crate::names::{ExpertNames, Names};
use crate::rules::{ByLayer, ExpertRules, QueryScale, RopeRules, Softcaps, Windows};
use crate::wrapper::Wrapper;

/// Rows of the family.
pub(super) static FAMILY: Family = Family {
    models: &[
        // Gemma 4 (text): QK and value norms, unscaled scores, wider heads in layers without a window, keys and values shared
        // by later layers, embeddings for each layer, experts beside the MLP.
        Architecture {
            name: "gemma4_text",
            class: "Gemma4ForCausalLM",
            aliases: &[("hidden_act", "hidden_activation"), ("num_experts_per_tok", "top_k_experts")],
            fixed_flags: &[],
            names: Names { experts: GEMMA4_EXPERT_NAMES, ..GEMMA2_NAMES },
            // Text is causal with "vision" too.
            only: &[("use_bidirectional_attention", &["vision"])],
            norm: NormForm::Rms,
            head_norms: HeadNorms::Each,
            attention: AttentionRules { value_norm: true, ..AttentionRules::PLAIN },
            by_layer: ByLayer {
                global_heads: Some(512),
                shared_kv: Some(0),
                inputs: true,
                scales: true,
                ..ByLayer::NONE
            },
            softcaps: Some(Softcaps { attention: None, logits: None }),
            windows: Windows::ButEnd(6),
            default_window: Some(512),
            query_scale: QueryScale::One,
            rope: RopeRules { theta: 1_000_000.0, local_theta: Some(10_000.0), required: true, ..ROPE },
            experts: Some(ExpertRules {
                count: "num_experts",
                width: "moe_intermediate_size",
                enabled: Some("enable_moe_block"),
                dense: DenseMlp::Normed,
                published_fused: true,
                ..EXPERTS
            }),
            ..GEMMA2
        },
    ],
    gguf: &[
        // Norms without the 1. The divisors of frequencies are those of layers without a window, of which a part of the head is
        // not rotated; a layer without a projection to values takes its keys.
        gguf::Architecture {
            name: "gemma4",
            model_types: &["gemma4_text"],
            norms_plus_one: false,
            keys: &["final_logit_softcapping"],
            own_scales: &["ffn_gate_inp.scale", "ffn_down_exps.scale"],
            biases: &[gguf::ATTENTION_BIAS],
            rope_factors: true,
            windows: gguf::Windows::Listed { period: 6 },
            local_theta: gguf::LocalTheta::Default(10_000.0),
            by_layer: true,
            merged_tokens: true,
            unscaled: true,
            experts: gguf::Experts::Beside {
                enabled: "enable_moe_block",
                count: "num_experts",
                used: "top_k_experts",
                width: "moe_intermediate_size",
            },
            joined_experts: true,
            ..GGUF_GEMMA2
        },
    ],
    wrappers: &[Wrapper {
        name: "gemma4",
        class: "Gemma4ForConditionalGeneration",
        towers: &["model.vision_tower", "model.embed_vision", "model.audio_tower", "model.embed_audio"],
        text_models: &[("gemma4_text", "gemma4_text")],
        tied: true,
        ..QWEN3_VL_WRAPPER
    }],
};

/// Names of Gemma 4.
pub(super) const GEMMA4_EXPERT_NAMES: ExpertNames = ExpertNames {
    experts: "experts.",
    fused: ["experts.gate_up_proj", "experts.down_proj"],
    router: "router.proj",
    ..ExpertNames::QWEN
};

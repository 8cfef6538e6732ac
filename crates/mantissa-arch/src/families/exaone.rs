//! EXAONE 4.0 and K-EXAONE.

use super::deepseek::{DEEPSEEK_EXPERT_NAMES, DEEPSEEK_V3_EXPERTS};
use super::llama::{LLAMA, ROPE};
use crate::architecture::Architecture;
use crate::family::Family;
use crate::features::{HeadNorms, NormPlaces};
use crate::gguf;
use crate::names::{ExpertNames, Names};
use crate::rules::{BiasRules, ExpertLayers, ExpertRules, NoRope, RopeRules, SharedRules, Windows};

/// Rows of the family.
pub(super) static FAMILY: Family = Family {
    models: &[
        // EXAONE 4.0: norms after attention and MLP, QK norms, windows; layers without a window have no position embedding.
        Architecture {
            name: "exaone4",
            class: "Exaone4ForCausalLM",
            norm_places: NormPlaces::After,
            head_norms: HeadNorms::Each,
            biases: BiasRules::NONE,
            windows: Windows::ButLast { fields: &["sliding_window_pattern"], default: 4 },
            default_window: Some(4096),
            rope: RopeRules { no_rope: NoRope::FullAttention, ..ROPE },
            ..LLAMA
        },
        // K-EXAONE: as EXAONE 4.0 with norms before attention and MLP, and the routing of DeepSeek-V3.
        Architecture {
            name: "exaone_moe",
            class: "ExaoneMoeForCausalLM",
            names: Names { experts: EXAONE_EXPERT_NAMES, ..Names::LLAMA },
            head_norms: HeadNorms::Each,
            biases: BiasRules::NONE,
            windows: Windows::ButLast { fields: &["sliding_window_pattern"], default: 4 },
            default_window: Some(4096),
            rope: RopeRules { no_rope: NoRope::FullAttention, ..ROPE },
            experts: Some(ExpertRules {
                count: "num_experts",
                count_alias: Some("n_routed_experts"),
                layers: ExpertLayers::Listed(1),
                shared: SharedRules::Counted("num_shared_experts"),
                ..DEEPSEEK_V3_EXPERTS
            }),
            ..LLAMA
        },
    ],
    gguf: &[
        // Only a model of 64 layers (32B) has windows; the others are rotated in every layer.
        gguf::Architecture {
            name: "exaone4",
            model_types: &["exaone4"],
            post_attention_norm: true,
            biases: &[],
            heads_fill_width: true,
            unrotated: gguf::Unrotated::WithoutWindow,
            rope_factors: true,
            windows: gguf::Windows::Periodic { period: 4, stated: true, only_with: Some(64) },
            ..gguf::PLAIN
        },
        // The graph rotates layers with a window only. The loader requires a head.
        gguf::Architecture {
            name: "exaone-moe",
            model_types: &["exaone_moe"],
            tensors: &["exp_probs_b.bias"],
            keys: &["expert_gating_func", "expert_weights_scale", "leading_dense_block_count"],
            tied: gguf::Presence::Absent,
            biases: &[],
            unrotated: gguf::Unrotated::NotWindowed,
            rope_factors: true,
            windows: gguf::Windows::Listed { period: 4 },
            experts: gguf::Experts::Routed {
                count: "num_experts",
                used: "num_experts_per_tok",
                width: "moe_intermediate_size",
                first: Some("first_k_dense_replace"),
                shared: Some("num_shared_experts"),
                sigmoid: true,
                scaled: true,
                stepped: false,
            },
            ..gguf::PLAIN
        },
    ],
    wrappers: &[],
};

/// Names of EXAONE-MoE.
pub(super) const EXAONE_EXPERT_NAMES: ExpertNames =
    ExpertNames { correction: "mlp.e_score_correction_bias", ..DEEPSEEK_EXPERT_NAMES };

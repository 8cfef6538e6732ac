//! MiniMax-M2.

use super::llama::{LLAMA, ROPE};
use super::mistral::{EXPERTS, MIXTRAL_EXPERT_NAMES};
use crate::architecture::Architecture;
use crate::family::Family;
use crate::features::{HeadNorms, Scores};
use crate::gguf;
use crate::names::Names;
use crate::rules::{BiasRules, ExpertRules, HeadDim, RopeRules};

/// Rows of the family.
pub(super) static FAMILY: Family = Family {
    models: &[
        // MiniMax-M2: sigmoid scores with corrections, one QK norm for all heads, partial rotation.
        Architecture {
            name: "minimax_m2",
            class: "MiniMaxM2ForCausalLM",
            fixed_flags: &[("use_qk_norm", true), ("use_routing_bias", true)],
            names: Names { experts: MIXTRAL_EXPERT_NAMES, ..Names::LLAMA },
            head_norms: HeadNorms::Whole,
            biases: BiasRules::NONE,
            head_dim: HeadDim::IfAbsent(128),
            rope: RopeRules { theta: 5_000_000.0, partial: Some(1.0), ..ROPE },
            experts: Some(ExpertRules {
                scores: Scores::Sigmoid,
                correction: true,
                only: &[("scoring_func", &["sigmoid"]), ("qk_norm_type", &["per_layer"])],
                ..EXPERTS
            }),
            ..LLAMA
        },
    ],
    gguf: &[gguf::Architecture {
        name: "minimax-m2",
        model_types: &["minimax_m2"],
        tensors: &["exp_probs_b.bias"],
        keys: &["expert_gating_func"],
        tied: gguf::Presence::Absent,
        biases: &[gguf::ATTENTION_BIAS],
        partial: Some("partial_rotary_factor"),
        experts: gguf::Experts::Routed {
            count: "num_local_experts",
            used: "num_experts_per_tok",
            width: "intermediate_size",
            first: None,
            shared: None,
            sigmoid: true,
            scaled: false,
            stepped: false,
        },
        ..gguf::PLAIN
    }],
    wrappers: &[],
};

//! ERNIE 4.5.

use super::deepseek::DEEPSEEK_EXPERT_NAMES;
use super::llama::{LLAMA, ROPE};
use super::mistral::EXPERTS;
use crate::architecture::Architecture;
use crate::family::Family;
use crate::gguf;
use crate::names::{ExpertNames, Names};
use crate::rules::{BiasRules, Eps, ExpertLayers, ExpertRules, Flag, HeadDim, RopeRules, SharedRules};

/// Rows of the family.
pub(super) static FAMILY: Family = Family {
    models: &[
        // ERNIE 4.5: rotated pairs are adjacent.
        Architecture {
            name: "ernie4_5",
            class: "Ernie4_5ForCausalLM",
            tied: true,
            eps: Eps::Default(1e-5),
            head_dim: HeadDim::IfAbsent(128),
            biases: BiasRules::all(Flag::Field("use_bias", false)),
            rope: RopeRules { theta: 500_000.0, interleaved: true, ..ROPE },
            ..LLAMA
        },
        // ERNIE 4.5 with experts: corrections of softmax scores, shared experts.
        Architecture {
            name: "ernie4_5_moe",
            class: "Ernie4_5_MoeForCausalLM",
            aliases: &[("num_experts_per_tok", "moe_k")],
            fixed_flags: &[("use_bias", false)],
            names: Names { experts: ERNIE_EXPERT_NAMES, ..Names::LLAMA },
            tied: true,
            eps: Eps::Default(1e-5),
            biases: BiasRules::NONE,
            rope: RopeRules { theta: 500_000.0, interleaved: true, ..ROPE },
            experts: Some(ExpertRules {
                count: "moe_num_experts",
                width: "moe_intermediate_size",
                layers: ExpertLayers::Range,
                shared: SharedRules::Counted("moe_num_shared_experts"),
                correction: true,
                correction_row: true,
                ..EXPERTS
            }),
            ..LLAMA
        },
    ],
    gguf: &[
        // Adjacent pairs are rotated, as in the source. The graph has no biases.
        gguf::Architecture {
            name: "ernie4_5",
            model_types: &["ernie4_5"],
            biases: &[
                gguf::Bias { field: "use_bias", ..gguf::ATTENTION_BIAS },
                gguf::Bias { field: "use_bias", ..gguf::MLP_BIAS },
            ],
            ..gguf::PLAIN
        },
        gguf::Architecture {
            name: "ernie4_5-moe",
            model_types: &["ernie4_5_moe"],
            tensors: &["exp_probs_b.bias"],
            keys: &["leading_dense_block_count"],
            biases: &[
                gguf::Bias { field: "use_bias", ..gguf::ATTENTION_BIAS },
                gguf::Bias { field: "use_bias", ..gguf::MLP_BIAS },
            ],
            experts: gguf::Experts::Routed {
                count: "moe_num_experts",
                used: "moe_k",
                width: "moe_intermediate_size",
                first: Some("moe_layer_start_index"),
                shared: Some("moe_num_shared_experts"),
                sigmoid: false,
                scaled: false,
                stepped: true,
            },
            ..gguf::PLAIN
        },
    ],
    wrappers: &[],
};

/// Names of ERNIE 4.5.
pub(super) const ERNIE_EXPERT_NAMES: ExpertNames =
    ExpertNames { correction: "mlp.moe_statics.e_score_correction_bias", ..DEEPSEEK_EXPERT_NAMES };

//! gpt-oss.

use super::llama::{ATTENTION_BIAS, LLAMA, ROPE};
use super::mistral::EXPERTS;
use crate::architecture::Architecture;
use crate::attention::AttentionRules;
use crate::family::Family;
use crate::features::Scores;
use crate::gguf;
use crate::names::{ExpertNames, Names};
use crate::rules::{BiasRules, ExpertRules, Flag, HeadDim, RopeRules, Windows};
use crate::stack::StackForm;

/// Rows of the family.
pub(super) static FAMILY: Family = Family {
    models: &[
        // gpt-oss: attention sinks, stacked experts with biases and a clamped SwiGLU.
        Architecture {
            name: "gpt_oss",
            class: "GptOssForCausalLM",
            names: Names { experts: GPT_OSS_EXPERT_NAMES, ..Names::LLAMA },
            head_dim: HeadDim::Default(64),
            biases: BiasRules { experts: true, ..ATTENTION_BIAS },
            windows: Windows::Even,
            default_window: Some(128),
            attention: AttentionRules { sinks: true, ..AttentionRules::PLAIN },
            rope: RopeRules { theta: 150_000.0, required: true, ..ROPE },
            experts: Some(ExpertRules {
                scores: Scores::SoftmaxOfChosen,
                normalize: Flag::Fixed(false),
                bias: true,
                swiglu: Some([1.702, 7.0, 1.0]),
                fused: StackForm::Interleaved,
                published_fused: true,
                ..EXPERTS
            }),
            ..LLAMA
        },
    ],
    gguf: &[gguf::Architecture {
        name: "gpt-oss",
        model_types: &["gpt_oss"],
        post_attention_norm: true,
        split: &[
            (
                "mlp.experts.gate_up_proj_bias",
                gguf::Split::Biases(&["ffn_gate_exps.bias", "ffn_up_exps.bias"]),
            ),
            ("mlp.experts.down_proj_bias", gguf::Split::Biases(&["ffn_down_exps.bias"])),
        ],
        tensors: &["ffn_gate_inp.bias", "attn_sinks.weight"],
        biases: &[gguf::Bias { presence: gguf::Presence::Required, ..gguf::ATTENTION_BIAS }, gguf::MLP_BIAS],
        tied: gguf::Presence::Absent,
        yarn: gguf::Yarn::Untruncated,
        windows: gguf::Windows::Periodic { period: 2, stated: false, only_with: None },
        experts: gguf::Experts::Every {
            count: "num_local_experts",
            width: "intermediate_size",
            normalized: None,
            shared: None,
        },
        swiglu: Some((1.702, 7.0)),
        ..gguf::PLAIN
    }],
    wrappers: &[],
};

/// Names of gpt-oss.
pub(super) const GPT_OSS_EXPERT_NAMES: ExpertNames =
    ExpertNames { router: "mlp.router", ..ExpertNames::QWEN };

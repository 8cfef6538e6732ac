//! Seed-OSS.

use super::llama::LLAMA;
use crate::architecture::Architecture;
use crate::family::Family;
use crate::gguf;
use crate::rules::{BiasRules, Flag, HeadDim};

/// Rows of the family.
pub(super) static FAMILY: Family = Family {
    models: &[
        // Seed-OSS: separate flags for the biases of q, k, v and of the output.
        Architecture {
            name: "seed_oss",
            class: "SeedOssForCausalLM",
            head_dim: HeadDim::IfAbsent(128),
            biases: BiasRules {
                qkv: Flag::Field("attention_bias", true),
                output: Flag::Field("attention_out_bias", false),
                ..LLAMA.biases
            },
            ..LLAMA
        },
    ],
    gguf: &[gguf::Architecture {
        name: "seed_oss",
        model_types: &["seed_oss"],
        post_attention_norm: true,
        biases: &[
            gguf::Bias { tensors: gguf::QKV, presence: gguf::Presence::Optional, ..gguf::ATTENTION_BIAS },
            gguf::Bias {
                field: "attention_out_bias",
                tensors: &["attn_output"],
                presence: gguf::Presence::Absent,
            },
            gguf::MLP_BIAS,
        ],
        ..gguf::PLAIN
    }],
    wrappers: &[],
};

//! HunYuan (Tencent), dense.

use super::llama::{LLAMA, ROPE};
use crate::architecture::Architecture;
use crate::family::Family;
use crate::features::HeadNorms;
use crate::gguf;
use crate::kinds::NormKind;
use crate::names::Names;
use crate::rules::{BiasRules, Eps, RopeRules};

/// Rows of the family.
pub(super) static FAMILY: Family = Family {
    models: &[
        // QK norms after RoPE, whose base `alpha` stretches. Beyond the trained context the base stays the same.
        Architecture {
            name: "hunyuan_v1_dense",
            class: "HunYuanDenseV1ForCausalLM",
            names: Names {
                norms: &[
                    (NormKind::Query, "self_attn.query_layernorm"),
                    (NormKind::Key, "self_attn.key_layernorm"),
                ],
                ..Names::LLAMA
            },
            eps: Eps::Default(1e-5),
            head_norms: HeadNorms::Rotated,
            biases: BiasRules::ATTENTION,
            rope: RopeRules { alpha: true, ..ROPE },
            ..LLAMA
        },
    ],
    gguf: &[
        // The stretched base is the base of a file.
        gguf::Architecture {
            name: "hunyuan-dense",
            model_types: &["hunyuan_v1_dense"],
            own_names: &[
                ("self_attn.query_layernorm", "attn_q_norm"),
                ("self_attn.key_layernorm", "attn_k_norm"),
            ],
            biases: &[gguf::ATTENTION_BIAS],
            ..gguf::PLAIN
        },
    ],
    wrappers: &[],
};

//! GLM-4 to GLM-5.

use super::deepseek::{
    DEEPSEEK, DEEPSEEK_INDEXER, DEEPSEEK_V3, DEEPSEEK_V3_EXPERTS, DEEPSEEK_V32, GGUF_DEEPSEEK2,
};
use super::llama::{LLAMA, ROPE};
use crate::architecture::Architecture;
use crate::family::Family;
use crate::features::{HeadNorms, MlpForm, NormPlaces};
use crate::gguf;
use crate::kinds::NormKind;
use crate::names::Names;
use crate::rules::{
    BiasRules, Eps, ExpertLayers, ExpertRules, Flag, HeadDim, IndexerRules, LatentRules, RopeRules,
};

/// Rows of the family.
pub(super) static FAMILY: Family = Family {
    models: &[
        // GLM-4: norms before and after, joined gate and up, half of a head rotated in adjacent pairs.
        Architecture {
            name: "glm4",
            class: "Glm4ForCausalLM",
            names: GLM4_NAMES,
            eps: Eps::Default(1.5625e-7),
            norm_places: NormPlaces::Both,
            head_dim: HeadDim::IfAbsent(128),
            mlp: MlpForm::GatedJoined,
            biases: BiasRules { qkv: Flag::Field("attention_bias", true), ..BiasRules::NONE },
            rope: RopeRules { partial: Some(0.5), interleaved: true, ..ROPE },
            ..LLAMA
        },
        // GLM-4.7-Flash: DeepSeek-V3 with other defaults.
        Architecture {
            name: "glm4_moe_lite",
            class: "Glm4MoeLiteForCausalLM",
            eps: Eps::Default(1e-5),
            experts: Some(ExpertRules {
                layers: ExpertLayers::Listed(1),
                scale: Some(1.8),
                ..DEEPSEEK_V3_EXPERTS
            }),
            ..DEEPSEEK_V3
        },
        // GLM-5: the same with another rotation in the indexer, whose choice later layers may share.
        Architecture {
            name: "glm_moe_dsa",
            class: "GlmMoeDsaForCausalLM",
            eps: Eps::Default(1e-5),
            latent: Some(LatentRules {
                interleaved: Flag::Fixed(true),
                indexer: Some(IndexerRules {
                    heads: 32,
                    interleaved: true,
                    shared: true,
                    ..DEEPSEEK_INDEXER
                }),
            }),
            ..DEEPSEEK_V32
        },
        // GLM-4.5 and 4.6: routing of DeepSeek-V3, half of a head rotated, QK norms in the large one.
        Architecture {
            name: "glm4_moe",
            class: "Glm4MoeForCausalLM",
            eps: Eps::Default(1e-5),
            head_norms: HeadNorms::Each,
            norms_heads: Flag::Field("use_qk_norm", false),
            biases: BiasRules { qkv: Flag::Field("attention_bias", false), ..BiasRules::NONE },
            rope: RopeRules { partial: Some(0.5), ..ROPE },
            experts: Some(ExpertRules {
                layers: ExpertLayers::From(1),
                scale: Some(1.0),
                only: &[],
                ..DEEPSEEK_V3_EXPERTS
            }),
            ..DEEPSEEK
        },
    ],
    gguf: &[
        // Adjacent pairs are rotated, as in the source.
        gguf::Architecture {
            name: "glm4",
            model_types: &["glm4"],
            biases: &[
                gguf::Bias { tensors: gguf::QKV, presence: gguf::Presence::Optional, ..gguf::ATTENTION_BIAS },
                gguf::Bias { field: "mlp_bias", tensors: &["ffn_up", "ffn_down"], ..gguf::MLP_BIAS },
            ],
            partial: Some("partial_rotary_factor"),
            ..gguf::PLAIN
        },
        gguf::Architecture {
            name: "glm4moe",
            model_types: &["glm4_moe"],
            post_attention_norm: true,
            tensors: &["exp_probs_b.bias"],
            keys: &["expert_gating_func", "expert_weights_scale", "leading_dense_block_count"],
            biases: &[
                gguf::Bias { tensors: gguf::QKV, presence: gguf::Presence::Optional, ..gguf::ATTENTION_BIAS },
                gguf::MLP_BIAS,
            ],
            partial: Some("partial_rotary_factor"),
            head_norms: Some("use_qk_norm"),
            experts: gguf::Experts::Routed {
                count: "n_routed_experts",
                used: "num_experts_per_tok",
                width: "moe_intermediate_size",
                first: Some("first_k_dense_replace"),
                shared: Some("n_shared_experts"),
                sigmoid: true,
                scaled: true,
                stepped: false,
            },
            ..gguf::PLAIN
        },
        gguf::Architecture {
            name: "glm-dsa",
            model_types: &["glm_moe_dsa"],
            one_epsilon: &["glm_moe_dsa"],
            indexer: gguf::Indexers::Listed,
            ..GGUF_DEEPSEEK2
        },
    ],
    wrappers: &[],
};

/// Names of GLM-4.
pub(super) const GLM4_NAMES: Names = Names {
    norms: &[
        (NormKind::AfterAttention, "post_self_attn_layernorm"),
        (NormKind::AfterMlp, "post_mlp_layernorm"),
    ],
    ..Names::LLAMA
};

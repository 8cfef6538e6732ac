//! DeepSeek-V2 to V3.2 and Kimi K2.

use super::llama::LLAMA;
use super::mistral::EXPERTS;
use crate::architecture::Architecture;
use crate::family::Family;
use crate::features::Scores;
use crate::gguf;
use crate::names::{ExpertNames, Names};
use crate::rules::{
    BiasRules, ExpertLayers, ExpertRules, Flag, GroupRules, IndexerRules, LatentRules, SharedRules,
};

/// Rows of the family.
pub(super) static FAMILY: Family = Family {
    models: &[
        // DeepSeek-V2: multi-head latent attention, shared experts, routing limited to groups.
        Architecture {
            name: "deepseek_v2",
            class: "DeepseekV2ForCausalLM",
            fixed_flags: &[("norm_topk_prob", false)],
            // The reference multiplies complex numbers, which are adjacent pairs.
            latent: Some(LatentRules { interleaved: Flag::Fixed(true), indexer: None }),
            experts: Some(ExpertRules {
                layers: ExpertLayers::From(0),
                normalize: Flag::Fixed(false),
                scale: Some(1.0),
                groups: Some(GroupRules {
                    best_two: false,
                    when: Some(("topk_method", "group_limited_greedy")),
                }),
                only: &[("scoring_func", &["softmax"]), ("topk_method", &["greedy", "group_limited_greedy"])],
                ..DEEPSEEK_EXPERTS
            }),
            ..DEEPSEEK
        },
        DEEPSEEK_V3,
        // Kimi K2: DeepSeek-V3 under its own name; only the defaults of its config class differ, and published configs
        // state those fields.
        Architecture { name: "kimi_k2", ..DEEPSEEK_V3 },
        // DeepSeek-V3.2: DeepSeek-V3 whose queries attend to the tokens that an indexer chooses.
        DEEPSEEK_V32,
    ],
    gguf: &[
        GGUF_DEEPSEEK2,
        // An indexer chooses the tokens that a query attends to.
        gguf::Architecture {
            name: "deepseek32",
            model_types: &["deepseek_v32"],
            one_epsilon: &[],
            indexer: gguf::Indexers::Every,
            ..GGUF_DEEPSEEK2
        },
    ],
    wrappers: &[],
};

/// Names of DeepSeek.
pub(super) const DEEPSEEK_EXPERT_NAMES: ExpertNames =
    ExpertNames { shared: "mlp.shared_experts.", ..ExpertNames::QWEN };

/// Experts of DeepSeek.
pub(super) const DEEPSEEK_EXPERTS: ExpertRules = ExpertRules {
    count: "n_routed_experts",
    width: "moe_intermediate_size",
    shared: SharedRules::Counted("n_shared_experts"),
    ..EXPERTS
};

/// Experts of DeepSeek-V3: sigmoid scores with corrections, groups ranked by their best two.
pub(super) const DEEPSEEK_V3_EXPERTS: ExpertRules = ExpertRules {
    layers: ExpertLayers::From(3),
    scores: Scores::Sigmoid,
    normalize: Flag::Field("norm_topk_prob", true),
    scale: Some(2.5),
    groups: Some(GroupRules { best_two: true, when: None }),
    correction: true,
    only: &[("scoring_func", &["sigmoid"]), ("topk_method", &["noaux_tc"])],
    ..DEEPSEEK_EXPERTS
};

/// DeepSeek-V2 and V3.
pub(super) const DEEPSEEK: Architecture =
    Architecture { names: Names { experts: DEEPSEEK_EXPERT_NAMES, ..Names::LLAMA }, ..LLAMA };

/// DeepSeek-V3 and R1.
pub(super) const DEEPSEEK_V3: Architecture = Architecture {
    name: "deepseek_v3",
    class: "DeepseekV3ForCausalLM",
    biases: BiasRules::ATTENTION,
    latent: Some(LatentRules { interleaved: Flag::Field("rope_interleave", true), indexer: None }),
    experts: Some(DEEPSEEK_V3_EXPERTS),
    ..DEEPSEEK
};

/// Indexer of DeepSeek-V3.2.
pub(super) const DEEPSEEK_INDEXER: IndexerRules =
    IndexerRules { heads: 64, dim: 128, chosen: 2048, interleaved: false, shared: false };

/// DeepSeek-V3.2.
pub(super) const DEEPSEEK_V32: Architecture = Architecture {
    name: "deepseek_v32",
    class: "DeepseekV32ForCausalLM",
    latent: Some(LatentRules { interleaved: Flag::Fixed(true), indexer: Some(DEEPSEEK_INDEXER) }),
    experts: Some(ExpertRules { layers: ExpertLayers::Listed(3), ..DEEPSEEK_V3_EXPERTS }),
    ..DEEPSEEK_V3
};

/// DeepSeek-V2, V3 and what they are the base of: latent attention, experts in groups.
pub(super) const GGUF_DEEPSEEK2: gguf::Architecture = gguf::Architecture {
    name: "deepseek2",
    model_types: &["deepseek_v3", "deepseek_v2", "kimi_k2", "glm4_moe_lite"],
    one_epsilon: &["glm4_moe_lite"],
    split: &[(
        "self_attn.kv_b_proj.weight",
        gguf::Split::KeysAndValues(["attn_k_b.weight", "attn_v_b.weight"]),
    )],
    tensors: &["exp_probs_b.bias"],
    keys: &["expert_group_count", "expert_gating_func", "expert_weights_scale", "leading_dense_block_count"],
    yarn: gguf::Yarn::Multiplier,
    latent: true,
    experts: gguf::Experts::Grouped { softmax: "deepseek_v2" },
    ..gguf::PLAIN
};

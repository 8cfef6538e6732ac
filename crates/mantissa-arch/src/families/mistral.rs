//! Mistral, Ministral and Mixtral.

use super::llama::{LLAMA, LLAVA_WRAPPER, ROPE};
use crate::architecture::Architecture;
use crate::family::Family;
use crate::features::{DenseMlp, Scores};
use crate::gguf;
use crate::names::{ExpertNames, Names};
use crate::rules::{BiasRules, ExpertLayers, ExpertRules, Flag, GrowthRule, RopeRules, SharedRules, Windows};
use crate::stack::StackForm;
use crate::wrapper::Wrapper;

/// Rows of the family.
pub(super) static FAMILY: Family = Family {
    models: &[
        // A window on every layer, unless it is null.
        Architecture {
            name: "mistral",
            class: "MistralForCausalLM",
            biases: BiasRules::NONE,
            windows: Windows::Every,
            default_window: Some(4096),
            ..LLAMA
        },
        // Ministral: a window on the layers of `layer_types`.
        Architecture {
            name: "ministral",
            class: "MinistralForCausalLM",
            biases: BiasRules::NONE,
            windows: Windows::Listed,
            default_window: Some(4096),
            ..LLAMA
        },
        // Ministral 3: YaRN, and queries that grow with the position.
        Architecture {
            name: "ministral3",
            class: "Ministral3ForCausalLM",
            biases: BiasRules::NONE,
            windows: Windows::Every,
            rope: RopeRules { theta: 1_000_000.0, required: true, ..ROPE },
            query_growth: GrowthRule::Rotary,
            ..LLAMA
        },
        Architecture {
            name: "mixtral",
            class: "MixtralForCausalLM",
            names: Names { experts: MIXTRAL_EXPERT_NAMES, ..Names::LLAMA },
            biases: BiasRules::NONE,
            windows: Windows::Every,
            rope: RopeRules { theta: 1_000_000.0, ..ROPE },
            experts: Some(EXPERTS),
            ..LLAMA
        },
    ],
    gguf: &[
        // YaRN's own factor of the scores, and queries that grow with the position.
        gguf::Architecture {
            name: "mistral3",
            model_types: &["ministral3"],
            rows: gguf::Rows::Interleaved,
            keys: &["attention.temperature_scale"],
            yarn: gguf::Yarn::Ratio,
            ..gguf::PLAIN
        },
    ],
    wrappers: &[Wrapper {
        name: "mistral3",
        class: "Mistral3ForConditionalGeneration",
        text_models: &[("mistral", "mistral"), ("ministral3", "ministral3")],
        defaults: &[],
        ..LLAVA_WRAPPER
    }],
};

/// Names of Mixtral.
pub(super) const MIXTRAL_EXPERT_NAMES: ExpertNames = ExpertNames {
    experts: "block_sparse_moe.experts.",
    parts: ["w1", "w3", "w2"],
    router: "block_sparse_moe.gate",
    correction: "block_sparse_moe.e_score_correction_bias",
    ..ExpertNames::QWEN
};

/// Experts of Mixtral.
pub(super) const EXPERTS: ExpertRules = ExpertRules {
    count: "num_local_experts",
    count_alias: None,
    width: "intermediate_size",
    layers: ExpertLayers::All,
    shared: SharedRules::None,
    scores: Scores::Softmax,
    scores_by: None,
    normalize: Flag::Fixed(true),
    scale: None,
    groups: None,
    correction: false,
    correction_row: false,
    bias: false,
    scales_input: false,
    enabled: None,
    optional: false,
    gated: true,
    latent: None,
    mean: None,
    dense: DenseMlp::None,
    only: &[],
    swiglu: None,
    hashed: None,
    fused: StackForm::Rows,
    published_fused: false,
};

//! Command R7B, Command A and Command A+ (Cohere 2).

use super::deepseek::DEEPSEEK_EXPERT_NAMES;
use super::llama::{LLAMA, ROPE};
use super::mistral::EXPERTS;
use crate::architecture::Architecture;
use crate::family::Family;
use crate::features::{NormForm, NormPlaces, Scores};
use crate::gguf;
use crate::names::Names;
use crate::rules::{
    BiasRules, Eps, ExpertLayers, ExpertRules, FeedForward, Flag, HeadDim, LogitScale, NoRope, RopeRules,
    ScaleRules, SharedRules, Windows,
};

/// Rows of the family.
pub(super) static FAMILY: Family = Family {
    models: &[
        COHERE2,
        // Command A+: Cohere 2 with experts behind some dense layers, RMSNorm where its epsilon is stated.
        Architecture {
            name: "cohere2_moe",
            class: "Cohere2MoeForCausalLM",
            aliases: &[],
            only: &[("shared_expert_combination_strategy", &["average", "sum"])],
            names: Names { experts: DEEPSEEK_EXPERT_NAMES, ..Names::LLAMA },
            eps: Eps::OrLayer(1e-5),
            head_dim: HeadDim::Default(128),
            ffn: "prefix_dense_intermediate_size",
            feed_forward: FeedForward::Or("intermediate_size"),
            windows: Windows::BehindDense(4),
            rope: RopeRules { no_rope: NoRope::FullAttentionButDense, ..COHERE2.rope },
            experts: Some(ExpertRules {
                count: "num_experts",
                layers: ExpertLayers::Listed(0),
                shared: SharedRules::Counted("num_shared_experts"),
                scores_by: Some((
                    "expert_selection_fn",
                    &[("softmax", Scores::SoftmaxOfChosen), ("sigmoid", Scores::Sigmoid)],
                )),
                scores: Scores::SoftmaxOfChosen,
                normalize: Flag::Field("norm_topk_prob", true),
                mean: Some(("shared_expert_combination_strategy", "average")),
                ..EXPERTS
            }),
            ..COHERE2
        },
    ],
    gguf: &[
        GGUF_COHERE2,
        // The graph rotates dense layers too. LayerNorm alone is written.
        gguf::Architecture {
            name: "cohere2moe",
            model_types: &["cohere2_moe"],
            keys: &["logit_scale", "leading_dense_block_count", "expert_gating_func"],
            tied: gguf::Presence::Optional,
            heads_fill_width: false,
            unrotated: gguf::Unrotated::NotWindowedButDense,
            windows: gguf::Windows::Listed { period: 4 },
            experts: gguf::Experts::Averaged {
                count: "num_experts",
                width: "intermediate_size",
                dense: "prefix_dense_intermediate_size",
                first: "first_k_dense_replace",
                shared: "num_shared_experts",
                scores: "expert_selection_fn",
            },
            ..GGUF_COHERE2
        },
    ],
    wrappers: &[],
};

/// Command R7B and Command A: LayerNorm without bias, attention and MLP in parallel on one norm, scaled logits;
/// windowed layers are rotated in adjacent pairs, the others have no position embedding.
pub(super) const COHERE2: Architecture = Architecture {
    name: "cohere2",
    class: "Cohere2ForCausalLM",
    aliases: &[("rms_norm_eps", "layer_norm_eps")],
    tied: true,
    norm: NormForm::LayerWeight,
    eps: Eps::Default(1e-5),
    norm_places: NormPlaces::ParallelShared,
    biases: BiasRules::ATTENTION,
    windows: Windows::ButLast { fields: &["sliding_window_pattern"], default: 4 },
    default_window: Some(4096),
    rope: RopeRules { no_rope: NoRope::FullAttention, interleaved: true, ..ROPE },
    scales: Some(ScaleRules {
        embedding: None,
        residual: None,
        attention: None,
        logits: Some(LogitScale { field: "logit_scale", default: 0.0625, divides: false }),
    }),
    ..LLAMA
};

/// Cohere 2. The graph rotates layers with a window, in adjacent pairs.
pub(super) const GGUF_COHERE2: gguf::Architecture = gguf::Architecture {
    name: "cohere2",
    model_types: &["cohere2"],
    renamed: &[("rms_norm_eps", "layer_norm_eps")],
    layer_norms: true,
    keys: &["logit_scale"],
    factors: &[("logit_scale", "logit_scale")],
    tied: gguf::Presence::Required,
    heads_fill_width: true,
    unrotated: gguf::Unrotated::NotWindowed,
    windows: gguf::Windows::Periodic { period: 4, stated: true, only_with: None },
    ..gguf::PLAIN
};

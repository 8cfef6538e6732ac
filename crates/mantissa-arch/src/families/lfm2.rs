//! LFM2.

use super::llama::{LLAMA, ROPE};
use super::qwen::QWEN_EXPERTS;
use crate::architecture::Architecture;
use crate::family::Family;
use crate::features::{HeadNorms, Scores};
use crate::gguf;
use crate::kinds::{LinearKind, NormKind, VectorKind};
use crate::names::{ExpertNames, MixerNames, Names};
use crate::rules::{BiasRules, Eps, ExpertLayers, ExpertRules, FeedForward, Flag, RopeRules};

/// Rows of the family.
pub(super) static FAMILY: Family = Family {
    models: &[
        LFM2,
        // LFM2-MoE: the same with experts after some dense layers, routed by sigmoid scores with corrections.
        Architecture {
            name: "lfm2_moe",
            class: "Lfm2MoeForCausalLM",
            aliases: &[("rms_norm_eps", "norm_eps"), ("first_k_dense_replace", "num_dense_layers")],
            fixed_flags: &[("tie_embedding", true), ("use_expert_bias", true)],
            names: Names { experts: LFM2_EXPERT_NAMES, ..LFM2_NAMES },
            feed_forward: FeedForward::Stated,
            experts: Some(ExpertRules {
                count_alias: None,
                layers: ExpertLayers::From(2),
                scores: Scores::Sigmoid,
                normalize: Flag::Field("norm_topk_prob", true),
                scale: Some(1.0),
                correction: true,
                ..QWEN_EXPERTS
            }),
            ..LFM2
        },
    ],
    gguf: &[
        GGUF_LFM2,
        gguf::Architecture {
            name: "lfm2moe",
            model_types: &["lfm2_moe"],
            tensors: &["exp_probs_b.bias"],
            keys: &["expert_gating_func", "leading_dense_block_count"],
            experts: gguf::Experts::Routed {
                count: "num_experts",
                used: "num_experts_per_tok",
                width: "moe_intermediate_size",
                first: Some("num_dense_layers"),
                shared: None,
                sigmoid: true,
                scaled: false,
                stepped: false,
            },
            ..GGUF_LFM2
        },
    ],
    wrappers: &[],
};

/// Names of LFM2.
pub(super) const LFM2_NAMES: Names = Names {
    final_norm: "model.embedding_norm",
    norms: &[
        (NormKind::Input, "operator_norm"),
        (NormKind::Post, "ffn_norm"),
        (NormKind::Query, "self_attn.q_layernorm"),
        (NormKind::Key, "self_attn.k_layernorm"),
    ],
    linears: &[
        (LinearKind::O, "self_attn.out_proj"),
        (LinearKind::Gate, "feed_forward.w1"),
        (LinearKind::Up, "feed_forward.w3"),
        (LinearKind::Down, "feed_forward.w2"),
        (LinearKind::MixIn, "conv.in_proj"),
        (LinearKind::MixOut, "conv.out_proj"),
    ],
    mixer: LFM2_MIXER_NAMES,
    ..Names::LLAMA
};

/// Names of LFM2-MoE.
pub(super) const LFM2_EXPERT_NAMES: ExpertNames = ExpertNames {
    experts: "feed_forward.experts.",
    parts: ["w1", "w3", "w2"],
    router: "feed_forward.gate",
    correction: "feed_forward.expert_bias",
    ..ExpertNames::QWEN
};

/// Names of LFM2's short convolution.
pub(super) const LFM2_MIXER_NAMES: MixerNames = MixerNames {
    sides: &[],
    vectors: &[
        (VectorKind::Convolution, "conv.conv.weight"),
        (VectorKind::ConvolutionBias, "conv.conv.bias"),
    ],
};

/// LFM2: gated short convolutions in the layers without attention.
pub(super) const LFM2: Architecture = Architecture {
    name: "lfm2",
    class: "Lfm2ForCausalLM",
    aliases: &[("rms_norm_eps", "norm_eps")],
    fixed_flags: &[("tie_embedding", true)],
    names: LFM2_NAMES,
    tied: true,
    eps: Eps::Default(1e-5),
    head_norms: HeadNorms::Each,
    feed_forward: FeedForward::Adjusted,
    biases: BiasRules::NONE,
    rope: RopeRules { theta: 1_000_000.0, ..ROPE },
    recurrent: Some("short convolution"),
    ..LLAMA
};

/// LFM2. The final norm has the name of one after the embedding.
pub(super) const GGUF_LFM2: gguf::Architecture = gguf::Architecture {
    name: "lfm2",
    model_types: &["lfm2"],
    renamed: &[("rms_norm_eps", "norm_eps")],
    biases: &[],
    heads_fill_width: true,
    recurrence: Some(gguf::Recurrence {
        types: gguf::LayerTypes::Named("conv"),
        fields: &[&[
            ("conv_L_cache", gguf::Stated::Size("shortconv.l_cache")),
            ("block_auto_adjust_ff_dim", gguf::Stated::Fixed(gguf::Fixed::Flag(false))),
        ]],
        ..gguf::Recurrence::PLAIN
    }),
    ..gguf::PLAIN
};

//! DeepSeek-V4.

use super::deepseek::{DEEPSEEK, DEEPSEEK_EXPERTS};
use super::llama::ROPE;
use crate::architecture::Architecture;
use crate::family::Family;
use crate::features::Scores;
use crate::gguf::{self, Stated};
use crate::kinds::{HyperPart, HyperSite, LinearKind, NormKind, SideKind, VectorKind};
use crate::names::{ExpertNames, MixerNames, Names};
use crate::rules::{BiasRules, ByLayer, Eps, ExpertRules, Flag, HeadDim, RopeRules, SharedRules, Windows};

/// Rows of the family.
pub(super) static FAMILY: Family = Family {
    models: &[DEEPSEEK_V4],
    gguf: &[
        // Streams of states that each half of a layer mixes, attention to a window and to compressed entries.
        gguf::Architecture {
            name: "deepseek4",
            model_types: &["deepseek_v4"],
            tensors: &["exp_probs_b.bias", "attn_sinks.weight"],
            keys: &["expert_gating_func", "expert_weights_scale"],
            tied: gguf::Presence::Absent,
            partial: Some("partial_rotary_factor"),
            yarn: gguf::Yarn::Unscaled,
            recurrence: Some(gguf::Recurrence {
                layers: gguf::MixerLayers::Every,
                types: gguf::LayerTypes::None,
                fields: &[GGUF_FIELDS],
                attends: true,
                ..gguf::Recurrence::PLAIN
            }),
            experts: gguf::Experts::Hashed,
            ..gguf::PLAIN
        },
    ],
    wrappers: &[],
};

/// Names of DeepSeek-V4, as published.
pub(super) const DEEPSEEK_V4_PUBLISHED_NAMES: Names = Names {
    embedding: "embed",
    head: "head",
    final_norm: "norm",
    layers: "layers.",
    attention: "attn",
    norms: &[(NormKind::Input, "attn_norm"), (NormKind::Post, "ffn_norm")],
    linears: &[
        (LinearKind::QA, "attn.wq_a"),
        (LinearKind::QB, "attn.wq_b"),
        (LinearKind::KvA, "attn.wkv"),
        (LinearKind::MixOut, "attn.wo_b"),
        (LinearKind::SharedGate, "ffn.shared_experts.w1"),
        (LinearKind::SharedUp, "ffn.shared_experts.w3"),
        (LinearKind::SharedDown, "ffn.shared_experts.w2"),
    ],
    experts: DEEPSEEK_V4_EXPERT_NAMES,
    mixer: DEEPSEEK_V4_PUBLISHED_MIXER_NAMES,
    ..Names::LLAMA
};

/// Names of DeepSeek-V4, as transformers writes them.
pub(super) const DEEPSEEK_V4_NAMES: Names = Names {
    embedding: "model.embed_tokens",
    final_norm: "model.norm",
    layers: "model.layers.",
    mixer: DEEPSEEK_V4_MIXER_NAMES,
    published: Some(&DEEPSEEK_V4_PUBLISHED_NAMES),
    ..DEEPSEEK_V4_PUBLISHED_NAMES
};

/// Names of DeepSeek-V4.
pub(super) const DEEPSEEK_V4_EXPERT_NAMES: ExpertNames = ExpertNames {
    experts: "ffn.experts.",
    parts: ["w1", "w3", "w2"],
    fused: ["ffn.experts.gate_up_proj", "ffn.experts.down_proj"],
    shared: "ffn.shared_experts.",
    router: "ffn.gate",
    correction: "ffn.gate.bias",
    ..ExpertNames::QWEN
};

/// Names of DeepSeek-V4, as transformers writes them.
pub(super) const DEEPSEEK_V4_MIXER_NAMES: MixerNames = MixerNames {
    sides: &[
        (SideKind::BlockValues, "attn.compressor.wkv"),
        (SideKind::BlockGate, "attn.compressor.wgate"),
        (SideKind::IndexBlockValues, "attn.indexer.compressor.wkv"),
        (SideKind::IndexBlockGate, "attn.indexer.compressor.wgate"),
        (SideKind::IndexQueries, "attn.indexer.wq_b"),
        (SideKind::IndexWeights, "attn.indexer.weights_proj"),
        (SideKind::OutputGroups, "attn.wo_a"),
    ],
    vectors: &[
        (VectorKind::Sinks, "attn.attn_sink"),
        (VectorKind::LatentNorm, "attn.q_norm.weight"),
        (VectorKind::KeyNorm, "attn.norm.weight"),
        (VectorKind::BlockBias, "attn.compressor.ape"),
        (VectorKind::BlockNorm, "attn.compressor.norm.weight"),
        (VectorKind::IndexBlockBias, "attn.indexer.compressor.ape"),
        (VectorKind::IndexBlockNorm, "attn.indexer.compressor.norm.weight"),
        (VectorKind::TokenExperts, "ffn.gate.tid2eid"),
        (VectorKind::Hyper(HyperSite::Attention, HyperPart::Weight), "hc_attn_fn"),
        (VectorKind::Hyper(HyperSite::Attention, HyperPart::Base), "hc_attn_base"),
        (VectorKind::Hyper(HyperSite::Attention, HyperPart::Scale), "hc_attn_scale"),
        (VectorKind::Hyper(HyperSite::Mlp, HyperPart::Weight), "hc_ffn_fn"),
        (VectorKind::Hyper(HyperSite::Mlp, HyperPart::Base), "hc_ffn_base"),
        (VectorKind::Hyper(HyperSite::Mlp, HyperPart::Scale), "hc_ffn_scale"),
        (VectorKind::Hyper(HyperSite::Head, HyperPart::Weight), "model.hc_head.hc_fn"),
        (VectorKind::Hyper(HyperSite::Head, HyperPart::Base), "model.hc_head.hc_base"),
        (VectorKind::Hyper(HyperSite::Head, HyperPart::Scale), "model.hc_head.hc_scale"),
    ],
};

/// Names of DeepSeek-V4, as published.
pub(super) const DEEPSEEK_V4_PUBLISHED_MIXER_NAMES: MixerNames = MixerNames {
    vectors: &[
        (VectorKind::Sinks, "attn.attn_sink"),
        (VectorKind::LatentNorm, "attn.q_norm.weight"),
        (VectorKind::KeyNorm, "attn.kv_norm.weight"),
        (VectorKind::BlockBias, "attn.compressor.ape"),
        (VectorKind::BlockNorm, "attn.compressor.norm.weight"),
        (VectorKind::IndexBlockBias, "attn.indexer.compressor.ape"),
        (VectorKind::IndexBlockNorm, "attn.indexer.compressor.norm.weight"),
        (VectorKind::TokenExperts, "ffn.gate.tid2eid"),
        (VectorKind::Hyper(HyperSite::Attention, HyperPart::Weight), "hc_attn_fn"),
        (VectorKind::Hyper(HyperSite::Attention, HyperPart::Base), "hc_attn_base"),
        (VectorKind::Hyper(HyperSite::Attention, HyperPart::Scale), "hc_attn_scale"),
        (VectorKind::Hyper(HyperSite::Mlp, HyperPart::Weight), "hc_ffn_fn"),
        (VectorKind::Hyper(HyperSite::Mlp, HyperPart::Base), "hc_ffn_base"),
        (VectorKind::Hyper(HyperSite::Mlp, HyperPart::Scale), "hc_ffn_scale"),
        (VectorKind::Hyper(HyperSite::Head, HyperPart::Weight), "hc_head_fn"),
        (VectorKind::Hyper(HyperSite::Head, HyperPart::Base), "hc_head_base"),
        (VectorKind::Hyper(HyperSite::Head, HyperPart::Scale), "hc_head_scale"),
    ],
    ..DEEPSEEK_V4_MIXER_NAMES
};

/// DeepSeek-V4: attention to a window and to compressed entries, streams of states that each half of a layer mixes, experts
/// chosen by the token in the first layers.
pub(super) const DEEPSEEK_V4: Architecture = Architecture {
    name: "deepseek_v4",
    class: "DeepseekV4ForCausalLM",
    only: &[("hidden_act", &["silu"])],
    fixed_counts: &[("num_key_value_heads", 1)],
    names: DEEPSEEK_V4_NAMES,
    eps: Eps::Default(1e-6),
    by_layer: ByLayer { hyper: true, ..ByLayer::NONE },
    head_dim: HeadDim::Default(512),
    ffn: "moe_intermediate_size",
    biases: BiasRules { mlp: Flag::Field("mlp_bias", false), ..BiasRules::NONE },
    windows: Windows::Uncompressed,
    default_window: Some(128),
    rope: RopeRules { compressed_theta: Some(160_000.0), ..ROPE },
    recurrent: Some("compressed attention"),
    experts: Some(ExpertRules {
        shared: SharedRules::One,
        scores: Scores::SqrtSoftplus,
        scale: Some(1.5),
        correction: true,
        swiglu: Some([1.0, 10.0, 0.0]),
        hashed: Some(3),
        only: &[("scoring_func", &["sqrtsoftplus"]), ("topk_method", &["noaux_tc"])],
        ..DEEPSEEK_EXPERTS
    }),
    ..DEEPSEEK
};

/// Keys of llama.cpp's loader (`src/models/deepseek4.cpp`).
const GGUF_FIELDS: &[(&str, Stated)] = &[
    ("q_lora_rank", Stated::Size("attention.q_lora_rank")),
    ("sliding_window", Stated::Size("attention.sliding_window")),
    ("o_groups", Stated::Size("attention.output_group_count")),
    ("o_lora_rank", Stated::Size("attention.output_lora_rank")),
    ("index_n_heads", Stated::Size("attention.indexer.head_count")),
    ("index_head_dim", Stated::Size("attention.indexer.key_length")),
    ("index_topk", Stated::Size("attention.indexer.top_k")),
    ("hc_mult", Stated::Size("hyper_connection.count")),
    ("hc_sinkhorn_iters", Stated::Size("hyper_connection.sinkhorn_iterations")),
    ("num_hash_layers", Stated::Size("hash_layer_count")),
    ("compress_rope_theta", Stated::Number("attention.compress_rope_freq_base")),
    ("hc_eps", Stated::Number("hyper_connection.epsilon")),
    ("compress_ratios", Stated::Sizes("attention.compress_ratios")),
];

//! Rows that others start from, and their shared parts.

use mantissa_store::convention::StackForm;

use super::Architecture;
use super::features::{Activation, DenseMlp, HeadNorms, MlpForm, NormForm, NormPlaces, QkvForm, Scores};
use super::names::{ExpertNames, Names};
use super::rules::{
    BiasRules, ByLayer, Eps, ExpertLayers, ExpertRules, FeedForward, Flag, GroupRules, GrowthRule, HeadDim,
    IndexerRules, LatentRules, LogitScale, NoRope, QueryScale, RecurrentRules, RopeRules, ScaleRules,
    SharedRules, Softcaps, Windows,
};

/// Llama 1, 2 and 3.
pub(super) const LLAMA: Architecture = Architecture {
    name: "llama",
    class: "LlamaForCausalLM",
    aliases: &[],
    fixed_flags: &[],
    only: &[],
    fixed_counts: &[],
    names: Names::LLAMA,
    tied: false,
    norm: NormForm::Rms,
    eps: Eps::Required,
    norm_places: NormPlaces::Before,
    parallel: Flag::Fixed(false),
    head_norms: HeadNorms::Absent,
    norms_heads: Flag::Fixed(true),
    value_norm: false,
    by_layer: ByLayer::NONE,
    sub_norms: false,
    activation: Activation::Silu,
    gelu_is_tanh: false,
    head_dim: HeadDim::Stated,
    ffn: "intermediate_size",
    feed_forward: FeedForward::Stated,
    qkv: QkvForm::Separate,
    mlp: MlpForm::Gated,
    biases: BiasRules { mlp: Flag::Field("mlp_bias", false), ..BiasRules::ATTENTION },
    head_bias: false,
    conv1d: false,
    ternary: false,
    windows: Windows::None,
    default_window: None,
    rope: ROPE,
    learned_positions: false,
    scaled_embedding: false,
    query_scale: QueryScale::Head,
    scales: None,
    query_growth: GrowthRule::None,
    softcaps: None,
    clips_qkv: false,
    sinks: false,
    latent: None,
    gated_attention: false,
    multipliers: false,
    recurrent: None,
    experts: None,
};

/// Factors of Granite 3 and 4.
pub(super) const GRANITE_SCALES: ScaleRules = ScaleRules {
    embedding: Some("embedding_multiplier"),
    residual: Some("residual_multiplier"),
    attention: Some("attention_multiplier"),
    logits: Some(LogitScale { field: "logits_scaling", default: 1.0, divides: true }),
};

/// Plain rotary embedding of whole heads.
pub(super) const ROPE: RopeRules = RopeRules {
    theta: 10_000.0,
    partial: None,
    local_theta: None,
    compressed_theta: None,
    required: false,
    no_rope: NoRope::None,
    interleaved: false,
};

/// Biases of the attention unless `attention_bias` is false.
pub(super) const ATTENTION_BIAS: BiasRules = {
    let flag = Flag::Field("attention_bias", true);
    BiasRules { qkv: flag, output: flag, ..BiasRules::NONE }
};

/// Qwen2 and Qwen2.5: biases on q, k and v.
pub(super) const QWEN2: Architecture = Architecture {
    name: "qwen2",
    class: "Qwen2ForCausalLM",
    biases: BiasRules { qkv: Flag::Fixed(true), ..BiasRules::NONE },
    windows: Windows::Late,
    default_window: Some(4096),
    ..LLAMA
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

/// Gemma: scaled embedding, norms that add 1 to their weights, GELU.
pub(super) const GEMMA: Architecture = Architecture {
    name: "gemma",
    class: "GemmaForCausalLM",
    fixed_flags: &[("use_bidirectional_attention", false)],
    tied: true,
    norm: NormForm::RmsPlusOne,
    eps: Eps::Default(1e-6),
    activation: Activation::GeluTanh,
    gelu_is_tanh: true,
    head_dim: HeadDim::Default(256),
    biases: BiasRules::ATTENTION,
    scaled_embedding: true,
    ..LLAMA
};

/// Gemma 2: norms before and after attention and MLP, capped scores and logits, a window on every other layer.
pub(super) const GEMMA2: Architecture = Architecture {
    name: "gemma2",
    class: "Gemma2ForCausalLM",
    aliases: &[("hidden_act", "hidden_activation")],
    names: Names::GEMMA2,
    norm_places: NormPlaces::Both,
    gelu_is_tanh: false,
    windows: Windows::Even,
    default_window: Some(4096),
    query_scale: QueryScale::Field("query_pre_attn_scalar", 256.0),
    softcaps: Some(Softcaps { attention: Some(50.0), logits: Some(30.0) }),
    ..GEMMA
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

/// Experts of the Qwen mixtures; transformers 5 writes the alias.
pub(super) const QWEN_EXPERTS: ExpertRules = ExpertRules {
    count: "num_experts",
    count_alias: Some("num_local_experts"),
    width: "moe_intermediate_size",
    layers: ExpertLayers::Sparse,
    normalize: Flag::Field("norm_topk_prob", false),
    ..EXPERTS
};

/// The Qwen mixtures.
pub(super) const QWEN_MOE: Architecture = Architecture {
    fixed_flags: &[("use_sliding_window", false)],
    biases: BiasRules::ATTENTION,
    experts: Some(QWEN_EXPERTS),
    ..LLAMA
};

/// Qwen3.5 (text): gated DeltaNet in three of four layers, gated attention, a quarter of a head rotated. The three
/// positions of a text token are equal, so its interleaved M-RoPE is plain RoPE.
pub(super) const QWEN3_5: Architecture = Architecture {
    name: "qwen3_5_text",
    class: "Qwen3_5ForCausalLM",
    names: Names::QWEN3_5,
    norm: NormForm::RmsPlusOne,
    eps: Eps::Default(1e-6),
    head_norms: HeadNorms::Each,
    head_dim: HeadDim::IfAbsent(256),
    biases: BiasRules::ATTENTION,
    rope: RopeRules { partial: Some(0.25), ..ROPE },
    gated_attention: true,
    recurrent: Some(RecurrentRules::GatedDelta { joined: false }),
    ..LLAMA
};

/// LFM2: gated short convolutions in the layers without attention.
pub(super) const LFM2: Architecture = Architecture {
    name: "lfm2",
    class: "Lfm2ForCausalLM",
    aliases: &[("rms_norm_eps", "norm_eps")],
    fixed_flags: &[("tie_embedding", true)],
    names: Names::LFM2,
    tied: true,
    eps: Eps::Default(1e-5),
    head_norms: HeadNorms::Each,
    feed_forward: FeedForward::Adjusted,
    biases: BiasRules::NONE,
    rope: RopeRules { theta: 1_000_000.0, ..ROPE },
    recurrent: Some(RecurrentRules::ShortConvolution),
    ..LLAMA
};

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
    Architecture { names: Names { experts: ExpertNames::DEEPSEEK, ..Names::LLAMA }, ..LLAMA };

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

/// DeepSeek-V4: attention to a window and to compressed entries, streams of states that each half of a layer mixes, experts
/// chosen by the token in the first layers.
pub(super) const DEEPSEEK_V4: Architecture = Architecture {
    name: "deepseek_v4",
    class: "DeepseekV4ForCausalLM",
    only: &[("hidden_act", &["silu"])],
    fixed_counts: &[("num_key_value_heads", 1)],
    names: Names::DEEPSEEK_V4,
    eps: Eps::Default(1e-6),
    by_layer: ByLayer { hyper: true, ..ByLayer::NONE },
    head_dim: HeadDim::Default(512),
    ffn: "moe_intermediate_size",
    biases: BiasRules { mlp: Flag::Field("mlp_bias", false), ..BiasRules::NONE },
    windows: Windows::Uncompressed,
    default_window: Some(128),
    rope: RopeRules { compressed_theta: Some(160_000.0), ..ROPE },
    recurrent: Some(RecurrentRules::Compressed),
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

//! Rows that others of [`super::table`] start from, and their shared parts. Facts are of the sources that it names.

use super::architecture::{
    Architecture, Bias, Experts, Indexers, LocalTheta, Presence, Recurrence, Rows, Split, Unrotated, Windows,
    Yarn,
};

/// Projections to queries, keys and values.
pub(super) const QKV: &[&str] = &["attn_q", "attn_k", "attn_v"];

/// Biases of the attention, which most loaders do not have for its output.
pub(super) const ATTENTION_BIAS: Bias = Bias {
    field: "attention_bias",
    tensors: &["attn_q", "attn_k", "attn_v", "attn_output"],
    presence: Presence::Absent,
};

/// Biases of a gated MLP.
pub(super) const MLP_BIAS: Bias =
    Bias { field: "mlp_bias", tensors: &["ffn_gate", "ffn_up", "ffn_down"], presence: Presence::Absent };

/// Attention and a gated MLP, each after an RMSNorm; no biases, windows or experts.
pub(super) const PLAIN: Architecture = Architecture {
    name: "",
    model_types: &[],
    windowed: None,
    activation: "silu",
    activation_field: "hidden_act",
    other_activation: None,
    renamed: &[],
    layer_norms: false,
    fixed_epsilon: None,
    norms_plus_one: false,
    post_attention_norm: false,
    rows: Rows::Same,
    own_names: &[],
    split: &[],
    weight_factors: false,
    own_scales: &[],
    tensors: &[],
    keys: &[],
    factors: &[],
    fixed: &[],
    divided_logits: false,
    head_norms: None,
    unnormed_with: None,
    biases: &[ATTENTION_BIAS, MLP_BIAS],
    tied: Presence::Optional,
    heads_fill_width: false,
    partial: None,
    unrotated: Unrotated::None,
    rope_factors: false,
    long_rope: false,
    yarn: Yarn::Standard,
    local_theta: LocalTheta::None,
    windows: Windows::Ignored,
    chunk: None,
    growth: None,
    by_layer: false,
    streams: None,
    merged_tokens: false,
    unscaled: false,
    one_epsilon: &[],
    wide_scale: None,
    parallel_key: false,
    latent: false,
    indexer: Indexers::None,
    recurrence: Recurrence::None,
    columns_of_heads: false,
    sections: false,
    both_epsilons: false,
    experts: Experts::None,
    joined_experts: false,
    swiglu: None,
};

/// Gemma: norms hold 1 plus the weight.
pub(super) const GEMMA: Architecture = Architecture {
    name: "gemma",
    model_types: &["gemma"],
    activation: "gelu_pytorch_tanh",
    norms_plus_one: true,
    ..PLAIN
};

/// Gemma 2 and 3.
pub(super) const GEMMA2: Architecture =
    Architecture { activation_field: "hidden_activation", post_attention_norm: true, ..GEMMA };

/// Granite.
pub(super) const GRANITE: Architecture = Architecture {
    name: "granite",
    model_types: &["granite"],
    rows: Rows::Interleaved,
    keys: &["embedding_scale", "residual_scale", "attention.scale", "logit_scale"],
    factors: &[
        ("embedding_scale", "embedding_multiplier"),
        ("residual_scale", "residual_multiplier"),
        ("attention.scale", "attention_multiplier"),
        ("logit_scale", "logits_scaling"),
    ],
    divided_logits: true,
    biases: &[
        Bias { presence: Presence::Optional, ..ATTENTION_BIAS },
        Bias { presence: Presence::Optional, ..MLP_BIAS },
    ],
    heads_fill_width: true,
    rope_factors: true,
    ..PLAIN
};

/// Gated DeltaNet in most layers, gated attention, norms that hold 1 plus the weight except that of a mixer's result.
pub(super) const QWEN3_NEXT: Architecture = Architecture {
    name: "qwen3next",
    model_types: &["qwen3_next"],
    norms_plus_one: true,
    post_attention_norm: true,
    split: &[("linear_attn.in_proj_qkvz.weight", Split::KeyGroups(["attn_qkv.weight", "attn_gate.weight"]))],
    tensors: &["attn_qkv.weight"],
    partial: Some("partial_rotary_factor"),
    recurrence: Recurrence::GatedDelta { tiled: false },
    experts: Experts::Every {
        count: "num_experts",
        width: "moe_intermediate_size",
        normalized: Some(true),
        shared: Some("shared_expert_intermediate_size"),
    },
    ..PLAIN
};

/// LFM2. The final norm has the name of one after the embedding.
pub(super) const LFM2: Architecture = Architecture {
    name: "lfm2",
    model_types: &["lfm2"],
    renamed: &[("rms_norm_eps", "norm_eps")],
    biases: &[],
    heads_fill_width: true,
    recurrence: Recurrence::ShortConvolution,
    ..PLAIN
};

/// Granite 4: Mamba-2 in most layers, gate and up of the MLP in one projection.
pub(super) const GRANITE_HYBRID: Architecture = Architecture {
    name: "granitehybrid",
    model_types: &["granitemoehybrid"],
    renamed: &[("intermediate_size", "shared_intermediate_size")],
    split: &[("shared_mlp.input_linear.weight", Split::Halves(["ffn_gate.weight", "ffn_up.weight"]))],
    unrotated: Unrotated::Switched,
    recurrence: Recurrence::StateSpace { blocks: false },
    columns_of_heads: true,
    ..GRANITE
};

/// Nemotron-H: no position embedding, a layer is a mixer, attention or an MLP.
pub(super) const NEMOTRON_H: Architecture = Architecture {
    name: "nemotron_h",
    model_types: &["nemotron_h"],
    activation: "relu2",
    activation_field: "mlp_hidden_act",
    renamed: &[("rms_norm_eps", "layer_norm_epsilon")],
    biases: &[Bias { field: "mlp_bias", tensors: &["ffn_up", "ffn_down"], presence: Presence::Absent }],
    unrotated: Unrotated::All,
    recurrence: Recurrence::StateSpace { blocks: true },
    columns_of_heads: true,
    both_epsilons: true,
    ..PLAIN
};

/// DeepSeek-V2, V3 and what they are the base of: latent attention, experts in groups.
pub(super) const DEEPSEEK2: Architecture = Architecture {
    name: "deepseek2",
    model_types: &["deepseek_v3", "deepseek_v2", "kimi_k2", "glm4_moe_lite"],
    one_epsilon: &["glm4_moe_lite"],
    split: &[("self_attn.kv_b_proj.weight", Split::KeysAndValues(["attn_k_b.weight", "attn_v_b.weight"]))],
    tensors: &["exp_probs_b.bias"],
    keys: &["expert_group_count", "expert_gating_func", "expert_weights_scale", "leading_dense_block_count"],
    yarn: Yarn::Multiplier,
    latent: true,
    experts: Experts::Grouped { softmax: "deepseek_v2" },
    ..PLAIN
};

/// Cohere 2. The graph rotates layers with a window, in adjacent pairs.
pub(super) const COHERE2: Architecture = Architecture {
    name: "cohere2",
    model_types: &["cohere2"],
    renamed: &[("rms_norm_eps", "layer_norm_eps")],
    layer_norms: true,
    keys: &["logit_scale"],
    factors: &[("logit_scale", "logit_scale")],
    tied: Presence::Required,
    heads_fill_width: true,
    unrotated: Unrotated::NotWindowed,
    windows: Windows::Periodic { period: 4, stated: true, only_with: None },
    ..PLAIN
};

//! The row that others start from, and parts that several share.
//!
//! Facts of llama.cpp (of llama-cpp-python 0.3.36): names and keys from `gguf-py/gguf/constants.py`, what its converter changes
//! from `conversion/`, what a loader requires and a graph computes from `src/models/`, one file for each architecture, and the
//! pairs of the rotary embedding from `llama_model_rope_type`. The rows of [`crate::families`] have the same sources.

use super::architecture::{
    Architecture, Bias, Experts, Indexers, LocalTheta, Presence, Rows, Unrotated, Windows, Yarn,
};

/// Projections to queries, keys and values.
pub const QKV: &[&str] = &["attn_q", "attn_k", "attn_v"];

/// Biases of the attention, which most loaders do not have for its output.
pub const ATTENTION_BIAS: Bias = Bias {
    field: "attention_bias",
    tensors: &["attn_q", "attn_k", "attn_v", "attn_output"],
    presence: Presence::Absent,
};

/// Biases of a gated MLP.
pub const MLP_BIAS: Bias =
    Bias { field: "mlp_bias", tensors: &["ffn_gate", "ffn_up", "ffn_down"], presence: Presence::Absent };

/// Attention and a gated MLP, each after an RMSNorm; no biases, windows or experts.
pub const PLAIN: Architecture = Architecture {
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
    listed: &[],
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
    recurrence: None,
    columns_of_heads: false,
    sections: false,
    both_epsilons: false,
    experts: Experts::None,
    joined_experts: false,
    swiglu: None,
};

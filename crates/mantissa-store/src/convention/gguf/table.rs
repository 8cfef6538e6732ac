//! The table of GGUF architectures, one row each. Rows state their differences from the one that they end with.
//!
//! Facts of llama.cpp (of llama-cpp-python 0.3.36): names and keys from `gguf-py/gguf/constants.py`, what its converter changes
//! from `conversion/`, what a loader requires and a graph computes from `src/models/`, one file for each architecture, and the
//! pairs of the rotary embedding from `llama_model_rope_type`.

use super::architecture::{
    Architecture, Bias, Experts, Fixed, Indexers, LocalTheta, Presence, Recurrence, Rows, Split, Unrotated,
    Windows, Yarn,
};
use super::bases::{
    ATTENTION_BIAS, COHERE2, DEEPSEEK2, GEMMA, GEMMA2, GRANITE, GRANITE_HYBRID, LFM2, MLP_BIAS, NEMOTRON_H,
    PLAIN, QKV, QWEN3_NEXT,
};
use super::streams::GEMMA3N;

/// Every architecture.
pub(super) static TABLE: &[Architecture] = &[
    // Mistral and Mixtral have no architecture of their own.
    Architecture {
        name: "llama",
        model_types: &["llama", "mistral", "mixtral"],
        rows: Rows::Interleaved,
        biases: &[
            Bias { presence: Presence::Optional, ..ATTENTION_BIAS },
            Bias { presence: Presence::Optional, ..MLP_BIAS },
        ],
        rope_factors: true,
        long_rope: true,
        experts: Experts::Some { model_type: "mixtral" },
        ..PLAIN
    },
    Architecture {
        name: "qwen2",
        model_types: &["qwen2"],
        biases: &[Bias { tensors: QKV, presence: Presence::Optional, ..ATTENTION_BIAS }, MLP_BIAS],
        ..PLAIN
    },
    Architecture {
        name: "qwen2moe",
        model_types: &["qwen2_moe"],
        biases: &[
            Bias { field: "qkv_bias", tensors: QKV, presence: Presence::Optional },
            Bias { tensors: &["attn_output"], ..ATTENTION_BIAS },
            MLP_BIAS,
        ],
        experts: Experts::Every {
            count: "num_experts",
            width: "moe_intermediate_size",
            normalized: Some(false),
            shared: Some("shared_expert_intermediate_size"),
        },
        ..PLAIN
    },
    Architecture { name: "qwen3", model_types: &["qwen3"], ..PLAIN },
    Architecture {
        name: "qwen3moe",
        model_types: &["qwen3_moe"],
        experts: Experts::Every {
            count: "num_experts",
            width: "moe_intermediate_size",
            normalized: Some(true),
            shared: None,
        },
        ..PLAIN
    },
    // The graph has no divisors of frequencies, and rotates all layers but the last of each four.
    Architecture {
        name: "smollm3",
        model_types: &["smollm3"],
        rows: Rows::Interleaved,
        unrotated: Unrotated::LastOf(4),
        ..PLAIN
    },
    Architecture {
        name: "seed_oss",
        model_types: &["seed_oss"],
        post_attention_norm: true,
        biases: &[
            Bias { tensors: QKV, presence: Presence::Optional, ..ATTENTION_BIAS },
            Bias { field: "attention_out_bias", tensors: &["attn_output"], presence: Presence::Absent },
            MLP_BIAS,
        ],
        ..PLAIN
    },
    // Adjacent pairs are rotated, as in the source. The graph has no biases.
    Architecture {
        name: "ernie4_5",
        model_types: &["ernie4_5"],
        biases: &[Bias { field: "use_bias", ..ATTENTION_BIAS }, Bias { field: "use_bias", ..MLP_BIAS }],
        ..PLAIN
    },
    Architecture {
        name: "ernie4_5-moe",
        model_types: &["ernie4_5_moe"],
        tensors: &["exp_probs_b.bias"],
        keys: &["leading_dense_block_count"],
        biases: &[Bias { field: "use_bias", ..ATTENTION_BIAS }, Bias { field: "use_bias", ..MLP_BIAS }],
        experts: Experts::Routed {
            count: "moe_num_experts",
            used: "moe_k",
            width: "moe_intermediate_size",
            first: Some("moe_layer_start_index"),
            shared: Some("moe_num_shared_experts"),
            sigmoid: false,
            scaled: false,
            stepped: true,
        },
        ..PLAIN
    },
    GRANITE,
    // Adjacent pairs are rotated, as in the source.
    Architecture {
        name: "glm4",
        model_types: &["glm4"],
        biases: &[
            Bias { tensors: QKV, presence: Presence::Optional, ..ATTENTION_BIAS },
            Bias { field: "mlp_bias", tensors: &["ffn_up", "ffn_down"], ..MLP_BIAS },
        ],
        partial: Some("partial_rotary_factor"),
        ..PLAIN
    },
    Architecture {
        name: "glm4moe",
        model_types: &["glm4_moe"],
        post_attention_norm: true,
        tensors: &["exp_probs_b.bias"],
        keys: &["expert_gating_func", "expert_weights_scale", "leading_dense_block_count"],
        biases: &[Bias { tensors: QKV, presence: Presence::Optional, ..ATTENTION_BIAS }, MLP_BIAS],
        partial: Some("partial_rotary_factor"),
        head_norms: Some("use_qk_norm"),
        experts: Experts::Routed {
            count: "n_routed_experts",
            used: "num_experts_per_tok",
            width: "moe_intermediate_size",
            first: Some("first_k_dense_replace"),
            shared: Some("n_shared_experts"),
            sigmoid: true,
            scaled: true,
            stepped: false,
        },
        ..PLAIN
    },
    Architecture {
        name: "minimax-m2",
        model_types: &["minimax_m2"],
        tensors: &["exp_probs_b.bias"],
        keys: &["expert_gating_func"],
        tied: Presence::Absent,
        biases: &[ATTENTION_BIAS],
        partial: Some("partial_rotary_factor"),
        experts: Experts::Routed {
            count: "num_local_experts",
            used: "num_experts_per_tok",
            width: "intermediate_size",
            first: None,
            shared: None,
            sigmoid: true,
            scaled: false,
            stepped: false,
        },
        ..PLAIN
    },
    COHERE2,
    // The graph rotates dense layers too. LayerNorm alone is written.
    Architecture {
        name: "cohere2moe",
        model_types: &["cohere2_moe"],
        keys: &["logit_scale", "leading_dense_block_count", "expert_gating_func"],
        tied: Presence::Optional,
        heads_fill_width: false,
        unrotated: Unrotated::NotWindowedButDense,
        windows: Windows::Listed { period: 4 },
        experts: Experts::Averaged {
            count: "num_experts",
            width: "intermediate_size",
            dense: "prefix_dense_intermediate_size",
            first: "first_k_dense_replace",
            shared: "num_shared_experts",
            scores: "expert_selection_fn",
        },
        ..COHERE2
    },
    // YaRN's own factor of the scores, and queries that grow with the position.
    Architecture {
        name: "mistral3",
        model_types: &["ministral3"],
        rows: Rows::Interleaved,
        keys: &["attention.temperature_scale"],
        yarn: Yarn::Ratio,
        ..PLAIN
    },
    Architecture {
        name: "arcee",
        model_types: &["arcee"],
        activation: "relu2",
        rows: Rows::Interleaved,
        biases: &[ATTENTION_BIAS, Bias { tensors: &["ffn_up", "ffn_down"], ..MLP_BIAS }],
        rope_factors: true,
        ..PLAIN
    },
    // Only a model of 64 layers (32B) has windows; the others are rotated in every layer.
    Architecture {
        name: "exaone4",
        model_types: &["exaone4"],
        post_attention_norm: true,
        biases: &[],
        heads_fill_width: true,
        unrotated: Unrotated::WithoutWindow,
        rope_factors: true,
        windows: Windows::Periodic { period: 4, stated: true, only_with: Some(64) },
        ..PLAIN
    },
    // The graph rotates layers with a window only. The loader requires a head.
    Architecture {
        name: "exaone-moe",
        model_types: &["exaone_moe"],
        tensors: &["exp_probs_b.bias"],
        keys: &["expert_gating_func", "expert_weights_scale", "leading_dense_block_count"],
        tied: Presence::Absent,
        biases: &[],
        unrotated: Unrotated::NotWindowed,
        rope_factors: true,
        windows: Windows::Listed { period: 4 },
        experts: Experts::Routed {
            count: "num_experts",
            used: "num_experts_per_tok",
            width: "moe_intermediate_size",
            first: Some("first_k_dense_replace"),
            shared: Some("num_shared_experts"),
            sigmoid: true,
            scaled: true,
            stepped: false,
        },
        ..PLAIN
    },
    // Adjacent pairs are rotated, as in the source. The loader fixes the length of chunks, the growth of the queries in
    // layers that are not rotated, and which layers these are; a model of 128 experts has no norms of heads.
    Architecture {
        name: "llama4",
        model_types: &["llama4_text"],
        unnormed_with: Some(128),
        unrotated: Unrotated::LastOf(4),
        rope_factors: true,
        chunk: Some(8192),
        growth: Some([0.1, 8192.0, 1.0]),
        fixed: &[
            ("attention_chunk_size", Fixed::Size(8192)),
            ("attn_temperature_tuning", Fixed::Flag(true)),
            ("attn_scale", Fixed::Number(0.1)),
            ("floor_scale", Fixed::Number(8192.0)),
        ],
        experts: Experts::Interleaved {
            count: "num_local_experts",
            width: "intermediate_size",
            dense: "intermediate_size_mlp",
        },
        ..PLAIN
    },
    Architecture {
        name: "starcoder2",
        model_types: &["starcoder2"],
        activation: "gelu_pytorch_tanh",
        renamed: &[("rms_norm_eps", "norm_epsilon")],
        layer_norms: true,
        biases: &[Bias {
            field: "use_bias",
            tensors: &["attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down"],
            presence: Presence::Required,
        }],
        heads_fill_width: true,
        ..PLAIN
    },
    GEMMA,
    Architecture {
        name: "gemma2",
        model_types: &["gemma2"],
        keys: &["attn_logit_softcapping", "final_logit_softcapping"],
        windows: Windows::Periodic { period: 2, stated: true, only_with: None },
        wide_scale: Some(46),
        ..GEMMA2
    },
    Architecture {
        name: "gemma3",
        model_types: &["gemma3_text"],
        keys: &["final_logit_softcapping"],
        windows: Windows::Periodic { period: 6, stated: true, only_with: None },
        wide_scale: Some(62),
        local_theta: LocalTheta::Default(10_000.0),
        ..GEMMA2
    },
    // Norms without the 1.
    Architecture {
        name: "gemma3n",
        model_types: &["gemma3n_text"],
        norms_plus_one: false,
        keys: &["final_logit_softcapping"],
        biases: &[ATTENTION_BIAS],
        windows: Windows::Listed { period: 5 },
        local_theta: LocalTheta::Default(10_000.0),
        streams: Some(GEMMA3N),
        unscaled: true,
        ..GEMMA2
    },
    // Norms without the 1. The divisors of frequencies are those of layers without a window, of which a part of the head is
    // not rotated; a layer without a projection to values takes its keys.
    Architecture {
        name: "gemma4",
        model_types: &["gemma4_text"],
        norms_plus_one: false,
        keys: &["final_logit_softcapping"],
        own_scales: &["ffn_gate_inp.scale", "ffn_down_exps.scale"],
        biases: &[ATTENTION_BIAS],
        rope_factors: true,
        windows: Windows::Listed { period: 6 },
        local_theta: LocalTheta::Default(10_000.0),
        by_layer: true,
        merged_tokens: true,
        unscaled: true,
        experts: Experts::Beside {
            enabled: "enable_moe_block",
            count: "num_experts",
            used: "top_k_experts",
            width: "moe_intermediate_size",
        },
        joined_experts: true,
        ..GEMMA2
    },
    Architecture {
        name: "phi2",
        model_types: &["phi"],
        activation: "gelu_new",
        renamed: &[("rms_norm_eps", "layer_norm_eps")],
        layer_norms: true,
        biases: &[],
        partial: Some("partial_rotary_factor"),
        ..PLAIN
    },
    Architecture {
        name: "phi3",
        model_types: &["phi3"],
        tensors: &["attn_qkv.weight"],
        partial: Some("partial_rotary_factor"),
        long_rope: true,
        windows: Windows::Zero,
        ..PLAIN
    },
    Architecture {
        name: "olmo",
        model_types: &["olmo"],
        layer_norms: true,
        fixed_epsilon: Some(1e-5),
        rows: Rows::Interleaved,
        keys: &["attention.clamp_kqv"],
        ..PLAIN
    },
    // OLMo 3 is OLMo 2 with windows; only layers without one scale their rotation.
    Architecture {
        name: "olmo2",
        model_types: &["olmo2", "olmo3"],
        windowed: Some("olmo3"),
        post_attention_norm: true,
        tied: Presence::Absent,
        heads_fill_width: true,
        local_theta: LocalTheta::Same,
        windows: Windows::Periodic { period: 4, stated: true, only_with: None },
        ..PLAIN
    },
    Architecture {
        name: "gptneox",
        model_types: &["gpt_neox"],
        activation: "gelu",
        renamed: &[("rms_norm_eps", "layer_norm_eps"), ("rope_theta", "rotary_emb_base")],
        layer_norms: true,
        rows: Rows::ByHead,
        tensors: &["attn_qkv.weight"],
        biases: &[Bias { tensors: &["attn_qkv"], presence: Presence::Required, ..ATTENTION_BIAS }],
        partial: Some("rotary_pct"),
        parallel_key: true,
        ..PLAIN
    },
    // llama.cpp has SiLU where the file does not say otherwise.
    Architecture {
        name: "bitnet",
        model_types: &["bitnet"],
        other_activation: Some("relu2"),
        weight_factors: true,
        tied: Presence::Required,
        ..PLAIN
    },
    Architecture {
        name: "gpt2",
        model_types: &["gpt2"],
        activation: "gelu_new",
        activation_field: "activation_function",
        renamed: &[
            ("hidden_size", "n_embd"),
            ("num_hidden_layers", "n_layer"),
            ("num_attention_heads", "n_head"),
            ("intermediate_size", "n_inner"),
            ("max_position_embeddings", "n_positions"),
            ("rms_norm_eps", "layer_norm_epsilon"),
        ],
        layer_norms: true,
        tensors: &["attn_qkv.weight"],
        biases: &[],
        ..PLAIN
    },
    DEEPSEEK2,
    // Streams of states that each half of a layer mixes, attention to a window and to compressed entries.
    Architecture {
        name: "deepseek4",
        model_types: &["deepseek_v4"],
        tensors: &["exp_probs_b.bias", "attn_sinks.weight"],
        keys: &["expert_gating_func", "expert_weights_scale"],
        tied: Presence::Absent,
        partial: Some("partial_rotary_factor"),
        yarn: Yarn::Unscaled,
        recurrence: Recurrence::Compressed,
        experts: Experts::Hashed,
        ..PLAIN
    },
    // Kimi delta attention in most layers, latent attention without position embedding in the others.
    Architecture {
        name: "kimi-linear",
        model_types: &["kimi_linear"],
        one_epsilon: &["kimi_linear"],
        renamed: &[
            ("max_position_embeddings", "model_max_length"),
            ("num_experts_per_tok", "num_experts_per_token"),
            ("norm_topk_prob", "moe_renormalize"),
            ("n_group", "num_expert_group"),
            ("n_routed_experts", "num_experts"),
            ("n_shared_experts", "num_shared_experts"),
        ],
        tied: Presence::Absent,
        unrotated: Unrotated::All,
        recurrence: Recurrence::ChannelDelta,
        experts: Experts::Grouped { softmax: "" },
        ..DEEPSEEK2
    },
    // An indexer chooses the tokens that a query attends to.
    Architecture {
        name: "deepseek32",
        model_types: &["deepseek_v32"],
        one_epsilon: &[],
        indexer: Indexers::Every,
        ..DEEPSEEK2
    },
    Architecture {
        name: "glm-dsa",
        model_types: &["glm_moe_dsa"],
        one_epsilon: &["glm_moe_dsa"],
        indexer: Indexers::Listed,
        ..DEEPSEEK2
    },
    Architecture {
        name: "gpt-oss",
        model_types: &["gpt_oss"],
        post_attention_norm: true,
        split: &[
            ("mlp.experts.gate_up_proj_bias", Split::Biases(&["ffn_gate_exps.bias", "ffn_up_exps.bias"])),
            ("mlp.experts.down_proj_bias", Split::Biases(&["ffn_down_exps.bias"])),
        ],
        tensors: &["ffn_gate_inp.bias", "attn_sinks.weight"],
        biases: &[Bias { presence: Presence::Required, ..ATTENTION_BIAS }, MLP_BIAS],
        tied: Presence::Absent,
        yarn: Yarn::Untruncated,
        windows: Windows::Periodic { period: 2, stated: false, only_with: None },
        experts: Experts::Every {
            count: "num_local_experts",
            width: "intermediate_size",
            normalized: None,
            shared: None,
        },
        swiglu: Some((1.702, 7.0)),
        ..PLAIN
    },
    QWEN3_NEXT,
    // Value heads are in ggml's order. Positions have several coordinates, which are equal in text.
    Architecture {
        name: "qwen35",
        model_types: &["qwen3_5_text"],
        recurrence: Recurrence::GatedDelta { tiled: true },
        split: &[],
        sections: true,
        experts: Experts::None,
        ..QWEN3_NEXT
    },
    Architecture {
        name: "qwen35moe",
        model_types: &["qwen3_5_moe_text"],
        recurrence: Recurrence::GatedDelta { tiled: true },
        split: &[],
        sections: true,
        ..QWEN3_NEXT
    },
    LFM2,
    Architecture {
        name: "lfm2moe",
        model_types: &["lfm2_moe"],
        tensors: &["exp_probs_b.bias"],
        keys: &["expert_gating_func", "leading_dense_block_count"],
        experts: Experts::Routed {
            count: "num_experts",
            used: "num_experts_per_tok",
            width: "moe_intermediate_size",
            first: Some("num_dense_layers"),
            shared: None,
            sigmoid: true,
            scaled: false,
            stepped: false,
        },
        ..LFM2
    },
    GRANITE_HYBRID,
    // The same with experts beside the MLP, which is stored as a shared one.
    Architecture {
        own_names: &[("shared_mlp.output_linear", "ffn_down_shexp")],
        renamed: &[],
        split: &[(
            "shared_mlp.input_linear.weight",
            Split::Halves(["ffn_gate_shexp.weight", "ffn_up_shexp.weight"]),
        )],
        experts: Experts::BesideShared { count: "num_local_experts", shared: "shared_intermediate_size" },
        ..GRANITE_HYBRID
    },
    // Constant factors are multiplied into the weights of a file.
    Architecture {
        name: "falcon-h1",
        model_types: &["falcon_h1"],
        own_names: &[("pre_ff_layernorm.weight", "ffn_norm")],
        recurrence: Recurrence::Parallel,
        columns_of_heads: true,
        ..PLAIN
    },
    // No position embedding. The graph does not normalize the weights of experts.
    Architecture {
        name: "jamba",
        model_types: &["jamba"],
        biases: &[],
        heads_fill_width: true,
        unrotated: Unrotated::All,
        recurrence: Recurrence::SelectiveScan,
        experts: Experts::Periodic { count: "num_experts" },
        ..PLAIN
    },
    NEMOTRON_H,
    // The same with experts in place of MLPs.
    Architecture {
        name: "nemotron_h_moe",
        tensors: &["exp_probs_b.bias"],
        keys: &["expert_gating_func", "expert_weights_scale", "expert_group_count"],
        experts: Experts::Blocks { shared: "moe_shared_expert_intermediate_size", latent: "moe_latent_size" },
        ..NEMOTRON_H
    },
];

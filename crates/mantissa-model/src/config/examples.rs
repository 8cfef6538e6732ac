//! Small configurations of every architecture, for the tests of this crate.

use serde_json::Value;

/// Architectures whose example has a tensor `self_attn.q_proj.bias` in its second layer.
pub(crate) const QUERY_BIASES: [&str; 7] =
    ["glm4", "qwen2", "seed_oss", "starcoder2", "qwen2_moe", "phi", "gpt_oss"];

/// Architectures whose example has a tensor `self_attn.k_norm.weight` in its first layer.
pub(crate) const KEY_NORMS: [&str; 11] = [
    "apertus",
    "qwen3",
    "exaone4",
    "exaone_moe",
    "gemma3n_text",
    "gemma4_text",
    "qwen3_moe",
    "gemma3_text",
    "minimax_m2",
    "olmo2",
    "olmo3",
];

/// Returns a small config of each architecture, for the tests of this crate.
pub(crate) fn example(model_type: &str) -> Value {
    let mut config = serde_json::json!({
        "model_type": model_type, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 100,
        "max_position_embeddings": 32, "rms_norm_eps": 1e-5, "tie_word_embeddings": false, "sliding_window": 8
    });
    let more = match model_type {
        "gpt2" => serde_json::json!({"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32}),
        "mixtral" => serde_json::json!({"num_local_experts": 3, "num_experts_per_tok": 2}),
        "qwen2_moe" | "qwen3_moe" => serde_json::json!({
            "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [0],
            "shared_expert_intermediate_size": 40
        }),
        "llama4_text" => serde_json::json!({
            "num_hidden_layers": 3, "intermediate_size_mlp": 80, "num_local_experts": 3, "num_experts_per_tok": 1,
            "moe_layers": [0, 2], "no_rope_layers": [1, 1, 0], "attention_chunk_size": 8
        }),
        "gemma3n_text" => serde_json::json!({
            "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention", "sliding_attention",
            "full_attention"], "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 10, "vocab_size_per_layer_input": 100,
            "laurel_rank": 6, "altup_num_inputs": 3, "intermediate_size": [96, 96, 96, 96]
        }),
        "gemma4_text" => serde_json::json!({
            "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention", "sliding_attention",
            "full_attention"], "global_head_dim": 20, "num_kv_shared_layers": 2, "use_double_wide_mlp": true,
            "enable_moe_block": true, "num_experts": 3, "top_k_experts": 2, "moe_intermediate_size": 24,
            "hidden_size_per_layer_input": 10, "vocab_size_per_layer_input": 100, "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default"}
            }
        }),
        "ministral3" => serde_json::json!({"rope_parameters": {
            "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.1
        }}),
        "ernie4_5_moe" => serde_json::json!({
            "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, "moe_intermediate_size": 24
        }),
        "minimax_m2" => {
            serde_json::json!({"num_local_experts": 3, "num_experts_per_tok": 2, "rotary_dim": 8})
        }
        "exaone_moe" => serde_json::json!({
            "num_experts": 4, "num_experts_per_tok": 2, "num_shared_experts": 1, "moe_intermediate_size": 24
        }),
        "glm4_moe" => serde_json::json!({
            "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 24
        }),
        "deepseek_v2" | "deepseek_v3" | "deepseek_v32" | "kimi_k2" | "glm4_moe_lite" | "glm_moe_dsa" => {
            serde_json::json!({
                "q_lora_rank": 20, "kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 8,
                "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1,
                "moe_intermediate_size": 24
            })
        }
        "deepseek_v4" => serde_json::json!({
            "num_key_value_heads": 1, "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"],
            "compress_rates": {"heavily_compressed_attention": 5, "compressed_sparse_attention": 2},
            "partial_rotary_factor": 0.25, "q_lora_rank": 20, "o_groups": 2, "o_lora_rank": 6, "index_n_heads": 3,
            "index_head_dim": 8, "index_topk": 2, "hc_mult": 3, "num_hash_layers": 1, "n_routed_experts": 4,
            "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_bias": false
        }),
        "cohere2_moe" => serde_json::json!({
            "rms_norm_eps": null, "num_experts": 4, "num_experts_per_tok": 2, "num_shared_experts": 1, "first_k_dense_replace": 1,
            "prefix_dense_intermediate_size": 40
        }),
        "apertus" => serde_json::json!({"rope_parameters": {"rope_type": "default"}}),
        "gpt_oss" => serde_json::json!({
            "num_local_experts": 3, "num_experts_per_tok": 2, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}
        }),
        _ => recurrent(model_type),
    };
    if let (Value::Object(config), Value::Object(more)) = (&mut config, more) {
        config.extend(more);
    }
    config
}

/// Fields of an architecture with recurrent mixers; none for the others.
fn recurrent(model_type: &str) -> Value {
    match model_type {
        "qwen3_next" | "qwen3_5_text" | "qwen3_5_moe_text" => serde_json::json!({
            "full_attention_interval": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
            "linear_key_head_dim": 8, "linear_value_head_dim": 12, "num_experts": 3, "num_experts_per_tok": 2,
            "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, "mlp_only_layers": [0]
        }),
        "granitemoehybrid" => serde_json::json!({
            "shared_intermediate_size": 96, "num_local_experts": 0, "layer_types": ["mamba", "attention"],
            "mamba_n_heads": 8, "mamba_d_state": 6
        }),
        "kimi_linear" => serde_json::json!({
            "layer_types": ["linear_attention", "full_attention"], "linear_head_dim": 8, "linear_num_heads": 3,
            "kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 8, "model_max_length": 32,
            "num_experts": 4, "num_experts_per_token": 2, "num_shared_experts": 1, "moe_intermediate_size": 24
        }),
        "falcon_h1" => serde_json::json!({
            "mamba_d_ssm": 48, "mamba_n_heads": 8, "mamba_d_state": 6, "mamba_n_groups": 2, "attention_bias": false, "mlp_bias": false
        }),
        "bamba" => {
            serde_json::json!({"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_state": 6})
        }
        "mamba2" => serde_json::json!({"num_heads": 8, "n_groups": 2, "state_size": 6}),
        "jamba" => serde_json::json!({
            "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 3, "num_experts_per_tok": 2, "mamba_d_state": 4
        }),
        "nemotron_h" => serde_json::json!({
            "hybrid_override_pattern": "M*-", "num_hidden_layers": 3, "mamba_num_heads": 4, "mamba_head_dim": 6,
            "ssm_state_size": 5, "n_groups": 2
        }),
        "lfm2_moe" => serde_json::json!({
            "layer_types": ["conv", "full_attention"], "num_dense_layers": 1, "num_experts": 3, "num_experts_per_tok": 2,
            "moe_intermediate_size": 24
        }),
        "lfm2" => {
            serde_json::json!({"block_auto_adjust_ff_dim": false, "full_attn_idxs": [1], "norm_eps": 1e-5})
        }
        _ => serde_json::json!({}),
    }
}

use serde_json::{Value, json};

use super::*;
use crate::rope::{RopeScaling, Yarn, yarn_mscale};

fn llama() -> Value {
    json!({
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 10000.0, "unknown_field": [1, 2]
    })
}

fn parse(value: &Value) -> Result<ModelConfig, ConfigError> {
    ModelConfig::from_json(value, "dir/config.json")
}

fn with(changes: Value) -> Value {
    let mut config = llama();
    for (field, value) in changes.as_object().unwrap() {
        config[field] = value.clone();
    }
    config
}

#[test]
fn a_plain_config_has_the_defaults_of_its_type() {
    let config = parse(&llama()).unwrap();
    assert_eq!((config.head_dim, config.query_width(), config.key_value_width()), (16, 64, 32));
    assert_eq!(
        (config.tie_word_embeddings, config.biases, config.hidden_act),
        (false, Biases::default(), Activation::Silu)
    );
    assert_eq!(config.windows, [None; 3]);
    assert_eq!(config.rope, Rope { theta: 1e4, scaling: RopeScaling::Default });

    let bitnet =
        json!({"model_type": "bitnet", "hidden_act": null, "rope_theta": null, "rms_norm_eps": 1e-20});
    let config = parse(&with(bitnet)).unwrap();
    assert_eq!((config.hidden_act, config.rope.theta, config.rms_norm_eps), (Activation::Relu2, 5e5, 1e-20));
    let qwen3 = parse(&with(json!({"model_type": "qwen3"}))).unwrap();
    assert_eq!((qwen3.head_dim, qwen3.has_head_norms()), (128, true));
    let qwen2 = parse(&with(json!({"model_type": "qwen2"}))).unwrap();
    assert_eq!(qwen2.biases, Biases { qkv: true, ..Biases::default() });
    let mut one_head_each = llama();
    one_head_each.as_object_mut().unwrap().remove("num_key_value_heads");
    assert_eq!(parse(&one_head_each).unwrap().num_key_value_heads, 4);
}

/// Every way in which a field may be wrong names the field.
#[test]
fn wrong_fields_are_named() {
    let big = 1u64 << 40;
    let cases = [
        ("model_type", vec![json!(null), json!("gpt1"), json!(3)]),
        (
            "hidden_size",
            vec![json!(null), json!("64"), json!(0), json!(-64), json!(64.5), json!(big), json!([64])],
        ),
        ("intermediate_size", vec![json!(null), json!("96"), json!(0), json!(-1), json!(big)]),
        ("num_hidden_layers", vec![json!(null), json!("3"), json!(0), json!(1u64 << 31), json!(10_001)]),
        ("num_attention_heads", vec![json!(null), json!("4"), json!(0), json!(6), json!(big)]),
        ("num_key_value_heads", vec![json!("2"), json!(0), json!(3), json!(8), json!(big)]),
        ("head_dim", vec![json!("16"), json!(0), json!(15), json!(1u64 << 23), json!(big)]),
        ("vocab_size", vec![json!(null), json!("100"), json!(0), json!(big)]),
        ("max_position_embeddings", vec![json!(null), json!("128"), json!(0), json!(big)]),
        (
            "rms_norm_eps",
            vec![json!(null), json!("1e-5"), json!(0), json!(-1e-5), json!(1e-60), json!(1e300)],
        ),
        ("tie_word_embeddings", vec![json!("true"), json!(1)]),
        ("hidden_act", vec![json!("tanh"), json!(1)]),
        ("attention_bias", vec![json!("no")]),
        ("mlp_bias", vec![json!(0)]),
        ("rope_theta", vec![json!(0), json!(-1.0), json!("1e4"), json!(1e300)]),
        ("rope_scaling", vec![json!("linear"), json!([1])]),
        ("rope_parameters", vec![json!(1)]),
        ("partial_rotary_factor", vec![json!(0.5), json!("1")]),
        ("bos_token_id", vec![json!(-1), json!("<s>"), json!(big)]),
        ("eos_token_id", vec![json!(-1), json!([2, "x"]), json!({})]),
    ];
    for (field, values) in cases {
        for value in values {
            let error = parse(&with(json!({field: value}))).expect_err(&format!("{field} = {value}"));
            assert_eq!(error.field, field, "{value}: {error}");
            assert_eq!(
                error.found,
                if value.is_null() { "null".into() } else { value.to_string() },
                "{error}"
            );
            assert!(error.to_string().starts_with("dir/config.json: "));
        }
        let mut missing = llama();
        missing.as_object_mut().unwrap().remove(field);
        if let Err(error) = parse(&missing) {
            assert_eq!((error.field.as_str(), error.found.as_str()), (field, "nothing"));
        }
    }
}

#[test]
fn both_values_of_a_contradiction_are_given() {
    let error = parse(&with(json!({"num_attention_heads": 6}))).unwrap_err().to_string();
    assert!(error.contains("got 6") && error.contains("64"), "{error}");
    let error = parse(&with(json!({"num_key_value_heads": 8}))).unwrap_err().to_string();
    assert!(error.contains("got 8") && error.contains("which is 4"), "{error}");
    let error = parse(&with(json!({"model_type": "bitnet", "head_dim": 32}))).unwrap_err().to_string();
    assert!(error.contains("got 32") && error.contains("64 / 4"), "{error}");
}

#[test]
fn wrong_rotary_parameters_are_named() {
    let llama3 = json!({"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4});
    let cases = [
        (json!({"type": "dynamic", "factor": 2}), "type"),
        (json!({"rope_type": "longrope"}), "short_factor"),
        (json!({"rope_type": "long"}), "rope_type"),
        (json!({"rope_type": 7}), "rope_type"),
        (json!({"type": "linear"}), "factor"),
        (json!({"type": "linear", "factor": 0}), "factor"),
        (json!({"type": "linear", "factor": "2"}), "factor"),
        (json!({"rope_type": "llama3", "low_freq_factor": 1, "high_freq_factor": 4}), "factor"),
        (
            json!({"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}),
            "high_freq_factor",
        ),
        (
            json!({"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 0}),
            "original_max_position_embeddings",
        ),
        (json!({"rope_type": "yarn", "factor": 4, "beta_fast": -1}), "beta_fast"),
        (json!({"rope_type": "yarn", "factor": 4, "truncate": 1}), "truncate"),
        (json!({"rope_type": "yarn", "factor": 4, "rope_theta": 1}), "rope_theta"),
        (json!({"rope_theta": -3}), "rope_theta"),
        (json!({"partial_rotary_factor": 0.25}), "partial_rotary_factor"),
        (json!({"full_attention": {"rope_type": "default"}}), "full_attention"),
    ];
    for key in ["rope_scaling", "rope_parameters"] {
        assert!(parse(&with(json!({key: llama3.clone()}))).is_ok());
        for (parameters, field) in &cases {
            let error = parse(&with(json!({key: parameters.clone()}))).expect_err(&parameters.to_string());
            assert_eq!(error.field, format!("{key}.{field}"), "{error}");
        }
    }
}

#[test]
fn rotary_parameters_are_read_in_both_forms() {
    let rope = |changes| parse(&with(changes)).unwrap().rope;
    let old = rope(json!({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4}}));
    let new = json!({"rope_theta": null, "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}});
    assert_eq!(old, rope(new));
    assert_eq!(old, Rope { theta: 5e5, scaling: RopeScaling::Linear { factor: 4.0 } });

    let yarn = |parameters| match rope(json!({"rope_scaling": parameters})).scaling {
        RopeScaling::Yarn(yarn) => yarn,
        other => panic!("{other:?}"),
    };
    let plain = yarn(json!({"rope_type": "yarn", "factor": 4}));
    let defaults = Yarn {
        factor: 4.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        truncate: true,
        original_context: 128,
        attention_factor: yarn_mscale(4.0, 1.0),
        mscale_all_dim: 0.0,
    };
    assert_eq!(plain, defaults);
    let derived =
        yarn(json!({"rope_type": "yarn", "original_max_position_embeddings": 32, "attention_factor": 0.5}));
    assert_eq!((derived.factor, derived.attention_factor), (4.0, 0.5));
    let both = yarn(json!({"rope_type": "yarn", "factor": 4, "mscale": 1.5, "mscale_all_dim": 0.5}));
    assert_eq!(both.attention_factor, yarn_mscale(4.0, 1.5) / yarn_mscale(4.0, 0.5));
}

#[test]
fn windows_follow_the_type() {
    let windows = |changes| parse(&with(changes)).map(|c| c.windows);
    let mistral =
        |window: Value| windows(json!({"model_type": "mistral", "sliding_window": window})).unwrap();
    assert_eq!(mistral(json!(8)), [Some(8); 3]);
    assert_eq!(mistral(json!(null)), [None; 3]);
    assert_eq!(windows(json!({"model_type": "mistral"})).unwrap(), [Some(4096); 3]);
    assert_eq!(windows(json!({"sliding_window": 8})).unwrap(), [None; 3]);

    let qwen = json!({"model_type": "qwen2", "sliding_window": 8, "max_window_layers": 1});
    assert_eq!(windows(qwen.clone()).unwrap(), [None; 3]);
    let mut used = qwen;
    used["use_sliding_window"] = json!(true);
    assert_eq!(windows(used.clone()).unwrap(), [None, Some(8), Some(8)]);
    used["layer_types"] = json!(["sliding_attention", "full_attention", "sliding_attention"]);
    assert_eq!(windows(used.clone()).unwrap(), [Some(8), None, Some(8)]);

    let refused = |field: &str, value: Value| {
        let mut changed = used.clone();
        changed[field] = value;
        windows(changed).unwrap_err().field
    };
    assert_eq!(refused("layer_types", json!(["full_attention"])), "layer_types");
    assert_eq!(refused("layer_types", json!(["linear", "linear", "linear"])), "layer_types");
    assert_eq!(refused("use_sliding_window", json!(false)), "layer_types");
    assert_eq!(refused("use_sliding_window", json!("yes")), "use_sliding_window");
    assert_eq!(refused("sliding_window", json!(0)), "sliding_window");
    used.as_object_mut().unwrap().remove("layer_types");
    used["max_window_layers"] = json!(-1);
    assert_eq!(windows(used).unwrap_err().field, "max_window_layers");
}

#[test]
fn special_tokens_are_ids() {
    let mut config = parse(&with(json!({"bos_token_id": 1, "eos_token_id": 2}))).unwrap();
    assert_eq!((config.bos_token_id, &config.eos_token_ids[..]), (Some(1), &[2][..]));
    config.apply_generation_config(&json!({"bos_token_id": 7}), "g").unwrap();
    assert_eq!(config.bos_token_id, Some(7));
    assert_eq!(ModelConfig::end_tokens(&json!({"eos_token_id": [1, 2]}), "g").unwrap(), [1, 2]);
    assert!(ModelConfig::end_tokens(&json!({}), "g").unwrap().is_empty());
    let nested = json!({"eos_token_id": [1, 106], "text_config": {"eos_token_id": [1, 2]}});
    assert_eq!(ModelConfig::end_tokens(&nested, "c").unwrap(), [1, 106, 2]);
    assert!(ModelConfig::end_tokens(&json!({"eos_token_id": "x"}), "g").is_err());
    assert!(config.apply_generation_config(&json!([]), "g").is_err());
}

#[test]
fn other_json_is_no_config() {
    for value in [json!([]), json!(null), json!("llama")] {
        assert_eq!(parse(&value).unwrap_err().field, "the file");
    }
    let long = parse(&with(json!({"model_type": "x".repeat(5000)}))).unwrap_err();
    assert!(long.to_string().len() < 400);
    assert!(!parse(&with(json!({"model_type": "a\nb"}))).unwrap_err().to_string().contains('\n'));
}

/// Layers without a position embedding: listed or by interval (SmolLM3), or those without a window (EXAONE 4.0).
#[test]
fn rotated_layers_follow_the_type() {
    let rotated = |changes| parse(&with(changes)).map(|config| config.rotated_layers);
    assert_eq!(rotated(json!({"no_rope_layers": [0, 0, 0]})).unwrap(), [true; 3], "not a field of llama");
    let smol = |changes: Value| {
        let mut config = json!({"model_type": "smollm3"});
        config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        rotated(config)
    };
    assert_eq!(smol(json!({"no_rope_layers": [1, 0, 1]})).unwrap(), [true, false, true]);
    assert_eq!(smol(json!({"no_rope_layer_interval": 2})).unwrap(), [true, false, true]);
    assert_eq!(smol(json!({})).unwrap(), [true; 3]);
    for value in [json!([1, 0]), json!([1, 0, 2]), json!([true, false, true]), json!(1)] {
        assert_eq!(smol(json!({"no_rope_layers": value})).unwrap_err().field, "no_rope_layers");
    }
    let error = smol(json!({"use_sliding_window": true})).unwrap_err();
    assert_eq!(error.field, "use_sliding_window");

    let types = json!(["sliding_attention", "full_attention", "sliding_attention"]);
    let hybrid = json!({"model_type": "exaone4", "sliding_window": 8, "layer_types": types});
    assert_eq!(rotated(hybrid).unwrap(), [true, false, true]);
    let plain = json!({"model_type": "exaone4", "sliding_window": null});
    assert_eq!(rotated(plain).unwrap(), [true; 3]);
}

fn of(model_type: &str, changes: Value) -> Result<ModelConfig, ConfigError> {
    let mut config = example(model_type);
    for (field, value) in changes.as_object().unwrap() {
        config[field] = value.clone();
    }
    parse(&config)
}

/// Fields that change what a model computes and are not supported are refused by the name they have in the file.
#[test]
fn unsupported_features_of_a_type_are_named() {
    let cases = [
        ("gemma2", "use_bidirectional_attention", json!(true)),
        ("gemma3_text", "hidden_activation", json!("relu")),
        ("gemma2", "attn_logit_softcapping", json!(-1)),
        ("phi", "qk_layernorm", json!(true)),
        ("phi", "partial_rotary_factor", json!(0.2)),
        ("phi", "partial_rotary_factor", json!(1.5)),
        ("phi", "layer_norm_eps", json!(0)),
        ("gpt2", "n_embd", json!(0)),
        ("gpt2", "activation_function", json!("tanh")),
        ("gpt2", "scale_attn_by_inverse_layer_idx", json!(true)),
        ("gpt2", "scale_attn_weights", json!(false)),
        ("gpt_neox", "rotary_pct", json!(0.01)),
        ("mixtral", "num_local_experts", json!(0)),
        ("mixtral", "num_local_experts", json!(1 << 20)),
        ("mixtral", "num_experts_per_tok", json!(4)),
        ("qwen3_moe", "use_sliding_window", json!(true)),
        ("qwen2_moe", "shared_expert_intermediate_size", json!(0)),
        ("qwen2_moe", "decoder_sparse_step", json!(0)),
        ("deepseek_v2", "norm_topk_prob", json!(true)),
        ("deepseek_v2", "topk_method", json!("noaux_tc")),
        ("deepseek_v2", "moe_layer_freq", json!(2)),
        ("deepseek_v3", "scoring_func", json!("softmax")),
        ("deepseek_v3", "n_group", json!(3)),
        ("deepseek_v3", "n_group", json!(4)),
        ("deepseek_v3", "qk_rope_head_dim", json!(5)),
        ("deepseek_v3", "kv_lora_rank", json!(null)),
        ("deepseek_v3", "n_shared_experts", json!(-1)),
        ("gpt_oss", "swiglu_limit", json!(0)),
        ("gpt_oss", "layer_types", json!(["full_attention"])),
        ("olmo", "clip_qkv", json!(0)),
    ];
    for (model_type, field, value) in cases {
        let error = of(model_type, json!({field: value})).expect_err(&format!("{model_type}: {field}"));
        assert_eq!(error.field, field, "{model_type}: {error}");
    }
    let mut lost = example("gpt_oss");
    lost.as_object_mut().unwrap().remove("rope_scaling");
    assert_eq!(parse(&lost).unwrap_err().field, "rope_parameters");
}

#[test]
fn each_type_has_its_parts() {
    let config = of("gpt2", json!({})).unwrap();
    assert_eq!((config.intermediate_size, config.rotary_dim, config.num_key_value_heads), (256, 0, 4));
    let config = of("gpt_neox", json!({"rotary_pct": 0.5, "rotary_emb_base": 500})).unwrap();
    assert_eq!((config.rotary_dim, config.rope.theta, config.num_key_value_heads), (8, 500.0, 4));
    assert_eq!((config.norm_places, config.hidden_act), (NormPlaces::Parallel, Activation::Gelu));
    let config = of("gemma", json!({"hidden_act": "gelu"})).unwrap();
    assert_eq!((config.hidden_act, config.embedding_scale), (Activation::GeluTanh, Some(8.0)));
    let config = of("gemma2", json!({"final_logit_softcapping": null})).unwrap();
    assert_eq!((config.attention_softcap, config.logit_softcap), (Some(50.0), None));
    assert_eq!((config.windows, config.attention_scale), (vec![Some(8), None], 0.0625));
    let old = json!({"rope_theta": 7e5, "rope_scaling": {"rope_type": "linear", "factor": 8}});
    let config = of("gemma3_text", old).unwrap();
    assert_eq!(config.rope, Rope { theta: 7e5, scaling: RopeScaling::Linear { factor: 8.0 } });
    assert_eq!(config.local_rope, Some(Rope { theta: 1e4, scaling: RopeScaling::Default }));
    assert_eq!(config.windows, [Some(8); 2]);
    let config = of("deepseek_v3", json!({})).unwrap();
    assert_eq!((config.head_dim, config.rotary_dim, config.num_key_value_heads), (10, 4, 4));
    assert_eq!((config.attended_width(), config.experts.unwrap().layers), (32, vec![false, true]));
    let config = of("qwen2_moe", json!({"decoder_sparse_step": 2, "mlp_only_layers": []})).unwrap();
    assert_eq!(config.experts.unwrap().layers, [false, true]);
    let long = json!({"rope_scaling": {"type": "su", "short_factor": vec![1.0; 8], "long_factor": vec![2.0; 8]},
        "original_max_position_embeddings": 8});
    let rope = of("phi3", long).unwrap().rope;
    assert_eq!(rope.attention_factor(), (1.0 + 4.0_f64.ln() / 8.0_f64.ln()).sqrt() as f32);
    let tables = |positions| {
        let (mut cos, mut sin) = (vec![0.0; positions * 8], vec![0.0; positions * 8]);
        rope.fill_tables(16, positions, &mut cos, &mut sin);
        (cos[8], sin[8])
    };
    assert_ne!(tables(8), tables(9), "the longest sequence planned for decides");
}

#[test]
fn indexers_are_parsed_by_layer() {
    let config = |more: serde_json::Value| of("glm_moe_dsa", more);
    let latent = json!({"q_lora_rank": 20, "kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 8,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 24,
        "num_hidden_layers": 5});
    let with = |more: serde_json::Value| {
        let mut fields = latent.clone();
        fields.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        config(fields)
    };
    let own = |more| with(more).unwrap().indexer.unwrap().own;
    let indexer = with(json!({})).unwrap().indexer.unwrap();
    assert_eq!((indexer.heads, indexer.dim, indexer.chosen, indexer.interleaved), (32, 128, 2048, true));
    assert_eq!(indexer.own, [true; 5]);
    let (full, shared) = ("full", "shared");
    let types = json!({"indexer_types": [full, shared, full, shared, shared]});
    assert_eq!(own(types), [true, false, true, false, false]);
    assert_eq!(own(json!({"index_topk_pattern": "FSFSS"})), [true, false, true, false, false]);
    let schedule = json!({"index_topk_freq": 3, "index_skip_topk_offset": 2});
    assert_eq!(own(schedule), [true, true, false, false, true]);
    for (field, value) in [
        ("indexer_types", json!([shared, full, full, full, full])),
        ("indexer_types", json!([full])),
        ("index_topk_pattern", json!("FSX")),
        ("index_topk", json!(0)),
        ("index_head_dim", json!(2)),
        ("q_lora_rank", json!(null)),
    ] {
        let error = with(json!({field: value})).unwrap_err();
        assert_eq!(error.field, field, "{error}");
    }
}

/// DeepSeek-V4 as transformers writes its config, and as DeepSeek publishes it.
#[test]
fn compressed_attention_is_parsed_in_both_forms() {
    let common = json!({
        "num_hidden_layers": 3, "num_key_value_heads": 1, "head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "q_lora_rank": 20, "o_groups": 2, "o_lora_rank": 6, "index_n_heads": 3,
        "index_head_dim": 8, "compress_rope_theta": 5000.0, "sliding_window": 128, "layer_types": null, "compress_rates": null,
        "partial_rotary_factor": null, "num_hash_layers": null
    });
    let both = |changes: Value| {
        let mut fields = common.clone();
        fields.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        of("deepseek_v4", fields)
    };
    let yarn = json!({"type": "yarn", "factor": 4, "original_max_position_embeddings": 16});
    let published = both(json!({
        "compress_ratios": [0, 128, 4, 0], "qk_rope_head_dim": 8, "rope_theta": 100.0, "rope_scaling": yarn, "num_hash_layers": 1
    }));
    let published = published.unwrap();
    let written = both(json!({
        "layer_types": ["sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
        "partial_rotary_factor": 0.5, "mlp_layer_types": ["hash_moe", "moe", "moe"], "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
            "compress": {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4, "original_max_position_embeddings": 16,
                "attention_factor": 1.0, "partial_rotary_factor": 0.5}
        }
    }));
    assert_eq!(published, written.unwrap());
    assert_eq!(published.windows, [Some(128), None, None]);
    assert_eq!((published.rotary_dim, published.rope.theta), (8, 5000.0));
    assert_eq!(published.local_rope.unwrap().theta, 100.0);
    let error = both(json!({"layer_types": ["full_attention", "full_attention", "full_attention"], "partial_rotary_factor": 0.5})).unwrap_err();
    assert!(
        error.to_string().contains("layer_types") && error.to_string().contains("sliding_attention"),
        "{error}"
    );
    for (field, value) in [
        ("o_groups", json!(3)),
        ("hc_mult", json!(17)),
        ("partial_rotary_factor", json!(2.0)),
        ("index_head_dim", json!(4)),
        ("num_key_value_heads", json!(2)),
        ("scoring_func", json!("sigmoid")),
        ("mlp_layer_types", json!(["sparse"])),
    ] {
        let mut changes = json!({"qk_rope_head_dim": 8});
        changes[field] = value;
        let error = both(changes).unwrap_err().to_string();
        assert!(error.contains(field), "{field}: {error}");
    }
}

/// Recorded of transformers 5.24: the flag of each configuration class where the file leaves it out.
#[test]
fn heads_are_tied_by_default_where_the_class_says_so() {
    let tied = [
        "cohere2",
        "cohere2_moe",
        "ernie4_5",
        "ernie4_5_moe",
        "gemma",
        "gemma2",
        "gemma3_text",
        "gemma3n_text",
        "gemma4_text",
        "gpt2",
        "lfm2",
        "lfm2_moe",
        "smollm3",
        "starcoder2",
    ];
    for row in crate::Architecture::all() {
        assert_eq!(row.tied, tied.contains(&row.name), "{}", row.name);
    }
}

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
    assert_eq!(qwen2.biases, Biases { qkv: true, output: false, mlp: false });
    let mut one_head_each = llama();
    one_head_each.as_object_mut().unwrap().remove("num_key_value_heads");
    assert_eq!(parse(&one_head_each).unwrap().num_key_value_heads, 4);
}

/// Every way in which a field may be wrong names the field.
#[test]
fn wrong_fields_are_named() {
    let big = 1u64 << 40;
    let cases = [
        ("model_type", vec![json!(null), json!("gpt2"), json!(3)]),
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
        ("hidden_act", vec![json!("gelu"), json!(1)]),
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
    assert!(error.contains("found 6") && error.contains("64"), "{error}");
    let error = parse(&with(json!({"num_key_value_heads": 8}))).unwrap_err().to_string();
    assert!(error.contains("found 8") && error.contains("which is 4"), "{error}");
    let error = parse(&with(json!({"model_type": "bitnet", "head_dim": 32}))).unwrap_err().to_string();
    assert!(error.contains("found 32") && error.contains("64 / 4"), "{error}");
}

#[test]
fn wrong_rotary_parameters_are_named() {
    let llama3 = json!({"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4});
    let cases = [
        (json!({"type": "dynamic", "factor": 2}), "type"),
        (json!({"rope_type": "longrope"}), "rope_type"),
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
fn end_tokens_come_from_the_generation_config_first() {
    let mut config = parse(&with(json!({"bos_token_id": 1, "eos_token_id": 2}))).unwrap();
    assert_eq!((config.bos_token_id, &config.eos_token_ids[..]), (Some(1), &[2][..]));
    config.apply_generation_config(&json!({"eos_token_id": [1, 2]}), "g").unwrap();
    assert_eq!((config.bos_token_id, &config.eos_token_ids[..]), (Some(1), &[1, 2][..]));
    config.apply_generation_config(&json!({}), "g").unwrap();
    assert_eq!(config.eos_token_ids, [1, 2]);
    assert!(config.apply_generation_config(&json!([]), "g").is_err());
    assert!(config.apply_generation_config(&json!({"eos_token_id": "x"}), "g").is_err());
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

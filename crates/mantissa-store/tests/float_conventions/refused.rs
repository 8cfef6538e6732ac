//! Refusals by name: unsupported schemes, contradictions, damage.

use super::*;

/// A config of ONNX weights that contradicts itself or the tensors.
#[test]
fn broken_onnx_is_refused_by_name() {
    let scheme = onnx::CONTAINER.as_stored("int4-g32-asym".parse().unwrap(), Dtype::BF16);
    let plan = LinearPlan::new(MODULE, &scheme, None, (ROWS, COLS));
    let bytes = onnx::CONTAINER.tensors(&plan, &weight(&scheme), SideTensors::Nothing).unwrap();
    let specs = onnx::CONTAINER.specs(&plan).unwrap();
    let tensors = specs.into_iter().zip(bytes).map(|(spec, (_, bytes))| (spec, bytes)).collect();
    let layer = PlannedLayer { module: MODULE, scheme: &scheme, rows: ROWS, cols: COLS };
    let config = onnx::CONTAINER.quantization_config(&ModelPlan::new(vec![layer], &scheme)).unwrap();
    let good = Model { config, tensors };
    good.read().unwrap();
    for (pointer, value, says) in [
        ("/layers", json!(7), "quantization_config.layers"),
        ("/layers/model.layers.0.mlp.up_proj/scheme", json!("int3-g32"), "scheme"),
        ("/layers/model.layers.0.mlp.up_proj/scheme", json!("nvfp4"), "scheme"),
        ("/layers/model.layers.0.mlp.up_proj/scheme", json!(null), "scheme"),
        ("/layers/model.layers.0.mlp.up_proj/shape", json!([32]), "shape"),
        ("/layers/model.layers.0.mlp.up_proj/shape", json!([96, 32]), "weight_quantized"),
        ("/layers/model.layers.0.mlp.up_proj/shape", json!([-1, 1u64 << 63]), "shape"),
        ("/layers/model.layers.0.mlp.up_proj/scheme", json!("int8-g32-asym"), "weight_quantized"),
        ("/layers/model.layers.0.mlp.up_proj/scheme", json!("int4-g16-asym"), "weight_scale"),
    ] {
        let mut model = good.clone();
        *model.config.pointer_mut(pointer).unwrap() = value;
        let text = model.refused(pointer);
        assert!(text.contains(says), "{pointer}: {text}");
    }
    for suffix in good.suffixes() {
        let mut model = good.clone();
        model.tensor(&suffix).0.name = "other".to_owned();
        assert!(model.read().is_err(), "{suffix}");
        let mut model = good.clone();
        model.tensor(&suffix).0.shape.push(1);
        model.refused(&suffix);
    }
}

#[test]
fn unsupported_schemes_are_refused() {
    for (container, scheme, input, says) in [
        (modelopt::CONTAINER, "int4-g32-asym", "", "without zero points"),
        (modelopt::CONTAINER, "nf4", "", "modelopt holds"),
        (modelopt::CONTAINER, "fp8-e4m3-tensor", "", "@static"),
        (compressed_tensors::CONTAINER, "fp8-e4m3-tensor", "fp8-e4m3-tensor", "per token"),
        (modelopt::CONTAINER, "fp8-e4m3-channel", "", "+fp8-e4m3-token"),
        (modelopt::CONTAINER, "int4-g36", "", "multiple of 36"),
        (modelopt::CONTAINER, "nvfp4:te", "", "nvfp4:torchao"),
        (bitsandbytes::CONTAINER, "nf4-g48", "", "blocks of"),
        (bitsandbytes::CONTAINER, "int8-channel", "int8-token:restricted", "int8-channel:restricted"),
        (bitsandbytes::CONTAINER, "int8-channel:restricted", "", "+int8-token:restricted"),
        (bitsandbytes::CONTAINER, "int4-g32", "", "nf4, fp4-bnb"),
        (bitsandbytes::CONTAINER, "dyn8-g64", "", "nf4, fp4-bnb"),
        (fp8::CONTAINER, "fp8-e4m3-t128x128", "", "+fp8-e4m3-g128"),
        (fp8::CONTAINER, "fp8-e4m3-channel", "fp8-e4m3-token", "tiles"),
        (onnx::CONTAINER, "int3-g32", "", "int4, int8"),
        (onnx::CONTAINER, "int4-g36", "", "multiple of 36"),
        (onnx::CONTAINER, "nvfp4", "", "one level"),
        (onnx::CONTAINER, "fp8-e4m3-t16x32", "", "one axis"),
        (onnx::CONTAINER, "int4-g32", "int8-token", "stores only weights"),
        (exl2::CONTAINER, "int7-g32", "", "int8 with f16"),
        (exl2::CONTAINER, "int4-g48", "", "multiple of 32"),
        (exl2::CONTAINER, "int4-g32-asym", "", "without zero points"),
        (exl2::CONTAINER, "int4-g32", "int8-token", "activations"),
        (mlx::CONTAINER, "int4-g32-asym", "", "minmax"),
        (mlx::CONTAINER, "int4-g16-asym:minmax", "", "mlx holds"),
        (mlx::CONTAINER, "nvfp4", "", "1level"),
        (mlx::CONTAINER, "mxfp4", "int8-token", "activations"),
    ] {
        let text = scheme;
        let scheme: Scheme = text.parse().unwrap();
        let input = Some(input).filter(|text| !text.is_empty()).map(|text| parse_activation(text).unwrap());
        let plan = LinearPlan::new(MODULE, &scheme, input.as_ref(), (ROWS, COLS));
        let error = container.specs(&plan).expect_err(text).to_string();
        assert!(error.contains(says), "{text}: {error}");
    }
}

/// Tensors without which a module is another valid one, not a damaged one.
const OPTIONAL: [&str; 4] = ["input_scale", "pre_quant_scale", "weight_g_idx", "weight_format"];

/// Every change of a tensor that can be made to any layout is refused.
#[test]
fn broken_tensors_are_refused() {
    let mut count = 0;
    for (name, dir) in folders() {
        let (good, _) = Model::of(&dir);
        good.read().unwrap();
        let mut check = |suffix: &str, what: &str, change: &dyn Fn(&mut Model)| {
            let mut model = good.clone();
            change(&mut model);
            model.refused(&format!("{name} {suffix} {what}"));
            count += 1;
        };
        for suffix in good.suffixes() {
            let suffix = suffix.as_str();
            if suffix == "weight_format" {
                check(suffix, "another layout", &|m| m.tensor(suffix).1 = vec![2]);
                continue;
            }
            if !OPTIONAL.contains(&suffix) && suffix != "weight_shape" {
                check(suffix, "missing", &|m| {
                    let name = format!("{MODULE}.{suffix}");
                    m.tensors.retain(|(spec, _)| spec.name != name);
                });
            }
            let resize = |shape: &'static [usize]| {
                move |m: &mut Model| {
                    let (spec, bytes) = m.tensor(suffix);
                    spec.shape = shape.to_vec();
                    let size = usize::try_from(spec.dtype.bits() / 8).unwrap();
                    bytes.resize(shape.iter().product::<usize>() * size, 0);
                }
            };
            check(suffix, "empty", &resize(&[0]));
            check(suffix, "another shape", &resize(&[3, 5]));
            check(suffix, "three axes", &resize(&[2, 2, 3]));
            for dtype in [Dtype::I64, Dtype::Bool, Dtype::F64] {
                check(suffix, "another dtype", &|m| {
                    let (spec, bytes) = m.tensor(suffix);
                    let same = spec.dtype == dtype;
                    spec.dtype = if same { Dtype::U16 } else { dtype };
                    let n: usize = spec.shape.iter().product();
                    bytes.resize(n * usize::try_from(spec.dtype.bits() / 8).unwrap(), 0);
                });
            }
        }
        assert!(count > 0, "{name}");
    }
    assert!(count > 18 * 20, "{count}");
}

#[test]
fn values_that_are_no_numbers_are_refused() {
    let nan = f32::NAN.to_le_bytes();
    for (name, suffix, at, bytes) in [
        ("modelopt-fp8", "weight", 17, &[0x7f][..]),
        ("modelopt-fp8", "weight_scale", 0, &nan[..]),
        ("modelopt-fp8", "input_scale", 0, &nan),
        ("modelopt-fp8", "input_scale", 0, &[0; 4]),
        ("modelopt-per-channel", "weight_scale", 8, &nan),
        ("modelopt-int4-awq", "weight_scale", 4, &nan),
        ("modelopt-int4-awq", "pre_quant_scale", 4, &nan),
        ("modelopt-nvfp4", "weight_scale", 3, &[0xff]),
        ("modelopt-nvfp4", "weight_scale_2", 0, &nan),
        ("modelopt-nvfp4", "weight_scale_2", 0, &[0; 4]),
        ("modelopt-nvfp4", "input_scale", 0, &[1, 0, 0, 0]),
        ("modelopt-mxfp8", "weight_scale", 3, &[0xff]),
        ("bnb-nf4", "weight.absmax", 8, &nan),
        ("bnb-nf4", "weight.quant_map", 8, &nan),
        ("bnb-nf4", "weight.quant_map", 8, &0.7f32.to_le_bytes()),
        ("bnb-nf4-dq", "weight.nested_absmax", 0, &nan),
        ("bnb-nf4-dq", "weight.nested_quant_map", 40, &0.7f32.to_le_bytes()),
        ("bnb-int8", "SCB", 12, &nan),
        ("fp8-blocks", "weight", 5, &[0xff]),
        ("fp8-blocks", "weight_scale_inv", 4, &nan),
        ("fp8-powers", "weight_scale_inv", 1, &[0xff]),
        ("fp8-static", "input_scale", 0, &[0; 4]),
        ("mlx-affine4", "scales", 4, &nan),
        ("mlx-affine3", "biases", 4, &nan),
        ("mlx-mxfp4", "scales", 4, &[0xff]),
        ("mlx-mxfp8", "weight", 4, &[0x7f]),
        ("mlx-nvfp4", "scales", 4, &[0xff]),
        ("ct-int4-in-bytes", "weight", 9, &[8]),
        ("ct-int4-in-bytes", "weight", 9, &[0xf7]),
        ("ct-fp8-block", "weight_scale", 0, &nan),
        ("ct-actorder", "weight_g_idx", 0, &[7, 0, 0, 0]),
        ("ct-actorder", "weight_g_idx", 0, &[0xfe, 0xff, 0xff, 0xff]),
    ] {
        let mut model = folder(name);
        model.tensor(suffix).1[at..at + bytes.len()].copy_from_slice(bytes);
        let text = model.refused(&format!("{name} {suffix}"));
        assert!(text.contains(suffix), "{name} {suffix}: {text}");
    }
}

#[test]
fn broken_configurations_are_refused_by_their_key() {
    for (name, key, value, says) in [
        ("modelopt-fp8", "quant_algo", json!("FP9"), "quant_algo"),
        ("modelopt-fp8", "quant_algo", json!(null), "quant_algo"),
        ("modelopt-fp8", "quant_algo", json!("NVFP4"), "weight"),
        ("modelopt-fp8", "quant_algo", json!("FP8_PER_CHANNEL_PER_TOKEN"), "weight_scale"),
        ("modelopt-fp8", "quant_algo", json!("MXFP8"), "weight_scale"),
        ("modelopt-nvfp4", "quant_algo", json!("FP8"), "weight"),
        ("modelopt-nvfp4", "quant_algo", json!("W4A16_AWQ"), "weight"),
        ("modelopt-int4-awq", "group_size", json!(0), "group_size"),
        ("modelopt-int4-awq", "group_size", json!("32"), "group_size"),
        ("modelopt-int4-awq", "group_size", json!(48), "weight_scale"),
        ("modelopt-mixed", "quantized_layers", json!(null), "quantized_layers"),
        (
            "modelopt-mixed",
            "quantized_layers",
            json!({"lm_head": {"quant_algo": "FP8"}}),
            "weight: expected F8_E4M3",
        ),
        ("modelopt-mixed", "quantized_layers", json!({MODULE: {"quant_algo": 8}}), "quantized_layers"),
        ("bnb-nf4", "load_in_4bit", json!(false), "load_in_4bit"),
        ("bnb-nf4", "load_in_8bit", json!(true), "load_in_4bit"),
        ("bnb-nf4", "load_in_4bit", json!("yes"), "load_in_4bit"),
        ("bnb-nf4", "bnb_4bit_quant_storage", json!("bfloat16"), "bnb_4bit_quant_storage"),
        ("bnb-int8", "llm_int8_threshold", json!(-1), "llm_int8_threshold"),
        ("bnb-int8", "llm_int8_threshold", json!("6"), "llm_int8_threshold"),
        ("fp8-blocks", "fmt", json!("e5m2"), "fmt"),
        ("fp8-blocks", "activation_scheme", json!("token"), "activation_scheme"),
        ("fp8-blocks", "activation_scheme", json!("static"), "input_scale"),
        ("fp8-blocks", "weight_block_size", json!([24]), "weight_block_size"),
        ("fp8-blocks", "weight_block_size", json!([0, 40]), "weight_block_size"),
        ("fp8-blocks", "weight_block_size", json!([32, 40]), "weight_scale_inv"),
        ("fp8-blocks", "weight_block_size", json!(null), "weight_scale"),
        ("fp8-blocks", "scale_fmt", json!("ue5m3"), "scale_fmt"),
        ("fp8-blocks", "expert_dtype", json!("int4"), "expert_dtype"),
        ("mlx-affine4", "mode", json!("fp4"), "mode"),
        ("mlx-affine4", "bits", json!(7), "bits"),
        ("mlx-affine4", "bits", json!(8), "weight"),
        ("mlx-affine4", "group_size", json!(16), "group_size"),
        ("mlx-affine4", "group_size", json!(64), "weight"),
        ("mlx-affine4", MODULE, json!({"bits": 4}), "group_size"),
        ("mlx-affine4", "mode", json!("mxfp4"), "scales"),
        ("mlx-mxfp4", "mode", json!("affine"), "scales"),
        ("mlx-nvfp4", "group_size", json!(32), "group_size"),
        ("ct-actorder", "kv_cache_scheme", json!({"num_bits": 8, "strategy": "sideways"}), "kv_cache_scheme"),
        ("ct-hadamard", "transform_config", json!({"config_groups": {"a": {}}}), "apply"),
        ("ct-hadamard", "transform_config", json!({"config_groups": []}), "config_groups"),
    ] {
        let mut model = folder(name);
        model.config[key] = value.clone();
        let text = model.refused(&format!("{name} {key} {value}"));
        assert!(text.contains(says), "{name} {key} {value}: {text}");
    }
}

#[test]
fn transforms_that_would_have_to_be_run_and_are_not_known_are_refused() {
    let with = |change: &dyn Fn(&mut Value)| {
        let mut model = folder("ct-hadamard");
        change(&mut model.config["transform_config"]["config_groups"]["u"]);
        model
    };
    for (change, says) in [
        (&(|u: &mut Value| u["type"] = json!("random-hadamard")) as &dyn Fn(&mut Value), "random-hadamard"),
        (&|u| u["type"] = json!("random-matrix"), "random-matrix"),
        (&|u| u["randomize"] = json!(true), "randomize"),
        (&|u| u["head_dim"] = json!(24), "order 24"),
        (&|u| u["head_dim"] = json!("32"), "head_dim"),
        (&|u| u["apply"][0]["location"] = json!("sideways"), "sideways"),
        (&|u| u["apply"][0]["location"] = json!("k_cache"), "q_attn and k_cache"),
        (&|u| u["apply"][0]["targets"] = json!("Linear"), "targets"),
    ] {
        let text = with(change).refused(says);
        assert!(text.contains(says), "{says}: {text}");
    }
    // Already folded into the weights, for any matrix.
    let folded = with(&|u| {
        u["type"] = json!("random-hadamard");
        u["apply"][0]["location"] = json!("weight_output");
    });
    assert!(folded.read().unwrap().transforms.is_empty());
}

#[test]
fn seeded_damage_never_panics() {
    for (m, (name, dir)) in folders().into_iter().enumerate() {
        survive_damage(&dir, m as u64, 60, |linear| {
            if matches!(linear.weight, Weight::Quantized(_)) {
                assert!(values(linear).iter().all(|v| v.is_finite()), "{name}");
            }
        });
    }
}

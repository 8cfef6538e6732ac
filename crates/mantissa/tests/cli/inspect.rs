//! `mantissa inspect` on dense, quantized, bare and inconsistent models.

use std::fs;
use std::path::Path;

use mantissa_store::Dtype;
use serde_json::Value;

use crate::support::{fail, json, le, mantissa, root, shared, stderr, succeed, text, values, write, write_x};

fn copy_model(name: &str, to: &Path) {
    let from = root().join("tests/data/tiny").join(name);
    for file in ["config.json", "model.safetensors"] {
        fs::copy(from.join(file), to.join(file)).unwrap();
    }
}

fn edit_config(dir: &Path, edit: impl Fn(&mut Value)) {
    let path = dir.join("config.json");
    let mut config: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    edit(&mut config);
    fs::write(path, config.to_string()).unwrap();
}

#[test]
fn a_dense_model_adds_up() {
    let model = root().join("tests/data/tiny/qwen3-qknorm");
    let report = json(&["inspect", text(&model), "--json"]);
    assert_eq!(report["model_type"], "qwen3");
    assert_eq!(report["convention"], "dense");
    assert_eq!(
        (&report["architecture"]["layers"], &report["architecture"]["head_dim"]),
        (&2.into(), &12.into())
    );
    let tensors = report["tensors"].as_array().unwrap();
    let sum = |key: &str| tensors.iter().map(|t| t[key].as_u64().unwrap()).sum::<u64>();
    assert_eq!(
        (sum("parameters"), sum("bytes")),
        (report["parameters"].as_u64().unwrap(), report["bytes"].as_u64().unwrap())
    );
    assert_eq!(report["warnings"], Value::Array(Vec::new()));
    assert_eq!((&report["bits_per_weight"], &report["linear_bits_per_weight"]), (&32.0.into(), &32.0.into()));
    assert!(tensors.iter().all(|t| t.get("stats").is_none() && t["dtype"] == "F32"));
    let printed = succeed(&["inspect", text(&model)]);
    assert!(printed.contains("qwen3: 2 layers") && !printed.contains("q_norm"), "{printed}");
    assert!(
        succeed(&["inspect", text(&model), "--tensors"]).contains("model.layers.1.self_attn.q_norm.weight")
    );
}

#[test]
fn statistics_match_the_values_at_any_thread_count() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("bare.safetensors");
    let mut x = values(400 * 500);
    x[1234] = f32::NAN;
    x[1235] = 0.0;
    let scalar: (&str, Dtype, &[usize], Vec<u8>) = ("s", Dtype::F32, &[], le(&[2.5]));
    let index: (&str, Dtype, &[usize], Vec<u8>) = ("i", Dtype::I32, &[2], vec![0; 8]);
    write(&path, &[("x", Dtype::F32, &[400, 500], le(&x)), scalar, index]);
    let report = json(&["inspect", text(&path), "--stats", "--json", "--threads", "1"]);
    assert_eq!(report, json(&["inspect", text(&path), "--stats", "--json", "--threads", "3"]));
    assert_eq!((&report["model_type"], &report["linear_bits_per_weight"]), (&Value::Null, &Value::Null));
    let of = |name: &str| {
        report["tensors"].as_array().unwrap().iter().find(|t| t["name"] == name).unwrap().clone()
    };
    assert!(of("i").get("stats").is_none());
    assert_eq!(of("s")["stats"]["mean"], 2.5);
    let stats = &of("x")["stats"];
    let finite: Vec<f64> = x.iter().filter(|v| v.is_finite()).map(|&v| f64::from(v)).collect();
    let n = finite.len() as f64;
    let mean = finite.iter().sum::<f64>() / n;
    let central = |p: i32| finite.iter().map(|v| (v - mean).powi(p)).sum::<f64>() / n;
    let near = |key: &str, expected: f64| {
        let found = stats[key].as_f64().unwrap();
        assert!((found - expected).abs() <= 1e-9 * expected.abs().max(1e-3), "{key}: {found} {expected}");
    };
    near("mean", mean);
    near("std", central(2).sqrt());
    near("kurtosis", central(4) / central(2).powi(2));
    let amax = finite.iter().fold(0f64, |a, v| a.max(v.abs()));
    near("outlier_ratio", amax / (finite.iter().map(|v| v * v).sum::<f64>() / n).sqrt());
    assert_eq!((&stats["nan"], &stats["inf"]), (&1.into(), &0.into()));
    assert_eq!(stats["row_amax"]["max"].as_f64().unwrap() as f32, amax as f32);
    assert!(succeed(&["inspect", text(&path), "--stats"]).contains("kurtosis"));
}

#[test]
fn a_bare_file_needs_no_config() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("bare.safetensors");
    write_x(&path, &[3, 5], &values(15));
    let report = json(&["inspect", text(&path), "--json"]);
    assert_eq!((&report["parameters"], &report["bytes"]), (&15.into(), &60.into()));
    assert_eq!(report["architecture"], Value::Null);
}

#[test]
fn an_unknown_architecture_is_shown_with_a_warning_and_a_bad_field_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    copy_model("llama1-mha", dir.path());
    edit_config(dir.path(), |c| c["model_type"] = "gpt-of-tomorrow".into());
    let report = json(&["inspect", text(dir.path()), "--json"]);
    assert!(report["warnings"][0].as_str().unwrap().contains("gpt-of-tomorrow"));
    assert_eq!(mantissa(&["inspect", text(dir.path()), "--strict"]).status.code(), Some(1));

    edit_config(dir.path(), |c| {
        c["model_type"] = "llama".into();
        c["num_attention_heads"] = 0.into();
    });
    let line = fail(2, &["inspect", text(dir.path())]);
    assert!(line.contains("config.json") && line.contains("num_attention_heads"), "{line}");
}

#[test]
fn tensors_that_do_not_match_the_config_are_warned_of() {
    let dir = tempfile::tempdir().unwrap();
    copy_model("llama1-mha", dir.path());
    edit_config(dir.path(), |c| {
        c["vocab_size"] = 12345.into();
        c["num_hidden_layers"] = 3.into();
    });
    let report = json(&["inspect", text(dir.path()), "--json"]);
    let warnings = report["warnings"].to_string();
    assert!(warnings.contains("12345") && warnings.contains("model.layers.2."), "{warnings}");
    let output = mantissa(&["inspect", text(dir.path())]);
    assert!(output.status.success() && stderr(&output).contains("warning: tensor"), "{}", stderr(&output));
}

#[test]
fn quantized_models_count_logical_weights() {
    let Some(artifacts) = shared("artifacts") else { return };
    // Scales are F32 in these: 4 + 32/32, 8 + 8/32, 3 + (32 + 3)/32 and so on, plus a shape of 128 bits a tensor.
    let cases = [
        ("llmc_rtn_w4_g32_sym", "int4-g32", 5.0),
        ("llmc_gptq_w3_g32_asym_static", "int3-g32-asym", 4.09375),
        ("llmc_mxfp4", "mxfp4", 4.25),
        ("llmc_mxfp8", "mxfp8-e4m3", 8.25),
        ("llmc_nvfp4", "nvfp4", 4.5),
        ("llmc_fp8_dynamic", "fp8-e4m3-channel", 8.21),
        ("llmc_w8a8_int8_dyn", "int8-channel", 8.21),
    ];
    for (name, scheme, bits) in cases {
        let report = json(&["inspect", text(&artifacts.join(name)), "--json", "--stats"]);
        assert_eq!(report["parameters"], 936_448, "{name}");
        let found = report["linear_bits_per_weight"].as_f64().unwrap();
        assert!((found - bits).abs() < 0.01, "{name}: {found}");
        let tensors = report["tensors"].as_array().unwrap();
        let quantized: Vec<_> = tensors.iter().filter(|t| t["scheme"] == scheme).collect();
        assert_eq!(quantized.len(), 35, "{name}");
        // Weights of this model have a standard deviation of a few hundredths, so they were dequantized.
        assert!(
            quantized.iter().all(|t| (0.001..0.2).contains(&t["stats"]["std"].as_f64().unwrap())),
            "{name}"
        );
        let bytes: u64 = tensors.iter().map(|t| t["bytes"].as_u64().unwrap()).sum();
        assert_eq!(bytes, report["bytes"].as_u64().unwrap(), "{name}");
    }
    let kv = json(&["inspect", text(&artifacts.join("llmc_kv_fp8_static")), "--json"]);
    assert!(!kv["notes"].to_string().contains("kv_cache_scheme"), "its cache is quantized as it asks");
    for (name, scheme) in [
        ("mo_FP8_DEFAULT_CFG", "fp8-e4m3-tensor"),
        ("mo_INT4_AWQ_g32", "int4-g32"),
        ("bnb_fn_nf4_dq", "nf4-dq"),
        ("bnb_int8", "int8-channel"),
    ] {
        let report = json(&["inspect", text(&artifacts.join(name)), "--json"]);
        assert_eq!(report["parameters"], 936_448, "{name}");
        let tensors = report["tensors"].as_array().unwrap();
        assert_eq!(tensors.iter().filter(|t| t["scheme"] == scheme).count(), 35, "{name}");
    }
    // For an unknown format, the architecture still gives the number of parameters.
    let foreign = tempfile::tempdir().unwrap();
    for file in fs::read_dir(artifacts.join("gptqm_w4_g32_sym_gar")).unwrap() {
        let path = file.unwrap().path();
        fs::write(foreign.path().join(path.file_name().unwrap()), fs::read(&path).unwrap()).unwrap();
    }
    let config = foreign.path().join("config.json");
    let unheard = fs::read_to_string(&config).unwrap().replace("\"gptq\"", "\"unheard-of\"");
    fs::write(&config, unheard).unwrap();
    let foreign = json(&["inspect", text(foreign.path()), "--json"]);
    assert!(foreign["warnings"][0].as_str().unwrap().contains("unheard-of"));
    assert_eq!(foreign["parameters"], 936_448);
}

#[test]
fn the_native_container_is_shown_by_its_schemes() {
    let dir = tempfile::tempdir().unwrap();
    let (model, out) = (dir.path().join("model"), dir.path().join("native"));
    succeed(&["synth", "--preset", "tiny", "--out", text(&model)]);
    succeed(&[
        "quantize",
        text(&model),
        "--recipe",
        "rtn-int4-g32-asym",
        "--format",
        "native",
        "--out",
        text(&out),
    ]);
    let report = json(&["inspect", text(&out), "--json"]);
    assert_eq!(report["convention"], "native");
    // A 4-bit code, and a 32-bit scale and zero point per group.
    assert_eq!(report["linear_bits_per_weight"], 6.0);
    assert_eq!(report["parameters"], json(&["inspect", text(&model), "--json"])["parameters"]);
    let quantized = report["tensors"].as_array().unwrap().iter().filter(|t| t["scheme"] == "int4-g32-asym");
    assert_eq!(quantized.count(), 2 * 7);
}

/// A quantized model that lacks tensors or parameters of its source fails.
pub fn complete(model: &Path, source: &Path) -> Value {
    let [report, of_source] = [model, source].map(|path| json(&["inspect", text(path), "--json"]));
    let what = model.display();
    assert_eq!(report["warnings"], Value::Array(Vec::new()), "{what}");
    assert_eq!(report["parameters"], of_source["parameters"], "{what}");
    assert!(!report["notes"].to_string().contains("does not use"), "{what}: {}", report["notes"]);
    report
}

/// Formats whose tensors do not record the weight shapes.
#[test]
fn every_container_counts_logical_weights() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model");
    succeed(&["synth", "--preset", "tiny", "--out", text(&model)]);
    for (format, recipe, bits) in [
        // 4-bit scales with a 16-bit one, and group and row indices; f32 scale and offset per group.
        ("exl2", "rtn-int4-g32", 4.0..5.0),
        ("mlx", "rtn-int4-g32-asym:minmax", 6.0..6.0001),
        ("onnx", "rtn-int8-channel", 8.0..8.6),
    ] {
        let out = dir.path().join(format);
        succeed(&["quantize", text(&model), "--recipe", recipe, "--format", format, "--out", text(&out)]);
        let report = complete(&out, &model);
        let found = report["linear_bits_per_weight"].as_f64().unwrap();
        assert!(bits.contains(&found), "{format}: {found}");
        let tensors = report["tensors"].as_array().unwrap();
        let quantized = tensors.iter().filter(|t| t["scheme"].is_string()).count();
        assert_eq!(quantized, 2 * 7, "{format}: {report}");
    }
    let [exl2, out] = ["exl2", "converted"].map(|name| dir.path().join(name));
    succeed(&["convert", text(&exl2), "--format", "native", "--out", text(&out)]);
    let shown = succeed(&["inspect", text(&out)]);
    assert!(shown.contains(", then convert\n"), "{shown}");
}

#[test]
fn gptq_and_awq_are_written_verified_and_shown_by_their_schemes() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model");
    succeed(&["synth", "--preset", "tiny", "--out", text(&model)]);
    for (format, scheme) in [("gptq", "int4-g32"), ("gptq", "int8-channel-asym"), ("awq", "int4-g32-asym")] {
        let out = dir.path().join(format!("{format}-{scheme}"));
        let recipe = format!("rtn-{scheme}");
        let arguments = [
            "quantize",
            text(&model),
            "--recipe",
            &recipe,
            "--format",
            format,
            "--out",
            text(&out),
            "--json",
            "--quiet",
        ];
        assert_eq!(json(&arguments)["verification"]["ok"], true, "{format} {scheme}");
        let report = json(&["inspect", text(&out), "--json"]);
        assert_eq!(report["convention"], format);
        assert_eq!(report["parameters"], json(&["inspect", text(&model), "--json"])["parameters"]);
        let quantized = report["tensors"].as_array().unwrap().iter().filter(|t| t["scheme"] == scheme);
        assert_eq!(quantized.count(), 2 * 7, "{format} {scheme}");
    }
}

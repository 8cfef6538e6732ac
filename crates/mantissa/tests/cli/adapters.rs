//! Models with an adapter that is not merged: `--adapter`.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::support::{File, fail, json, root, text, write};

fn peft(name: &str) -> PathBuf {
    root().join("tests/data/peft").join(name)
}

fn tiny(name: &str) -> PathBuf {
    root().join("tests/data/tiny").join(name)
}

/// Writes the recorded ids as a token file; returns its path and the recorded logits.
fn windows(dir: &Path, name: &str) -> (PathBuf, Vec<f32>) {
    let expected = File::open(&peft(name).join("expected.safetensors"));
    let ids: Vec<i64> =
        expected.bytes("input_ids").as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b)).collect();
    let path = dir.join("windows.json");
    std::fs::write(&path, json!([ids]).to_string()).unwrap();
    (path, expected.f32("logits"))
}

#[test]
fn eval_computes_the_logits_of_peft() {
    let dir = tempfile::tempdir().unwrap();
    for (name, of) in [("lora", "llama2-gqa-tied"), ("dora", "mqa"), ("patterns", "llama1-mha")] {
        let (tokens, expected) = windows(dir.path(), name);
        let (model, adapter, out) = (tiny(of), peft(name), dir.path().join(format!("{name}.safetensors")));
        let arguments = [
            "eval",
            text(&model),
            "--adapter",
            text(&adapter),
            "--tokens",
            text(&tokens),
            "--json",
            "--quiet",
        ];
        let report = json(&[&arguments[..], &["--logits", text(&out)]].concat());
        assert_eq!(report["adapter"], json!(text(&adapter)));
        let found = File::open(&out).f32("logits");
        let difference = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(found.len() == expected.len() && difference <= 1e-4, "{name}: {difference}");
        // The fast engine, and the model without the adapter as the reference.
        let fast = json(&[&arguments[..], &["--engine", "fast", "--reference", text(&model)]].concat());
        let loss = |report: &Value| report["nll"].as_f64().unwrap();
        assert!((loss(&fast) - loss(&report)).abs() < 0.1, "{name}");
        assert!(fast["kl"].as_f64().unwrap() > 0.01, "{name}");
    }
}

#[test]
fn run_and_bench_serve_adapters_on_quantized_models() {
    let dir = tempfile::tempdir().unwrap();
    let (model, adapter, quantized) = (tiny("llama2-gqa-tied"), peft("lora"), dir.path().join("nf4"));
    let arguments =
        ["quantize", text(&model), "--recipe", "rtn-int8-channel", "--out", text(&quantized), "--quiet"];
    crate::support::succeed(&arguments);
    let tokens = |model: &Path, extra: &[&str]| {
        let arguments = ["run", text(model), "-p", "a b c", "-n", "12", "--json", "--quiet"];
        json(&[&arguments[..], extra].concat())["tokens"].clone()
    };
    let with = ["--adapter", text(&adapter)];
    let plain = tokens(&model, &[]);
    let adapted = tokens(&model, &[&with[..], &["--engine", "reference"]].concat());
    assert_ne!(plain, adapted);
    assert_ne!(tokens(&model, &with), plain);
    assert_ne!(tokens(&quantized, &with), tokens(&quantized, &[]));
    let bench =
        ["bench", text(&quantized), "--prompt", "8", "--gen", "4", "--reps", "1", "--explain", "--json"];
    let report = json(&[&bench[..], &with[..], &["--quiet"]].concat());
    assert_eq!(report["adapter"], json!(text(&adapter)));
    let formats = report["kernels"].as_array().unwrap().iter().map(|row| row["format"].as_str().unwrap());
    assert_eq!(formats.filter(|format| format.ends_with(" + rank 4")).count(), 14);
}

#[test]
fn adapters_that_do_not_fit_are_refused_in_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let (model, other) = (tiny("llama2-gqa-tied"), peft("fused"));
    let error = fail(2, &["run", text(&model), "-p", "a", "-n", "4", "--adapter", text(&other)]);
    assert!(error.contains("gate_up_proj: expected a linear layer of the model"), "{error}");
    let error = fail(2, &["bench", text(&model), "--adapter", text(dir.path())]);
    assert!(error.contains("expected a PEFT adapter folder with adapter_config.json"), "{error}");
    let error = fail(2, &["eval", text(&model), "--text", "default", "--adapter", text(&model)]);
    assert!(error.contains("adapter_config.json"), "{error}");
    let config = dir.path().join("adapter_config.json");
    for (settings, expected) in [
        (json!({"peft_type": "LORA", "use_qalora": true}), "use_qalora: expected null or false"),
        (json!({"peft_type": "LORA", "lora_bias": true}), "lora_bias: expected null or false"),
        (
            json!({"peft_type": "LORA", "layer_replication": [[0, 1]]}),
            "layer_replication: expected null or false",
        ),
        (json!({"peft_type": "VERA"}), "peft_type: expected \"LORA\""),
        (json!({"peft_type": "LORA", "r": 1_000_000_000_000u64}), "r: expected a rank"),
    ] {
        std::fs::write(&config, settings.to_string()).unwrap();
        let error = fail(2, &["run", text(&model), "-p", "a", "-n", "4", "--adapter", text(dir.path())]);
        assert!(error.contains(expected), "{error}");
    }
    std::fs::write(&config, json!({"peft_type": "LORA"}).to_string()).unwrap();
    let huge = dir.path().join("adapter_model.safetensors");
    write(&huge, &[("base_model.model.x.lora_A.weight", mantissa_store::Dtype::F32, &[8, 0], Vec::new())]);
    let error = fail(2, &["run", text(&model), "-p", "a", "-n", "4", "--adapter", text(dir.path())]);
    assert!(error.contains("lora_B.weight"), "{error}");
}

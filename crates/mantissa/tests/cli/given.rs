//! What is given as a model, and what its files say of tokens: messages and findings.

use std::fs;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::contradictions::{Model, findings, lint};
use crate::support::{fail, json, mantissa, root, stderr, succeed, text};

#[test]
fn an_adapter_given_as_a_model_is_called_one() {
    let temp = TempDir::new().unwrap();
    let adapter = temp.path().join("adapter");
    fs::create_dir(&adapter).unwrap();
    let from = root().join("tests/data/peft/lora");
    for name in ["adapter_config.json", "adapter_model.safetensors"] {
        fs::copy(from.join(name), adapter.join(name)).unwrap();
    }
    let settings = json!({"peft_type": "LORA", "base_model_name_or_path": "org/base"});
    fs::write(adapter.join("adapter_config.json"), settings.to_string()).unwrap();
    let (path, out) = (text(&adapter), text(&temp.path().join("o")).to_owned());
    let data = text(&temp.path().join("d.txt")).to_owned();
    fs::write(&data, "a b c").unwrap();
    let weights = format!("{path}/adapter_model.safetensors");
    for run in [
        vec!["run", path, "-p", "x", "-n", "1"],
        vec!["run", &weights, "-p", "x", "-n", "1"],
        vec!["eval", path, "--text", &data],
        vec!["bench", path],
        vec!["quantize", path, "--recipe", "int8", "--out", &out],
        vec!["convert", path, "--format", "gguf", "--out", &out],
        vec!["fit", path, "--budget", "4.5bpw", "--text", &data, "--out", &out],
        vec!["inspect", path],
        vec!["lint", path, "--for", "vllm"],
        vec!["plan", path],
        vec!["verify", path],
        vec!["doctor", path],
        vec!["diff", "demo", path, "-p", "x"],
        vec!["serve", path],
        vec!["finetune", path, "--data", &data, "--out", &out],
    ] {
        let line = fail(2, &run);
        assert!(line.contains("got an adapter"), "{run:?}: {line}");
        let fix = format!("fix: give org/base as the model, with --adapter {path}");
        assert!(line.contains(&fix), "{run:?}: {line}");
    }
    fs::write(adapter.join("adapter_config.json"), "{}").unwrap();
    let line = fail(2, &["run", path, "-p", "x"]);
    assert!(line.contains("give the model that it was trained on as the model"), "{line}");
    // Its weights are tensors like any others.
    succeed(&["inspect", &weights]);
}

#[test]
fn bench_fits_its_defaults_to_a_short_context() {
    let model = Model::tiny("llama2-gqa-tied");
    let report =
        |arguments: &[&str]| json(&[&["bench", model.path(), "--reps", "1", "--json"], arguments].concat());
    let found = report(&[]);
    assert_eq!((&found["prompt"], &found["generated"]), (&json!(63), &json!(62)));
    let said = stderr(&mantissa(&["bench", model.path(), "--reps", "1"]));
    assert!(said.contains("--prompt 63, not 512: the model has a context of 64 tokens"), "{said}");
    let found = report(&["--depth", "60"]);
    assert_eq!((&found["prompt"], &found["generated"]), (&json!(63), &json!(2)));
    let found = report(&["--prompt", "4", "--gen", "2"]);
    assert_eq!((&found["prompt"], &found["generated"]), (&json!(4), &json!(2)));
    for (flag, value, fix) in
        [("--prompt", "64", "--prompt 63"), ("--gen", "63", "--gen 62"), ("--depth", "63", "--depth 0")]
    {
        let line = fail(2, &["bench", model.path(), flag, value]);
        assert!(line.contains(&format!("fix: {fix}")), "{line}");
        let (flag, value) = fix.split_once(' ').unwrap();
        report(&[flag, value]);
    }
}

#[test]
fn lint_compares_end_tokens() {
    let model = Model::tiny("llama2-gqa-tied");
    let rules = |model: &Model, engine: &str, rule: &str| findings(&lint(model, engine).1, rule).len();
    let all = |model: &Model| {
        [("transformers", "generation-ends"), ("vllm", "tokenizer-ends"), ("sglang", "file-ends")]
            .map(|(engine, rule)| rules(model, engine, rule))
    };
    let added = |special: &str| {
        json!({"id": 3, "content": special, "special": true, "single_word": false,
        "lstrip": false, "rstrip": false, "normalized": false})
    };
    assert_eq!(all(&model), [0, 0, 0]);
    // config.json states 2, generation_config.json another.
    fs::write(model.dir.join("generation_config.json"), r#"{"eos_token_id": 1}"#).unwrap();
    let found = lint(&model, "transformers").1;
    assert!(!found["findings"].to_string().contains("no end at 1"), "{found}");
    let special = |name: &str| {
        let path = model.dir.join("tokenizer.json");
        let mut tokenizer: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        let tokens = tokenizer["added_tokens"].as_array_mut().unwrap();
        tokens.retain(|token| token["id"] != 3);
        tokens.push(added(name));
        fs::write(path, tokenizer.to_string()).unwrap();
    };
    fs::write(model.dir.join("generation_config.json"), r#"{"eos_token_id": [2]}"#).unwrap();
    special("<|im_end|>");
    assert_eq!(all(&model), [1, 1, 1], "its name alone");
    fs::write(model.dir.join("tokenizer_config.json"), r#"{"eos_token": "<|im_end|>"}"#).unwrap();
    assert_eq!(all(&model), [1, 0, 0], "the tokenizer's");
    model.config(|config| config["eos_token_id"] = json!([2, 3]));
    fs::write(model.dir.join("tokenizer_config.json"), "{}").unwrap();
    assert_eq!(all(&model), [1, 1, 0], "config.json's");
    fs::write(model.dir.join("generation_config.json"), r#"{"eos_token_id": [2, 3]}"#).unwrap();
    assert_eq!(all(&model), [0, 0, 0], "all places");
    fs::remove_file(model.dir.join("generation_config.json")).unwrap();
    assert_eq!(all(&model), [0, 0, 0], "config.json stands for generation_config.json");
}

#[test]
fn lint_finds_added_tokens_without_a_row() {
    let model = Model::tiny("llama2-gqa-tied");
    let path = model.dir.join("tokenizer.json");
    assert!(findings(&lint(&model, "vllm").1, "token-rows").is_empty());
    let mut tokenizer: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    for (id, count) in [(287, 0), (288, 1), (400, 1)] {
        let tokens = tokenizer["added_tokens"].as_array_mut().unwrap();
        tokens.push(json!({"id": id, "content": format!("<x{id}>"), "special": true, "single_word": false,
            "lstrip": false, "rstrip": false, "normalized": false}));
        fs::write(&path, tokenizer.to_string()).unwrap();
        assert_eq!(findings(&lint(&model, "transformers").1, "token-rows").len(), count, "{id}");
    }
}

//! `plan` and `quantize --for` name the same recipe for the same model, device and engine.

use std::fs;
use std::path::Path;

use serde_json::Value;
use tempfile::TempDir;

use crate::support::{command, json, sampled, stderr, succeed, text, whole};

/// Engines that run on NVIDIA GPUs.
const ENGINES: [&str; 7] =
    ["vllm", "sglang", "transformers", "tensorrt-llm", "lmdeploy", "llama.cpp", "exllamav2"];

/// GPUs of different generations.
const GPUS: [&str; 5] = ["a100", "rtx4090", "h100", "b200", "rtx5090"];

/// Nominal bits; the last asks for none.
const BITS: [&str; 7] = ["2", "3", "4", "5", "6", "8", ""];

/// Writes a model of these sizes.
fn synthetic(dir: &Path, name: &str, sizes: &str) -> String {
    let path = dir.join(name);
    let sizes: Vec<&str> = sizes.split(' ').collect();
    let rest = ["--layers", "1", "--vocab", "64", "--preset", "tiny", "--context", "64", "--quiet"];
    succeed(&[&["synth", "--out", text(&path)][..], &sizes, &rest].concat());
    text(&path).to_owned()
}

/// Runs a command; returns its report, or the error line of exit code 2.
fn asked(arguments: &[&str]) -> Result<Value, String> {
    let output = command().args(arguments).output().unwrap();
    match output.status.code() {
        Some(0) => Ok(serde_json::from_slice(&output.stdout).unwrap()),
        Some(2) => Err(stderr(&output)),
        code => panic!("{arguments:?}: {code:?}: {}", stderr(&output)),
    }
}

#[test]
fn plan_and_quantize_name_the_same_recipe() {
    let temp = TempDir::new().unwrap();
    let tokens = temp.path().join("tokens.json");
    fs::write(&tokens, "[[1,2,3,4,5,6,7,8]]").unwrap();
    let models = [
        "demo".to_owned(),
        // Groups of 32 divide 96 columns, those of 64 and 128 do not.
        synthetic(temp.path(), "narrow", "--hidden 96 --ffn 160 --heads 3 --kv-heads 3"),
        synthetic(temp.path(), "wide", "--hidden 512 --ffn 1024 --heads 4 --kv-heads 2"),
        synthetic(temp.path(), "odd", "--hidden 144 --ffn 208 --heads 3 --kv-heads 1"),
    ];
    let gpus = GPUS.iter().flat_map(|gpu| ENGINES.map(|engine| (*gpu, engine)));
    let cases = models.iter().flat_map(|model| gpus.clone().map(move |(gpu, engine)| (model, gpu, engine)));
    let cases = cases.flat_map(|(model, gpu, engine)| BITS.map(|bits| (model, gpu, engine, bits)));
    let (mut compared, mut recipes) = (0, std::collections::BTreeSet::new());
    for (model, gpu, engine, bits) in sampled(cases, 23) {
        let target = format!("{engine}:gpu={gpu}");
        let width: &[&str] = if bits.is_empty() { &[] } else { &["--bits", bits] };
        let plan = ["plan", model, "--hardware", gpu, "--for", engine, "--json"];
        let plan = json(&[&plan[..], width].concat())["recommendation"].clone();
        let windows = ["--calibration-tokens", text(&tokens), "--tokens", text(&tokens)];
        let quantize = ["quantize", model, "--for", &target, "--dry-run", "--json", "--quiet"];
        let found = asked(&[&quantize[..], &windows, width].concat());
        let case = format!("{model} {target} {bits}: {plan} {found:?}");
        match (plan["recipe"].as_str(), found) {
            (Some(recipe), Ok(found)) => {
                assert_eq!(found["chosen"]["recipe"], recipe, "{case}");
                assert_eq!(found["chosen"]["format"], plan["format"], "{case}");
                recipes.insert(recipe.to_owned());
                compared += 1;
            }
            // Who asks for no bits may be told to leave the model as it is.
            (None, Ok(_)) => assert!(bits.is_empty(), "{case}"),
            (None, Err(_)) => {}
            (Some(_), Err(_)) => panic!("{case}"),
        }
    }
    let least = if whole() { 30 } else { 10 };
    assert!(compared >= least && recipes.len() >= 8, "{compared} {recipes:?}");
}

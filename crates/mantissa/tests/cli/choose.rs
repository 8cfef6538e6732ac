//! `quantize --for ENGINE` without a recipe, and the built-in calibration text.

use std::fs;
use std::path::Path;

use serde_json::Value;
use tempfile::TempDir;

use crate::support::{command, fail, json, mantissa, stderr, succeed, text};

/// Previews the choice for an engine.
fn chosen(model: &str, engine: &str, bits: &str) -> Value {
    let report =
        json(&["quantize", model, "--for", engine, "--bits", bits, "--dry-run", "--json", "--quiet"]);
    assert!(report["predicted_seconds"].as_f64().unwrap() > 0.0);
    report["chosen"].clone()
}

/// Returns the SHA-256 that the README of the text states.
fn stated() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../mantissa-jobs/calibration/README.md");
    let readme = fs::read_to_string(path).unwrap();
    let row = readme.lines().find(|line| line.contains("`default.txt` |")).unwrap();
    row.split('`').nth(3).unwrap().to_owned()
}

#[test]
fn one_command_makes_a_checked_artifact() {
    let temp = TempDir::new().unwrap();
    let output =
        command().current_dir(temp.path()).args(["quantize", "demo", "--for", "vllm"]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let (out, notes) = (String::from_utf8_lossy(&output.stdout).into_owned(), stderr(&output));
    // Why, and what is predicted, before the work.
    assert!(notes.contains("in compressed-tensors: ") && notes.contains("fit the model and vllm"), "{notes}");
    assert!(notes.contains("(predicted)"), "{notes}");
    // The result, its KL, where it loads and what to type next.
    let folder = notes.lines().find_map(|line| line.strip_prefix("output ")).unwrap();
    let folder = folder.split(':').next().unwrap();
    assert!(folder.starts_with("demo-") && temp.path().join(folder).is_dir(), "{folder}");
    for part in
        ["KL  ", "loads in    vLLM, ", &format!("next        vllm serve {folder}"), "mantissa report "]
    {
        assert!(out.contains(part), "{part}: {out}");
    }
    let quality: Value =
        serde_json::from_slice(&fs::read(temp.path().join(folder).join("quality.json")).unwrap()).unwrap();
    assert_eq!(quality["calibration"]["name"], "default");
    assert_eq!(quality["calibration"]["text_sha256"], stated().as_str());
    assert_eq!(quality["evaluation"]["text"]["name"], "default (held out)");
    succeed(&["lint", text(&temp.path().join(folder)), "--for", "vllm", "--quiet"]);
}

#[test]
fn every_engine_has_a_choice_that_its_rules_accept() {
    let temp = TempDir::new().unwrap();
    for (engine, format) in [
        ("vllm", "compressed-tensors"),
        ("sglang", "compressed-tensors"),
        ("transformers", "compressed-tensors"),
        ("lmdeploy", "compressed-tensors"),
        ("llama.cpp", "gguf"),
        ("mlx", "mlx"),
        ("exllama", "exl2"),
    ] {
        let choice = chosen("demo", engine, "4");
        assert_eq!(choice["format"], format, "{engine}: {choice}");
        assert!(choice["measured_kl"].as_f64().unwrap() < 0.02, "{engine}: {choice}");
    }
    chosen("demo", "mantissa", "4");
    // TensorRT-LLM has no method for weights of 4 bits alone.
    assert_eq!(chosen("demo", "tensorrt-llm", "8")["recipe"], "fp8-dynamic");
    // The file is what the preview says, and the engine's rules hold for it as written.
    let out = temp.path().join("m.gguf");
    let arguments = ["quantize", "demo", "--for", "llama.cpp", "--bits", "8", "--out", text(&out), "--quiet"];
    let said = succeed(&arguments);
    for next in [
        "llama-cli -m ",
        "echo 'FROM ",
        "ollama create m ",
        &format!("mantissa run {} ", text(&out)),
        "mantissa report ",
    ] {
        assert!(said.contains(&format!("next        {next}")), "{next}: {said}");
    }
    succeed(&["lint", text(&out), "--for", "llama.cpp", "--quiet"]);
}

#[test]
fn the_choice_depends_on_bits_shapes_and_gpu() {
    assert_eq!(chosen("demo", "llama.cpp", "8")["recipe"], "q8_0");
    // Rows of 128 fall back from blocks of 256 to wider types: Q4_K_M to 5.85 bits, IQ4_XS to 4.5, and no 3 bits.
    assert_eq!(chosen("demo", "llama.cpp", "4")["recipe"], "iq4_xs");
    let line = fail(2, &["quantize", "demo", "--for", "llama.cpp", "--bits", "3", "--dry-run"]);
    assert!(line.contains("bits per weight here") && line.contains("fix: --bits 4"), "{line}");
    let (any, blackwell) = (chosen("demo", "vllm", "4"), chosen("demo", "vllm:gpu=b200", "4"));
    assert!(!any["recipe"].as_str().unwrap().contains("nvfp4"), "{any}");
    assert_eq!(blackwell["recipe"], "scalesweep-gptaq-nvfp4", "{blackwell}");
    // 96 columns are not whole groups of 128 or 64, but of 32.
    let temp = TempDir::new().unwrap();
    let model = temp.path().join("narrow");
    let sizes = ["--hidden", "96", "--ffn", "160", "--layers", "1", "--heads", "3", "--kv-heads", "3"];
    let rest = ["--vocab", "64", "--preset", "tiny", "--context", "64", "--quiet"];
    succeed(&[&["synth", "--out", text(&model)][..], &sizes, &rest].concat());
    let tokens = temp.path().join("tokens.json");
    fs::write(&tokens, "[[1,2,3,4,5,6,7,8]]").unwrap();
    let arguments = ["quantize", text(&model), "--for", "vllm", "--calibration-tokens", text(&tokens)];
    let measured = ["--tokens", text(&tokens), "--dry-run", "--json", "--quiet"];
    let choice = &json(&[&arguments[..], &measured].concat())["chosen"];
    assert!(choice["recipe"].as_str().unwrap().contains("-g32"), "{choice}");
    assert!(choice["skipped"].as_array().unwrap().len() > 1, "{choice}");
}

#[test]
fn bits_that_nothing_measured_has_are_answered_with_those_that_work() {
    let line = fail(2, &["quantize", "demo", "--for", "sglang", "--bits", "3", "--dry-run"]);
    assert!(line.contains("3-bit recipe that loads in sglang") && line.contains("fix: --bits 4"), "{line}");
    // vLLM has kernels for int3, which was measured.
    assert_eq!(chosen("demo", "vllm", "3")["recipe"], "gptaq-int3-g128-asym");
    assert!(fail(2, &["quantize", "demo"]).contains("--recipe"));
    assert!(fail(2, &["quantize", "demo", "--recipe", "nf4", "--bits", "4"]).contains("--bits"));
}

#[test]
fn the_built_in_text_calibrates_where_no_other_is_given() {
    let temp = TempDir::new().unwrap();
    let out = temp.path().join("out");
    let quantize = ["quantize", "demo", "--recipe", "gptq-int4-g128", "--out", text(&out)];
    let few = [&quantize[..], &["--samples", "4", "--length", "64"]].concat();
    let noted = stderr(&mantissa(&few));
    assert!(noted.contains("calibration on the built-in text; --calibration TEXT"), "{noted}");
    // Naming it is the same job.
    let named = [&few[..], &["--calibration", "default"]].concat();
    assert!(succeed(&named).contains("already complete"), "{named:?}");
    let quality: Value = serde_json::from_slice(&fs::read(out.join("quality.json")).unwrap()).unwrap();
    assert_eq!(
        (&quality["calibration"]["windows"], &quality["calibration"]["tokens"]),
        (&4.into(), &256.into())
    );
    assert_eq!(quality["calibration"]["text_sha256"], stated().as_str());
    // Other commands take it too.
    let matrix = temp.path().join("imatrix.gguf");
    let imatrix = ["imatrix", "demo", "--calibration", "default", "--samples", "2", "--length", "32"];
    succeed(&[&imatrix[..], &["--out", text(&matrix), "--quiet"]].concat());
    let line = fail(2, &["imatrix", "demo", "--out", text(&temp.path().join("i.gguf"))]);
    assert!(line.contains("--calibration default"), "{line}");
}

#[test]
fn the_output_is_named_after_model_and_recipe() {
    let temp = TempDir::new().unwrap();
    let run = |arguments: &[&str]| command().current_dir(temp.path()).args(arguments).output().unwrap();
    for (recipe, name) in [("rtn-int8-channel", "demo-rtn-int8-channel"), ("Q8_0", "demo-q8_0.gguf")] {
        let output = run(&["quantize", "demo", "--recipe", recipe, "--quiet"]);
        assert!(output.status.success(), "{}", stderr(&output));
        assert!(temp.path().join(name).exists(), "{name}");
    }
    // Something else of that name is not replaced.
    fs::create_dir(temp.path().join("demo-rtn-int4-g128")).unwrap();
    fs::write(temp.path().join("demo-rtn-int4-g128/notes.txt"), "mine").unwrap();
    let output = run(&["quantize", "demo", "--recipe", "rtn-int4-g128", "--quiet"]);
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    assert_eq!(fs::read(temp.path().join("demo-rtn-int4-g128/notes.txt")).unwrap(), b"mine");
}

//! Arguments that cannot be used, and what the error tells a new user.

use std::fs;

use tempfile::TempDir;

use crate::support::{fail, mantissa, stderr, succeed, text};

#[test]
fn one_of_engine_and_recipe_is_enough() {
    for arguments in [&["--bits", "4", "--out", "y"][..], &["--out", "y"], &["--dry-run"]] {
        let line = fail(2, &[&["quantize", "demo"][..], arguments].concat());
        assert!(line.contains("--for ENGINE or --recipe RECIPE"), "{line}");
        assert!(line.ends_with("; fix: mantissa quantize --help\n"), "{line}");
    }
}

#[test]
fn an_unknown_engine_is_answered_with_the_nearest_of_all() {
    for command in ["quantize", "lint"] {
        let line = fail(2, &[command, "demo", "--for", "vlm"]);
        assert!(line.contains("engine: expected vllm, "), "{line}");
        assert!(line.contains(" (mantissa help engines lists all), got \"vlm\""), "{line}");
        assert!(line.ends_with(&format!("; fix: mantissa {command} --help\n")), "{line}");
    }
    let line = fail(2, &["quantize", "demo", "--for", "vllm:gpu=h10"]);
    assert!(
        line.contains("expected a10, h100, ")
            && line.contains(" (mantissa help gpus lists all), or a compute"),
        "{line}"
    );
}

#[test]
fn an_alias_of_an_engine_is_spelled_out() {
    for (alias, name) in
        [("ollama", "llama.cpp"), ("HF", "transformers"), ("trtllm:gpu=h100", "tensorrt-llm")]
    {
        let said = stderr(&mantissa(&["lint", "demo", "--for", alias]));
        let typed = alias.split(':').next().unwrap();
        assert!(said.contains(&format!("--for {typed}: stands for {name}\n")), "{said}");
        assert!(!stderr(&mantissa(&["lint", "demo", "--for", name])).contains("stands for"));
    }
    assert!(!stderr(&mantissa(&["lint", "demo", "--for", "VLLM", "--for", "mlx"])).contains("stands for"));
}

#[test]
fn numbers_are_asked_for_in_words() {
    for bits in ["4.5", "9", "four"] {
        let line = fail(2, &["quantize", "demo", "--for", "vllm", "--bits", bits]);
        assert!(line.contains("expected a whole number from 2 to 8"), "{line}");
    }
    let line = fail(2, &["quantize", "demo", "--for", "vllm", "--seed", "one"]);
    assert!(line.contains("expected a whole number"), "{line}");
}

#[test]
fn a_file_that_is_no_model_is_named_so() {
    let temp = TempDir::new().unwrap();
    for (name, content) in [("notes.txt", "some notes that are longer than a header"), ("short", "hi")] {
        let path = temp.path().join(name);
        fs::write(&path, content).unwrap();
        let line = fail(2, &["quantize", text(&path), "--for", "vllm"]);
        let expected =
            "expected a model folder with safetensors weights, or a GGUF file, got a file that is neither";
        assert!(line.contains(expected) && !line.contains("header"), "{line}");
    }
    // A file that is called safetensors is judged as such.
    let path = temp.path().join("model.safetensors");
    fs::write(&path, "some notes that are longer than a header").unwrap();
    assert!(fail(2, &["inspect", text(&path)]).contains("header length"));
}

#[test]
fn a_measurement_without_a_text_proposes_the_built_in_one() {
    let line = fail(2, &["eval", "demo", "--reference", "demo"]);
    assert!(line.contains("; fix: --text default"), "{line}");
    let shown = succeed(&["eval", "demo", "--text", "default", "--limit", "64", "--quiet"]);
    assert!(shown.contains("perplexity"), "{shown}");
}

/// Many layers that fall back for the same reason give one warning; `--strict` counts every layer.
#[test]
fn warnings_of_layers_are_merged() {
    let temp = TempDir::new().unwrap();
    let out = temp.path().join("q.gguf");
    let quantize = ["quantize", "demo", "--recipe", "q4_k_m", "--out", text(&out)];
    let output = mantissa(&quantize);
    let (said, shown) =
        (stderr(&output), String::from_utf8_lossy(&output.stdout).replace("\n            ", " "));
    assert_eq!(said.matches("warning: ").count(), 2, "{said}");
    let all = "layers: 31 q5_0 instead of q4_k, 4 q8_0 instead of q6_k: rows of 128 and 384 are not multiples of 256 (first: model.layers.0.self_attn.q_proj)";
    assert!(said.contains(&format!("warning: 35 {all}\n")), "{said}");
    assert!(shown.contains(&format!("fallbacks   35 of 35 {all}\n")), "{shown}");
    let preview = succeed(&[&quantize[..], &["--dry-run"]].concat());
    assert!(preview.contains(&format!("note: 35 {all}\n")), "{preview}");
    let strict = temp.path().join("strict.gguf");
    let quantize = ["quantize", "demo", "--recipe", "q4_k_m", "--out", text(&strict), "--strict"];
    let said = stderr(&mantissa(&quantize));
    assert!(said.contains("--strict: expected no warnings, got 36; first: model.layers.0."), "{said}");
}

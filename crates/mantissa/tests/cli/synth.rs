//! `mantissa synth`: a valid checkpoint, determined by its seed.

use std::fs;
use std::path::Path;

use crate::support::{fail, json, succeed, text};

fn synth(out: &Path, more: &[&str]) -> Vec<u8> {
    let arguments = [&["synth", "--overwrite", "--out", text(out), "--preset", "tiny"], more].concat();
    succeed(&arguments);
    fs::read(out.join("model.safetensors")).unwrap()
}

#[test]
fn the_same_seed_gives_the_same_bytes_at_any_thread_count() {
    let dir = tempfile::tempdir().unwrap();
    // An embedding of more than one panel.
    let more = ["--vocab", "20000", "--seed", "5", "--threads"];
    let one = synth(&dir.path().join("a"), &[&more[..], &["1"]].concat());
    let three = synth(&dir.path().join("b"), &[&more[..], &["3"]].concat());
    assert!(one == three);
    let other = synth(&dir.path().join("c"), &["--vocab", "20000", "--seed", "6"]);
    assert!(one != other && one.len() == other.len());
}

#[test]
fn it_is_a_model_with_gaussian_weights() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("m");
    for (dtype, bits) in [("bf16", 16.0), ("f16", 16.0), ("f32", 32.0)] {
        synth(&model, &["--dtype", dtype, "--layers", "3", "--tied=false", "--hidden", "128"]);
        let report = json(&["inspect", text(&model), "--stats", "--json"]);
        assert_eq!(report["warnings"], serde_json::json!([]), "{dtype}");
        assert_eq!(
            (&report["bits_per_weight"], &report["architecture"]["layers"]),
            (&bits.into(), &3.into())
        );
        assert_eq!(report["architecture"]["tied_head"], false);
        for tensor in report["tensors"].as_array().unwrap() {
            let (name, stats) = (tensor["name"].as_str().unwrap(), &tensor["stats"]);
            if name.contains("norm") {
                assert_eq!((&stats["min"], &stats["max"]), (&1.0.into(), &1.0.into()), "{name}");
            } else {
                assert!((stats["std"].as_f64().unwrap() - 0.02).abs() < 0.001, "{name}: {stats}");
            }
        }
    }
}

#[test]
fn sizes_that_do_not_fit_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("m");
    let line = fail(2, &["synth", "--out", text(&out), "--preset", "tiny", "--kv-heads", "3"]);
    assert!(line.contains("num_key_value_heads"), "{line}");
    assert!(!out.exists());
}

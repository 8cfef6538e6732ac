//! `quantize --keep`: layers that stay unquantized.

use std::fs;

use tempfile::TempDir;

use crate::support::{fail, json, mantissa, stderr, succeed, text};

#[test]
fn kept_layers_have_the_bytes_that_a_recipe_file_gives_them() {
    let temp = TempDir::new().unwrap();
    let [by_flag, by_file, again] = ["flag", "file", "again"].map(|name| temp.path().join(name));
    let recipe = temp.path().join("r.toml");
    fs::write(&recipe, "weights = \"int4-g32\"\nkeep = [\"*.down_proj\", \"model.layers.0.*\"]\n").unwrap();
    let flags = ["--keep", "*.down_proj", "--keep", "model.layers.0.*", "--quiet"];
    let command = ["quantize", "demo", "--recipe", "rtn-int4-g32", "--out", text(&by_flag)];
    let done = json(&[&command[..], &flags, &["--json"]].concat());
    let kept = |module: &str| module.ends_with(".down_proj") || module.starts_with("model.layers.0.");
    let layers = done["layers"].as_array().unwrap().iter().filter(|layer| !layer["scheme"].is_null());
    let quantized: Vec<&str> = layers.filter_map(|layer| layer["module"].as_str()).collect();
    assert!(!quantized.is_empty() && !quantized.iter().any(|module| kept(module)), "{quantized:?}");
    succeed(&["quantize", "demo", "--recipe", text(&recipe), "--out", text(&by_file), "--quiet"]);
    let bytes = |folder: &std::path::Path| fs::read(folder.join("model.safetensors")).unwrap();
    assert!(bytes(&by_flag) == bytes(&by_file));
    // Its record makes the same bytes.
    let record = by_flag.join("quality.json");
    succeed(&["rebuild", text(&record), "--source", "demo", "--out", text(&again), "--quiet"]);
    assert!(bytes(&by_flag) == bytes(&again));
    let wrong = fail(2, &[&command[..], &["--overwrite", "--keep", "re:.*down_proj"]].concat());
    assert!(wrong.contains("--keep") && wrong.contains("a regular expression"), "{wrong}");
}

#[test]
fn a_name_or_pattern_that_matches_nothing_is_refused_with_the_nearest() {
    let temp = TempDir::new().unwrap();
    let out = temp.path().join("out");
    let command = ["quantize", "demo", "--recipe", "rtn-int4-g32", "--out", text(&out)];
    let refused = |keep: &[&str]| {
        let line = fail(2, &[&command[..], keep].concat());
        assert!(!out.exists(), "{line}");
        line
    };
    for (typed, meant) in [
        ("model.layer.0.mlp.down_proj", "fix: model.layers.0.mlp.down_proj"),
        ("*.down_prj", "fix: *.down_proj"),
        ("model.layers.0.mlp.down_proj.weigth", "fix: model.layers.0.mlp.down_proj"),
    ] {
        let line = refused(&["--keep", "*.q_proj", "--keep", typed]);
        assert!(line.contains(&format!("got \"{typed}\"")) && line.contains(meant), "{line}");
    }
    for (typed, fix) in [
        ("down_proj", "fix: --keep '*.down_proj'"),
        ("layers.0", "fix: --keep 'model.layers.0.*'"),
        ("0", "fix: --keep 'model.layers.0.*'"),
        ("layers.0,lm_head", "fix: --keep 'model.layers.0.*' --keep 'lm_head' (commas are no list)"),
    ] {
        assert!(refused(&["--keep", typed]).trim_end().ends_with(fix), "{typed}");
    }
    let line = refused(&["--keep", "re:.*layers.0.*down_proj"]);
    assert!(line.trim_end().ends_with("fix: --keep '*layers.0*down_proj'"), "{line}");
    succeed(&[&command[..], &["--dry-run", "--keep", "*layers.0*down_proj", "--keep", "lm_head"]].concat());
    assert!(!refused(&["--keep", "re:.*(q|k)_proj"]).contains("fix:"));
    // A recipe file is for many models: its patterns may match none, a full name of a layer is meant for this one.
    let recipe = temp.path().join("r.toml");
    let by_file = ["quantize", "demo", "--recipe", text(&recipe), "--dry-run"];
    fs::write(&recipe, "weights = \"int4-g32\"\nkeep = [\"*.router\"]\n").unwrap();
    assert!(succeed(&by_file).contains("\"*.router\" matches no layer"));
    fs::write(&recipe, "weights = \"int4-g32\"\nkeep = [\"model.layers.0.mlp.down_prj\"]\n").unwrap();
    let line = fail(2, &by_file);
    assert!(line.contains("keep: expected") && line.contains("fix: model.layers.0.mlp.down_proj"), "{line}");
}

/// Engines run gate and up as one matrix: a pattern that keeps one of them has to keep the other.
#[test]
fn layers_that_run_fused_are_kept_together() {
    let temp = TempDir::new().unwrap();
    let out = temp.path().join("out");
    let command = ["quantize", "demo", "--recipe", "rtn-int4-g32", "--keep", "*mlp.gate*"];
    let output = ["--out", text(&out), "--dry-run"];
    let refused = fail(1, &[&command[..], &output, &["--for", "vllm"]].concat());
    let fix = refused.trim_end().split("fix: mantissa ").nth(1).unwrap();
    assert!(refused.contains("[fused-alike]"), "{refused}");
    assert!(fix.contains("--recipe rtn-int4-g32 --keep '*mlp.gate*' --keep '*mlp.up_proj'"), "{fix}");
    let words: Vec<String> = fix.split(' ').map(|word| word.replace('\'', "")).collect();
    succeed(&words);
    // Without an engine, those that the pattern costs are named.
    let silent = mantissa(&[&command[..], &output].concat());
    let warned = stderr(&silent);
    assert!(silent.status.success() && warned.contains("warning: --keep: "), "{warned}");
    assert!(warned.contains("vLLM") && warned.contains("--keep '*mlp.up_proj'"), "{warned}");
    let both = [&command[..], &output, &["--keep", "*mlp.up_proj", "--keep", "lm_head"]].concat();
    assert!(!stderr(&mantissa(&both)).contains("warning: --keep"));
    // A finished output is fixed by quantizing them together, in the same scheme and format.
    succeed(&[&command[..], &["--out", text(&out), "--quiet"]].concat());
    let linted = mantissa(&["lint", text(&out), "--for", "vllm", "--reference", "demo", "--json"]);
    let linted = String::from_utf8_lossy(&linted.stdout).into_owned();
    assert!(linted.contains("mantissa quantize demo --recipe rtn-int4-g"), "{linted}");
}

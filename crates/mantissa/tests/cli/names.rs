//! Names as people type them, and what a wrong one is answered with.

use std::fs;

use serde_json::Value;
use tempfile::TempDir;

use crate::support::{command, fail, json, stderr, succeed, text};

#[test]
fn usual_names_resolve_and_the_resolution_is_printed() {
    let temp = TempDir::new().unwrap();
    let out = temp.path().join("o");
    let out = text(&out);
    for (typed, full) in [
        ("int4", "rtn-int4-g128"),
        ("W4A16", "rtn-int4-g128"),
        ("Q4_K_M", "q4_k_m (llama.cpp file type 15)"),
        ("fp8", "rtn-fp8-e4m3-channel+fp8-e4m3-token"),
        ("FP8_DYNAMIC", "rtn-fp8-e4m3-channel+fp8-e4m3-token"),
        ("W8A8", "rtn-int8-channel+int8-token"),
        ("NVFP4", "rtn-nvfp4"),
    ] {
        let quantize = ["quantize", "demo", "--recipe", typed, "--out", out];
        let output = command().args(quantize).arg("--dry-run").output().unwrap();
        assert!(output.status.success(), "{typed}: {}", stderr(&output));
        assert!(stderr(&output).contains(&format!("recipe {typed} is {full}")), "{}", stderr(&output));
        let report = json(&[&quantize[..], &["--dry-run", "--json", "--quiet"]].concat());
        assert_eq!(report["stands_for"], full, "{typed}");
    }
    for (typed, full) in [("gptq", "gptq-int4-g128"), ("AWQ", "awq-int4-g128-asym")] {
        let quantize = ["quantize", "demo", "--recipe", typed, "--calibration", "default", "--samples", "1"];
        let rest = ["--length", "32", "--out", out, "--dry-run", "--json", "--quiet"];
        assert_eq!(json(&[&quantize[..], &rest].concat())["stands_for"], full, "{typed}");
    }
}

/// Output and record are those of the name in lower case.
#[test]
fn a_name_in_capitals_gives_the_same_bytes() {
    let temp = TempDir::new().unwrap();
    let quality = |recipe: &str| {
        let out = temp.path().join(recipe);
        succeed(&["quantize", "demo", "--recipe", recipe, "--out", text(&out), "--quiet"]);
        fs::read(out.join("quality.json")).unwrap()
    };
    assert_eq!(quality("W8A16"), quality("w8a16"));
}

/// Names in the list after `expected `.
fn listed(line: &str) -> usize {
    let list = line.split("expected ").nth(1).unwrap().split(", got").next().unwrap();
    list.split("; fix").next().unwrap().replace(" or ", ", ").split(", ").count()
}

#[test]
fn wrong_names_are_answered_with_at_most_five() {
    let temp = TempDir::new().unwrap();
    let out = temp.path().join("o");
    let quantize = |flag: &str, value: &str| {
        let arguments = ["quantize", "demo", "--out", text(&out), "--quiet"];
        let recipe: &[&str] = if flag == "--recipe" { &[] } else { &["--recipe", "w8a16"] };
        fail(2, &[&arguments[..], recipe, &[flag, value]].concat())
    };
    let cases = [
        (quantize("--recipe", "gtpq-int4-g128"), "gptq-int4-g128"),
        (quantize("--recipe", "q4_k_n"), "q4_k_"),
        (quantize("--recipe", "rtn-imt4-g32"), "int4"),
        (quantize("--format", "compresed-tensors"), "compressed-tensors"),
        (quantize("--for", "vlllm"), "vllm"),
        (quantize("--for", "vllm:gpu=h1000"), "h100"),
        (fail(2, &["fit", "demo", "--budget", "5bpw", "--schemes", "imt4-g32", "--out", text(&out)]), "int4"),
    ];
    for (line, nearest) in cases {
        assert!(line.contains(nearest) && listed(&line) <= 6, "{line}");
    }
    let recipe = temp.path().join("r.toml");
    fs::write(&recipe, "method = \"gtpq\"\nweights = \"int4-g128\"\n").unwrap();
    let line = quantize("--recipe", text(&recipe));
    assert!(line.contains("expected gptq, ") && listed(&line) <= 5, "{line}");
}

#[test]
fn an_unknown_architecture_is_answered_with_the_nearest() {
    let temp = TempDir::new().unwrap();
    fs::write(temp.path().join("config.json"), "{\"model_type\": \"lama\"}").unwrap();
    let x: &[f32] = &[1.0];
    crate::support::write_x(&temp.path().join("model.safetensors"), &[1], x);
    let line = fail(2, &["quantize", text(temp.path()), "--recipe", "w8a16", "--out", "o", "--dry-run"]);
    assert!(line.contains("expected llama, ") && listed(&line) <= 5, "{line}");
}

#[test]
fn short_names_of_kv_schemes_resolve() {
    let temp = TempDir::new().unwrap();
    let story = temp.path().join("story.txt");
    fs::write(&story, "Once upon a time there was a little fox who liked to count the stars.").unwrap();
    for (short, full) in [("int8", "int8-head"), ("int4", "int4-head-asym"), ("FP8", "fp8-e4m3-head")] {
        let eval = ["eval", "demo", "--text", text(&story), "--kv", short, "--json", "--quiet"];
        assert_eq!(json(&eval)["kv"], full);
        let run = ["run", "demo", "-p", "Once", "-n", "2", "--kv", short, "--json", "--quiet"];
        assert_eq!(json(&run)["kv"], full);
    }
}

#[test]
fn recalibrate_takes_the_calibration_options_of_other_commands() {
    let temp = TempDir::new().unwrap();
    let (story, made) = (temp.path().join("story.txt"), temp.path().join("made"));
    fs::write(&story, "Once upon a time there was a little fox who liked to count the stars. ".repeat(40))
        .unwrap();
    let recipe = "rtn-int8-channel+int8-tensor@static";
    let calibrated = ["--calibration", text(&story), "--samples", "4", "--length", "32", "--quiet"];
    succeed(&[&["quantize", "demo", "--recipe", recipe, "--out", text(&made)][..], &calibrated].concat());
    let recalibrate = |name: &str, with: &[&str]| {
        let out = temp.path().join(name);
        json(&[&["recalibrate", text(&made), "--out", text(&out), "--json", "--quiet"][..], with].concat())
    };
    let report = recalibrate("samples", &calibrated[..6]);
    assert_eq!((&report["windows"], &report["tokens"]), (&Value::from(4), &Value::from(128)));
    // The earlier flags still take every window.
    assert!(recalibrate("text", &["--text", text(&story), "--context", "32"])["windows"].as_u64() > Some(4));
    assert_eq!(recalibrate("default", &["--calibration", "default", "--samples", "2"])["windows"], 2);
    let help = succeed(&["recalibrate", "--help"]);
    assert!(help.contains("--calibration <") && !help.contains("--text <"), "{help}");
    let line = fail(2, &["recalibrate", text(&made), "--out", text(&temp.path().join("none"))]);
    assert!(line.contains("--calibration"), "{line}");
}

#[test]
fn schemes_and_recipes_list_what_the_grammar_has() {
    let schemes = json(&["schemes", "--json"]);
    let rows = schemes["schemes"].as_array().unwrap();
    let row = |name: &str| rows.iter().find(|row| row["name"] == name).unwrap_or_else(|| panic!("{name}"));
    let ternary = row("ternary-g128");
    assert_eq!((&ternary["largest"], &ternary["levels"]), (&Value::from(1.0), &Value::from(3)));
    assert!(row("q4_k")["element_bits"].is_null() && row("trellis2")["element_bits"].is_null());
    assert_eq!(row("int4-g128")["element_bits"], 4);
    let kv = schemes["kv_cache"].as_array().unwrap();
    for name in ["turbo4", "nuq4", "nuq4-1%", "int8-head"] {
        assert!(kv.iter().any(|row| row["name"] == name), "{name}");
    }
    let printed = succeed(&["schemes"]);
    assert!(
        printed.contains("turbo4") && printed.contains("nuq4-1%") && printed.contains("trellis3"),
        "{printed}"
    );
    let recipes = json(&["recipes", "--json"]);
    let rows = recipes["recipes"].as_array().unwrap();
    for part in ["qtip-", "spqr-", "rotate-", "spin-", "w4a8", "+kv-"] {
        assert!(rows.iter().any(|row| row.to_string().contains(part)), "{part}");
    }
    let nf4 = rows.iter().find(|row| row["name"] == "nf4").unwrap();
    assert_eq!(nf4["format"], "bitsandbytes");
    assert!(nf4["loads_in"].as_str().unwrap().contains("transformers"), "{nf4}");
}

/// `schemes NAME` and `recipes NAME` show one; a wrong name is answered with near ones.
#[test]
fn one_scheme_and_one_recipe_are_shown() {
    let scheme = json(&["schemes", "INT4-g128-asym", "--json"]);
    let found = &scheme["scheme"];
    assert_eq!((&found["name"], &found["bits_per_weight"]), (&"int4-g128-asym".into(), &4.28125.into()));
    assert!(found["rule"]["formula"].as_str().unwrap().contains("(max - min) / (2^b - 1)"), "{found}");
    let measured = |report: &Value| report["measured"].as_array().unwrap().len();
    assert!(measured(found) > 2 && found["loads_in"].as_str().unwrap().contains("vLLM"), "{found}");
    let cached = json(&["schemes", "turbo4", "--json"]);
    assert!(cached["kv_cache"]["bits_per_element"] == 4.125 && cached["scheme"].is_null(), "{cached}");
    let both = succeed(&["schemes", "int8-head"]);
    assert!(both.contains("each head of each token") && both.contains("KV cache"), "{both}");
    let recipe = json(&["recipes", "W8A8_SMOOTH", "--json"]);
    let found = &recipe["recipe"];
    assert_eq!(found["name"], "w8a8-smooth");
    assert_eq!(found["steps"][0]["does"], "migrates outliers from activations to weights");
    assert!(measured(found) > 0 && found["formats"].as_array().unwrap().len() > 1, "{found}");
    let shown = succeed(&["recipes", "q4_k_m"]);
    assert!(shown.contains("values      q6_k × 16, q4_k × 16") && shown.contains("gguf"), "{shown}");
    for (arguments, near) in [
        (["schemes", "int9-g32"], "int8"),
        (["schemes", "int4-g0"], "a group such as g128"),
        (["schemes", "int4"], "expected what a scale covers, as in int4-g128"),
        (["recipes", "gpqt-int4-g128"], "gptq-int4-g128"),
        (["recipes", "q4_k_x"], "q4_k_m"),
    ] {
        let error = fail(2, &arguments);
        assert!(error.contains(near), "{arguments:?}: {error}");
    }
}

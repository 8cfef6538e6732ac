//! `--dry-run` of `eval`, `run` and `serve`: what would be loaded, without loading it.

use std::fs;

use serde_json::Value;
use tempfile::TempDir;

use crate::support::{fail, json, mantissa, stderr, succeed, text};

/// Bytes of a field.
fn bytes(report: &Value, field: &str) -> u64 {
    report[field].as_u64().unwrap_or_else(|| panic!("{field}: {report}"))
}

/// Models, precision, cache and memory are said, and nothing runs: no port is bound.
#[test]
fn nothing_is_loaded() {
    let temp = TempDir::new().unwrap();
    let model = temp.path().join("model");
    succeed(&["quantize", "demo", "--recipe", "w4a16", "--out", text(&model), "--quiet"]);
    let sample = temp.path().join("sample.txt");
    fs::write(&sample, "Once upon a time there was a little dog. ".repeat(40)).unwrap();
    let runs: [&[&str]; 3] = [
        &["run", text(&model), "-p", "Once upon a time", "-n", "100", "--kv", "int8-head"],
        &["eval", text(&model), "--text", text(&sample), "--context", "64"],
        &["serve", text(&model), "--parallel", "4", "--context", "256", "--port", "1"],
    ];
    for arguments in runs {
        let report = json(&[arguments, &["--dry-run", "--json"]].concat());
        let model = &report["models"][0];
        assert_eq!(model["format"], "compressed-tensors", "{report}");
        assert!(model["schemes"].to_string().contains("int4-g128"), "{report}");
        let parts = ["weights", "loading", "buffers"].map(|field| bytes(&report, field));
        let peak = bytes(&report, "predicted_peak_memory");
        assert!(parts[0] > 500_000 && peak > parts[0] && peak < 100_000_000, "{report}");
        let shown = succeed(&[arguments, &["--dry-run"]].concat());
        for part in ["load  ", "4.1", "engine  ", "context  ", "KV cache  ", "of anonymous memory predicted"]
        {
            assert!(shown.contains(part), "{part}: {shown}");
        }
    }
    // The cache of run: 104 tokens and more in blocks, 5 layers, 2 heads of 32 in int8 with a scale each.
    let run = json(&[runs[0], &["--dry-run", "--json"]].concat());
    assert_eq!((&run["engine"], &run["kv"]), (&"fast".into(), &"int8-head".into()), "{run}");
    let token = run["kv_bytes_per_token"].as_f64().unwrap();
    assert!(bytes(&run, "kv_bytes") as f64 >= token * run["context"].as_f64().unwrap(), "{run}");
    let eval = json(&[runs[1], &["--dry-run", "--json"]].concat());
    assert_eq!(
        (&eval["engine"], &eval["kv"], &eval["context"]),
        (&"reference".into(), &"none".into(), &64.into())
    );
    let serve = json(&[runs[2], &["--dry-run", "--json"]].concat());
    assert_eq!((&serve["sequences"], &serve["context"]), (&4.into(), &256.into()), "{serve}");
    assert!(serve["grammar_memory"].is_u64(), "{serve}");
}

/// What the run itself predicts and takes is what the dry run said.
#[test]
fn a_dry_run_predicts_as_the_run_does() {
    let arguments = ["run", "demo", "-p", "Once upon a time", "-n", "200", "--threads", "2"];
    let planned = json(&[&arguments[..], &["--dry-run", "--json"]].concat());
    let ran = json(&[&arguments[..], &["--json"]].concat());
    let (said, kept) = (bytes(&planned, "predicted_peak_memory"), bytes(&ran, "predicted_peak_memory"));
    // Both add what the process holds already, which differs a little from run to run.
    assert!(said.abs_diff(kept) < said / 50, "{said} {kept}");
    assert_eq!(planned["kv_bytes_per_token"], ran["kv_bytes_per_token"]);
    let measured = bytes(&ran, "measured_peak_memory");
    assert!(measured <= said, "{measured} of {said}");
}

/// Too little memory and wrong input are refused as the command refuses them.
#[test]
fn what_the_command_refuses_its_dry_run_refuses() {
    let line = fail(3, &["run", "demo", "-p", "Once", "--dry-run", "--memory", "100k"]);
    assert!(line.contains("--memory"), "{line}");
    assert!(fail(2, &["eval", "demo", "--dry-run"]).contains("--text"));
    let line = fail(2, &["serve", "demo", "--dry-run", "--context", "100000"]);
    assert!(line.contains("--context"), "{line}");
    // The reference engine and a draft are described too.

    let output = mantissa(&["run", "demo", "-p", "Once", "--engine", "reference", "--dry-run", "--json"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&report["engine"], &report["kv"]), (&"reference".into(), &"f32".into()), "{report}");
    let drafted = json(&["run", "demo", "-p", "Once", "--draft", "demo", "--dry-run", "--json"]);
    assert_eq!(drafted["models"].as_array().unwrap().len(), 2, "{drafted}");
}

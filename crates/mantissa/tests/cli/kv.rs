//! `--kv`: keys and values in any scheme.

use serde_json::Value;
use tempfile::TempDir;

use crate::support::{fail, json, mantissa, root, stderr, text};

/// `eval demo --reference demo` on a short text.
fn eval(more: &[&str]) -> Value {
    let readme = root().join("README.md");
    let fixed = ["eval", "demo", "--reference", "demo", "--text", text(&readme), "--context", "64"];
    json(&[&fixed[..], &["--limit", "300", "--json", "--quiet"], more].concat())
}

fn number(report: &Value, field: &str) -> f64 {
    report[field].as_f64().unwrap()
}

/// Five layers of four heads of 32: what is reported is what the scheme takes.
#[test]
fn fewer_bits_cost_more_and_take_less() {
    let mut least = 0.0;
    for (scheme, bytes) in [("int8-head", 1440.0), ("int4-head-asym", 840.0), ("int2-head,scales=f16", 400.0)]
    {
        let report = eval(&["--kv", scheme]);
        assert_eq!((number(&report, "kv_bytes_per_token"), &report["kv"]), (bytes, &Value::from(scheme)));
        assert!(number(&report, "kl") > 4.0 * least, "{scheme}: {report}");
        least = number(&report, "kl");
    }
    assert_eq!(number(&eval(&["--kv", "f32"]), "kl"), 0.0);
}

#[test]
fn a_window_is_measured_by_decoding() {
    let line =
        fail(2, &["eval", "demo", "--text", text(&root().join("README.md")), "--kv", "int4-head,window=8"]);
    assert!(line.contains("--prefill"), "{line}");
    let decode = |kv: &str| eval(&["--prefill", "16", "--kv", kv]);
    let (all, some, none) =
        (decode("int4-head"), decode("int4-head,window=24"), decode("int4-head,window=64"));
    assert!(number(&none, "kl") < 1e-9 && number(&none, "kl") < number(&some, "kl"), "{none} {some}");
    assert!(number(&some, "kl") < number(&all, "kl"), "{some} {all}");
    assert_eq!(all["prefill"], 16);
    // Positions from the last of the prompt on.
    let whole = eval(&["--kv", "int4-head"]);
    assert!(number(&all, "tokens") < number(&whole, "tokens"));
}

#[test]
fn run_says_how_it_kept_keys_and_values() {
    let temp = TempDir::new().unwrap();
    let out = temp.path().join("run.json");
    let report = format!("--json={}", out.display());
    let mut arguments = vec!["run", "demo", "-p", "Once upon a time", "-n", "24", &report];
    let plain = mantissa(&arguments);
    assert_eq!(stderr(&plain), "");
    arguments.extend(["--kv", "keys=int8-g4-asym,values=int8-head,window=8,sinks=2,channel-keys,rotate"]);
    let quantized = mantissa(&arguments);
    assert!(quantized.status.success() && !quantized.stdout.is_empty());
    assert!(stderr(&quantized).contains("bytes per token"), "{}", stderr(&quantized));
    let report: Value = serde_json::from_slice(&std::fs::read(&out).unwrap()).unwrap();
    // Per layer: groups of four tokens of each of 128 channels take 4 + 4 + 1 bytes, and a head 32 + 4.
    assert_eq!(report["kv_bytes_per_token"], 5.0 * (128.0 * 9.0 / 4.0 + 4.0 * 36.0));
    for kv in ["int8-head,window", "fp8-e4m3-tensor", "int8-tensor@static", "keys=int8-head,channel-keys"] {
        let line = fail(2, &["run", "demo", "-p", "a", "-n", "2", "--kv", kv]);
        assert!(line.contains("allowed"), "{line}");
    }
}

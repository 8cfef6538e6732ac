//! `quality.json`, the gate of `quantize`, and the rechecks of `verify`.

use std::fs;

use serde_json::Value;
use tempfile::TempDir;

use crate::main_job::{tiny, windows};
use crate::support::{fail, json, mantissa, stderr, succeed, text};

#[test]
fn an_output_is_measured_gated_and_measured_again() {
    let temp = TempDir::new().unwrap();
    let (model, out, tokens) = (tiny("llama1-mha"), temp.path().join("q"), windows(temp.path()));
    let (model, out_text) = (text(&model), text(&out));
    let quantize = ["quantize", model, "--recipe", "rtn-int3-g8", "--out", out_text, "--tokens", &tokens];
    let refused = mantissa(&[&quantize[..], &["--max-kl", "1e-9", "--json", "--quiet"]].concat());
    assert_eq!(refused.status.code(), Some(1));
    let line = stderr(&refused);
    assert!(
        line.starts_with("error: KL: expected at most ") && line.contains("nothing was put at"),
        "{line}"
    );
    let report: Value = serde_json::from_slice(&refused.stdout).unwrap();
    let kl = report["evaluation"]["kl"].as_f64().unwrap();
    assert!(report["output"].is_null() && kl > 1e-9 && !out.exists(), "{report}");
    let strays = || {
        fs::read_dir(temp.path())
            .unwrap()
            .filter(|e| e.as_ref().unwrap().file_name().to_string_lossy().contains("partial"))
    };
    assert_eq!(strays().count(), 1);
    let done = json(&[&quantize[..], &["--max-kl=100", "--json", "--quiet"]].concat());
    assert!(done["resumed"].as_u64().unwrap() > 14, "{done}");
    assert_eq!((&done["evaluation"], strays().count()), (&report["evaluation"], 0));
    let written: Value = serde_json::from_slice(&fs::read(out.join("quality.json")).unwrap()).unwrap();
    for field in ["tool", "recipe", "hashes", "evaluation", "layers", "tensors", "fallbacks", "calibration"] {
        assert_eq!(done[field], written[field], "{field}");
        assert!(written.get(field).is_some(), "{field}");
    }
    assert!(!out.join("mantissa-report.json").exists());
    // The same figures as those of eval.
    let eval = json(&["eval", out_text, "--reference", model, "--tokens", &tokens, "--json", "--quiet"]);
    for field in ["nll", "nll_se", "ppl", "kl", "kl_se", "top1", "top1_se", "delta_nll", "delta_nll_se"] {
        assert_eq!(written["evaluation"][field], eval[field], "{field}");
    }
    assert_eq!(written["evaluation"]["text"]["name"], "windows.json:w");
    let found = json(&["verify", out_text, "--reference", model, "--tokens", &tokens, "--json", "--quiet"]);
    assert_eq!((&found["ok"], &found["figures"]), (&true.into(), &written["evaluation"]), "{found}");
    assert_eq!(found["source_files"], 2);
    let said = succeed(&["verify", out_text, "--reference", model, "--tokens", &tokens, "--quiet"]);
    assert!(said.contains("measured again on windows.json:w") && said.contains("noise floor"), "{said}");
    // The figures were not measured on these windows.
    let line = fail(2, &["verify", out_text, "--tokens", &tokens, "--limit", "30", "--quiet"]);
    assert!(line.contains("SHA-256") && line.contains("windows.json:w"), "{line}");
}

#[test]
fn a_text_is_cut_as_eval_cuts_it() {
    let temp = TempDir::new().unwrap();
    let (model, out, path) = (tiny("llama2-gqa-tied"), temp.path().join("q"), temp.path().join("t.txt"));
    fs::write(&path, "the cat sat\n==\nthe dog ran home\n==\na bird\n").unwrap();
    let (model, out_text) = (text(&model), text(&out));
    let cut = ["--text", text(&path), "--split", "==", "--docs", "2..3", "--bos", "always"];
    let arguments = ["quantize", model, "--recipe", "w8a16", "--out", out_text, "--json", "--quiet"];
    let done = json(&[&arguments[..], &cut].concat());
    assert_eq!(done["evaluation"]["text"]["windows"], 2);
    let eval = json(&[&["eval", out_text, "--reference", model, "--json", "--quiet"][..], &cut].concat());
    assert_eq!(done["evaluation"]["kl"], eval["kl"]);
    let line = fail(2, &[&["verify", out_text][..], &cut[..6], &["--bos", "never"]].concat());
    assert!(line.contains("t.txt"), "{line}");
    succeed(&[&["verify", out_text, "--quiet"][..], &cut].concat());
}

#[test]
fn the_built_in_text_is_named_default_and_serves_a_limit_without_a_text() {
    let temp = TempDir::new().unwrap();
    let run = |name: &str, extra: &[&str]| {
        let out = temp.path().join(name);
        let arguments = ["quantize", "demo", "--recipe", "rtn-int4-g128", "--out", text(&out), "--json"];
        json(&[&arguments[..], extra].concat())["evaluation"].take()
    };
    let limited = run("limited", &["--max-kl", "5"]);
    assert_eq!(limited["text"]["name"], "default (held out)");
    assert_eq!(limited, run("named", &["--text", "default"]));
    let out = temp.path().join("named");
    succeed(&["verify", text(&out), "--reference", "demo", "--text", "default", "--quiet"]);
    let worse = temp.path().join("worse");
    let arguments = ["quantize", "demo", "--recipe", "rtn-int2-g128", "--out", text(&worse)];
    fail(1, &[&arguments[..], &["--max-kl", "0.001", "--quiet"]].concat());
}

#[test]
fn options_without_a_text_are_mistakes() {
    let temp = TempDir::new().unwrap();
    let (model, out) = (tiny("llama1-mha"), temp.path().join("q"));
    let quantize = |extra: &[&str]| {
        let arguments = ["quantize", text(&model), "--recipe", "nf4", "--out", text(&out), "--quiet"];
        fail(2, &[&arguments[..], extra].concat())
    };
    assert!(quantize(&["--max-kl", "0.1"]).contains("tokenizer.json"));
    assert!(quantize(&["--limit", "5"]).contains("--text"));
    assert!(quantize(&["--max-kl", "nan", "--tokens", "x.json"]).contains("expected a number"));
    assert!(quantize(&["--limit", "0", "--tokens", "x.json"]).contains("1.."));
    assert!(quantize(&["--tokens", "/nowhere.json"]).contains("/nowhere.json"));
    let foreign = temp.path().join("foreign.json");
    fs::write(&foreign, "[[1, 4000000]]").unwrap();
    assert!(quantize(&["--tokens", text(&foreign)]).contains("4000000"));
    assert!(!out.exists());
}

/// Input that predicts nothing has no figures, and passes no gate.
#[test]
fn nothing_to_predict_is_an_error() {
    let temp = TempDir::new().unwrap();
    let (model, tokens) = (tiny("llama1-mha"), windows(temp.path()));
    let gates = ["--max-kl", "9", "--max-ppl-increase", "9"];
    let eval = [
        "eval",
        text(&model),
        "--reference",
        text(&model),
        "--tokens",
        &tokens,
        "--prefill",
        "64",
        "--quiet",
    ];
    let line = fail(2, &[&eval[..], &gates].concat());
    assert!(line.contains("got none in 3 windows") && line.contains("prompt of 64"), "{line}");
    let single = temp.path().join("single.json");
    fs::write(&single, "[[1], [2]]").unwrap();
    let out = temp.path().join("q");
    let quantize = ["quantize", text(&model), "--recipe", "nf4", "--out", text(&out), "--quiet"];
    fail(2, &[&quantize[..], &["--tokens", text(&single), "--max-kl", "9"]].concat());
    assert!(!out.exists());
}

#[test]
fn a_dry_run_counts_the_evaluation() {
    let temp = TempDir::new().unwrap();
    let (model, out, tokens) = (tiny("llama1-mha"), temp.path().join("q"), windows(temp.path()));
    let arguments = ["quantize", text(&model), "--recipe", "nf4", "--out", text(&out), "--dry-run", "--json"];
    let peak = |extra: &[&str]| {
        let plan = json(&[&arguments[..], extra].concat());
        (plan["predicted_peak_memory"].as_u64().unwrap(), plan["peak_stage"].as_str().unwrap().to_owned())
    };
    let (with, stage) = peak(&["--tokens", &tokens, "--verify=false"]);
    assert!(with > peak(&["--verify=false"]).0 && stage == "evaluate the output", "{stage}");
    let line =
        fail(3, &[&arguments[..6], &["--tokens", &tokens, "--verify=false", "--memory", "2M"]].concat());
    assert!(line.contains("(--memory)") && !out.exists(), "{line}");
}

#[test]
fn a_tampered_or_missing_file_is_reported() {
    let temp = TempDir::new().unwrap();
    let (model, out) = (tiny("llama1-mha"), temp.path().join("q"));
    succeed(&["quantize", text(&model), "--recipe", "nf4", "--out", text(&out), "--quiet"]);
    let path = out.join("quality.json");
    let changed = fs::read_to_string(&path).unwrap().replacen("\"mse\": ", "\"mse\": 1", 1);
    fs::write(&path, changed).unwrap();
    let line = fail(1, &["verify", text(&out), "--reference", text(&model), "--quiet"]);
    assert!(line.contains("expected mse") && line.contains("as in the manifest"), "{line}");
    for name in ["quality.json", "mantissa-manifest.json"] {
        fs::remove_file(out.join(name)).unwrap();
    }
    let said = succeed(&["verify", text(&out), "--quiet"]);
    assert!(said.contains("note: no quality.json") && said.contains("verified"), "{said}");
}

/// The error of one window's mean comes from its tokens, which are correlated: no ± is shown, and the reports say so.
#[test]
fn one_window_has_no_standard_error() {
    let temp = TempDir::new().unwrap();
    let (model, tokens) = (tiny("llama1-mha"), temp.path().join("t.json"));
    let model = text(&model);
    for (windows, shown) in [("[[1,2,3,4,5,6,7,8]]", false), ("[[1,2,3,4,5,6,7,8],[9,8,7,6,5,4,3,2]]", true)]
    {
        fs::write(&tokens, windows).unwrap();
        let out = temp.path().join(format!("q-{shown}"));
        let on = ["--tokens", text(&tokens)];
        let made = ["quantize", model, "--recipe", "rtn-int3-g8", "--out", text(&out)];
        let told = succeed(&[&made[..], &on].concat());
        let eval = [&["eval", text(&out), "--reference", model][..], &on].concat();
        let said = succeed(&eval);
        for said in [&told, &said] {
            let figures: Vec<&str> = said.lines().filter(|line| line.contains(" nats")).collect();
            assert!(figures.len() >= 3, "{said}");
            for line in figures {
                assert_eq!((line.contains(" ± "), line.contains("(one window)")), (shown, !shown), "{line}");
            }
        }
        let (done, quality) = (
            json(&[&eval[..], &["--json", "--quiet"]].concat()),
            serde_json::from_slice::<Value>(&fs::read(out.join("quality.json")).unwrap()).unwrap(),
        );
        for report in [&done, &quality["evaluation"]] {
            let note = report["note"].as_str().unwrap_or_default();
            assert_eq!(
                note.starts_with("one window: ") && note.contains("no standard errors"),
                !shown,
                "{report}"
            );
        }
        let page = temp.path().join(format!("{shown}.html"));
        succeed(&["report", text(&out), "--out", text(&page), "--quiet"]);
        let page = fs::read_to_string(page).unwrap();
        assert_eq!(page.contains("nats/token (one window)"), !shown);
    }
}

//! `mantissa compare`: candidates for one model in one table.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::{command, fail, json as run_json, mantissa, root, stderr, succeed, text};

/// Texts of which the model in the binary has seen neither.
fn texts(dir: &Path) -> [String; 2] {
    let page = fs::read_to_string(root().join("crates/mantissa-jobs/demo/text/stories.txt")).unwrap();
    let chars: Vec<char> = page.chars().collect();
    let part = |name: &str, from: usize| {
        let path = dir.join(name);
        fs::write(&path, chars[from..from + 4000].iter().collect::<String>()).unwrap();
        text(&path).to_owned()
    };
    [part("first.txt", 0), part("second.txt", 8000)]
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value}"))
}

#[test]
fn recipes_and_finished_outputs_are_measured_on_the_same_windows() {
    let dir = TempDir::new().unwrap();
    let [first, second] = texts(dir.path());
    let finished = dir.path().join("finished");
    succeed(&["quantize", "demo", "--recipe", "rtn-int4-g128", "--out", text(&finished), "--quiet"]);
    let (page, card) = (dir.path().join("page.html"), dir.path().join("card.md"));
    let markdown = format!("--markdown={}", text(&card));
    let report = run_json(&[
        "compare",
        "demo",
        text(&finished),
        "--recipe",
        "RTN-int4-g128",
        "--recipe",
        "rtn-q8_0",
        "--recipe",
        "rtn-int2-g32",
        "--text",
        &first,
        "--text",
        &second,
        "--context",
        "64",
        "--html",
        text(&page),
        &markdown,
        "--json",
        "--quiet",
    ]);
    let rows = report["rows"].as_array().unwrap();
    let names: Vec<&str> = rows.iter().map(|row| row["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["rtn-int4-g128", "rtn-q8_0", "rtn-int2-g32", text(&finished)]);
    // The recipe makes what the finished output is, and eval measures the same.
    for field in ["bits", "bytes", "kl", "kl_se", "top1", "loads_in", "texts"] {
        assert_eq!(rows[0][field], rows[3][field], "{field}");
    }
    let window = ["--context", "64", "--reference", "demo", "--json", "--quiet"];
    let measured = run_json(&[&["eval", text(&finished), "--text", &second][..], &window].concat());
    for field in ["kl", "kl_se", "top1", "delta_nll", "delta_nll_se", "ppl"] {
        assert_eq!(rows[0]["texts"][1][field], measured[field], "{field}");
    }
    let (kl, parts) = (number(&rows[0]["kl"]), rows[0]["texts"].as_array().unwrap());
    assert!((kl - 0.5 * (number(&parts[0]["kl"]) + number(&parts[1]["kl"]))).abs() < 1e-12);
    assert!(rows[0]["loads_in"].as_array().unwrap().contains(&json!("vLLM")), "{}", rows[0]);
    assert!((number(&rows[1]["bits"]) - 8.5).abs() < 1e-9 && rows[1]["format"] == "gguf");
    assert!(rows[0].get("path").is_none() && rows[3]["path"] == text(&finished));
    // Two equal models do not differ, and 2 bits are worse than 8 beyond any chance.
    let pair = |a: &str, b: &str| {
        let pairs = report["pairs"].as_array().unwrap();
        pairs.iter().find(|pair| pair["a"] == a && pair["b"] == b).unwrap().clone()
    };
    let same = pair("rtn-int4-g128", text(&finished));
    assert_eq!((number(&same["kl_difference"]), &same["better"]), (0.0, &Value::Null));
    assert_eq!(pair("rtn-q8_0", "rtn-int2-g32")["better"], "rtn-q8_0");
    let page = fs::read_to_string(&page).unwrap();
    for part in ["Smallest KL: rtn-q8_0", "second.txt", "<svg", "rtn-int2-g32"] {
        assert!(page.contains(part), "{part}");
    }
    assert!(!page.contains("<script") && !page.contains("src="));
    let card = fs::read_to_string(&card).unwrap();
    let head = "| candidate | bits/weight | size | KL, first.txt | KL, second.txt | top-1 | loads in |";
    assert!(card.starts_with("## Quantization\n\n") && card.contains(head), "{card}");
    let table = card.lines().filter(|line| line.starts_with('|'));
    let columns: Vec<usize> = table.map(|line| line.replace("\\|", "").matches('|').count()).collect();
    assert_eq!(columns, vec![8; 7], "{card}");
    // A path of this machine tells a reader elsewhere nothing.
    assert!(card.contains("| finished | 4.") && !card.contains(text(dir.path())), "{card}");
    assert!(card.contains("Bits: per weight of the linear layers as stored, unquantized ones"), "{card}");
    assert!(!card.contains("alibrated on"), "{card}");
}

#[test]
fn kept_outputs_are_used_again_and_the_card_says_what_they_were_calibrated_on() {
    let dir = TempDir::new().unwrap();
    let kept = dir.path().join("kept");
    let model = dir.path().join("my model");
    fs::create_dir(&model).unwrap();
    for file in fs::read_dir(root().join("tests/data/tiny/smollm3")).unwrap() {
        let path = file.unwrap().path();
        fs::copy(&path, model.join(path.file_name().unwrap())).unwrap();
    }
    let tokens = |name: &str, from: usize| {
        let window = |first: usize| (0..32).map(move |i| 3 + (first + i) % 50).collect::<Vec<usize>>();
        let path = dir.path().join(name);
        fs::write(&path, json!([window(from), window(from + 1), window(from + 2)]).to_string()).unwrap();
        text(&path).to_owned()
    };
    let (calibration, measured, other) =
        (tokens("calib.json", 0), tokens("one.json", 7), tokens("two.json", 9));
    let compare = |on: &str, more: &[&str]| {
        let base = ["compare", text(&model), "--recipe", "gptq-int8-channel", "--recipe", "rtn-int8-channel"];
        let kept = ["--keep-outputs", text(&kept), "--calibration-tokens", &calibration, "--tokens", on];
        mantissa(&[&base[..], &kept, more].concat())
    };
    let card = compare(&measured, &["--markdown"]);
    assert!(card.status.success(), "{}", stderr(&card));
    assert!(!stderr(&card).contains("already complete"), "{}", stderr(&card));
    let card = String::from_utf8(card.stdout).unwrap();
    assert!(card.contains("| my model | ") && !card.contains(text(dir.path())), "{card}");
    assert!(card.contains("Calibrated on calib.json, 3 × 32 tokens: gptq-int8-channel."), "{card}");
    let at =
        |name: &str| fs::metadata(kept.join(name).join("model.safetensors")).unwrap().modified().unwrap();
    let before = ["gptq-int8-channel", "rtn-int8-channel"].map(at);
    // On other windows too, which is another command.
    for on in [&measured, &other] {
        let again = compare(on, &["--json"]);
        assert_eq!(stderr(&again).matches("already complete").count(), 2, "{}", stderr(&again));
        let report: Value = serde_json::from_slice(&again.stdout).unwrap();
        assert_eq!(report["rows"][0]["calibration"]["windows"], 3, "{report}");
        assert!(report["rows"][1].get("calibration").is_none() && report["rows"][1]["kl"].is_number());
    }
    assert_eq!(before, ["gptq-int8-channel", "rtn-int8-channel"].map(at));
    // Another calibration makes another output, which does not take the place of this one.
    tokens("calib.json", 20);
    let refused = compare(&measured, &[]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(stderr(&refused).contains("that differs: "), "{}", stderr(&refused));
}

#[test]
fn several_recipes_in_one_value_are_told_apart() {
    let line = fail(2, &["compare", "demo", "--recipe", "w4a16,fp8"]);
    assert!(line.trim_end().ends_with("fix: --recipe w4a16 --recipe fp8"), "{line}");
}

#[test]
fn a_candidate_that_fails_is_a_row_with_the_reason() {
    let dir = TempDir::new().unwrap();
    let [first, _] = texts(dir.path());
    let other = root().join("tests/data/tiny/llama2-gqa-tied");
    let arguments =
        ["compare", "demo", text(&other), "--recipe", "rtn-int8-channel", "--text", &first, "--limit", "200"];
    let output = mantissa(&[&arguments[..], &["--json"]].concat());
    assert!(output.status.success(), "{}", stderr(&output));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let failed = &report["rows"][1];
    assert!(failed["error"].as_str().unwrap().contains("vocab"), "{failed}");
    assert_eq!((&failed["kl"], &failed["bits"]), (&Value::Null, &Value::Null));
    assert!(report["rows"][0]["kl"].is_number() && report["pairs"] == json!([]));
    assert!(
        stderr(&output).contains("warning: ") && stderr(&output).contains("vocab"),
        "{}",
        stderr(&output)
    );
    let shown = succeed(&[&arguments[..], &["--quiet"]].concat());
    assert!(shown.contains("failed") && shown.contains("smallest KL: rtn-int8-channel"), "{shown}");
    // If nothing can be measured, the command fails; what cannot be meant is refused before any work.
    fail(2, &["compare", "demo", text(&other), "--text", &first, "--limit", "100", "--quiet"]);
    let none = fail(2, &["compare", "demo"]);
    assert!(none.contains("mantissa compare MODEL --recipe"), "{none}");
    assert!(fail(2, &["compare", "demo", "--recipe", "nvpf4"]).contains("nvfp4"));
    assert!(fail(2, &["compare", "demo", "no/such/out"]).contains("no/such/out"));
    assert!(
        fail(2, &["compare", "demo", "--recipe", "nvfp4", "--json", "--markdown"])
            .contains("--markdown=FILE")
    );
}

#[test]
fn outputs_are_kept_where_that_is_asked_and_markdown_is_printed() {
    let dir = TempDir::new().unwrap();
    let [first, _] = texts(dir.path());
    let temporary = dir.path().join("temporary");
    fs::create_dir(&temporary).unwrap();
    let compare = |more: &[&str]| {
        let base = ["compare", "demo", "--recipe", "rtn-int4-g128", "--recipe", "rtn-q4_0", "--quiet"];
        let limits = ["--text", &first, "--limit", "200", "--context", "64"];
        let mut started = command();
        let output =
            started.env("TMPDIR", &temporary).args([&base[..], &limits, more].concat()).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        assert_eq!(fs::read_dir(&temporary).unwrap().count(), 0, "nothing temporary stays");
        String::from_utf8(output.stdout).unwrap()
    };
    let kept = dir.path().join("kept");
    let card = compare(&["--keep-outputs", text(&kept), "--markdown"]);
    assert!(card.starts_with("## Quantization\n") && card.contains("| rtn-q4\\_0 | 4.50 |"), "{card}");
    let mut names: Vec<_> = fs::read_dir(&kept).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert!(names.contains(&"rtn-int4-g128".into()) && names.contains(&"rtn-q4_0.gguf".into()), "{names:?}");
    succeed(&["verify", text(&kept.join("rtn-int4-g128")), "--reference", "demo", "--quiet"]);
    let table = compare(&[]);
    assert!(table.contains("to best") && !table.contains("one window"), "{table}");
}

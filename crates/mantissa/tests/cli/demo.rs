//! The embedded model: `mantissa demo`, and `demo` as MODEL.

use std::fs;
use std::path::Path;
use std::process::Output;
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;

use crate::support::{command, root, stderr, strict_json, text};

/// Runs the binary in `dir` with its own folder for temporary files, which must be empty afterwards.
fn run_in(dir: &Path, arguments: &[&str]) -> Output {
    let temporary = dir.join("temporary");
    fs::create_dir_all(&temporary).unwrap();
    let output = command().current_dir(dir).env("TMPDIR", &temporary).args(arguments).output().unwrap();
    assert_eq!(fs::read_dir(&temporary).unwrap().count(), 0, "{arguments:?} left something behind");
    output
}

fn json_in(dir: &Path, arguments: &[&str]) -> Value {
    let output = run_in(dir, arguments);
    assert!(output.status.success(), "{arguments:?}: {}", stderr(&output));
    strict_json::parse(&output.stdout).unwrap()
}

#[test]
fn the_demo_measures_and_draws() {
    let dir = TempDir::new().unwrap();
    let report = json_in(
        dir.path(),
        &["demo", "--recipe", "w8a16", "--recipe", "rtn-int4-g128", "--recipe", "gptq-int4-g128", "--json"],
    );
    let rows = report["recipes"].as_array().unwrap();
    let kl = |row: usize, domain: usize| rows[row]["domains"][domain]["kl"].as_f64().unwrap();
    let se = |row: usize, domain: usize| rows[row]["domains"][domain]["kl_se"].as_f64().unwrap();
    for domain in 0..3 {
        assert!(kl(0, domain) < 0.1 * kl(1, domain), "{report:#}");
        assert!(kl(2, domain) + 2.0 * se(2, domain) < kl(1, domain), "GPTQ is no better: {report:#}");
    }
    let bits: Vec<_> = rows.iter().map(|row| row["linear_bits_per_weight"].as_f64().unwrap()).collect();
    assert!((8.0..8.2).contains(&bits[0]) && bits[1..] == [4.125, 4.125], "{bits:?}");
    let page = fs::read_to_string(dir.path().join("demo-report.html")).unwrap();
    assert!(page.starts_with("<!doctype html>") && page.contains("<svg") && page.contains("gptq-int4-g128"));
    for part in [
        "8 bits: 2.66 MB → 1.61 MB, 40 % smaller, quality loss <span class=\"badge b0\">indistinguishable</span> (w8a16, KL 0.000",
        "<figcaption>2 to 5 bits</figcaption>",
        "<figcaption>8 bits</figcaption>",
        "Best at their size: gptq-int4-g128 (",
        ">rtn</span>",
        ">gptq</span>",
        "<mark>",
    ] {
        assert!(page.contains(part), "{part}");
    }
    // Labels name the front; the legend lists the methods that are shown.
    let labels = |name: &str| page.matches(&format!(">{name}</text>")).count();
    assert!(labels("gptq-int4-g128") > labels("rtn-int4-g128"), "the front alone is labelled");
    assert!(!page.contains(">awq</span>") && !page.contains(">hqq</span>"));
    for network in ["src=", "href=", "@import", "<script", "url("] {
        assert!(!page.contains(network), "the page asks for {network}");
    }
}

/// Minimum quality of the model: crates/mantissa-jobs/demo/training/bigram.py.
#[test]
fn the_model_beats_a_bigram_model_in_every_domain() {
    let dir = TempDir::new().unwrap();
    let report = json_in(dir.path(), &["demo", "--recipe", "bf16", "--json"]);
    let bigram = fs::read_to_string(root().join("crates/mantissa-jobs/demo/training/bigram.json")).unwrap();
    let bigram: Value = serde_json::from_str(&bigram).unwrap();
    for figures in report["dense"].as_array().unwrap() {
        let domain = figures["domain"].as_str().unwrap();
        let (ours, se) = (figures["nll"].as_f64().unwrap(), figures["nll_se"].as_f64().unwrap());
        let theirs = bigram[domain]["nll"].as_f64().unwrap();
        assert_eq!(figures["tokens"], bigram[domain]["tokens"], "{domain}: other windows");
        assert!(ours + 3.0 * se < theirs, "{domain}: {ours} ± {se} nats, the bigram model {theirs}");
    }
    // In bf16 the model equals itself.
    assert_eq!(report["recipes"][0]["domains"][0]["kl"], 0.0);
}

#[test]
fn demo_is_a_model_everywhere() {
    let dir = TempDir::new().unwrap();
    let (at, sample) = (dir.path(), "There was a little girl. She had a red ball and a big dog.\n");
    fs::write(at.join("sample.txt"), sample.repeat(8)).unwrap();
    let inspected = json_in(at, &["inspect", "demo", "--json"]);
    assert_eq!((&inspected["model"], &inspected["convention"]), (&"demo".into(), &"dense".into()));
    assert!(inspected["bytes"].as_u64().unwrap() <= 3_000_000, "{inspected:#}");
    let quantized = json_in(at, &["quantize", "demo", "--recipe", "nvfp4", "--out", "small", "--json"]);
    // A model made from the embedded one needs no --reference for the texts; their prompts can be chosen.
    let prompt = ["-p", "The <dog> was", "--new-tokens", "5"];
    let made = json_in(at, &[&["report", "small", "--json"][..], &prompt].concat());
    assert_eq!(made["kind"], "artifact");
    let page = fs::read_to_string(at.join("small.report.html")).unwrap();
    for part in
        ["5 tokens, greedy", "The &lt;dog&gt; was</span>", "mantissa run small --chat -p", "class=\"heat\""]
    {
        assert!(page.contains(part), "{part}");
    }
    assert_eq!(quantized["verification"]["ok"], true);
    let verified = json_in(at, &["verify", "small", "--reference", "demo", "--json"]);
    assert!(verified["compared"].as_u64().unwrap() > 0, "{verified:#}");
    let arguments =
        ["eval", "small", "--reference", "demo", "--text", "sample.txt", "--context", "64", "--json"];
    let figures = json_in(at, &arguments);
    assert_eq!(figures["reference"], "demo");
    assert!(figures["kl"].as_f64().unwrap() > 0.0, "{figures:#}");
    let story = json_in(at, &["run", "demo", "-p", "Once upon a time", "-n", "60", "--json"]);
    let story = story["text"].as_str().unwrap();
    let words: std::collections::BTreeSet<_> = story.split_whitespace().collect();
    assert!(words.len() >= 20 && story.contains('.'), "no story: {story}");
}

#[test]
fn an_existing_model_named_demo_takes_precedence() {
    let dir = TempDir::new().unwrap();
    let tiny = root().join("tests/data/tiny/llama2-gqa-tied");
    fs::create_dir(dir.path().join("demo")).unwrap();
    for file in fs::read_dir(tiny).unwrap() {
        let path = file.unwrap().path();
        fs::copy(&path, dir.path().join("demo").join(path.file_name().unwrap())).unwrap();
    }
    let inspected = json_in(dir.path(), &["inspect", "demo", "--json"]);
    assert_ne!(inspected["parameters"], 1_328_512);
}

#[test]
fn an_unwritable_folder_is_an_environment_error() {
    let dir = TempDir::new().unwrap();
    let missing = dir.path().join("missing");
    let output =
        command().current_dir(dir.path()).env("TMPDIR", &missing).args(["inspect", "demo"]).output().unwrap();
    assert_eq!(output.status.code(), Some(3), "{}", stderr(&output));
    assert!(stderr(&output).contains("TMPDIR") && stderr(&output).contains(text(&missing)));
}

#[test]
fn a_signal_leaves_nothing() {
    let dir = TempDir::new().unwrap();
    let mut child = command()
        .current_dir(dir.path())
        .env("TMPDIR", dir.path())
        .args(["demo", "--quiet"])
        .spawn()
        .unwrap();
    let begun = || fs::read_dir(dir.path()).unwrap().count() >= 2;
    for _ in 0..600 {
        if begun() || child.try_wait().unwrap().is_some() {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let pid = child.id().to_string();
    assert!(std::process::Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    assert_eq!(child.wait().unwrap().code(), Some(143));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

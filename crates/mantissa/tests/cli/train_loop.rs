//! The course of a training run: a new user's path, validation, samples, the best checkpoint, early stop, runs by time,
//! and data of any size.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;

use crate::support::{fail, json, root, succeed, text};

/// Writes the settings of the preset `small` for a text of the embedded model, cut to a smaller model and few steps.
fn small(dir: &Path, more: &[&str]) -> PathBuf {
    let stories = fs::read_to_string(root().join("crates/mantissa-jobs/demo/text/stories.txt")).unwrap();
    fs::write(dir.join("my.txt"), stories.chars().take(12_000).collect::<String>()).unwrap();
    let arguments = [&["train", "--init", "small", "--data", "my.txt"], more].concat();
    let path = dir.join("run.toml");
    let cut = [
        ("hidden_size = 128", "hidden_size = 32"),
        ("intermediate_size = 384", "intermediate_size = 64"),
        ("num_hidden_layers = 4", "num_hidden_layers = 2"),
        ("vocab_size = 1024", "vocab_size = 300"),
        ("length = 128", "length = 32"),
        ("batch = 8 ", "batch = 2 "),
        ("steps = 1000", "steps = 12"),
        ("warmup = 50", "warmup = 2"),
        ("every = 100", "every = 4"),
        ("tokens = 24", "tokens = 6"),
    ];
    let mut settings = succeed(&arguments);
    for (from, to) in cut {
        assert!(settings.contains(from) || !more.is_empty(), "{from}: {settings}");
        settings = settings.replace(from, to);
    }
    fs::write(&path, settings).unwrap();
    path
}

/// Lines of a log of the run; none if the run has no such log.
fn log(dir: &Path, file: &str) -> Vec<Value> {
    let log = fs::read_to_string(dir.join("runs/small").join(file)).unwrap_or_default();
    log.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Losses, validation losses and samples of a run, and its weights.
fn result(dir: &Path) -> (Vec<(Value, Value)>, Vec<Value>, Vec<u8>) {
    let losses =
        log(dir, "log.jsonl").into_iter().map(|line| (line["loss"].clone(), line["validation_loss"].clone()));
    let weights = fs::read(dir.join("runs/small/model/model.safetensors")).unwrap();
    (losses.collect(), log(dir, "samples.jsonl"), weights)
}

/// Text, settings, model, answer: three commands.
#[test]
fn a_text_becomes_a_model_that_answers() {
    let temp = TempDir::new().unwrap();
    let config = small(temp.path(), &[]);
    let done = json(&["train", text(&config), "--json", "--quiet"]);
    let run = temp.path().join("runs/small");
    let model = run.join("model");
    let answer =
        json(&["run", text(&model), "--chat", "-p", "Once upon a time", "-n", "4", "--json", "--quiet"]);
    assert!(answer["rendered"].as_str().unwrap().ends_with("Once upon a time"), "{answer}");
    assert!(answer["tokens"].as_array().is_some_and(|tokens| !tokens.is_empty()), "{answer}");
    // The tokenizer is the run's own, and the model has its vocabulary.
    let config: Value = serde_json::from_slice(&fs::read(model.join("config.json")).unwrap()).unwrap();
    let own = fs::read(run.join("tokenizer/tokenizer.json")).unwrap();
    assert_eq!(fs::read(model.join("tokenizer.json")).unwrap(), own);
    let own: Value = serde_json::from_slice(&own).unwrap();
    assert_eq!(config["vocab_size"], own["model"]["vocab"].as_object().unwrap().len());
    assert_eq!((&config["bos_token_id"], &config["eos_token_id"]), (&0.into(), &1.into()));
    // Held-out text was measured at steps 4, 8 and 12, prompts were continued, and the best checkpoint is exported.
    let (losses, samples, _) = result(temp.path());
    let measured: Vec<f64> = losses.iter().filter_map(|(_, loss)| loss.as_f64()).collect();
    assert_eq!((losses.len(), measured.len(), samples.len()), (12, 3, 3));
    let best = measured.iter().copied().fold(f64::INFINITY, f64::min);
    assert_eq!(done["validation_loss"], best);
    assert_eq!(losses[done["exported_step"].as_u64().unwrap() as usize - 1].1, best);
    assert!(measured[2] < measured[0] && measured[0] < 6.0, "{measured:?}");
    assert_eq!(samples[0]["prompt"], "The");
    let page = succeed(&["report", text(&run), "--quiet"]);
    assert!(page.contains("report.html"), "{page}");
}

/// Validation and samples change nothing in a run, and a run killed at any time has the same ones.
#[test]
fn a_run_with_validation_and_samples_resumes_bit_exactly() {
    let whole = TempDir::new().unwrap();
    let config = small(whole.path(), &[]);
    succeed(&["train", text(&config), "--threads", "1", "--quiet"]);
    let expected = result(whole.path());
    let plain = TempDir::new().unwrap();
    let config = small(plain.path(), &[]);
    let none = ["--set", "samples.prompts=[]", "--set", "validation.every=1000"];
    succeed(&[&["train", text(&config), "--quiet"], &none[..]].concat());
    let losses = |result: &(Vec<(Value, Value)>, Vec<Value>, Vec<u8>)| {
        result.0.iter().map(|line| line.0.clone()).collect::<Vec<_>>()
    };
    assert_eq!(losses(&result(plain.path())), losses(&expected));
    let temp = TempDir::new().unwrap();
    let config = small(temp.path(), &[]);
    let checkpoints = temp.path().join("runs/small/checkpoints");
    for trial in 0..12u64 {
        let begun = fs::read_dir(&checkpoints).is_ok_and(|mut files| {
            files.any(|file| file.unwrap().file_name().to_string_lossy().starts_with("step-"))
        });
        let mut child = Command::new(env!("CARGO_BIN_EXE_mantissa"))
            .args(["train", text(&config), "--quiet", if begun { "--resume" } else { "--restart" }])
            .stderr(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        sleep(Duration::from_millis(60 + 40 * trial));
        let ended = child.try_wait().unwrap().is_some();
        child.kill().unwrap();
        child.wait().unwrap();
        if ended {
            break;
        }
    }
    if !temp.path().join("runs/small/model").exists() {
        let begun = fs::read_dir(&checkpoints).is_ok_and(|files| files.count() > 0);
        succeed(&["train", text(&config), "--quiet", if begun { "--resume" } else { "--restart" }]);
    }
    assert!(result(temp.path()) == expected);
}

/// With a rate of 0 nothing becomes better: the run ends, and the model is that of the first measurement.
#[test]
fn a_run_without_progress_ends_and_exports_its_best() {
    let temp = TempDir::new().unwrap();
    let config = small(temp.path(), &[]);
    let still = ["--set", "optimizer.lr=0.0", "--set", "schedule.steps=1000", "--set", "validation.every=3"];
    let still = [&still[..], &["--set", "validation.patience=2", "--set", "checkpoint.every=100"]].concat();
    let done = json(&[&["train", text(&config), "--json", "--quiet"], &still[..]].concat());
    assert_eq!((&done["steps"], &done["exported_step"]), (&9.into(), &3.into()));
    let again = json(&[&["train", text(&config), "--json", "--quiet", "--resume"], &still[..]].concat());
    assert_eq!(
        (&again["steps"], &again["exported_step"], &again["loss"]),
        (&9.into(), &3.into(), &Value::Null)
    );
    // A best checkpoint that is lost is replaced by the last.
    fs::remove_file(temp.path().join("runs/small/checkpoints/step-0000000003.safetensors")).unwrap();
    let last = json(&[&["train", text(&config), "--json", "--quiet", "--resume"], &still[..]].concat());
    assert_eq!(last["exported_step"], 9);
}

/// A timed run plans its decay once; from any later checkpoint it goes on to the same bits.
#[test]
fn a_timed_run_decays_in_time_and_resumes_to_its_plan() {
    let temp = TempDir::new().unwrap();
    let config = small(temp.path(), &["--minutes", "0.03"]);
    let more =
        ["--set", "checkpoint.every=1000", "--set", "telemetry.every=0", "--set", "schedule.decay_share=0.5"];
    let done = json(&[&["train", text(&config), "--json", "--quiet"], &more[..]].concat());
    let lines = log(temp.path(), "log.jsonl");
    let (last, plan) = (lines.last().unwrap(), lines.iter().find(|line| line["last_step"].is_u64()).unwrap());
    assert_eq!(lines.iter().filter(|line| line["last_step"].is_u64()).count(), 1);
    assert!(plan["seconds"].as_f64().unwrap() >= 0.9 && last["seconds"].as_f64().unwrap() < 10.0, "{last}");
    assert_eq!(done["steps"], last["step"]);
    let rates = |lines: &[Value]| lines.iter().map(|line| line["lr"].as_f64().unwrap()).collect::<Vec<_>>();
    let (at, all) = (plan["step"].as_u64().unwrap() as usize, rates(&lines));
    assert_eq!(all[at - 1], 3e-3);
    assert!(all[at..].windows(2).all(|pair| pair[1] < pair[0]), "{all:?}");
    if last["step"] == plan["last_step"] {
        assert!((all[all.len() - 1] - 3e-4).abs() < 1e-9, "{all:?}");
    }
    let expected = lines.iter().map(|line| line["loss"].clone()).collect::<Vec<_>>();
    let folder = temp.path().join("runs/small");
    fs::remove_file(
        folder.join(format!("checkpoints/step-{:010}.safetensors", last["step"].as_u64().unwrap())),
    )
    .unwrap();
    json(&[&["train", text(&config), "--json", "--quiet", "--resume"], &more[..]].concat());
    let again = log(temp.path(), "log.jsonl");
    // By time, the second run may end some steps earlier or later than the first.
    let losses = again.iter().map(|line| line["loss"].clone()).collect::<Vec<_>>();
    let both = losses.len().min(expected.len());
    assert!(both > at && losses[..both] == expected[..both], "{losses:?} {expected:?}");
    assert_eq!(rates(&again)[..both], all[..both]);
}

#[test]
fn missing_and_unknown_keys_are_listed_together() {
    let temp = TempDir::new().unwrap();
    let config = temp.path().join("run.toml");
    fs::write(&config, "out = \"run\"\n[data]\nfile = [\"a.txt\"]\n[optimizer]\nrate = 1\n").unwrap();
    let line = fail(2, &["train", text(&config)]);
    for part in [
        "[data] `file`",
        "[optimizer] `rate`",
        "data.files = ",
        "data.length = 256",
        "optimizer.lr = 1e-3",
        "schedule.steps",
        "model.config",
        "--init small",
    ] {
        assert!(line.contains(part), "{part}: {line}");
    }
    let line = fail(2, &["train", "--init", "tiny"]);
    assert!(line.contains("small") && line.contains("60m"), "{line}");
    // Held-out text without a window is an error with a fix, before anything is written.
    let config = small(temp.path(), &[]);
    let line = fail(
        2,
        &[
            "train",
            text(&config),
            "--quiet",
            "--set",
            "validation.share=0",
            "--set",
            "validation.files=[\"s.txt\"]",
        ],
    );
    assert!(line.contains("s.txt"), "{line}");
    fs::write(temp.path().join("s.txt"), "short").unwrap();
    let line = fail(
        2,
        &[
            "train",
            text(&config),
            "--quiet",
            "--set",
            "validation.share=0",
            "--set",
            "validation.files=[\"s.txt\"]",
        ],
    );
    assert!(line.contains("validation: expected more than 32 held-out tokens"), "{line}");
    assert!(!temp.path().join("runs/small/config.toml").exists());
}

/// Tokens are written as they are made: three times the text takes the same memory.
#[test]
fn memory_does_not_grow_with_the_corpus() {
    let temp = TempDir::new().unwrap();
    let config = small(temp.path(), &[]);
    let tokenizer = format!("model.tokenizer={}", text(&root().join("tests/data/tiny/llama2-gqa-tied")));
    let line = |i: usize| format!("Line {} says that {} is before {}.\n", i, i % 10, (i + 1) % 10);
    let peak = |name: &str, lines: usize, more: &[&str]| {
        fs::write(temp.path().join(name), (0..lines).map(line).collect::<String>()).unwrap();
        let files = format!("data.files=[{name:?}]");
        let out = format!("out=runs/{name}");
        let mut arguments = vec!["train", text(&config), "--json", "--quiet", "--threads", "1"];
        for change in [
            &files,
            &out,
            &tokenizer,
            "schedule.steps=1",
            "schedule.warmup=0",
            "samples.prompts=[]",
            "validation.share=0",
        ] {
            arguments.extend(["--set", change]);
        }
        json(&[&arguments, more].concat())["measured_peak_memory"].as_f64()
    };
    let (Some(few), Some(many)) = (peak("few.txt", 32_000, &[]), peak("many.txt", 96_000, &[])) else {
        println!("skipped: the system does not say what memory a process has had");
        return;
    };
    let tokens = fs::metadata(temp.path().join("runs/many.txt/tokens.safetensors")).unwrap().len() as f64;
    println!("{few:.3e} and {many:.3e} bytes, {tokens:.3e} of tokens");
    assert!(tokens > 4e6, "{tokens}");
    assert!(many - few < 0.25 * tokens, "{few} {many} {tokens}");
    // No temporary file is left, and the tokens are data for another run.
    let left = fs::read_dir(temp.path().join("runs"))
        .unwrap()
        .filter(|file| file.as_ref().unwrap().file_name().to_string_lossy().contains("mantissa-"));
    assert_eq!(left.count(), 0);
    let files = "data.files=[\"runs/few.txt/tokens.safetensors\"]";
    assert!(peak("other.txt", 1, &["--set", files, "--set", "out=runs/other"]).is_some());
    let line = fail(2, &["train", text(&config), "--set", files, "--set", "out=runs/none"]);
    assert!(line.contains("model.tokenizer: expected the folder of the tokenizer"), "{line}");
}

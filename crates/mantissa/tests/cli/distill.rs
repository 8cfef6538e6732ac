//! `mantissa distill`: a student comes nearer to its teacher than by fine-tuning, resumes bit-exactly, and is refused
//! where the teacher predicts other tokens.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;
use tempfile::TempDir;

use crate::main_job::tiny;
use crate::stops::stopped_at_any_time;
use crate::support::{fail, json, root, succeed, text};

/// Stories to train on, and others to measure on.
fn stories(dir: &Path) -> [PathBuf; 2] {
    let all = fs::read_to_string(root().join("crates/mantissa-jobs/demo/text/stories.txt")).unwrap();
    let (middle, held_out) = (all.len() / 2, all.len() / 2 + 6000);
    let cut = |at: usize| (at..).find(|&at| all.is_char_boundary(at)).unwrap();
    let paths = ["train.txt", "held-out.txt"].map(|name| dir.join(name));
    fs::write(&paths[0], &all[..cut(middle)]).unwrap();
    fs::write(&paths[1], &all[cut(middle)..cut(held_out.min(all.len()))]).unwrap();
    paths
}

const SMALL: [&str; 13] = [
    "--length",
    "64",
    "--batch",
    "4",
    "--steps",
    "24",
    "--lr",
    "1e-3",
    "--policy",
    "fp32",
    "--validation",
    "0",
    "--quiet",
];

fn kl(model: &Path, held_out: &Path) -> f64 {
    let windows = ["--text", text(held_out), "--context", "64", "--json", "--quiet"];
    json(&[&["eval", text(model), "--reference", "demo"][..], &windows].concat())["kl"].as_f64().unwrap()
}

/// Quantization-aware: the student is the teacher in two bits.
#[test]
fn a_distilled_student_is_nearer_to_its_teacher_than_a_fine_tuned_one() {
    let temp = TempDir::new().unwrap();
    let [data, held_out] = stories(temp.path());
    let path = |name: &str| temp.path().join(name);
    let quantized = |source: &Path, name: &str| {
        let out = path(name);
        let recipe = ["--recipe", "rtn-int2-g32", "--format", "native", "--quiet", "--out", text(&out)];
        succeed(&[&["quantize", text(source)][..], &recipe].concat());
        kl(&out, &held_out)
    };
    let before = quantized(Path::new("demo"), "before");
    let (qad, tuned) = (path("qad"), path("tuned"));
    let files = |out| ["--data", text(&data), "--out", text(out)];
    let args = ["distill", "demo", "demo", "--scheme", "int2-g32"];
    let planned = json(&[&args[..], &files(&qad), &SMALL, &["--dry-run", "--json"]].concat());
    assert!(planned["memory"]["teacher"].as_u64().unwrap() > 1_000_000 && !qad.exists(), "{planned}");
    let said = succeed(&[&args[..], &files(&qad), &SMALL].concat());
    // What is written is not rounded yet: the command that rounds it follows.
    let next = format!(
        "quantize    mantissa quantize {} --recipe rtn-int2-g32 --format native",
        text(&qad.join("model"))
    );
    assert!(said.contains(&next) && said.contains("(mostly f32, "), "{said}");
    let rounded = [
        "--set",
        "precision.fprop.w=\"int2-g32\"",
        "--set",
        "precision.dgrad.w={ scheme = \"f32\", source = \"forward\" }",
    ];
    succeed(&[&["finetune", "demo", "--adapter", "none"][..], &rounded, &files(&tuned), &SMALL].concat());
    let (distilled, fine_tuned) = (quantized(&qad, "q-qad"), quantized(&tuned, "q-tuned"));
    println!("KL before {before}, fine-tuned {fine_tuned}, distilled {distilled}");
    assert!(distilled < before && distilled < fine_tuned, "{before} {fine_tuned} {distilled}");
    // A teacher that does not count: the run is that of fine-tuning, up to rounding.
    let none = path("none");
    succeed(&[&args[..], &files(&none), &SMALL, &["--weight", "0"]].concat());
    let losses = |run: &Path| -> Vec<f64> {
        let log = fs::read_to_string(run.join("log.jsonl")).unwrap();
        log.lines()
            .map(|line| serde_json::from_str::<Value>(line).unwrap()["loss"].as_f64().unwrap())
            .collect()
    };
    for (step, (a, b)) in losses(&none).iter().zip(losses(&tuned)).enumerate() {
        assert!((a - b).abs() < 1e-2 * b, "step {step}: {a} {b}");
    }
}

/// An adapter over a quantized student, with both terms of the loss, stopped by SIGKILL and SIGTERM in turn.
#[test]
fn a_stopped_run_resumes_bit_exactly() {
    let temp = TempDir::new().unwrap();
    let [data, _] = stories(temp.path());
    let (student, whole, out) =
        (temp.path().join("int3"), temp.path().join("whole"), temp.path().join("killed"));
    succeed(&[
        "quantize",
        "demo",
        "--recipe",
        "rtn-int3-g32",
        "--out",
        text(&student),
        "--format",
        "native",
        "--quiet",
    ]);
    let soft = ["--adapter", "lora", "--weight", "0.5", "--temperature", "2", "--set", "checkpoint.every=4"];
    let of = |out, more: &[&str]| -> Vec<String> {
        let first = ["distill", "demo", text(&student), "--data", text(&data), "--out", text(out)];
        [&first[..], &soft, &SMALL, more].concat().into_iter().map(str::to_owned).collect()
    };
    succeed(&of(&whole, &["--threads", "1"]));
    let line = of(&out, &[]);
    let line: Vec<_> = line.iter().map(String::as_str).collect();
    let kills = stopped_at_any_time(&out, &line, |trial| 150 + 200 * trial);
    println!("{kills} kills");
    let result = |run: &Path| {
        let read = |name: &str| fs::read(run.join(name)).unwrap();
        let log = String::from_utf8(read("log.jsonl")).unwrap();
        let loss = |line: &str| serde_json::from_str::<Value>(line).unwrap()["loss"].clone();
        (log.lines().map(loss).collect::<Vec<_>>(), read("adapter/adapter_model.safetensors"))
    };
    assert!(result(&out) == result(&whole), "after {kills} kills");
    // Another temperature is another run.
    let mut other = of(&out, &["--resume"]);
    let at = other.iter().position(|word| word == "--temperature").unwrap() + 1;
    other[at] = "3".to_owned();
    assert!(fail(2, &other).contains("temperature"));
}

#[test]
fn a_teacher_of_other_tokens_is_refused_before_work() {
    let temp = TempDir::new().unwrap();
    let [data, _] = stories(temp.path());
    let out = temp.path().join("out");
    let refused = |teacher: &str, student: &str, more: &[&str], part: &str| {
        let first = ["distill", teacher, student, "--data", text(&data), "--out", text(&out)];
        let error = fail(
            2,
            &[&first[..], &["--length", "16", "--batch", "1", "--steps", "1", "--quiet"], more].concat(),
        );
        assert!(error.contains(part) && !out.exists(), "{error}");
    };
    let model = tiny("llama2-gqa-tied");
    refused(text(&model), "demo", &["--policy", "fp32"], "teacher ");
    refused(text(&model), "demo", &["--policy", "fp32"], "a vocabulary of");
    // The same vocabulary size with two tokens exchanged.
    let other = temp.path().join("other");
    fs::create_dir(&other).unwrap();
    for entry in fs::read_dir(&model).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, other.join(path.file_name().unwrap())).unwrap();
    }
    let place = other.join("tokenizer.json");
    let mut tokenizer: Value = serde_json::from_str(&fs::read_to_string(&place).unwrap()).unwrap();
    let vocab = tokenizer["model"]["vocab"].as_object_mut().unwrap();
    let last: Vec<String> = vocab.keys().rev().take(2).cloned().collect();
    let ids = [vocab[&last[0]].clone(), vocab[&last[1]].clone()];
    vocab.insert(last[0].clone(), ids[1].clone());
    vocab.insert(last[1].clone(), ids[0].clone());
    fs::write(&place, tokenizer.to_string()).unwrap();
    refused(text(&other), text(&model), &[], "the tokenizer of the student, where it is");
    refused("demo", "demo", &["--weight", "1.5"], "distill.weight: expected 0 to 1");
    refused("demo", "demo", &["--temperature", "0"], "distill.temperature: expected 0.05 to 100");
    refused(
        "demo",
        "demo",
        &["--scheme", "int4-g32", "--adapter", "lora"],
        "--scheme: expected --adapter none",
    );
    refused("demo", "demo", &["--merge"], "--merge: expected an adapter");
}

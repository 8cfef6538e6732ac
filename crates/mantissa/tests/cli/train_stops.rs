//! A signal at any point of `train`, `finetune` and `distill`, in a step or in validation, sampling, export and
//! publication, leaves a checkpoint of the last finished step, and the same command resumes to the same bytes.
//!
//! `STOPS=60 cargo test --profile ci -p mantissa --test cli at_random -- --nocapture` stops 60 runs at random.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Output};
use std::thread::sleep;
use std::time::{Duration, Instant};

use mantissa_num::round::random_u32;
use tempfile::TempDir;

use crate::stops::{checkpoints, is_done, is_resumable, log, result, signal, start, undisturbed};
use crate::support::{command, json, left_to_nightly, root, sampled, stderr, succeed, text, whole};

/// Commands that train.
const COMMANDS: [&str; 3] = ["train", "finetune", "distill"];

/// Writes the data of the runs.
fn data(dir: &Path) -> PathBuf {
    let stories = fs::read_to_string(root().join("crates/mantissa-jobs/demo/text/stories.txt")).unwrap();
    let path = dir.join("my.txt");
    fs::write(&path, stories.chars().take(6_000).collect::<String>()).unwrap();
    path
}

/// Returns the command that runs `steps` steps in the folder `out` with the settings `more`, and exports their results.
fn run(name: &str, dir: &Path, out: &str, steps: &str, more: &[&str]) -> (PathBuf, Vec<String>) {
    let (data, run) = (data(dir), dir.join(out));
    let common =
        ["--length", "32", "--batch", "2", "--steps", steps, "--data", text(&data), "--out", text(&run)];
    let mut arguments: Vec<String> = match name {
        "train" => {
            let preset = succeed(&["train", "--init", "small", "--data", text(&data)]);
            let preset = preset.replace("hidden_size = 128", "hidden_size = 32");
            let preset = preset.replace("num_hidden_layers = 4", "num_hidden_layers = 2");
            let config = dir.join("run.toml");
            fs::write(&config, preset).unwrap();
            let set = [
                format!("out={out:?}"),
                format!("schedule.steps={steps}"),
                "schedule.warmup=1".to_owned(),
                "data.length=32".to_owned(),
                "data.batch=2".to_owned(),
                // Its histories must not change by a validation that is stopped.
                "precision.policy=\"fp8-delayed\"".to_owned(),
                "samples.prompts=[]".to_owned(),
            ];
            let set = set.into_iter().flat_map(|change| ["--set".to_owned(), change]);
            ["train".to_owned(), text(&config).to_owned()].into_iter().chain(set).collect()
        }
        "finetune" => {
            let own = [
                "finetune",
                "demo",
                "--rank",
                "4",
                "--dropout",
                "0.1",
                "--merge",
                "--requantize",
                "int4-g32",
            ];
            [&own[..], &common].concat().into_iter().map(str::to_owned).collect()
        }
        _ => {
            let own = ["distill", "demo", "demo", "--scheme", "int4-g32", "--policy", "fp32"];
            [&own[..], &common].concat().into_iter().map(str::to_owned).collect()
        }
    };
    arguments.extend(["--quiet".to_owned(), "--set".to_owned(), "telemetry.every=1".to_owned()]);
    arguments.extend(more.iter().flat_map(|change| ["--set".to_owned(), (*change).to_owned()]));
    (run, arguments)
}

fn words(arguments: &[String]) -> Vec<&str> {
    arguments.iter().map(String::as_str).collect()
}

/// Waits until `condition` holds; fails if the process ends before.
fn wait(child: &mut Child, condition: impl Fn() -> bool) {
    let begin = Instant::now();
    while !condition() {
        let ended = child.try_wait().unwrap();
        assert!(ended.is_none() && begin.elapsed() < Duration::from_secs(120), "{ended:?}");
        sleep(Duration::from_millis(1));
    }
}

/// Stops the run while its second step is measured, twice, and checks checkpoint, message and the resumed run.
fn stopped_while_measured(name: &str, more: &[&str]) {
    let temp = TempDir::new().unwrap();
    let (whole, arguments) = run(name, temp.path(), "whole", "3", more);
    let expected = undisturbed(&whole, &words(&arguments));
    let (out, arguments) = run(name, temp.path(), "stopped", "3", more);
    // The telemetry of a step is written before the step is measured, and its line of the log after it.
    for sent in ["TERM", "INT"] {
        let changed = || fs::metadata(out.join("run.json")).and_then(|file| file.modified()).ok();
        let before = changed();
        let mut child = start(&words(&arguments));
        // A run writes its description before its first step, and a resumed one has the telemetry already.
        wait(&mut child, || changed() != before && log(&out, "telemetry.jsonl").len() == 2);
        sleep(Duration::from_millis(20));
        signal(&child, sent);
        let output = child.wait_with_output().unwrap();
        assert!(is_resumable(&output, &out, name), "{name}: ended before it could be stopped");
        assert_eq!(output.status.code(), Some(if sent == "INT" { 130 } else { 143 }));
        assert_eq!(checkpoints(&out).last(), Some(&2), "{name}");
        assert_eq!(log(&out, "log.jsonl")[1]["pending"], true, "{name}");
    }
    succeed(&words(&arguments));
    assert!(result(&out) == expected, "{name}");
    // The same command starts no second run.
    let again = json(&[&words(&arguments)[..], &["--json"]].concat());
    assert_eq!(again["already_complete"], true, "{name}: {again}");
    assert!(result(&out) == expected, "{name}");
}

#[test]
fn a_signal_in_validation_leaves_a_checkpoint_of_the_step() {
    // What is fine-tuned is stopped at random moments below.
    for name in sampled(COMMANDS, 2) {
        let files = format!(
            "validation.files=[{:?}]",
            text(&root().join("crates/mantissa-jobs/demo/text/prose.txt"))
        );
        let long = ["validation.share=0.0", &files, "validation.every=2", "validation.batches=4000"];
        stopped_while_measured(name, &long);
    }
}

#[test]
fn a_signal_in_sampling_leaves_a_checkpoint_of_the_step() {
    if left_to_nightly() {
        return;
    }
    for name in COMMANDS {
        let prompts = ["samples.prompts=[\"The\", \"Once upon\"]", "samples.every=2", "samples.tokens=900"];
        let more = [&prompts[..], &["samples.temperature=1.0", "validation.share=0.0"]].concat();
        stopped_while_measured(name, &more);
    }
}

/// A signal while files are written: the process is stopped before a change of its files, gets the signal, and goes on.
fn signalled_at(arguments: &[&str], change: usize, name: &str) -> Output {
    let fault = format!("stop:{change}");
    let mut command = command();
    command.args(arguments).env("MANTISSA_FAULT", fault).stdout(std::process::Stdio::null());
    let mut child = command.stderr(std::process::Stdio::piped()).spawn().unwrap();
    let state = |id: u32| {
        let state = fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
        state.rsplit(") ").next().unwrap_or_default().starts_with('T')
    };
    while child.try_wait().unwrap().is_none() && !state(child.id()) {
        sleep(Duration::from_millis(1));
    }
    signal(&child, name);
    signal(&child, "CONT");
    child.wait_with_output().unwrap()
}

/// Number of stopped runs: the variable `STOPS`, or six; three in a sample.
fn rounds() -> u32 {
    std::env::var("STOPS").ok().and_then(|count| count.parse().ok()).unwrap_or(if whole() { 6 } else { 3 })
}

/// Runs that are stopped one to three times, at a random moment or before a random change of their files, by one signal or
/// by two.
#[test]
fn runs_stopped_at_random_end_alike() {
    let temp = TempDir::new().unwrap();
    let more = [
        "validation.share=0.2",
        "validation.every=2",
        "validation.batches=6",
        "samples.prompts=[\"The\"]",
        "samples.every=3",
        "samples.tokens=12",
        "checkpoint.every=4",
        "checkpoint.keep=1",
    ];
    let mut commands = Vec::new();
    for name in COMMANDS {
        let (whole, arguments) = run(name, temp.path(), &format!("{name}-whole"), "8", &more);
        let begin = Instant::now();
        let expected = undisturbed(&whole, &words(&arguments));
        let took = begin.elapsed();
        let (traced, arguments) = run(name, temp.path(), &format!("{name}-traced"), "8", &more);
        let trace = temp.path().join(format!("{name}.trace"));
        let output = command().args(&arguments).env("MANTISSA_TRACE", &trace).output().unwrap();
        assert!(output.status.success() && result(&traced) == expected, "{}", stderr(&output));
        let changes = fs::read_to_string(&trace).unwrap().lines().count();
        commands.push((name, expected, took, changes));
    }
    let (mut stops, mut phases) = (0, std::collections::BTreeMap::<_, u32>::new());
    for round in 0..rounds() {
        let (name, expected, took, changes) = &commands[round as usize % commands.len()];
        let (out, arguments) = run(name, temp.path(), &format!("{name}-{round}"), "8", &more);
        let random = |at: u32| f64::from(random_u32(71, u64::from(8 * round + at))) / 2f64.powi(32);
        for again in 0..=(3.0 * random(0)) as u32 % 3 {
            let sent = if random(1 + again) < 0.5 { "INT" } else { "TERM" };
            let context = format!("{name}, round {round}, stop {again}");
            let twice = round % 10 == 9;
            let output = if round % 2 == 0 {
                let child = start(&words(&arguments));
                sleep(took.mul_f64(random(4 + again)));
                signal(&child, sent);
                if twice {
                    signal(&child, sent);
                }
                child.wait_with_output().unwrap()
            } else {
                signalled_at(&words(&arguments), (*changes as f64 * random(4 + again)) as usize, sent)
            };
            let code = output.status.code();
            if twice && matches!(code, Some(130 | 143)) {
                stops += u32::from(!is_done(&out));
                if is_done(&out) {
                    break;
                }
            } else if is_resumable(&output, &out, &context) {
                stops += 1;
                let last = log(&out, "log.jsonl").pop();
                let phase = match &last {
                    None => "before the first step",
                    Some(line) if line["pending"] == true => "validation or sampling",
                    Some(line) if line["step"] == 8 => "export",
                    Some(_) => "steps",
                };
                *phases.entry(phase).or_default() += 1;
            } else {
                break;
            }
        }
        if !is_done(&out) {
            json(&[&words(&arguments)[..], &["--json"]].concat());
        }
        let found = result(&out);
        for (found, expected) in [(&found.0, &expected.0), (&found.1, &expected.1)] {
            assert_eq!(found, expected, "{name}, round {round}");
        }
        assert!(found.2 == expected.2, "{name}, round {round}: other weights");
        fs::remove_dir_all(&out).unwrap();
    }
    println!("{stops} stops in {} rounds: {phases:?}", rounds());
    assert!(stops >= rounds() / 2, "{stops}");
}

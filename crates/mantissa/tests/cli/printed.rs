//! Commands that `plan` and `explain` print run as printed. Those of `diagnose` run beside its findings (`diagnose.rs`).

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;

use crate::support::{json, root, sampled, succeed, text, whole};

/// Hardware of each kind, with an engine or none.
const PLANS: [&str; 12] = [
    "--hardware h100",
    "--hardware h100 --batch 256",
    "--hardware h100 --for vllm",
    "--hardware h100 --for tensorrt-llm --bits 8",
    "--hardware h100 --for exllamav2 --bits 5",
    "--hardware a100 --for sglang --bits 4",
    "--hardware a100 --for lmdeploy --bits 4",
    "--hardware rtx4090 --for llama.cpp --bits 3",
    "--hardware b200 --for vllm --bits 4",
    "--hardware mi355x",
    "--hardware m4-max",
    "--hardware this --for mantissa --bits 2",
];

/// Folder with the files that printed commands name.
struct Place(TempDir);

impl Place {
    /// Makes the folder: a text, conversations, a quantized model, a file of weights, a training run.
    fn new() -> Self {
        let place = Place(TempDir::new().unwrap());
        let stories = fs::read_to_string(root().join("crates/mantissa-jobs/demo/text/stories.txt")).unwrap();
        let short: String = stories.chars().take(6000).collect();
        for name in ["text.txt", "sample.txt", "calib.txt"] {
            fs::write(place.path().join(name), &short).unwrap();
        }
        let line = |i: usize| format!("{{\"text\": \"{i}: Once upon a time there was a dog.\"}}\n");
        for name in ["data.jsonl", "FILE.jsonl"] {
            fs::write(place.path().join(name), (0..8).map(line).collect::<String>()).unwrap();
        }
        succeed(&["quantize", "demo", "--recipe", "w4a16", "--quiet", "--out", &place.named("quantized")]);
        let weights = place.path().join("quantized/model.safetensors");
        fs::copy(weights, place.path().join("weights.safetensors")).unwrap();
        let steps = "--set schedule.steps=2 --set schedule.warmup=1 --set data.batch=2 --set data.length=32";
        let settings = "mantissa train --init small --data text.txt > first.toml";
        place.run_all([
            settings.to_owned(),
            format!("mantissa train first.toml --quiet --set 'out=\"runs/first\"' {steps}"),
        ]);
        place
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn named(&self, name: &str) -> String {
        text(&self.path().join(name)).to_owned()
    }

    /// Runs a line in a shell, with the binary as `mantissa`.
    fn run(&self, line: &str) -> Output {
        let binary = PathBuf::from(env!("CARGO_BIN_EXE_mantissa"));
        let folder = binary.parent().unwrap();
        let path = format!("{}:{}", folder.display(), std::env::var("PATH").unwrap_or_default());
        let mut shell = Command::new("sh");
        shell.args(["-c", line]).current_dir(self.path()).env("PATH", path);
        shell.stdin(std::process::Stdio::null()).output().unwrap()
    }

    /// Runs lines, each of which must do its work: a check may find something.
    fn run_all(&self, lines: impl IntoIterator<Item = String>) {
        let mut failed = Vec::new();
        for line in lines {
            let output = self.run(&line);
            let checks = ["mantissa lint ", "mantissa doctor ", "mantissa verify "];
            let found = checks.iter().any(|check| line.starts_with(check)) && output.status.code() == Some(1);
            if !output.status.success() && !found {
                failed.push(format!("{line}\n    {}", String::from_utf8_lossy(&output.stderr)));
            }
        }
        assert!(failed.is_empty(), "{}", failed.join("\n"));
    }
}

/// Returns the commands after the label `label` of a text whose lines may be wrapped.
fn labelled(shown: &str, label: &str) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    let mut open = false;
    for line in shown.lines() {
        if let Some(rest) = line.strip_prefix(&format!("{label:<12}")) {
            found.push(rest.trim().to_owned());
            open = true;
        } else if open && line.starts_with("            ") {
            let last = found.last_mut().unwrap();
            *last = format!("{last} {}", line.trim());
        } else {
            open = false;
        }
    }
    found
}

/// Every recipe that a plan recommends can be made in its format; what it measures is measured.
#[test]
fn commands_of_plan_run() {
    let place = Place::new();
    let mut commands = BTreeSet::new();
    for plan in PLANS {
        let arguments: Vec<&str> = ["plan", "demo"].into_iter().chain(plan.split(' ')).collect();
        let shown = succeed(&arguments);
        let made = labelled(&shown, "make");
        // BF16 needs nothing made.
        let dense = json(&[&arguments[..], &["--json"]].concat());
        let expected = usize::from(!dense["recommendation"]["recipe"].is_null());
        assert_eq!(made.len(), expected, "{plan}: {shown}");
        commands.extend(made);
        commands.extend(labelled(&shown, "measure"));
    }
    for train in ["", "lora", "qlora"] {
        let arguments: Vec<&str> = ["plan", "demo", "--hardware", "h100", "--train"]
            .into_iter()
            .chain(train.split_whitespace())
            .collect();
        let shown = succeed(&arguments);
        commands.extend(labelled(&shown, "measure"));
        let policy = shown.split("mantissa train --show-policy ").nth(1);
        let policy = policy.and_then(|rest| rest.split_whitespace().next());
        commands.extend(policy.map(|policy| format!("mantissa train --show-policy {policy}")));
    }
    assert!(commands.len() >= 8, "{commands:?}");
    // The second of two plans may name the recipe of the first. What calibrates takes minutes: plans of it are enough outside of
    // .ci/nightly.
    let again = |line: String| match (line.contains(" quantize "), line.contains(" --calibration ")) {
        (true, true) if !whole() => format!("{line} --dry-run --quiet"),
        (true, _) => format!("{line} --overwrite --quiet"),
        (false, _) => line,
    };
    place.run_all(commands.into_iter().map(again));
}

#[test]
fn commands_of_explain_run() {
    let place = Place::new();
    let listed = json(&["explain", "--json"]);
    let mut commands = BTreeSet::new();
    for topic in listed["topics"].as_array().unwrap() {
        let name = topic["topic"].as_str().unwrap();
        let answer = json(&["explain", name, "demo", "--hardware", "rtx4090", "--json"]);
        commands.insert(answer["measure"].as_str().unwrap().to_owned());
    }
    commands.insert(measured(&succeed(&["explain", "0.1"])));
    commands.insert(measured(&succeed(&["explain", "0.1", "--as", "nvfp4"])));
    assert!(commands.len() >= 25, "{commands:?}");
    place.run_all(sampled(commands, 7));
}

/// Command after `measure it:`, whose line may be wrapped.
fn measured(shown: &str) -> String {
    let (_, rest) = shown.split_once("measure it: ").unwrap();
    rest.split("\n\n").next().unwrap().split_whitespace().collect::<Vec<_>>().join(" ")
}

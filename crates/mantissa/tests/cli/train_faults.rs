//! Training runs that are killed, fail, are damaged or meet foreign files: inputs and foreign files stay, and
//! the model equals that of an undisturbed run, or the run is refused.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Output, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{scope, sleep};
use std::time::Duration;

use mantissa_num::round::random_u32;
use serde_json::json;
use tempfile::TempDir;

use crate::support::{command, root, sampled, stderr, text};

/// Number of concurrent processes.
const WORKERS: usize = 4;

/// Run of four steps and a few thousand weights, in a folder with its inputs.
struct Job {
    temp: TempDir,
}

impl Job {
    fn new() -> Self {
        let temp = TempDir::new().unwrap();
        let job = Job { temp };
        let tokenizer = root().join("tests/data/tiny/llama2-gqa-tied");
        let model: serde_json::Value =
            serde_json::from_slice(&fs::read(tokenizer.join("config.json")).unwrap()).unwrap();
        let config = json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16, "intermediate_size": 16,
            "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_act": "silu",
            "vocab_size": model["vocab_size"], "max_position_embeddings": 16, "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0, "tie_word_embeddings": true, "eos_token_id": 2,
        });
        fs::write(job.at("config.json"), config.to_string()).unwrap();
        let line = |i: usize| format!("Line {i} is before {}.\n", i + 1);
        fs::write(job.at("text.txt"), (0..60).map(line).collect::<String>()).unwrap();
        let toml = format!(
            "seed = 3\nout = \"run\"\n[model]\nconfig = \"config.json\"\ntokenizer = \"{}\"\n[data]\nfiles = [\"text.txt\"]\n\
             length = 8\nbatch = 2\n[precision]\npolicy = \"fp32\"\n[optimizer]\nlr = 5e-3\nmoments = \"f32\"\n\
             [schedule]\nsteps = 4\n[checkpoint]\nevery = 2\n[telemetry]\nevery = 2\n",
            text(&tokenizer)
        );
        fs::write(job.at("run.toml"), toml).unwrap();
        job
    }

    fn at(&self, name: &str) -> PathBuf {
        self.temp.path().join(name)
    }

    /// Returns the command that trains into the folder `out`.
    fn command(&self, out: &str, more: &[&str]) -> std::process::Command {
        let mut command = command();
        command.arg("train").arg(self.at("run.toml")).args([
            "--set",
            &format!("out=\"{out}\""),
            "--threads",
            "1",
        ]);
        command.args(more);
        command
    }

    fn train(&self, out: &str, more: &[&str]) -> Output {
        self.command(out, more).output().unwrap()
    }

    fn succeed(&self, out: &str, more: &[&str]) -> String {
        let output = self.train(out, more);
        assert!(output.status.success(), "{out} {more:?}: {}", stderr(&output));
        stderr(&output)
    }

    /// Runs the command, which must be refused with this code; returns its line.
    fn refused(&self, code: i32, out: &str, more: &[&str]) -> String {
        let output = self.train(out, more);
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(code), "{out} {more:?}: {said}");
        // The text may not fill its windows, which is told before the fault is found.
        let (warnings, errors): (Vec<&str>, Vec<&str>) =
            said.lines().partition(|line| line.starts_with("warning: data.files: "));
        assert!(warnings.len() <= 1 && errors.len() == 1 && errors[0].starts_with("error: "), "{said}");
        errors[0].to_owned()
    }

    fn fault(&self, out: &str, more: &[&str], fault: &str) -> Output {
        self.command(out, more).env("MANTISSA_FAULT", fault).output().unwrap()
    }

    /// Runs the command to its end; returns its changes, one per line.
    fn trace(&self, out: &str, more: &[&str]) -> Vec<String> {
        let temp = TempDir::new().unwrap();
        let trace = temp.path().join("trace");
        let output = self.command(out, more).env("MANTISSA_TRACE", &trace).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        fs::read_to_string(trace).unwrap().lines().map(str::to_owned).collect()
    }

    /// Makes a run `out` killed after four steps, before the fourth checkpoint: those of steps one and two
    /// exist.
    fn half(&self, out: &str) {
        let trace = self.trace("traced", &[]);
        let listing = |line: &String| line.starts_with("mkdir") && line.contains("/.mantissa-run.json.");
        let last = trace.iter().rposition(listing).unwrap();
        let output = self.fault(out, &[], &format!("kill:{last}"));
        assert_eq!(output.status.code(), None, "{}", stderr(&output));
        assert_eq!(self.checkpoints(out), ["step-0000000001.safetensors", "step-0000000002.safetensors"]);
        fs::remove_dir_all(self.at("traced")).unwrap();
    }

    fn checkpoints(&self, out: &str) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.at(out).join("checkpoints")) else { return Vec::new() };
        let names = entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned());
        let mut names: Vec<_> = names.filter(|name| name.starts_with("step-")).collect();
        names.sort();
        names
    }

    fn model(&self, out: &str) -> Files {
        files(&self.at(out).join("model"))
    }
}

type Files = BTreeMap<String, Vec<u8>>;

/// Returns every file below a folder with its bytes; for a link, its target.
fn files(dir: &Path) -> Files {
    let mut files = Files::new();
    let mut folders = vec![dir.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display())) {
            let path = entry.unwrap().path();
            let name = path.strip_prefix(dir).unwrap().to_str().unwrap().to_owned();
            let found = fs::symlink_metadata(&path).unwrap();
            if found.is_dir() {
                folders.push(path);
                files.insert(name + "/", Vec::new());
            } else if found.is_symlink() {
                files.insert(name, fs::read_link(&path).unwrap().into_os_string().into_encoded_bytes());
            } else {
                files.insert(name, fs::read(&path).unwrap());
            }
        }
    }
    files
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let to = to.join(path.file_name().unwrap());
        if path.is_dir() { copy(&path, &to) } else { assert!(fs::copy(&path, &to).is_ok()) }
    }
}

/// Runs `work` for every number below `count`, several at a time.
fn each(count: usize, work: impl Fn(usize) + Sync) {
    let next = AtomicUsize::new(0);
    scope(|scope| {
        for _ in 0..WORKERS {
            scope.spawn(|| {
                loop {
                    let n = next.fetch_add(1, Ordering::SeqCst);
                    if n >= count {
                        break;
                    }
                    work(n);
                }
            });
        }
    });
}

const FOREIGN: [&str; 4] = [
    "notes.txt",
    "checkpoints/best.safetensors",
    "checkpoints/.x.mantissa-partial-1/thesis.tex",
    "report.html",
];

/// Puts foreign files into the folder of a run.
fn plant(run: &Path) {
    for name in FOREIGN {
        let path = run.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "mine").unwrap();
    }
}

/// Checks that the foreign files exist, and nothing left by a dead process.
fn check_folder(job: &Job, out: &str, why: &str) {
    for name in FOREIGN {
        assert_eq!(fs::read(job.at(out).join(name)).unwrap(), b"mine", "{why}: {name}");
    }
    let left: Vec<_> = files(&job.at(out)).into_keys().filter(|name| name.contains(".mantissa-")).collect();
    assert_eq!(left.len(), 2, "{why}: {left:?}");
    assert!(!job.at(&format!(".{out}.mantissa-lock")).exists(), "{why}");
    let log = fs::read_to_string(job.at(out).join("log.jsonl")).unwrap();
    let steps: Vec<_> = log
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()["step"].clone())
        .collect();
    assert_eq!(steps, [1, 2, 3, 4], "{why}");
}

#[test]
fn a_run_that_fails_at_any_change_of_a_file_ends_with_the_same_model() {
    let job = Job::new();
    plant(&job.at("whole"));
    // With one checkpoint kept, each is the last.
    let once = ["--quiet", "--set", "checkpoint.keep=1"];
    let changes = job.trace("whole", &once).len();
    check_folder(&job, "whole", "undisturbed");
    let (expected, inputs) = (job.model("whole"), files(job.temp.path()));
    assert!(changes > 100 && expected.contains_key("model.safetensors"), "{changes}");
    // A kill at every change, and an error at some.
    let kills = sampled(0..changes, 7).map(|n| format!("kill:{n}"));
    let errors = sampled((0..changes).step_by(13), 4).map(|n| format!("error:{n}"));
    let faults: Vec<_> = kills.chain(errors).collect();
    let (resumed, begun) = (AtomicUsize::new(0), AtomicUsize::new(0));
    each(faults.len(), |n| {
        let (fault, out) = (&faults[n], format!("k{n}"));
        plant(&job.at(&out));
        let output = job.fault(&out, &once, fault);
        let said = stderr(&output);
        match fault.starts_with("kill") {
            true => assert_eq!(output.status.code(), None, "{fault}: {said}"),
            // An error during cleanup stops nothing.
            false => assert!(matches!(output.status.code(), Some(0 | 3)), "{fault}: {said}"),
        }
        let resume = !job.checkpoints(&out).is_empty();
        if !output.status.success() {
            job.succeed(&out, &[&once[..], if resume { &["--resume"] } else { &[] }].concat());
            if resume { &resumed } else { &begun }.fetch_add(1, Ordering::SeqCst);
        }
        assert!(job.model(&out) == expected, "{fault}: another model");
        if !output.status.success() {
            check_folder(&job, &out, fault);
        }
        fs::remove_dir_all(job.at(&out)).unwrap();
    });
    println!("{changes} changes, {resumed:?} resumed, {begun:?} begun anew");
    assert!(files(job.temp.path()) == inputs, "an input has changed");
}

#[test]
fn a_restart_removes_only_the_runs_files_and_can_be_killed() {
    let job = Job::new();
    plant(&job.at("base"));
    job.succeed("base", &["--quiet"]);
    let expected = job.model("base");
    copy(&job.at("base"), &job.at("traced"));
    let trace = job.trace("traced", &["--restart"]);
    check_folder(&job, "traced", "restarted");
    let cleaned = trace.iter().position(|line| line.contains("/checkpoints/.step-")).unwrap();
    let removed = trace[..cleaned]
        .iter()
        .filter(|line| line.starts_with("unlink") && !line.contains("mantissa-partial"))
        .count();
    // Two checkpoints, five or six files of the model, logs, settings and run.json.
    assert!(removed >= 11, "{removed}: {trace:?}");
    each(cleaned, |n| {
        let (fault, out) = (format!("kill:{n}"), format!("k{n}"));
        copy(&job.at("base"), &job.at(&out));
        let output = job.fault(&out, &["--restart", "--quiet"], &fault);
        assert_eq!(output.status.code(), None, "{fault}: {}", stderr(&output));
        job.succeed(&out, &["--restart", "--quiet"]);
        assert!(job.model(&out) == expected, "{fault}: another model");
        check_folder(&job, &out, &fault);
        fs::remove_dir_all(job.at(&out)).unwrap();
    });
    // Foreign files that stay are reported.
    let said = job.succeed("base", &["--restart"]);
    assert!(said.contains("kept what this run did not write: notes.txt, checkpoints/"), "{said}");
}

#[test]
fn a_run_never_replaces_its_inputs_or_files_of_others() {
    let job = Job::new();
    job.succeed("first", &["--quiet"]);
    fs::rename(job.at("first/model"), job.at("model")).unwrap();
    fs::remove_dir_all(job.at("first")).unwrap();
    let run = |name: &str| job.at("run").join(name);
    let refused = |out: &str, part: &str, more: &[&str]| {
        for how in [&[][..], &["--restart"]] {
            let before = files(job.temp.path());
            let line = job.refused(2, out, &[more, how].concat());
            assert!(line.contains(part), "{more:?}: {line}");
            assert!(files(job.temp.path()) == before, "{more:?} {how:?}: something changed");
        }
    };
    let init = ["--set", "model.init=\"model\""];
    refused(".", "contains the input", &init);
    refused(".", "contains the input", &[]);
    refused("model", "the input", &init);
    // Inputs inside the run's folder.
    fs::create_dir(job.at("run")).unwrap();
    copy(&job.at("model"), &run("model"));
    refused("run", "contains the input", &["--set", "model.init=\"run/model\""]);
    fs::create_dir(job.at("linked")).unwrap();
    for name in ["config.json", "model.safetensors"] {
        symlink(run("model").join(name), job.at("linked").join(name)).unwrap();
    }
    refused("run", "contains the input", &["--set", "model.init=\"linked\""]);
    fs::copy(job.at("text.txt"), run("text.txt")).unwrap();
    refused("run", "contains the input", &["--set", "data.files=[\"run/text.txt\"]"]);
    // A foreign model, and foreign files with the run's names.
    refused("run", "run/model: expected nothing or a file that this run wrote", &[]);
    fs::remove_dir_all(run("model")).unwrap();
    fs::create_dir(run("checkpoints")).unwrap();
    for name in ["config.toml", "log.jsonl", "tokens.safetensors", "checkpoints/step-0000000009.safetensors"]
    {
        fs::write(run(name), "mine").unwrap();
        refused("run", &format!("run/{name}: expected nothing or a file that this run wrote"), &[]);
        fs::remove_file(run(name)).unwrap();
        symlink(job.at("text.txt"), run(name)).unwrap();
        refused("run", &format!("run/{name}: expected"), &[]);
        fs::remove_file(run(name)).unwrap();
    }
    symlink(job.at("model"), run("model")).unwrap();
    refused("run", "run/model: expected", &[]);
    fs::remove_file(run("model")).unwrap();
    // For a new run too: found before the first step, not after the last.
    job.succeed("run", &["--quiet"]);
    fs::write(run("model/thesis.tex"), "mine").unwrap();
    refused("run", "thesis.tex", &["--set", "schedule.steps=4"]);
    assert!(job.refused(2, "run", &["--resume"]).contains("thesis.tex"));
    fs::remove_file(run("model/thesis.tex")).unwrap();
    fs::write(run("checkpoints/step-0000000009.safetensors"), "mine").unwrap();
    assert!(job.refused(2, "run", &["--restart"]).contains("step-0000000009"));
    assert_eq!(fs::read(run("checkpoints/step-0000000009.safetensors")).unwrap(), b"mine");
}

#[test]
fn a_restart_that_cannot_begin_keeps_the_run_before() {
    let job = Job::new();
    job.succeed("run", &["--quiet"]);
    let wide = fs::read_to_string(job.at("config.json"))
        .unwrap()
        .replace("\"hidden_size\":16", "\"hidden_size\":32");
    fs::write(job.at("wide.json"), wide).unwrap();
    fs::write(job.at("bad.jsonl"), "{\"text\": \"a\"}\n{\"text\": 3}\n").unwrap();
    fs::write(job.at("binary.txt"), b"a\xff").unwrap();
    fs::write(job.at("short.txt"), "a").unwrap();
    copy(&job.at("run/model"), &job.at("model"));
    copy(&job.at("run/model"), &job.at("broken"));
    fs::write(job.at("broken/mantissa-manifest.json"), "{").unwrap();
    let before = files(job.temp.path());
    for (code, part, change) in [
        (2, "none.txt", "data.files=[\"text.txt\", \"none.txt\"]"),
        (2, "bad.jsonl", "data.files=[\"text.txt\", \"bad.jsonl\"]"),
        (2, "binary.txt", "data.files=[\"binary.txt\"]"),
        (2, "tokens", "data.files=[\"short.txt\"]"),
        (2, "nowhere", "model.tokenizer=\"nowhere\""),
        (2, "nowhere", "model.init=\"nowhere\""),
        (2, "mantissa-manifest.json", "model.init=\"broken\""),
        (2, "schedule.steps", "schedule.steps=0"),
        (2, "nowhere", "model.config=\"nowhere\""),
    ] {
        let line = job.refused(code, "run", &["--restart", "--set", change]);
        assert!(line.contains(part), "{change}: {line}");
        assert!(files(job.temp.path()) == before, "{change}: something changed");
    }
    let other = ["--restart", "--set", "model.config=\"wide.json\"", "--set", "model.init=\"model\""];
    let line = job.refused(2, "run", &other);
    assert!(line.contains("model.embed_tokens.weight"), "{line}");
    assert!(job.refused(3, "run", &["--restart", "--memory", "1M"]).contains("got a need of"));
    assert!(files(job.temp.path()) == before, "something changed");
}

#[test]
fn a_run_has_one_owner_who_is_named() {
    let job = Job::new();
    let long = ["--quiet", "--set", "schedule.steps=1000000"];
    let start = |more: &[&str]| {
        let mut command = job.command("run", &[&long[..], more].concat());
        command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    };
    let lines = || fs::read_to_string(job.at("run/log.jsonl")).map_or(0, |log| log.lines().count());
    let wait = |child: &mut Child, count: usize| {
        while lines() < count {
            assert!(child.try_wait().unwrap().is_none(), "ended by itself");
            sleep(Duration::from_millis(2));
        }
    };
    let mut owner = start(&[]);
    wait(&mut owner, 3);
    for how in [&[][..], &["--resume"], &["--restart"]] {
        let line = job.refused(3, "run", &[&long[..], how].concat());
        assert!(line.contains(&format!("process {} (started 20", owner.id())), "{how:?}: {line}");
    }
    let before = lines();
    wait(&mut owner, before + 3);
    owner.kill().unwrap();
    owner.wait().unwrap();
    // A dead owner's lock is taken over and its partial checkpoint removed, also after a signal that it was
    // about to handle.
    for round in 0..6 {
        let mut owner = start(&["--resume"]);
        let before = lines();
        wait(&mut owner, before.max(3) + 2);
        let id = owner.id().to_string();
        assert!(std::process::Command::new("kill").args(["-TERM", &id]).status().unwrap().success());
        sleep(Duration::from_micros(u64::from(random_u32(7, round)) % 3000));
        owner.kill().unwrap();
        owner.wait().unwrap();
    }
    let mut last = start(&["--resume"]);
    let before = lines();
    wait(&mut last, before.max(3) + 2);
    assert!(
        std::process::Command::new("kill")
            .args(["-TERM", &last.id().to_string()])
            .status()
            .unwrap()
            .success()
    );
    assert_eq!(last.wait().unwrap().code(), Some(143));
    let left: Vec<_> =
        files(job.temp.path()).into_keys().filter(|name| name.contains(".mantissa-")).collect();
    assert!(left.is_empty(), "{left:?}");
}

/// Flips one bit of a file.
fn flip(path: &Path, bit: usize) {
    let mut bytes = fs::read(path).unwrap();
    bytes[bit / 8] ^= 1 << (bit % 8);
    fs::write(path, bytes).unwrap();
}

#[test]
fn after_any_flipped_bit_the_model_is_the_same_or_the_run_is_refused() {
    let job = Job::new();
    job.succeed("whole", &["--quiet"]);
    let expected = job.model("whole");
    job.half("half");
    let newest = "checkpoints/step-0000000002.safetensors";
    let mut flips: Vec<(&str, usize)> = Vec::new();
    for (name, count) in [
        (newest, 40),
        ("tokens.safetensors", 12),
        ("mantissa-run.json", 12),
        ("log.jsonl", 8),
        ("telemetry.jsonl", 4),
        ("run.json", 4),
        ("config.toml", 4),
    ] {
        let bits = 8 * fs::metadata(job.at("half").join(name)).unwrap().len() as usize;
        let header = if name.ends_with(".safetensors") { 8 } else { 0 };
        flips.extend((0..header).map(|byte| (name, 8 * byte + byte)));
        flips.extend(
            (0..count).map(|i| (name, bits * i / count + random_u32(5, i as u64) as usize % (bits / count))),
        );
    }
    let resumed = AtomicUsize::new(0);
    each(flips.len(), |n| {
        let ((name, bit), out) = (flips[n], format!("f{n}"));
        copy(&job.at("half"), &job.at(&out));
        // Settings name the folder, so a copy replaces the first.
        let own = TempDir::new().unwrap();
        let moved = own.path().join("run.toml");
        let toml = fs::read_to_string(job.at("run.toml")).unwrap();
        fs::write(&moved, toml.replace("out = \"run\"", "out = \"half\"")).unwrap();
        for input in ["config.json", "text.txt"] {
            fs::copy(job.at(input), own.path().join(input)).unwrap();
        }
        fs::rename(job.at(&out), own.path().join("half")).unwrap();
        flip(&own.path().join("half").join(name), bit);
        let output =
            command().arg("train").arg(&moved).args(["--threads", "1", "--resume"]).output().unwrap();
        let said = stderr(&output);
        match output.status.code() {
            Some(0) => {
                assert!(files(&own.path().join("half/model")) == expected, "{name} {bit}: another model");
                resumed.fetch_add(1, Ordering::SeqCst);
            }
            code => {
                assert_eq!(code, Some(2), "{name} {bit}: {said}");
                assert_eq!(name, "mantissa-run.json", "{bit}: {said}");
            }
        }
        if name == newest {
            let warning = "step-0000000002.safetensors: is damaged; resuming from the checkpoint of step 1";
            assert!(said.contains(warning), "{bit}: {said}");
        }
        if name.starts_with("tokens") {
            assert!(
                said.contains("tokens.safetensors: is damaged; made again from the data"),
                "{bit}: {said}"
            );
        }
    });
    println!("{} flipped bits, {resumed:?} resumed to the same model, the others refused", flips.len());
}

#[test]
fn damage_that_cannot_be_mended_is_refused_with_a_fix() {
    let job = Job::new();
    job.succeed("whole", &["--quiet"]);
    let expected = job.model("whole");
    job.half("run");
    copy(&job.at("run"), &job.at("saved"));
    let again = || {
        fs::remove_dir_all(job.at("run")).unwrap();
        copy(&job.at("saved"), &job.at("run"));
    };
    // Not UTF-8, not JSON, not an object.
    let mut log = fs::read(job.at("run/log.jsonl")).unwrap();
    log.extend(b"\xff\n[3]\nnull\n{\"step\"");
    fs::write(job.at("run/log.jsonl"), log).unwrap();
    job.succeed("run", &["--resume"]);
    assert!(job.model("run") == expected);
    assert_eq!(fs::read_to_string(job.at("run/log.jsonl")).unwrap().lines().count(), 4);
    // Every checkpoint is damaged.
    again();
    for name in job.checkpoints("run") {
        flip(&job.at("run/checkpoints").join(name), 5000);
    }
    let before = files(&job.at("run/checkpoints"));
    let line = job.refused(2, "run", &["--resume", "--quiet"]);
    assert!(line.contains("got 2 damaged; fix: rerun with --restart"), "{line}");
    assert!(files(&job.at("run/checkpoints")) == before);
    job.succeed("run", &["--restart", "--quiet"]);
    assert!(job.model("run") == expected);
    // The manifest of the run is damaged: a resume rebuilds it, and nothing is removed.
    again();
    fs::write(job.at("run/mantissa-run.json"), "{").unwrap();
    assert!(
        job.refused(2, "run", &["--restart"])
            .contains("mantissa-run.json: expected the list of the run's files")
    );
    let said = job.succeed("run", &["--resume"]);
    assert!(said.contains("mantissa-run.json: is damaged; made again"), "{said}");
    assert!(job.model("run") == expected);
    job.succeed("run", &["--restart", "--quiet"]);
    // The data have changed: with the run's tokens it resumes, without them it is refused.
    again();
    let data = fs::read_to_string(job.at("text.txt")).unwrap();
    fs::write(job.at("text.txt"), data.replace("Line", "Row")).unwrap();
    let said = job.succeed("run", &["--resume"]);
    assert!(said.contains("resuming with the tokens that the run began with"), "{said}");
    assert!(job.model("run") == expected);
    again();
    flip(&job.at("run/tokens.safetensors"), 3000);
    let line = job.refused(2, "run", &["--resume"]);
    assert!(
        line.contains("tokens.safetensors: expected the tokens that the run began with, got a damaged file"),
        "{line}"
    );
    fs::remove_file(job.at("run/tokens.safetensors")).unwrap();
    assert!(job.refused(2, "run", &["--resume"]).contains("got none"));
    fs::write(job.at("text.txt"), data).unwrap();
    job.succeed("run", &["--resume", "--quiet"]);
    assert!(job.model("run") == expected);
    // No checkpoint to resume from.
    assert!(
        job.refused(2, "nowhere", &["--resume"]).contains("got no checkpoint; fix: rerun with"),
        "{line}"
    );
}

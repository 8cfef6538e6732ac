//! Training runs that are stopped: by a signal at a moment that is waited for, or at random moments until they end.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread::sleep;
use std::time::Duration;

use serde_json::Value;

use crate::support::{command, succeed, text};

/// Starts the binary.
pub fn start(arguments: &[&str]) -> Child {
    command().args(arguments).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Sends a signal to a process, which may have ended.
pub fn signal(child: &Child, name: &str) {
    let _ = Command::new("kill").args(["-s", name, &child.id().to_string()]).stderr(Stdio::null()).status();
}

/// Returns the steps of a run's checkpoints, oldest first.
pub fn checkpoints(run: &Path) -> Vec<u64> {
    let entries = fs::read_dir(run.join("checkpoints")).into_iter().flatten().flatten();
    // A killed process leaves a partial file under another name.
    let steps = |name: &str| name.strip_prefix("step-")?.strip_suffix(".safetensors")?.parse().ok();
    let mut steps: Vec<u64> =
        entries.filter_map(|entry| steps(&entry.file_name().to_string_lossy())).collect();
    steps.sort_unstable();
    steps
}

/// Returns the lines of a log of a run; none if it has no such log. A line that is being written does not count.
pub fn log(run: &Path, file: &str) -> Vec<Value> {
    let log = fs::read_to_string(run.join(file)).unwrap_or_default();
    log.split_inclusive('\n').filter_map(|line| serde_json::from_str(line.strip_suffix('\n')?).ok()).collect()
}

/// Losses and validation by step, samples, and files of weights.
pub type Found = (Vec<Value>, Vec<Value>, Vec<(PathBuf, Vec<u8>)>);

/// Returns what a stop must not change: losses, validation and samples of every step, and the files of the results
/// without their manifests, which record the command and its time.
pub fn result(run: &Path) -> Found {
    let figures =
        |line: Value| serde_json::json!([line["step"], line["loss"], line["validation_loss"], line["lr"]]);
    let mut files = Vec::new();
    for name in ["model", "adapter", "base", "quantized"] {
        for entry in fs::read_dir(run.join(name)).into_iter().flatten() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|extension| extension == "safetensors") {
                files.push((path.strip_prefix(run).unwrap().to_owned(), fs::read(&path).unwrap()));
            }
        }
    }
    files.sort();
    (log(run, "log.jsonl").into_iter().map(figures).collect(), log(run, "samples.jsonl"), files)
}

/// True if the run has written its results.
pub fn is_done(run: &Path) -> bool {
    fs::read_to_string(run.join("run.json")).is_ok_and(|about| about.contains("\"outcome\": \"done\""))
}

/// Checks the end of a process after one signal: its code, its message, and a checkpoint of the last finished step.
/// Returns false if the run was done before.
pub fn is_resumable(output: &Output, run: &Path, context: &str) -> bool {
    let said = String::from_utf8_lossy(&output.stderr);
    if output.status.success() {
        return false;
    }
    assert!(matches!(output.status.code(), Some(130 | 143)), "{context}: {:?}: {said}", output.status);
    let resumes = said.contains("Interrupted. Rerun the same command to resume.");
    assert!(resumes != is_done(run), "{context}: {said}");
    if !resumes {
        return false;
    }
    let finished = log(run, "log.jsonl").last().map(|line| line["step"].as_u64().unwrap());
    let saved = checkpoints(run);
    assert!(
        finished.is_none_or(|step| saved.last() == Some(&step)),
        "{context}: step {finished:?} of {saved:?}"
    );
    true
}

/// Stops the run `arguments` in the folder `run` at random moments, by SIGKILL and SIGTERM in turn, with one and two
/// threads, and resumes it until it ends; `wait` gives the milliseconds before the stop of a trial. Returns the number
/// of stops.
pub fn stopped_at_any_time(run: &Path, arguments: &[&str], wait: impl Fn(u64) -> u64) -> u64 {
    let mut stops = 0;
    for trial in 0..40u64 {
        // The command that began a run also resumes it.
        let how = match (checkpoints(run).is_empty(), trial % 3) {
            (true, _) => &["--restart"][..],
            (false, 0) => &[],
            (false, _) => &["--resume"],
        };
        let threads = ["--threads", if trial % 2 == 0 { "1" } else { "2" }];
        let mut child = start(&[arguments, &threads, how].concat());
        sleep(Duration::from_millis(wait(trial)));
        let ended = child.try_wait().unwrap().is_some();
        signal(&child, if trial % 2 == 0 { "KILL" } else { "TERM" });
        let output = child.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        if ended || output.status.success() {
            assert!(output.status.success(), "{arguments:?} {how:?} after {stops} stops: {said}");
            return stops;
        }
        assert!(matches!(output.status.code(), None | Some(143)), "{arguments:?} {how:?}: {said}");
        stops += 1;
        // The stop came while the process ended.
        if is_done(run) {
            return stops;
        }
    }
    let how = if checkpoints(run).is_empty() { "--restart" } else { "--resume" };
    succeed(&[arguments, &[how]].concat());
    stops
}

/// Runs the command to its end and returns its result.
pub fn undisturbed(run: &Path, arguments: &[&str]) -> Found {
    succeed(arguments);
    let found = result(run);
    assert!(!found.0.is_empty() && !found.2.is_empty(), "{}", text(run));
    found
}

//! `mantissa train` over ranks: the same run for any number of them, of threads or of processes that MPI connects.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

use crate::support::{command, fail, json, root, stderr, succeed, text};

const STEPS: usize = 24;
/// Steps of a run that is stopped: enough that it does not end before.
const LONG: usize = 80;

/// Writes settings, text and config of a small run of eight leaves to `dir`.
fn settings(dir: &Path, more: &str) -> PathBuf {
    let tokenizer = root().join("tests/data/tiny/llama2-gqa-tied");
    let model: Value = serde_json::from_slice(&fs::read(tokenizer.join("config.json")).unwrap()).unwrap();
    let config = serde_json::json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu",
        "vocab_size": model["vocab_size"], "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": true, "eos_token_id": 2,
    });
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
    let line = |i: usize| format!("Line {} says that {} is before {}.\n==\n", i, i % 10, (i + 1) % 10);
    fs::write(dir.join("text.txt"), (0..400).map(line).collect::<String>()).unwrap();
    let path = dir.join("run.toml");
    let toml = format!(
        "seed = 3\nout = \"run\"\n[model]\nconfig = \"config.json\"\ntokenizer = \"{}\"\n[data]\nfiles = [\"text.txt\"]\n\
         split = \"==\"\nlength = 32\nbatch = 1\naccumulate = 8\n[validation]\nshare = 0.1\nevery = 8\n[optimizer]\nlr = 5e-3\n\
         moments = \"8bit\"\n[schedule]\nsteps = {STEPS}\nwarmup = 4\n[checkpoint]\nevery = 5\nkeep = 2\n[telemetry]\nevery = 10\n\
         [parallel]\nleaves = 8\n{more}",
        text(&tokenizer)
    );
    fs::write(&path, toml).unwrap();
    path
}

/// What a run leaves: losses and norms of the log, the last checkpoint, the model.
#[derive(PartialEq)]
struct Left(Vec<(String, String)>, Vec<u8>, Vec<u8>);

fn left(dir: &Path, steps: usize) -> Left {
    let log = fs::read_to_string(dir.join("run/log.jsonl")).unwrap();
    let line = |line: &str| {
        let line: Value = serde_json::from_str(line).unwrap();
        (line["loss"].to_string(), line["grad_norm"].to_string())
    };
    let last = dir.join(format!("run/checkpoints/step-{steps:010}.safetensors"));
    let model = fs::read(dir.join("run/model/model.safetensors")).unwrap();
    Left(log.lines().map(line).collect(), fs::read(last).unwrap(), model)
}

/// Trains in a new folder with these arguments.
fn trained(more: &str, arguments: &[&str]) -> (Left, Value) {
    let temp = TempDir::new().unwrap();
    let config = settings(temp.path(), more);
    let done = json(&[&["train", text(&config), "--json", "--quiet"], arguments].concat());
    (left(temp.path(), STEPS), done)
}

/// What a long run leaves that nothing stops.
fn whole() -> Left {
    let temp = TempDir::new().unwrap();
    let config = settings(temp.path(), "");
    succeed(&[&["train", text(&config), "--quiet"][..], &long()].concat());
    left(temp.path(), LONG)
}

/// Arguments of a long run.
fn long() -> [&'static str; 2] {
    ["--set", "schedule.steps=80"]
}

fn lines(dir: &Path) -> usize {
    fs::read_to_string(dir.join("run/log.jsonl")).unwrap_or_default().lines().count()
}

#[test]
fn any_number_of_ranks_leaves_the_same_run() {
    let (alone, done) = trained("", &[]);
    assert_eq!((alone.0.len(), done.get("ranks")), (STEPS, None));
    for (ranks, zero) in [("2", "0"), ("4", "1"), ("8", "1")] {
        let set = format!("parallel.zero={zero}");
        let (found, done) = trained("", &["--ranks", ranks, "--set", &set]);
        assert_eq!(found.0, alone.0, "{ranks} ranks, ZeRO {zero}");
        assert!(found == alone, "{ranks} ranks, ZeRO {zero}");
        let sent: Vec<_> = done["ranks"].as_array().unwrap().iter().map(|rank| &rank["sent"]).collect();
        assert_eq!(sent.len(), ranks.parse::<usize>().unwrap());
        assert!(sent.iter().all(|sent| sent.as_u64().unwrap() > 1_000_000), "{done}");
    }
    // One leaf sums in another order.
    let (one, _) = trained("", &["--set", "parallel.leaves=1"]);
    assert!(one.0[0] == alone.0[0] || one.1 != alone.1);
    let few = "gradients = \"int8-g256\"\n";
    let (alone, _) = trained(few, &[]);
    let (found, _) = trained(few, &["--ranks", "2", "--set", "parallel.zero=1"]);
    assert!(found == alone, "gradients in 8 bits");
}

/// A run that was stopped or killed on some ranks goes on on others, to the same bits.
#[test]
fn a_run_goes_on_on_other_ranks() {
    let whole = whole();
    for (signal, ranks, others) in [("INT", "4", "2"), ("KILL", "2", "8")] {
        let temp = TempDir::new().unwrap();
        let config = settings(temp.path(), "zero = 1\n");
        let first = [&["train", text(&config), "--quiet", "--ranks", ranks][..], &long()].concat();
        let mut child = command().args(first).stderr(Stdio::piped()).spawn().unwrap();
        let begin = Instant::now();
        while lines(temp.path()) < 7 && child.try_wait().unwrap().is_none() {
            assert!(begin.elapsed() < Duration::from_secs(120));
            sleep(Duration::from_millis(2));
        }
        // A process that has ended takes no signal.
        let _ = Command::new("kill").args(["-s", signal, &child.id().to_string()]).status().unwrap();
        let output = child.wait_with_output().unwrap();
        let ended = output.status.success() && lines(temp.path()) == LONG;
        if signal == "INT" {
            assert!(ended || output.status.code() == Some(130), "{}", stderr(&output));
        }
        let next = ["train", text(&config), "--quiet", "--resume", "--ranks", others];
        succeed(&[&next[..], &long()].concat());
        assert!(left(temp.path(), LONG) == whole, "{signal} on {ranks} ranks, then {others}");
    }
}

#[test]
fn numbers_of_ranks_that_do_not_fit_are_refused_with_settings_that_do() {
    let temp = TempDir::new().unwrap();
    let config = settings(temp.path(), "");
    let train = |more: &[&str]| fail(2, &[&["train", text(&config)], more].concat());
    assert!(train(&["--ranks", "3"]).contains("--ranks: expected 1, 2, 4 or 8, got 3"));
    let single = ["--set", "parallel.leaves=1", "--set", "data.accumulate=1", "--set", "data.batch=8"];
    let said = train(&[&single[..], &["--ranks", "4"]].concat());
    assert!(said.contains("--ranks: expected a divisor of parallel.leaves = 1, got 4; fix: "), "{said}");
    let fix = "--set parallel.leaves=8 --set data.accumulate=8 --set data.batch=1";
    assert!(said.contains(fix), "{said}");
    let fix: Vec<&str> = fix.split(' ').collect();
    let preview =
        json(&[&["train", text(&config), "--dry-run", "--json", "--ranks", "4"], &fix[..]].concat());
    assert!(preview["memory"]["other ranks"].as_u64().unwrap() > 0, "{preview}");
    let said = train(&["--ranks", "2", "--set", "distill={teacher=\"x\"}"]);
    assert!(said.contains("--ranks: expected 1 with [distill]"), "{said}");
    assert!(train(&["--set", "parallel.zero=4"]).contains("parallel.zero: expected 0, 1, 2 or 3, got 4"));
    assert!(!temp.path().join("run").exists());
    // Variables of a launcher whose processes cannot send to each other.
    let launched = |variables: &[(&str, &str)]| {
        let output =
            command().args(["train", text(&config)]).envs(variables.iter().copied()).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
        stderr(&output)
    };
    let said = launched(&[("RANK", "1"), ("WORLD_SIZE", "2")]);
    assert!(said.contains("expected several processes that MPI connects (mpiexec, "), "{said}");
}

/// Folder of a library with the ABI of MPI 5, and the launcher beside it; `None` if none is installed.
fn mpi() -> Option<(PathBuf, OsString)> {
    let path = std::env::var_os("PATH")?;
    let launchers = std::env::split_paths(&path).map(|folder| folder.join("mpiexec"));
    let found = launchers.filter(|launcher| launcher.is_file()).find_map(|launcher| {
        let folder = launcher.parent()?.parent()?.join("lib");
        folder.join("libmpi_abi.so.1").is_file().then_some((launcher, folder.into_os_string()))
    });
    if found.is_none() {
        eprintln!("skipped: no mpiexec with libmpi_abi.so.1 beside it (PyPI's mpich has both)");
    }
    found
}

#[test]
fn processes_of_mpi_leave_the_same_run() {
    let Some((launcher, folder)) = mpi() else { return };
    let (alone, _) = trained("", &[]);
    let start = |config: &Path, more: &[&str]| {
        let mut line = Command::new(&launcher);
        line.args(["-n", "4"])
            .arg(command().get_program())
            .args(["train", text(config), "--quiet"])
            .args(more);
        line.env("LD_LIBRARY_PATH", &folder).stdin(Stdio::null());
        line
    };
    let temp = TempDir::new().unwrap();
    let config = settings(temp.path(), "zero = 1\n");
    let output = start(&config, &[]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(left(temp.path(), STEPS) == alone);
    // A finished run has nothing to do for anybody.
    let output = start(&config, &["--json"]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let done: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(done["already_complete"], true);
    // What rank 0 refuses ends all.
    let begin = Instant::now();
    let output = start(&config, &["--set", "schedule.steps=0"]).output().unwrap();
    assert!(!output.status.success() && begin.elapsed() < Duration::from_secs(10));
    assert!(stderr(&output).contains("schedule.steps"), "{}", stderr(&output));
}

/// A process that dies ends the others, and the run goes on.
#[test]
fn a_process_of_mpi_that_dies_ends_the_others() {
    let Some((launcher, folder)) = mpi() else { return };
    let whole = whole();
    let temp = TempDir::new().unwrap();
    let config = settings(temp.path(), "zero = 1\n");
    let start = |more: &[&str]| {
        let mut line = Command::new(&launcher);
        line.args(["-n", "4"])
            .arg(command().get_program())
            .args(["train", text(&config), "--quiet"])
            .args(more);
        line.args(long()).env("LD_LIBRARY_PATH", &folder).stdin(Stdio::null());
        line
    };
    let child = start(&[]).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let waited = std::thread::spawn(|| child.wait_with_output().unwrap().status);
    let begin = Instant::now();
    while lines(temp.path()) < 7 && !waited.is_finished() {
        assert!(begin.elapsed() < Duration::from_secs(120));
        sleep(Duration::from_millis(2));
    }
    let (ranks, begin) = (rank_processes(&config), Instant::now());
    if let Some(last) = ranks.last() {
        // It may end by itself before.
        let _ = Command::new("kill").args(["-s", "KILL", last]).status().unwrap();
    }
    let status = waited.join().unwrap();
    assert!(begin.elapsed() < Duration::from_secs(10));
    assert!(!status.success() || lines(temp.path()) == LONG);
    assert!(rank_processes(&config).is_empty());
    let output = start(&["--resume"]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(left(temp.path(), LONG) == whole);
}

/// Process numbers of the ranks of the run of `config`, the launcher and its proxy left out.
fn rank_processes(config: &Path) -> Vec<String> {
    let program = command().get_program().to_owned();
    let is_rank = |entry: &fs::DirEntry| {
        let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let mut words = line.split(|byte| *byte == 0);
        words.next() == Some(program.as_encoded_bytes()) && words.any(|word| word == text(config).as_bytes())
    };
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten().filter(is_rank);
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

//! `mantissa train` through the command line: runs that finish, are stopped, killed and resumed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use mantissa_num::round::random_u32;
use serde_json::Value;
use tempfile::TempDir;

use crate::stops::{start, stopped_at_any_time};
use crate::support::{command, fail, json, mantissa, root, sampled, stderr, succeed, text};

const STEPS: usize = 40;

/// Writes settings, text and config of a small run to `dir`; `more` follows the key `out`.
fn settings(dir: &Path, policy: &str, moments: &str) -> PathBuf {
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
         split = \"==\"\nlength = 32\nbatch = 4\n[precision]\npolicy = \"{policy}\"\n[optimizer]\nlr = 5e-3\nmoments = \"{moments}\"\n\
         [schedule]\nsteps = {STEPS}\nwarmup = 4\n[checkpoint]\nevery = 7\nkeep = 2\n[telemetry]\nevery = 10\n",
        text(&tokenizer)
    );
    fs::write(&path, toml).unwrap();
    path
}

/// Returns losses of the log by step, and the exported weights.
fn result(dir: &Path) -> (Vec<f64>, Vec<u8>) {
    let log = fs::read_to_string(dir.join("run/log.jsonl")).unwrap();
    let lines: Vec<Value> = log.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(lines.iter().enumerate().all(|(i, line)| line["step"] == i + 1), "{log}");
    let losses = lines.iter().map(|line| line["loss"].as_f64().unwrap()).collect();
    (losses, fs::read(dir.join("run/model/model.safetensors")).unwrap())
}

fn checkpoints(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir.join("run/checkpoints")).unwrap();
    let names = entries.map(|e| e.unwrap().file_name().to_string_lossy().into_owned());
    // A killed process leaves a partial file under another name.
    let whole = |name: &String| name.starts_with("step-") && name.ends_with(".safetensors");
    let mut names: Vec<_> = names.filter(whole).collect();
    names.sort();
    names
}

#[test]
fn a_run_learns_keeps_checkpoints_and_writes_a_model() {
    let temp = TempDir::new().unwrap();
    let config = settings(temp.path(), "bf16", "8bit");
    let planned = json(&["train", text(&config), "--dry-run", "--json"]);
    assert!(planned["predicted_peak_memory"].as_u64().unwrap() > 1_000_000, "{planned}");
    assert!(!temp.path().join("run").exists());
    let done = json(&["train", text(&config), "--json", "--quiet"]);
    assert_eq!(done["steps"], STEPS);
    let (losses, _) = result(temp.path());
    assert!(losses[STEPS - 1] < 0.7 * losses[0], "{losses:?}");
    assert_eq!(checkpoints(temp.path()), ["step-0000000035.safetensors", "step-0000000040.safetensors"]);
    // The exported model is a normal model.
    let model = temp.path().join("run/model");
    assert_eq!(json(&["inspect", text(&model), "--json"])["convention"], "dense");
    succeed(&["run", text(&model), "-p", "Line 7 says", "-n", "8", "--quiet"]);
    // A run is not started twice unless requested: it answers with what it did.
    let written = fs::metadata(model.join("model.safetensors")).unwrap().modified().unwrap();
    let again = json(&["train", text(&config), "--json", "--quiet"]);
    assert_eq!((&done["already_complete"], &again["already_complete"]), (&false.into(), &true.into()));
    for figure in [
        "outcome",
        "steps",
        "tokens",
        "skipped",
        "loss",
        "exported_step",
        "data",
        "learning",
        "model",
        "next",
    ] {
        assert_eq!(done[figure], again[figure], "{figure}");
    }
    assert!(succeed(&["train", text(&config)]).contains("time        already complete: all files"));
    assert_eq!(fs::metadata(model.join("model.safetensors")).unwrap().modified().unwrap(), written);
    // A result that was changed since is named, and --resume writes it again.
    let config_json = fs::read_to_string(model.join("config.json")).unwrap();
    fs::write(model.join("config.json"), config_json.replace('}', " }")).unwrap();
    let line = fail(2, &["train", text(&config), "--quiet"]);
    let found = "got one that finished its 40 steps with other files since: model: config.json: expected";
    assert!(line.contains(found) && line.contains("fix: --set out=FOLDER"), "{line}");
    fs::write(model.join("config.json"), config_json).unwrap();
    // Other settings are named with both values, also where they would be resumed.
    let longer = ["train", text(&config), "--quiet", "--set", "schedule.steps=50", "--set", "seed=4"];
    for how in [&[][..], &["--resume"]] {
        let line = fail(2, &[&longer[..], how].concat());
        let keys =
            "finished its 40 steps with other settings (schedule.steps = 50 (run: 40), seed = 4 (run: 3))";
        assert!(line.contains(keys) && line.contains("or --restart to replace this one"), "{line}");
    }
    succeed(
        &[&longer[..], &["--set", "out=other", "--set", "schedule.steps=2", "--set", "schedule.warmup=1"]]
            .concat(),
    );
    // A run whose model is lost is resumed by the same command, but not with other data.
    let folder = temp.path().join("run");
    fs::rename(folder.join("model"), temp.path().join("model")).unwrap();
    let lines = fs::read_to_string(temp.path().join("text.txt")).unwrap();
    fs::write(temp.path().join("text.txt"), lines.replace("before", "after")).unwrap();
    let line = fail(2, &["train", text(&config), "--quiet"]);
    assert!(line.contains("the data and the tokenizer that the unfinished run began with"), "{line}");
    // A finished one is not that of other data either.
    fs::rename(temp.path().join("model"), folder.join("model")).unwrap();
    let line = fail(2, &["train", text(&config), "--quiet"]);
    assert!(line.contains("finished its 40 steps with other data or another tokenizer; fix"), "{line}");
    fs::rename(folder.join("model"), temp.path().join("model")).unwrap();
    fs::write(temp.path().join("text.txt"), lines).unwrap();
    assert_eq!(json(&["train", text(&config), "--json", "--quiet"])["steps"], STEPS);
    let weights = |model: &Path| fs::read(model.join("model.safetensors")).unwrap();
    assert!(weights(&folder.join("model")) == weights(&temp.path().join("model")));
    let again = json(&["train", text(&config), "--resume", "--json", "--quiet"]);
    assert_eq!((&again["steps"], &again["loss"]), (&STEPS.into(), &Value::Null));
}

/// What is typed in the place of settings is answered with what works.
#[test]
fn slips_before_a_run_are_told_their_commands() {
    let temp = TempDir::new().unwrap();
    let config = settings(temp.path(), "fp32", "f32");
    let data = temp.path().join("my text.txt");
    fs::write(&data, "Once upon a time.\nThe end.\n").unwrap();
    let line = fail(2, &["train", text(&data)]);
    let fix = format!("fix: mantissa train --init small --data '{}' > run.toml, then", text(&data));
    assert!(line.contains("expected settings of a run") && line.contains(&fix), "{line}");
    // Settings with a fault stay settings.
    let broken = temp.path().join("broken.cfg");
    fs::write(&broken, "[data]\nfiles = [\n").unwrap();
    assert!(fail(2, &["train", text(&broken)]).contains("TOML: "));
    for (change, part) in [
        ("optimizer=muon", "expected optimizer.kind=muon"),
        ("precision=nvfp4", "expected precision.policy=nvfp4"),
        (
            "optimizer.kind=paged_adamw_8bit",
            "fix: --set optimizer.kind=adamw --set optimizer.moments=8bit --set optimizer.paged=true",
        ),
    ] {
        let line = fail(2, &["train", text(&config), "--dry-run", "--set", change]);
        assert!(line.contains(part), "{change}: {line}");
    }
    // The changes that a message names are accepted.
    let changed =
        ["--set", "optimizer.kind=adamw", "--set", "optimizer.moments=8bit", "--set", "optimizer.paged=true"];
    succeed(&[&["train", text(&config), "--dry-run"][..], &changed].concat());
    // Data for new settings are looked at.
    let init = ["train", "--init", "small", "--data"];
    let line = fail(2, &[&init[..], &["d.csv"]].concat());
    assert!(line.contains("d.csv: format") && line.contains("read_csv('d.csv')"), "{line}");
    let output = command().args(init).arg("none.txt").output().unwrap();
    assert!(
        output.status.success() && stderr(&output).contains("none.txt: no such file here"),
        "{}",
        stderr(&output)
    );
    let output = command().args(init).args(["none.txt", "--strict"]).output().unwrap();
    assert!(output.status.code() == Some(1) && output.stdout.is_empty(), "{}", stderr(&output));
    let output = command().args(init).arg(&data).output().unwrap();
    assert!(output.status.success() && stderr(&output).is_empty(), "{}", stderr(&output));
}

/// The history of a model lists the commands that made it, in order.
#[test]
fn the_runs_that_made_a_model_are_recorded_in_their_order() {
    let temp = TempDir::new().unwrap();
    let config = settings(temp.path(), "fp32", "f32");
    let train = |more: &[&str]| {
        let few =
            ["train", text(&config), "--set", "schedule.steps=2", "--set", "schedule.warmup=1", "--quiet"];
        succeed(&[&few[..], more].concat());
    };
    train(&[]);
    let (trained, quantized) = (temp.path().join("run/model"), temp.path().join("quantized"));
    succeed(&[
        "quantize",
        text(&trained),
        "--recipe",
        "rtn-int8-channel",
        "--out",
        text(&quantized),
        "--quiet",
    ]);
    let summary = succeed(&["inspect", text(&quantized)]);
    assert!(summary.contains("train (2 steps), then quantize rtn-int8-channel\n"), "{summary}");
    let history = |model: &Path| json(&["inspect", text(model), "--json"])["history"].clone();
    train(&["--set", "model.init=run/model", "--set", "out=again"]);
    let twice = history(&temp.path().join("again/model"));
    let commands: Vec<_> = twice.as_array().unwrap().iter().map(|run| &run["command"]).collect();
    assert_eq!(commands, ["train", "train"]);
    // The second run read what the first wrote.
    let quality: Value = serde_json::from_slice(&fs::read(quantized.join("quality.json")).unwrap()).unwrap();
    let weights = &history(&quantized)[0]["weights"]["model.safetensors"];
    assert_eq!(&quality["hashes"]["source"]["model.safetensors"]["sha256"], weights);
}

#[test]
fn a_run_killed_at_any_time_resumes_bit_exactly() {
    stopped_runs_end_alike(&[
        ("fp16", "f32"),
        ("bf16-pure-sr", "bf16"),
        ("bf16", "8bit:cpu"),
        ("fp8-delayed", "f32"),
        ("nvfp4", "8bit"),
        ("fp32", "4bit"),
    ]);
}

#[test]
fn an_int8_run_stopped_at_any_time_resumes_bit_exactly() {
    stopped_runs_end_alike(&[
        ("int8-rowwise", "f32"),
        ("int8-switchback", "8bit"),
        ("int8-jetfire", "4bit"),
        ("int8-sr", "bf16"),
    ]);
}

/// Runs each policy whole, and stopped at random steps by SIGKILL and SIGTERM in turn; losses and weights are the same.
fn stopped_runs_end_alike(runs: &[(&str, &str)]) {
    for (i, &(policy, moments)) in runs.iter().enumerate() {
        let whole = TempDir::new().unwrap();
        let config = settings(whole.path(), policy, moments);
        succeed(&["train", text(&config), "--threads", "1", "--quiet"]);
        let expected = result(whole.path());
        let temp = TempDir::new().unwrap();
        let config = settings(temp.path(), policy, moments);
        let train = ["train", text(&config), "--quiet"];
        // Waits longer each time, so that a busy machine also reaches its first checkpoint.
        let wait = |trial| 30 + 20 * trial + u64::from(random_u32(i as u64, trial) % 250);
        let kills = stopped_at_any_time(&temp.path().join("run"), &train, wait);
        println!("{policy}, {moments}: {kills} kills");
        assert!(result(temp.path()) == expected, "{policy} after {kills} kills");
    }
}

#[test]
fn signals_leave_a_checkpoint_of_the_last_step() {
    let temp = TempDir::new().unwrap();
    let config = settings(temp.path(), "fp32", "f32");
    for (name, code) in [("TERM", 143), ("INT", 130)] {
        let mut arguments = vec!["train", text(&config), "--set", "schedule.steps=100000", "--quiet"];
        arguments.push(if name == "TERM" { "--restart" } else { "--resume" });
        let mut child = start(&arguments);
        let log = temp.path().join("run/log.jsonl");
        let lines = || fs::read_to_string(&log).map_or(0, |text| text.lines().count());
        let before = lines();
        while lines() < before + 3 {
            assert!(child.try_wait().unwrap().is_none(), "{name}: ended by itself");
            sleep(Duration::from_millis(5));
        }
        assert!(
            Command::new("kill")
                .args([&format!("-{name}"), &child.id().to_string()])
                .status()
                .unwrap()
                .success()
        );
        assert_eq!(child.wait().unwrap().code(), Some(code));
        let last = checkpoints(temp.path()).pop().unwrap();
        assert_eq!(last, format!("step-{:010}.safetensors", lines()), "{name}");
    }
}

#[test]
fn invalid_settings_and_data_are_named_and_leave_nothing() {
    let temp = TempDir::new().unwrap();
    let config = settings(temp.path(), "fp32", "f32");
    let refused = |change: &str, part: &str| {
        let line = fail(2, &["train", text(&config), "--set", change, "--quiet"]);
        assert!(line.contains(part), "{change}: {line}");
        assert!(!temp.path().join("run/config.toml").exists(), "{change}");
    };
    refused("optimizer.lrr=1", "lrr");
    refused(
        "precision.policy=fp4",
        "expected nvfp4, fp4-all-the-way (all: mantissa train --show-policy list), got fp4",
    );
    refused("data.files=[\"none.txt\"]", "none.txt");
    refused("data.length=65", "max_position_embeddings");
    refused("model.tokenizer=nowhere", "nowhere");
    fs::write(temp.path().join("wide.json"), "{\"model_type\": \"mamba\"}").unwrap();
    refused("model.config=wide.json", "wide.json");
    let line = fail(3, &["train", text(&config), "--memory", "6M", "--quiet"]);
    assert!(line.contains("train: expected at most"), "{line}");
}

/// A printed policy can be edited and given as settings.
#[test]
fn a_printed_policy_is_a_setting() {
    let temp = TempDir::new().unwrap();
    let config = settings(temp.path(), "fp32", "f32");
    let shown = succeed(&["train", "--show-policy", "nvfp4"]);
    assert!(shown.contains("arXiv 2509.25149") && shown.contains("[precision.wgrad]"), "{shown}");
    assert_eq!(json(&["train", "--show-policy", "nvfp4", "--json"])["policy"], "nvfp4");
    let run = fs::read_to_string(&config).unwrap();
    let (before, rest) = run.split_once("[precision]").unwrap();
    let after = rest.find("\n[").map_or("", |at| &rest[at..]);
    let policy = |table: &str| {
        fs::write(&config, format!("{before}{table}{after}")).unwrap();
        json(&["train", text(&config), "--dry-run", "--json"])["policy"].clone()
    };
    assert_eq!(policy(&shown), "nvfp4");
    assert_eq!(policy(&shown.replace("te-2d", "te")), "custom");
    fs::write(&config, format!("{before}{}{after}", shown.replace("order = 16", "order = 32"))).unwrap();
    let line = fail(2, &["train", text(&config), "--dry-run"]);
    assert!(line.contains("precision.wgrad.hadamard.order: expected 16 with signs"), "{line}");
    let line = fail(2, &["train", "--show-policy", "fp5"]);
    assert!(line.contains("nvfp4-4over6") && line.contains("bf16-pure-sr"), "{line}");
    let line = fail(2, &["train"]);
    assert!(line.contains("CONFIG"), "{line}");
}

/// For a model of some MB: every policy with every optimizer state.
#[test]
fn the_memory_of_a_run_matches_the_dry_run() {
    let temp = TempDir::new().unwrap();
    let config = settings(temp.path(), "fp32", "f32");
    let model = temp.path().join("config.json");
    let mut wide: Value = serde_json::from_slice(&fs::read(&model).unwrap()).unwrap();
    for (field, value) in [("hidden_size", 256), ("intermediate_size", 1024), ("num_key_value_heads", 4)] {
        wide[field] = value.into();
    }
    fs::write(&model, wide.to_string()).unwrap();
    let states: [&[&str]; 4] = [
        &["optimizer.moments=f32"],
        &["optimizer.moments=bf16"],
        &["optimizer.moments=8bit"],
        &["optimizer.kind=sgd"],
    ];
    // Recipes below 16 bits differ only in their operands, so each has one state.
    let mixed = ["fp32", "fp16", "bf16", "bf16-remainder", "bf16-pure", "bf16-pure-sr"];
    let recipes =
        ["fp8-delayed", "fp8-blockwise", "mxfp8", "nvfp4", "tetrajet2", "int8-switchback", "ternary"];
    let of_recipes = recipes.iter().map(|policy| (*policy, &states[..1]));
    let others: [&[&str]; 6] = [
        &["optimizer.kind=adafactor"],
        &["optimizer.kind=lion", "optimizer.moments=4bit"],
        &["optimizer.kind=muon"],
        &["optimizer.kind=soap"],
        &["optimizer.moments=fp8"],
        &["optimizer.paged=true"],
    ];
    let all = mixed.iter().map(|policy| (*policy, &states[..])).chain(of_recipes);
    let all = all.chain([("fp32", &others[..])]);
    let all = all.flat_map(|(policy, states)| states.iter().map(move |state| (policy, *state)));
    // Each policy of 16 bits and more and each state is among every third.
    for (policy, state) in sampled(all, 3) {
        let policy = format!("precision.policy={policy}");
        let mut arguments = vec!["train", text(&config), "--threads", "1", "--json", "--quiet"];
        for change in
            [&policy, "schedule.steps=1", "schedule.warmup=0"].into_iter().chain(state.iter().copied())
        {
            arguments.extend(["--set", change]);
        }
        let planned = json(&[&arguments[..], &["--dry-run"]].concat());
        let done = json(&[&arguments[..], &["--restart"]].concat());
        assert!(planned["memory"]["optimizer state"].is_u64(), "{planned}");
        let Some(measured) = done["measured_peak_memory"].as_f64() else {
            println!("skipped: the system does not say what memory a process has had");
            return;
        };
        let predicted = planned["predicted_peak_memory"].as_f64().unwrap();
        let ratio = measured / predicted;
        println!("{policy} {state:?}: {predicted:.3e} predicted, {measured:.3e} measured, {ratio:.3}");
        assert!((0.95..=1.05).contains(&ratio), "{policy} {state:?}: {planned} {done}");
    }
}

/// Limits the size of written files, raising the limit until the run succeeds; each run resumes from the last
/// checkpoint.
#[test]
fn a_full_disk_loses_nothing() {
    let whole = TempDir::new().unwrap();
    succeed(&["train", text(&settings(whole.path(), "bf16", "8bit")), "--threads", "1", "--quiet"]);
    let expected = result(whole.path());
    let checkpoint = fs::metadata(whole.path().join("run/checkpoints").join(&checkpoints(whole.path())[0]));
    // In blocks of 512 bytes.
    let needs = checkpoint.unwrap().len() / 512 + 1;
    let temp = TempDir::new().unwrap();
    let config = settings(temp.path(), "bf16", "8bit");
    let limited = |blocks: u64, more: &str| {
        let script = format!("trap '' XFSZ; ulimit -f {blocks}; exec \"$0\" \"$@\"");
        let mut command = Command::new("sh");
        command.args([
            "-c",
            &script,
            env!("CARGO_BIN_EXE_mantissa"),
            "train",
            text(&config),
            "--threads",
            "1",
            "--quiet",
        ]);
        command.arg(more).output().unwrap()
    };
    // Too small for a checkpoint: the first is not written, and no partial file is taken for one.
    let output = limited(needs / 2, "--restart");
    assert_eq!(output.status.code(), Some(3), "{}", stderr(&output));
    assert!(stderr(&output).contains("checkpoints/"), "names no path: {}", stderr(&output));
    assert_eq!(checkpoints(temp.path()), [""; 0]);
    // With some checkpoints present, a limit stops the next: the last stays whole.
    let mut child = start(&["train", text(&config), "--threads", "1", "--quiet", "--restart"]);
    while !temp.path().join("run/checkpoints").exists() || checkpoints(temp.path()).len() < 2 {
        if child.try_wait().unwrap().is_some() {
            assert_eq!(checkpoints(temp.path()).len(), 2, "ended by itself");
        }
        sleep(Duration::from_millis(2));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let before = checkpoints(temp.path());
    let output = limited(needs / 2, "--resume");
    if output.status.success() {
        println!("the run had ended before it was killed");
    } else {
        assert_eq!(output.status.code(), Some(3), "{}", stderr(&output));
        assert!(stderr(&output).contains(text(temp.path())), "names no path: {}", stderr(&output));
        assert_eq!(checkpoints(temp.path()), before);
    }
    succeed(&["train", text(&config), "--threads", "1", "--quiet", "--resume"]);
    assert!(result(temp.path()) == expected);
}

/// A stop also works within a step: the steps of this run take longer than the grace period.
#[test]
fn a_signal_ends_a_run_with_a_checkpoint_within_five_seconds() {
    let temp = TempDir::new().unwrap();
    let config = settings(temp.path(), "bf16", "f32");
    for (name, code) in [("INT", 130), ("TERM", 143)] {
        let long = ["--set", "data.accumulate=4000", "--set", "schedule.steps=1000", "--restart"];
        let mut child = start(&[&["train", text(&config), "--quiet"], &long[..]].concat());
        let about = temp.path().join("run/run.json");
        while !about.exists() {
            assert!(child.try_wait().unwrap().is_none(), "{name}: ended by itself");
            sleep(Duration::from_millis(5));
        }
        sleep(Duration::from_millis(300));
        let sent = Instant::now();
        let kill = Command::new("kill").args([&format!("-{name}"), &child.id().to_string()]).status();
        assert!(kill.unwrap().success());
        let output = child.wait_with_output().unwrap();
        let (took, said) = (sent.elapsed(), String::from_utf8_lossy(&output.stderr).into_owned());
        assert_eq!(output.status.code(), Some(code), "{said}");
        assert!(took < Duration::from_secs(5), "{name}: {took:?}");
        let resumes = "Interrupted. Rerun with --resume instead of --restart to resume.";
        assert!(said.contains(resumes), "{said}");
        assert_eq!(checkpoints(temp.path()).len(), 1, "{name}");
        fs::remove_file(about).unwrap();
    }
}

#[test]
fn weight_decay_groups_are_reported_before_a_run() {
    let temp = TempDir::new().unwrap();
    let config = settings(temp.path(), "fp32", "f32");
    let dry = |change: &str| json(&["train", text(&config), "--dry-run", "--json", "--set", change]);
    let names = |report: &Value, key: &str| {
        report[key]
            .as_array()
            .unwrap()
            .iter()
            .map(|name| name.as_str().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    let report = dry("optimizer.no_decay=[\"embeddings\", \"*.v_proj.weight\"]");
    let (decays, does_not) = (names(&report, "decay"), names(&report, "no_decay"));
    assert_eq!((decays.len(), does_not.len()), (2 * 6, 1 + 2 + 5), "{report}");
    assert!(does_not.contains(&"model.embed_tokens.weight".to_owned()) && report["optimizer"] == "adamw");
    let table = succeed(&["train", text(&config), "--dry-run"]);
    assert!(table.contains("model.layers.*.mlp.down_proj.weight"), "{table}");
    let paged = dry("optimizer={lr=1e-3, paged=true}");
    let state = |report: &Value| report["memory"]["optimizer state"].as_u64().unwrap();
    assert_eq!(state(&paged), 0, "every moment is in the file: {paged}");
    assert!(paged["paged"].as_u64().unwrap() > state(&report) / 2, "{paged}");
    let wrong = ["train", text(&config), "--dry-run", "--set", "optimizer.decay=[\"matrix\"]"];
    let line = fail(2, &wrong);
    assert!(
        line.contains("run.toml: optimizer.decay: expected linears") && line.contains("got \"matrix\""),
        "{line}"
    );
}

/// Every drawing says its content, every heading of a table names what it is the heading of.
fn drawings_and_tables_are_labelled(page: &str) {
    for drawing in page.split("<svg ").skip(1) {
        let tag = drawing.split('>').next().unwrap();
        assert!(tag.contains("aria-label=") || tag.contains("aria-hidden=\"true\""), "{tag}");
        let content = drawing.split("</svg>").next().unwrap();
        assert!(["<path", "<circle", "<rect"].iter().any(|part| content.contains(part)), "empty: {tag}");
    }
    for heading in page.split("<th ").skip(1) {
        assert!(heading.starts_with("scope=\""), "{heading:.60}");
    }
    assert!(!page.contains("<th>"), "a heading without scope");
}

#[test]
fn a_page_shows_a_run_and_an_artifact() {
    let temp = TempDir::new().unwrap();
    let config = settings(temp.path(), "fp16", "f32");
    let line = fail(2, &["report", text(temp.path())]);
    assert!(line.contains("log.jsonl") && line.contains("quality.json"), "{line}");
    let said = succeed(&["train", text(&config), "--quiet"]);
    let run = temp.path().join("run");
    assert!(said.ends_with(&format!("next        mantissa report {}\n", text(&run))), "{said}");
    // A page of the same run replaces the earlier one, whatever the options.
    let first = succeed(&["report", text(&run)]);
    assert!(first.starts_with("run         Done: 40 of 40 steps; loss"), "{first}");
    let made = json(&["report", text(&run), "--json"]);
    let page = fs::read_to_string(made["report"].as_str().unwrap()).unwrap();
    assert_eq!(made["report"].as_str().unwrap(), text(&run.join("report.html")));
    for part in [
        "<title>Training run run</title>",
        "Gradient norm",
        "Loss scale",
        "40 of 40 steps; loss",
        " skipped.</p>",
        "<summary>Curves of each module (",
        "Weights changed by an update",
        "<summary>model.layers.1.mlp.down_proj</summary>",
        "dgrad dy (f16)",
        "optimizer state",
        "[optimizer]",
        "<p class=\"lead\">Done: ",
    ] {
        assert!(page.contains(part), "{part}");
    }
    assert!(!page.contains("://") && !page.contains("<script"), "asks for nothing");
    assert_eq!(page.matches("<svg").count(), page.matches("</svg>").count());
    drawings_and_tables_are_labelled(&page);
    // Telemetry of steps 1, 10, 20, 30, 40.
    let telemetry = fs::read_to_string(run.join("telemetry.jsonl")).unwrap();
    assert_eq!(telemetry.lines().count(), 5);
    // Damaged logs are reported with their line.
    let log = fs::read_to_string(run.join("log.jsonl")).unwrap();
    fs::write(run.join("log.jsonl"), log.replacen("{", "[", 1)).unwrap();
    assert!(fail(2, &["report", text(&run)]).contains("log.jsonl: line 1: expected"));

    let out = temp.path().join("<out>");
    let model = run.join("model");
    succeed(&["quantize", text(&model), "--recipe", "rtn-int4-g32", "--out", text(&out), "--quiet"]);
    let made = json(&["report", text(&out), "--json"]);
    assert_eq!(made["kind"], "artifact");
    assert!(made["report"].as_str().unwrap().ends_with("<out>.report.html"), "{made}");
    let page = fs::read_to_string(made["report"].as_str().unwrap()).unwrap();
    assert!(page.contains("Quantized model &lt;out&gt;") && page.contains("model.layers.0.mlp.down_proj"));
    assert!(page.contains("rtn-int4-g32") && !page.contains("<out>"));
    assert!(
        page.contains("Quality loss not measured. Size ") && page.contains("--reference SOURCE"),
        "{page}"
    );
    drawings_and_tables_are_labelled(&page);
    // The model is unchanged.
    let output = mantissa(&["verify", text(&out), "--quiet"]);
    assert!(output.status.success(), "{}", stderr(&output));
}

/// A run with learned scales also writes the model that its forward multiplied by, and refuses what cannot learn them.
#[test]
fn learned_scales_are_written_as_a_quantized_model() {
    let temp = TempDir::new().unwrap();
    let config = settings(temp.path(), "fp32", "f32");
    let weight =
        |scheme: &str| format!("precision.fprop.w={{ scheme = \"{scheme}\", scales = \"learned\" }}");
    let ste = "precision.dgrad.w={ scheme = \"f32\", source = \"forward\" }";
    let (int3, asym) = (weight("int3-g32"), weight("int4-g32-asym"));
    let few = ["train", text(&config), "--quiet", "--json", "--set", "schedule.steps=12", "--set", &int3];
    let done = json(&[&few[..], &["--set", ste, "--set", "precision.kv=int8-head"]].concat());
    let kl = done["quantized_kl"].as_f64().unwrap();
    assert!(kl.abs() < 0.01, "{done}");
    let (model, quantized) = (temp.path().join("run/model"), temp.path().join("run/quantized"));
    assert_eq!(json(&["inspect", text(&model), "--json"])["convention"], "dense");
    let summary = succeed(&["inspect", text(&quantized)]);
    assert!(summary.contains("train (12 steps), then quantize lsq-int3-g32"), "{summary}");
    succeed(&["verify", text(&quantized), "--reference", text(&model), "--quiet"]);
    let names = mantissa_store::SafeTensors::open(&model.join("model.safetensors")).unwrap();
    assert!(names.tensors().iter().all(|tensor| !tensor.name.ends_with("weight_scale")));
    let line = fail(2, &[&few[..], &["--set", "out=b"]].concat());
    assert!(line.contains("precision.dgrad.w.source") && line.contains("fix: dgrad.w = {"), "{line}");
    let line = fail(2, &[&few[..], &["--set", "out=b", "--set", &asym, "--set", ste]].concat());
    assert!(line.contains("precision.fprop.w: expected a symmetric scheme"), "{line}");
    let line =
        fail(2, &[&few[..], &["--set", "out=b", "--set", ste, "--set", "precision.kv=nuq4-1%"]].concat());
    assert!(line.contains("precision.kv: expected a policy without calibrated levels"), "{line}");
}

/// Data-free QAT: the text is generated by the initial model, whose predictions are learned; the run resumes.
#[test]
fn a_model_is_distilled_on_text_that_it_generates() {
    let temp = TempDir::new().unwrap();
    let config = settings(temp.path(), "fp32", "f32");
    let few = ["train", text(&config), "--quiet", "--json", "--set", "schedule.warmup=1"];
    json(&[&few[..], &["--set", "schedule.steps=10"]].concat());
    let more = [
        "--set",
        "model.init=run/model",
        "--set",
        "out=free",
        "--set",
        "data.files=[]",
        "--set",
        "distill.generated=24",
        "--set",
        "precision.fprop.w=\"int2-g32\"",
        "--set",
        "optimizer.lr=1e-3",
        "--set",
        "precision.dgrad.w={ scheme = \"f32\", source = \"forward\" }",
        "--set",
        "schedule.steps=14",
    ];
    let planned = json(&[&few[..], &more, &["--dry-run"]].concat());
    assert!(planned["memory"]["teacher"].as_u64().unwrap() > 10_000, "{planned}");
    json(&[&few[..], &more].concat());
    let free = temp.path().join("free");
    let log = fs::read_to_string(free.join("log.jsonl")).unwrap();
    let lines: Vec<Value> = log.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let loss = |i: usize| lines[i]["loss"].as_f64().unwrap();
    assert!((0..14).all(|step| loss(step) > 0.0 && loss(step) < 1.0), "{log}");
    // Another run of the same settings has the same text and losses.
    json(&[&few[..], &more, &["--set", "out=again", "--threads", "2"]].concat());
    let again = fs::read(temp.path().join("again/model/model.safetensors")).unwrap();
    assert!(again == fs::read(free.join("model/model.safetensors")).unwrap());
    for (change, expected) in [
        ("data.chat=true", "distill.generated: expected 0 with data.chat"),
        ("validation.share=0.1", "validation.share: expected 0 with distill.generated"),
    ] {
        let line = fail(2, &[&few[..], &more, &["--set", "out=c", "--set", change]].concat());
        assert!(line.contains(expected), "{line}");
    }
    let line = fail(2, &[&few[..], &["--set", "out=c", "--set", "distill.generated=2"]].concat());
    assert!(line.contains("model.init: expected the teacher, with [distill]"), "{line}");
}

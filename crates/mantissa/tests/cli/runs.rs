//! Runs side by side: comparison, pages of runs that live and that were stopped, event files, kinds, and other data sets.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

use crate::stops::signal;
use crate::support::{command, fail, json, mantissa, root, stderr, succeed, text};

/// Writes the settings of a small run of `steps` steps.
fn settings(dir: &Path, steps: u64) -> PathBuf {
    let stories = fs::read_to_string(root().join("crates/mantissa-jobs/demo/text/stories.txt")).unwrap();
    fs::write(dir.join("my.txt"), stories.chars().take(12_000).collect::<String>()).unwrap();
    let mut printed = succeed(&["train", "--init", "small", "--data", "my.txt"]);
    for (from, to) in [
        ("hidden_size = 128", "hidden_size = 32"),
        ("intermediate_size = 384", "intermediate_size = 64"),
        ("num_hidden_layers = 4", "num_hidden_layers = 2"),
        ("vocab_size = 1024", "vocab_size = 300"),
        ("length = 128", "length = 32"),
        ("batch = 8 ", "batch = 2 "),
        ("steps = 1000", &format!("steps = {steps}")),
        ("warmup = 50", "warmup = 2"),
        ("every = 100", "every = 4"),
        ("prompts = [\"The\"]", "prompts = []"),
    ] {
        assert!(printed.contains(from), "{from}: {printed}");
        printed = printed.replace(from, to);
    }
    let path = dir.join("run.toml");
    fs::write(&path, printed).unwrap();
    path
}

/// Trains with these changes; returns standard error.
fn train(config: &Path, changes: &[&str], more: &[&str]) -> String {
    let set = changes.iter().flat_map(|change| ["--set", change]);
    let arguments: Vec<&str> =
        ["train", text(config)].into_iter().chain(set).chain(more.iter().copied()).collect();
    let output = mantissa(&arguments);
    assert!(output.status.success(), "{arguments:?}: {}", stderr(&output));
    stderr(&output)
}

#[test]
fn runs_are_compared_on_one_page() {
    let temp = TempDir::new().unwrap();
    let config = settings(temp.path(), 8);
    train(&config, &["out=a"], &["--quiet"]);
    train(&config, &["out=b", "precision.policy=fp8-rowwise", "optimizer.lr=1e-3"], &["--quiet"]);
    let runs = ["a", "b"].map(|run| temp.path().join(run));
    let page = temp.path().join("both.html");
    let compare = ["report", text(&runs[0]), text(&runs[1]), "--out", text(&page)];
    let said = succeed(&compare);
    for part in [
        "least validation loss: ",
        "precision.policy",
        "\"fp8-rowwise\"",
        "optimizer.lr",
        "8 steps",
        "fp8-rowwise",
    ] {
        let part = part.trim_start_matches("8 ");
        assert!(said.contains(part), "{part}: {said}");
    }
    let words = |said: &str| said.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words(&said).contains("one seed each, so noise is not measured"), "{said}");
    let html = fs::read_to_string(&page).unwrap();
    for part in [
        "one seed each, so noise is not measured",
        "Loss, smoothed, by tokens",
        "Validation loss",
        "Settings that differ",
        "optimizer.lr",
    ] {
        assert!(html.contains(part), "{part}");
    }
    // Both runs are in every legend; finished runs do not change.
    assert!(!html.contains("http-equiv=\"refresh\"") && !html.contains("<script"), "{html}");
    let report = json(&[&compare[..], &["--json"]].concat());
    assert_eq!((&report["kind"], report["runs"].as_array().unwrap().len()), (&"comparison".into(), 2));
    let keys: Vec<_> = report["differences"].as_array().unwrap().iter().map(|d| d["key"].clone()).collect();
    assert_eq!(keys, ["optimizer.lr", "precision.policy"]);
    assert!(report["runs"][0]["validation_loss"].as_f64().unwrap() > 0.0, "{report}");
    assert_eq!(report["runs"][1]["state"], "done");
    let line = fail(2, &["report", text(&runs[0]), text(temp.path())]);
    assert!(line.contains("the folder of a training run, beside other runs"), "{line}");
    // A folder of runs is answered with all of them.
    let line = fail(2, &["report", text(temp.path())]);
    assert!(line.contains("a folder with 2 of them; fix: mantissa report "), "{line}");
    assert!(runs.iter().all(|run| line.contains(text(run))), "{line}");
    let line = fail(2, &["report", text(&runs[0]), text(&runs[1]), "--prompt", "a"]);
    assert!(line.contains("--prompt"), "{line}");
    // A run more on the same page, which is not that of a run, an edited one or a stranger's.
    train(&config, &["out=c", "seed=9"], &["--quiet"]);
    let third = temp.path().join("c");
    for all in [&[text(&runs[0]), text(&runs[1]), text(&third)][..], &[text(&third), text(&runs[0])]] {
        succeed(&[&["report"][..], all].concat());
        succeed(&[&["report"][..], all, &["--out", text(&page)]].concat());
    }
    let said = succeed(&["report", text(&runs[0]), text(&third)]);
    assert!(words(&said).contains("by the seed alone, losses differ by up to 0."), "{said}");
    succeed(&["report", text(&third), text(&runs[0])]);
    let place = temp.path().join("comparison.report.html");
    let html = fs::read_to_string(&place).unwrap();
    assert!(html.contains("Training runs c, a"), "{html}");
    let line = fail(2, &["report", text(&runs[0]), "--out", text(&place)]);
    assert!(line.contains("a file that this job did not write"), "{line}");
    // The run that is missing is named, not the page.
    let line = fail(2, &["report", text(&runs[0]), text(&temp.path().join("nope"))]);
    assert!(
        line.contains("nope: expected the folder of a training run") && line.contains("no such folder"),
        "{line}"
    );
    fs::write(&place, html + "<!-- my notes -->").unwrap();
    let line = fail(2, &["report", text(&runs[0]), text(&third)]);
    assert!(line.contains("a file that this job did not write"), "{line}");
    let nine = vec![text(&runs[0]); 9];
    assert!(fail(2, &[&["report"][..], &nine].concat()).contains("at most 8 to compare"));
}

/// Waits until the log of a run has so many lines.
fn wait_for(run: &Path, lines: usize) {
    let begin = Instant::now();
    let has = || fs::read_to_string(run.join("log.jsonl")).unwrap_or_default().lines().count();
    while has() < lines {
        assert!(begin.elapsed() < Duration::from_secs(120), "{} of {lines} lines", has());
        sleep(Duration::from_millis(20));
    }
}

/// The page knows from the lock whether a run lives, and says how to resume one that was stopped.
#[test]
fn pages_of_runs_tell_whether_they_live() {
    let temp = TempDir::new().unwrap();
    let config = settings(temp.path(), 100_000);
    let (run, page) = (temp.path().join("live"), temp.path().join("page.html"));
    let mut child = command()
        .args(["train", text(&config), "--set", "out=live", "--quiet"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    wait_for(&run, 5);
    let report = ["report", text(&run), "--out", text(&page)];
    let said = succeed(&report).replace('\n', " ");
    assert!(said.contains("Running in process "), "{said}");
    let html = || fs::read_to_string(&page).unwrap();
    assert!(html().contains("<meta http-equiv=\"refresh\" content=\"10\">"), "it loads itself");
    assert_eq!(json(&[&report[..], &["--json"]].concat())["state"], "running");
    // One that follows ends with the run, and leaves a page that does not load itself.
    let follower = command().args(report).arg("--follow").stdout(Stdio::piped()).spawn().unwrap();
    sleep(Duration::from_millis(300));
    signal(&child, "INT");
    assert!(!child.wait().unwrap().success());
    let followed = follower.wait_with_output().unwrap();
    assert!(followed.status.success());
    let said = String::from_utf8(followed.stdout).unwrap().replace('\n', " ");
    let said: String = said.split_whitespace().collect::<Vec<_>>().join(" ");
    for part in ["Stopped at step ", "to resume ", "rerun the command that began it (mantissa train "] {
        assert!(said.contains(part), "{part}: {said}");
    }
    assert!(!html().contains("http-equiv=\"refresh\""));
    // Killed: the description still says that it runs.
    let mut child = command()
        .args(["train", text(&config), "--set", "out=live", "--quiet"])
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let before = fs::read_to_string(run.join("log.jsonl")).unwrap().lines().count();
    wait_for(&run, before + 3);
    child.kill().unwrap();
    child.wait().unwrap();
    let report = json(&[&report[..], &["--json"]].concat());
    assert_eq!(report["state"], "killed", "{report}");
    assert!(!html().contains("http-equiv=\"refresh\""));
}

/// A resumed run says where it goes on, and continues its event files without writing a step twice.
#[test]
fn event_files_are_continued() {
    let temp = TempDir::new().unwrap();
    let config = settings(temp.path(), 100_000);
    let (run, events) = (temp.path().join("first"), temp.path().join("tb"));
    let file = events.join("first/events.out.tfevents.0.mantissa");
    let begin = |more: &[&str]| {
        let arguments = ["train", text(&config), "--set", "out=first", "--tensorboard", text(&events)];
        command().args(arguments).args(more).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let stop = |child: std::process::Child| {
        signal(&child, "INT");
        stderr(&child.wait_with_output().unwrap())
    };
    let child = begin(&[]);
    wait_for(&run, 6);
    stop(child);
    let first = fs::read(&file).unwrap();
    let lines = fs::read_to_string(run.join("log.jsonl")).unwrap().lines().count();
    let child = begin(&[]);
    wait_for(&run, lines + 6);
    let said = stop(child);
    assert!(said.contains(&format!("resumed at step {lines} of 100000: ")), "{said}");
    let second = fs::read(&file).unwrap();
    assert!(second.starts_with(&first) && second.len() > first.len(), "it is continued");
    // Steps of the file are those of the log: each record of a step has its tag once.
    let count =
        |bytes: &[u8], tag: &str| bytes.windows(tag.len()).filter(|window| *window == tag.as_bytes()).count();
    let log: Vec<Value> = fs::read_to_string(run.join("log.jsonl"))
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let done = log.iter().filter(|line| line["pending"] != true).count();
    assert_eq!(count(&second, "train/loss") - count(&second, "train/loss_scale"), done);
    let validated = log.iter().filter(|line| line["validation_loss"].is_number()).count();
    assert_eq!(count(&second, "validation/loss"), validated);
    // The events of another run of this name stay.
    let other = settings(
        &{
            let dir = temp.path().join("other");
            fs::create_dir(&dir).unwrap();
            dir
        },
        2,
    );
    let line =
        fail(2, &["train", text(&other), "--set", "out=first", "--tensorboard", text(&events), "--quiet"]);
    assert!(line.contains("events that this job did not write"), "{line}");
    assert_eq!(fs::read(&file).unwrap(), second);
}

/// What `--init` prints names every key of its kinds; another kind takes its own.
#[test]
fn kinds_change_on_printed_settings() {
    let temp = TempDir::new().unwrap();
    let config = settings(temp.path(), 2);
    let said = train(&config, &["out=lion", "optimizer.kind=lion"], &[]);
    assert!(said.contains("optimizer.kind = \"lion\": left out eps = 1e-8, adamw's default"), "{said}");
    assert!(fs::read_to_string(temp.path().join("lion/config.toml")).unwrap().contains("beta2 = 0.99"));
    for kind in ["sgd", "adafactor", "muon", "soap"] {
        let kind = format!("optimizer.kind={kind}");
        succeed(&["train", text(&config), "--set", &kind, "--dry-run", "--quiet"]);
    }
    for change in ["schedule.kind=constant", "schedule.kind=linear", "precision.policy=fp16"] {
        succeed(&["train", text(&config), "--set", change, "--dry-run", "--quiet"]);
    }
    let own = fs::read_to_string(&config).unwrap().replace("eps = 1e-8", "eps = 1e-6");
    fs::write(&config, own).unwrap();
    let line = fail(2, &["train", text(&config), "--set", "optimizer.kind=lion", "--dry-run"]);
    assert!(line.contains("optimizer.eps = 1e-6") && line.contains("\"lion\""), "{line}");
}

/// Fine-tunes the embedded model on a file; returns the report and standard error.
fn finetune(dir: &Path, name: &str, out: &str, more: &[&str]) -> Value {
    let (data, out) = (dir.join(name), dir.join(out));
    let own =
        ["finetune", "demo", "--data", text(&data), "--out", text(&out), "--length", "64", "--batch", "1"];
    json(&[&own[..], &["--steps", "2", "--json", "--quiet"], more].concat())
}

#[test]
fn data_sets_of_others_are_read() {
    let temp = TempDir::new().unwrap();
    let dir = temp.path();
    let alpaca = r#"{"instruction": "Who is there?", "input": "", "output": "Long live the king!"}"#;
    let sharegpt = r#"{"conversations": [{"from": "human", "value": "Who is there?"}, {"from": "gpt", "value": "Long live the king!"}]}"#;
    let openai = r#"{"messages": [{"role": "user", "content": "Who is there?"}, {"role": "assistant", "content": "Long live the king!"}]}"#;
    fs::write(dir.join("a.jsonl"), format!("\u{feff}{alpaca}\n{alpaca}\n")).unwrap();
    fs::write(dir.join("a.json"), format!("\u{feff}[\n  {alpaca},\n  {alpaca}\n]\n")).unwrap();
    fs::write(dir.join("s.json"), format!("[{sharegpt},{sharegpt}]")).unwrap();
    fs::write(dir.join("m.jsonl"), format!("{openai}\n{openai}\n")).unwrap();
    let reference = finetune(dir, "m.jsonl", "m", &[]);
    assert_eq!(reference["data"]["conversations"], 2, "{reference}");
    for (file, out) in [("a.jsonl", "al"), ("a.json", "aj"), ("s.json", "sj")] {
        let report = finetune(dir, file, out, &[]);
        assert_eq!((&report["data"], &report["loss"]), (&reference["data"], &reference["loss"]), "{file}");
    }
    let (trainable, all) = (&reference["trainable_parameters"], &reference["parameters"]);
    assert!(trainable.as_u64().unwrap() > 1000 && trainable.as_u64() < all.as_u64(), "{reference}");
    let refused = |name: &str, content: &str| {
        fs::write(dir.join(name), content).unwrap();
        let out = dir.join("none");
        let line =
            fail(2, &["finetune", "demo", "--data", text(&dir.join(name)), "--out", text(&out), "--quiet"]);
        assert!(!out.exists(), "{line}");
        line
    };
    for (name, content, part) in [
        ("t.csv", "instruction,output\na,b\n", "read_csv("),
        ("t.parquet", "PAR1", "read_parquet("),
        (
            "bad.jsonl",
            r#"{"messages": [{"role": "user"}]}"#,
            "line 1: messages[0].content: expected a text, got no such field",
        ),
        (
            "bad.json",
            r#"[{"instruction": "a", "output": "b"}, {"instruction": "a"}]"#,
            "item 2: output: expected a text",
        ),
        ("bad2.jsonl", r#"{"question": "a"}"#, "the fields \"question\""),
        ("text.jsonl", r#"{"text": ["a"]}"#, "text: expected a text, got a list"),
    ] {
        let line = refused(name, content);
        assert!(line.contains(part) && line.contains(name), "{name}: {line}");
    }
    // The terminal says how much trains.
    let (data, out) = (dir.join("a.jsonl"), dir.join("said"));
    let own =
        ["finetune", "demo", "--data", text(&data), "--out", text(&out), "--length", "64", "--batch", "1"];
    let output = mantissa(&[&own[..], &["--steps", "1"]].concat());
    assert!(
        stderr(&output).contains("training ") && stderr(&output).contains(" parameters ("),
        "{}",
        stderr(&output)
    );
    assert!(String::from_utf8(output.stdout).unwrap().contains("trainable   "));
}

/// An installed program has no folder `docs`: messages name a command that shows the page.
#[test]
fn pages_of_the_documentation_are_shown() {
    let page = succeed(&["help", "results/weights"]);
    assert_eq!(page, fs::read_to_string(root().join("docs/results/weights.md")).unwrap());
    assert!(succeed(&["help", "docs"]).contains("mantissa help reference/training"));
    assert!(succeed(&["help", "gpus"]).contains("rtx4090"));
    assert!(succeed(&["help", "plan"]).contains("mantissa plan"), "a command comes first");
    for arguments in [
        &["plan", "--params", "8B", "--hardware", "h100"][..],
        &["explain", "stochastic-rounding"],
        &["recipes", "q4_k_m"],
        &["schemes", "int4-g128"],
        &["explain", "corrections"],
    ] {
        let output = mantissa(arguments);
        let said = String::from_utf8(output.stdout).unwrap();
        assert!(!said.contains("docs/"), "{arguments:?}: {said}");
    }
    let line = fail(2, &["lint", "demo", "--for", "vllm:gpu=h1000"]);
    assert!(line.contains("mantissa help gpus lists all"), "{line}");
}

//! `mantissa run`: engines, prompts from standard input, conversations, speculation.

use std::io::Write;
use std::process::Stdio;

use serde_json::{Value, json};

use crate::chat;
use crate::support::{command, fail, json as run_json, root, stderr, succeed, text};

/// Runs the binary with `input` on standard input: standard output and standard error.
fn with_input(arguments: &[&str], input: &str) -> (String, String) {
    let mut child = command();
    let child = child.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = child.spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    (String::from_utf8(output.stdout.clone()).unwrap(), stderr(&output))
}

/// A folder, a GGUF file made of it, and a folder made of that stop at the same token, whichever file states it.
#[test]
fn a_model_stops_at_the_same_token_in_every_format() {
    let dir = tempfile::tempdir().unwrap();
    let place = |name: &str| dir.path().join(name);
    let (model, gguf, back) = (place("m"), place("m.gguf"), place("back"));
    std::fs::create_dir(&model).unwrap();
    for file in std::fs::read_dir(root().join("crates/mantissa-jobs/demo/model")).unwrap() {
        let file = file.unwrap().path();
        std::fs::copy(&file, model.join(file.file_name().unwrap())).unwrap();
    }
    let run = |model: &std::path::Path| {
        run_json(&["run", text(model), "-p", "Once upon a time", "-n", "20", "--json", "--quiet"])
    };
    // A token of the text that no config names, new in the text.
    let whole = run(&model);
    let tokens = whole["tokens"].as_array().unwrap();
    let at = (4..tokens.len()).find(|&n| !tokens[..n].contains(&tokens[n])).unwrap();
    let end = &tokens[at];
    std::fs::write(model.join("generation_config.json"), json!({ "eos_token_id": [end] }).to_string())
        .unwrap();
    let stopped = run(&model);
    assert_eq!(stopped["tokens"].as_array().unwrap(), &tokens[..at], "{stopped}");
    succeed(&["convert", text(&model), "--format", "gguf", "--out", text(&gguf), "--quiet"]);
    assert_eq!(run(&gguf)["text"], stopped["text"]);
    succeed(&["quantize", text(&gguf), "--recipe", "w8a16", "--out", text(&back), "--quiet"]);
    let listed = run_json(&["inspect", text(&back), "--json"])["end_tokens"].clone();
    assert!(listed.as_array().unwrap().iter().any(|token| token["id"] == *end), "{listed}");
}

#[test]
fn the_prompt_may_come_from_standard_input() {
    let expected = run_json(&["run", "demo", "-p", "Once upon\na time", "-n", "8", "--json", "--quiet"]);
    for arguments in [
        &["run", "demo", "-p", "-", "-n", "8", "--json", "--quiet"][..],
        &["run", "demo", "-n", "8", "--json", "--quiet"],
    ] {
        for input in ["Once upon\na time", "Once upon\na time\n", "Once upon\na time\r\n"] {
            let found: Value = serde_json::from_str(&with_input(arguments, input).0).unwrap();
            assert_eq!((&found["tokens"], &found["prompt"]), (&expected["tokens"], &expected["prompt"]));
        }
    }
}

/// A chat model that continues what is piped into it looks as if it ignored it.
#[test]
fn a_piped_prompt_of_a_chat_model_is_told_to_be_no_message() {
    let words = "continued as a text; the model has a chat template: --chat";
    assert!(with_input(&["run", "demo", "-n", "4"], "Once").1.contains(words));
    for arguments in [&["run", "demo", "-n", "4", "--chat"][..], &["run", "demo", "-n", "4", "-p", "-"]] {
        let said = with_input(arguments, "Once").1;
        assert!(!said.contains(words), "{arguments:?}: {said}");
    }
}

#[test]
fn speed_is_told_and_reported() {
    let report = run_json(&["run", "demo", "-p", "Once upon a time", "-n", "40", "--json", "--quiet"]);
    assert_eq!(report["engine"], "fast");
    for field in ["prefill_tokens_per_s", "tokens_per_second", "load_seconds"] {
        assert!(report[field].as_f64().unwrap() > 0.0, "{field}");
    }
    let (story, notes) = with_input(&["run", "demo", "-n", "40"], "Once upon a time");
    assert!(
        story.len() > 40 && notes.contains("prefill 5 tokens, ") && notes.contains("; decode 40 tokens, ")
    );
}

#[test]
fn bench_tells_speed_limits_and_kernels() {
    let arguments =
        ["bench", "demo", "--prompt", "32", "--gen", "6", "--reps", "1", "--depth", "0,40", "--batch", "1,2"];
    let report = run_json(&[&arguments[..], &["--kv", "int8", "--explain", "--json", "--quiet"]].concat());
    for field in [
        "pp_tokens_per_s",
        "tg_tokens_per_s",
        "read_gb_per_s",
        "machine_read_gb_per_s",
        "tg_share_of_bandwidth",
        "load_s",
        "load_to_first_token_s",
    ] {
        assert!(report[field].as_f64().unwrap() > 0.0, "{field}");
    }
    let runs: Vec<_> =
        report["runs"].as_array().unwrap().iter().map(|run| (&run["depth"], &run["batch"])).collect();
    assert_eq!(
        runs,
        [(&json!(0), &json!(1)), (&json!(0), &json!(2)), (&json!(40), &json!(1)), (&json!(40), &json!(2))]
    );
    let kernels = report["kernels"].as_array().unwrap();
    assert!(kernels.iter().all(|row| row["fallback"].is_null() && row["bytes"].as_u64().unwrap() > 0));
    let table = with_input(&["bench", "demo", "--prompt", "16", "--gen", "4", "--reps", "1"], "").0;
    assert!(table.contains("of bandwidth") && table.contains("This machine"), "{table}");
}

/// Greedy text of the demo model is the same on both engines, as far as it is told apart here.
#[test]
fn both_engines_run() {
    let run = |more: &[&str]| {
        run_json(
            &[&["run", "demo", "-p", "Once upon a time", "-n", "12", "--json", "--quiet"], more].concat(),
        )
    };
    let (fast, reference) = (run(&[]), run(&["--engine", "reference"]));
    assert_eq!((&reference["engine"], reference.get("speculation")), (&"reference".into(), None));
    assert_eq!(fast["tokens"].as_array().unwrap()[..4], reference["tokens"].as_array().unwrap()[..4]);
    assert_eq!(run(&["--speculate", "off"])["tokens"], fast["tokens"]);
    assert_eq!(run(&["--threads", "1"])["tokens"], fast["tokens"]);
}

#[test]
fn a_draft_model_proposes_and_changes_nothing() {
    let run = |more: &[&str]| {
        run_json(
            &[&["run", "demo", "-p", "Once upon a time", "-n", "60", "--json", "--quiet"], more].concat(),
        )
    };
    let (plain, drafted) = (run(&[]), run(&["--draft", "demo"]));
    assert_eq!(plain["tokens"], drafted["tokens"]);
    let tiny = root().join("tests/data/tiny/llama2-gqa-tied");
    let line = fail(2, &["run", "demo", "-p", "a", "-n", "2", "--draft", text(&tiny)]);
    assert!(line.contains("--draft") && line.contains("expected"), "{line}");
}

#[test]
fn a_conversation_reuses_its_beginning() {
    let temp = tempfile::tempdir().unwrap();
    let template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}";
    let folder = chat::model(temp.path(), &json!(template));
    let arguments = ["run", &folder, "--interactive", "-n", "4", "--system", "Be kind."];
    let (answers, notes) = with_input(&arguments, "Hi\n\nAnd you?\n/exit\nnot read\n");
    assert_eq!(notes.matches("prefill").count(), 2, "{notes}");
    assert!(!answers.is_empty());
    assert!(fail(2, &["run", &folder, "--interactive", "--json"]).contains("--interactive"));
    assert!(fail(2, &["run", &folder, "-p", "a", "--system", "b"]).contains("--chat"));
}

/// The prompt may follow the model, and the model may follow `-m`, as in llama.cpp and Ollama.
#[test]
fn model_and_prompt_are_taken_as_other_programs_do() {
    let run = |arguments: &[&str]| {
        run_json(&[arguments, &["-n", "4", "--json", "--quiet"]].concat())["tokens"].clone()
    };
    let expected = run(&["run", "demo", "-p", "Once upon a time"]);
    assert_eq!(run(&["run", "demo", "Once upon a time"]), expected);
    assert_eq!(run(&["run", "-m", "demo", "-p", "Once upon a time"]), expected);
    assert_eq!(run(&["run", "-m", "demo", "Once upon a time"]), expected);
    assert!(fail(2, &["run", "demo", "a", "-p", "b"]).contains("cannot be used with"));
}

/// After `/clear` the same message has the same greedy answer, after the same number of computed tokens.
#[test]
fn a_conversation_has_commands() {
    let lines = "A dog ran.\n/help\nIt sat.\n/clear\nA dog ran.\n/bye\nnot read\n";
    let (story, notes) = with_input(&["run", "demo", "--interactive", "-n", "9", "-c", "128"], lines);
    let answers: Vec<&str> = story.lines().collect();
    assert_eq!((answers.len(), answers[0]), (3, answers[2]), "{story}");
    assert!(notes.contains("/clear: forget") && notes.contains("/exit, /bye"), "{notes}");
    assert_eq!(notes.matches("prefill").count(), 3, "{notes}");
}

/// The demo model has a template that joins messages to one story. Its tokens are computed once, and the oldest
/// messages go when its context of 512 tokens is full.
#[test]
fn the_demo_model_continues_a_story_by_turns() {
    let lines = "Once upon a time, there was a red dog.\nHe saw a frog.\nThe frog said hello.\n";
    let (story, notes) = with_input(&["run", "demo", "--interactive", "-n", "80"], lines);
    assert!(story.lines().count() >= 3 && notes.contains("story model"), "{notes}");
    let computed: Vec<usize> = notes
        .lines()
        .filter_map(|line| line.strip_prefix("prefill ")?.split(' ').next()?.parse().ok())
        .collect();
    // Blocks of 64 tokens are shared, of which at least 17 tokens are left: the first of the second turn's 100 tokens.
    assert!(computed.len() == 3 && computed[1] < 64 && computed[2] < 64, "{notes}");
    let report = run_json(&["run", "demo", "--chat", "-n", "2", "-p", "A dog", "--json", "--quiet"]);
    assert_eq!(report["rendered"], "<|begin|>A dog");
    let report =
        run_json(&["run", "demo", "--chat", "--system", "Hi.", "-n", "2", "-p", "A", "--json", "--quiet"]);
    assert_eq!(report["rendered"], "<|begin|>Hi. A");
    let (_, notes) =
        with_input(&["run", "demo", "--interactive", "-n", "120"], &"Then they saw a frog.\n".repeat(8));
    assert!(
        notes.contains("context of 512 tokens is full") && notes.matches("prefill").count() == 8,
        "{notes}"
    );
    let (_, notes) = with_input(
        &["run", "demo", "--interactive", "-n", "9", "--engine", "reference"],
        "A dog ran.\nIt sat.\n",
    );
    assert_eq!(notes.matches("prefill").count(), 2, "{notes}");
}

#[test]
fn the_cost_of_the_fast_engine_is_measured() {
    let eval = |more: &[&str]| {
        let common =
            ["eval", "demo", "--reference", "demo", "--text", "default", "--context", "64", "--limit", "512"];
        run_json(&[&common[..], &["--engine", "fast", "--json", "--quiet"], more].concat())
    };
    let (plain, narrow) = (eval(&[]), eval(&["--kv", "int4-head-asym"]));
    let kl = |report: &Value| report["kl"].as_f64().unwrap();
    assert!(kl(&plain) < 1e-3 && kl(&narrow) > kl(&plain), "{} {}", kl(&plain), kl(&narrow));
    assert_eq!(plain["engine"], "fast");
    let decoded = eval(&["--prefill", "16"]);
    assert!(kl(&decoded) < 1e-3, "{}", kl(&decoded));
    let line = fail(2, &["eval", "demo", "--text", "default", "--engine", "fast", "--accumulator", "hopper"]);
    assert!(line.contains("--accumulator"), "{line}");
}

//! `mantissa eval --task`: accuracy on tasks.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::{fail, json as report, succeed, text};

fn file(dir: &Path, lines: &[Value]) -> String {
    let path = dir.join("task.jsonl");
    let lines: String = lines.iter().map(|line| format!("{line}\n")).collect();
    fs::write(&path, lines).unwrap();
    text(&path).to_owned()
}

/// Sum of the NLL of a text's tokens after a prompt, from `eval` on token windows.
fn nll(dir: &Path, prompt: &[u64], tokens: &[u64]) -> f64 {
    let of = |tokens: Vec<u64>| {
        let (windows, sums) = (dir.join("w.json"), dir.join("s.json"));
        fs::write(&windows, json!([tokens]).to_string()).unwrap();
        let args = ["eval", "demo", "--tokens", text(&windows), "--per-window", text(&sums)];
        succeed(&[&args[..], &["--overwrite", "--quiet"]].concat());
        let sums: Value = serde_json::from_str(&fs::read_to_string(&sums).unwrap()).unwrap();
        sums["windows"][0]["nll_sum"].as_f64().unwrap()
    };
    of([prompt, tokens].concat()) - of(prompt.to_vec())
}

#[test]
fn log_likelihoods_are_those_of_the_tokens_and_the_likeliest_choice_wins() {
    let temp = TempDir::new().unwrap();
    // The model's own continuation, and others. White space at the end of a prompt belongs to the choice.
    let run = report(&["run", "demo", "-p", "Once upon a", "-n", "3", "--json", "--quiet"]);
    let own = run["text"].as_str().unwrap();
    assert!(own.starts_with(' '), "{own:?}");
    let tokens = |value: &Value| -> Vec<u64> {
        value.as_array().unwrap().iter().map(|token| token.as_u64().unwrap()).collect()
    };
    let lines = [
        json!({"prompt": "Once upon a", "choices": [" qqq", own, " the the the"], "answer": 1, "group": "own"}),
        json!({"prompt": "Once upon a ", "choices": ["qqq", own.trim_start()], "answer": 0, "group": "other"}),
    ];
    let task = file(temp.path(), &lines);
    let items = temp.path().join("items.jsonl");
    let found = report(&["eval", "demo", "--task", &task, "--per-item", text(&items), "--json", "--quiet"]);
    let task = &found["tasks"][0];
    assert_eq!((&task["items"], &task["accuracy"]), (&json!(2), &json!(0.5)), "{found}");
    assert!((task["chance"].as_f64().unwrap() - 5.0 / 12.0).abs() < 1e-12);
    assert_eq!(task["groups"][0]["group"], "own");
    assert_eq!((&task["groups"][0]["accuracy"], &task["groups"][1]["accuracy"]), (&json!(1.0), &json!(0.0)));
    let answers: Vec<Value> =
        fs::read_to_string(&items).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(answers[0]["model"]["chosen"], 1);
    let logprob = answers[0]["model"]["logprobs"][1].as_f64().unwrap();
    assert_eq!(answers[1]["model"]["logprobs"][1].as_f64().unwrap(), logprob, "the same tokens");
    // `run` lists the tokens it made; the prompt's are those in front.
    let prompt = prompt_tokens();
    assert_eq!(prompt.len() as u64, run["prompt_tokens"].as_u64().unwrap());
    let expected = nll(temp.path(), &prompt, &tokens(&run["tokens"]));
    assert!((logprob + expected).abs() < 1e-4 * expected.abs().max(1.0), "{logprob} {expected}");
}

/// Tokens of "Once upon a" in the embedded model, from a window of `--logits`.
fn prompt_tokens() -> Vec<u64> {
    let temp = TempDir::new().unwrap();
    let (sample, logits) = (temp.path().join("t.txt"), temp.path().join("l.safetensors"));
    fs::write(&sample, "Once upon a").unwrap();
    succeed(&["eval", "demo", "--text", text(&sample), "--logits", text(&logits), "--quiet"]);
    let file = crate::support::File::open(&logits);
    let ids = file.bytes("input_ids");
    ids.chunks(8).map(|id| u64::from_le_bytes(id.try_into().unwrap())).collect()
}

#[test]
fn generated_text_is_matched_on_both_engines() {
    let temp = TempDir::new().unwrap();
    let run = report(&["run", "demo", "-p", "Once upon a time", "-n", "12", "--json", "--quiet"]);
    let own = run["text"].as_str().unwrap();
    let words: Vec<&str> = own.split_whitespace().collect();
    let lines = [
        json!({"id": "all", "prompt": "Once upon a time", "target": own, "max_tokens": 12}),
        json!({"id": "stopped", "prompt": "Once upon a time", "target": own.split(words[2]).next().unwrap(), "stop": [words[2]], "max_tokens": 12}),
        json!({"id": "starts", "prompt": "Once upon a time", "target": ["nothing", words[0]], "match": "starts", "max_tokens": 4}),
        json!({"id": "wrong", "prompt": "Once upon a time", "target": "zzz", "match": "contains", "max_tokens": 12}),
    ];
    let task = file(temp.path(), &lines);
    for engine in ["reference", "fast"] {
        let found = report(&[
            "eval",
            "demo",
            "--engine",
            engine,
            "--task",
            &task,
            "--reference",
            "demo",
            "--json",
            "--quiet",
        ]);
        let task = &found["tasks"][0];
        assert_eq!((&task["accuracy"], &task["chance"]), (&json!(0.75), &json!(0.0)), "{engine}: {found}");
        let same = &task["reference"];
        assert_eq!((&same["accuracy"], &same["changed"]), (&json!(0.75), &json!(0)), "{engine}");
    }
}

#[test]
fn flips_are_listed_and_a_drop_fails() {
    let temp = TempDir::new().unwrap();
    let coarse = temp.path().join("int2");
    succeed(&[
        "quantize",
        "demo",
        "--recipe",
        "rtn-int2-g32",
        "--format",
        "native",
        "--out",
        text(&coarse),
        "--quiet",
    ]);
    let args = ["eval", text(&coarse), "--reference", "demo", "--task", "cloze", "--quiet"];
    let found = report(&[&args[..], &["--json"]].concat());
    let task = &found["tasks"][0];
    let compared = &task["reference"];
    let (gained, lost) = (compared["gained"].as_u64().unwrap(), compared["lost"].as_u64().unwrap());
    assert_eq!(task["flips"].as_array().unwrap().len() as u64, gained + lost);
    let delta = (gained as f64 - lost as f64) / 120.0;
    assert!((compared["delta_accuracy"].as_f64().unwrap() - delta).abs() < 1e-12);
    assert!(compared["delta_answer_nll"].as_f64().unwrap() > 0.0, "2 bits lose likelihood: {compared}");
    // A bound just below the loss fails, one at the loss does not.
    let gate = |bound: f64| [&args[..], &["--max-accuracy-drop", &bound.to_string()]].concat().join(" ");
    let run = |bound: f64, code: i32| {
        let line = gate(bound);
        let words: Vec<&str> = line.split(' ').collect();
        if code == 0 { succeed(&words) } else { fail(code, &words) }
    };
    run(-delta + 1e-9, 0);
    let error = run(-delta - 1e-6, 1);
    assert!(error.contains("cloze: accuracy: expected a drop of at most"), "{error}");
}

#[test]
fn bad_tasks_are_refused() {
    let temp = TempDir::new().unwrap();
    let refused = |line: Value, message: &str| {
        let task = file(temp.path(), &[line]);
        let error = fail(2, &["eval", "demo", "--task", &task, "--quiet"]);
        assert!(error.contains("line 1") && error.contains(message), "{error}");
    };
    refused(
        json!({"prompt": "x", "choices": ["a", "b"], "answer": 5}),
        "answer: expected an index from 0 to 1, got 5",
    );
    refused(json!({"prompt": "x"}), "target: expected");
    let long = "word ".repeat(3000);
    refused(json!({"prompt": long, "choices": [" a", " b"], "answer": 0}), "max_position_embeddings");
    let error = fail(2, &["eval", "demo", "--task", "none.jsonl", "--quiet"]);
    assert!(error.contains("none.jsonl"), "{error}");
    fail(2, &["eval", "demo", "--task", "cloze", "--text", "default"]);
    fail(2, &["eval", "demo", "--task", "cloze", "--max-accuracy-drop", "0.1"]);
}

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
    // A name that is no file: the built-in ones, the nearest first, and where others run.
    let named = |name: &str| fail(2, &["eval", "demo", "--task", name, "--quiet"]);
    let error = named("hellaswag");
    for part in ["\"hellaswag\"", "cloze", "retrieval", "format", "reference/tasks", "help guide/python"] {
        assert!(error.contains(part), "{part}: {error}");
    }
    assert!(named("retrival").contains("--task: expected retrieval, "));
    assert!(fail(2, &["eval", "demo", "--task", "no/such", "--quiet"]).contains("no/such"));
    let out = tempfile::tempdir().unwrap();
    let make = ["quantize", "demo", "--recipe", "nf4", "--task", "mmlu", "--quiet", "--out"];
    let error = fail(2, &[&make[..], &[text(&out.path().join("o"))]].concat());
    assert!(error.contains("--task: expected ") && error.contains("\"mmlu\""), "{error}");
    let help = succeed(&["eval", "--help"]);
    assert!(help.contains("cloze, retrieval, arithmetic, format") && help.contains("guide/python"), "{help}");
    assert!(succeed(&["help", "tasks"]).contains("mantissa help reference/tasks"));
    fail(2, &["eval", "demo", "--task", "cloze", "--text", "default"]);
    fail(2, &["eval", "demo", "--task", "cloze", "--max-accuracy-drop", "0.1"]);
}

/// Items of both kinds, with groups.
fn mixed(dir: &Path) -> String {
    let choices = [" girl named Lily", " cat", " zzz", " the the"];
    let choice = |answer| json!({"prompt": "Once upon a time, there was a little", "choices": choices, "answer": answer, "group": "choice"});
    let target = |text: &str| json!({"prompt": "Once upon a time", "target": text, "match": "contains", "max_tokens": 12, "group": "text"});
    file(dir, &[choice(0), choice(1), target("there"), target("little"), target("zzz")])
}

fn certificate(out: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(out.join("quality.json")).unwrap()).unwrap()
}

#[test]
fn the_certificate_has_the_scores_of_eval_and_rebuilds_without_the_task() {
    let temp = TempDir::new().unwrap();
    let [out, plain, again] = ["out", "plain", "again"].map(|name| temp.path().join(name));
    let task = mixed(temp.path());
    let sha256 = mantissa_store::FileDigest::of(&fs::read(&task).unwrap()).hex();
    let make = ["quantize", "demo", "--recipe", "rtn-int2-g32", "--format", "native", "--quiet", "--out"];
    let shown = succeed(&[&make[..], &[text(&out), "--task", &task, "--task", "cloze"]].concat());
    assert!(shown.contains("task.jsonl: accuracy") && shown.contains("gained"), "{shown}");
    succeed(&[&make[..], &[text(&plain)]].concat());
    let mut quality = certificate(&out);
    let tasks = quality.as_object_mut().unwrap().remove("tasks").unwrap();
    assert_eq!(quality, certificate(&plain), "tasks change nothing else");
    let args = ["eval", text(&out), "--reference", "demo", "--task", &task, "--task", "cloze", "--json"];
    let measured = report(&[&args[..], &["--quiet"]].concat());
    for (i, name) in ["task.jsonl", "cloze"].into_iter().enumerate() {
        let (mut recorded, mut expected) = (tasks[i].clone(), measured["tasks"][i].clone());
        let recorded = recorded.as_object_mut().unwrap();
        let expected = expected.as_object_mut().unwrap();
        assert_eq!(recorded["task"], name, "no folder");
        let digest = recorded.remove("sha256").unwrap();
        assert!(i > 0 || digest == sha256, "{digest}");
        assert_eq!(recorded.remove("tokens_sha256").unwrap().as_str().unwrap().len(), 64);
        [recorded.remove("task"), expected.remove("task")].iter().for_each(|task| assert!(task.is_some()));
        expected.remove("flips");
        assert_eq!(recorded, expected, "{name}");
        assert!(recorded["reference"]["delta_accuracy_se"].is_number(), "{name}");
    }
    assert!(succeed(&["report", text(&out), "--quiet"]).contains("cloze: accuracy"));
    let page = fs::read_to_string(temp.path().join("out.report.html")).unwrap();
    assert!(page.contains("Accuracy on tasks") && page.contains("task.jsonl"), "{page}");
    // Tasks decide no bytes: rebuild neither needs the file nor runs it.
    fs::remove_file(&task).unwrap();
    let found =
        report(&["rebuild", text(&out), "--source", "demo", "--out", text(&again), "--json", "--quiet"]);
    assert_eq!(found["identical"], true, "{found}");
    assert_eq!(certificate(&again), certificate(&plain));
    succeed(&["verify", text(&out), "--reference", "demo", "--strict", "--quiet"]);
}

#[test]
fn outputs_of_convert_fit_and_several_formats_have_scores() {
    let temp = TempDir::new().unwrap();
    let task = mixed(temp.path());
    let of = |args: &str| {
        let words = args.split(' ').map(|word| match word {
            "TASK" => task.clone(),
            name if name.starts_with('@') => text(&temp.path().join(&name[1..])).to_owned(),
            word => word.to_owned(),
        });
        succeed(&words.chain(["--quiet".to_owned()]).collect::<Vec<_>>())
    };
    of("quantize demo --recipe rtn-int8-g32 --format native --format gptq --out @both --task TASK");
    of(
        "convert @both/native --format compressed-tensors --requantize int2-g32 --out @ct --task TASK --threads 1",
    );
    let sample = temp.path().join("sample.txt");
    fs::write(&sample, "Once upon a time there was a little girl. She had a red ball. ".repeat(60)).unwrap();
    of(
        "fit demo --schemes int2-g32,int8-g32 --budget 5bpw --text @sample.txt --context 64 --out @fit --task TASK --html @fit.html",
    );
    for name in ["both/native", "both/gptq", "ct", "fit"] {
        let tasks = &certificate(&temp.path().join(name))["tasks"];
        assert_eq!((&tasks[0]["task"], &tasks[0]["items"]), (&json!("task.jsonl"), &json!(5)), "{name}");
        assert_eq!(tasks.as_array().unwrap().len(), 1, "{name}");
    }
    let loss = |name: &str| {
        let quality = certificate(&temp.path().join(name));
        quality["tasks"][0]["reference"]["delta_answer_nll"].as_f64().unwrap()
    };
    assert!(loss("ct") > loss("both/native").abs(), "2 bits lose more than 8");
    assert!(fs::read_to_string(temp.path().join("fit.html")).unwrap().contains("Accuracy on tasks"));
}

#[test]
fn a_bad_task_is_refused_before_work_and_a_drop_fails() {
    let temp = TempDir::new().unwrap();
    let out = temp.path().join("out");
    // The folder of a model keeps its times, unlike the embedded one: an unfinished run resumes.
    let model = crate::main_job::tiny("llama2-gqa-tied");
    let make = ["quantize", text(&model), "--recipe", "rtn-int4-g8", "--quiet", "--out", text(&out)];
    let native = [&make[..], &["--format", "native"]].concat();
    let names =
        || fs::read_dir(temp.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect::<Vec<_>>();
    for (lines, message) in [
        (vec![json!({"prompt": "x", "target": "y"}), json!({"prompt": "x"})], "line 2"),
        (vec![json!({"prompt": "word ".repeat(3000), "target": "y"})], "max_position_embeddings"),
    ] {
        let task = file(temp.path(), &lines);
        for formats in [&["--format", "native"][..], &["--format", "native", "--format", "gptq"]] {
            let error = fail(2, &[&make[..], formats, &["--task", &task]].concat());
            assert!(error.contains("task.jsonl") && error.contains(message), "{error}");
        }
        let fit =
            ["fit", text(&model), "--budget", "6bpw", "--text", "default", "--quiet", "--out", text(&out)];
        let error = fail(2, &[&fit[..], &["--task", &task]].concat());
        assert!(error.contains("task.jsonl") && error.contains(message), "{error}");
        assert_eq!(names(), ["task.jsonl"], "nothing was written");
    }
    fail(2, &[&native[..], &["--max-accuracy-drop", "0.1"]].concat());
    let task = file(
        temp.path(),
        &[json!({"prompt": "Once upon a time, there", "choices": [" was", " zzz"], "answer": 0})],
    );
    // A bound below any change fails; the work is kept, and a higher bound resumes it without running the task again.
    let error = fail(1, &[&native[..], &["--task", &task, "--max-accuracy-drop=-0.5"]].concat());
    assert!(error.contains("task.jsonl: accuracy: expected a drop of at most -0.5, got 0.0000"), "{error}");
    assert!(error.contains("another --max-accuracy-drop to resume") && !out.exists(), "{error}");
    let done = report(&[&native[..], &["--task", &task, "--max-accuracy-drop", "0.5", "--json"]].concat());
    assert!(done["resumed"].as_u64().unwrap() > 0 && out.exists(), "{done}");
    assert_eq!(done["tasks"], certificate(&out)["tasks"]);
}

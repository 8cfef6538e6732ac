//! `mantissa finetune` on conversations: templates, answers, validation, and lines at fault.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::chat::model;
use crate::support::{File, command, fail, json as run_json, mantissa, stderr, strict_json, succeed, text};

const TEMPLATE: &str = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}{{ eos_token if m.role == 'assistant' }}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}";

/// Writes `count` conversations, every third with a system message.
fn conversations(dir: &Path, count: usize) -> PathBuf {
    let line = |i: usize| {
        let (name, word) = [("Ann", "red"), ("Bob", "blue"), ("Cid", "green")][i % 3];
        let mut turns = vec![
            json!({ "role": "user", "content": format!("{name}?") }),
            json!({ "role": "assistant", "content": word }),
        ];
        if i.is_multiple_of(3) {
            turns.insert(0, json!({ "role": "system", "content": "Be kind." }));
        }
        json!({ "messages": turns }).to_string() + "\n"
    };
    let path = dir.join("chat.jsonl");
    fs::write(&path, (0..count).map(line).collect::<String>()).unwrap();
    path
}

/// Makes a tiny model in `dir` with this template, or none.
fn base(dir: &Path, template: &Value) -> PathBuf {
    let base = dir.join("base");
    fs::create_dir(&base).unwrap();
    model(&base, template);
    base
}

/// Arguments that train all weights of a tiny model.
fn tune<'a>(base: &'a Path, data: &'a Path, out: &'a Path, more: &[&'a str]) -> Vec<&'a str> {
    let first = ["finetune", text(base), "--data", text(data), "--out", text(out), "--adapter", "none"];
    [&first[..], &["--policy", "fp32", "--length", "64", "--batch", "2", "--lr", "1e-2"], more].concat()
}

fn losses(run: &Path, field: &str) -> Vec<f64> {
    let log = fs::read_to_string(run.join("log.jsonl")).unwrap();
    let lines = log.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.filter_map(|line| line[field].as_f64()).collect()
}

fn chat(model: &Path, more: &[&str]) -> Value {
    run_json(&[&["run", text(model), "--chat", "-n", "12", "--json", "--quiet", "-p"], more].concat())
}

/// An epoch is one pass, also over fewer windows than a batch holds by default: the data are one window here.
#[test]
fn epochs_count_passes_over_few_windows() {
    let temp = TempDir::new().unwrap();
    let (base, data) = (base(temp.path(), &json!(TEMPLATE)), conversations(temp.path(), 1));
    let first =
        ["finetune", text(&base), "--data", text(&data), "--adapter", "none", "--length", "64", "--json"];
    let run = |out: &str, more: &[&str]| {
        let output =
            command().args(first).args(["--out", text(&temp.path().join(out))]).args(more).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        (report["steps"].as_u64().unwrap(), report["tokens"].as_u64().unwrap(), stderr(&output))
    };
    let (steps, tokens, said) = run("one", &[]);
    assert!(steps == 1 && tokens <= 64 && !said.contains("passes over"), "{steps} {tokens} {said}");
    assert_eq!(run("three", &["--epochs", "3"]).0, 3);
    assert_eq!(run("half", &["--epochs", "0.5"]).0, 1);
    let (steps, all, said) = run("batch", &["--epochs", "3", "--batch", "8"]);
    assert_eq!((steps, all), (1, 8 * tokens));
    let note =
        "a batch of 8 windows passes over the data's 1 window 8.0 times in every step (--batch 1: once)";
    assert!(said.contains(note), "{said}");
    assert_eq!(run("set", &["--epochs", "4", "--set", "data.batch=1", "--set", "data.accumulate=2"]).0, 2);
}

/// Loss on the answers and their end only, and the same template in `run --chat`, which then gives the answer.
#[test]
fn a_conversation_is_learned_with_the_template_of_the_model() {
    let temp = TempDir::new().unwrap();
    let (base, data) = (base(temp.path(), &json!(TEMPLATE)), conversations(temp.path(), 6));
    let out = temp.path().join("tuned");
    let done = run_json(&tune(&base, &data, &out, &["--steps", "60", "--json", "--quiet"]));
    assert_eq!(done.get("default_template"), None);
    let found = losses(&out, "loss");
    assert!(found[59] < 0.2 * found[0], "{found:?}");
    // The targets that count are the answers with their end; the header of an answer is not among them.
    let tokens = File::open(&out.join("tokens.safetensors"));
    let words = |name: &str| -> Vec<u32> {
        tokens.bytes(name).as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect()
    };
    let (inputs, targets) = (words("tokens"), words("targets"));
    let counted = targets.iter().filter(|target| **target != u32::MAX).count();
    assert_eq!(tokens.metadata("answer_tokens"), Some(counted.to_string().as_str()));
    assert_eq!(targets.iter().filter(|target| **target == 2).count(), 6, "an end of turn for each answer");
    assert!(counted < inputs.len() / 2, "{counted} of {}", inputs.len());
    let report = chat(&out.join("model"), &["Bob?"]);
    assert_eq!(report["rendered"], "<s>[user] Bob?\n[assistant]");
    assert_eq!(report["text"].as_str().unwrap().trim(), "blue");
    // The folder of the run stands for its model.
    assert_eq!(chat(&out, &["Bob?"])["text"], report["text"]);
}

/// The default is told, used in training, and written beside the results, where `run --chat` finds it.
#[test]
fn a_model_without_a_template_gets_the_default() {
    let temp = TempDir::new().unwrap();
    let (base, data) = (base(temp.path(), &Value::Null), conversations(temp.path(), 6));
    let out = temp.path().join("tuned");
    let output = mantissa(&tune(&base, &data, &out, &["--steps", "60"]));
    let said = stderr(&output);
    assert!(output.status.success(), "{said}");
    assert!(said.contains("has no chat template; using the default (User: … / Assistant: …)"), "{said}");
    let report = chat(&out.join("model"), &["Bob?"]);
    let rendered = report["rendered"].as_str().unwrap().trim_start_matches("<s>");
    assert_eq!((rendered, report["text"].as_str().unwrap().trim()), ("User: Bob?\nAssistant:", "blue"));
    let system = chat(&out.join("model"), &["Bob?", "--system", "Be kind."]);
    assert!(system["rendered"].as_str().unwrap().ends_with("Be kind.\n\nUser: Bob?\nAssistant:"), "{system}");
    // An adapter brings the template too.
    let adapted = temp.path().join("adapted");
    let more = ["--adapter", "lora", "--steps", "2", "--quiet", "--json"];
    let arguments: Vec<&str> =
        tune(&base, &data, &adapted, &[]).into_iter().filter(|a| *a != "none").collect();
    let at = arguments.iter().position(|argument| *argument == "--adapter").unwrap();
    let done = run_json(&[&arguments[..at], &arguments[at + 1..], &more].concat());
    assert_eq!(done["default_template"], "User: … / Assistant: …");
    let report = chat(&base, &["Bob?", "--adapter", text(&adapted.join("adapter"))]);
    assert!(report["rendered"].as_str().unwrap().ends_with("User: Bob?\nAssistant:"), "{report}");
    let line = fail(2, &["run", text(&adapted), "--chat", "-p", "Bob?"]);
    assert!(line.contains("--adapter") && line.contains(text(&adapted)), "{line}");
    // Prompts are joined as they are, and so are the messages then.
    let prompts = temp.path().join("prompts.jsonl");
    fs::write(&prompts, json!({"prompt": "Bob?", "completion": " blue"}).to_string()).unwrap();
    let out = temp.path().join("prompts");
    succeed(&tune(&base, &prompts, &out, &["--steps", "1", "--quiet"]));
    let report = chat(&out.join("model"), &["Bob?"]);
    assert_eq!(report["rendered"].as_str().unwrap().trim_start_matches("<s>"), "Bob?");
}

/// The best checkpoint is exported, and a run without progress ends early.
#[test]
fn conversations_are_held_out() {
    let temp = TempDir::new().unwrap();
    let (base, data) = (base(temp.path(), &json!(TEMPLATE)), conversations(temp.path(), 200));
    let out = temp.path().join("tuned");
    let output = mantissa(&tune(&base, &data, &out, &["--steps", "20", "--json"]));
    assert!(stderr(&output).contains("holding out 5 % of the conversations"), "{}", stderr(&output));
    let done = strict_json::parse(&output.stdout).unwrap();
    let found = losses(&out, "validation_loss");
    let least = found.iter().copied().fold(f64::INFINITY, f64::min);
    assert_eq!((found.len(), done["validation_loss"].as_f64()), (10, Some(least)));
    assert!(found[9] < 0.5 * found[0], "{found:?}");
    let lines = |file: &str| {
        let file = File::open(&out.join(file));
        file.shape("ends")[0]
    };
    // 5 % of the bytes.
    let (trained, held_out) = (lines("tokens.safetensors"), lines("validation.safetensors"));
    assert!(trained + held_out == 200 && (8..=12).contains(&held_out), "{trained} {held_out}");
    let resumed = run_json(&tune(&base, &data, &out, &["--steps", "20", "--json", "--quiet", "--resume"]));
    assert_eq!(resumed["validation_loss"], done["validation_loss"]);
    // Of a file of its own, with a rate of 0: nothing becomes better.
    let still = temp.path().join("still");
    let more =
        ["--steps", "20", "--validation", text(&data), "--patience", "2", "--lr", "0", "--json", "--quiet"];
    let arguments = tune(&base, &data, &still, &[]);
    let lr = arguments.iter().position(|argument| *argument == "--lr").unwrap();
    let done = run_json(&[&arguments[..lr], &more].concat());
    assert_eq!((&done["steps"], &done["exported_step"]), (&6.into(), &2.into()));
    let none = temp.path().join("none");
    let done =
        run_json(&tune(&base, &data, &none, &["--steps", "1", "--validation", "0", "--json", "--quiet"]));
    assert_eq!(done["validation_loss"], Value::Null);
    assert!(!none.join("validation.safetensors").exists());
    let one = conversations(temp.path(), 1);
    let line =
        fail(2, &tune(&base, &one, &none, &["--steps", "1", "--validation", "0.5", "--restart", "--quiet"]));
    assert!(line.contains("validation.share: expected two conversations"), "{line}");
}

#[test]
fn a_line_at_fault_is_named_with_its_field_and_a_fix() {
    let temp = TempDir::new().unwrap();
    let (base, data) = (base(temp.path(), &json!(TEMPLATE)), conversations(temp.path(), 2));
    let good = fs::read_to_string(&data).unwrap();
    for (line, place, fix) in [
        ("{\"messages\": [", "line 3: expected", "one JSON object"),
        (r#"{"text": 3}"#, "line 3: text: expected a text, got a number", "as a text"),
        (r#"{"messages": [{"role": "user"}]}"#, "line 3: messages[0].content: expected", "\"content\""),
        (
            r#"{"messages": [{"role": "assistant", "content": "a", "tool_calls": [1]}]}"#,
            "line 3: messages[0].tool_calls",
            "tools",
        ),
    ] {
        fs::write(&data, format!("{good}{line}\n")).unwrap();
        let error = fail(2, &tune(&base, &data, &temp.path().join("out"), &["--steps", "1", "--quiet"]));
        let (named, found) = (format!("chat.jsonl: {place}"), error.contains("fix: ") && error.contains(fix));
        assert!(error.contains(&named) && found, "{line}: {error}");
        assert!(!temp.path().join("out/tokens.safetensors").exists());
    }
}

/// Writes a tokenizer of single characters with ids below 64 into the folder of a tiny model.
fn characters(dir: &Path) {
    let special = ["<unk>", "<s>", "</s>"];
    let mut vocab: serde_json::Map<String, Value> =
        special.iter().enumerate().map(|(id, name)| ((*name).to_owned(), json!(id))).collect();
    let letters = ('a'..='z').chain('A'..='Z').chain(" ?.,!:\n".chars());
    letters.enumerate().for_each(|(i, c)| drop(vocab.insert(c.to_string(), json!(i + 3))));
    let added = special.iter().enumerate().map(|(id, name)| {
        json!({ "id": id, "content": name, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true })
    });
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added.collect::<Vec<_>>(),
        "normalizer": null, "pre_tokenizer": null, "post_processor": null, "decoder": { "type": "Fuse" },
        "model": { "type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": [] },
    });
    let config = json!({ "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>" });
    fs::write(dir.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    fs::write(dir.join("tokenizer_config.json"), config.to_string()).unwrap();
}

/// Layers that a checkpoint stores as one have one adapter, under the name in the checkpoint, as with peft.
#[test]
fn fused_layers_are_adapted_under_their_names() {
    let temp = TempDir::new().unwrap();
    let data = temp.path().join("chat.jsonl");
    let turns = json!([{ "role": "user", "content": "Bob" }, { "role": "assistant", "content": "red" }]);
    fs::write(&data, (json!({ "messages": turns }).to_string() + "\n").repeat(3)).unwrap();
    for (name, targets, first) in [
        ("phi3", &["qkv_proj", "gate_up_proj"][..], "model.layers.0.mlp.gate_up_proj"),
        ("gpt2", &["c_attn", "c_proj"], "transformer.h.0.attn.c_attn"),
        ("gpt-neox", &["query_key_value"], "gpt_neox.layers.0.attention.query_key_value"),
    ] {
        let (base, out) = (temp.path().join(name), temp.path().join(format!("{name}-tuned")));
        fs::create_dir(&base).unwrap();
        for file in ["config.json", "model.safetensors"] {
            fs::copy(crate::support::root().join("tests/data/tiny").join(name).join(file), base.join(file))
                .unwrap();
        }
        characters(&base);
        let first_of = ["finetune", text(&base), "--data", text(&data), "--out", text(&out), "--quiet"];
        let more =
            ["--adapter", "lora", "--policy", "fp32", "--length", "32", "--batch", "1", "--lr", "2e-2"];
        let mut arguments = [&first_of[..], &more, &["--steps", "30", "--merge", "--json"]].concat();
        targets.iter().for_each(|target| arguments.extend(["--target", target]));
        let done = run_json(&arguments);
        assert!(done["merged_kl"].as_f64().unwrap() < 1e-6, "{name}: {done}");
        let adapter = out.join("adapter");
        let settings: Value =
            serde_json::from_slice(&fs::read(adapter.join("adapter_config.json")).unwrap()).unwrap();
        assert_eq!(settings["target_modules"][0], first, "{settings}");
        // Merged and unmerged, the model has learned.
        let merged = chat(&out.join("model"), &["Bob", "--engine", "reference"]);
        let unmerged = chat(&base, &["Bob", "--engine", "reference", "--adapter", text(&adapter)]);
        assert_eq!(merged["tokens"], unmerged["tokens"], "{name}");
        assert!(losses(&out, "loss")[29] < 0.5 * losses(&out, "loss")[0], "{name}");
        let line = fail(2, &[&first_of[..], &more, &["--target", "q_proj", "--restart"]].concat());
        assert!(line.contains("targets") && line.contains(targets[0]), "{line}");
    }
}

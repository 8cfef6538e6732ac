//! `mantissa run` as a chat: the model's own sampling, other templates, Ctrl-C.

use std::fs;
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, Stdio};

use serde_json::{Value, json};

use crate::chat;
use crate::support::{command, fail, json as run_json, mantissa, stderr, succeed, text};

const TEMPLATE: &str = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}[assistant]";

/// Makes a tiny chat model with this `generation_config.json`.
fn model(dir: &Path, generation: &Value) -> String {
    fs::write(dir.join("generation_config.json"), generation.to_string()).unwrap();
    chat::model(dir, &json!(TEMPLATE))
}

/// Runs a model on one message: the tokens, and standard error.
fn answer(folder: &str, more: &[&str]) -> (Value, String) {
    let common = ["run", folder, "-p", "Hi", "-n", "24", "--seed", "5", "--json"];
    let output = mantissa(&[&common[..], more].concat());
    assert!(output.status.success(), "{}", stderr(&output));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    (report["tokens"].clone(), stderr(&output))
}

#[test]
fn a_chat_samples_as_its_model_recommends() {
    let temp = tempfile::tempdir().unwrap();
    let stated =
        json!({"do_sample": true, "temperature": 1.5, "top_p": 0.9, "top_k": 7, "repetition_penalty": 1.2});
    let folder = model(temp.path(), &stated);
    let (own, notes) = answer(&folder, &["--chat"]);
    let said = "the model's sampling: temperature 1.5, top-k 7, top-p 0.9, repetition penalty 1.2";
    assert_eq!(notes.matches(said).count(), 1, "{notes}");
    let named =
        ["--chat", "--temperature", "1.5", "--top-k", "7", "--top-p", "0.9", "--repetition-penalty", "1.2"];
    let (by_options, notes) = answer(&folder, &named);
    assert_eq!(own, by_options);
    assert!(!notes.contains("the model's sampling"), "{notes}");
    // What the command line sets holds, and the model's values for the rest.
    let (_, notes) = answer(&folder, &["--chat", "--temperature", "0.5", "--top-k", "0"]);
    assert!(notes.contains("the model's sampling: top-p 0.9, repetition penalty 1.2 "), "{notes}");
    // Greedy where asked, and where the prompt is no message of a chat.
    for more in [&["--chat", "--greedy"][..], &["--chat", "--temperature", "0"]] {
        let (greedy, notes) = answer(&folder, &[more, &["--repetition-penalty", "1"]].concat());
        assert!(!notes.contains("the model's sampling"), "{notes}");
        assert_ne!(greedy, own);
    }
    let (_, notes) = answer(&folder, &[]);
    assert!(!notes.contains("the model's sampling"), "{notes}");
    assert!(
        fail(2, &["run", &folder, "-p", "a", "--greedy", "--temperature", "1"])
            .contains("cannot be used with")
    );

    let bare = tempfile::tempdir().unwrap();
    let plain = chat::model(bare.path(), &json!(TEMPLATE));
    let (today, notes) = answer(&plain, &["--chat"]);
    assert_eq!(today, answer(&plain, &["--chat", "--greedy"]).0);
    assert!(!notes.contains("the model's sampling"), "{notes}");
}

#[test]
fn a_gguf_file_recommends_too_and_unusable_values_are_named() {
    let temp = tempfile::tempdir().unwrap();
    let folder = model(temp.path(), &json!({"temperature": 80, "top_p": 0.5, "top_k": "all"}));
    let (_, notes) = answer(&folder, &["--chat", "--temperature", "1"]);
    assert!(notes.contains("temperature: expected a number from 0 to 2, got 80; it is not used"), "{notes}");
    assert!(
        notes.contains("top_k: expected a number") && notes.contains("the model's sampling: top-p 0.5 "),
        "{notes}"
    );
}

#[test]
fn a_chat_template_is_named_or_a_file() {
    let temp = tempfile::tempdir().unwrap();
    let folder = chat::model(
        temp.path(),
        &json!([{"name": "default", "template": "d"}, {"name": "rag", "template": "own rag"}]),
    );
    let rendered = |template: &str| {
        let arguments = [
            "run",
            &folder,
            "--chat",
            "--chat-template",
            template,
            "-p",
            "Hi",
            "-n",
            "1",
            "--json",
            "--quiet",
        ];
        run_json(&arguments)["rendered"].clone()
    };
    assert_eq!(rendered("rag"), "own rag");
    assert_eq!(rendered("chatml"), "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
    assert_eq!(rendered("llama2"), "<s>[INST] Hi [/INST]");
    let file = temp.path().join("t.jinja");
    fs::write(&file, "{{ messages[0].content }}?").unwrap();
    assert_eq!(rendered(text(&file)), "Hi?");
    let run = |template: &str, more: &[&str]| {
        fail(2, &[&["run", &folder, "-p", "Hi", "--chat-template", template][..], more].concat())
    };
    let line = run("nothing", &["--chat"]);
    assert!(
        line.contains("--chat-template: expected a Jinja file, or one of rag, chatml, ")
            && line.contains("got nothing"),
        "{line}"
    );
    assert!(run("chatml", &[]).contains("--chat-template: expected --chat or --interactive with it"));
    fs::write(&file, "{% if %}").unwrap();
    assert!(run(text(&file), &["--chat"]).contains("line 1"));
    fs::write(&file, [0xff]).unwrap();
    assert!(run(text(&file), &["--chat"]).contains("t.jinja"));
}

/// Starts an answer of the demo model and waits for its first text.
fn start(arguments: &[&str], input: &str) -> (Child, Vec<u8>) {
    let common = ["run", "demo", "--engine", "reference", "--threads", "1"];
    let mut child = command()
        .args([&common[..], arguments].concat())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.as_mut().unwrap().write_all(input.as_bytes()).unwrap();
    let mut first = [0];
    child.stdout.as_mut().unwrap().read_exact(&mut first).unwrap();
    (child, first.to_vec())
}

fn interrupt(child: &Child) {
    let id = child.id().to_string();
    assert!(std::process::Command::new("kill").args(["-s", "INT", &id]).status().unwrap().success());
}

#[test]
fn an_interrupt_ends_the_answer_and_says_what_there_is() {
    let (child, mut said) = start(&["-p", "Once upon a time", "-n", "-1"], "");
    interrupt(&child);
    let output = child.wait_with_output().unwrap();
    said.extend(&output.stdout);
    let notes = stderr(&output);
    assert_eq!(output.status.code(), Some(130), "{notes}");
    assert!(notes.contains("prefill 5 tokens") && notes.contains("error: interrupted by SIGINT"), "{notes}");
    let whole =
        succeed(&["run", "demo", "--engine", "reference", "-p", "Once upon a time", "-n", "-1", "--quiet"]);
    let said = String::from_utf8(said).unwrap();
    assert!(said.len() < whole.len() && whole.starts_with(said.trim_end()), "{said}");
}

#[test]
fn an_interrupt_in_a_conversation_goes_back_to_the_prompt() {
    let (mut child, _) = start(&["--interactive", "-n", "200", "-c", "512"], "A dog ran.\n");
    interrupt(&child);
    let mut input = child.stdin.take().unwrap();
    input.write_all(b"It sat.\n/bye\n").unwrap();
    let output = child.wait_with_output().unwrap();
    let notes = stderr(&output);
    assert_eq!(output.status.code(), Some(0), "{notes}");
    assert_eq!((notes.matches("stopped; ").count(), notes.matches("prefill ").count()), (1, 2), "{notes}");
    // The second one, with no answer at work, ends the command.
    let (mut child, _) = start(&["--interactive", "-n", "200", "-c", "512"], "A dog ran.\n");
    interrupt(&child);
    let mut line = Vec::new();
    let mut out = child.stdout.take().unwrap();
    while !line.ends_with(b"\n") {
        let mut byte = [0];
        out.read_exact(&mut byte).unwrap();
        line.push(byte[0]);
    }
    let mut errors = child.stderr.take().unwrap();
    let mut notes = String::new();
    while !notes.contains("stopped; ") {
        let mut byte = [0];
        errors.read_exact(&mut byte).unwrap();
        notes.push(char::from(byte[0]));
    }
    interrupt(&child);
    assert_eq!(child.wait().unwrap().code(), Some(130));
}

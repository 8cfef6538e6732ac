//! `mantissa run` as a chat: the model's own sampling, other templates, Ctrl-C.

use std::fs;
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdout, Stdio};

use serde_json::{Value, json};

use crate::chat;
use crate::support::{command, fail, json as run_json, mantissa, on_terminal, root, stderr, succeed, text};

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

/// Reads from `out` until `mark` has come; returns what was read.
fn read_until(out: &mut ChildStdout, mark: &str) -> String {
    let mut read = Vec::new();
    while !String::from_utf8_lossy(&read).ends_with(mark) {
        let mut byte = [0];
        assert_eq!(out.read(&mut byte).unwrap(), 1, "no {mark:?} in {}", String::from_utf8_lossy(&read));
        read.push(byte[0]);
    }
    String::from_utf8_lossy(&read).into_owned()
}

#[test]
fn an_empty_message_is_refused() {
    let line = fail(2, &["run", "demo", "--chat"]);
    assert!(line.contains("--prompt: expected a message: -p TEXT"), "{line}");
    assert!(fail(2, &["run", "demo", "--chat", "-p", " "]).contains("an empty message"));
}

#[test]
fn on_a_terminal_a_model_without_a_prompt_begins_a_chat() {
    let Some(mut command) = on_terminal(&["run", "demo"]) else { return };
    let mut child = command.spawn().unwrap();
    let (mut input, mut out) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    let told = read_until(&mut out, "> ");
    assert!(told.contains("/help lists commands, /bye ends the conversation"), "{told}");
    input.write_all(b"/exti\n").unwrap();
    let told = read_until(&mut out, "> ");
    assert!(told.contains("unknown command /exti; /help lists commands"), "{told}");
    input.write_all(b"/bye\n").unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
    // What takes the answer, or has a prompt, begins none.
    let Some(mut command) = on_terminal(&["run", "demo", "-p", "Once", "-n", "3"]) else { return };
    let output = command.stdin(Stdio::null()).output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert!(!String::from_utf8_lossy(&output.stdout).contains("/help"), "{output:?}");
    let Some(mut command) = on_terminal(&["run", "demo", "--json"]) else { return };
    let output = command.stdin(Stdio::null()).output().unwrap();
    let told = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(2), "{told}");
    assert!(told.contains("--prompt: expected a prompt after the model"), "{told}");
}

#[test]
fn an_interrupt_of_the_prompt_says_how_to_leave_and_the_next_one_leaves() {
    let Some(mut command) = on_terminal(&["run", "demo", "-i", "-n", "2"]) else { return };
    let mut child = command.spawn().unwrap();
    let (mut input, mut out) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    read_until(&mut out, "> ");
    for _ in 0..2 {
        // A line in between begins anew.
        input.write_all(b"\x03").unwrap();
        read_until(&mut out, "Ctrl-C again or /bye ends the conversation\r\n> ");
        input.write_all(b"Once upon a time\n").unwrap();
        read_until(&mut out, "stopped at 2 tokens (-n N or -n -1 for more)\r\n> ");
    }
    input.write_all(b"\x03").unwrap();
    read_until(&mut out, "Ctrl-C again or /bye ends the conversation\r\n> ");
    input.write_all(b"\x03").unwrap();
    let told = read_until(&mut out, "interrupted by SIGINT");
    assert_eq!(child.wait().unwrap().code(), Some(130), "{told}");
}

/// Makes the demo model end every text at once: all its tokens are end tokens.
fn ending_at_once(dir: &Path, template: bool) -> String {
    for file in fs::read_dir(root().join("crates/mantissa-jobs/demo/model")).unwrap() {
        let file = file.unwrap().path();
        fs::copy(&file, dir.join(file.file_name().unwrap())).unwrap();
    }
    let config: Value = serde_json::from_slice(&fs::read(dir.join("config.json")).unwrap()).unwrap();
    let all: Vec<u64> = (0..config["vocab_size"].as_u64().unwrap()).collect();
    fs::write(dir.join("generation_config.json"), json!({ "eos_token_id": all }).to_string()).unwrap();
    if !template {
        let path = dir.join("tokenizer_config.json");
        let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        config.as_object_mut().unwrap().remove("chat_template");
        fs::write(&path, config.to_string()).unwrap();
    }
    text(dir).to_owned()
}

#[test]
fn an_answer_that_ends_at_once_says_so_and_what_to_try() {
    let (with, without) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let notes = |folder: &str, more: &[&str]| {
        let output = mantissa(&[&["run", folder, "-p", "Once upon a time"][..], more].concat());
        assert_eq!(output.status.code(), Some(0));
        stderr(&output)
    };
    let chat = ending_at_once(with.path(), true);
    for engine in ["fast", "reference"] {
        let said = notes(&chat, &["--engine", engine]);
        assert!(said.contains("the model ended at once; it has a chat template: add --chat"), "{said}");
    }
    let said = notes(&chat, &["--chat"]);
    assert!(said.contains("the model ended at once") && !said.contains("add --chat"), "{said}");
    let plain = ending_at_once(without.path(), false);
    let said = notes(&plain, &[]);
    assert!(said.contains("the model ended at once") && !said.contains("add --chat"), "{said}");
    for silent in [&["--quiet"][..], &["--json"]] {
        assert!(!notes(&chat, silent).contains("ended at once"));
    }
    assert!(!notes("demo", &["-n", "4"]).contains("ended at once"));
}

#[test]
fn the_next_command_of_a_chat_model_is_a_chat() {
    let temp = tempfile::tempdir().unwrap();
    let (plain, chat) = (temp.path().join("plain"), temp.path().join("chat"));
    fs::create_dir(&plain).unwrap();
    fs::create_dir(&chat).unwrap();
    ending_at_once(&plain, false);
    ending_at_once(&chat, true);
    for (model, flag) in [(&plain, ""), (&chat, " --chat")] {
        for (format, name) in [("native", "o"), ("gguf", "o.gguf")] {
            let out = model.with_extension(name);
            let recipe = if format == "gguf" { "q8_0" } else { "rtn-mxint8" };
            let arguments =
                ["quantize", text(model), "--recipe", recipe, "--for", "mantissa", "--out", text(&out)];
            let said = succeed(&arguments);
            let next = format!("next        mantissa run {}{flag} -p \"Once upon a time\"\n", text(&out));
            assert!(said.contains(&next), "{said}");
        }
    }
}

#[test]
fn an_answer_that_is_cut_says_so() {
    let output = mantissa(&["run", "demo", "--chat", "-p", "Once upon a time", "-n", "5"]);
    assert!(stderr(&output).contains("stopped at 5 tokens (-n N or -n -1 for more)"), "{}", stderr(&output));
    for silent in ["--quiet", "--json"] {
        let output = mantissa(&["run", "demo", "--chat", "-p", "Once upon a time", "-n", "5", silent]);
        assert!(!stderr(&output).contains("stopped at"), "{silent}");
    }
    // A text that is continued is as long as was asked for.
    let output = mantissa(&["run", "demo", "-p", "Once upon a time", "-n", "5"]);
    assert!(!stderr(&output).contains("stopped at"), "{}", stderr(&output));
    // A conversation goes on to the end of the answer or the context, not to 128 tokens.
    let temp = tempfile::tempdir().unwrap();
    let folder = chat::model(temp.path(), &json!(TEMPLATE));
    let mut child = command()
        .args(["run", &folder, "-i"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"Hi\nAnd you?\n").unwrap();
    let notes = stderr(&child.wait_with_output().unwrap());
    let full = "stopped: prompt and answer fill the context of 64 tokens";
    assert!(notes.contains(full) && notes.contains("the oldest 2 messages were left out"), "{notes}");
}

#[test]
fn a_context_bounds_prompt_and_answer() {
    let run = |more: &[&str]| {
        let output = mantissa(&[&["run", "demo", "-p", "Once upon a time", "--json"][..], more].concat());
        assert!(output.status.success(), "{}", stderr(&output));
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        let count = |field: &str| {
            report[field].as_array().map_or_else(|| report[field].as_u64(), |all| Some(all.len() as u64))
        };
        (count("prompt_tokens").unwrap() + count("tokens").unwrap(), stderr(&output))
    };
    for engine in ["fast", "reference"] {
        let (total, notes) = run(&["-c", "16", "-n", "40", "--engine", engine]);
        assert_eq!(total, 16, "{notes}");
        assert!(notes.contains("--context of 16 tokens leaves room for 11 new tokens"), "{notes}");
        let (total, _) = run(&["-c", "16", "-n", "-1", "--engine", engine]);
        assert_eq!(total, 16);
    }
    let refused = |more: &[&str]| fail(2, &[&["run", "demo", "-p", "Once upon a time"][..], more].concat());
    assert!(refused(&["-c", "5"]).contains("--context: expected at least 6: a prompt of 5 tokens"));
    let line = refused(&["-c", "0"]);
    assert!(line.contains("--context: expected 1 to 512, the context of demo, got 0"), "{line}");
    assert!(refused(&["-c", "0", "--dry-run"]).contains("--context: expected 1 to 512"));
    let (total, notes) = run(&["-c", "20000", "-n", "3"]);
    assert!(total < 512 && notes.contains("--context 20000: the model has 512"), "{total}: {notes}");
}

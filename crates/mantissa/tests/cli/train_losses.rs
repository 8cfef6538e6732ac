//! Training data that are cut or left out: counted in the report and the record of the run, and refused under `--strict`.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::chat::model;
use crate::support::{fail, json as run_json, mantissa, stderr, succeed, text};

const TEMPLATE: &str = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}{{ eos_token if m.role == 'assistant' }}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}";

/// Makes a tiny model with a chat template.
fn base(dir: &Path) -> PathBuf {
    let base = dir.join("base");
    fs::create_dir(&base).unwrap();
    model(&base, &json!(TEMPLATE));
    base
}

fn turns(user: &str, assistant: &str) -> String {
    let turns = json!([{ "role": "user", "content": user }, { "role": "assistant", "content": assistant }]);
    json!({ "messages": turns }).to_string() + "\n"
}

fn write(dir: &Path, name: &str, content: &str) -> PathBuf {
    let path = dir.join(name);
    fs::write(&path, content).unwrap();
    path
}

const LENGTH: &str = "32";

/// Arguments of a short run on `data`, of `finetune` or of `distill` from the model itself.
fn tune<'a>(command: &[&'a str], data: &'a Path, out: &'a Path, more: &[&'a str]) -> Vec<&'a str> {
    let run = ["--data", text(data), "--out", text(out), "--adapter", "none", "--policy", "fp32"];
    let short = ["--batch", "1", "--steps", "2", "--validation", "0"];
    [command, &run, &short, more].concat()
}

/// The fix of an error: its `--set`.
fn fix(line: &str) -> Vec<String> {
    let fix = line.split("fix: --set ").nth(1).unwrap_or_else(|| panic!("no --set: {line}"));
    let value = fix.split([',', ' ', '\n', ';']).next().unwrap();
    vec!["--set".to_owned(), value.to_owned()]
}

fn record(run: &Path) -> Value {
    serde_json::from_slice(&fs::read(run.join("run.json")).unwrap()).unwrap()
}

/// A marker between documents that is no separator and no token would be learned as text.
#[test]
fn a_marker_between_documents_is_told() {
    let temp = TempDir::new().unwrap();
    let base = base(temp.path());
    let stories = "red blue ".repeat(40) + "\n<|endoftext|>\n" + &"blue red ".repeat(40);
    let data = write(temp.path(), "stories.txt", &stories);
    let said = |name: &str, more: &[&str]| {
        let out = temp.path().join(name);
        let output =
            mantissa(&tune(&["finetune", text(&base)], &data, &out, &[&["--length", "16"], more].concat()));
        assert!(output.status.success(), "{}", stderr(&output));
        (stderr(&output), String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let (warned, told) = said("whole", &[]);
    let fix = "fix: --set 'data.split=\"<|endoftext|>\"'";
    assert!(
        warned.contains("stories.txt: <|endoftext|> is read as text") && warned.contains(fix),
        "{warned}"
    );
    assert!(told.contains("1 document,"), "{told}");
    let (warned, told) = said("split", &["--set", "data.split=\"<|endoftext|>\""]);
    assert!(!warned.contains("is read as text") && told.contains("2 documents,"), "{warned} {told}");
}

#[test]
fn policies_are_listed_with_a_line_each() {
    let listed = succeed(&["train", "--show-policy", "list"]);
    assert!(listed.contains("\nfp8-current      FP8 with current scaling (torchao's"), "{listed}");
    let line = fail(2, &["train", "--show-policy", "fp8"]);
    assert!(
        line.contains("expected fp8-current, fp8-delayed") && line.contains("fix: --show-policy fp8-current")
    );
}

/// Long answers are cut, long prompts leave nothing; both are counted, and gone with the length that the error names.
#[test]
fn conversations_that_are_cut_or_left_out_are_counted() {
    let temp = TempDir::new().unwrap();
    let base = base(temp.path());
    let lines = [
        turns("Ann?", "red"),
        turns("Bob?", &"blue ".repeat(6)),
        turns(&"Cid and Dan? ".repeat(2), "green"),
        turns("Eve?", "red"),
    ];
    let data = write(temp.path(), "chat.jsonl", &lines.concat());
    for (i, command) in
        [vec!["finetune", text(&base)], vec!["distill", text(&base), text(&base)]].iter().enumerate()
    {
        let out = temp.path().join(format!("out-{i}"));
        let output = mantissa(&tune(command, &data, &out, &["--length", LENGTH, "--json"]));
        let said = stderr(&output);
        assert!(output.status.success(), "{said}");
        let done: Value = serde_json::from_slice(&output.stdout).unwrap();
        let counts = &done["data"];
        let of = |field: &str| counts[field].as_u64().unwrap();
        assert_eq!((of("conversations"), of("trained"), of("cut")), (4, 3, 1), "{counts}");
        assert_eq!(counts["left_out"], json!({ "too_long": 1, "without_targets": 0 }));
        assert_eq!(of("trained_ends"), 2, "the end of the cut answer is not trained: {counts}");
        assert!(of("lost_tokens") > of("lost_answer_tokens") && of("longest") > of("length"), "{counts}");
        assert_eq!(&record(&out)["data"], counts);
        assert!(said.contains("data.files: 1 of 4 conversations cut to 32 tokens: "), "{said}");
        assert!(
            said.contains("(first: chat.jsonl: line 2)") && said.contains("(first: chat.jsonl: line 3)"),
            "{said}"
        );
        // The targets that count are in the file, no more and no less.
        let again = tune(command, &data, &out, &["--length", LENGTH, "--json", "--quiet", "--resume"]);
        assert_eq!(&run_json(&again)["data"], counts, "a resumed run counts alike");
        let strict = temp.path().join(format!("strict-{i}"));
        let line = fail(1, &tune(command, &data, &strict, &["--length", LENGTH, "--strict", "--quiet"]));
        assert!(
            line.contains("--strict: expected no warnings, got 2; first: data.files: 1 of 4 conversations"),
            "{line}"
        );
        assert!(line.contains("chat.jsonl: line 3") && !strict.exists(), "{line}");
        let set = fix(&line);
        let set: Vec<&str> = set.iter().map(String::as_str).collect();
        let more = [&["--length", LENGTH, "--strict", "--json", "--quiet"][..], &set].concat();
        let whole = run_json(&tune(command, &data, &strict, &more));
        let lost = ["cut", "lost_tokens", "lost_answer_tokens"].map(|field| whole["data"][field].as_u64());
        assert_eq!(lost, [Some(0); 3], "{whole}");
        assert_eq!((&whole["data"]["trained"], &whole["data"]["trained_ends"]), (&4.into(), &4.into()));
    }
    let told =
        succeed(&tune(&["finetune", text(&base)], &data, &temp.path().join("told"), &["--length", LENGTH]));
    let told = told.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(
        told.contains("left out (no token of an answer within 32") && told.contains("1 cut to 32 tokens"),
        "{told}"
    );
    // The page has the same sentence.
    succeed(&["report", text(&temp.path().join("told")), "--quiet"]);
    let page = fs::read_to_string(temp.path().join("told/report.html")).unwrap();
    assert!(page.contains("Data: 4 conversations: 3 trained on"), "no data");
}

/// Lines without an answer are counted as left out, wherever they stand; a file of nothing else is an error.
#[test]
fn conversations_without_an_answer_are_left_out() {
    let temp = TempDir::new().unwrap();
    let base = base(temp.path());
    let asked = json!({ "messages": [{ "role": "user", "content": "Ann?" }] }).to_string() + "\n";
    let unweighed = turns("Bob?", "blue").replace("\"blue\"", "\"blue\",\"weight\":0");
    let lines = [asked.as_str(), &turns("Ann?", "red"), &unweighed, "{\"messages\": []}\n"].concat();
    let data = write(temp.path(), "chat.jsonl", &lines);
    let (command, out) = (["finetune", text(&base)], temp.path().join("out"));
    let output = mantissa(&tune(&command, &data, &out, &["--length", "64", "--json"]));
    let said = stderr(&output);
    assert!(output.status.success(), "{said}");
    let done: Value = serde_json::from_slice(&output.stdout).unwrap();
    let counts = &done["data"];
    assert_eq!((&counts["conversations"], &counts["trained"]), (&json!(4), &json!(1)), "{counts}");
    assert_eq!(counts["left_out"], json!({ "too_long": 0, "without_targets": 3 }));
    assert_eq!(&record(&out)["data"], counts);
    let told = "data.files: 3 of 4 conversations left out: they have no answer that the loss counts (first: chat.jsonl: line 1)";
    assert!(said.contains(told), "{said}");
    let resumed =
        run_json(&tune(&command, &data, &out, &["--length", "64", "--json", "--quiet", "--resume"]));
    assert_eq!(&resumed["data"], counts);
    succeed(&["report", text(&out), "--quiet"]);
    let page = fs::read_to_string(out.join("report.html")).unwrap();
    assert!(page.contains("3 left out (without an answer)"), "no count");
    let strict = temp.path().join("strict");
    let line = fail(1, &tune(&command, &data, &strict, &["--length", "64", "--strict", "--quiet"]));
    assert!(line.contains("first: data.files: 3 of 4") && !strict.exists(), "{line}");
    let data = write(temp.path(), "asked.jsonl", &[asked.as_str(), &unweighed].concat());
    let line = fail(2, &tune(&command, &data, &strict, &["--length", "64", "--quiet"]));
    let expected =
        "expected a line with an answer, got 2 of 2 lines without any; fix: add lines with answers";
    assert!(line.contains("asked.jsonl: lines: ") && line.contains(expected), "{line}");
}

/// Where nothing is lost, nothing is said; what a template writes after the last answer is no loss.
#[test]
fn sound_conversations_give_no_warning() {
    let temp = TempDir::new().unwrap();
    let base = base(temp.path());
    let data = write(temp.path(), "chat.jsonl", &[turns("Ann?", "red"), turns("Bob?", "blue")].concat());
    let out = temp.path().join("out");
    let command = ["finetune", text(&base)];
    let output = mantissa(&tune(&command, &data, &out, &["--length", "64", "--strict", "--json"]));
    assert!(output.status.success() && !stderr(&output).contains("warning"), "{}", stderr(&output));
    let done: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(done["outcome"], "done");
    // The least length that holds both.
    let longest = done["data"]["longest"].to_string();
    let least = temp.path().join("least");
    run_json(&tune(&command, &data, &least, &["--length", &longest, "--strict", "--json", "--quiet"]));
    // Held-out files count apart.
    let held = write(temp.path(), "held.jsonl", &turns("Bob?", &"blue ".repeat(40)));
    let first = tune(&command, &data, &out, &["--length", "32", "--strict", "--quiet", "--restart"]);
    let at = first.iter().position(|argument| *argument == "--validation").unwrap();
    let arguments = [&first[..at], &["--validation", text(&held)], &first[at + 2..]].concat();
    let line = fail(1, &arguments);
    assert!(line.contains("first: validation.files: 1 of 1 conversations cut"), "{line}");
}

/// A conversation beyond the model's context has no length that holds it.
#[test]
fn the_fix_of_a_conversation_beyond_the_context_is_to_shorten_it() {
    let temp = TempDir::new().unwrap();
    let base = base(temp.path());
    let data = write(
        temp.path(),
        "chat.jsonl",
        &[turns("Ann?", "red"), turns("Bob?", &"blue ".repeat(400))].concat(),
    );
    let line = fail(
        1,
        &tune(
            &["finetune", text(&base)],
            &data,
            &temp.path().join("out"),
            &["--length", "32", "--strict", "--quiet"],
        ),
    );
    assert!(line.contains("fix: shorten them to the ") && line.contains("of the model's context"), "{line}");
}

/// Tokens at the end that fill no window, and empty records, of texts.
#[test]
fn texts_that_are_left_out_are_counted() {
    let temp = TempDir::new().unwrap();
    let base = base(temp.path());
    let record_of = |text: &str| json!({ "text": text }).to_string() + "\n";
    let lines =
        [record_of("Ann is red and Bob is blue."), record_of(" "), record_of("Cid is green."), record_of("")];
    let data = write(temp.path(), "texts.jsonl", &lines.concat());
    let (command, out) = (["finetune", text(&base)], temp.path().join("out"));
    let output = mantissa(&tune(&command, &data, &out, &["--length", "8", "--json"]));
    let said = stderr(&output);
    assert!(output.status.success(), "{said}");
    let done: Value = serde_json::from_slice(&output.stdout).unwrap();
    let of = |field: &str| done["data"][field].as_u64().unwrap();
    assert_eq!((of("documents"), of("empty"), of("length")), (2, 2, 8));
    assert_eq!(of("windows") * 8 + of("left_over") + 1, of("tokens"), "{done}");
    assert!(
        said.contains("2 of 4 records left out: their text is empty (first: texts.jsonl: line 2)"),
        "{said}"
    );
    let resumed = run_json(&tune(&command, &data, &out, &["--length", "8", "--json", "--quiet", "--resume"]));
    assert_eq!(resumed["data"], done["data"]);
    let strict = temp.path().join("strict");
    let line = fail(1, &tune(&command, &data, &strict, &["--length", "8", "--strict", "--quiet"]));
    assert!(
        line.contains("first: data.files: 2 of 4 records") && line.contains("fix: remove them"),
        "{line}"
    );
    let data = write(temp.path(), "fewer.jsonl", &[&lines[0][..], &lines[2]].concat());
    // A tail is told where it is more than a tenth.
    let left = |length: u64| (of("tokens") - 1) % length;
    let length = (5..16).rev().find(|length| left(*length) * 10 > of("tokens")).unwrap().to_string();
    let line = fail(1, &tune(&command, &data, &strict, &["--length", &length, "--strict", "--quiet"]));
    assert!(line.contains("tokens make no window of") && !strict.exists(), "{line}");
    let set = fix(&line);
    let set: Vec<&str> = set.iter().map(String::as_str).collect();
    let more = [&["--length", &length, "--strict", "--json", "--quiet"][..], &set].concat();
    assert_eq!(run_json(&tune(&command, &data, &strict, &more))["data"]["left_over"], 0);
}

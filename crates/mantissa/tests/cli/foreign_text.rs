//! Names and texts of files in what is printed: nothing that acts on a terminal or disguises itself, no endless lines.

use std::fs;
use std::path::Path;
use std::process::Output;

use mantissa_store::gguf::{GgufWriter, Value as GgufValue};
use mantissa_store::shown::misleads;
use mantissa_store::{Dtype, SafeTensors};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::{mantissa, root, stderr, text, write};
use crate::unopenable::model;

/// A name that clears the screen, turns text around, hides and goes on for six thousand characters.
fn evil() -> String {
    let marks = "\u{1b}]0;x\u{7}\u{1b}[2J\u{202e}gpj\u{2066}\u{200b}\u{200f}\u{feff}\u{e0041}\u{9b}31m\u{2028}\u{85}\u{7f}\r\nerror: no";
    format!("evil{marks}{}", "N".repeat(6000))
}

/// Runs a command and checks both streams; returns them.
fn checked(arguments: &[&str]) -> Output {
    let output = mantissa(arguments);
    for (stream, bytes) in [("stdout", &output.stdout), ("stderr", &output.stderr)] {
        let said = String::from_utf8(bytes.clone()).unwrap();
        for line in said.lines() {
            let start: String = line.chars().take(400).collect();
            assert!(!line.contains(misleads), "{arguments:?} {stream}: {start:?}");
            let json = arguments.iter().any(|argument| argument.starts_with("--json")) && stream == "stdout";
            assert!(json || line.len() <= 4010, "{arguments:?} {stream}: {} bytes: {start}", line.len());
        }
    }
    let said = stderr(&output);
    assert!(!said.contains("internal:") && output.status.code().is_some(), "{arguments:?}: {said}");
    let errors = said.lines().filter(|line| line.starts_with("error: ")).count();
    assert!(errors <= 1, "{arguments:?}: {said}");
    if std::env::var_os("SHOW").is_some() {
        println!("{arguments:?}: {:?} {}", output.status.code(), said.chars().take(600).collect::<String>());
    }
    output
}

/// Runs all commands that name parts of the model at `at`.
fn all(at: &Path, temp: &Path) {
    let (out, m) = (temp.join("out"), text(at));
    let lines: [&[&str]; 12] = [
        &["inspect", m],
        &["inspect", m, "--json"],
        &["inspect", m, "--stats"],
        &["lint", m, "--for", "vllm"],
        &["run", m, "--prompt", "Once", "-n", "1"],
        &["run", m, "--chat", "--prompt", "Once", "-n", "1"],
        &["run", m, "--chat", "--prompt", "Once", "-n", "1", "--json"],
        &["quantize", m, "--recipe", "rtn-int8-channel", "--out", text(&out), "--overwrite"],
        &["verify", m],
        &["verify", m, "--against", m],
        &["doctor", m],
        &["doctor", m, "--json"],
    ];
    lines.iter().for_each(|line| drop(checked(line)));
}

/// Changes a JSON file of a fresh copy of the model, and runs all commands.
fn with_json(name: &str, change: &dyn Fn(&mut Value)) {
    let temp = TempDir::new().unwrap();
    let at = temp.path().join("m");
    model(&at);
    let path = at.join(name);
    let mut value = fs::read(&path).map_or(json!({}), |bytes| serde_json::from_slice(&bytes).unwrap());
    change(&mut value);
    fs::write(&path, value.to_string()).unwrap();
    all(&at, temp.path());
}

/// Source files that write to a terminal by themselves, with the reason; all others use `terminal` and `output`.
const WRITERS: [(&str, &str); 6] = [
    ("terminal.rs", "the one way to standard error"),
    ("output.rs", "the one way to standard output"),
    ("app.rs", "help pages, which are text of the program"),
    ("commands/run/answer.rs", "text that a model generates"),
    ("commands/run/interactive.rs", "asks for a line"),
    ("progress.rs", "the bar, whose texts are escaped"),
];

#[test]
fn all_that_is_printed_passes_one_writer() {
    const WRITES: [&str; 7] =
        ["stderr()", "stdout()", "println!", "print!(", "eprintln!", "eprint!(", "/dev/tty"];
    let (mut found, mut folders) = (Vec::new(), Vec::new());
    for entry in fs::read_dir(root().join("crates")).unwrap() {
        folders.push(entry.unwrap().path().join("src"));
    }
    let own = root().join("crates/mantissa/src");
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).into_iter().flatten() {
            let path = entry.unwrap().path();
            let name = path.strip_prefix(&own).unwrap_or(&path).to_string_lossy().into_owned();
            if path.is_dir() {
                folders.extend(Some(path).filter(|path| !path.ends_with("tests")));
                continue;
            }
            if !name.ends_with(".rs")
                || name.ends_with("tests.rs")
                || WRITERS.iter().any(|(file, _)| *file == name)
            {
                continue;
            }
            let text = fs::read_to_string(&path).unwrap();
            let code = text.lines().take_while(|line| line.trim() != "#[cfg(test)]");
            let writes = |line: &&str| WRITES.iter().any(|write| line.contains(write));
            // The reader's side of a child, and the columns of the terminal, are no writes.
            let other = |line: &&str| {
                line.contains("Stdio::") || line.contains("Term::") || line.trim_start().starts_with("//")
            };
            let lines = code.filter(writes).filter(|line| !other(line));
            found.extend(lines.map(|line| format!("{name}: {}", line.trim())));
        }
    }
    assert!(found.is_empty(), "not through the one writer:\n{}", found.join("\n"));
}

#[test]
fn fields_of_a_config_are_escaped_and_cut() {
    for field in ["model_type", "hidden_act", "torch_dtype", "hidden_size", "rope_scaling", "architectures"] {
        with_json("config.json", &|config| config[field] = json!(evil()));
    }
    with_json("config.json", &|config| config["quantization_config"] = json!({"quant_method": evil()}));
    with_json("config.json", &|config| config[evil()] = json!(1));
    with_json("config.json", &|config| config["rope_scaling"] = json!({"rope_type": evil(), "factor": 2.0}));
    with_json("config.json", &|config| config["architectures"] = json!([evil(), evil()]));
    with_json("generation_config.json", &|config| config["eos_token_id"] = json!(evil()));
    with_json("quality.json", &|quality| quality[evil()] = json!(evil()));
    with_json("mantissa-manifest.json", &|manifest| {
        *manifest = json!({"version": 1, "tool": evil(), "run": {"recipe": evil()}, "files": {evil(): {"bytes": 1, "sha256": "0".repeat(64)}}});
    });
}

#[test]
fn texts_of_a_tokenizer_are_escaped_and_cut() {
    with_json("tokenizer.json", &|file| file["added_tokens"][0]["content"] = json!(evil()));
    with_json("tokenizer.json", &|file| file["model"]["type"] = json!(evil()));
    with_json("tokenizer.json", &|file| file["normalizer"] = json!({"type": evil()}));
    with_json("tokenizer.json", &|file| file["model"]["vocab"][evil()] = json!(-1));
    with_json("tokenizer.json", &|file| file["model"]["merges"] = json!([[evil(), "a"]]));
    with_json("tokenizer_config.json", &|file| file["bos_token"] = json!(evil()));
    with_json("tokenizer_config.json", &|file| file["chat_template"] = json!({evil(): 1}));
}

#[test]
fn texts_of_a_chat_template_are_escaped_and_cut() {
    let set = |template: Value| {
        with_json("tokenizer_config.json", &|file| file["chat_template"] = template.clone());
    };
    set(json!(format!("{{{{ raise_exception({:?}) }}}}", "\u{202e}evil\u{2066}")));
    set(json!(format!("{{{{ raise_exception('{}') }}}}", evil().replace('\'', ""))));
    set(json!(format!("{{{{ '{}' }}}}", evil())));
    set(json!(format!("{{% {} %}}", evil())));
    set(json!(format!("{{{{ {} }}}}", evil())));
    set(json!([{"name": evil(), "template": "x"}]));
}

#[test]
fn names_of_tensors_are_escaped_and_cut() {
    for name in [evil(), format!("model.layers.0.self_attn.{}.weight", evil()), format!("{}.weight", evil())]
    {
        let temp = TempDir::new().unwrap();
        let at = temp.path().join("m");
        model(&at);
        let path = at.join("model.safetensors");
        let file = SafeTensors::open(&path).unwrap();
        let mut tensors: Vec<(String, Dtype, Vec<usize>, Vec<u8>)> = file
            .tensors()
            .iter()
            .map(|t| (t.name.clone(), t.dtype, t.shape.clone(), file.read(t).unwrap()))
            .collect();
        tensors.push((name, Dtype::F32, vec![2, 2], vec![0; 16]));
        let parts: Vec<_> =
            tensors.iter().map(|(n, d, s, b)| (n.as_str(), *d, s.as_slice(), b.clone())).collect();
        fs::remove_file(&path).unwrap();
        write(&path, &parts);
        all(&at, temp.path());
    }
}

#[test]
fn keys_and_texts_of_gguf_files_are_escaped_and_cut() {
    let text_of = |text: String| GgufValue::String(text);
    for metadata in [
        vec![("general.architecture".to_owned(), text_of(evil()))],
        vec![("general.architecture".to_owned(), text_of("llama".into())), (evil(), text_of(evil()))],
        vec![
            ("general.architecture".to_owned(), text_of("llama".into())),
            ("general.name".to_owned(), text_of(evil())),
            ("tokenizer.ggml.model".to_owned(), text_of(evil())),
            ("tokenizer.chat_template".to_owned(), text_of(format!("{{{{ {} }}}}", evil()))),
        ],
    ] {
        let temp = TempDir::new().unwrap();
        let at = temp.path().join("m.gguf");
        GgufWriter::create(&at, &metadata, &[]).unwrap().finish().unwrap();
        all(&at, temp.path());
    }
}

#[test]
fn texts_of_adapters_and_recipes_are_escaped_and_cut() {
    let temp = TempDir::new().unwrap();
    let (at, adapter, run) = (temp.path().join("m"), temp.path().join("a"), temp.path().join("run"));
    model(&at);
    fs::create_dir_all(run.join("adapter")).unwrap();
    fs::create_dir(&adapter).unwrap();
    let from = root().join("tests/data/peft/lora");
    for entry in fs::read_dir(&from).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), adapter.join(entry.file_name())).unwrap();
    }
    let old: Value = serde_json::from_slice(&fs::read(adapter.join("adapter_config.json")).unwrap()).unwrap();
    for field in ["base_model_name_or_path", "peft_type", "bias", "task_type", "target_modules", "lora_alpha"]
    {
        let mut new = old.clone();
        new[field] = json!(evil());
        new[evil()] = json!(evil());
        fs::write(adapter.join("adapter_config.json"), new.to_string()).unwrap();
        fs::write(run.join("adapter/adapter_config.json"), new.to_string()).unwrap();
        fs::write(run.join("mantissa-run.json"), "{}").unwrap();
        checked(&["run", text(&at), "--adapter", text(&adapter), "--prompt", "a", "-n", "1"]);
        checked(&["inspect", text(&adapter)]);
        checked(&["run", text(&run), "--prompt", "a", "-n", "1"]);
    }
    let recipe = temp.path().join("r.toml");
    let out = temp.path().join("o");
    let quoted = format!("{:?}", evil()).replace("\\u{", "\\u{");
    for content in [
        format!("method = '''{}'''\n", evil().replace('\r', "")),
        format!("{} = 1\n", evil()),
        "method = \"rtn\"\nweights = \"\u{202e}int8\"\n".to_owned(),
        format!("\"\\u202e{}\" = 1\n", "N".repeat(6000)),
        quoted,
    ] {
        fs::write(&recipe, content).unwrap();
        checked(&["quantize", text(&at), "--recipe", text(&recipe), "--out", text(&out)]);
    }
    checked(&["quantize", text(&at), "--recipe", &evil(), "--out", text(&out)]);
    checked(&["inspect", &evil()]);
}

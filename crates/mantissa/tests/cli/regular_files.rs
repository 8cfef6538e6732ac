//! Pipes, devices, folders and broken links in place of the files of a model: no command waits for them.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::support::{command, fail, mantissa, sampled, stderr, succeed, text};
use crate::unopenable::model;

/// Something that is no file, and how it is made at a path.
type Odd = (&'static str, fn(&Path));

const ODD: [Odd; 5] = [
    ("a pipe", |path| pipe(path)),
    ("a folder", |path| fs::create_dir(path).unwrap()),
    ("a device", |path| symlink("/dev/zero", path).unwrap()),
    ("a link to a pipe", |path| {
        let target = path.with_extension("fifo");
        let _ = fs::remove_file(&target);
        pipe(&target);
        symlink(target, path).unwrap();
    }),
    ("a link to nothing", |path| symlink("nowhere", path).unwrap()),
];

fn pipe(path: &Path) {
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
}

/// Runs a command, which must end by itself in some seconds; `None` if it is a server that has begun to serve.
fn ends(arguments: &[&str]) -> Option<Output> {
    let serves = arguments[0] == "serve";
    let mut child = command().args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let started = Instant::now();
    loop {
        if child.try_wait().unwrap().is_some() {
            return Some(child.wait_with_output().unwrap());
        }
        if started.elapsed() > Duration::from_secs(if serves { 2 } else { 30 }) {
            child.kill().unwrap();
            let output = child.wait_with_output().unwrap();
            let said = stderr(&output) + &String::from_utf8_lossy(&output.stdout);
            assert!(serves && said.contains("http://"), "{arguments:?} hangs: {said}");
            return None;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Files of a model folder.
const FILES: [&str; 12] = [
    "config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "quantize_config.json",
    "quality.json",
    "mantissa-manifest.json",
    "mantissa-transform.json",
];

/// Checks every kind of file that is none at `name` with the commands of `lines`.
fn matrix(names: &[&str]) {
    let temp = TempDir::new().unwrap();
    let (source, out, sample) = (temp.path().join("m"), temp.path().join("o"), temp.path().join("t.txt"));
    let gguf = temp.path().join("o.gguf");
    model(&source);
    fs::write(source.join("chat_template.jinja"), "{{ messages[0].content }}").unwrap();
    fs::write(&sample, "Once upon a time there was a dog. ".repeat(4)).unwrap();
    let m = text(&source);
    let lines: [&[&str]; 8] = [
        &["run", m, "--prompt", "Once", "--max-tokens", "1"],
        &["run", m, "--chat", "--prompt", "Once", "--max-tokens", "1"],
        &["serve", m, "--port", "0"],
        &["inspect", m],
        &["lint", m, "--for", "vllm"],
        &["eval", m, "--text", text(&sample)],
        &["quantize", m, "--recipe", "rtn-int8-channel", "--out", text(&out), "--overwrite"],
        &["convert", m, "--format", "gguf", "--out", text(&gguf), "--overwrite"],
    ];
    for name in sampled(names, 4) {
        let path = source.join(name);
        let before = fs::read(&path).ok();
        for (kind, make) in ODD {
            let _ = fs::remove_file(&path);
            make(&path);
            let mut refused = 0;
            for line in lines {
                let Some(output) = ends(line) else { continue };
                let (said, code) = (stderr(&output), output.status.code());
                let error = said.lines().find(|line| line.starts_with("error: ")).unwrap_or_default();
                assert!(matches!(code, Some(0..=2)), "{line:?} {name} {kind}: {code:?}: {said}");
                if code == Some(2) && error.contains(name) {
                    refused += 1;
                    assert!(error.contains("not a regular file"), "{line:?} {name} {kind}: {said}");
                }
                if std::env::var_os("SHOW").is_some() {
                    println!("{name} | {kind} | {} | {code:?} | {}", line[0], error.replace(m, ""));
                }
            }
            let needed = NEEDED.iter().find(|(file, _)| file == name).map_or(0, |(_, least)| *least);
            assert!(refused >= needed, "{name} {kind}: refused by {refused} commands");
            if path.is_dir() { fs::remove_dir(&path).unwrap() } else { fs::remove_file(&path).unwrap() }
        }
        if let Some(bytes) = before {
            fs::write(&path, bytes).unwrap();
        }
    }
}

/// Files that commands need, with the least number of commands that must refuse them.
const NEEDED: [(&str, usize); 6] = [
    ("config.json", 8),
    ("model.safetensors", 8),
    ("tokenizer.json", 4),
    ("tokenizer_config.json", 4),
    ("generation_config.json", 5),
    ("chat_template.jinja", 4),
];

#[test]
fn no_command_waits_for_a_pipe_in_place_of_weights_or_config() {
    matrix(&FILES[..3]);
}

#[test]
fn no_command_waits_for_a_pipe_in_place_of_a_tokenizer() {
    matrix(&FILES[3..7]);
}

#[test]
fn no_command_waits_for_a_pipe_in_place_of_another_file() {
    matrix(&FILES[7..]);
}

#[test]
fn files_that_are_named_must_be_files() {
    let temp = TempDir::new().unwrap();
    let odd = temp.path().join("odd.toml");
    let out = temp.path().join("o");
    for (kind, make) in ODD {
        make(&odd);
        let at = text(&odd);
        let lines: [&[&str]; 6] = [
            &["quantize", "demo", "--recipe", at, "--out", text(&out)],
            &["quantize", "demo", "--recipe", "rtn-int8-channel", "--imatrix", at, "--out", text(&out)],
            &["rebuild", at, "--source", "demo", "--out", text(&out)],
            &["run", "demo", "--prompt", "x", "--adapter", at],
            &["inspect", at],
            &["train", at],
        ];
        for line in lines {
            let output = ends(line).unwrap();
            let said = stderr(&output);
            if std::env::var_os("SHOW").is_some() {
                println!("{kind} | {} | {:?} | {}", line[0], output.status.code(), said.trim());
            }
            assert_eq!(output.status.code(), Some(2), "{line:?} {kind}: {said}");
            assert!(said.contains("odd.toml"), "{line:?} {kind}: {said}");
        }
        if odd.is_dir() { fs::remove_dir(&odd).unwrap() } else { fs::remove_file(&odd).unwrap() }
    }
}

/// Links to files, of which download caches are made, and texts from pipes are read as before.
#[test]
fn links_to_files_and_texts_from_pipes_are_read() {
    let temp = TempDir::new().unwrap();
    let (real, linked) = (temp.path().join("blobs"), temp.path().join("snapshot"));
    model(&real);
    fs::create_dir(&linked).unwrap();
    for entry in fs::read_dir(&real).unwrap() {
        let name = entry.unwrap().file_name();
        symlink(Path::new("../blobs").join(&name), linked.join(&name)).unwrap();
    }
    succeed(&["run", text(&linked), "--prompt", "Once", "--max-tokens", "1", "--quiet"]);
    let script = "printf 'Once upon a time there was a dog.' | \"$0\" eval demo --text /dev/stdin --quiet";
    let piped = Command::new("sh").args(["-c", script, env!("CARGO_BIN_EXE_mantissa")]).output().unwrap();
    assert!(piped.status.success(), "{}", stderr(&piped));
    let error = fail(2, &["eval", "demo", "--text", "/dev/zero", "--quiet"]);
    assert!(error.contains("a character device, not a regular file"), "{error}");
    assert_eq!(mantissa(&["eval", "demo", "--text", text(&linked), "--quiet"]).status.code(), Some(2));
}

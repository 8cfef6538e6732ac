//! Models by their names on the Hugging Face hub, in a cache laid out as `huggingface_hub` does: links from snapshots to blobs.

#![cfg(unix)]

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Output;

use serde_json::Value;
use tempfile::TempDir;

use crate::support::{command, root, stderr, strict_json, succeed, text};

/// Puts the files of `folder` into `cache` as a snapshot of `org/name`, and makes it that of `main`.
fn put(cache: &Path, name: &str, revision: &str, folder: &Path) {
    let repository = cache.join(format!("models--org--{name}"));
    let snapshot = repository.join("snapshots").join(revision);
    for made in [&snapshot, &repository.join("blobs"), &repository.join("refs")] {
        fs::create_dir_all(made).unwrap();
    }
    for entry in fs::read_dir(folder).unwrap() {
        let (file, blob) = (
            entry.unwrap(),
            format!("{revision}-{}", fs::read_dir(repository.join("blobs")).unwrap().count()),
        );
        fs::copy(file.path(), repository.join("blobs").join(&blob)).unwrap();
        symlink(format!("../../blobs/{blob}"), snapshot.join(file.file_name())).unwrap();
    }
    fs::write(repository.join("refs/main"), revision).unwrap();
}

fn run(cache: &Path, arguments: &[&str]) -> Output {
    command().args(arguments).env("HF_HUB_CACHE", cache).output().unwrap()
}

fn json(cache: &Path, arguments: &[&str]) -> Value {
    let output = run(cache, &[arguments, &["--json", "--quiet"]].concat());
    assert!(output.status.success(), "{arguments:?}: {}", stderr(&output));
    strict_json::parse(&output.stdout).unwrap()
}

#[test]
fn a_name_stands_for_its_newest_snapshot() {
    let temp = TempDir::new().unwrap();
    let (cache, out) = (temp.path().join("hub"), temp.path().join("out"));
    let tiny = root().join("tests/data/tiny");
    put(&cache, "model", "aaa1", &tiny.join("llama2-gqa-tied"));
    put(&cache, "model", "bbb2", &tiny.join("qwen2-bias"));
    let kind = |name: &str| json(&cache, &["inspect", name])["architecture"].clone();
    let by_path = |name: &str| json(&cache, &["inspect", text(&tiny.join(name))])["architecture"].clone();
    let (old, new) = (by_path("llama2-gqa-tied"), by_path("qwen2-bias"));
    assert!(old != new && !new.is_null(), "{new}");
    for name in ["org/model", "hf.co/org/model", "https://huggingface.co/org/model"] {
        assert_eq!(kind(name), new, "{name}");
    }
    assert_eq!(kind(text(&cache.join("models--org--model"))), new);
    assert_eq!(kind("org/model@aaa1"), old);
    // What writes takes the name as well, and no file of the cache changes.
    let done = run(
        &cache,
        &["quantize", "org/model@aaa1", "--recipe", "rtn-int8-channel", "--out", text(&out), "--quiet"],
    );
    assert!(done.status.success(), "{}", stderr(&done));
    succeed(&["verify", text(&out), "--reference", text(&tiny.join("llama2-gqa-tied"))]);
    let inside = run(
        &cache,
        &[
            "quantize",
            "org/model",
            "--recipe",
            "rtn-int8-channel",
            "--out",
            text(&cache.join("models--org--model/snapshots/bbb2")),
        ],
    );
    assert_eq!(inside.status.code(), Some(2), "{}", stderr(&inside));
}

#[test]
fn a_tag_stands_for_a_gguf_file_and_a_wrong_name_is_answered() {
    let temp = TempDir::new().unwrap();
    let (cache, made) = (temp.path().join("hub"), temp.path().join("made"));
    fs::create_dir(&made).unwrap();
    let tiny = root().join("tests/data/tiny/llama2-gqa-tied");
    for (recipe, name) in [("rtn-q8_0", "m-Q8_0.gguf"), ("rtn-q4_0", "m-Q4_0.gguf")] {
        succeed(&["quantize", text(&tiny), "--recipe", recipe, "--out", text(&made.join(name)), "--quiet"]);
    }
    for entry in fs::read_dir(&made).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "gguf") {
            fs::remove_file(path).unwrap();
        }
    }
    put(&cache, "model-GGUF", "c1", &made);
    let bytes = |name: &str| json(&cache, &["inspect", name])["bytes"].as_u64().unwrap();
    assert!(bytes("org/model-GGUF:q8_0") > bytes("hf.co/org/model-GGUF:Q4_0"));
    let failed = |name: &str| {
        let output = run(&cache, &["inspect", name]);
        assert_eq!(output.status.code(), Some(2), "{name}");
        stderr(&output)
    };
    let several = failed("org/model-GGUF");
    assert!(several.contains("2 GGUF files") && several.contains("name one of them"), "{several}");
    let missing = failed("org/model-GGUG");
    assert!(
        missing.contains("mantissa pull org/model-GGUG") && missing.contains("give org/model-GGUF"),
        "{missing}"
    );
    let near = failed(text(&tiny.with_file_name("llama2-gqa-tie")));
    assert!(near.contains("there is llama2-gqa-tied"), "{near}");
}

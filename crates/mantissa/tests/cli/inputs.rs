//! Input files: weight files of a folder, missing files, token windows that do not fit.

use std::fs;
use std::path::PathBuf;

use tempfile::TempDir;

use crate::support::{fail, json, root, succeed, text};

fn model() -> PathBuf {
    root().join("tests/data/tiny/llama2-gqa-tied")
}

#[test]
fn a_weight_file_of_a_folder_stands_for_the_folder() {
    let temp = TempDir::new().unwrap();
    let (dir, out) = (temp.path().join("m"), temp.path().join("q"));
    fs::create_dir(&dir).unwrap();
    for name in ["config.json", "model.safetensors"] {
        fs::copy(model().join(name), dir.join(name)).unwrap();
    }
    let file = dir.join("model.safetensors");
    let recipe = ["--recipe", "rtn-int8-channel", "--overwrite", "--out", text(&out), "--quiet"];
    let done = json(&[&["quantize", text(&file), "--json"], &recipe[..]].concat());
    assert_eq!(done["verification"]["ok"], true, "{done}");
    let eval = |model: &str| {
        let tokens = temp.path().join("w.json");
        fs::write(&tokens, "[[1, 2, 3, 4]]").unwrap();
        json(&["eval", model, "--tokens", text(&tokens), "--json", "--quiet"])["nll"].clone()
    };
    assert_eq!(eval(text(&file)), eval(text(&dir)));
    // `inspect` treats a weight file as a single file.
    assert!(json(&["inspect", text(&file), "--json"])["model_type"].is_null());
    // A foreign weight file in a model folder is refused, with a fix.
    let other = dir.join("other.safetensors");
    fs::copy(&file, &other).unwrap();
    let line = fail(2, &[&["quantize", text(&other)], &recipe[..]].concat());
    assert!(
        line.contains("other.safetensors: expected a model folder") && line.contains("name the folder"),
        "{line}"
    );
}

#[test]
fn the_index_and_the_shards_stand_for_the_folder_too() {
    let temp = TempDir::new().unwrap();
    let out = temp.path().join("m");
    let recipe = ["--recipe", "rtn-int8-channel", "--max-shard-size", "20KB", "--out", text(&out), "--quiet"];
    succeed(&[&["quantize", text(&model())], &recipe[..]].concat());
    let shard =
        fs::read_dir(&out).unwrap().flatten().find(|e| e.file_name().to_string_lossy().contains("-of-"));
    for file in [shard.unwrap().path(), out.join("model.safetensors.index.json")] {
        assert_eq!(json(&["verify", text(&file), "--json", "--quiet"])["ok"], true, "{}", file.display());
    }
}

#[test]
fn every_input_that_is_not_there_exits_2_and_is_named() {
    let temp = TempDir::new().unwrap();
    let (model, out) = (model(), temp.path().join("out"));
    let model = text(&model);
    let quantize = |recipe, option, file| {
        vec!["quantize", model, "--recipe", recipe, option, file, "--out", text(&out), "--quiet"]
    };
    let toml = "no/recipe.toml";
    for mut arguments in [
        quantize("q4_k_m", "--imatrix", "no/file"),
        quantize("q4_k_m", "--imatrix", "no/file.gguf"),
        quantize("gptq-int4-g8", "--calibration", "no/file"),
        quantize("gptq-int4-g8", "--calibration-tokens", "no/file"),
        quantize("rtn-int8-channel", "--text", "no/file"),
        quantize("rtn-int8-channel", "--tokens", "no/file"),
        vec!["quantize", model, "--recipe", toml, "--out", text(&out)],
        vec!["eval", model, "--text", "no/file"],
        vec!["eval", model, "--tokens", "no/file"],
        vec!["train", "no/file"],
        vec!["cast", "no/file", "--scheme", "int8-channel", "--out", text(&out)],
    ] {
        let line = fail(2, &arguments);
        assert!(line.starts_with("error: no/") && line.contains(", got no such file"), "{line}");
        // A folder is not accepted as a file.
        let folder = text(temp.path());
        if let Some(file) = arguments.iter_mut().find(|a| **a == "no/file") {
            *file = folder;
            let line = fail(2, &arguments);
            assert!(line.contains(folder), "{line}");
        }
        assert!(!out.exists());
    }
}

#[test]
fn token_windows_that_do_not_fit_name_file_key_and_window() {
    let temp = TempDir::new().unwrap();
    let (model, out) = (model(), temp.path().join("out"));
    let model = text(&model);
    let file = temp.path().join("t.json");
    let long = vec![1; 4096];
    fs::write(&file, format!(r#"{{"high": [[1, 2], [1, 2, 4000000]], "long": [[1, 2], {long:?}]}}"#))
        .unwrap();
    for (key, place, found) in
        [("high", "window 1: token 2: ", "4000000"), ("long", "window 1: ", "4096 tokens")]
    {
        let tokens = format!("{}:{key}", text(&file));
        let quantize = |recipe, option| {
            vec!["quantize", model, "--recipe", recipe, option, &tokens, "--out", text(&out), "--quiet"]
        };
        for arguments in [
            vec!["eval", model, "--tokens", &tokens, "--quiet"],
            vec!["doctor", model, "--tokens", &tokens, "--quiet"],
            vec!["imatrix", model, "--calibration-tokens", &tokens, "--out", text(&out), "--quiet"],
            quantize("rtn-int8-channel", "--tokens"),
            quantize("gptq-int8-channel", "--calibration-tokens"),
        ] {
            let line = fail(2, &arguments);
            assert!(line.contains(&format!("t.json:{key}: {place}")) && line.contains(found), "{line}");
            assert!(!out.exists());
        }
    }
}

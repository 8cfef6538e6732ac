//! `quantize` with several formats: each output has the bytes of a run of its own.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json as value};
use tempfile::TempDir;

use crate::support::{fail, json, mantissa, stderr, succeed, text};

/// A model in f16, whose scales compressed-tensors and GPTQ store alike, and token windows.
struct Inputs {
    dir: TempDir,
    model: PathBuf,
    tokens: PathBuf,
}

impl Inputs {
    fn new() -> Self {
        let dir = TempDir::new().unwrap();
        let (model, tokens) = (dir.path().join("m"), dir.path().join("tokens.json"));
        let sizes = ["--hidden", "64", "--ffn", "128", "--heads", "4", "--layers", "2", "--vocab", "256"];
        succeed(
            &[&["synth", "--out", text(&model), "--preset", "tiny", "--dtype", "f16"], &sizes[..]].concat(),
        );
        let window = |w: usize| (0..48).map(|i| (w * 31 + i * i) % 256).collect::<Vec<_>>();
        fs::write(&tokens, value!((0..4).map(window).collect::<Vec<_>>()).to_string()).unwrap();
        Inputs { dir, model, tokens }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Arguments of a run into `out`.
    fn arguments(&self, recipe: &str, out: &Path, formats: &[&str], more: &[&str]) -> Vec<String> {
        let mut all = ["quantize", text(&self.model), "--recipe", recipe, "--out", text(out), "--quiet"]
            .map(str::to_owned)
            .to_vec();
        formats.iter().for_each(|format| all.extend(["--format".to_owned(), (*format).to_owned()]));
        all.extend(more.iter().map(|word| (*word).to_owned()));
        all
    }

    /// Makes all formats at once and one by one, and compares every file. Returns the report of the first.
    fn compare(&self, name: &str, recipe: &str, formats: &[&str], more: &[&str]) -> Value {
        let together = self.at(name);
        let report = json(&self.arguments(recipe, &together, formats, &[more, &["--json"]].concat()));
        for format in formats {
            let place = if *format == "gguf" { "model.gguf" } else { format };
            let alone = self.at(&format!("{name}-alone-{format}"));
            fs::create_dir(&alone).unwrap();
            succeed(&self.arguments(recipe, &alone.join(place), &[format], more));
            let of = |folder: &Path| -> BTreeMap<String, Vec<u8>> {
                files(folder).into_iter().filter(|(file, _)| file.starts_with(place)).collect()
            };
            let (ours, theirs) = (of(&together), of(&alone));
            assert!(!ours.is_empty());
            assert_eq!(ours.keys().collect::<Vec<_>>(), theirs.keys().collect::<Vec<_>>(), "{name} {format}");
            for (file, bytes) in &ours {
                assert!(theirs[file] == *bytes, "{name}: {file} differs");
            }
        }
        report
    }
}

/// Files below a folder with their bytes, by path.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut all = BTreeMap::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        if path.is_dir() {
            all.extend(files(&path).into_iter().map(|(inner, bytes)| (format!("{name}/{inner}"), bytes)));
        } else {
            all.insert(name, fs::read(&path).unwrap());
        }
    }
    all
}

#[test]
fn formats_that_store_layers_alike_share_one_solution_with_the_same_bytes() {
    let inputs = Inputs::new();
    let tokens = text(&inputs.tokens);
    let calibrated = ["--calibration-tokens", tokens];
    let report =
        inputs.compare("gptq", "gptq-int4-g32", &["compressed-tensors", "gptq", "native"], &calibrated);
    let solved = value!([
        ["compressed-tensors", "compressed-tensors"],
        ["gptq", "compressed-tensors"],
        ["native", "native"]
    ]);
    assert_eq!(report["solved_for"], solved);
    for output in report["outputs"].as_array().unwrap() {
        assert_eq!((&output["verification"]["ok"], &output["method"]), (&true.into(), &"gptq".into()));
    }
    let measured = [&calibrated[..], &["--tokens", tokens]].concat();
    let formats = ["awq", "gptq", "compressed-tensors"];
    let report = inputs.compare("awq", "awq-int4-g32-asym", &formats, &measured);
    assert_eq!(report["solved_for"][2], value!(["compressed-tensors", "awq"]));
    assert!(report["outputs"][2]["evaluation"]["kl"].as_f64().unwrap() > 0.0);
    inputs.compare("w8a8", "smooth-int8-channel+int8-token", &["native", "compressed-tensors"], &calibrated);
    inputs.compare("head", "rtn-int4-g32", &["gptq", "native"], &["--untie"]);
}

#[test]
fn a_gguf_file_stands_beside_folders() {
    let inputs = Inputs::new();
    let report = inputs.compare("blocks", "rtn-q4_0", &["gguf", "native"], &[]);
    assert!(report["outputs"][0]["output"].as_str().unwrap().ends_with("model.gguf"));
    let shown = succeed(&inputs.arguments("rtn-q4_0", &inputs.at("shown"), &["gguf", "native"], &[]));
    assert!(!shown.contains("has the codes") && shown.contains(" s in all"), "{shown}");
    let alike = inputs.arguments("rtn-int4-g32", &inputs.at("alike"), &["compressed-tensors", "gptq"], &[]);
    assert!(succeed(&alike).contains("layers      gptq has the codes and scales of compressed-tensors\n"));
}

#[test]
fn a_format_that_cannot_hold_the_recipe_is_refused_before_any_work() {
    let inputs = Inputs::new();
    let out = inputs.at("out");
    let line = fail(2, &inputs.arguments("rtn-int4-g32", &out, &["gptq", "gguf"], &[]));
    assert!(line.contains("gguf") && !out.exists(), "{line}");
    let line = fail(2, &inputs.arguments("rtn-int4-g32", &out, &["gptq", "gptq"], &[]));
    assert!(line.contains("gptq twice") && !out.exists(), "{line}");
    let dry = json(&inputs.arguments("rtn-int4-g32", &out, &["gptq", "native"], &["--dry-run", "--json"]));
    assert!(dry["outputs"].as_array().unwrap().len() == 2 && !out.exists(), "{dry}");
}

#[test]
fn all_outputs_appear_or_none_and_finished_work_resumes() {
    let inputs = Inputs::new();
    let tokens = text(&inputs.tokens);
    let (out, formats) = (inputs.at("out"), ["compressed-tensors", "gptq"]);
    let calibrated = ["--calibration-tokens", tokens, "--tokens", tokens];
    let gated =
        inputs.arguments("gptq-int2-g32", &out, &formats, &[&calibrated[..], &["--max-kl", "1e-9"]].concat());
    let output = mantissa(&gated);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(formats.iter().all(|format| !out.join(format).exists()));
    let again = inputs.arguments("gptq-int2-g32", &out, &formats, &[&calibrated[..], &["--json"]].concat());
    let report = json(&again);
    for output in report["outputs"].as_array().unwrap() {
        assert!(output["resumed"].as_u64().unwrap() >= 14, "{output}");
    }
    let whole = inputs.at("whole");
    succeed(&inputs.arguments("gptq-int2-g32", &whole, &formats, &calibrated));
    assert!(files(&whole) == files(&out));
}

//! QTIP and the formats of its codes, through the command line.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;
use tempfile::TempDir;

use crate::lint::synthetic_of;
use crate::main_job::windows;
use crate::support::{command, fail, json, levels_and_threads, stderr, succeed, text};

fn files(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let paths = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let mut all: Vec<_> = paths
        .map(|p| (p.file_name().unwrap().to_string_lossy().into_owned(), fs::read(&p).unwrap()))
        .collect();
    all.sort();
    all
}

/// Model of one layer whose widths are multiples of 128.
fn wide(dir: &Path) -> PathBuf {
    let path = dir.join("wide");
    let sizes = ["--hidden", "128", "--ffn", "128", "--layers", "1", "--heads", "4", "--kv-heads", "4"];
    let rest =
        ["--vocab", "64", "--preset", "tiny", "--context", "64", "--tied=false", "--seed", "5", "--quiet"];
    succeed(&[&["synth", "--out", text(&path)][..], &sizes, &rest].concat());
    path
}

pub fn quantize(model: &Path, recipe: &str, tokens: &str, out: &Path, more: &[&str]) -> Value {
    let arguments = ["quantize", text(model), "--recipe", recipe, "--out", text(out), "--json", "--quiet"];
    json(&[&arguments[..], &["--calibration-tokens", tokens], more].concat())
}

pub fn kl(model: &Path, reference: &Path, tokens: &str) -> f64 {
    let arguments = ["eval", text(model), "--reference", text(reference), "--tokens", tokens];
    json(&[&arguments[..], &["--json", "--quiet"]].concat())["kl"].as_f64().unwrap()
}

#[test]
fn a_bit_more_takes_a_quarter_of_the_error_and_verify_reads_it_twice() {
    let temp = TempDir::new().unwrap();
    let (model, tokens) = (synthetic_of(temp.path(), "bf16"), windows(temp.path()));
    let mut costs = Vec::new();
    for bits in [2, 3, 4] {
        let out = temp.path().join(bits.to_string());
        let done = quantize(&model, &format!("qtip-trellis{bits}"), &tokens, &out, &[]);
        let found = &done["verification"];
        assert_eq!((&found["ok"], &found["weights"]), (&true.into(), &14.into()), "{found}");
        // All are decoded by two readers.
        assert!(!found["notes"].to_string().contains("decoded twice"), "{found}");
        assert_eq!((&done["container"], &done["method"]), (&"native".into(), &"qtip".into()));
        // A sign for each of 64 inputs and 64 outputs, and one scale.
        let stored = done["layers"][0]["bits_per_weight"].as_f64().unwrap();
        assert!((stored - (f64::from(bits) + (128.0 + 16.0) / 4096.0)).abs() < 1e-9, "{stored}");
        costs.push(kl(&out, &model, &tokens));
    }
    assert!(costs[1] < costs[0] / 2.5 && costs[2] < costs[1] / 2.5, "{costs:?}");
    let rounded = temp.path().join("rounded");
    let arguments =
        ["quantize", text(&model), "--recipe", "rtn-int2-g32", "--out", text(&rounded), "--quiet"];
    succeed(&arguments);
    let rounded = kl(&rounded, &model, &tokens);
    assert!(costs[0] < rounded, "{} {rounded}", costs[0]);
    let out = temp.path().join("3");
    let verified = json(&["verify", text(&out), "--reference", text(&model), "--json", "--quiet"]);
    assert_eq!((&verified["ok"], &verified["compared"]), (&true.into(), &21.into()), "{verified}");
}

#[test]
fn bytes_depend_on_neither_threads_nor_level() {
    let temp = TempDir::new().unwrap();
    let (model, tokens) = (synthetic_of(temp.path(), "bf16"), windows(temp.path()));
    let recipe = temp.path().join("r.toml");
    let table = "method = \"qtip\"\nweights = \"trellis4\"\nkeep = [\"*.0.mlp.*\", \"*.1.self_attn.*\", \"*.gate_proj\", \"*.k_proj\", \"*.o_proj\", \"*.up_proj\"]\n[[layers]]\nmodules = [\"*.q_proj\"]\nweights = \"trellis2-mul1\"\n";
    fs::write(&recipe, table).unwrap();
    same_bytes_everywhere(temp.path(), &model, text(&recipe), &tokens);
}

/// Quantizes at every instruction set level and number of threads; the bytes must agree.
pub fn same_bytes_everywhere(dir: &Path, model: &Path, recipe: &str, tokens: &str) {
    let mut first: Option<Vec<(String, Vec<u8>)>> = None;
    for (level, threads) in levels_and_threads() {
        let out = dir.join(format!("{level}-{threads}"));
        let mut command = command();
        command.env("MANTISSA_ISA", level.name());
        command.args(["quantize", text(model), "--recipe", recipe, "--out", text(&out)]);
        command.args(["--calibration-tokens", tokens, "--threads", threads, "--quiet"]);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        let files = files(&out);
        assert!(first.get_or_insert_with(|| files.clone()) == &files, "{level}, {threads} threads");
    }
}

#[test]
fn exl3_holds_the_codes_of_the_native_container() {
    let temp = TempDir::new().unwrap();
    let (model, tokens) = (wide(temp.path()), windows(temp.path()));
    let (exl3, native) = (temp.path().join("exl3"), temp.path().join("native"));
    let done = quantize(&model, "qtip-trellis2", &tokens, &exl3, &["--format", "exl3"]);
    assert_eq!(done["verification"]["ok"], true, "{done}");
    assert_eq!(
        (&done["verification"]["weights"], &done["layers"][0]["scheme"]),
        (&7.into(), &"trellis2-channel".into())
    );
    let verified = json(&["verify", text(&exl3), "--reference", text(&model), "--json", "--quiet"]);
    assert_eq!(verified["ok"], true, "{verified}");
    quantize(&model, "qtip-trellis2-channel", &tokens, &native, &["--format", "native"]);
    let difference = kl(&exl3, &native, &tokens);
    assert!(difference.abs() < 1e-9, "{difference}");
    let read = |name: &str| -> Value { serde_json::from_slice(&fs::read(exl3.join(name)).unwrap()).unwrap() };
    let config = &read("config.json")["quantization_config"];
    assert_eq!(
        (&config["quant_method"], &config["codebook"], &config["bits"]),
        (&"exl3".into(), &"mcg".into(), &2.0.into())
    );
    let module = &read("quantization_config.json")["tensor_storage"]["model.layers.0.mlp.up_proj"];
    assert_eq!((&module["quant_format"], &module["bits_per_weight"]), (&"exl3".into(), &2.into()));
    assert_eq!(module["mcg_multiplier"], 0xCBAC_1FEDu32);
    let codes = &module["stored_tensors"]["model.layers.0.mlp.up_proj.trellis"];
    assert_eq!(codes["shape"], serde_json::json!([8, 8, 32]));
    // Without the hashes it is still decoded twice.
    fs::remove_file(exl3.join("mantissa-manifest.json")).unwrap();
    let again = json(&["verify", text(&exl3), "--reference", text(&model), "--json", "--quiet"]);
    assert_eq!(again["ok"], true, "{again}");
}

#[test]
fn unsupported_uses_of_trellises_are_refused() {
    let temp = TempDir::new().unwrap();
    let (model, tokens) = (synthetic_of(temp.path(), "bf16"), windows(temp.path()));
    let out = temp.path().join("out");
    let refused = |recipe: &str, more: &[&str]| {
        let arguments = ["quantize", text(&model), "--recipe", recipe, "--out", text(&out)];
        fail(2, &[&arguments[..], &["--calibration-tokens", &tokens], more].concat())
    };
    assert!(refused("qtip-trellis2", &["--format", "exl3"]).contains("multiples of 128"));
    assert!(refused("qtip-trellis2", &["--format", "gptq"]).contains("trellis2"));
    assert!(refused("rtn-trellis2", &[]).contains("qtip"));
    assert!(refused("gptq-trellis2", &[]).contains("qtip"));
    assert!(refused("autoround-trellis2", &[]).contains("qtip"));
    assert!(refused("qtip-int4-g32", &[]).contains("trellis1 to trellis8"));
    assert!(refused("rotate-qtip-trellis2", &[]).contains("rotates each weight itself"));
    assert!(refused("awq-qtip-trellis2", &[]).contains("no transform"));
    assert!(refused("qtip-trellis2+int8-token", &["--format", "exl3"]).contains("activations"));
    assert!(refused("rtn-int4-g32+trellis2", &[]).contains("trellis2"));
    let without = ["quantize", text(&model), "--recipe", "qtip-trellis2", "--out", text(&out)];
    assert!(fail(2, &without).contains("--calibration"));
    assert!(!out.exists());
}

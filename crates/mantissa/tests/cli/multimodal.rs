//! Multimodal models: the text model is quantized, everything else is copied bit for bit and listed as unquantized.

use std::fs;
use std::path::{Path, PathBuf};

use mantissa_store::Dtype;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::main_job::{tiny, windows};
use crate::support::{File, json as run, mantissa, stderr, succeed, text, write};

const MODELS: [&str; 9] = [
    "gemma3-vision",
    "mistral3",
    "llava",
    "qwen2.5-vl",
    "qwen3-vl",
    "qwen3-vl-moe",
    "qwen3-5-moe-vision",
    "gemma3n-vision",
    "gemma4-vision",
];

fn read(path: PathBuf) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// Copies a model and puts `more` tensors of zeros and ones in it.
pub fn with_tensors(model: &Path, out: &Path, more: &[(&str, &[usize])]) -> PathBuf {
    fs::create_dir(out).unwrap();
    for name in ["config.json", "tokenizer.json"] {
        if model.join(name).exists() {
            fs::copy(model.join(name), out.join(name)).unwrap();
        }
    }
    let file = File::open(&model.join("model.safetensors"));
    let mut tensors: Vec<_> = file
        .names()
        .into_iter()
        .map(|name| (name.clone(), file.dtype(&name), file.shape(&name), file.bytes(&name)))
        .collect();
    for (name, shape) in more {
        let bytes = (0..shape.iter().product::<usize>()).flat_map(|i| [0, if i % 3 == 0 { 0x3f } else { 0 }]);
        tensors.push(((*name).to_owned(), Dtype::F16, shape.to_vec(), bytes.collect()));
    }
    let tensors: Vec<_> = tensors
        .iter()
        .map(|(name, dtype, shape, bytes)| (name.as_str(), *dtype, &shape[..], bytes.clone()))
        .collect();
    write(&out.join("model.safetensors"), &tensors);
    out.to_owned()
}

/// Names of the tensors of towers and projectors.
fn other_parts(file: &File) -> Vec<String> {
    let other = |name: &String| {
        ["visual.", "vision_tower.", "embed_vision.", "projector."].iter().any(|part| name.contains(part))
    };
    file.names().into_iter().filter(other).collect()
}

#[test]
fn towers_are_copied_bit_for_bit_and_listed() {
    let temp = TempDir::new().unwrap();
    let tokens = windows(temp.path());
    for name in MODELS {
        let (model, out) = (temp.path().join(name), temp.path().join(format!("{name}-int8")));
        with_tensors(&tiny(name), &model, &[]);
        for file in ["preprocessor_config.json", "chat_template.jinja"] {
            fs::write(model.join(file), "{}").unwrap();
        }
        let recipe = ["--recipe", "rtn-int8-channel", "--out", text(&out), "--json"];
        let done = run(&[&["quantize", text(&model)][..], &recipe].concat());
        assert_eq!(done["verification"]["ok"], true, "{name}: {done}");
        let (theirs, ours) =
            (File::open(&model.join("model.safetensors")), File::open(&out.join("model.safetensors")));
        let (before, after) = (read(model.join("config.json")), read(out.join("config.json")));
        for (field, value) in before.as_object().unwrap() {
            assert_eq!(&after[field], value, "{name}: {field}");
        }
        assert!(out.join("preprocessor_config.json").exists() && out.join("chat_template.jinja").exists());
        let ignored = after["quantization_config"]["ignore"].as_array().unwrap();
        let parts = other_parts(&theirs);
        assert!(parts.len() >= 12, "{name}: {parts:?}");
        for tensor in parts {
            assert_eq!(ours.bytes(&tensor), theirs.bytes(&tensor), "{name}: {tensor}");
            let module = tensor.strip_suffix(".weight").filter(|_| theirs.shape(&tensor).len() == 2);
            assert!(module.is_none_or(|module| ignored.contains(&json!(module))), "{name}: {tensor}");
        }
        let share = &done["share"];
        let number = |field: &str| share[field].as_u64().unwrap();
        assert!(number("quantized") == number("covered") && number("linear") > number("covered"), "{share}");
        let sum: u64 =
            theirs.names().iter().map(|name| theirs.shape(name).iter().product::<usize>() as u64).sum();
        assert_eq!(number("parameters"), sum, "{name}");
        assert!(
            share["kept"]
                .as_array()
                .unwrap()
                .iter()
                .any(|kept| { kept["why"].as_str().unwrap().starts_with("tower or projector of") })
        );
        assert_eq!(done["bytes"], done["expected_bytes"]);
        let eval = ["--reference", text(&model), "--tokens", &tokens, "--json", "--quiet"];
        let found = run(&[&["eval", text(&out)][..], &eval].concat());
        assert!((0.0..0.02).contains(&found["kl"].as_f64().unwrap()), "{name}: {found}");
        let report = run(&["inspect", text(&out), "--json"]);
        assert_eq!(report["warnings"], json!([]), "{name}: {report}");
        succeed(&["lint", text(&out), "--for", "vllm"]);
    }
}

#[test]
fn every_format_names_the_towers() {
    let temp = TempDir::new().unwrap();
    let model = tiny("qwen3-vl");
    for (recipe, format, field) in [
        ("rtn-int4-g8", "gptq", "dynamic"),
        ("rtn-int4-g8-asym", "awq", "modules_to_not_convert"),
        ("rtn-fp8-e4m3-t128x128", "fp8", "modules_to_not_convert"),
        ("rtn-fp8-e4m3-tensor", "modelopt", "ignore"),
        ("rtn-int8-channel", "bitsandbytes", "llm_int8_skip_modules"),
    ] {
        let out = temp.path().join(format);
        let arguments =
            ["quantize", text(&model), "--recipe", recipe, "--format", format, "--out", text(&out)];
        let output = mantissa(&[&arguments[..], &["--quiet"]].concat());
        if !output.status.success() {
            // The format does not hold the scheme on layers this narrow.
            println!("{format}: {}", stderr(&output));
            continue;
        }
        let quantization = read(out.join("config.json"))["quantization_config"].clone();
        let listed = quantization[field].to_string();
        assert!(listed.contains("visual") && listed.contains("linear_fc1"), "{format}: {quantization}");
        let ours = File::open(&out.join("model.safetensors"));
        let theirs = File::open(&model.join("model.safetensors"));
        assert!(other_parts(&theirs).iter().all(|name| ours.bytes(name) == theirs.bytes(name)), "{format}");
    }
}

#[test]
fn a_gguf_file_holds_the_text_model() {
    let temp = TempDir::new().unwrap();
    let tokens = windows(temp.path());
    for name in ["mistral3", "qwen2.5-vl", "qwen3-vl"] {
        let (model, out) = (tiny(name), temp.path().join(format!("{name}.gguf")));
        let output = mantissa(&["quantize", text(&model), "--recipe", "q8_0", "--out", text(&out)]);
        let said = stderr(&output);
        assert!(output.status.success() && said.contains("are left out"), "{name}: {said}");
        let eval = ["--reference", text(&model), "--tokens", &tokens, "--json", "--quiet"];
        let found = run(&[&["eval", text(&out)][..], &eval].concat());
        assert!((0.0..0.05).contains(&found["kl"].as_f64().unwrap()), "{name}: {found}");
        let found = run(&["verify", text(&out), "--reference", text(&model), "--json"]);
        assert_eq!((&found["ok"], &found["faults"]), (&true.into(), &json!([])), "{name}");
    }
}

/// Towers and heads that predict several tokens stay as they are, also if the source is quantized.
#[test]
fn unused_tensors_of_dense_and_quantized_sources_are_kept() {
    let temp = TempDir::new().unwrap();
    let tokens = windows(temp.path());
    let more: &[(&str, &[usize])] = &[
        ("mtp.fc.weight", &[32, 64]),
        ("mtp.layers.0.mlp.up_proj.weight", &[24, 32]),
        ("mtp.norm.weight", &[32]),
        ("model.indexer.table", &[3, 5]),
    ];
    let model = with_tensors(&tiny("qwen3-vl"), &temp.path().join("model"), more);
    let [first, second] = ["first", "second"].map(|name| temp.path().join(name));
    let quantize = |from: &Path, recipe: &str, out: &Path| {
        let output = mantissa(&["quantize", text(from), "--recipe", recipe, "--out", text(out)]);
        let said = stderr(&output);
        assert!(output.status.success(), "{said}");
        assert!(said.contains("mtp.fc: 1 tensors") && said.contains("model.visual: "), "{said}");
    };
    quantize(&model, "rtn-fp8-e4m3-channel", &first);
    quantize(&first, "rtn-int4-g8", &second);
    let theirs = File::open(&model.join("model.safetensors"));
    for out in [&first, &second] {
        let ours = File::open(&out.join("model.safetensors"));
        let names = other_parts(&theirs);
        for name in names.iter().map(String::as_str).chain(more.iter().map(|(name, _)| *name)) {
            assert_eq!(ours.bytes(name), theirs.bytes(name), "{name}");
        }
        let ignored = read(out.join("config.json"))["quantization_config"]["ignore"].to_string();
        assert!(ignored.contains("mtp.layers.0.mlp.up_proj"), "{ignored}");
    }
    let eval = ["eval", text(&second), "--reference", text(&first), "--tokens", &tokens];
    let said = stderr(&mantissa(&eval));
    assert!(said.contains("the reference is itself quantized (compressed-tensors)"), "{said}");
    let found = run(&[&eval[..], &["--json", "--quiet"]].concat());
    assert_eq!(found["reference_format"], "compressed-tensors");
}

//! Models that no command can open are refused before any work, and earlier results stay unchanged.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use mantissa_store::{Dtype, SafeTensors};
use tempfile::TempDir;

use crate::support::{fail, mantissa, root, sampled, succeed, text, tiny_models, whole};

/// Copies a small model with its tokenizer.
pub fn model(dir: &Path) {
    fs::create_dir(dir).unwrap();
    let from = root().join("tests/data/tiny/llama2-gqa-tied");
    for name in ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
        fs::copy(from.join(name), dir.join(name)).unwrap();
    }
    fs::write(dir.join("generation_config.json"), "{\"eos_token_id\": 2}").unwrap();
}

/// Removes a tensor from the weights of `dir`, or changes its shape.
fn damage(dir: &Path, name: &str, missing: bool) {
    let path = dir.join("model.safetensors");
    let file = SafeTensors::open(&path).unwrap();
    let metadata = file.metadata().clone();
    let tensors = file.tensors().iter().filter(|t| !missing || t.name != name).map(|t| {
        let shape = if t.name == name { vec![1, t.shape.iter().product()] } else { t.shape.clone() };
        (t.name.clone(), t.dtype, shape, file.read(t).unwrap())
    });
    let tensors: Vec<(String, Dtype, Vec<usize>, Vec<u8>)> = tensors.collect();
    let specs = tensors
        .iter()
        .map(|(name, dtype, shape, _)| mantissa_store::TensorSpec::new(name.as_str(), *dtype, shape.clone()));
    let new = dir.join("new");
    let mut writer = mantissa_store::SafetensorsWriter::create(&new, specs.collect(), metadata).unwrap();
    tensors.iter().for_each(|(name, _, _, bytes)| writer.write(name, bytes).unwrap());
    writer.finish().unwrap();
    fs::rename(new, path).unwrap();
}

/// Every fault, the file or tensor that its message must name, and how it is made.
type Fault = (&'static str, fn(&Path));

const FAULTS: [Fault; 9] = [
    ("model.norm.weight", |dir| damage(dir, "model.norm.weight", true)),
    ("model.norm.weight", |dir| damage(dir, "model.norm.weight", false)),
    ("model.embed_tokens.weight", |dir| damage(dir, "model.embed_tokens.weight", true)),
    ("model.layers.1.input_layernorm.weight", |dir| {
        damage(dir, "model.layers.1.input_layernorm.weight", true);
    }),
    ("generation_config.json", |dir| {
        fs::write(dir.join("generation_config.json"), "{\"eos_token_id\": ").unwrap();
    }),
    ("generation_config.json", |dir| {
        fs::write(dir.join("generation_config.json"), "{\"eos_token_id\": \"</s>\"}").unwrap();
    }),
    ("tokenizer.json", |dir| fs::write(dir.join("tokenizer.json"), "{\"version\": \"1.0\"").unwrap()),
    ("tokenizer.json", |dir| fs::write(dir.join("tokenizer.json"), "{}").unwrap()),
    ("tokenizer_config.json", |dir| fs::write(dir.join("tokenizer_config.json"), "[1").unwrap()),
];

/// Returns every file below a folder with its bytes.
fn all_files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => found.extend(all_files(&path)),
            false => drop(found.insert(text(&path).to_owned(), fs::read(&path).unwrap())),
        }
    }
    found
}

/// Runs the same command again over its existing output.
fn again<'a>(arguments: &[&'a str]) -> Vec<&'a str> {
    let replacing = ["--overwrite"];
    [arguments, &replacing].concat()
}

/// Runs `arguments` on the model in `source`, with the output below `outputs`; then on the same model with
/// each fault, which must not change earlier results or leave anything behind.
fn refuses(source: &Path, outputs: &Path, arguments: &[&str]) {
    let whole = all_files(source);
    fs::create_dir(outputs).unwrap();
    succeed(arguments);
    let good = all_files(outputs);
    assert!(!good.is_empty());
    for (named, fault) in FAULTS {
        fault(source);
        let line = fail(2, &again(arguments));
        assert!(line.contains(named), "{arguments:?}: {named}: {line}");
        assert!(all_files(outputs) == good, "{arguments:?}: {named}: what was written has changed");
        fs::remove_dir_all(source).unwrap();
        fs::create_dir(source).unwrap();
        whole.iter().for_each(|(path, bytes)| fs::write(path, bytes).unwrap());
    }
    // The same command still works on the intact model.
    succeed(&again(arguments));
}

#[test]
fn quantize_refuses_them_and_leaves_the_old_output() {
    let temp = TempDir::new().unwrap();
    let source = temp.path().join("model");
    model(&source);
    let tokens = temp.path().join("t.json");
    fs::write(&tokens, "[[5, 6, 7, 8, 9], [10, 11, 12]]").unwrap();
    for (i, (recipe, more, file)) in [
        ("rtn-int8-channel", &[][..], "out"),
        ("rtn-int8-channel", &["--verify=false"], "out"),
        ("gptq-int8-channel", &["--calibration-tokens", text(&tokens)], "out"),
        ("rtn-int8-channel", &["--tokens", text(&tokens)], "out"),
        ("q8_0", &[], "out.gguf"),
        ("q8_0", &["--verify=false"], "out.gguf"),
    ]
    .into_iter()
    .enumerate()
    {
        let outputs = temp.path().join(i.to_string());
        let out = outputs.join(file);
        let arguments = ["quantize", text(&source), "--recipe", recipe, "--out", text(&out), "--quiet"];
        refuses(&source, &outputs, &[&arguments[..], more].concat());
    }
}

#[test]
fn convert_recalibrate_and_fit_refuse_them_and_leave_the_old_output() {
    let temp = TempDir::new().unwrap();
    let [dense, quantized, outputs] = ["dense", "quantized", "outputs"].map(|name| temp.path().join(name));
    let tokens = temp.path().join("t.json");
    fs::write(&tokens, "[[5, 6, 7, 8, 9], [10, 11, 12]]").unwrap();
    model(&dense);
    let recipe = "rtn-int8-channel+int8-tensor@static";
    let arguments = ["quantize", text(&dense), "--recipe", recipe, "--out", text(&quantized), "--quiet"];
    succeed(&[&arguments[..], &["--calibration-tokens", text(&tokens)]].concat());
    let (folder, file) = (outputs.join("out"), outputs.join("out.gguf"));
    let (folder, file, tokens) = (text(&folder), text(&file), text(&tokens));
    let (dense_text, quantized_text) = (text(&dense), text(&quantized));
    for (source, arguments) in [
        (&dense, vec!["convert", dense_text, "--format", "gguf", "--out", file, "--quiet"]),
        (&quantized, vec!["convert", quantized_text, "--format", "native", "--out", folder, "--quiet"]),
        (
            &quantized,
            vec![
                "convert",
                quantized_text,
                "--format",
                "native",
                "--out",
                folder,
                "--verify=false",
                "--quiet",
            ],
        ),
        (&quantized, vec!["recalibrate", quantized_text, "--tokens", tokens, "--out", folder, "--quiet"]),
        (
            &dense,
            vec![
                "fit",
                dense_text,
                "--schemes",
                "int4-g8,int8-g8",
                "--budget",
                "9bpw",
                "--tokens",
                tokens,
                "--out",
                folder,
                "--quiet",
            ],
        ),
    ] {
        refuses(source, &outputs, &arguments);
        fs::remove_dir_all(&outputs).unwrap();
    }
}

/// The check before publishing refuses no output of any format.
#[test]
fn outputs_pass_the_check() {
    let temp = TempDir::new().unwrap();
    let mut checked = 0;
    let mut written = |arguments: &[&str], out: &Path| {
        let output = mantissa(&[arguments, &["--out", text(out), "--quiet"]].concat());
        // Combinations that the format cannot hold are refused.
        if output.status.success() {
            mantissa_quant::verify::load_check(out).unwrap_or_else(|error| panic!("{arguments:?}: {error}"));
            checked += 1;
        }
    };
    for model in sampled(tiny_models(), 4) {
        let name = model.file_name().unwrap().to_str().unwrap().to_owned();
        let out = |suffix: &str| temp.path().join(format!("{name}-{suffix}"));
        let model = text(&model);
        written(&["convert", model, "--format", "gguf"], &out("dense.gguf"));
        written(&["quantize", model, "--recipe", "rtn-int8-channel"], &out("int8"));
        written(&["quantize", model, "--recipe", "rtn-int4-g8-asym", "--format", "native"], &out("native"));
    }
    let model = temp.path().join("synthetic");
    succeed(&["synth", "--preset", "tiny", "--out", text(&model), "--quiet"]);
    for (recipe, format) in [
        ("rtn-int4-g32", "compressed-tensors"),
        ("rtn-fp8-e4m3-channel+fp8-e4m3-token", "compressed-tensors"),
        ("rtn-nvfp4", "compressed-tensors"),
        ("rtn-mxfp4", "compressed-tensors"),
        ("rtn-int4-g32", "gptq"),
        ("rtn-int4-g32-asym", "awq"),
        ("rtn-nvfp4", "modelopt"),
        ("rtn-fp8-e4m3-tensor", "modelopt"),
        ("rtn-nf4", "bitsandbytes"),
        ("rtn-int8-channel:restricted+int8-token:restricted", "bitsandbytes"),
        ("rtn-int4-g32-asym:minmax", "mlx"),
        ("rtn-mxfp4", "mlx"),
        ("rtn-int4-g32", "exl2"),
        ("rtn-int4-g32", "onnx"),
        ("rtn-nf4-dq", "native"),
        ("q4_0", "gguf"),
        ("q8_0", "gguf"),
        ("tq2_0", "gguf"),
    ] {
        let out =
            temp.path().join(format!("{recipe}-{format}{}", if format == "gguf" { ".gguf" } else { "" }));
        written(&["quantize", text(&model), "--recipe", recipe, "--format", format], &out);
    }
    assert!(checked >= if whole() { 90 } else { 30 }, "{checked}");
}

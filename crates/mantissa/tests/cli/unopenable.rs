//! Models that no command could open are refused before any work, and what a good run has written stays as it is.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use mantissa_store::{Dtype, SafeTensors};
use serde_json::Value;
use tempfile::TempDir;

use crate::support::{fail, root, stderr, succeed, text, write};

/// A copy of a small model with its tokenizer.
fn model(dir: &Path) {
    fs::create_dir(dir).unwrap();
    let from = root().join("tests/data/tiny/llama2-gqa-tied");
    for name in ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
        fs::copy(from.join(name), dir.join(name)).unwrap();
    }
    fs::write(dir.join("generation_config.json"), "{\"eos_token_id\": 2}").unwrap();
}

/// Takes a tensor out of the weights of `dir`, or gives it another shape.
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
        damage(dir, "model.layers.1.input_layernorm.weight", true)
    }),
    ("generation_config.json", |dir| {
        fs::write(dir.join("generation_config.json"), "{\"eos_token_id\": ").unwrap()
    }),
    ("generation_config.json", |dir| {
        fs::write(dir.join("generation_config.json"), "{\"eos_token_id\": \"</s>\"}").unwrap();
    }),
    ("tokenizer.json", |dir| fs::write(dir.join("tokenizer.json"), "{\"version\": \"1.0\"").unwrap()),
    ("tokenizer.json", |dir| fs::write(dir.join("tokenizer.json"), "{}").unwrap()),
    ("tokenizer_config.json", |dir| fs::write(dir.join("tokenizer_config.json"), "[1").unwrap()),
];

/// Every file below a folder with its bytes.
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

/// The same command once more, whose output is there.
fn again<'a>(arguments: &[&'a str]) -> Vec<&'a str> {
    let replacing: [&str; 0] = [];
    [arguments, &replacing].concat()
}

/// Runs `arguments` on the model in `source`, with the output below `outputs`; then on the same model with each fault, which must
/// change nothing that the first run has written and leave nothing beside it.
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
    // The same command still works on the model as it was.
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

/// A flipped bit in `path`.
fn flip(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    let at = bytes.len() - 100;
    bytes[at] ^= 4;
    fs::write(path, bytes).unwrap();
}

/// Writes the manifest at `path` without the file `name`.
fn omit(path: &Path, name: &str) {
    let mut manifest: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    assert!(manifest["files"].as_object_mut().unwrap().remove(name).is_some(), "{name}: {manifest}");
    fs::write(path, manifest.to_string()).unwrap();
}

#[test]
fn strict_verification_fails_where_no_hash_vouches_for_bytes() {
    let temp = TempDir::new().unwrap();
    let (dense, out) = (temp.path().join("dense"), temp.path().join("out"));
    model(&dense);
    let manifest = out.join("mantissa-manifest.json");
    let verify = |strict: bool, code: i32| {
        let arguments = ["verify", text(&out), "--quiet"];
        let output =
            crate::support::mantissa(&[&arguments[..], if strict { &["--strict"] } else { &[] }].concat());
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(code), "{said}");
        String::from_utf8(output.stdout).unwrap() + &said
    };
    let write_out = || {
        let _ = fs::remove_dir_all(&out);
        succeed(&["quantize", text(&dense), "--recipe", "rtn-int8-channel", "--out", text(&out), "--quiet"]);
    };
    write_out();
    verify(true, 0);
    // A hidden file is what tools leave behind.
    fs::write(out.join(".gitattributes"), "x").unwrap();
    assert!(verify(true, 0).contains("note: .gitattributes: "));
    // Flipped bytes under a manifest fail without --strict as well.
    flip(&out.join("model.safetensors"));
    for strict in [false, true] {
        assert!(verify(strict, 1).contains("fault: model.safetensors: found SHA-256"));
    }
    // Of weights that the manifest omits nothing is known.
    write_out();
    omit(&manifest, "model.safetensors");
    assert!(
        verify(false, 0).contains("note: model.safetensors: found a file that the manifest does not list")
    );
    let said = verify(true, 1);
    assert!(said.contains("NOT verified") && said.contains("error: verify: model.safetensors: "), "{said}");
    // A tensor that no other check reads.
    fs::remove_file(out.join("quality.json")).unwrap();
    omit(&manifest, "quality.json");
    let path = out.join("model.safetensors");
    let file = SafeTensors::open(&path).unwrap();
    let norm = file.get("model.norm.weight").unwrap();
    let at = usize::try_from(norm.offset).unwrap();
    let mut bytes = fs::read(&path).unwrap();
    bytes[at] ^= 1;
    fs::write(&path, bytes).unwrap();
    verify(false, 0);
    verify(true, 1);
    // No manifest.
    write_out();
    fs::remove_file(&manifest).unwrap();
    assert!(verify(false, 0).contains("note: no mantissa-manifest.json: hashes were not checked"));
    assert!(verify(true, 1).contains("error: verify: no mantissa-manifest.json: hashes were not checked"));
    // Another file beside those of the manifest, such as weights that another reader would take.
    write_out();
    write(&out.join("more.safetensors"), &[("x", Dtype::F32, &[1], vec![0; 4])]);
    assert!(verify(true, 1).contains("error: verify: more.safetensors: "));
}

#[test]
fn strict_verification_of_a_gguf_file_asks_for_its_manifest() {
    let temp = TempDir::new().unwrap();
    let (dense, out) = (temp.path().join("dense"), temp.path().join("q.gguf"));
    model(&dense);
    let quantize = ["quantize", text(&dense), "--recipe", "q8_0", "--out", text(&out), "--quiet"];
    succeed(&quantize);
    let strict = ["verify", text(&out), "--strict", "--quiet"];
    succeed(&strict);
    let manifest = temp.path().join("q.gguf.mantissa-manifest.json");
    let whole = fs::read(&manifest).unwrap();
    omit(&manifest, "q.gguf");
    succeed(&strict[..2]);
    assert!(fail(1, &strict).contains("verify: q.gguf: found a file that the manifest does not list"));
    fs::remove_file(&manifest).unwrap();
    succeed(&strict[..2]);
    let line = fail(1, &strict);
    assert!(line.contains("verify: no q.gguf.mantissa-manifest.json: hashes were not checked"), "{line}");
    fs::write(&manifest, whole).unwrap();
    flip(&out);
    assert!(fail(1, &strict).contains("q.gguf: found SHA-256"));
    assert!(fail(1, &["verify", text(&out), "--quiet"]).contains("q.gguf: found SHA-256"));
}

//! Quantized models as MODEL of `quantize` and `fit`: their dequantized weights are the source.

use std::fs;
use std::path::Path;

use mantissa_store::{Dtype, SafeTensors};
use serde_json::Value;
use tempfile::TempDir;

use crate::main_job::{tiny, windows};
use crate::support::{File, fail, json, le, mantissa, succeed, text, write};

fn quantize(model: &Path, recipe: &str, out: &Path, more: &[&str]) {
    let arguments = ["quantize", text(model), "--recipe", recipe, "--out", text(out), "--quiet"];
    succeed(&[&arguments[..], more].concat());
}

fn verified(out: &Path, reference: &Path) {
    let found = json(&["verify", text(out), "--reference", text(reference), "--json"]);
    assert_eq!((&found["ok"], &found["faults"]), (&true.into(), &serde_json::json!([])), "{}", out.display());
}

#[test]
fn each_format_is_dequantized_and_the_output_verifies_against_it() {
    let temp = TempDir::new().unwrap();
    let tokens = windows(temp.path());
    let calibrated = ["--format", "native", "--calibration-tokens", &tokens];
    for (name, model, recipe, format) in [
        ("ct", "llama2-gqa-tied", "rtn-fp8-e4m3-channel", "compressed-tensors"),
        ("gptq", "llama3-rope", "rtn-int8-g8", "gptq"),
        ("native", "qwen2-bias", "rtn-nf4-g8", "native"),
        ("experts", "qwen3-moe", "rtn-int8-channel", "compressed-tensors"),
        ("columns", "gpt2", "rtn-int8-g8", "gptq"),
        ("gguf.gguf", "llama2-gqa-tied", "rtn-q8_0", "gguf"),
    ] {
        let (source, rtn, gptq) = (
            temp.path().join(name),
            temp.path().join(format!("{name}-rtn")),
            temp.path().join(format!("{name}-gptq")),
        );
        quantize(&tiny(model), recipe, &source, &["--format", format]);
        quantize(&source, "rtn-int4-g8", &rtn, &["--format", "native"]);
        verified(&rtn, &source);
        quantize(&source, "gptq-int4-g8", &gptq, &calibrated);
        verified(&gptq, &source);
        let quality: Value = serde_json::from_slice(&fs::read(rtn.join("quality.json")).unwrap()).unwrap();
        assert_eq!(quality["source_format"], format, "{name}");
        let config = fs::read_to_string(rtn.join("config.json")).unwrap();
        assert!(config.contains("\"quantization_config\""), "{name}: of the output alone");
        let done = json(&[
            "eval",
            text(&rtn),
            "--reference",
            text(&source),
            "--tokens",
            &tokens,
            "--json",
            "--quiet",
        ]);
        assert!((0.0..0.6).contains(&done["kl"].as_f64().unwrap()), "{name}: {}", done["kl"]);
    }
}

#[test]
fn rounding_to_nearest_equals_convert_with_requantize() {
    let temp = TempDir::new().unwrap();
    let [source, quantized, converted] =
        ["source", "quantized", "converted"].map(|name| temp.path().join(name));
    quantize(&tiny("llama2-gqa-tied"), "rtn-fp8-e4m3-channel", &source, &[]);
    let before = fs::read(source.join("model.safetensors")).unwrap();
    quantize(&source, "rtn-int8-channel", &quantized, &[]);
    let requantize = ["--requantize", "int8-channel", "--format", "compressed-tensors", "--quiet"];
    succeed(&[&["convert", text(&source), "--out", text(&converted)][..], &requantize].concat());
    let open = |dir: &Path| SafeTensors::open(&dir.join("model.safetensors")).unwrap();
    let (ours, theirs) = (open(&quantized), open(&converted));
    let codes: Vec<_> = ours.tensors().iter().filter(|meta| meta.name.contains("_proj.weight")).collect();
    assert!(codes.len() >= 14, "{}", codes.len());
    for meta in codes {
        let other = theirs.get(&meta.name).unwrap_or_else(|| panic!("{}", meta.name));
        assert!(ours.read(meta).unwrap() == theirs.read(other).unwrap(), "{}", meta.name);
    }
    assert_eq!(fs::read(source.join("model.safetensors")).unwrap(), before);
}

#[test]
fn a_note_says_that_the_reference_was_quantized() {
    let temp = TempDir::new().unwrap();
    let [source, out] = ["source", "out"].map(|name| temp.path().join(name));
    quantize(&tiny("llama2-gqa-tied"), "rtn-int8-channel", &source, &[]);
    let ran = mantissa(&["quantize", text(&source), "--recipe", "rtn-int4-g8", "--out", text(&out)]);
    let said = String::from_utf8_lossy(&ran.stderr).into_owned();
    assert!(ran.status.success() && said.contains("the source is quantized (compressed-tensors)"), "{said}");
}

/// As DeepSeek-V3.2 is published: projections of its indexers in FP8, as those of the attention.
#[test]
fn indexers_in_fp8_are_dequantized_and_stay_so() {
    let temp = TempDir::new().unwrap();
    let tokens = windows(temp.path());
    let [dense, source, out] = ["dense", "source", "out"].map(|name| temp.path().join(name));
    quantize(
        &tiny("deepseek-v32-sparse"),
        "rtn-fp8-e4m3-t128x128+fp8-e4m3-g128",
        &dense,
        &["--format", "deepseek-fp8"],
    );
    fs::create_dir(&source).unwrap();
    let config = fs::read_to_string(dense.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&config).unwrap();
    let kept = config["quantization_config"]["modules_to_not_convert"].as_array_mut().unwrap();
    let before = kept.len();
    let is_coded = |name: &str| name.contains("indexer.w") && !name.contains("weights_proj");
    kept.retain(|module| !is_coded(module.as_str().unwrap()));
    assert_eq!(kept.len(), before - 4);
    fs::write(source.join("config.json"), config.to_string()).unwrap();
    let file = File::open(&dense.join("model.safetensors"));
    let mut tensors = Vec::new();
    for name in file.names() {
        let (dtype, shape, bytes) = (file.dtype(&name), file.shape(&name), file.bytes(&name));
        match name.strip_suffix(".weight").filter(|_| is_coded(&name)) {
            Some(module) => {
                // Positive codes from 0.03 to 0.5.
                let codes = (0..shape.iter().product::<usize>()).map(|i| 0x10 + (i * 37 % 0x20) as u8);
                tensors.push((format!("{module}.weight_scale_inv"), Dtype::F32, vec![1, 1], le(&[0.5])));
                tensors.push((name, Dtype::F8E4M3, shape, codes.collect()));
            }
            None => tensors.push((name, dtype, shape, bytes)),
        }
    }
    let tensors: Vec<_> = tensors
        .iter()
        .map(|(name, dtype, shape, bytes)| (name.as_str(), *dtype, &shape[..], bytes.clone()))
        .collect();
    write(&source.join("model.safetensors"), &tensors);
    quantize(&source, "rtn-int8-channel", &out, &[]);
    verified(&out, &source);
    let ours = File::open(&out.join("model.safetensors"));
    let name = "model.layers.1.self_attn.indexer.wk";
    // Code 0x15 is 1.625 · 2^-5.
    assert_eq!(ours.f32(&format!("{name}.weight"))[..2], [0.5 / 64.0 * 2.0, 0.5 * 1.625 / 32.0]);
    assert!(!ours.has(&format!("{name}.weight_scale_inv")));
    let arguments =
        ["eval", text(&out), "--reference", text(&source), "--tokens", &tokens, "--json", "--quiet"];
    let done = json(&arguments);
    assert!((0.0..0.6).contains(&done["kl"].as_f64().unwrap()), "{}", done["kl"]);
}

/// A folder whose embedding or head is quantized is rounded again: both are decoded, and the output computes what the source does,
/// but for the rounding.
#[test]
fn quantized_tables_of_a_folder_are_decoded_where_layers_are_rounded_again() {
    let temp = TempDir::new().unwrap();
    let at = |name: &str| temp.path().join(name);
    let tokens = windows(temp.path());
    let nll = |model: &Path| {
        json(&["eval", text(model), "--tokens", &tokens, "--json", "--quiet"])["nll"].as_f64().unwrap()
    };
    for (name, model, format, flag) in [
        ("tied", "llama2-gqa-tied", "native", "--embeddings"),
        ("embedding", "llama3-rope", "native", "--embeddings"),
        ("head", "llama3-rope", "compressed-tensors", "--head"),
    ] {
        let source = at(name);
        quantize(&tiny(model), "rtn-int8-channel", &source, &["--format", format, flag, "int8-channel"]);
        let expected = nll(&source);
        for (format, scheme) in [
            ("native", "f32"),
            ("native", "int8-channel"),
            ("compressed-tensors", "int8-channel"),
            ("gguf", "f16"),
        ] {
            let out = at(&format!("{name}-{format}-{scheme}{}", if format == "gguf" { ".gguf" } else { "" }));
            let arguments = ["convert", text(&source), "--format", format, "--requantize", scheme, "--out"];
            let done = json(&[&arguments[..], &[text(&out), "--json", "--quiet"]].concat());
            assert_eq!(done["verification"]["ok"], true, "{name} {format}: {done}");
            assert_eq!(done["from"], if name == "head" { "compressed-tensors" } else { "native" });
            assert!(
                (nll(&out) - expected).abs() < 5e-3 * expected,
                "{name} {format}: {} {expected}",
                nll(&out)
            );
            verified(&out, &source);
        }
    }
    // The fix of a conversion that a table forbids works.
    let (source, out) = (at("embedding"), at("fixed"));
    let refused = ["convert", text(&source), "--format", "gptq", "--out", text(&out), "--quiet"];
    let line = fail(2, &refused);
    let scheme = line.split("--requantize ").nth(1).and_then(|fix| fix.split(',').next());
    let scheme = scheme.unwrap_or_else(|| panic!("{line}"));
    assert!(
        line.contains("readers of gptq load it unquantized") && line.matches("fix: ").count() == 1,
        "{line}"
    );
    succeed(&[&refused[..], &["--requantize", scheme]].concat());
}

#[test]
fn the_size_of_a_source_is_that_of_its_stored_tensors() {
    let temp = TempDir::new().unwrap();
    for (name, recipe, format) in [
        ("ct", "rtn-int4-g8", "compressed-tensors"),
        ("gptq", "rtn-int4-g8", "gptq"),
        ("q8.gguf", "rtn-q8_0", "gguf"),
        ("f16.gguf", "rtn-f16", "gguf"),
    ] {
        let (source, out) = (temp.path().join(name), temp.path().join(format!("{name}-out")));
        quantize(&tiny("llama2-gqa-tied"), recipe, &source, &["--format", format]);
        let stored = &json(&["inspect", text(&source), "--json"])["bytes"];
        let again =
            ["quantize", text(&source), "--recipe", "rtn-f32", "--format", "native", "--out", text(&out)];
        let plan = json(&[&again[..], &["--dry-run", "--json", "--quiet"]].concat());
        assert_eq!(&plan["source_bytes"], stored, "{name}");
        let said = succeed(&[&again[..], &["--dry-run"]].concat());
        assert!(said.contains("% larger than the source"), "{name}: {said}");
        let done = json(&[&again[..], &["--json", "--quiet"]].concat());
        assert_eq!(&done["source_bytes"], stored, "{name}");
        assert!(done["bytes"].as_u64() > stored.as_u64(), "{name}");
        let said = succeed(&again);
        let size = said.lines().find(|line| line.starts_with("size ")).unwrap();
        assert!(size.contains("% larger than the source"), "{name}: {size}");
    }
    let smaller = ["quantize", text(&tiny("llama2-gqa-tied")), "--recipe", "rtn-int4-g8", "--dry-run"]
        .map(str::to_owned);
    assert!(!succeed(&smaller).contains("larger"));
}

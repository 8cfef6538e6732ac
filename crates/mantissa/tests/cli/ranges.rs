//! Weights outside the range of a scheme: refused with the tensor, its magnitude and a fix; never zeros or infinities in
//! silence.

use std::fs;
use std::path::{Path, PathBuf};

use mantissa_store::Dtype;
use tempfile::TempDir;

use crate::support::{File, fail, json, le, mantissa, root, stderr, succeed, text, write};

const QUERY: &str = "model.layers.0.self_attn.q_proj.weight";

/// Copies the embedded model with the values of `tensor` times `factor`, all tensors in f32.
fn scaled(out: &Path, tensor: &str, factor: f32) -> PathBuf {
    let demo = root().join("crates/mantissa-jobs/demo/model");
    fs::create_dir_all(out).unwrap();
    for file in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        fs::copy(demo.join(file), out.join(file)).unwrap();
    }
    let file = File::open(&demo.join("model.safetensors"));
    let names = file.names();
    let shapes: Vec<_> = names.iter().map(|name| file.shape(name)).collect();
    let values = |name: &str| {
        let values = file.f32(name);
        if name.contains(tensor) { values.iter().map(|value| value * factor).collect() } else { values }
    };
    let tensors: Vec<_> = names
        .iter()
        .zip(&shapes)
        .map(|(name, shape)| (name.as_str(), Dtype::F32, &shape[..], le(&values(name))))
        .collect();
    write(&out.join("model.safetensors"), &tensors);
    out.to_owned()
}

#[test]
fn a_weight_below_the_smallest_scale_is_refused() {
    let temp = TempDir::new().unwrap();
    let model = scaled(&temp.path().join("small"), QUERY, 1e-8);
    for (recipe, out) in [
        ("rtn-q8_0", "u.gguf"),
        ("rtn-q4_k", "u.gguf"),
        ("q4_k_m", "u.gguf"),
        ("rtn-iq4_nl", "u.gguf"),
        ("rtn-f16", "u.gguf"),
        // Its global scale is shared with k and v.
        ("nvfp4", "u"),
    ] {
        let out = temp.path().join(out);
        let error = fail(2, &["quantize", text(&model), "--recipe", recipe, "--out", text(&out), "--quiet"]);
        assert!(error.contains(QUERY) && error.contains("fix: keep this tensor"), "{recipe}: {error}");
        assert!(!out.exists(), "{recipe}");
    }
}

#[test]
fn a_small_weight_under_scales_that_reach_it_is_quantized() {
    let temp = TempDir::new().unwrap();
    let model = scaled(&temp.path().join("small"), QUERY, 1e-8);
    for recipe in ["rtn-int8-channel", "rtn-int4-g32", "mxfp4", "fp8-dynamic", "rtn-bf16"] {
        let out = temp.path().join("q");
        let arguments = [
            "quantize",
            text(&model),
            "--recipe",
            recipe,
            "--out",
            text(&out),
            "--json",
            "--quiet",
            "--overwrite",
        ];
        let report = json(&arguments);
        let layers = report["layers"].as_array().unwrap();
        let query = layers.iter().find(|layer| QUERY.starts_with(layer["module"].as_str().unwrap())).unwrap();
        assert!(query["sqnr_db"].as_f64().unwrap() > 10.0, "{recipe}: {query}");
        succeed(&["verify", text(&out), "--reference", text(&model), "--quiet"]);
    }
}

#[test]
fn a_cast_that_overflows_is_refused_by_every_job() {
    let temp = TempDir::new().unwrap();
    let model = scaled(&temp.path().join("large"), QUERY, 1e7);
    let out = temp.path().join("o.gguf");
    for arguments in [
        ["quantize", text(&model), "--recipe", "rtn-f16", "--out", text(&out), "--quiet"].as_slice(),
        &["convert", text(&model), "--format", "gguf", "--requantize", "f16", "--out", text(&out), "--quiet"],
    ] {
        let error = fail(2, arguments);
        let expected = [QUERY.trim_end_matches(".weight"), "expected magnitudes up to 65504", "bf16 or f32"];
        assert!(expected.iter().all(|part| error.contains(part)), "{error}");
        assert!(!out.exists());
    }
}

/// An artifact whose scales have become zero: its own records cannot show it.
#[test]
fn verify_compares_with_the_power_of_the_source() {
    let temp = TempDir::new().unwrap();
    let (model, out) = (temp.path().join("model"), temp.path().join("q"));
    scaled(&model, "no tensor", 1.0);
    succeed(&["quantize", text(&model), "--recipe", "rtn-int8-channel", "--out", text(&out), "--quiet"]);
    for file in ["quality.json", "mantissa-manifest.json"] {
        fs::remove_file(out.join(file)).unwrap();
    }
    let path = out.join("model.safetensors");
    let scale = QUERY.replace(".weight", ".weight_scale");
    let file = File::open(&path);
    let (names, mut tensors) = (file.names(), Vec::new());
    let shapes: Vec<_> = names.iter().map(|name| file.shape(name)).collect();
    for (name, shape) in names.iter().zip(&shapes) {
        let bytes = file.bytes(name);
        let bytes = if *name == scale { vec![0; bytes.len()] } else { bytes };
        tensors.push((name.as_str(), file.dtype(name), &shape[..], bytes));
    }
    write(&temp.path().join("new"), &tensors);
    fs::rename(temp.path().join("new"), &path).unwrap();
    let output = mantissa(&["verify", text(&out), "--reference", text(&model), "--quiet"]);
    let found = format!("{}{}", String::from_utf8_lossy(&output.stdout), stderr(&output));
    assert_eq!(output.status.code(), Some(1), "{found}");
    let expected = "the source's signal is lost: expected an SQNR of at least 1 dB";
    assert!(found.contains(expected) && found.contains(QUERY.trim_end_matches(".weight")), "{found}");
}

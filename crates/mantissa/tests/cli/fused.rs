//! Experts that a checkpoint stores fused, as transformers 5 holds them: every method gives the bytes that it gives for
//! the same experts one by one.

use std::fs;
use std::path::{Path, PathBuf};

use mantissa_store::Dtype;
use serde_json::Value;
use tempfile::TempDir;

use crate::gguf_forms::gpt_oss;
use crate::main_job::{tiny, windows};
use crate::support::{File, json, mantissa, stderr, succeed, text, write};

/// Copies the tiny model with fused experts to `out`, with one tensor for each expert.
fn one_by_one(out: &Path) -> PathBuf {
    let (model, mut tensors) = (tiny("qwen3-moe-fused"), Vec::new());
    let file = File::open(&model.join("model.safetensors"));
    for name in file.names() {
        let (shape, bytes) = (file.shape(&name), file.bytes(&name));
        let Some((layer, part)) = name.split_once("experts.") else {
            tensors.push((name, shape, bytes));
            continue;
        };
        let parts: &[&str] = if part == "down_proj" { &["down_proj"] } else { &["gate_proj", "up_proj"] };
        let shape = [shape[1] / parts.len(), shape[2]];
        for (i, bytes) in bytes.chunks_exact(2 * shape[0] * shape[1]).enumerate() {
            let (expert, part) = (i / parts.len(), parts[i % parts.len()]);
            tensors.push((format!("{layer}experts.{expert}.{part}.weight"), shape.to_vec(), bytes.to_vec()));
        }
    }
    fs::create_dir(out).unwrap();
    fs::copy(model.join("config.json"), out.join("config.json")).unwrap();
    let tensors: Vec<_> = tensors
        .iter()
        .map(|(name, shape, bytes)| (name.as_str(), Dtype::BF16, &shape[..], bytes.clone()))
        .collect();
    write(&out.join("model.safetensors"), &tensors);
    out.to_owned()
}

/// Names and bytes of the tensors of a folder.
fn tensors(dir: &Path) -> Vec<(String, Vec<usize>, Vec<u8>)> {
    let file = File::open(&dir.join("model.safetensors"));
    file.names().into_iter().map(|name| (name.clone(), file.shape(&name), file.bytes(&name))).collect()
}

#[test]
fn every_method_quantizes_fused_experts_one_by_one() {
    let temp = TempDir::new().unwrap();
    let tokens = windows(temp.path());
    let (fused, apart) = (tiny("qwen3-moe-fused"), one_by_one(&temp.path().join("apart")));
    for (recipe, format) in [
        ("rtn-int4-g4", "compressed-tensors"),
        ("rtn-fp8-e4m3-channel+fp8-e4m3-token", "compressed-tensors"),
        ("gptq-int4-g4", "compressed-tensors"),
        ("gptaq-int4-g4", "native"),
        ("awq-int4-g4-asym", "native"),
        ("hqq-int4-g4-asym", "native"),
        ("smooth-int8-channel+int8-token", "native"),
        ("foem-int4-g4", "native"),
        ("rtn-fp8-e4m3-tensor+fp8-e4m3-tensor@static", "compressed-tensors"),
    ] {
        let [ours, theirs] = [&fused, &apart].map(|model| {
            let out = temp.path().join(format!("{recipe}-{}", model.file_name().unwrap().display()));
            let arguments = ["quantize", text(model), "--recipe", recipe, "--format", format, "--out"];
            let calibration = [text(&out), "--calibration-tokens", &tokens, "--json", "--quiet"];
            let done = json(&[&arguments[..], &calibration].concat());
            assert_eq!(done["verification"]["ok"], true, "{recipe}: {done}");
            (tensors(&out), done)
        });
        assert!(ours.0 == theirs.0, "{recipe}");
        assert_eq!(ours.1["layers"], theirs.1["layers"], "{recipe}");
        let experts = ours.0.iter().filter(|(name, ..)| name.contains("experts.5.up_proj.")).count();
        assert!(experts >= 4, "{recipe}: two layers, codes and scales");
        assert!(!ours.0.iter().any(|(name, ..)| name.ends_with("gate_up_proj")), "{recipe}");
    }
}

#[test]
fn the_output_of_a_fused_model_is_one_that_engines_read() {
    let temp = TempDir::new().unwrap();
    let (tokens, out) = (windows(temp.path()), temp.path().join("out"));
    let fused = tiny("qwen3-moe-fused");
    let run = mantissa(&["quantize", text(&fused), "--recipe", "rtn-int8-channel", "--out", text(&out)]);
    let said = stderr(&run);
    assert!(run.status.success() && !said.contains("other engines"), "{said}");
    let done =
        json(&["eval", text(&out), "--reference", text(&fused), "--tokens", &tokens, "--json", "--quiet"]);
    assert!((0.0..0.05).contains(&done["kl"].as_f64().unwrap()), "{done}");
    succeed(&["lint", text(&out), "--for", "vllm"]);
    // A GGUF file has its own fused tensors. Rows of 12 do not fill blocks of 32 and fall back to other types.
    let gguf = temp.path().join("m.gguf");
    let done =
        json(&["quantize", text(&fused), "--recipe", "q8_0", "--out", text(&gguf), "--json", "--quiet"]);
    assert_eq!(done["verification"]["ok"], true, "{done}");
    let report = json(&["inspect", text(&fused), "--json"]);
    assert_eq!(report["warnings"], serde_json::json!([]), "{report}");
    assert_eq!(report["notes"], serde_json::json!([]), "{report}");
}

#[test]
fn experts_of_gpt_oss_in_mxfp4_are_a_source() {
    let temp = TempDir::new().unwrap();
    let tokens = windows(temp.path());
    let source = gpt_oss(&temp.path().join("gpt-oss"));
    for (recipe, format) in
        [("rtn-int4-g8", "native"), ("gptq-int8-channel", "native"), ("rtn-mxfp4", "mxfp4")]
    {
        let out = temp.path().join(recipe);
        let arguments =
            ["quantize", text(&source), "--recipe", recipe, "--format", format, "--out", text(&out)];
        let more = ["--calibration-tokens", &tokens, "--json", "--quiet"];
        let done = json(&[&arguments[..], &more].concat());
        assert_eq!(done["verification"]["ok"], true, "{recipe}: {done}");
        let quality: Value = serde_json::from_slice(&fs::read(out.join("quality.json")).unwrap()).unwrap();
        assert_eq!(quality["source_format"], "mxfp4", "{recipe}");
        let found = json(&["verify", text(&out), "--reference", text(&source), "--json"]);
        assert_eq!((&found["ok"], &found["faults"]), (&true.into(), &serde_json::json!([])), "{recipe}");
    }
    // MXFP4 of dequantized MXFP4 has the codes and scales of the source.
    let (theirs, ours) = (tensors(&source), tensors(&temp.path().join("rtn-mxfp4")));
    let experts = theirs.iter().filter(|(name, ..)| name.contains("experts"));
    assert!(experts.clone().count() == 12 && experts.into_iter().all(|tensor| ours.contains(tensor)));
}

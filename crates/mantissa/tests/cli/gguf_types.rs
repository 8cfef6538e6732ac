//! llama.cpp's file types and importance matrices through the command line: quantize, imatrix, verify, eval.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use mantissa_store::Gguf;
use mantissa_store::gguf::Value;
use tempfile::TempDir;

use crate::main_job::{tiny, windows};
use crate::support::{command, fail, json, succeed, text};

/// Small Llama whose rows hold blocks of 256, with the layers that the rules distinguish.
fn model(dir: &Path) -> PathBuf {
    let out = dir.join("model");
    let sizes = ["--hidden", "256", "--layers", "8", "--heads", "4", "--kv-heads", "2", "--ffn", "512"];
    let fixed = ["synth", "--preset", "tiny", "--vocab", "256", "--quiet", "--out", text(&out)];
    succeed(&[&fixed[..], &sizes[..]].concat());
    out
}

/// Returns the type of every tensor of a file.
fn types(path: &Path) -> BTreeMap<String, &'static str> {
    Gguf::open(path).unwrap().tensors().iter().map(|t| (t.name.clone(), t.ty.name)).collect()
}

#[test]
fn a_file_type_is_mixed_written_verified_and_read() {
    let temp = TempDir::new().unwrap();
    let (model, out) = (model(temp.path()), temp.path().join("m.gguf"));
    let done =
        json(&["quantize", text(&model), "--recipe", "q4_k_m", "--out", text(&out), "--json", "--quiet"]);
    assert_eq!(done["verification"]["ok"], true, "{done}");
    let types = types(&out);
    let down: Vec<_> = (0..8).map(|i| types[&format!("blk.{i}.ffn_down.weight")]).collect();
    assert_eq!(down, ["Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q4_K", "Q4_K", "Q6_K", "Q6_K"]);
    assert_eq!((types["token_embd.weight"], types["blk.3.ffn_up.weight"]), ("Q6_K", "Q4_K"));
    assert_eq!(types["blk.0.attn_norm.weight"], "F32");
    let file = Gguf::open(&out).unwrap();
    assert_eq!(file.metadata().get("general.file_type"), Some(&Value::U32(15)));
    let tokens = windows(temp.path());
    let result =
        json(&["eval", text(&out), "--reference", text(&model), "--tokens", &tokens, "--json", "--quiet"]);
    let kl = result["kl"].as_f64().unwrap();
    assert!(kl > 0.0 && kl < 0.05, "{kl}");
    let found = json(&["verify", text(&out), "--reference", text(&model), "--json"]);
    assert_eq!((&found["ok"], &found["faults"]), (&true.into(), &serde_json::json!([])));
}

#[test]
fn bytes_do_not_depend_on_threads_or_instruction_sets() {
    let temp = TempDir::new().unwrap();
    let model = tiny_of(temp.path());
    let mut all = Vec::new();
    for (i, (isa, threads)) in [("scalar", "1"), ("", "2"), ("", "3")].into_iter().enumerate() {
        let out = temp.path().join(format!("{i}.gguf"));
        let mut run = command();
        if !isa.is_empty() {
            run.env("MANTISSA_ISA", isa);
        }
        let arguments = ["quantize", text(&model), "--recipe", "q3_k_m", "--out", text(&out), "--quiet"];
        assert!(run.args(arguments).args(["--threads", threads]).status().unwrap().success());
        all.push(std::fs::read(&out).unwrap());
    }
    assert!(all[0] == all[1] && all[1] == all[2]);
}

/// Two layers, for slow tests.
fn tiny_of(dir: &Path) -> PathBuf {
    let out = dir.join("model");
    let sizes = ["--hidden", "256", "--layers", "2", "--heads", "4", "--kv-heads", "2", "--ffn", "256"];
    succeed(
        &[&["synth", "--preset", "tiny", "--vocab", "256", "--quiet", "--out", text(&out)][..], &sizes[..]]
            .concat(),
    );
    out
}

#[test]
fn importance_is_found_written_read_and_recorded() {
    let temp = TempDir::new().unwrap();
    let (model, imatrix) = (tiny_of(temp.path()), temp.path().join("imatrix.gguf"));
    let tokens = windows(temp.path());
    let found = json(&[
        "imatrix",
        text(&model),
        "--calibration-tokens",
        &tokens,
        "--out",
        text(&imatrix),
        "--json",
        "--quiet",
    ]);
    assert_eq!((&found["weights"], &found["windows"], &found["tokens"]), (&14.into(), &3.into(), &72.into()));
    let file = Gguf::open(&imatrix).unwrap();
    assert_eq!(file.metadata().text("general.type").unwrap(), Some("imatrix"));
    assert_eq!(file.get("blk.1.ffn_down.weight.in_sum2").unwrap().shape, [1, 256]);
    let quantize = |out: &Path, more: &[&str]| {
        let fixed = ["quantize", text(&model), "--recipe", "q2_k", "--out", text(out), "--json", "--quiet"];
        json(&[&fixed[..], more].concat())
    };
    let outs = ["blind", "file", "text"].map(|name| temp.path().join(format!("{name}.gguf")));
    let blind = quantize(&outs[0], &[]);
    let given = quantize(&outs[1], &["--imatrix", text(&imatrix)]);
    let collected = quantize(&outs[2], &["--calibration-tokens", &tokens]);
    // The same weights whether importance comes from a file or is computed; different ones without it.
    assert_eq!(given["layers"], collected["layers"]);
    assert_ne!(given["layers"], blind["layers"]);
    let metadata =
        |path: &Path| Gguf::open(path).unwrap().metadata().get("quantize.imatrix.entries_count").cloned();
    assert_eq!((metadata(&outs[0]), metadata(&outs[1])), (None, Some(Value::U32(14))));
}

/// Experts are one entry with sums and token counts per expert, each weighted by its own.
#[test]
fn experts_have_an_importance_each() {
    let temp = TempDir::new().unwrap();
    let (model, imatrix) = (tiny("mixtral"), temp.path().join("imatrix.gguf"));
    let tokens = windows(temp.path());
    let of_model = ["imatrix", text(&model), "--calibration-tokens", &tokens, "--out", text(&imatrix)];
    succeed(&[&of_model[..], &["--quiet"]].concat());
    let file = Gguf::open(&imatrix).unwrap();
    let values = |name: &str| -> (Vec<usize>, Vec<f32>) {
        let tensor = file.get(name).unwrap();
        let bytes = file.read(tensor).unwrap();
        (tensor.shape.clone(), bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect())
    };
    for (part, cols) in [("gate", 32), ("up", 32), ("down", 24)] {
        let (shape, sums) = values(&format!("blk.1.ffn_{part}_exps.weight.in_sum2"));
        assert_eq!(shape, [4, cols]);
        let (_, counts) = values(&format!("blk.1.ffn_{part}_exps.weight.counts"));
        // Two experts per token.
        assert_eq!((counts.len(), counts.iter().sum::<f32>()), (4, 2.0 * 72.0));
        let seen = sums.chunks(cols).zip(&counts);
        assert!(seen.into_iter().all(|(sums, count)| (sums.iter().sum::<f32>() > 0.0) == (*count > 0.0)));
    }
    let quantize = |name: &str, more: &[&str]| {
        let out = temp.path().join(name);
        let fixed = ["quantize", text(&model), "--recipe", "q4_0", "--out", text(&out), "--json", "--quiet"];
        json(&[&fixed[..], more].concat())
    };
    let blind = quantize("blind.gguf", &[]);
    let given = quantize("given.gguf", &["--imatrix", text(&imatrix)]);
    let found = quantize("found.gguf", &["--calibration-tokens", &tokens]);
    assert_eq!((&given["layers"], &given["verification"]["ok"]), (&found["layers"], &true.into()));
    let expert = |done: &serde_json::Value| {
        let layers = done["layers"].as_array().unwrap();
        let named = |layer: &&serde_json::Value| {
            layer["module"].as_str().unwrap().ends_with("layers.1.mlp.experts.2.gate_proj")
                || layer["module"].as_str().unwrap().ends_with("layers.1.block_sparse_moe.experts.2.w1")
        };
        layers.iter().find(named).unwrap()["mse"].clone()
    };
    assert_ne!(expert(&given), expert(&blind));
}

#[test]
fn rows_that_blocks_do_not_divide_are_reported() {
    let temp = TempDir::new().unwrap();
    let (model, out) = (tiny("llama2-gqa-tied"), temp.path().join("m.gguf"));
    let done =
        json(&["quantize", text(&model), "--recipe", "q4_k_m", "--out", text(&out), "--json", "--quiet"]);
    let layers = done["layers"].as_array().unwrap();
    assert!(layers.iter().all(|l| l["fallback"].as_str().unwrap().contains("instead of q")), "{done}");
}

#[test]
fn wrong_importance_is_refused_by_name() {
    let temp = TempDir::new().unwrap();
    let (model, out) = (tiny_of(temp.path()), temp.path().join("m.gguf"));
    let refused = |file: &Path| {
        fail(2, &["quantize", text(&model), "--recipe", "q2_k", "--imatrix", text(file), "--out", text(&out)])
    };
    let other = temp.path().join("other.dat");
    let mut bytes = 1i32.to_le_bytes().to_vec();
    bytes.extend(19i32.to_le_bytes());
    bytes.extend(b"blk.0.attn_q.weight");
    for word in [1i32, 2] {
        bytes.extend(word.to_le_bytes());
    }
    bytes.extend([1f32, 1.0].iter().flat_map(|v| v.to_le_bytes()));
    std::fs::write(&other, bytes).unwrap();
    let line = refused(&other);
    assert!(line.contains("blk.0.attn_q.weight: expected 256 columns, got 2"), "{line}");
    let line = refused(&model.join("model.safetensors"));
    assert!(line.contains("model.safetensors"), "{line}");
    assert!(!out.exists());
}

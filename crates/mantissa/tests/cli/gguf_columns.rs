//! Weights whose columns GGUF has in another order: the output projections of gated DeltaNet with more heads of values than of
//! keys. Blocks hold columns of one head, or of several.

use std::path::{Path, PathBuf};

use mantissa_store::{Dtype, Gguf};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::gguf_architectures::model as architecture;
use crate::gguf_made::resized;
use crate::main_job::windows;
use crate::support::{File, fail, json as run, succeed, text, write};

/// A model with an MLP of 32, whose heads of values have `width` channels: 8 makes a block of 32 hold all four heads.
fn model(out: &Path, width: usize) -> PathBuf {
    let edits =
        json!({"intermediate_size": 32, "linear_key_head_dim": width, "linear_value_head_dim": width});
    resized(out, "qwen3-5-square", &edits, |name, shape| {
        let grown = |n: &usize| match (*n, name.contains("linear_attn.")) {
            (24, false) => 32,
            (64, true) => 8 * width,
            (8, true) => width,
            _ => *n,
        };
        match name.rsplit_once("linear_attn.").map(|(_, rest)| rest) {
            Some("in_proj_z.weight") => vec![4 * width, 32],
            Some("out_proj.weight") => vec![32, 4 * width],
            _ => shape.iter().map(grown).collect(),
        }
    })
}

/// Quantizes `source` to the GGUF file `out`; returns the report.
fn quantize(source: &Path, out: &Path, options: &[&str]) -> Value {
    let arguments = [
        "quantize",
        text(source),
        "--format",
        "gguf",
        "--overwrite",
        "--out",
        text(out),
        "--json",
        "--quiet",
    ];
    let done = run(&[&arguments[..], options].concat());
    assert_eq!(done["verification"]["ok"], true, "{options:?}: {done}");
    done
}

fn blocks(file: &Path) -> (&'static str, Vec<u8>) {
    let file = Gguf::open(file).unwrap();
    let tensor = file.get("blk.0.ssm_out.weight").unwrap();
    (tensor.ty.name, file.read(tensor).unwrap())
}

#[test]
fn methods_see_the_columns_of_a_block_together() {
    let temp = TempDir::new().unwrap();
    let (dir, tokens) = (temp.path(), windows(temp.path()));
    for width in [8, 32] {
        let source = model(&dir.join(format!("m{width}")), width);
        let out = dir.join(format!("{width}.gguf"));
        let calibrated = |recipe| ["--recipe", recipe, "--calibration-tokens", tokens.as_str()];
        for (recipe, solved, ty) in [
            ("rtn-q4_0", "rtn-q4_0", "Q4_0"),
            ("rtn-mxfp4", "gptq-mxfp4", "MXFP4"),
            ("rtn-mxfp4", "gptaq-mxfp4", "MXFP4"),
        ] {
            quantize(&source, &out, &["--recipe", recipe]);
            let nearest = blocks(&out);
            let done = quantize(&source, &out, &calibrated(solved));
            let found = blocks(&out);
            assert_eq!((nearest.0, found.0), (ty, ty));
            assert!(nearest.1 != found.1, "{width} {solved}");
            let layers = done["layers"].as_array().unwrap();
            let layer = layers.iter().find(|layer| layer["module"] == "model.layers.0.linear_attn.out_proj");
            if let Some(judged) = layer.unwrap()["judged"].as_object() {
                // A Hessian in another order than the weight's would lose to rounding.
                let error = |of: &str| judged[of].as_f64().unwrap();
                assert!(error("solved") < error("nearest"), "{width} {solved}: {judged:?}");
                assert!(layer.unwrap()["fallback"].is_null(), "{width} {solved}");
            }
            let loss = |engine: &str| {
                let arguments = ["eval", text(&out), "--reference", text(&source), "--tokens", &tokens];
                let more = ["--engine", engine, "--json", "--quiet"];
                run(&[&arguments[..], &more].concat())["kl"].as_f64().unwrap()
            };
            let (exact, fast) = (loss("reference"), loss("fast"));
            assert!(
                exact > 0.0 && exact < 1.0 && (exact - fast).abs() < 0.05 * exact + 1e-3,
                "{exact} {fast}"
            );
        }
    }
}

/// The importance matrix has llama.cpp's names and its order of columns, and is read in it.
#[test]
fn importance_is_in_the_order_of_the_file() {
    let temp = TempDir::new().unwrap();
    let (dir, tokens) = (temp.path(), windows(temp.path()));
    let source = model(&dir.join("m"), 8);
    let (out, given) = (dir.join("a.gguf"), dir.join("b.gguf"));
    quantize(&source, &out, &["--recipe", "rtn-q4_0", "--calibration-tokens", &tokens]);
    let imatrix = dir.join("imatrix.gguf");
    let collect = |model: &Path| {
        let arguments = ["imatrix", text(model), "--calibration-tokens", &tokens, "--out", text(&imatrix)];
        succeed(&[&arguments[..], &["--overwrite", "--quiet"]].concat());
        let file = Gguf::open(&imatrix).unwrap();
        file.read(file.get("blk.0.ssm_out.weight.in_sum2").unwrap()).unwrap()
    };
    let sums = collect(&source);
    quantize(&source, &given, &["--recipe", "rtn-q4_0", "--imatrix", text(&imatrix)]);
    assert!(blocks(&out) == blocks(&given));
    // One head of values is silent, whose channels are the third run of columns in the file: heads 0 and 2 come first.
    let silent = resized(&dir.join("silent"), "qwen3-5-square", &json!({}), |_, shape| shape.to_vec());
    let weights = silent.join("model.safetensors");
    let file = File::open(&weights);
    let tensors: Vec<_> = file
        .names()
        .into_iter()
        .map(|name| {
            let (shape, mut bytes) = (file.shape(&name), file.bytes(&name));
            if name.ends_with("in_proj_z.weight") {
                // silu(0) = 0 closes the gate of head 1.
                bytes[8 * 32 * 4..][..8 * 32 * 4].fill(0);
            }
            (name, shape, bytes)
        })
        .collect();
    let tensors: Vec<_> = tensors
        .iter()
        .map(|(name, shape, bytes)| (name.as_str(), Dtype::F32, &shape[..], bytes.clone()))
        .collect();
    std::fs::remove_file(&weights).unwrap();
    write(&weights, &tensors);
    let silenced: Vec<bool> = collect(&silent).as_chunks::<4>().0.iter().map(|sum| *sum == [0; 4]).collect();
    let expected: Vec<bool> = (0..32).map(|column| column / 8 == 2).collect();
    assert_eq!(silenced, expected);
    assert_eq!(sums.len(), 32 * 4);
    // Parts of a weight have an entry each.
    let next = architecture(dir, "qwen3-next-square", &json!({}));
    succeed(&[
        "imatrix",
        text(&next),
        "--calibration-tokens",
        &tokens,
        "--out",
        text(&imatrix),
        "--overwrite",
        "--quiet",
    ]);
    let file = Gguf::open(&imatrix).unwrap();
    assert!(file.get("blk.0.attn_qkv.weight.in_sum2").is_some());
    assert!(file.get("blk.0.attn_gate.weight.in_sum2").is_some());
}

#[test]
fn codes_move_with_whole_blocks() {
    let temp = TempDir::new().unwrap();
    let dir = temp.path();
    let path = |name: &str| dir.join(name);
    let tokens = windows(dir);
    for width in [8, 32] {
        let source = model(&path(&format!("m{width}")), width);
        let folder = path(&format!("folder{width}"));
        let arguments =
            ["quantize", text(&source), "--recipe", "rtn-mxfp4", "--out", text(&folder), "--quiet"];
        succeed(&arguments);
        let file = path(&format!("{width}.gguf"));
        let converted = ["convert", text(&folder), "--format", "gguf", "--out", text(&file), "--quiet"];
        if width == 8 {
            let error = fail(2, &converted);
            assert!(error.contains("out_proj") && error.contains("order in GGUF"), "{error}");
            // Quantized again, they are in the order of the file.
            let again = [&converted[..], &["--requantize", "q8_0"]].concat();
            succeed(&again);
            assert_eq!(blocks(&file).0, "Q8_0");
            continue;
        }
        succeed(&converted);
        assert_eq!(blocks(&file).0, "MXFP4");
        let back = path("back");
        succeed(&["convert", text(&file), "--format", "compressed-tensors", "--out", text(&back), "--quiet"]);
        for (model, reference) in [(&file, &folder), (&back, &folder)] {
            let found = run(&[
                "eval",
                text(model),
                "--reference",
                text(reference),
                "--tokens",
                &tokens,
                "--json",
                "--quiet",
            ]);
            assert!(found["kl"].as_f64().unwrap().abs() < 1e-9, "{found}");
        }
    }
}

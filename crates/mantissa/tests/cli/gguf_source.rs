//! Unquantized GGUF files as MODEL of `quantize` and `fit`.

use std::fs;
use std::path::{Path, PathBuf};

use mantissa_store::SafeTensors;
use serde_json::json;
use tempfile::TempDir;

use crate::gguf_architectures::{granite_hybrid, model};
use crate::gguf_made::kimi_linear;
use crate::lint::synthetic_of;
use crate::main_job::{tiny, windows};
use crate::support::{json as json_of, succeed, text};

/// Writes a model as an unquantized GGUF file.
fn as_gguf(model: &Path, dtype: &str, dir: &Path) -> PathBuf {
    let out = dir.join(format!("source-{dtype}.gguf"));
    let recipe = format!("rtn-{dtype}");
    succeed(&[
        "quantize",
        text(model),
        "--recipe",
        &recipe,
        "--format",
        "gguf",
        "--out",
        text(&out),
        "--quiet",
    ]);
    out
}

/// The output from the GGUF file has the same weights as the output from the folder.
fn same_weights(from_folder: &Path, from_gguf: &Path) {
    let open = |dir: &Path| SafeTensors::open(&dir.join("model.safetensors")).unwrap();
    let (a, b) = (open(from_folder), open(from_gguf));
    let quantized = a.tensors().iter().filter(|meta| meta.name.contains("weight_"));
    let mut compared = 0;
    for meta in quantized {
        let other = b.get(&meta.name).unwrap_or_else(|| panic!("{}", meta.name));
        assert!(a.read(meta).unwrap() == b.read(other).unwrap(), "{}", meta.name);
        compared += 1;
    }
    assert!(compared >= 14, "{compared}");
}

#[test]
fn a_folder_from_gguf_has_the_weights_of_one_from_the_folder() {
    // Permuted rows (llama), norms plus one (gemma), biases, experts in one tensor, columns first (gpt2).
    for (model, dtype) in [
        ("llama2-gqa-tied", "f32"),
        ("llama3-rope", "f32"),
        ("gemma", "f32"),
        ("qwen2-bias", "f32"),
        ("mixtral", "f32"),
        ("qwen3-moe", "f32"),
        ("gpt-neox", "f32"),
        ("gpt2", "f32"),
    ] {
        let temp = TempDir::new().unwrap();
        let folder = tiny(model);
        let gguf = as_gguf(&folder, dtype, temp.path());
        let outs = ["a", "b"].map(|name| temp.path().join(name));
        for (source, out) in [&folder, &gguf].into_iter().zip(&outs) {
            let done = json_of(&[
                "quantize",
                text(source),
                "--recipe",
                "rtn-int4-g8",
                "--format",
                "native",
                "--out",
                text(out),
                "--json",
                "--quiet",
            ]);
            assert_eq!(done["verification"]["ok"], true, "{model}: {done}");
        }
        let tokens = windows(temp.path());
        let compared = json_of(&[
            "eval",
            text(&outs[1]),
            "--reference",
            text(&outs[0]),
            "--tokens",
            &tokens,
            "--json",
            "--quiet",
        ]);
        let kl = compared["kl"].as_f64().unwrap();
        assert!(kl.abs() < 1e-9, "{model}: {kl}");
    }
}

/// Tensors that the file has in parts, or with columns in another order, are put together.
#[test]
fn tensors_in_parts_are_put_together() {
    let temp = TempDir::new().unwrap();
    let (dir, tokens) = (temp.path(), windows(temp.path()));
    let epsilon = json!({"rms_norm_eps": 1e-6});
    for (name, folder) in [
        ("deepseek-v3", model(dir, "deepseek-v3", &epsilon)),
        ("gpt-oss", model(dir, "gpt-oss", &json!({"swiglu_limit": 7.0}))),
        ("granite", granite_hybrid(dir)),
        ("kimi-linear", kimi_linear(&dir.join("kimi-linear"))),
        ("qwen3-next", model(dir, "qwen3-next-square", &json!({}))),
        ("qwen3-5", model(dir, "qwen3-5-square", &json!({}))),
        ("qwen3-5-moe", model(dir, "qwen3-5-moe-square", &json!({}))),
    ] {
        let own = dir.join(format!("of-{name}"));
        fs::create_dir(&own).unwrap();
        let gguf = as_gguf(&folder, "f32", &own);
        let outs = ["a", "b"].map(|name| own.join(name));
        for (source, out) in [&folder, &gguf].into_iter().zip(&outs) {
            let arguments = ["quantize", text(source), "--recipe", "rtn-int4-g8", "--format", "native"];
            let done = json_of(&[&arguments[..], &["--out", text(out), "--json", "--quiet"]].concat());
            assert_eq!(done["verification"]["ok"], true, "{name}: {done}");
        }
        let arguments = ["eval", text(&outs[1]), "--reference", text(&outs[0]), "--tokens", &tokens];
        let compared = json_of(&[&arguments[..], &["--json", "--quiet"]].concat());
        let kl = compared["kl"].as_f64().unwrap();
        assert!(kl.abs() < 1e-9, "{name}: {kl}");
        // To blocks, in the order of the file again.
        let blocks = own.join("blocks.gguf");
        let arguments = ["quantize", text(&gguf), "--recipe", "rtn-q8_0", "--format", "gguf", "--out"];
        let done = json_of(&[&arguments[..], &[text(&blocks), "--json", "--quiet"]].concat());
        assert_eq!(done["verification"]["ok"], true, "{name}: {done}");
    }
}

#[test]
fn codes_are_the_same_in_bf16_and_f16() {
    for dtype in ["bf16", "f16"] {
        let temp = TempDir::new().unwrap();
        let folder = synthetic_of(temp.path(), dtype);
        let gguf = as_gguf(&folder, dtype, temp.path());
        let outs = ["a", "b"].map(|name| temp.path().join(name));
        let tokens = windows(temp.path());
        for (source, out) in [&folder, &gguf].into_iter().zip(&outs) {
            succeed(&[
                "quantize",
                text(source),
                "--recipe",
                "gptq-int4-g32",
                "--calibration-tokens",
                &tokens,
                "--out",
                text(out),
                "--quiet",
            ]);
        }
        same_weights(&outs[0], &outs[1]);
        let found = json_of(&["verify", text(&outs[1]), "--reference", text(&gguf), "--json", "--quiet"]);
        assert_eq!(found["ok"], true, "{found}");
        let config = fs::read_to_string(outs[1].join("config.json")).unwrap();
        assert!(config.contains("\"architectures\"") && config.contains("\"torch_dtype\""), "{config}");
    }
}

/// From F16 to a K-quant as with llama-quantize: tokenizer and chat template are kept.
#[test]
fn gguf_to_gguf_keeps_the_tokenizer() {
    let temp = TempDir::new().unwrap();
    let path = |name: &str| text(&temp.path().join(name)).to_owned();
    let quantize = |source: &str, recipe: &str, out: &str| {
        json_of(&["quantize", source, "--recipe", recipe, "--out", out, "--json", "--quiet"])
    };
    let says = |model: &str| succeed(&["run", model, "-p", "Once upon a time", "-n", "12", "--quiet"]);
    let dense = path("demo-bf16.gguf");
    quantize("demo", "rtn-bf16", &dense);
    for (recipe, out, same) in
        [("q8_0", "out", "out/demo-q8_0.gguf"), ("rtn-int8-channel", "folder", "folder")]
    {
        let done = quantize(&dense, recipe, &path(out));
        assert_eq!(done["verification"]["ok"], true, "{done}");
        let from_folder = path(&format!("{out}-of-folder"));
        let other = quantize("demo", recipe, &from_folder);
        assert_eq!(says(&path(same)), says(other["output"].as_str().unwrap()), "{recipe}");
    }
    // The tokenizer becomes files of a folder.
    let folder = temp.path().join("folder");
    assert!(folder.join("tokenizer.json").is_file() && folder.join("tokenizer_config.json").is_file());
}

#[test]
fn fit_takes_an_unquantized_gguf_file() {
    let temp = TempDir::new().unwrap();
    let folder = synthetic_of(temp.path(), "bf16");
    let gguf = as_gguf(&folder, "bf16", temp.path());
    let (out, tokens) = (temp.path().join("out"), windows(temp.path()));
    let done = json_of(&[
        "fit",
        text(&gguf),
        "--budget",
        "6bpw",
        "--schemes",
        "int4-g32,int8-g32",
        "--tokens",
        &tokens,
        "--out",
        text(&out),
        "--json",
        "--quiet",
    ]);
    assert_eq!(done["verification"]["ok"], true, "{done}");
}

#[test]
fn a_quantized_gguf_file_is_dequantized() {
    let temp = TempDir::new().unwrap();
    let folder = synthetic_of(temp.path(), "bf16");
    let gguf = temp.path().join("q.gguf");
    succeed(&["quantize", text(&folder), "--recipe", "q8_0", "--out", text(&gguf), "--quiet"]);
    let out = temp.path().join("out");
    let done = json_of(&[
        "quantize",
        text(&gguf),
        "--recipe",
        "rtn-int4-g32",
        "--out",
        text(&out),
        "--json",
        "--quiet",
    ]);
    assert_eq!(done["verification"]["ok"], true, "{done}");
    let found = json_of(&["verify", text(&out), "--reference", text(&gguf), "--json"]);
    assert_eq!((&found["ok"], &found["faults"]), (&true.into(), &serde_json::json!([])));
}

//! `convert`: lossless conversions there and back; refusals; the quality loss of requantizing.

use std::fs;
use std::path::{Path, PathBuf};

use mantissa_store::{Dtype, Gguf, SafeTensors};
use tempfile::TempDir;

use crate::lint::synthetic_of;
use crate::support::{fail, json, shared, succeed, text};

fn quantize(model: &Path, recipe: &str, format: &str, out: &Path) {
    succeed(&[
        "quantize",
        text(model),
        "--recipe",
        recipe,
        "--format",
        format,
        "--out",
        text(out),
        "--quiet",
    ]);
}

/// Converts, and checks the report.
fn convert(from: &Path, format: &str, out: &Path) {
    convert_of(from, format, out, 14);
}

fn convert_of(from: &Path, format: &str, out: &Path, layers: usize) {
    let done = json(&["convert", text(from), "--format", format, "--out", text(out), "--json", "--quiet"]);
    assert_eq!((&done["lossless"], &done["verification"]["ok"]), (&true.into(), &true.into()), "{done}");
    assert_eq!((&done["container"], &done["method"]), (&format.into(), &"repacked".into()));
    assert_eq!(done["layers"].as_array().unwrap().len(), layers);
}

/// Compares the tensors of quantized layers that two folders share by name, byte for byte except
/// `reciprocal`.
fn same_layers(a: &Path, b: &Path, reciprocal: &str) {
    let open = |dir: &Path| SafeTensors::open(&dir.join("model.safetensors")).unwrap();
    let (a, b) = (open(a), open(b));
    let mut compared = 0;
    for meta in a.tensors().iter().filter(|meta| meta.name.contains("_proj.")) {
        let other = b.get(&meta.name).unwrap_or_else(|| panic!("{} is missing", meta.name));
        assert_eq!((other.dtype, &other.shape), (meta.dtype, &meta.shape), "{}", meta.name);
        let (ours, theirs) = (a.read(meta).unwrap(), b.read(other).unwrap());
        if !reciprocal.is_empty() && meta.name.ends_with(reciprocal) {
            let bits = |bytes: &[u8]| u32::from_le_bytes(bytes[..4].try_into().unwrap());
            assert!(bits(&ours).abs_diff(bits(&theirs)) <= 1, "{}", meta.name);
        } else {
            assert!(ours == theirs, "{}", meta.name);
        }
        compared += 1;
    }
    assert!(compared >= 28, "{compared}");
}

/// The figures of both models on the same windows differ by at most the rounding of a global scale.
fn same_results(a: &Path, b: &Path, dir: &Path) {
    let tokens = crate::main_job::windows(dir);
    let compared = json(&["eval", text(a), "--reference", text(b), "--tokens", &tokens, "--json", "--quiet"]);
    let kl = compared["kl"].as_f64().unwrap();
    assert!(kl.abs() < 1e-9, "{kl}");
}

/// Row of the table: model dtype, recipe, format, target format, and the tensor that may differ by one unit
/// in the last place.
type Row = (&'static str, &'static str, &'static str, &'static str, &'static str);

/// Model of two layers whose rows are whole tiles of 128.
fn wide(dir: &Path, dtype: &str) -> PathBuf {
    let path = dir.join("model");
    let sizes = "--hidden 128 --ffn 256 --layers 2 --heads 4 --kv-heads 2 --vocab 64 --preset tiny --context 64 --tied=false --seed 3";
    let arguments: Vec<&str> = sizes.split(' ').collect();
    succeed(&[&["synth", "--out", text(&path), "--dtype", dtype, "--quiet"][..], &arguments].concat());
    path
}

/// Converts there and back: codes, scales and figures are unchanged.
fn there_and_back(rows: &[Row], model: fn(&Path, &str) -> PathBuf) {
    for &(dtype, recipe, from, to, reciprocal) in rows {
        let temp = TempDir::new().unwrap();
        let model = model(temp.path(), dtype);
        let name = |format: &str, n: u32| -> PathBuf {
            let end = if format == "gguf" { ".gguf" } else { "" };
            temp.path().join(format!("{n}-{format}{end}"))
        };
        let (first, there, back) = (name(from, 1), name(to, 2), name(from, 3));
        println!("{recipe}: {from} to {to}");
        quantize(&model, recipe, from, &first);
        convert(&first, to, &there);
        same_results(&there, &first, temp.path());
        if to != "gguf" {
            let found = json(&["verify", text(&there), "--reference", text(&first), "--json", "--quiet"]);
            assert_eq!(found["ok"], true, "{found}");
        }
        convert(&there, from, &back);
        same_layers(&first, &back, reciprocal);
        // The same command gives the same file.
        if to == "gguf" {
            let again = temp.path().join("again.gguf");
            convert(&first, to, &again);
            assert!(fs::read(&again).unwrap() == fs::read(&there).unwrap());
        }
    }
}

#[test]
fn nvfp4_and_mxfp4_go_there_and_back() {
    const ROWS: &[Row] = &[
        ("bf16", "nvfp4", "compressed-tensors", "gguf", "weight_global_scale"),
        ("bf16", "nvfp4", "compressed-tensors", "modelopt", "weight_global_scale"),
        ("bf16", "nvfp4", "modelopt", "compressed-tensors", "weight_scale_2"),
        ("bf16", "nvfp4", "modelopt", "gguf", "weight_scale_2"),
        ("bf16", "mxfp4", "compressed-tensors", "gguf", ""),
        ("bf16", "mxfp4", "compressed-tensors", "mlx", ""),
        ("bf16", "mxfp4", "mlx", "gguf", ""),
    ];
    there_and_back(ROWS, synthetic_of);
}

#[test]
fn integers_go_there_and_back() {
    const ROWS: &[Row] = &[
        ("f16", "rtn-int4-g32", "compressed-tensors", "gptq", ""),
        ("f16", "rtn-int4-g32", "gptq", "compressed-tensors", ""),
        ("f16", "rtn-int4-g32-asym", "compressed-tensors", "gptq", ""),
        ("f16", "rtn-int4-g32-asym", "compressed-tensors", "awq", ""),
        ("f16", "rtn-int4-g32-asym", "awq", "compressed-tensors", ""),
        // f16 scales of a bf16 model survive between formats that keep them in f16.
        ("bf16", "rtn-int4-g32-asym", "gptq", "awq", ""),
        ("bf16", "rtn-int4-g32-asym", "awq", "gptq", ""),
        ("f16", "rtn-int8-g32", "gptq", "compressed-tensors", ""),
        ("f16", "rtn-int4-g32", "compressed-tensors", "gguf", ""),
        ("f16", "rtn-int8-g32", "compressed-tensors", "gguf", ""),
        ("bf16", "rtn-int4-g32", "compressed-tensors", "modelopt", ""),
        ("bf16", "rtn-int4-g32-asym", "compressed-tensors", "native", ""),
        // Float minima instead of zero points.
        ("bf16", "rtn-int4-g32-asym:minmax", "mlx", "native", ""),
        ("bf16", "rtn-int4-g32-asym:minmax", "native", "mlx", ""),
        // Rows of 64 are one group of 64 here, and two in other formats.
        ("bf16", "rtn-int4-g64-asym", "awq", "gptq", ""),
        ("bf16", "rtn-int4-g64-asym", "gptq", "awq", ""),
    ];
    there_and_back(ROWS, synthetic_of);
}

#[test]
fn fp8_round_trips() {
    const ROWS: &[Row] = &[
        ("f32", "rtn-fp8-e4m3-t128x128+fp8-e4m3-g128", "deepseek-fp8", "compressed-tensors", ""),
        ("f32", "rtn-fp8-e4m3-t128x128+fp8-e4m3-g128", "compressed-tensors", "deepseek-fp8", ""),
        ("bf16", "rtn-mxfp8-e4m3", "compressed-tensors", "mlx", ""),
        ("bf16", "nf4", "bitsandbytes", "native", ""),
    ];
    there_and_back(ROWS, wide);
    // A model with per-token activation scales and per-row weight scales.
    there_and_back(&[("f32", "fp8-dynamic", "compressed-tensors", "modelopt", "")], wide);
}

/// Both GPTQ zero point versions, and act-order, become AWQ's form or are refused with a reason.
#[test]
fn both_versions_of_gptq_are_read_alike() {
    let temp = TempDir::new().unwrap();
    let model = synthetic_of(temp.path(), "f16");
    let (v1, v2) = (temp.path().join("v1"), temp.path().join("v2"));
    quantize(&model, "rtn-int4-g32", "gptq", &v1);
    // The same file in v2: every zero point one more.
    fs::create_dir(&v2).unwrap();
    for entry in fs::read_dir(&v1).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, v2.join(path.file_name().unwrap())).unwrap();
    }
    crate::lint::rewrite(&v2.join("model.safetensors"), |name, bytes| {
        if name.ends_with(".qzeros") {
            bytes.iter_mut().for_each(|byte| *byte = ((*byte & 15) + 1) | (((*byte >> 4) + 1) << 4));
        }
    });
    let path = v2.join("config.json");
    let mut config: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config["quantization_config"]["checkpoint_format"] = "gptq_v2".into();
    fs::write(&path, config.to_string()).unwrap();
    let (a, b) = (temp.path().join("a"), temp.path().join("b"));
    convert(&v1, "compressed-tensors", &a);
    convert(&v2, "compressed-tensors", &b);
    same_layers(&a, &b, "");
}

/// Tokenizer, generation settings and chat templates are copied; the old format's description is not.
#[test]
fn files_beside_the_weights_are_copied() {
    let temp = TempDir::new().unwrap();
    let (first, out) = (temp.path().join("first"), temp.path().join("out"));
    quantize(Path::new("demo"), "rtn-int4-g32-asym", "awq", &first);
    for name in
        ["generation_config.json", "chat_template.jinja", "quantization_config.json", "quantize_config.json"]
    {
        fs::write(first.join(name), "{}").unwrap();
    }
    convert_of(&first, "native", &out, 35);
    for name in ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"] {
        assert!(fs::read(out.join(name)).unwrap() == fs::read(first.join(name)).unwrap(), "{name}");
    }
    assert!(!out.join("quantization_config.json").exists() && !out.join("quantize_config.json").exists());
    // From MLX, whose config describes the quantization twice.
    let (mlx, out) = (temp.path().join("mlx"), temp.path().join("ct"));
    quantize(Path::new("demo"), "mxfp4", "mlx", &mlx);
    convert_of(&mlx, "compressed-tensors", &out, 35);
    let config: serde_json::Value =
        serde_json::from_slice(&fs::read(out.join("config.json")).unwrap()).unwrap();
    assert!(
        config.get("quantization").is_none()
            && config["quantization_config"]["quant_method"] == "compressed-tensors"
    );
}

/// Everything next to codes and scales that the target format cannot hold is refused by name.
#[test]
fn cache_scales_stored_inputs_and_rotations_are_not_lost() {
    let Some(artifacts) = shared("artifacts") else { return };
    let temp = TempDir::new().unwrap();
    let out = temp.path().join("out");
    for (artifact, format, why) in [
        ("llmc_kv_fp8_static", "gptq", "KV cache"),
        // f16 scales of a bf16 model, refused before its group order is checked.
        ("gptqm_w4_g32_sym_descact", "compressed-tensors", "not representable in bf16"),
        ("bnb_int8", "compressed-tensors", "activations"),
    ] {
        let source = artifacts.join(artifact);
        let arguments = ["convert", text(&source), "--format", format, "--out", text(&out), "--quiet"];
        let line = fail(2, &arguments);
        assert!(line.contains(why) && line.contains("without loss") && !out.exists(), "{artifact}: {line}");
        // The KV cache is not a layer.
        assert_eq!(line.contains("error: the model and 35 of 35 layers"), why == "KV cache", "{line}");
    }
    // Static activation scales are copied: two formats' names for the same numbers, or (NVFP4) for their
    // reciprocals.
    let tokens = shared("reference").unwrap().join("peers/babyllama-105-tokens.json");
    let tokens = format!("{}:eval_in", text(&tokens));
    let nll = |model: &Path| {
        let found = json(&["eval", text(model), "--tokens", &tokens, "--limit", "4096", "--json", "--quiet"]);
        found["nll"].as_f64().unwrap()
    };
    for (artifact, format, close) in
        [("mo_FP8_DEFAULT_CFG", "compressed-tensors", 0.0), ("llmc_nvfp4", "modelopt", 2e-3)]
    {
        let (source, out) = (artifacts.join(artifact), temp.path().join(artifact));
        let arguments =
            ["convert", text(&source), "--format", format, "--out", text(&out), "--json", "--quiet"];
        assert_eq!(json(&arguments)["lossless"], true, "{artifact}");
        let (before, after) = (nll(&source), nll(&out));
        assert!((before - after).abs() <= close, "{artifact}: {before} {after}");
    }
}

/// A rotation that both formats record is copied; elsewhere it is refused.
#[test]
fn rotated_inputs_stay_rotated() {
    const ROWS: &[Row] = &[
        ("bf16", "rotate-rtn-int4-g32", "compressed-tensors", "native", ""),
        // In f32, since compressed-tensors keeps scales in the model's dtype, and native in f32.
        ("f32", "rotate-rtn-int4-g32", "native", "compressed-tensors", ""),
    ];
    there_and_back(ROWS, synthetic_of);
    let temp = TempDir::new().unwrap();
    let (model, out) = (synthetic_of(temp.path(), "bf16"), temp.path().join("rotated"));
    quantize(&model, "rotate-rtn-int4-g32", "compressed-tensors", &out);
    let other = temp.path().join("gptq");
    let line = fail(2, &["convert", text(&out), "--format", "gptq", "--out", text(&other), "--quiet"]);
    assert!(
        line.contains("2 of 14 layers") && line.contains("gptq does not hold its permutation, rotation"),
        "{line}"
    );
}

#[test]
fn a_dense_model_becomes_a_dense_gguf_file() {
    let temp = TempDir::new().unwrap();
    let (model, out) = (synthetic_of(temp.path(), "bf16"), temp.path().join("m.gguf"));
    convert(&model, "gguf", &out);
    same_results(&out, &model, temp.path());
    let file = Gguf::open(&out).unwrap();
    assert_eq!(file.get("blk.0.ffn_up.weight").unwrap().ty.name, "BF16");
    let line = fail(
        2,
        &["convert", text(&model), "--format", "gptq", "--out", text(&temp.path().join("x")), "--quiet"],
    );
    assert!(line.contains("no layer is quantized") && line.contains("mantissa quantize"), "{line}");
}

#[test]
fn lossy_conversions_are_refused_and_requantizing_reports_the_error() {
    let temp = TempDir::new().unwrap();
    let (model, out) = (synthetic_of(temp.path(), "bf16"), temp.path().join("out"));
    let refused = |from: &Path, format: &str| {
        let line = fail(2, &["convert", text(from), "--format", format, "--out", text(&out), "--quiet"]);
        assert!(line.contains("without loss") && line.contains("--requantize") && !out.exists(), "{line}");
        line
    };
    // A type that no other format has.
    let gguf = temp.path().join("q5_0.gguf");
    quantize(&model, "rtn-q5_0", "gguf", &gguf);
    let line = refused(&gguf, "compressed-tensors");
    assert!(line.contains("14 of 14 layers") && line.contains("model.layers.0.self_attn.q_proj"), "{line}");
    // f16 scales of a bf16 model, which loaders would round.
    let gptq = temp.path().join("gptq");
    quantize(&model, "rtn-int4-g32", "gptq", &gptq);
    assert!(refused(&gptq, "compressed-tensors").contains("not representable in bf16"));
    // Run-time activation quantization without a place in the target; the user may drop it.
    let w8a8 = temp.path().join("w8a8");
    quantize(&model, "w8a8", "compressed-tensors", &w8a8);
    assert!(refused(&w8a8, "gguf").contains("inputs"));
    let dropped = temp.path().join("native");
    let arguments = ["convert", text(&w8a8), "--format", "native", "--drop-inputs", "--out", text(&dropped)];
    let done = json(&[&arguments[..], &["--json", "--quiet"]].concat());
    assert_eq!((&done["lossless"], &done["dropped_inputs"]), (&true.into(), &true.into()));
    assert!(done["activations"].is_null(), "{done}");
    // Zero points without a place in the target.
    let asym = temp.path().join("asym");
    quantize(&model, "rtn-int4-g32-asym", "gptq", &asym);
    assert!(refused(&asym, "gguf").contains("zero point"));
    let line = fail(2, &["convert", text(&gptq), "--format", "gptq", "--out", text(&out), "--quiet"]);
    assert!(line.contains("expected a format other than the source's"), "{line}");
    let arguments = ["convert", text(&asym), "--format", "gguf", "--requantize", "q8_0", "--out"];
    let new = temp.path().join("new.gguf");
    let done = json(&[&arguments[..], &[text(&new), "--json", "--quiet"]].concat());
    let cost = done["max_relative_error"].as_f64().unwrap();
    assert!(done["lossless"] == false && (1e-4..0.01).contains(&cost), "{cost}");
    assert_eq!(done["method"], "rtn");
    let said = succeed(&[&arguments[..], &[text(&temp.path().join("again.gguf")), "--quiet"]].concat());
    assert!(said.contains("requantized") && said.contains("SQNR"), "{said}");
    // The quality loss against the source, and a bound that it passes or fails.
    let tokens = temp.path().join("tokens.json");
    fs::write(&tokens, "[[1, 2, 3, 4, 5, 6, 7, 8], [9, 8, 7, 6, 5, 4, 3, 2]]").unwrap();
    let measured = temp.path().join("measured.gguf");
    let arguments = [&arguments[..], &[text(&measured), "--tokens", text(&tokens), "--quiet"]].concat();
    let line = fail(1, &[&arguments[..], &["--max-kl", "0"]].concat());
    assert!(line.contains("KL") && !measured.exists(), "{line}");
    let figures = json(&[&arguments[..], &["--max-kl", "1", "--json"]].concat())["evaluation"].take();
    let (kl, floor) = (figures["kl"].as_f64().unwrap(), figures["noise_floor_kl"].as_f64());
    assert!((1e-9..0.01).contains(&kl) && floor.is_some() && figures["kl_se"].is_f64(), "{figures}");
    let said = succeed(&["verify", text(&measured), "--quiet"]);
    assert!(said.contains("ok") || said.contains("verified"), "{said}");
}

#[test]
fn a_model_from_gguf_loads_as_a_folder() {
    let temp = TempDir::new().unwrap();
    let (model, gguf, out) =
        (synthetic_of(temp.path(), "f16"), temp.path().join("m.gguf"), temp.path().join("ct"));
    quantize(&model, "rtn-q8_0", "gguf", &gguf);
    convert(&gguf, "compressed-tensors", &out);
    same_results(&out, &gguf, temp.path());
    let config: serde_json::Value =
        serde_json::from_slice(&fs::read(out.join("config.json")).unwrap()).unwrap();
    assert_eq!(config["architectures"], serde_json::json!(["LlamaForCausalLM"]));
    assert_eq!(config["quantization_config"]["quant_method"], "compressed-tensors");
    let file = SafeTensors::open(&out.join("model.safetensors")).unwrap();
    assert_eq!(file.get("model.embed_tokens.weight").unwrap().dtype, Dtype::F16);
}

/// A GGUF file is rounded again to a GGUF file, its quantized embedding and head included: the result is that of the way over a
/// folder.
#[test]
fn gguf_files_are_requantized_to_gguf() {
    let temp = TempDir::new().unwrap();
    let at = |name: &str| temp.path().join(name);
    let tokens = at("tokens.json");
    fs::write(&tokens, "[[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]]").unwrap();
    let nll = |model: &Path| {
        json(&["eval", text(model), "--tokens", text(&tokens), "--json", "--quiet"])["nll"].as_f64().unwrap()
    };
    let names = ["llama2-gqa-tied", "gemma", "gpt2", "gpt-neox", "mamba2", "olmo2", "mixtral", "glm4"];
    for name in names {
        let model = crate::support::root().join("tests/data/tiny").join(name);
        let (quantized, folder, file) =
            (at(&format!("{name}.gguf")), at(name), at(&format!("{name}-again.gguf")));
        succeed(&[
            "quantize",
            text(&model),
            "--recipe",
            "rtn-q8_0",
            "--embeddings",
            "q8_0",
            "--out",
            text(&quantized),
            "--quiet",
        ]);
        for (scheme, bound) in [("f32", 2e-3), ("f16", 2e-3), ("bf16", 2e-2)] {
            let convert = |format: &str, out: &Path| {
                let done = json(&[
                    "convert",
                    text(&quantized),
                    "--format",
                    format,
                    "--requantize",
                    scheme,
                    "--out",
                    text(out),
                    "--overwrite",
                    "--json",
                    "--quiet",
                ]);
                assert_eq!(done["verification"]["ok"], true, "{name} {scheme}: {done}");
            };
            convert("native", &folder);
            convert("gguf", &file);
            let (there, back) = (nll(&folder), nll(&file));
            assert!((there - back).abs() < bound * there, "{name} {scheme}: {there} {back}");
        }
    }
}

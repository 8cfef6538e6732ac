//! Architecture-specific GGUF forms: scale factors of ternary weights, MXFP4 and NVFP4 experts, split files.

use std::path::{Path, PathBuf};

use mantissa_model::ModelConfig;
use mantissa_store::{Dtype, Gguf};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::doctor::never_accused;
use crate::gguf_architectures::logits;
use crate::inspect::complete;
use crate::main_job::{tiny, windows};
use crate::support::{File, fail, json as run, le, succeed, text, write};

/// Config of a tiny model with some fields changed.
fn config(name: &str, edits: &Value) -> Value {
    let mut config: Value =
        serde_json::from_slice(&std::fs::read(tiny(name).join("config.json")).unwrap()).unwrap();
    edits.as_object().unwrap().iter().for_each(|(field, value)| config[field] = value.clone());
    config
}

/// Writes a model with this config: norms 1, weights given by `value` from name and index.
fn model(out: &Path, config: &Value, value: impl Fn(&str, usize) -> f32) -> PathBuf {
    std::fs::create_dir(out).unwrap();
    std::fs::write(out.join("config.json"), config.to_string()).unwrap();
    let infos = ModelConfig::from_json(config, "config.json").unwrap().tensors();
    let tensors: Vec<_> = infos
        .iter()
        .map(|info| {
            let one = |i| if info.name.contains("norm") { 1.0 } else { value(&info.name, i) };
            let values: Vec<f32> = (0..info.shape.iter().product()).map(one).collect();
            (info.name.as_str(), Dtype::F32, &info.shape[..], le(&values))
        })
        .collect();
    write(&out.join("model.safetensors"), &tensors);
    out.to_owned()
}

/// Returns a value between -1 and 1 that is exact in f16.
fn noise(name: &str, i: usize) -> f32 {
    let mut x = (i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (name.len() as u64) << 40;
    x = (x ^ (x >> 31)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    ((x >> 53) as f32 - 1024.0) / 1024.0
}

fn apart(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

fn largest_error(done: &Value) -> f64 {
    let layers = done["layers"].as_array().unwrap();
    layers.iter().map(|layer| layer["max_abs_error"].as_f64().unwrap()).fold(0.0, f64::max)
}

#[test]
fn ternary_weights_are_carried_over_exactly() {
    let temp = TempDir::new().unwrap();
    let (dir, tokens) = (temp.path(), windows(temp.path()));
    for (hidden, types) in [(256, ["TQ1_0", "TQ2_0"]), (64, ["Q4_0", "Q4_0"])] {
        let edits = json!({
            "hidden_size": hidden, "intermediate_size": hidden, "num_hidden_layers": 1,
            "num_attention_heads": 4, "num_key_value_heads": 4
        });
        // A different factor per matrix, none near an f16 value.
        let trit = |name: &str, i: usize| match name.contains("proj") {
            true => {
                (noise(name, i) * 1.5).round().clamp(-1.0, 1.0) * (0.123_456_79 + name.len() as f32 * 1e-3)
            }
            false => noise(name, i),
        };
        let config = config("bitnet-silu", &edits);
        let source = model(&dir.join(format!("bitnet-{hidden}")), &config, trit);
        let expected = logits(dir, &source, &tokens);
        for (recipe, ty) in ["rtn-tq1_0", "rtn-tq2_0"].into_iter().zip(types) {
            let out = dir.join(format!("{hidden}-{recipe}.gguf"));
            let arguments =
                ["quantize", text(&source), "--recipe", recipe, "--format", "gguf", "--out", text(&out)];
            let done = run(&[&arguments[..], &["--json", "--quiet"]].concat());
            assert_eq!(done["verification"]["ok"], true, "{done}");
            assert_eq!(largest_error(&done), 0.0, "{recipe}");
            let file = Gguf::open(&out).unwrap();
            assert_eq!(file.get("blk.0.ffn_down.weight").unwrap().ty.name, ty);
            assert_eq!(file.get("blk.0.ffn_down.scale").unwrap().shape, [1]);
            let worst = apart(&expected, &logits(dir, &out, &tokens));
            assert!(worst <= 1e-4, "{recipe}: {worst}");
        }
    }
    // Convert to the other format, and back in the other type.
    let (native, back) = (dir.join("native"), dir.join("back.gguf"));
    let from = dir.join("256-rtn-tq1_0.gguf");
    for (from, format, to) in [(&from, "native", &native), (&native, "gguf", &back)] {
        let done = run(&["convert", text(from), "--format", format, "--out", text(to), "--json", "--quiet"]);
        assert_eq!((&done["lossless"], &done["verification"]["ok"]), (&true.into(), &true.into()), "{done}");
    }
    assert_eq!(Gguf::open(&back).unwrap().get("blk.0.ffn_down.weight").unwrap().ty.name, "TQ2_0");
    assert!(apart(&logits(dir, &from, &tokens), &logits(dir, &back, &tokens)) <= 1e-5);
}

/// gpt-oss model in its published form, with MXFP4 experts.
pub fn gpt_oss(out: &Path) -> PathBuf {
    let edits = json!({
        "intermediate_size": 64, "swiglu_limit": 7.0, "quantization_config": {"quant_method": "mxfp4"}
    });
    std::fs::create_dir(out).unwrap();
    let config = config("gpt-oss", &edits);
    std::fs::write(out.join("config.json"), config.to_string()).unwrap();
    let tiny = File::open(&tiny("gpt-oss").join("model.safetensors"));
    let mut tensors: Vec<(String, Dtype, Vec<usize>, Vec<u8>)> = tiny
        .names()
        .into_iter()
        .filter(|name| !name.contains("experts"))
        .map(|name| (name.clone(), Dtype::F32, tiny.shape(&name), tiny.bytes(&name)))
        .collect();
    let codes = |name: &str, n: usize| -> Vec<u8> {
        (0..n).map(|i| ((noise(name, i) + 1.0) * 127.0) as u8).collect()
    };
    for layer in 0..2 {
        let experts = format!("model.layers.{layer}.mlp.experts");
        for (projection, rows, groups) in [("gate_up_proj", 128, 1), ("down_proj", 32, 2)] {
            let name = format!("{experts}.{projection}");
            let blocks = codes(&name, 4 * rows * groups * 16);
            let scales = codes(&name, 4 * rows * groups).into_iter().map(|code| 118 + code % 8).collect();
            let bias: Vec<f32> = (0..4 * rows).map(|i| noise(&name, i) * 0.25).collect();
            tensors.push((format!("{name}_blocks"), Dtype::U8, vec![4, rows, groups, 16], blocks));
            tensors.push((format!("{name}_scales"), Dtype::U8, vec![4, rows, groups], scales));
            tensors.push((format!("{name}_bias"), Dtype::F32, vec![4, rows], le(&bias)));
        }
    }
    let tensors: Vec<_> = tensors
        .iter()
        .map(|(name, ty, shape, bytes)| (name.as_str(), *ty, &shape[..], bytes.clone()))
        .collect();
    write(&out.join("model.safetensors"), &tensors);
    out.to_owned()
}

/// `inspect --stats` reads gpt-oss experts in every format and finds the same statistics.
fn statistics_agree(source: &Path, gguf: &Path) {
    let stats = |path: &Path, name: &str| {
        let report = run(&["inspect", text(path), "--stats", "--json"]);
        let all = report["tensors"].as_array().unwrap();
        assert!(all.iter().all(|t| t["parameters"] == 0 || t["stats"].is_object()), "{report}");
        let of_name = all.iter().find(|t| t["name"].as_str().unwrap().ends_with(name)).unwrap();
        let scheme = of_name["scheme"].as_str().unwrap();
        assert!(scheme.contains("mxfp4"), "{scheme}");
        of_name["stats"].clone()
    };
    let (theirs, ours) =
        (stats(source, "1.mlp.experts.down_proj"), stats(gguf, "blk.1.ffn_down_exps.weight"));
    assert_eq!(theirs, ours);
    let (amax, kurtosis) = (theirs["amax"].as_f64().unwrap(), theirs["kurtosis"].as_f64().unwrap());
    assert!(amax > 0.0 && kurtosis > 1.0 && theirs["row_amax"]["max"].as_f64() == Some(amax), "{theirs}");
    // Gate and up are one projection in one format, and two in the other.
    let joined = stats(source, "1.mlp.experts.gate_up_proj");
    let [gate, up] = ["gate", "up"].map(|of| stats(gguf, &format!("blk.1.ffn_{of}_exps.weight")));
    let mean = |stats: &Value| stats["mean"].as_f64().unwrap();
    assert!((mean(&joined) - 0.5 * (mean(&gate) + mean(&up))).abs() < 1e-9, "{joined}");
    let amax = |stats: &Value| stats["amax"].as_f64().unwrap();
    assert_eq!(amax(&joined), amax(&gate).max(amax(&up)));
}

#[test]
fn experts_of_gpt_oss_are_carried_over_bit_for_bit() {
    let temp = TempDir::new().unwrap();
    let (dir, tokens) = (temp.path(), windows(temp.path()));
    let (source, out) = (gpt_oss(&dir.join("gpt-oss")), dir.join("m.gguf"));
    let done = run(&["convert", text(&source), "--format", "gguf", "--out", text(&out), "--json", "--quiet"]);
    assert_eq!((&done["lossless"], &done["verification"]["ok"]), (&true.into(), &true.into()), "{done}");
    never_accused(text(&out), &["--reference", text(&source)]);
    for path in [&source, &out] {
        let report = complete(path, &source);
        let of_experts = |t: &&Value| t["scheme"].as_str().is_some_and(|scheme| scheme.contains("mxfp4"));
        let experts = report["tensors"].as_array().unwrap().iter().filter(of_experts);
        let parameters: u64 = experts.map(|t| t["parameters"].as_u64().unwrap()).sum();
        assert_eq!(parameters, 2 * 4 * 3 * 64 * 32, "{report}");
    }
    statistics_agree(&source, &out);
    let file = Gguf::open(&out).unwrap();
    let up = file.get("blk.1.ffn_up_exps.weight").unwrap();
    assert_eq!((up.ty.name, &up.shape[..]), ("MXFP4", &[4, 64, 32][..]));
    assert_eq!(file.get("blk.1.ffn_up_exps.bias").unwrap().shape, [4, 64]);
    assert_eq!(file.get("blk.0.attn_sinks.weight").unwrap().shape, [4]);
    // Row 7 of expert 2's `up` is row 15 of the fused projection.
    let theirs = File::open(&source.join("model.safetensors"));
    let name = "model.layers.1.mlp.experts.gate_up_proj";
    let row = 2 * 128 + 15;
    let blocks = theirs.bytes(&format!("{name}_blocks"));
    let nibble = |element: usize| blocks[row * 16 + element / 2] >> (4 * (element % 2)) & 15;
    let block = &file.read(up).unwrap()[(2 * 64 + 7) * 17..][..17];
    assert_eq!(block[0], theirs.bytes(&format!("{name}_scales"))[row]);
    for (i, byte) in block[1..].iter().enumerate() {
        assert_eq!((byte & 15, byte >> 4), (nibble(i), nibble(i + 16)), "{i}");
    }
    assert_eq!(apart(&logits(dir, &source, &tokens), &logits(dir, &out, &tokens)), 0.0);
}

#[test]
fn experts_are_quantized_into_the_published_layout() {
    let temp = TempDir::new().unwrap();
    let (dir, tokens) = (temp.path(), windows(temp.path()));
    let config = config("gpt-oss", &json!({"intermediate_size": 64, "swiglu_limit": 7.0}));
    let source = model(&dir.join("dense"), &config, |name, i| noise(name, i) * 0.3);
    let (out, again) = (dir.join("mxfp4"), dir.join("again"));
    let quantize = |source: &Path, out: &Path| {
        vec!["quantize", text(source), "--recipe", "rtn-mxfp4", "--format", "mxfp4", "--out", text(out)]
            .into_iter()
            .map(str::to_owned)
            .chain(["--json", "--quiet"].map(str::to_owned))
            .collect::<Vec<_>>()
    };
    let done = run(&quantize(&source, &out));
    assert_eq!(done["verification"]["ok"], true, "{done}");
    assert_eq!(done["verification"]["weights"], 24, "two layers, four experts, three projections: {done}");
    run(&quantize(&source, &again));
    let weights = |dir: &Path| std::fs::read(dir.join("model.safetensors")).unwrap();
    assert!(weights(&out) == weights(&again));
    let file = File::open(&out.join("model.safetensors"));
    let name = "model.layers.1.mlp.experts.gate_up_proj";
    assert_eq!(file.shape(&format!("{name}_blocks")), [4, 128, 1, 16]);
    assert_eq!(file.shape(&format!("{name}_scales")), [4, 128, 1]);
    assert!(file.has(&format!("{name}_bias")) && !file.has(name));
    assert!(file.has("model.layers.1.self_attn.q_proj.weight"), "attention stays as it is");
    let written: Value = serde_json::from_slice(&std::fs::read(out.join("config.json")).unwrap()).unwrap();
    assert_eq!(written["quantization_config"]["quant_method"], "mxfp4");
    let found =
        run(&["eval", text(&out), "--reference", text(&source), "--tokens", &tokens, "--json", "--quiet"]);
    let kl = found["kl"].as_f64().unwrap();
    assert!(kl > 0.0 && kl < 0.1, "{kl}");
    let gguf = dir.join("m.gguf");
    let done = run(&["convert", text(&out), "--format", "gguf", "--out", text(&gguf), "--json", "--quiet"]);
    assert_eq!(done["lossless"], true, "{done}");
    assert_eq!(apart(&logits(dir, &out, &tokens), &logits(dir, &gguf, &tokens)), 0.0);
    assert!(fail(2, &quantize(&tiny("llama1-mha"), &dir.join("no"))).contains("gpt-oss"));
}

#[test]
fn experts_are_stacked_and_taken_apart_bit_for_bit() {
    let temp = TempDir::new().unwrap();
    let (dir, tokens) = (temp.path(), windows(temp.path()));
    let source = gpt_oss(&dir.join("gpt-oss"));
    let convert = |from: &Path, format: &str, out: &Path| {
        let done = run(&["convert", text(from), "--format", format, "--out", text(out), "--json", "--quiet"]);
        assert_eq!((&done["lossless"], &done["verification"]["ok"]), (&true.into(), &true.into()), "{done}");
        done
    };
    let theirs = File::open(&source.join("model.safetensors"));
    let expected = logits(dir, &source, &tokens);
    for (format, layers) in [("compressed-tensors", 24), ("native", 24), ("mlx", 24), ("gguf", 32)] {
        let (there, back) = (dir.join(format!("there.{format}")), dir.join(format!("back-{format}")));
        let apart_of_others = convert(&source, format, &there);
        assert_eq!(apart_of_others["layers"].as_array().unwrap().len(), layers, "{format}");
        assert_eq!(apart(&expected, &logits(dir, &there, &tokens)), 0.0, "{format}");
        if format != "gguf" {
            let one_by_one = File::open(&there.join("model.safetensors"));
            assert!(!one_by_one.has("model.layers.0.mlp.experts.down_proj_blocks"), "{format}");
            assert!(one_by_one.has("model.layers.0.mlp.experts.down_proj_bias"), "{format}");
        }
        let stacked = convert(&there, "mxfp4", &back);
        assert_eq!(stacked["layers"].as_array().unwrap().len(), 24, "{format}");
        let ours = File::open(&back.join("model.safetensors"));
        assert_eq!(ours.names(), theirs.names(), "{format}");
        for name in theirs.names() {
            assert_eq!(ours.shape(&name), theirs.shape(&name), "{format}: {name}");
            // Unquantized GGUF tensors come back in the narrowest dtype that holds them.
            match name.ends_with("_blocks") || name.ends_with("_scales") || format != "gguf" {
                true => assert!(ours.bytes(&name) == theirs.bytes(&name), "{format}: {name}"),
                false => assert!(ours.f32(&name) == theirs.f32(&name), "{format}: {name}"),
            }
        }
        let config: Value =
            serde_json::from_slice(&std::fs::read(back.join("config.json")).unwrap()).unwrap();
        assert_eq!(config["quantization_config"]["quant_method"], "mxfp4", "{format}");
        assert_eq!(config["architectures"], json!(["GptOssForCausalLM"]), "{format}");
    }
}

#[test]
fn only_experts_are_stored_in_the_published_layout() {
    let temp = TempDir::new().unwrap();
    let (dir, tokens) = (temp.path(), windows(temp.path()));
    let config = config("gpt-oss", &json!({"intermediate_size": 64, "swiglu_limit": 7.0}));
    let source = model(&dir.join("dense"), &config, |name, i| noise(name, i) * 0.3);
    let quantize = |recipe: &str, format: &str, out: &Path| {
        run(&[
            "quantize",
            text(&source),
            "--recipe",
            recipe,
            "--format",
            format,
            "--out",
            text(out),
            "--json",
            "--quiet",
        ])
    };
    let convert = |from: &Path, out: &Path, more: &[&str]| {
        let arguments = ["convert", text(from), "--format", "mxfp4", "--out", text(out), "--json", "--quiet"];
        [&arguments[..], more].concat().into_iter().map(str::to_owned).collect::<Vec<_>>()
    };
    // Attention is quantized too: the target can only hold it decoded.
    let (all, out) = (dir.join("all"), dir.join("out"));
    quantize("rtn-mxfp4", "compressed-tensors", &all);
    let line = fail(2, &convert(&all, &out, &[]));
    assert!(
        line.contains("the format quantizes experts only (8 layers, first model.layers.0.self_attn.q_proj)")
            && !out.exists(),
        "{line}"
    );
    let done = run(&convert(&all, &out, &["--requantize", "mxfp4"]));
    assert_eq!((&done["lossless"], &done["verification"]["ok"]), (&false.into(), &true.into()), "{done}");
    assert_eq!(done["max_relative_error"], 0.0, "what is rounded already stays: {done}");
    assert!(apart(&logits(dir, &all, &tokens), &logits(dir, &out, &tokens)) <= 1e-5);
    // Experts converted to this layout equal experts quantized into it.
    let direct = dir.join("direct");
    quantize("rtn-mxfp4", "mxfp4", &direct);
    let open = |dir: &Path| File::open(&dir.join("model.safetensors"));
    let (ours, theirs) = (open(&out), open(&direct));
    assert_eq!(ours.names(), theirs.names());
    for name in theirs.names().iter().filter(|name| name.contains("experts")) {
        assert!(ours.bytes(name) == theirs.bytes(name), "{name}");
    }
    // Experts in another scheme, and a model without experts.
    let int4 = dir.join("int4");
    quantize("rtn-int4-g32", "compressed-tensors", &int4);
    assert!(fail(2, &convert(&int4, &dir.join("no"), &[])).contains("MXFP4 weights only"));
    let llama = crate::lint::synthetic_of(dir, "bf16");
    let of_llama = dir.join("llama-mxfp4");
    let arguments = ["quantize", text(&llama), "--recipe", "mxfp4", "--format", "compressed-tensors"];
    succeed(&[&arguments[..], &["--out", text(&of_llama), "--quiet"]].concat());
    assert!(fail(2, &convert(&of_llama, &dir.join("no"), &[])).contains("the model has none"));
}

#[test]
fn stacked_nvfp4_has_a_factor_for_each_expert() {
    let temp = TempDir::new().unwrap();
    let (dir, tokens) = (temp.path(), windows(temp.path()));
    let edits = json!({"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16});
    // Experts of very different magnitudes.
    let value = |name: &str, i: usize| {
        let expert =
            name.split(".experts.").nth(1).and_then(|rest| rest.split('.').next()?.parse::<i32>().ok());
        noise(name, i) * 0.1 * 4f32.powi(expert.unwrap_or(0))
    };
    let source = model(&dir.join("mixtral"), &config("mixtral", &edits), value);
    let out = dir.join("m.gguf");
    let arguments =
        ["quantize", text(&source), "--recipe", "rtn-nvfp4", "--format", "gguf", "--out", text(&out)];
    let done = run(&[&arguments[..], &["--json", "--quiet"]].concat());
    assert_eq!(done["verification"]["ok"], true, "{done}");
    let file = Gguf::open(&out).unwrap();
    let (weight, scale) =
        (file.get("blk.0.ffn_gate_exps.weight").unwrap(), file.get("blk.0.ffn_gate_exps.scale").unwrap());
    assert_eq!((weight.ty.name, &weight.shape[..]), ("NVFP4", &[4, 64, 64][..]));
    assert_eq!(scale.shape, [4]);
    let factors: Vec<f32> =
        file.read(scale).unwrap().chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
    assert!(factors.windows(2).all(|pair| pair[1] > 3.0 * pair[0]), "{factors:?}");
    let found =
        run(&["eval", text(&out), "--reference", text(&source), "--tokens", &tokens, "--json", "--quiet"]);
    let relative = done["layers"].as_array().unwrap().iter().map(|l| l["relative_error"].as_f64().unwrap());
    assert!(relative.fold(0.0, f64::max) < 0.15);
    assert!(found["kl"].as_f64().unwrap() < 0.2, "{found}");
}

#[test]
fn a_large_model_is_split_as_gguf_split_does() {
    let temp = TempDir::new().unwrap();
    let (dir, tokens) = (temp.path(), windows(temp.path()));
    let (source, whole, out) = (tiny("llama1-mha"), dir.join("whole.gguf"), dir.join("m.gguf"));
    let quantize = |out: &Path, more: &[&str]| {
        let arguments =
            ["quantize", text(&source), "--recipe", "rtn-q8_0", "--format", "gguf", "--out", text(out)];
        run(&[&arguments[..], more, &["--json", "--quiet"]].concat())
    };
    quantize(&whole, &[]);
    // Twice: the second run replaces the first's files.
    for _ in 0..2 {
        let done = quantize(&out, &["--max-shard-size", "10000", "--overwrite"]);
        assert_eq!(done["verification"]["ok"], true, "{done}");
        assert_eq!(done["verification"]["notes"], json!([]), "{done}");
        assert!(done["output"].as_str().unwrap().ends_with("-of-00003.gguf"), "{done}");
    }
    let names: Vec<String> = std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.starts_with("m-") || name.starts_with('.'))
        .collect();
    assert_eq!(names.len(), 5, "three files, quality and manifest: {names:?}");
    let first = dir.join("m-00001-of-00003.gguf");
    let model = Gguf::open_model(&first).unwrap();
    assert_eq!(model.metadata().uint("split.tensors.count").unwrap(), Some(model.tensors().len() as u64));
    let tensors = |model: &Gguf| {
        model
            .tensors()
            .iter()
            .map(|tensor| (tensor.name.clone(), model.read(tensor).unwrap()))
            .collect::<Vec<_>>()
    };
    assert!(tensors(&model) == tensors(&Gguf::open(&whole).unwrap()));
    assert_eq!(apart(&logits(dir, &whole, &tokens), &logits(dir, &first, &tokens)), 0.0);
    // A file of another model among them.
    let second = dir.join("m-00002-of-00003.gguf");
    let mut bytes = std::fs::read(&second).unwrap();
    let at = bytes.len() - 40;
    bytes[at] ^= 1;
    std::fs::write(&second, bytes).unwrap();
    assert!(fail(1, &["verify", text(&first), "--quiet"]).contains("m-00002-of-00003.gguf"));
    std::fs::remove_file(&second).unwrap();
    assert!(fail(1, &["verify", text(&first), "--quiet"]).contains("m-00002-of-00003.gguf"));
    succeed(&["inspect", text(&whole), "--quiet"]);
}

//! Every architecture with GGUF output: a tiny model written in f32, verified, and run from the file with the
//! source's logits.

use std::path::{Path, PathBuf};

use mantissa_store::{Dtype, Gguf};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::doctor::never_accused;
use crate::gguf_made::{deepseek_v4, gemma3n, kimi_linear, resized};
use crate::inspect::complete;
use crate::main_job::{tiny, windows};
use crate::support::{File, fail, json as run, sampled, succeed, text, write};

/// Copies the committed model `name` with `edits` of its config for features that llama.cpp does not compute.
pub fn model(dir: &Path, name: &str, edits: &Value) -> PathBuf {
    let out = dir.join(name);
    std::fs::create_dir(&out).unwrap();
    let mut config: Value =
        serde_json::from_slice(&std::fs::read(tiny(name).join("config.json")).unwrap()).unwrap();
    edits.as_object().unwrap().iter().for_each(|(field, value)| config[field] = value.clone());
    std::fs::write(out.join("config.json"), config.to_string()).unwrap();
    std::fs::copy(tiny(name).join("model.safetensors"), out.join("model.safetensors")).unwrap();
    out
}

/// Removes the first layer, which has no experts: llama.cpp does not support that in this architecture.
fn qwen2_moe(dir: &Path) -> PathBuf {
    let edits = json!({"num_hidden_layers": 1, "mlp_only_layers": [], "layer_types": ["full_attention"]});
    let out = model(dir, "qwen2-moe", &edits);
    let source = File::open(&tiny("qwen2-moe").join("model.safetensors"));
    let names: Vec<String> = source.names().into_iter().filter(|name| !name.contains("layers.0.")).collect();
    let renamed: Vec<_> = names.iter().map(|name| name.replace("layers.1.", "layers.0.")).collect();
    let shapes: Vec<_> = names.iter().map(|name| source.shape(name)).collect();
    let tensors: Vec<_> = names
        .iter()
        .zip(renamed.iter().zip(&shapes))
        .map(|(name, (renamed, shape))| (renamed.as_str(), Dtype::F32, &shape[..], source.bytes(name)))
        .collect();
    let file = out.join("model.safetensors");
    std::fs::remove_file(&file).unwrap();
    write(&file, &tensors);
    out
}

/// Copies the committed model `name` with `edits` of its config and the tensors that `keep` names.
fn part(dir: &Path, name: &str, edits: &Value, keep: impl Fn(&str) -> bool) -> PathBuf {
    let out = model(dir, name, edits);
    let source = File::open(&tiny(name).join("model.safetensors"));
    let names: Vec<String> = source.names().into_iter().filter(|name| keep(name)).collect();
    let shapes: Vec<_> = names.iter().map(|name| source.shape(name)).collect();
    let named = names.iter().zip(&shapes);
    let tensors: Vec<_> =
        named.map(|(name, shape)| (name.as_str(), Dtype::F32, &shape[..], source.bytes(name))).collect();
    let file = out.join("model.safetensors");
    std::fs::remove_file(&file).unwrap();
    write(&file, &tensors);
    out
}

/// Copies the committed model `name` with `edits` of its config and, as layers, those of its layers that `from` lists.
fn layers(dir: &Path, name: &str, edits: &Value, from: &[usize]) -> PathBuf {
    let out = model(dir, name, edits);
    let source = File::open(&tiny(name).join("model.safetensors"));
    let mut tensors = Vec::new();
    for name in source.names() {
        let layer = name.split_once("layers.").and_then(|(_, rest)| rest.split_once('.'));
        let Some((layer, _)) = layer else {
            tensors.push((name.clone(), name));
            continue;
        };
        let old = format!("layers.{layer}.");
        let places = (0..from.len()).filter(|&place| from[place].to_string() == layer);
        tensors.extend(places.map(|place| (name.replace(&old, &format!("layers.{place}.")), name.clone())));
    }
    let shapes: Vec<_> = tensors.iter().map(|(_, old)| source.shape(old)).collect();
    let named = tensors.iter().zip(&shapes);
    let tensors: Vec<_> = named
        .map(|((name, old), shape)| (name.as_str(), Dtype::F32, &shape[..], source.bytes(old)))
        .collect();
    let file = out.join("model.safetensors");
    std::fs::remove_file(&file).unwrap();
    write(&file, &tensors);
    out
}

/// Granite 4 without limits of the time steps, and without the biases that llama.cpp does not have.
pub fn granite_hybrid(dir: &Path) -> PathBuf {
    let infinity = json!({"__float__": "Infinity"});
    let edits = json!({"time_step_limit": [0.0, infinity], "mamba_proj_bias": false});
    let bias = |name: &str| name.ends_with("_proj.bias");
    part(dir, "granite-hybrid", &edits, |name| !bias(name))
}

/// A model with sparse attention whose index keys are as wide as llama.cpp requires, with an epsilon for all norms.
fn indexed(dir: &Path, name: &str) -> PathBuf {
    let edits = json!({"index_head_dim": 64, "rms_norm_eps": 1e-6});
    resized(&dir.join(name), name, &edits, |name, shape| match name.rsplit_once(".indexer.") {
        Some((_, "wq_b.weight")) => vec![shape[0] * 8, shape[1]],
        Some((_, "wk.weight")) => vec![64, shape[1]],
        Some((_, "k_norm.weight" | "k_norm.bias")) => vec![64],
        _ => shape.to_vec(),
    })
}

/// Llama 4 with the chunks, growth and layers that llama.cpp fixes.
fn llama4(dir: &Path) -> PathBuf {
    let edits = json!({
        "num_hidden_layers": 4,
        "moe_layers": [1, 3],
        "no_rope_layers": [1, 1, 1, 0],
        "attention_chunk_size": 8192,
        "attn_scale": 0.1,
        "floor_scale": 8192,
    });
    layers(dir, "llama4", &edits, &[1, 0, 1, 2])
}

/// K-EXAONE with the dense layer first.
fn exaone_moe(dir: &Path) -> PathBuf {
    let edits = json!({
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    });
    layers(dir, "exaone-moe", &edits, &[1, 0, 2])
}

/// GLM-4.7-Flash with the dense layer first and the epsilon of the latents' norms everywhere.
fn glm4_moe_lite(dir: &Path) -> PathBuf {
    let edits = json!({"mlp_layer_types": ["dense", "sparse", "sparse"], "rms_norm_eps": 1e-6});
    layers(dir, "glm4-moe-lite", &edits, &[1, 0, 2])
}

/// Repeats the layers of the tiny model to the 64 of the only model whose windows llama.cpp computes, in its pattern.
fn exaone4(dir: &Path) -> PathBuf {
    let types: Vec<_> =
        (0..64).map(|layer| if layer % 4 == 3 { "full_attention" } else { "sliding_attention" }).collect();
    let out = model(dir, "exaone4", &json!({"num_hidden_layers": 64, "layer_types": types}));
    let named = dir.join("exaone4-windows");
    std::fs::rename(out, &named).unwrap();
    let source = File::open(&tiny("exaone4").join("model.safetensors"));
    let mut tensors = Vec::new();
    for name in source.names() {
        let layers = if name.contains("layers.0.") {
            0..64
        } else if name.contains("layers.") {
            continue;
        } else {
            0..1
        };
        tensors.extend(layers.map(|layer| {
            let renamed = name.replace("layers.0.", &format!("layers.{layer}."));
            (renamed, source.shape(&name), source.bytes(&name))
        }));
    }
    let tensors: Vec<_> = tensors
        .iter()
        .map(|(name, shape, bytes)| (name.as_str(), Dtype::F32, &shape[..], bytes.clone()))
        .collect();
    let file = named.join("model.safetensors");
    std::fs::remove_file(&file).unwrap();
    write(&file, &tensors);
    named
}

/// Every tensor and every key of the file is of those that the `gguf` package lists for the architecture.
fn known_to_the_gguf_package(architecture: &str, file: &Gguf) {
    let record: Value = serde_json::from_str(include_str!("../../../../tests/data/gguf_names.json")).unwrap();
    let listed = |list: &Value, name: &str| list.as_array().unwrap().iter().any(|known| known == name);
    let tensors = &record["architectures"][architecture]["tensors"];
    for tensor in file.tensors() {
        // Rates of decay and skips have no suffix, nor has a norm of Falcon-H1.
        let bare = ["ssm_a", "ssm_d", ".ffn_norm"].iter().any(|name| tensor.name.ends_with(name));
        let module = if bare { &tensor.name[..] } else { tensor.name.rsplit_once('.').unwrap().0 };
        let layer = module.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
        let template = layer.map_or(module.to_owned(), |(_, name)| format!("blk.{{bid}}.{name}"));
        // The loader of LFM2-MoE reads a head, which the published models do not have.
        let head = architecture == "lfm2moe" && template == "output";
        assert!(head || listed(tensors, &template), "{architecture}: {}", tensor.name);
    }
    for (key, _) in file.metadata().iter() {
        let prefix = format!("{architecture}.");
        let template = key.strip_prefix(&prefix).map_or(key.to_owned(), |rest| format!("{{arch}}.{rest}"));
        assert!(listed(&record["keys"], &template), "{architecture}: {key}");
    }
}

pub fn logits(dir: &Path, model: &Path, tokens: &str) -> Vec<f32> {
    let out = dir.join("logits.safetensors");
    let _ = std::fs::remove_file(&out);
    succeed(&["eval", text(model), "--tokens", tokens, "--logits", text(&out), "--json", "--quiet"]);
    File::open(&out).f32("logits")
}

#[test]
fn every_architecture_is_written_with_the_same_logits() {
    let temp = TempDir::new().unwrap();
    let (dir, tokens) = (temp.path(), windows(temp.path()));
    let scalar = json!({"query_pre_attn_scalar": 12});
    let none = json!({});
    let models = [
        ("llama", model(dir, "mixtral", &none)),
        ("qwen2moe", qwen2_moe(dir)),
        ("qwen3moe", model(dir, "qwen3-moe", &none)),
        ("gemma", model(dir, "gemma", &none)),
        ("gemma2", model(dir, "gemma2", &scalar)),
        ("gemma3", model(dir, "gemma3", &scalar)),
        ("phi2", model(dir, "phi", &none)),
        ("phi3", model(dir, "phi3", &json!({"sliding_window": null}))),
        ("olmo", model(dir, "olmo", &none)),
        ("olmo2", model(dir, "olmo2", &none)),
        ("gptneox", model(dir, "gpt-neox", &none)),
        ("gptneox", model(dir, "gpt-neox-serial", &json!({"hidden_act": "gelu"}))),
        ("phi3", model(dir, "phi3-longrope", &none)),
        ("smollm3", model(dir, "smollm3", &json!({"no_rope_layers": [1, 1]}))),
        ("seed_oss", model(dir, "seed-oss", &none)),
        ("arcee", model(dir, "arcee", &none)),
        ("exaone4", exaone4(dir)),
        ("exaone4", model(dir, "exaone4", &json!({"sliding_window": null, "layer_types": null}))),
        ("starcoder2", model(dir, "starcoder2", &json!({"sliding_window": null}))),
        ("bitnet", model(dir, "bitnet-silu", &none)),
        ("gpt2", model(dir, "gpt2", &none)),
        ("deepseek2", model(dir, "deepseek-v2", &json!({"topk_method": "greedy", "rms_norm_eps": 1e-6}))),
        ("deepseek2", model(dir, "deepseek-v3", &json!({"rms_norm_eps": 1e-6}))),
        ("deepseek2", model(dir, "kimi-k2", &json!({"rms_norm_eps": 1e-6}))),
        ("gpt-oss", model(dir, "gpt-oss", &json!({"swiglu_limit": 7.0}))),
        ("granite", model(dir, "granite", &none)),
        ("ernie4_5", part(dir, "ernie4-5", &json!({"use_bias": false}), |name| !name.ends_with("bias"))),
        (
            "ernie4_5-moe",
            part(dir, "ernie4-5-moe", &json!({"num_hidden_layers": 2}), |name| !name.contains("layers.2.")),
        ),
        ("glm4", model(dir, "glm4", &none)),
        ("glm4moe", model(dir, "glm4-moe", &none)),
        ("minimax-m2", model(dir, "minimax-m2", &none)),
        ("cohere2", model(dir, "cohere2", &none)),
        ("olmo2", model(dir, "olmo3", &none)),
        ("mistral3", model(dir, "ministral3", &none)),
        ("llama4", llama4(dir)),
        ("exaone-moe", exaone_moe(dir)),
        ("deepseek2", glm4_moe_lite(dir)),
        ("gemma4", model(dir, "gemma4", &none)),
        ("gemma4", model(dir, "gemma4-keys-are-values", &none)),
        ("gemma4", model(dir, "gemma4-moe", &none)),
        ("qwen3next", model(dir, "qwen3-next-square", &none)),
        ("qwen35", model(dir, "qwen3-5-square", &none)),
        ("qwen35moe", model(dir, "qwen3-5-moe-square", &none)),
        ("lfm2", part(dir, "lfm2", &json!({"conv_bias": false}), |name| !name.ends_with("bias"))),
        ("lfm2moe", model(dir, "lfm2-moe", &json!({"routed_scaling_factor": 1.0}))),
        ("granitehybrid", granite_hybrid(dir)),
        ("granitehybrid", model(dir, "granite-hybrid-moe", &none)),
        ("nemotron_h_moe", model(dir, "nemotron-h-moe", &none)),
        ("cohere2moe", model(dir, "cohere2-moe", &none)),
        ("deepseek32", indexed(dir, "deepseek-v32-sparse")),
        ("glm-dsa", indexed(dir, "glm-moe-dsa-sparse")),
        ("nemotron_h_moe", model(dir, "nemotron-h-latent", &none)),
        ("gemma3n", gemma3n(&dir.join("gemma3n"), 64)),
        ("deepseek4", deepseek_v4(&dir.join("deepseek-v4"))),
        ("kimi-linear", kimi_linear(&dir.join("kimi-linear"))),
        ("jamba", model(dir, "jamba-wide", &none)),
        ("falcon-h1", model(dir, "falcon-h1", &json!({"time_step_limit": [0.0, {"__float__": "Infinity"}]}))),
        ("nemotron_h", model(dir, "nemotron-h", &json!({"time_step_min": 0.001}))),
        ("hunyuan-dense", model(dir, "hunyuan", &none)),
        ("mamba2", model(dir, "mamba2", &none)),
        ("apertus", model(dir, "apertus", &none)),
    ];
    for (architecture, model) in sampled(models, 3) {
        let out = model.with_extension("gguf");
        let arguments =
            ["quantize", text(&model), "--recipe", "rtn-f32", "--format", "gguf", "--out", text(&out)];
        let done = run(&[&arguments[..], &["--json", "--quiet"]].concat());
        assert_eq!(done["verification"]["ok"], true, "{architecture}: {done}");
        let file = Gguf::open(&out).unwrap();
        assert_eq!(file.metadata().text("general.architecture").unwrap(), Some(architecture));
        known_to_the_gguf_package(architecture, &file);
        complete(&out, &model);
        never_accused(text(&out), &["--reference", text(&model)]);
        let (source, found) = (logits(dir, &model, &tokens), logits(dir, &out, &tokens));
        let worst = source.iter().zip(&found).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(source.len() == found.len() && worst <= 1e-5, "{architecture}: {worst}");
    }
}

/// Tokens without an embedding of layers read the first, as in transformers; keys and values of layers that share those of
/// others are in the file, and blocks are.
#[test]
fn gemma_3n_has_an_embedding_of_layers_for_every_token() {
    let temp = TempDir::new().unwrap();
    let (few, out) = (gemma3n(&temp.path().join("few"), 60), temp.path().join("few.gguf"));
    let arguments = ["quantize", text(&few), "--recipe", "rtn-q8_0", "--format", "gguf", "--out", text(&out)];
    let done = run(&[&arguments[..], &["--json", "--quiet"]].concat());
    assert_eq!(done["verification"]["ok"], true, "{done}");
    succeed(&["verify", text(&out), "--reference", text(&few)]);
    let file = Gguf::open(&out).unwrap();
    let table = file.get("per_layer_token_embd.weight").unwrap();
    assert_eq!(table.shape, [64, 22 * 256]);
    let bytes = file.read(table).unwrap();
    let row = bytes.len() / 64;
    assert!((60..64).all(|token| bytes[token * row..][..row] == bytes[..row]));
    assert!(bytes[59 * row..][..row] != bytes[..row]);
    for (name, ty, shape) in [
        ("blk.21.attn_k.weight", "Q8_0", &[16, 32][..]),
        ("blk.20.attn_v.weight", "Q8_0", &[16, 32]),
        ("blk.20.attn_k_norm.weight", "F32", &[8]),
        ("blk.3.attn_k.weight", "Q8_0", &[16, 32]),
        ("altup_proj.weight", "F32", &[3, 32, 32]),
    ] {
        let tensor = file.get(name).unwrap();
        assert_eq!((tensor.ty.name, &tensor.shape[..]), (ty, shape), "{name}");
    }
    // The layers that share keys and values have zeros.
    assert!(file.read(file.get("blk.21.attn_k.weight").unwrap()).unwrap().iter().all(|byte| *byte == 0));
    let error =
        fail(2, &["convert", text(&few), "--format", "gguf", "--out", text(&temp.path().join("c.gguf"))]);
    assert!(error.contains("vocab_size_per_layer_input"), "{error}");
}

/// A file of DeepSeek-V4 is a model under the published names, which compressed-tensors holds too.
#[test]
fn a_file_of_deepseek_v4_becomes_a_folder() {
    let temp = TempDir::new().unwrap();
    let dir = temp.path();
    let (model, file, folder) = (deepseek_v4(&dir.join("m")), dir.join("m.gguf"), dir.join("out"));
    for (source, recipe, format, out) in
        [(&model, "rtn-f32", "gguf", &file), (&file, "rtn-int8-channel", "compressed-tensors", &folder)]
    {
        let arguments =
            ["quantize", text(source), "--recipe", recipe, "--format", format, "--out", text(out)];
        let done = run(&[&arguments[..], &["--json", "--quiet"]].concat());
        assert_eq!(done["verification"]["ok"], true, "{format}: {done}");
    }
    let file = File::open(&folder.join("model.safetensors"));
    assert!(file.has("embed.weight") && file.has("layers.0.attn.wkv.weight_scale"));
}

/// Weights that the file has in parts of whole rows are quantized whole by the method: with the importance matrix, and by GPTQ.
#[test]
fn rows_of_split_weights_are_those_of_the_method() {
    let temp = TempDir::new().unwrap();
    let (dir, tokens) = (temp.path(), windows(temp.path()));
    for (model, parts) in [
        (granite_hybrid(dir), ["blk.0.ffn_gate.weight", "blk.0.ffn_up.weight"]),
        (model(dir, "qwen3-next-square", &json!({})), ["blk.0.attn_qkv.weight", "blk.0.attn_gate.weight"]),
    ] {
        let made = |name: &str, options: &[&str]| {
            let out = model.with_extension(name).with_extension("gguf");
            let arguments =
                ["quantize", text(&model), "--format", "gguf", "--overwrite", "--out", text(&out)];
            let done = run(&[&arguments[..], options, &["--json", "--quiet"]].concat());
            assert_eq!(done["verification"]["ok"], true, "{options:?}: {done}");
            let file = Gguf::open(&out).unwrap();
            parts.map(|part| {
                let tensor = file.get(part).unwrap();
                (tensor.ty.name, file.read(tensor).unwrap())
            })
        };
        let calibrated = |recipe| ["--recipe", recipe, "--calibration-tokens", &tokens];
        let [plain, weighed] = [made("a", &["--recipe", "rtn-q4_0"]), made("b", &calibrated("rtn-q4_0"))];
        let [rounded, gptq] = [made("c", &["--recipe", "rtn-mxfp4"]), made("d", &calibrated("gptq-mxfp4"))];
        for (without, with, ty) in [(plain, weighed, "Q4_0"), (rounded, gptq, "MXFP4")] {
            for (without, with) in without.iter().zip(&with) {
                assert_eq!((without.0, with.0), (ty, ty));
                assert!(without.1 != with.1, "{ty}");
            }
        }
    }
}

#[test]
fn experts_are_one_tensor_in_blocks_too() {
    let temp = TempDir::new().unwrap();
    let (model, out) = (tiny("mixtral"), temp.path().join("m.gguf"));
    let arguments =
        ["quantize", text(&model), "--recipe", "rtn-q4_0", "--format", "gguf", "--out", text(&out)];
    let done = run(&[&arguments[..], &["--json", "--quiet"]].concat());
    assert_eq!(done["verification"]["ok"], true, "{done}");
    let file = Gguf::open(&out).unwrap();
    let gate = file.get("blk.1.ffn_gate_exps.weight").unwrap();
    assert_eq!((gate.ty.name, &gate.shape[..]), ("Q4_0", &[4, 24, 32][..]));
    assert_eq!(file.get("blk.1.ffn_gate_inp.weight").unwrap().ty.name, "F32");
    let tokens = windows(temp.path());
    let found =
        run(&["eval", text(&out), "--reference", text(&model), "--tokens", &tokens, "--json", "--quiet"]);
    let kl = found["kl"].as_f64().unwrap();
    assert!(kl > 0.0 && kl < 0.2, "{kl}");
}

#[test]
fn features_beyond_llama_cpp_are_refused_by_field() {
    let temp = TempDir::new().unwrap();
    for (name, field) in [
        ("gemma2", "query_pre_attn_scalar"),
        ("phi3", "sliding_window"),
        ("qwen2-moe", "mlp_only_layers"),
        ("deepseek-v2", "rms_norm_eps"),
        ("gpt-oss", "swiglu_limit"),
        ("falcon-h1-norm", "mamba_norm_before_gate"),
        ("bitnet-relu2", "tie_word_embeddings"),
        ("smollm3", "no_rope_layers"),
        ("seed-oss-biases", "attention_out_bias"),
        ("exaone4", "sliding_window"),
        ("starcoder2", "sliding_window"),
        ("ernie4-5", "use_bias"),
        ("ernie4-5-moe", "layers with experts"),
        ("exaone-moe", "layers with experts"),
        ("glm4-moe-lite", "layers with experts"),
        ("llama4", "moe_layers"),
        ("qwen3-5", "attention_bias"),
        ("qwen3-next", "mlp_only_layers"),
        ("qwen3-5-moe", "linear_value_head_dim"),
        ("lfm2", "conv_bias"),
        ("lfm2-moe", "routed_scaling_factor"),
        ("granite-hybrid", "time_step_limit"),
        ("jamba", "mamba_expand"),
        ("gemma3n", "altup_num_inputs"),
        ("kimi-linear", "linear_num_heads"),
        ("deepseek-v4", "hc_mult"),
        ("nemotron-h", "time_step_min"),
        ("bamba", "model_type"),
    ] {
        let (model, out) = (tiny(name), temp.path().join(format!("{name}.gguf")));
        let error = fail(
            2,
            &["quantize", text(&model), "--recipe", "rtn-f16", "--format", "gguf", "--out", text(&out)],
        );
        assert!(error.contains(field), "{name}: {error}");
        assert!(!out.exists());
    }
}

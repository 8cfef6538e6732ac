//! Models with sizes that llama.cpp fixes, of which no tiny one is recorded: made from a recorded config with waves as
//! weights.

use std::path::{Path, PathBuf};

use mantissa_store::Dtype;
use serde_json::{Value, json};

use crate::main_job::tiny;
use crate::support::{File, le, write};

/// Numbers like random ones, of this scale around `mean`; `seed` tells tensors apart.
fn values(count: usize, (mean, scale): (f32, f32), seed: usize) -> Vec<f32> {
    let at = |i: usize| ((i * 2_654_435_761 + seed * 40_503) % 1_000_003) as f32 / 1_000_003.0;
    (0..count).map(|i| mean + scale * (2.0 * at(i) - 1.0)).collect()
}

/// Name, dtype, shape and bytes of a tensor.
type Tensor = (String, Dtype, Vec<usize>, Vec<u8>);

/// Writes a folder with the recorded config of `name`, `edits` of it, and these tensors.
fn folder(out: &Path, name: &str, edits: &Value, tensors: &[Tensor]) {
    std::fs::create_dir(out).unwrap();
    let mut config: Value =
        serde_json::from_slice(&std::fs::read(tiny(name).join("config.json")).unwrap()).unwrap();
    edits.as_object().unwrap().iter().for_each(|(field, value)| config[field] = value.clone());
    std::fs::write(out.join("config.json"), config.to_string()).unwrap();
    let tensors: Vec<_> = tensors
        .iter()
        .map(|(name, dtype, shape, bytes)| (name.as_str(), *dtype, &shape[..], bytes.clone()))
        .collect();
    write(&out.join("model.safetensors"), &tensors);
}

/// A Gemma 3n with the streams, widths and layers that llama.cpp fixes, and embeddings of layers for the first `rows` of its 64
/// tokens.
pub fn gemma3n(out: &Path, rows: usize) -> PathBuf {
    const LAYERS: usize = 22;
    let types: Vec<_> = (0..LAYERS)
        .map(|layer| if [4, 9, 14, 19, 21].contains(&layer) { "full_attention" } else { "sliding_attention" })
        .collect();
    let shares: Vec<_> = (0..LAYERS).map(|layer| if layer < 10 { 0.95 } else { 0.0 }).collect();
    let edits = json!({
        "num_hidden_layers": LAYERS,
        "altup_num_inputs": 4,
        "laurel_rank": 64,
        "hidden_size_per_layer_input": 256,
        "num_kv_shared_layers": 2,
        "intermediate_size": 64,
        "activation_sparsity_pattern": shares,
        "layer_types": types,
        "final_logit_softcapping": 30.0,
        "vocab_size_per_layer_input": rows,
    });
    let mut tensors: Vec<Tensor> = Vec::new();
    let mut put = |name: String, shape: &[usize]| {
        let of = match *shape {
            [_] => (1.0, 0.2),
            _ => (0.0, (3.0 / shape[1] as f32).sqrt()),
        };
        let seed = tensors.len() + 1;
        let end = if name.ends_with("_scale") { "" } else { ".weight" };
        let bytes = le(&values(shape.iter().product(), of, seed));
        tensors.push((format!("model.{name}{end}"), Dtype::F32, shape.to_vec(), bytes));
    };
    put("embed_tokens".into(), &[64, 32]);
    put("embed_tokens_per_layer".into(), &[rows, LAYERS * 256]);
    put("per_layer_model_projection".into(), &[LAYERS * 256, 32]);
    put("per_layer_projection_norm".into(), &[256]);
    put("norm".into(), &[32]);
    for stream in 0..3 {
        put(format!("altup_projections.{stream}"), &[32, 32]);
        put(format!("altup_unembed_projections.{stream}"), &[32, 32]);
    }
    for layer in 0..LAYERS {
        let own: &[(&str, &[usize])] = match layer < 20 {
            true => &[
                ("self_attn.k_proj", &[16, 32]),
                ("self_attn.v_proj", &[16, 32]),
                ("self_attn.k_norm", &[8]),
            ],
            false => &[],
        };
        let all: [(&str, &[usize]); 21] = [
            ("input_layernorm", &[32]),
            ("post_attention_layernorm", &[32]),
            ("pre_feedforward_layernorm", &[32]),
            ("post_feedforward_layernorm", &[32]),
            ("post_per_layer_input_norm", &[32]),
            ("altup.correct_output_scale", &[32]),
            ("altup.router_norm", &[32]),
            ("altup.modality_router", &[4, 32]),
            ("altup.prediction_coefs", &[16, 4]),
            ("altup.correction_coefs", &[4, 4]),
            ("laurel.linear_left", &[64, 32]),
            ("laurel.linear_right", &[32, 64]),
            ("laurel.post_laurel_norm", &[32]),
            ("mlp.gate_proj", &[64, 32]),
            ("mlp.up_proj", &[64, 32]),
            ("mlp.down_proj", &[32, 64]),
            ("per_layer_input_gate", &[256, 32]),
            ("per_layer_projection", &[32, 256]),
            ("self_attn.q_proj", &[32, 32]),
            ("self_attn.q_norm", &[8]),
            ("self_attn.o_proj", &[32, 32]),
        ];
        for (name, shape) in all.iter().chain(own) {
            put(format!("layers.{layer}.{name}"), shape);
        }
    }
    folder(out, "gemma3n", &edits, &tensors);
    out.to_owned()
}

/// Copies the recorded model `name` with `edits` of its config; tensors to which `reshaped` gives another shape have other
/// values.
pub fn resized(
    out: &Path,
    name: &str,
    edits: &Value,
    reshaped: impl Fn(&str, &[usize]) -> Vec<usize>,
) -> PathBuf {
    let source = File::open(&tiny(name).join("model.safetensors"));
    let tensors = source.names().into_iter().enumerate().map(|(seed, name)| {
        let shape = source.shape(&name);
        let wanted = reshaped(&name, &shape);
        let of = if name.ends_with("norm.weight") { (1.0, 0.5) } else { (0.0, 0.5) };
        let bytes = match wanted == shape {
            true => source.bytes(&name),
            false => le(&values(wanted.iter().product(), of, seed + 1)),
        };
        let dtype = source.dtype(&name);
        (name, dtype, wanted, bytes)
    });
    folder(out, name, edits, &tensors.collect::<Vec<_>>());
    out.to_owned()
}

/// A Kimi Linear whose mixers have as many heads as its attention, with the epsilon of its mixers and latents everywhere.
pub fn kimi_linear(out: &Path) -> PathBuf {
    let edits = json!({"linear_num_heads": 4, "rms_norm_eps": 1e-6});
    // Three heads of six channels become four.
    resized(out, "kimi-linear", &edits, |name, shape| {
        let mixer = ["layers.0.self_attn", "layers.2.self_attn"].iter().any(|of| name.contains(of));
        let grown = |n: &usize| match *n {
            18 => 24,
            3 => 4,
            n => n,
        };
        if mixer { shape.iter().map(grown).collect() } else { shape.to_vec() }
    })
}

/// A DeepSeek-V4 with the streams, the tokens of an entry and the width of index keys that llama.cpp has.
pub fn deepseek_v4(out: &Path) -> PathBuf {
    let rates = json!({"compressed_sparse_attention": 4, "heavily_compressed_attention": 128});
    let edits = json!({"hc_mult": 4, "index_head_dim": 64, "compress_rates": rates});
    resized(out, "deepseek-v4", &edits, |name, shape| {
        let resized: [(&str, &[usize]); 13] = [
            ("hc_attn_fn", &[24, 128]),
            ("hc_attn_base", &[24]),
            ("hc_ffn_fn", &[24, 128]),
            ("hc_ffn_base", &[24]),
            ("hc_head.hc_fn", &[4, 128]),
            ("hc_head.hc_base", &[4]),
            ("layers.1.attn.compressor.ape", &[128, 8]),
            ("layers.2.attn.compressor.ape", &[4, 16]),
            ("indexer.wq_b.weight", &[512, 10]),
            ("indexer.compressor.ape", &[4, 128]),
            ("indexer.compressor.wkv.weight", &[128, 32]),
            ("indexer.compressor.wgate.weight", &[128, 32]),
            ("indexer.compressor.norm.weight", &[64]),
        ];
        let found = resized.iter().find(|(end, _)| name.ends_with(end));
        found.map_or(shape.to_vec(), |(_, shape)| shape.to_vec())
    })
}

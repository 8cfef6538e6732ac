//! Round trips of models with one layer.

use std::path::{Path, PathBuf};

use mantissa_num::{Given, Scheme, quantize};
use serde_json::json;

use super::*;
use crate::convention::{LinearPlan, ModelFiles, SideTensors, Weight, gguf};
use crate::gguf::{GgmlType, GgufTensorSpec, GgufWriter, Value};
use crate::{Error, TensorSpec};

const HIDDEN: usize = 64;
const SIZES: Sizes = Sizes {
    layers: 1,
    context: 32,
    hidden: HIDDEN,
    ffn: 96,
    heads: 4,
    kv_heads: 2,
    head_dim: 16,
    value_dim: 16,
    rotated: 16,
    vocab: 10,
    eps: 1e-5,
    rope_theta: 10_000.0,
};

fn architecture(name: &str) -> &'static Architecture {
    Architecture::parse(name, false).unwrap()
}

fn wave(n: usize) -> Vec<f32> {
    (0..n).map(|i| (i as f32 * 0.377).sin() * (1.0 + (i % 13) as f32)).collect()
}

fn write(dir: &Path, extra: &[(&str, Value)], tensors: &[(GgufTensorSpec, Vec<u8>)]) -> PathBuf {
    let path = dir.join("m.gguf");
    let _ = std::fs::remove_file(&path);
    let mut metadata = super::metadata(architecture("llama"), Some("m"), &SIZES, Some(0), false);
    for (key, value) in extra {
        metadata.retain(|(known, _)| known != key);
        metadata.push(((*key).to_owned(), value.clone()));
    }
    let specs: Vec<_> = tensors.iter().map(|(spec, _)| spec.clone()).collect();
    let mut writer = GgufWriter::create(&path, &metadata, &specs).unwrap();
    tensors.iter().for_each(|(spec, bytes)| writer.write(&spec.name, bytes).unwrap());
    writer.finish().unwrap();
    path
}

fn open_with(extra: &[(&str, Value)]) -> Result<ModelFiles> {
    let dir = tempfile::tempdir().unwrap();
    ModelFiles::open(&write(dir.path(), extra, &[]))
}

#[test]
fn names_map_both_ways() {
    for (hf, stored) in [
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.layers.12.self_attn.q_proj.bias", "blk.12.attn_q.bias"),
        ("model.layers.0.post_attention_layernorm.weight", "blk.0.ffn_norm.weight"),
        ("lm_head.weight", "output.weight"),
    ] {
        assert_eq!(stored_name(hf).as_deref(), Some(stored));
        assert_eq!(hf_name(stored).as_deref(), Some(hf));
    }
    for odd in ["", "weight", "model.layers.x.mlp.up_proj.weight", "model.layers.01.mlp.up_proj.weight"] {
        assert_eq!(stored_name(odd), None, "{odd}");
    }
}

#[test]
fn rows_are_interleaved_by_head_and_back() {
    let rows: Vec<usize> = (0..16).collect();
    let stored = to_gguf_order(&rows, 1, 2);
    assert_eq!(stored, [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]);
    assert_eq!(to_hf_order(&stored, 1, 2), rows);
    let wide: Vec<usize> = (0..96).collect();
    assert_eq!(to_hf_order(&to_gguf_order(&wide, 3, 4), 3, 4), wide);
    assert_eq!(to_gguf_order(&rows, 5, 2), rows, "no whole heads");
}

#[test]
fn names_depend_on_the_place_of_a_norm() {
    let norm = "model.layers.3.post_attention_layernorm.weight";
    let name = |name: &str| architecture(name).place(norm).unwrap().tensor;
    assert_eq!(name("llama"), "blk.3.ffn_norm.weight");
    assert_eq!(name("gemma2"), "blk.3.post_attention_norm.weight");
    assert_eq!(name("olmo2"), "blk.3.post_attention_norm.weight");
    let before = architecture("gemma3").place("model.layers.3.pre_feedforward_layernorm.weight").unwrap();
    assert_eq!(before.tensor, "blk.3.ffn_norm.weight");
}

/// The `gguf` package has these architectures and gives their modules these names.
#[test]
fn names_are_those_of_the_gguf_package() {
    let record: serde_json::Value =
        serde_json::from_str(include_str!("../../../../../tests/data/gguf_names.json")).unwrap();
    for row in Architecture::all() {
        let names = record["architectures"][row.name]["names"].as_object().unwrap();
        for (module, stored) in names {
            let hf = module.replace("{bid}", "3");
            let module_or_vector = row.place(&format!("{hf}.weight")).map(|place| (place, ".weight"));
            // Vectors have no suffix, or one of the file's own.
            let place = module_or_vector.or_else(|| row.place(&hf).map(|place| (place, "")));
            let (place, end) = place.unwrap_or_else(|| panic!("{}: {module}", row.name));
            let found = place.tensor.replace("blk.3.", "blk.{bid}.");
            // The package has the name for models with experts, of which this is the shared one.
            let stored = match (row.name, stored.as_str().unwrap()) {
                ("granitehybrid", "blk.{bid}.ffn_down_shexp") if row.experts == super::GgufExperts::None => {
                    "blk.{bid}.ffn_down"
                }
                (_, stored) => stored,
            };
            let expected = format!("{stored}{end}");
            let own = [".weight", ".bias"]
                .iter()
                .find_map(|own| found.strip_suffix(own))
                .filter(|_| end.is_empty());
            assert_eq!(own.unwrap_or(&found), expected, "{}: {module}", row.name);
        }
    }
}

#[test]
fn experts_are_parts_of_one_tensor() {
    for (hf, stored, expert) in [
        ("model.layers.1.mlp.experts.12.gate_proj.weight", "blk.1.ffn_gate_exps.weight", 12),
        ("model.layers.1.block_sparse_moe.experts.0.w2.weight", "blk.1.ffn_down_exps.weight", 0),
        ("model.layers.1.block_sparse_moe.experts.7.w3.weight", "blk.1.ffn_up_exps.weight", 7),
    ] {
        assert_eq!(place(hf), Some(Place { tensor: stored.into(), expert: Some(expert), half: None }));
    }
    for (hf, stored, stream) in [
        ("model.altup_projections.0.weight", "altup_proj.weight", 0),
        ("model.language_model.altup_unembed_projections.2.weight", "altup_unembd_proj.weight", 2),
    ] {
        assert_eq!(place(hf), Some(Place { tensor: stored.into(), expert: Some(stream), half: None }));
    }
    assert_eq!(place("model.altup_projections.01.weight"), None);
    for odd in ["mlp.experts.01.up_proj", "mlp.experts.1.w1x", "attn.experts.1.w1", "mlp.experts.up_proj"] {
        assert_eq!(place(&format!("model.layers.1.{odd}.weight")), None, "{odd}");
    }
}

#[test]
fn joined_projections_are_taken_apart_and_joined() {
    // Two heads of one row each: q0 k0 v0 q1 k1 v1, rows of two.
    let rows = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11];
    let moved = architecture("gptneox")
        .row_order(2, 2)
        .of("gpt_neox.layers.0.attention.query_key_value.bias")
        .unwrap();
    let stored = moved.to_gguf(&rows, 2);
    assert_eq!(stored, [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]);
    assert_eq!(moved.to_hf(&stored, 2), rows);
    assert_eq!(architecture("olmo2").row_order(2, 2).of("model.layers.0.self_attn.q_proj.weight"), None);
}

#[test]
fn metadata_become_the_config() {
    let files = open_with(&[]).unwrap();
    let config = files.config().unwrap();
    for (field, value) in [
        ("model_type", json!("llama")),
        ("hidden_size", json!(64)),
        ("num_key_value_heads", json!(2)),
        ("head_dim", json!(16)),
        ("rms_norm_eps", json!(f64::from(1e-5f32))),
        ("rope_theta", json!(10_000.0)),
        ("tie_word_embeddings", json!(true)),
    ] {
        assert_eq!(config[field], value, "{field}");
    }
    assert_eq!(files.convention_name(), "gguf");
    assert!(!files.is_quantized());
}

#[test]
fn unsupported_metadata_is_refused_by_its_key() {
    let text = |s: &str| Value::String(s.to_owned());
    for (key, value) in [
        ("llama.expert_group_count", Value::U32(8)),
        ("llama.rope.dimension_count", Value::U32(8)),
        ("llama.attention.value_length", Value::U32(8)),
        ("llama.attention.head_count", text("four")),
        ("llama.attention.scale", Value::F32(0.5)),
    ] {
        let error = open_with(&[(key, value)]).unwrap_err();
        assert!(matches!(error, Error::Field(_)) && error.to_string().contains(key), "{error}");
    }
    let longrope =
        [("llama.rope.scaling.type", text("longrope")), ("llama.rope.scaling.factor", Value::F32(4.0))];
    assert!(open_with(&longrope).unwrap_err().to_string().contains("longrope"));
    let uneven = Value::Array(crate::gguf::ValueType::U32, vec![Value::U32(4), Value::U32(2)]);
    assert!(open_with(&[("llama.attention.head_count", uneven)]).is_err());
    let yarn = [("llama.rope.scaling.type", text("yarn")), ("llama.rope.scaling.factor", Value::F32(4.0))];
    assert_eq!(open_with(&yarn).unwrap().config().unwrap()["rope_scaling"]["factor"], json!(4.0));
}

/// Layers that predict further tokens are not layers of the model.
#[test]
fn further_layers_are_left_out() {
    let keys = [("llama.block_count", Value::U32(3)), ("llama.nextn_predict_layers", Value::U32(1))];
    assert_eq!(open_with(&keys).unwrap().config().unwrap()["num_hidden_layers"], json!(2));
}

#[test]
fn other_architectures_open_with_their_name() {
    let files = open_with(&[("general.architecture", Value::String("starcoder".into()))]).unwrap();
    assert_eq!(files.config().unwrap()["model_type"], json!("starcoder"));
}

/// Every writable scheme reads back as the values written, in Hugging Face order.
#[test]
fn weights_of_every_type_are_read_back() {
    let dir = tempfile::tempdir().unwrap();
    let (module, heads, rows) = ("model.layers.0.self_attn.k_proj", 2, 32);
    for text in [
        "f32",
        "f16",
        "bf16",
        "q4_0",
        "q4_1",
        "q5_0",
        "q5_1",
        "q8_0",
        "mxfp4",
        "gguf-mxfp4",
        "gguf-nvfp4",
        "nvfp4",
        "nvfp4:te",
        "nvfp4:torchao",
    ] {
        let scheme: Scheme = text.parse().unwrap();
        let q = quantize(&scheme, &wave(rows * HIDDEN), rows, HIDDEN, Given::default()).unwrap();
        let plan = LinearPlan::new(module, &scheme, None, (rows, HIDDEN));
        let specs = gguf::CONTAINER.specs(&plan).unwrap();
        let tensors = gguf::CONTAINER.tensors(&plan, &q, SideTensors::Nothing).unwrap();
        let ty = block_type(&scheme.format).unwrap();
        let mut all = Vec::new();
        for (spec, (name, bytes)) in specs.iter().zip(tensors) {
            assert_eq!(spec.name, name);
            all.push(match name.ends_with(".scale") {
                true => (GgufTensorSpec::new(name, GgmlType::F32, [1]), bytes),
                false => {
                    let row = bytes.len() / rows;
                    (GgufTensorSpec::new(name, ty, [rows, HIDDEN]), to_gguf_order(&bytes, row, heads))
                }
            });
        }
        let files = ModelFiles::open(&write(dir.path(), &[], &all)).unwrap();
        let expected = q.dequantize().unwrap();
        let found = match files.linear(module, rows, HIDDEN, false).unwrap().weight {
            Weight::Quantized(q) => q.dequantize().unwrap(),
            Weight::F32(values) => values,
            Weight::F16(words) => words.iter().map(|w| half::f16::from_bits(*w).to_f32()).collect(),
            Weight::Bf16(words) => words.iter().map(|w| half::bf16::from_bits(*w).to_f32()).collect(),
        };
        // Converting a divisor or an amax to a factor adds one rounding.
        let tolerance = if ["nvfp4", "nvfp4:te"].contains(&text) { 1e-6 } else { 0.0 };
        for (i, (a, b)) in expected.iter().zip(&found).enumerate() {
            assert!((a - b).abs() <= tolerance * b.abs(), "{text} {i}: {a} {b}");
        }
    }
}

#[test]
fn schemes_beyond_gguf_are_refused() {
    let specs =
        |text: &str, cols: usize, input: Option<&Scheme>| -> std::result::Result<Vec<TensorSpec>, String> {
            let scheme: Scheme = text.parse().unwrap();
            let module = "model.layers.0.mlp.up_proj";
            let plan = LinearPlan::new(module, &scheme, input, (4, cols));
            gguf::CONTAINER.specs(&plan).map_err(|e| e.to_string())
        };
    assert!(specs("int4-g32", 64, None).unwrap_err().contains("no type"));
    assert!(specs("q4_0", 48, None).unwrap_err().contains("not multiples of 32"));
    let input = mantissa_num::parse_activation("int8-token").unwrap();
    assert!(specs("q4_0", 64, Some(&input)).unwrap_err().contains("inputs"));
    assert_eq!(specs("q4_0", 64, None).unwrap()[0].shape, [4, 36]);
}

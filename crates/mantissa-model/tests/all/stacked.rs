//! Experts stacked in one tensor: MXFP4 experts compute the same as their decoded values, and separate experts the
//! same as stacked ones.
use std::path::Path;

use mantissa_model::{Batch, Buffers, Decoder, LinearKind, ModelConfig, StoredAs};
use mantissa_num::pack::transpose;
use mantissa_num::{Given, Quantized, Scheme, quantize};
use mantissa_store::convention::{LinearPlan, ModelFiles, SideTensors, gpt_oss, native};
use mantissa_store::{Dtype, SafetensorsWriter, TensorSpec};
use serde_json::{Value, json};

type Tensors = Vec<(TensorSpec, Vec<u8>)>;

fn config() -> Value {
    json!({
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 16,
        "max_position_embeddings": 32, "rms_norm_eps": 1e-5, "num_local_experts": 3, "num_experts_per_tok": 2,
        "sliding_window": 8, "layer_types": ["full_attention"], "tie_word_embeddings": false, "attention_bias": true,
        "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"}, "hidden_act": "silu",
        "swiglu_alpha": 1.702, "swiglu_limit": 7.0,
    })
}

fn wave(n: usize, seed: usize) -> Vec<f32> {
    (0..n).map(|i| ((i * 7 + seed * 131) as f32 * 0.37).sin() * 0.2).collect()
}

fn logits(dir: &Path, config: &Value, tensors: &Tensors, metadata: &[(String, String)]) -> Vec<f32> {
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
    let _ = std::fs::remove_file(dir.join("model.safetensors"));
    let specs = tensors.iter().map(|(spec, _)| spec.clone()).collect();
    let metadata = metadata.iter().cloned().collect();
    let mut writer = SafetensorsWriter::create(&dir.join("model.safetensors"), specs, metadata).unwrap();
    tensors.iter().for_each(|(spec, bytes)| writer.write(&spec.name, bytes).unwrap());
    writer.finish().unwrap();
    let decoder = Decoder::load(&ModelFiles::open(dir).unwrap()).unwrap();
    let tokens: Vec<u32> = (0..12).map(|i| i * 5 % 16).collect();
    let mut buffers = Buffers::plan(decoder.config(), tokens.len(), tokens.len()).unwrap();
    let mut out = vec![0.0; tokens.len() * 16];
    let batch = Batch { tokens: &tokens, lens: &[tokens.len()] };
    decoder.forward(&batch, &mut buffers).unwrap().logits(0..tokens.len(), &mut out).unwrap();
    out
}

fn f32_tensor(name: &str, shape: &[usize], values: &[f32]) -> (TensorSpec, Vec<u8>) {
    (TensorSpec::new(name, Dtype::F32, shape), values.iter().flat_map(|v| v.to_le_bytes()).collect())
}

#[test]
fn stacked_experts_compute_like_their_values() {
    let dir = tempfile::tempdir().unwrap();
    let (dense, parsed) = (config(), ModelConfig::from_json(&config(), "config.json").unwrap());
    let scheme: Scheme = "mxfp4".parse().unwrap();
    let (mut of_values, mut of_blocks) = (Tensors::new(), Tensors::new());
    let mut stacks: Vec<(String, Vec<Quantized>)> = Vec::new();
    for (seed, info) in parsed.tensors().iter().enumerate() {
        let &[experts, cols, rows] = info.shape.as_slice() else {
            let tensor = f32_tensor(&info.name, &info.shape, &wave(info.shape.iter().product(), seed));
            of_values.push(tensor.clone());
            of_blocks.push(tensor);
            continue;
        };
        let expert =
            |e| quantize(&scheme, &wave(rows * cols, e + seed), rows, cols, Given::default()).unwrap();
        let experts: Vec<_> = (0..experts).map(expert).collect();
        let values = experts.iter().flat_map(|q| transpose(&q.dequantize().unwrap(), rows, cols));
        of_values.push(f32_tensor(&info.name, &info.shape, &values.collect::<Vec<_>>()));
        of_blocks.extend(gpt_oss::tensors(&info.name, &experts).unwrap());
        stacks.push((info.name.clone(), experts));
    }
    let expected = logits(dir.path(), &dense, &of_values, &[]);
    assert!(expected.iter().all(|v| v.is_finite()) && expected.iter().any(|v| v.abs() > 1e-3));
    let mut mxfp4 = dense.clone();
    mxfp4["quantization_config"] = json!({"quant_method": "mxfp4"});
    assert_eq!(logits(dir.path(), &mxfp4, &of_blocks, &[]), expected);

    // One by one, gate and up separate; an unquantized layer stays stacked.
    let mut native_config = dense.clone();
    native_config["quantization_config"] = native::quantization_config(&Default::default());
    let (mut tensors, mut metadata) = (of_values.clone(), Vec::new());
    for info in parsed.layer_linears(0) {
        let StoredAs::Stacked(stack) = &info.stored else { continue };
        if info.kind == LinearKind::ExpertDown(1) {
            continue;
        }
        let whole = &stacks.iter().find(|(name, _)| *name == stack.tensor).unwrap().1[stack.expert];
        let values = whole.dequantize().unwrap();
        let rows = values.chunks_exact(info.cols).skip(stack.turn).step_by(stack.turns);
        let w: Vec<f32> = rows.flatten().copied().collect();
        let q = quantize(&scheme, &w, info.rows, info.cols, Given::default()).unwrap();
        assert_eq!(q.dequantize().unwrap(), w, "MXFP4 of its own values is exact");
        let plan = LinearPlan {
            module: &info.module,
            scheme: &scheme,
            input: None,
            rows: info.rows,
            cols: info.cols,
            by_group: false,
            input_scale: None,
            outliers: 0,
        };
        let bytes = native::CONTAINER.tensors(&plan, &q, SideTensors::Nothing).unwrap();
        let specs = native::CONTAINER.specs(&plan).unwrap();
        tensors.extend(specs.into_iter().zip(bytes).map(|(spec, (_, bytes))| (spec, bytes)));
        metadata.push(native::metadata(&plan));
    }
    assert_eq!(logits(dir.path(), &native_config, &tensors, &metadata), expected);
}

//! Small random models and the contents of folders.
#![allow(dead_code)] // each test program uses only some of these

use std::path::{Path, PathBuf};

use mantissa_model::{ModelConfig, Role};
use mantissa_num::round::random_u32;
use mantissa_num::{Rounding, minifloat};
use mantissa_quant::calibrate::CalibrationSet;
use mantissa_store::{Dtype, SafetensorsWriter, TensorSpec};

/// Writes a Llama of two layers with random weights (hidden 64, FFN 96: multiples of 32, but 96 is not one of 64).
pub fn model(dir: &Path, dtype: Dtype, seed: u64) -> PathBuf {
    sized_model(dir, dtype, seed, [64, 96])
}

/// Writes the same with other widths of states and MLP.
pub fn sized_model(dir: &Path, dtype: Dtype, seed: u64, [hidden, ffn]: [usize; 2]) -> PathBuf {
    let path = dir.join(format!("{dtype}-{seed}-{hidden}"));
    std::fs::create_dir(&path).unwrap();
    let config = serde_json::json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 96, "hidden_size": hidden, "intermediate_size": ffn,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu",
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": false,
    });
    std::fs::write(path.join("config.json"), config.to_string()).unwrap();
    std::fs::write(path.join("tokenizer_config.json"), "{}").unwrap();
    let tensors = ModelConfig::from_json(&config, "config.json").unwrap().tensors();
    let specs = tensors.iter().map(|t| TensorSpec::new(&t.name, dtype, t.shape.clone())).collect();
    let mut writer =
        SafetensorsWriter::create(&path.join("model.safetensors"), specs, Default::default()).unwrap();
    for (i, tensor) in tensors.iter().enumerate() {
        let n: usize = tensor.shape.iter().product();
        let norm = matches!(tensor.role, Role::Norm { .. });
        let value = |j: usize| {
            let uniform = random_u32(seed + i as u64, j as u64) as f32 / u32::MAX as f32 - 0.5;
            if norm {
                1.0 + 0.2 * uniform
            } else {
                0.4 * uniform * if j.is_multiple_of(97) { 4.0 } else { 1.0 }
            }
        };
        let bytes: Vec<u8> = (0..n).flat_map(|j| encode(dtype, value(j))).collect();
        writer.write(&tensor.name, &bytes).unwrap();
    }
    writer.finish().unwrap();
    path
}

fn encode(dtype: Dtype, x: f32) -> Vec<u8> {
    let half =
        |f: minifloat::MiniFloat| f.encode(x, minifloat::Overflow::Special, Rounding::NearestEven, 0) as u16;
    match dtype {
        Dtype::BF16 => half(minifloat::BF16).to_le_bytes().to_vec(),
        Dtype::F16 => half(minifloat::F16).to_le_bytes().to_vec(),
        _ => x.to_le_bytes().to_vec(),
    }
}

/// Returns the names in a folder, sorted.
pub fn names_in(dir: &Path) -> Vec<String> {
    let name = |entry: std::io::Result<std::fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
    let mut names: Vec<_> = std::fs::read_dir(dir).unwrap().map(name).collect();
    names.sort();
    names
}

/// Returns names and contents of the files in a folder, sorted.
pub fn files(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let mut all: Vec<_> = std::fs::read_dir(dir)
        .unwrap()
        .map(|e| e.unwrap().path())
        .map(|p| (p.file_name().unwrap().to_string_lossy().into_owned(), std::fs::read(&p).unwrap()))
        .collect();
    all.sort();
    all
}

/// Returns windows of several lengths; tokens repeat, as in a text.
pub fn calibration() -> CalibrationSet {
    let token = |i: usize| ((i * i + 3 * i) % 96) as u32;
    let window = |(w, &len): (usize, &usize)| (0..len).map(|i| token(31 * w + i)).collect();
    let lens = [40, 1, 64, 17, 64];
    CalibrationSet::new("windows", lens.iter().enumerate().map(window).collect())
}

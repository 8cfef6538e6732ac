//! Writes every tensor of a model, dequantized to F32 under its Hugging Face name, to one safetensors file, for
//! comparison with another reader of the same file.
//!
//! `cargo run --release -p mantissa-model --example dense -- MODEL OUT.safetensors`

use std::path::Path;

use mantissa_model::{Linear, ModelConfig, Role, WeightSource};
use mantissa_store::convention::{ModelFiles, Weight};
use mantissa_store::{Dtype, SafetensorsWriter, TensorSpec};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [model, out] = &args[..] else { return Err("usage: dense MODEL OUT.safetensors".into()) };
    let files = ModelFiles::open(Path::new(model))?;
    let config = files.config().ok_or("found no config, allowed a model with one")?;
    let config = ModelConfig::from_json(config, &files.config_path().display().to_string())?;
    let tensors = config.tensors();
    let specs = tensors.iter().map(|t| TensorSpec::new(&t.name, Dtype::F32, t.shape.clone())).collect();
    let mut writer = SafetensorsWriter::create(Path::new(out), specs, Default::default())?;
    for tensor in &tensors {
        let bytes: Vec<u8> = values(&files, tensor)?.iter().flat_map(|v| v.to_le_bytes()).collect();
        writer.write(&tensor.name, &bytes)?;
    }
    writer.finish()?;
    Ok(())
}

fn values(
    files: &ModelFiles,
    tensor: &mantissa_model::TensorInfo,
) -> Result<Vec<f32>, Box<dyn std::error::Error>> {
    let (Role::Linear { .. } | Role::Embedding | Role::Head, [rows, cols]) = (tensor.role, &tensor.shape[..])
    else {
        return Ok(WeightSource::tensor_f32(files, &tensor.name, &tensor.shape)?);
    };
    let module = tensor.name.trim_end_matches(".weight");
    let linear = files.linear(module, *rows, *cols, false)?;
    let stored = files.has(&tensor.name) && linear.transforms.is_empty();
    if stored && !matches!(linear.weight, Weight::Quantized(_)) {
        return Ok(files.tensor_f32(&tensor.name, &tensor.shape)?);
    }
    let (linear, mut weight) = (Linear::new(module, linear)?.folded(), vec![0.0; rows * cols]);
    weight.chunks_exact_mut((*cols).max(1)).enumerate().for_each(|(row, out)| linear.row(row, out));
    Ok(weight)
}

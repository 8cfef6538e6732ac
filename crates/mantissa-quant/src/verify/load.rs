//! Whether `mantissa run` could open a model: everything that it needs is there and parses. Headers and small files are read, weights
//! are not.

use std::path::Path;

use mantissa_model::{LinearInfo, ModelConfig, Role, StoredAs, Tokenizer, load_config};
use mantissa_store::convention::ModelFiles;

use crate::error::Result;

/// Checks the model folder or GGUF file `model`: its index and headers, `config.json`, `generation_config.json`, every tensor of the
/// architecture with its shape, what decodes quantized layers, and the tokenizer, if there is one.
///
/// # Errors
/// [`QuantError`](crate::QuantError) names the file and the tensor or field that keeps the model from being opened.
pub fn load_check(model: &Path) -> Result<()> {
    loadable(&ModelFiles::open(model)?)
}

/// [`load_check`] of a model whose headers have been read.
///
/// # Errors
/// As there.
pub(crate) fn loadable(files: &ModelFiles) -> Result<()> {
    // With the token ids of generation_config.json.
    let config = load_config(files)?;
    // Linear layers first, one by one: a config may ask for more layers than a list of their tensors has room for.
    for info in config.decoder_linears() {
        check_linear(files, &info)?;
    }
    for info in config.tensors() {
        match info.role {
            // Checked with its layer.
            Role::Linear { .. } | Role::Bias { .. } | Role::Stacked { .. } => {}
            Role::Embedding | Role::Head | Role::Positions | Role::Side { .. } => {
                let module = info.name.strip_suffix(".weight").unwrap_or(&info.name);
                let &[rows, cols] = info.shape.as_slice() else { continue };
                files.check_linear(module, rows, cols, false)?;
            }
            _ => files.check_tensor(&info.name, &info.shape)?,
        }
    }
    check_caches(files, &config)?;
    check_tokenizer(files)
}

/// A linear layer as [`mantissa_model::linear_weight`] reads it.
fn check_linear(files: &ModelFiles, info: &LinearInfo) -> Result<()> {
    let LinearInfo { module, rows, cols, bias, stored, .. } = info;
    let (rows, cols, by_rows) = (*rows, *cols, info.is_by_rows(files));
    match stored {
        StoredAs::Stacked(stack) => {
            if *bias {
                files.check_tensor(&format!("{}_bias", stack.tensor), &[stack.experts, stack.turns * rows])?;
            }
            match by_rows {
                true => files.check_linear(module, rows, cols, false)?,
                false => files.check_expert(stack, rows, cols)?,
            }
        }
        StoredAs::Columns if !by_rows => {
            files.check_tensor(&format!("{module}.weight"), &[cols, rows])?;
            if *bias {
                files.check_tensor(&format!("{module}.bias"), &[rows])?;
            }
        }
        _ => files.check_linear(module, rows, cols, *bias)?,
    }
    Ok(())
}

/// Scales of keys and values, which are a few numbers to a layer.
fn check_caches(files: &ModelFiles, config: &ModelConfig) -> Result<()> {
    for layer in 0..config.num_hidden_layers {
        files.kv_quant(&config.attention_module(layer), config.num_key_value_heads)?;
    }
    Ok(())
}

/// The tokenizer with its configuration and its templates. A model without one runs on token ids.
fn check_tokenizer(files: &ModelFiles) -> Result<()> {
    let is_there = match files.gguf() {
        Some(model) => model.metadata().get("tokenizer.ggml.model").is_some(),
        None => files.dir().join("tokenizer.json").exists(),
    };
    if is_there {
        Tokenizer::load(files.dir())?;
    }
    Ok(())
}

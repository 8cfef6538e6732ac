//! Unquantized GGUF files as sources.

use mantissa_model::StoredAs;
use mantissa_store::convention::ModelFiles;
use mantissa_store::convention::gguf::DenseTensor;

use crate::config::model_config;
use crate::error::Result;
use crate::gguf::linear_of;

/// Presents an unquantized GGUF model as a dense checkpoint, which jobs read like a folder: the same tensor names, the
/// same order of rows. Other models are returned unchanged.
///
/// # Errors
/// A tensor is missing, has another shape, or is stored in parts.
pub fn dense_source(files: ModelFiles) -> Result<ModelFiles> {
    if files.gguf().is_none() || files.is_quantized() {
        return Ok(files);
    }
    let config = model_config(&files)?;
    let tensors = config.tensors().into_iter().map(|info| {
        let transposed = linear_of(&config, &info).is_some_and(|linear| linear.stored == StoredAs::Columns);
        DenseTensor { name: info.name, shape: info.shape, transposed }
    });
    Ok(files.into_dense(&tensors.collect::<Vec<_>>())?)
}

//! Plain weights: no layer is quantized.

use super::container::{CheckpointFolder, Convention};
use super::files::{ModelFiles, Opened};
use super::weight::StoredLinear;
use crate::Result;

/// Unquantized weights.
#[derive(Debug)]
pub(super) struct Dense;

impl Convention for Dense {
    fn name(&self) -> &'static str {
        "dense"
    }

    /// Recognises a folder without `quantization_config`.
    fn open(&self, folder: &CheckpointFolder<'_>) -> Result<Option<Box<dyn Opened>>> {
        Ok(folder.quantization.is_none().then(|| Box::new(Dense) as Box<dyn Opened>))
    }
}

impl Opened for Dense {
    fn name(&self) -> &'static str {
        "dense"
    }

    fn is_quantized(&self) -> bool {
        false
    }

    fn linear(&self, files: &ModelFiles, module: &str, rows: usize, cols: usize) -> Result<StoredLinear> {
        Ok(files.dense(module, rows, cols)?.into())
    }
}

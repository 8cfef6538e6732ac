//! Plain weights: no layer is quantized.

use super::container::{Candidate, Convention};
use super::files::{ModelFiles, Opened};
use super::weight::Parts;
use crate::Result;

/// Unquantized weights.
#[derive(Debug)]
pub(super) struct Dense;

impl Convention for Dense {
    fn name(&self) -> &'static str {
        "dense"
    }

    /// Recognises a folder without `quantization_config`.
    fn open(&self, folder: &Candidate<'_>) -> Result<Option<Box<dyn Opened>>> {
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

    fn linear(&self, files: &ModelFiles, module: &str, rows: usize, cols: usize) -> Result<Parts> {
        Ok(files.dense(module, rows, cols)?.into())
    }
}

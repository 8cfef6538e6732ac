//! View of a model for calibration: weights as stored, nothing else quantized.

use mantissa_model::{CacheInF32, LoadError, SourceView, WeightSource};
use mantissa_store::convention::{LinearWeight, ModelFiles};

/// A model with its weights as stored, and neither inputs nor keys and values quantized.
pub struct Unquantized<'a>(CacheInF32<'a>);

impl<'a> Unquantized<'a> {
    /// Makes the view of `files`.
    pub fn new(files: &'a ModelFiles) -> Self {
        Unquantized(CacheInF32(files))
    }
}

impl SourceView for Unquantized<'_> {
    fn base(&self) -> &dyn WeightSource {
        &self.0
    }

    fn linear(
        &self,
        module: &str,
        rows: usize,
        cols: usize,
        bias: bool,
    ) -> std::result::Result<LinearWeight, LoadError> {
        Ok(LinearWeight { input: None, ..self.base().linear(module, rows, cols, bias)? })
    }
}

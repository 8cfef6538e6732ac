//! View of a model for calibration: weights as stored, nothing else quantized.

use mantissa_model::{LoadError, SourceView, WeightSource};
use mantissa_store::convention::{KvLevels, KvQuant, LinearWeight, ModelFiles};

/// A model with its weights as stored, and neither inputs nor keys and values quantized.
pub(crate) struct Unquantized<'a>(pub(crate) &'a ModelFiles);

impl SourceView for Unquantized<'_> {
    fn base(&self) -> &dyn WeightSource {
        self.0
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

    fn kv_quant(&self, _: &str, _: usize) -> std::result::Result<Option<KvQuant>, LoadError> {
        Ok(None)
    }

    fn kv_levels(&self, _: &str, _: usize) -> std::result::Result<Option<KvLevels>, LoadError> {
        Ok(None)
    }
}

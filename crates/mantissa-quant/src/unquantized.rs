//! A model as calibration of its scales runs it.

use std::path::Path;

use mantissa_model::{LoadError, WeightSource};
use mantissa_store::convention::{KvQuant, LinearWeight, ModelFiles, Stack, Weight};
use serde_json::Value;

/// A model with its weights as stored, and neither inputs nor keys and values quantized.
pub(crate) struct Unquantized<'a>(pub(crate) &'a ModelFiles);

impl WeightSource for Unquantized<'_> {
    fn config(&self) -> Option<&Value> {
        WeightSource::config(self.0)
    }

    fn dir(&self) -> Option<&Path> {
        WeightSource::dir(self.0)
    }

    fn location(&self) -> String {
        self.0.location()
    }

    fn has(&self, tensor: &str) -> bool {
        WeightSource::has(self.0, tensor)
    }

    fn tensor_f32(&self, tensor: &str, shape: &[usize]) -> std::result::Result<Vec<f32>, LoadError> {
        WeightSource::tensor_f32(self.0, tensor, shape)
    }

    fn linear(
        &self,
        module: &str,
        rows: usize,
        cols: usize,
        bias: bool,
    ) -> std::result::Result<LinearWeight, LoadError> {
        Ok(LinearWeight { input: None, ..WeightSource::linear(self.0, module, rows, cols, bias)? })
    }

    fn is_dense(&self, tensor: &str) -> bool {
        WeightSource::is_dense(self.0, tensor)
    }

    fn has_linear(&self, module: &str) -> bool {
        WeightSource::has_linear(self.0, module)
    }

    fn expert(&self, stack: &Stack, rows: usize, cols: usize) -> std::result::Result<Weight, LoadError> {
        WeightSource::expert(self.0, stack, rows, cols)
    }

    fn kv_quant(&self, _: &str, _: usize) -> std::result::Result<Option<KvQuant>, LoadError> {
        Ok(None)
    }
}

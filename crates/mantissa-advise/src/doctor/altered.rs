//! A model read under an alternative, in whole or in part.

use std::cell::Cell;
use std::path::Path;

use mantissa_model::{LoadError, ModelConfig, WeightSource};
use mantissa_store::convention::{LinearWeight, ModelFiles, Stack, Weight};
use serde_json::Value;

use super::alternative::Alternative;
use crate::error::AdviseError;

/// Where an alternative is applied.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Scope {
    /// Everywhere.
    All,
    /// Everywhere but in one layer.
    Without(usize),
}

impl Scope {
    fn has(&self, module: &str) -> bool {
        let of_layer = |layer: usize| module.starts_with(&format!("model.layers.{layer}."));
        match self {
            Scope::All => true,
            Scope::Without(layer) => !of_layer(*layer),
        }
    }
}

/// A model read in another way.
pub(super) struct Altered<'a> {
    files: &'a ModelFiles,
    config: &'a ModelConfig,
    alternative: Alternative,
    scope: Scope,
    /// Tensors that were changed.
    changed: Cell<usize>,
}

impl<'a> Altered<'a> {
    pub(super) fn new(
        files: &'a ModelFiles,
        config: &'a ModelConfig,
        alternative: Alternative,
        scope: Scope,
    ) -> Self {
        Altered { files, config, alternative, scope, changed: Cell::new(0) }
    }

    /// Tensors that were changed as they were read.
    pub(super) fn changed(&self) -> usize {
        self.changed.get()
    }
}

impl WeightSource for Altered<'_> {
    fn config(&self) -> Option<&Value> {
        self.files.config()
    }

    fn dir(&self) -> Option<&Path> {
        WeightSource::dir(self.files)
    }

    fn location(&self) -> String {
        self.files.location()
    }

    fn has(&self, tensor: &str) -> bool {
        self.files.has(tensor)
    }

    fn tensor_f32(&self, tensor: &str, shape: &[usize]) -> Result<Vec<f32>, LoadError> {
        let mut values = WeightSource::tensor_f32(self.files, tensor, shape)?;
        let norm = tensor.ends_with("norm.weight");
        if let Some(by) = self.alternative.of_norms().filter(|_| norm && self.scope.has(tensor)) {
            values.iter_mut().for_each(|v| *v += by);
            self.changed.set(self.changed.get() + 1);
        }
        Ok(values)
    }

    fn is_dense(&self, tensor: &str) -> bool {
        self.files.is_dense(tensor)
    }

    fn has_linear(&self, module: &str) -> bool {
        self.files.has_linear(module)
    }

    fn expert(&self, stack: &Stack, rows: usize, cols: usize) -> Result<Weight, LoadError> {
        Ok(self.files.expert(stack, rows, cols)?)
    }

    fn linear(&self, module: &str, rows: usize, cols: usize, bias: bool) -> Result<LinearWeight, LoadError> {
        let unchanged = || WeightSource::linear(self.files, module, rows, cols, bias);
        if self.alternative.of_norms().is_some() || !self.scope.has(module) {
            return unchanged();
        }
        let Some(info) = self.config.linears().into_iter().find(|info| info.module == module) else {
            return unchanged();
        };
        match self.alternative.linear(self.files, self.config, &info) {
            Ok(Some(weight)) => {
                self.changed.set(self.changed.get() + 1);
                Ok(weight)
            }
            Ok(None) => unchanged(),
            Err(AdviseError::Load(error)) => Err(error),
            Err(AdviseError::Store(error)) => Err(error.into()),
            // Nothing else fails while a tensor is read.
            Err(_) => unchanged(),
        }
    }
}

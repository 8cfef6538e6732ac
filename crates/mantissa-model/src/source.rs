//! Sources of a model's weights.

use std::collections::HashMap;
use std::path::Path;

use mantissa_store::convention::{KvLevels, KvQuant, LinearWeight, ModelFiles, Stack, Weight};
use serde_json::Value;

use crate::error::LoadError;

/// A model's configuration and weights. Implemented by opened checkpoints of any format and by [`MapSource`].
pub trait WeightSource {
    /// Contents of `config.json`.
    fn config(&self) -> Option<&Value>;

    /// Folder of the model, if it has one.
    fn dir(&self) -> Option<&Path> {
        None
    }

    /// Name of the source in errors.
    fn location(&self) -> String;

    /// True if there is a dense tensor of this name.
    fn has(&self, tensor: &str) -> bool;

    /// Reads a dense tensor, widened to f32.
    ///
    /// # Errors
    /// [`LoadError`] if it is missing, has another shape or cannot be read.
    fn tensor_f32(&self, tensor: &str, shape: &[usize]) -> Result<Vec<f32>, LoadError>;

    /// Reads a tensor of integers from 0 to 2³² - 1.
    ///
    /// # Errors
    /// As [`tensor_f32`](Self::tensor_f32), and if the values are floats or out of range.
    fn integers(&self, tensor: &str, shape: &[usize]) -> Result<Vec<u32>, LoadError>;

    /// Reads the weight of a linear layer or of the embedding, `[rows, cols]`, as stored.
    ///
    /// # Errors
    /// As [`tensor_f32`](Self::tensor_f32).
    fn linear(&self, module: &str, rows: usize, cols: usize, bias: bool) -> Result<LinearWeight, LoadError>;

    /// Changes the weight of linear layer `module` after it was read, however it is stored: adds an adapter.
    ///
    /// # Errors
    /// [`LoadError`] if the weight cannot be changed.
    fn adapt(&self, _module: &str, weight: LinearWeight) -> Result<LinearWeight, LoadError> {
        Ok(weight)
    }

    /// True if there is a tensor of this name that holds values, not codes.
    fn is_dense(&self, tensor: &str) -> bool {
        self.has(tensor)
    }

    /// True if linear layer `module` is stored as its own tensor, dense or quantized.
    fn has_linear(&self, module: &str) -> bool {
        self.has(&format!("{module}.weight"))
    }

    /// True if the linear layers `a` and `b`, both stored, have the same weights.
    ///
    /// # Errors
    /// A tensor cannot be read.
    fn stores_alike(&self, a: &str, b: &str) -> Result<bool, LoadError>;

    /// Reads the weight `[rows, cols]` of one stacked expert.
    ///
    /// # Errors
    /// As [`tensor_f32`](Self::tensor_f32).
    fn expert(&self, stack: &Stack, rows: usize, cols: usize) -> Result<Weight, LoadError> {
        let values = self.tensor_f32(&stack.tensor, &stack.shape(rows, cols))?;
        Ok(Weight::F32(stack.part_of(&values, rows, cols)))
    }

    /// Reads the quantization of keys and values of the attention `module`; `None` if the checkpoint has none.
    ///
    /// # Errors
    /// A scale does not fit.
    fn kv_quant(&self, _module: &str, _kv_heads: usize) -> Result<Option<KvQuant>, LoadError> {
        Ok(None)
    }

    /// Reads stored levels for keys and values of the attention `module`, whose keys have `width` values per token.
    ///
    /// # Errors
    /// Levels do not fit.
    fn kv_levels(&self, _module: &str, _width: usize) -> Result<Option<KvLevels>, LoadError> {
        Ok(None)
    }
}

/// Source that overrides parts of another. Every implementation is a [`WeightSource`]; everything not overridden
/// comes from [`base`](Self::base).
pub trait SourceView {
    /// Source underneath.
    fn base(&self) -> &dyn WeightSource;

    /// Overrides [`WeightSource::config`].
    fn config(&self) -> Option<&Value> {
        self.base().config()
    }

    /// Overrides [`WeightSource::has`].
    fn has(&self, tensor: &str) -> bool {
        self.base().has(tensor)
    }

    /// Overrides [`WeightSource::has_linear`].
    fn has_linear(&self, module: &str) -> bool {
        self.base().has_linear(module)
    }

    /// Overrides [`WeightSource::tensor_f32`].
    ///
    /// # Errors
    /// As there.
    fn tensor_f32(&self, tensor: &str, shape: &[usize]) -> Result<Vec<f32>, LoadError> {
        self.base().tensor_f32(tensor, shape)
    }

    /// Overrides [`WeightSource::integers`].
    ///
    /// # Errors
    /// As there.
    fn integers(&self, tensor: &str, shape: &[usize]) -> Result<Vec<u32>, LoadError> {
        self.base().integers(tensor, shape)
    }

    /// Overrides [`WeightSource::linear`].
    ///
    /// # Errors
    /// As there.
    fn linear(&self, module: &str, rows: usize, cols: usize, bias: bool) -> Result<LinearWeight, LoadError> {
        self.base().linear(module, rows, cols, bias)
    }

    /// Overrides [`WeightSource::adapt`].
    ///
    /// # Errors
    /// As there.
    fn adapt(&self, module: &str, weight: LinearWeight) -> Result<LinearWeight, LoadError> {
        self.base().adapt(module, weight)
    }

    /// Overrides [`WeightSource::expert`].
    ///
    /// # Errors
    /// As there.
    fn expert(&self, stack: &Stack, rows: usize, cols: usize) -> Result<Weight, LoadError> {
        self.base().expert(stack, rows, cols)
    }

    /// Overrides [`WeightSource::kv_quant`].
    ///
    /// # Errors
    /// As there.
    fn kv_quant(&self, module: &str, kv_heads: usize) -> Result<Option<KvQuant>, LoadError> {
        self.base().kv_quant(module, kv_heads)
    }

    /// Overrides [`WeightSource::kv_levels`].
    ///
    /// # Errors
    /// As there.
    fn kv_levels(&self, module: &str, width: usize) -> Result<Option<KvLevels>, LoadError> {
        self.base().kv_levels(module, width)
    }
}

impl<T: SourceView> WeightSource for T {
    fn integers(&self, tensor: &str, shape: &[usize]) -> Result<Vec<u32>, LoadError> {
        SourceView::integers(self, tensor, shape)
    }

    fn config(&self) -> Option<&Value> {
        SourceView::config(self)
    }

    fn dir(&self) -> Option<&Path> {
        self.base().dir()
    }

    fn location(&self) -> String {
        self.base().location()
    }

    fn has(&self, tensor: &str) -> bool {
        SourceView::has(self, tensor)
    }

    fn tensor_f32(&self, tensor: &str, shape: &[usize]) -> Result<Vec<f32>, LoadError> {
        SourceView::tensor_f32(self, tensor, shape)
    }

    fn linear(&self, module: &str, rows: usize, cols: usize, bias: bool) -> Result<LinearWeight, LoadError> {
        SourceView::linear(self, module, rows, cols, bias)
    }

    fn adapt(&self, module: &str, weight: LinearWeight) -> Result<LinearWeight, LoadError> {
        SourceView::adapt(self, module, weight)
    }

    fn is_dense(&self, tensor: &str) -> bool {
        self.base().is_dense(tensor)
    }

    fn has_linear(&self, module: &str) -> bool {
        SourceView::has_linear(self, module)
    }

    fn stores_alike(&self, a: &str, b: &str) -> Result<bool, LoadError> {
        self.base().stores_alike(a, b)
    }

    fn expert(&self, stack: &Stack, rows: usize, cols: usize) -> Result<Weight, LoadError> {
        SourceView::expert(self, stack, rows, cols)
    }

    fn kv_quant(&self, module: &str, kv_heads: usize) -> Result<Option<KvQuant>, LoadError> {
        SourceView::kv_quant(self, module, kv_heads)
    }

    fn kv_levels(&self, module: &str, width: usize) -> Result<Option<KvLevels>, LoadError> {
        SourceView::kv_levels(self, module, width)
    }
}

impl WeightSource for ModelFiles {
    fn config(&self) -> Option<&Value> {
        ModelFiles::config(self)
    }

    fn dir(&self) -> Option<&Path> {
        // A GGUF file contains all its metadata; other files in its folder belong to other models.
        if self.gguf().is_some() { None } else { Some(ModelFiles::dir(self)) }
    }

    fn location(&self) -> String {
        // A single weight file is named itself: the `config.json` beside it belongs to another model.
        let dir = ModelFiles::dir(self);
        let bare = self.config().is_none() && dir.join("config.json").exists();
        let file = self.checkpoint().files().next().filter(|_| bare);
        file.unwrap_or(dir).display().to_string()
    }

    fn has(&self, tensor: &str) -> bool {
        ModelFiles::has(self, tensor)
    }

    fn tensor_f32(&self, tensor: &str, shape: &[usize]) -> Result<Vec<f32>, LoadError> {
        Ok(ModelFiles::tensor_f32(self, tensor, shape)?)
    }

    fn integers(&self, tensor: &str, shape: &[usize]) -> Result<Vec<u32>, LoadError> {
        Ok(ModelFiles::integers(self, tensor, shape)?)
    }

    fn linear(&self, module: &str, rows: usize, cols: usize, bias: bool) -> Result<LinearWeight, LoadError> {
        Ok(ModelFiles::linear(self, module, rows, cols, bias)?)
    }

    fn is_dense(&self, tensor: &str) -> bool {
        ModelFiles::is_dense(self, tensor)
    }

    fn has_linear(&self, module: &str) -> bool {
        ModelFiles::has_linear(self, module)
    }

    fn stores_alike(&self, a: &str, b: &str) -> Result<bool, LoadError> {
        Ok(ModelFiles::stores_alike(self, a, b)?)
    }

    fn expert(&self, stack: &Stack, rows: usize, cols: usize) -> Result<Weight, LoadError> {
        Ok(ModelFiles::expert(self, stack, rows, cols)?)
    }

    fn kv_quant(&self, module: &str, kv_heads: usize) -> Result<Option<KvQuant>, LoadError> {
        Ok(ModelFiles::kv_quant(self, module, kv_heads)?)
    }

    fn kv_levels(&self, module: &str, width: usize) -> Result<Option<KvLevels>, LoadError> {
        Ok(ModelFiles::kv_levels(self, module, width)?)
    }
}

/// A model in memory.
#[derive(Clone, Debug, Default)]
pub struct MapSource {
    /// Contents of `config.json`.
    pub config: Value,
    /// Dense tensors by name: shape and values.
    pub tensors: HashMap<String, (Vec<usize>, Vec<f32>)>,
    /// Linear layers that are not dense, by module.
    pub linears: HashMap<String, LinearWeight>,
}

impl WeightSource for MapSource {
    fn config(&self) -> Option<&Value> {
        Some(&self.config)
    }

    fn location(&self) -> String {
        "a model in memory".into()
    }

    fn has(&self, tensor: &str) -> bool {
        self.tensors.contains_key(tensor)
    }

    fn tensor_f32(&self, tensor: &str, shape: &[usize]) -> Result<Vec<f32>, LoadError> {
        let Some((found, values)) = self.tensors.get(tensor) else {
            return Err(LoadError::MissingTensor {
                location: self.location(),
                tensor: tensor.into(),
                shape: shape.into(),
            });
        };
        if found == shape && values.len() == shape.iter().product::<usize>() {
            return Ok(values.clone());
        }
        let (found, expected) = (found.clone(), shape.into());
        Err(LoadError::Shape { location: self.location(), tensor: tensor.into(), found, expected })
    }

    fn integers(&self, tensor: &str, shape: &[usize]) -> Result<Vec<u32>, LoadError> {
        Ok(self.tensor_f32(tensor, shape)?.into_iter().map(|x| x as u32).collect())
    }

    fn stores_alike(&self, a: &str, b: &str) -> Result<bool, LoadError> {
        let weight = |module: &str| self.tensors.get(&format!("{module}.weight"));
        Ok(weight(a).is_some() && weight(a) == weight(b))
    }

    fn linear(&self, module: &str, rows: usize, cols: usize, bias: bool) -> Result<LinearWeight, LoadError> {
        if let Some(linear) = self.linears.get(module) {
            if (linear.rows, linear.cols) == (rows, cols) {
                return Ok(linear.clone());
            }
            let (found, expected) = (vec![linear.rows, linear.cols], vec![rows, cols]);
            let (location, tensor) = (self.location(), module.into());
            return Err(LoadError::Shape { location, tensor, found, expected });
        }
        let weight = Weight::F32(self.tensor_f32(&format!("{module}.weight"), &[rows, cols])?);
        let bias = if bias { Some(self.tensor_f32(&format!("{module}.bias"), &[rows])?) } else { None };
        Ok(LinearWeight { rows, cols, weight, bias, input: None, transforms: Default::default() })
    }
}

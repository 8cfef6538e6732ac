//! Weights of a model as f32, one tensor at a time.

use std::path::PathBuf;

use mantissa_jobs::model::open_quietly;
use mantissa_jobs::{JobError, ModelPath};
use mantissa_model::{LinearInfo, LinearKind, TensorInfo, load_config};
use mantissa_quant::dequantized_source;
use mantissa_store::convention::ModelFiles;
use pyo3::prelude::*;

use crate::error::Raise;
use crate::linear::CoreLinear;
use crate::tensor::CoreArray;

/// Weights of a model, dequantized as they are read.
#[pyclass(frozen, module = "mantissa._core")]
pub struct CoreWeights {
    /// As they are stored, for linear layers.
    stored: ModelFiles,
    files: ModelFiles,
    tensors: Vec<TensorInfo>,
    linears: Vec<LinearInfo>,
}

impl CoreWeights {
    fn open(path: PathBuf) -> Result<Self, JobError> {
        let path = ModelPath::find(path)?;
        let (stored, files) = (open_quietly(&path)?, open_quietly(&path)?);
        let config = load_config(&stored)?;
        let head = config.table(LinearKind::Head);
        let linears = config.decoder_linears().chain((!config.tie_word_embeddings).then_some(head));
        let quantized =
            |info: &LinearInfo| stored.has_linear(&info.module) && !stored.is_dense(&info.dense_tensor().0);
        let linears = linears.filter(quantized).collect();
        Ok(CoreWeights { stored, files: dequantized_source(files)?, tensors: config.tensors(), linears })
    }
}

#[pymethods]
impl CoreWeights {
    /// Opens a model.
    #[new]
    fn new(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        py.detach(|| Self::open(path)).map_err(Raise::raise)
    }

    /// Returns the names of the tensors, in the order of the forward pass.
    fn names(&self) -> Vec<String> {
        self.tensors.iter().map(|info| info.name.clone()).collect()
    }

    /// Returns the modules of the quantized linear layers.
    fn linears(&self) -> Vec<String> {
        self.linears.iter().map(|info| info.module.clone()).collect()
    }

    /// Returns the linear layer at a place of the list of modules, prepared for running.
    #[pyo3(signature = (index, threads))]
    fn linear(&self, py: Python<'_>, index: usize, threads: Option<usize>) -> PyResult<Option<CoreLinear>> {
        let Some(info) = self.linears.get(index) else { return Ok(None) };
        let made = py.detach(|| {
            let weight = self.stored.linear(&info.module, info.rows, info.cols, info.bias)?;
            CoreLinear::new(&info.module, weight, threads)
        });
        made.map(Some).map_err(Raise::raise)
    }

    /// Returns the tensor at a place of the list of names.
    fn read(&self, py: Python<'_>, index: usize) -> PyResult<Option<CoreArray>> {
        let Some(info) = self.tensors.get(index) else { return Ok(None) };
        let values = py.detach(|| self.files.tensor_f32(&info.name, &info.shape));
        let values = values.map_err(|error| JobError::from(error).raise())?;
        Ok(Some(CoreArray::floats(values, info.shape.clone())))
    }
}

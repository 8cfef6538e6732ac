//! Weights of a model as f32, one tensor at a time.

use std::path::PathBuf;

use mantissa_jobs::model::open_quietly;
use mantissa_jobs::{JobError, ModelPath};
use mantissa_model::{TensorInfo, load_config};
use mantissa_quant::dequantized_source;
use mantissa_store::convention::ModelFiles;
use pyo3::prelude::*;

use crate::error::Raise;
use crate::tensor::CoreArray;

/// Weights of a model, dequantized as they are read.
#[pyclass(frozen, module = "mantissa._core")]
pub struct CoreWeights {
    files: ModelFiles,
    tensors: Vec<TensorInfo>,
}

impl CoreWeights {
    fn open(path: PathBuf) -> Result<Self, JobError> {
        let files = open_quietly(&ModelPath::find(path)?)?;
        let tensors = load_config(&files)?.tensors();
        Ok(CoreWeights { files: dequantized_source(files)?, tensors })
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

    /// Returns the tensor at a place of the list of names.
    fn read(&self, py: Python<'_>, index: usize) -> PyResult<Option<CoreArray>> {
        let Some(info) = self.tensors.get(index) else { return Ok(None) };
        let values = py.detach(|| self.files.tensor_f32(&info.name, &info.shape));
        let values = values.map_err(|error| JobError::from(error).raise())?;
        Ok(Some(CoreArray::floats(values, info.shape.clone())))
    }
}

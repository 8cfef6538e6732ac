//! Linear layers that multiply on the fast engine's kernels.

use mantissa_jobs::JobError;
use mantissa_kernels::available_threads;
use mantissa_runtime::prepared::{PreparedLinear, PreparedMatmul, Rows, Scratch, forward};
use mantissa_store::convention::LinearWeight;
use pyo3::prelude::*;

use crate::error::{Raise, input};
use crate::tensor::CoreArray;

/// Linear layer `y = x Wᵀ + b` of a quantized model.
#[pyclass(frozen, module = "mantissa._core")]
pub struct CoreLinear {
    linear: PreparedLinear,
    threads: usize,
}

impl CoreLinear {
    /// Prepares a weight.
    pub fn new(module: &str, weight: LinearWeight, threads: Option<usize>) -> Result<Self, JobError> {
        let threads = threads.unwrap_or_else(available_threads);
        Ok(CoreLinear { linear: PreparedLinear::new(module, weight, threads)?, threads })
    }
}

#[pymethods]
impl CoreLinear {
    /// Output and input features.
    #[getter]
    fn shape(&self) -> (usize, usize) {
        (self.linear.rows(), self.linear.cols())
    }

    /// Bytes that a pass over one token reads.
    #[getter]
    fn bytes(&self) -> u64 {
        self.linear.bytes()
    }

    /// Returns the outputs `[tokens, out]` of the inputs `[tokens, in]`, a tensor of floats.
    fn forward(&self, py: Python<'_>, x: &CoreArray) -> PyResult<CoreArray> {
        let (rows, cols) = self.shape();
        let [tokens, given] = x.sizes() else {
            return Err(input("x", &format!("{} axes", x.sizes().len()), "2 axes"));
        };
        let (tokens, given) = (*tokens, *given);
        if given != cols {
            return Err(input(
                "x",
                &format!("{given} columns"),
                &format!("{cols}, the layer's input features"),
            ));
        }
        let x = x.values()?;
        let out = py.detach(|| {
            let mut out = vec![0.0; tokens * rows];
            let matmul = PreparedMatmul { linear: &self.linear, input: 0, out: &mut out, accumulate: false };
            let inputs = [Rows { x: &x, tokens }];
            forward(std::iter::once(matmul), &inputs, &mut Scratch::default(), self.threads).map(|()| out)
        });
        let out = out.map_err(|error| {
            let error: mantissa_model::GenerateError = error.into();
            JobError::from(error).raise()
        })?;
        Ok(CoreArray::floats(out, vec![tokens, rows]))
    }
}

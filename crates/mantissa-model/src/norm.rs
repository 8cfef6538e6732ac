//! RMSNorm (Zhang & Sennrich 2019, "Root Mean Square Layer Normalization", eq. 4): `w · x / sqrt(mean(x²) +
//! eps)`, in f32 with the order of operations of Llama.

use mantissa_kernels::kernels;

use crate::error::LoadError;
use crate::source::WeightSource;

/// A norm over vectors of one width.
#[derive(Clone, Debug)]
pub struct RmsNorm {
    weight: Vec<f32>,
    eps: f32,
}

impl RmsNorm {
    /// A norm with `weight` `[width]`.
    pub fn new(weight: Vec<f32>, eps: f32) -> Self {
        RmsNorm { weight, eps }
    }

    /// Reads the weight `{module}.weight`.
    ///
    /// # Errors
    /// As [`WeightSource::tensor_f32`].
    pub fn load(source: &dyn WeightSource, module: &str, width: usize, eps: f32) -> Result<Self, LoadError> {
        Ok(Self::new(source.tensor_f32(&format!("{module}.weight"), &[width])?, eps))
    }

    /// Normalizes each vector of `x` into `out`, both `[t, width]`.
    pub fn forward(&self, x: &[f32], out: &mut [f32]) {
        kernels().rms_norm(x, &self.weight, self.eps, out);
    }

    /// Weight, `[width]`.
    pub fn weight(&self) -> &[f32] {
        &self.weight
    }
}

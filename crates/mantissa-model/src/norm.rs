//! Norms: RMSNorm (Zhang & Sennrich 2019, "Root Mean Square Layer Normalization", eq. 4), `w · x / sqrt(mean(x²) +
//! eps)`, with the order of operations of Llama, and LayerNorm (Ba et al. 2016), both in f32.

use mantissa_kernels::kernels;

use crate::config::{ModelConfig, NormForm};
use crate::error::LoadError;
use crate::source::WeightSource;

/// A norm over vectors of one width.
#[derive(Clone, Debug)]
pub struct Norm {
    weight: Vec<f32>,
    /// Bias of a LayerNorm; `None` for RMSNorm.
    bias: Option<Vec<f32>>,
    eps: f32,
}

impl Norm {
    /// Creates an RMSNorm with `weight` `[width]`.
    pub fn rms(weight: Vec<f32>, eps: f32) -> Self {
        Norm { weight, bias: None, eps }
    }

    /// Loads the norm `module` in the model's form. Gemma stores weights as their distance from 1.
    ///
    /// # Errors
    /// As [`WeightSource::tensor_f32`].
    pub fn load(
        source: &dyn WeightSource,
        config: &ModelConfig,
        module: &str,
        width: usize,
    ) -> Result<Self, LoadError> {
        let read = |part: &str| source.tensor_f32(&format!("{module}.{part}"), &[width]);
        let eps = config.rms_norm_eps;
        Ok(match config.norm {
            NormForm::Rms => Norm::rms(read("weight")?, eps),
            NormForm::RmsPlusOne => Norm::rms(read("weight")?.into_iter().map(|w| 1.0 + w).collect(), eps),
            NormForm::Layer => Norm { weight: read("weight")?, bias: Some(read("bias")?), eps },
            NormForm::LayerWeight => Norm { weight: read("weight")?, bias: Some(vec![0.0; width]), eps },
            NormForm::LayerPlain => Norm { weight: vec![1.0; width], bias: Some(vec![0.0; width]), eps },
        })
    }

    pub(crate) fn with_eps(self, eps: f32) -> Self {
        Norm { eps, ..self }
    }

    /// Normalizes each vector of `x` into `out`, both `[t, width]`.
    pub fn forward(&self, x: &[f32], out: &mut [f32]) {
        match &self.bias {
            None => kernels().rms_norm(x, &self.weight, self.eps, out),
            Some(bias) => kernels().layer_norm(x, &self.weight, bias, self.eps, out),
        }
    }

    /// Weight, `[width]`.
    pub fn weight(&self) -> &[f32] {
        &self.weight
    }
}

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
    /// Rounding of every step; `None` computes in f32.
    rounding: Option<fn(f32) -> f32>,
}

impl Norm {
    /// Creates an RMSNorm with `weight` `[width]`.
    pub fn rms(weight: Vec<f32>, eps: f32) -> Self {
        Norm { weight, bias: None, eps, rounding: None }
    }

    fn layer(weight: Vec<f32>, bias: Vec<f32>, eps: f32) -> Self {
        Norm { weight, bias: Some(bias), eps, rounding: None }
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
            NormForm::Layer => Norm::layer(read("weight")?, read("bias")?, eps),
            NormForm::LayerWeight => Norm::layer(read("weight")?, vec![0.0; width], eps),
            NormForm::LayerPlain => Norm::layer(vec![1.0; width], vec![0.0; width], eps),
        })
    }

    pub(crate) fn with_eps(self, eps: f32) -> Self {
        Norm { eps, ..self }
    }

    /// Rounds every step of the norm by `rounding`, as if it were computed in a narrower format: input, squares, mean,
    /// root, products. Sums stay in f32, as in reductions of frameworks. `None` computes in f32.
    pub fn set_rounding(&mut self, rounding: Option<fn(f32) -> f32>) {
        self.rounding = rounding;
    }

    /// Normalizes each vector of `x` into `out`, both `[t, width]`.
    pub fn forward(&self, x: &[f32], out: &mut [f32]) {
        match (&self.bias, self.rounding) {
            (_, Some(round)) => self.rounded(x, round, out),
            (None, None) => kernels().rms_norm(x, &self.weight, self.eps, out),
            (Some(bias), None) => kernels().layer_norm(x, &self.weight, bias, self.eps, out),
        }
    }

    /// Normalizes with every step rounded.
    fn rounded(&self, x: &[f32], round: fn(f32) -> f32, out: &mut [f32]) {
        let width = self.weight.len().max(1);
        let mean = |values: &[f32]| round(values.iter().sum::<f32>() / width as f32);
        for (x, out) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
            out.iter_mut().zip(x).for_each(|(out, x)| *out = round(*x));
            if self.bias.is_some() {
                let centre = mean(out);
                out.iter_mut().for_each(|x| *x = round(*x - centre));
            }
            let squares: Vec<f32> = out.iter().map(|x| round(x * x)).collect();
            let root = round(round(mean(&squares) + round(self.eps)).sqrt().recip());
            for (x, w) in out.iter_mut().zip(&self.weight) {
                *x = round(round(*x * root) * round(*w));
            }
            if let Some(bias) = &self.bias {
                out.iter_mut().zip(bias).for_each(|(x, b)| *x = round(*x + round(*b)));
            }
        }
    }

    /// Weight, `[width]`.
    pub fn weight(&self) -> &[f32] {
        &self.weight
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rounds to BF16, downwards.
    fn coarse(x: f32) -> f32 {
        f32::from_bits(x.to_bits() & 0xffff_0000)
    }

    /// Without loss of the rounding function the steps give the norm; a coarse one gives coarse values near it.
    #[test]
    fn rounded_steps_give_the_norm() {
        let x: Vec<f32> = (0..64).map(|i| (i as f32 * 0.7).sin() * 3.0 + 0.5).collect();
        let weight: Vec<f32> = (0..32).map(|i| 0.5 + i as f32 / 32.0).collect();
        let bias = weight.iter().map(|w| 0.1 * w).collect();
        for norm in [Norm::rms(weight.clone(), 1e-5), Norm::layer(weight, bias, 1e-5)] {
            let run = |rounding| {
                let mut norm = norm.clone();
                norm.set_rounding(rounding);
                let mut out = vec![0.0; x.len()];
                norm.forward(&x, &mut out);
                out
            };
            let (exact, same, rough) = (run(None), run(Some(|x| x)), run(Some(coarse)));
            for ((exact, same), rough) in exact.iter().zip(same).zip(rough) {
                assert!((exact - same).abs() < 1e-5, "{exact} {same}");
                assert!((exact - rough).abs() < 0.1 && rough.to_bits() & 0xffff == 0, "{exact} {rough}");
            }
        }
    }
}

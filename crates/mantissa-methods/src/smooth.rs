//! SmoothQuant (Xiao, Lin, Seznec, Wu, Demouth & Han 2022, "SmoothQuant: Accurate and Efficient Post-Training Quantization for
//! Large Language Models", arXiv 2211.10438, equation 4).
//!
//! Activations have few channels that are far larger than the rest, weights have not. Channel `j` of the input of a linear
//! layer is divided by `s[j]` and column `j` of the weight multiplied with it:
//!
//! ```text
//! s[j] = max |X[:, j]|^α / max |W[:, j]|^(1 - α)
//! ```
//!
//! so that both become about as hard to quantize at α = 1/2. The division is folded into the norm before the layer.

use mantissa_kernels::kernels;

/// The smallest magnitude of a column of the weight, and the smallest scale.
const LEAST: f32 = 1e-5;

/// How much of the difficulty goes from activations to weights, where nothing else is said.
pub const ALPHA: f32 = 0.5;

/// How SmoothQuant works.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SmoothOptions {
    /// α, 0 to 1; `None` takes for each input the one of 0, 0.05, … under which its layers err least.
    pub alpha: Option<f32>,
}

impl Default for SmoothOptions {
    fn default() -> Self {
        SmoothOptions { alpha: Some(ALPHA) }
    }
}

/// The scales of channels whose largest magnitudes are `inputs` (in the activations) and `weights` (over all weights that read them).
///
/// # Panics
/// If the lengths differ.
pub fn scales(inputs: &[f32], weights: &[f32], alpha: f32) -> Vec<f32> {
    assert_eq!(inputs.len(), weights.len(), "channels of inputs and weights");
    let mut scales = inputs.to_vec();
    kernels().pow_inplace(&mut scales, alpha);
    let mut divisors: Vec<f32> = weights.iter().map(|w| w.max(LEAST)).collect();
    kernels().pow_inplace(&mut divisors, 1.0 - alpha);
    scales.iter_mut().zip(divisors).for_each(|(scale, divisor)| *scale = (*scale / divisor).max(LEAST));
    scales
}

/// The largest magnitude of each column of `w` (`[_, cols]`), or of `all` where that is larger.
pub fn column_peaks(w: &[f32], all: &mut [f32]) {
    for row in w.chunks_exact(all.len().max(1)) {
        all.iter_mut().zip(row).for_each(|(peak, w)| *peak = peak.max(w.abs()));
    }
}

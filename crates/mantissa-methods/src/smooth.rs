//! SmoothQuant (Xiao, Lin, Seznec, Wu, Demouth & Han 2022, "SmoothQuant: Accurate and Efficient Post-Training
//! Quantization for Large Language Models", arXiv 2211.10438, equation 4).
//!
//! Activations have a few channels that are far larger than the rest; weights do not. SmoothQuant divides channel `j`
//! of a linear layer's input by `s[j]` and multiplies column `j` of the weight by it:
//!
//! ```text
//! s[j] = max |X[:, j]|^α / max |W[:, j]|^(1 - α)
//! ```
//!
//! At α = 1/2 both become about equally hard to quantize. The division is folded into the norm before the layer.

use mantissa_kernels::kernels;
use mantissa_options::{Accepts, Named, NamedMut, Number, Value, options};

use crate::awq;
use crate::method::{Arithmetic, Extent};
use crate::transform::{Change, Channels, ScaleChannels, Transform};

/// The smallest magnitude of a column of the weight, and the smallest scale.
const LEAST: f32 = 1e-5;

options! {
    /// SmoothQuant: scales down large channels of activations and scales up their weight columns.
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub struct Smooth {
        /// Migration strength α; "search" tries 0, 0.05, … for each input and takes the least output error of its layers.
        alpha: Option<f32> = Some(0.5), Alpha;
    }
}

/// Numbers from 0 to 1, or "search", which is `None`.
struct Alpha;

impl Accepts<Option<f32>> for Alpha {
    fn read(&self, value: &Value) -> Option<Option<f32>> {
        if value.as_str() == Some("search") { Some(None) } else { Number(1.0).read(value).map(Some) }
    }

    fn print(&self, alpha: &Option<f32>) -> Option<Value> {
        alpha.map_or(Some("search".into()), |alpha| Number(1.0).print(&alpha))
    }

    fn allowed(&self) -> String {
        "a number from 0 to 1, or \"search\"".to_owned()
    }
}

/// Scales of channels with largest magnitudes `inputs` (in the activations) and `weights` (over all weights that read
/// them).
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

/// Steps of a search for α, from 0 to 1.
const ALPHA_STEPS: u16 = 20;

impl Transform for Smooth {
    fn name(&self) -> &'static str {
        "smooth"
    }

    fn change(&self) -> Change<'_> {
        Change::Scales(self)
    }

    fn arithmetic(&self, extent: &Extent<'_>, tokens: usize) -> Arithmetic {
        let searched = usize::from(ALPHA_STEPS) + 2;
        awq::searched(if self.alpha.is_some() { 1 } else { searched }, extent, tokens)
    }

    fn tables(&self) -> Vec<Named<'_>> {
        vec![(self.name(), self)]
    }

    fn tables_mut(&mut self) -> Vec<NamedMut<'_>> {
        vec![(self.name(), self)]
    }
}

impl ScaleChannels for Smooth {
    /// False: SmoothQuant scales only the outputs of norms, whose channels differ most.
    fn scales_inner(&self) -> bool {
        false
    }

    fn candidates(&self, channels: &Channels<'_>) -> Vec<Vec<f32>> {
        let alpha_scales = |alpha| scales(channels.peaks, channels.weights, alpha);
        match self.alpha {
            Some(alpha) => vec![alpha_scales(alpha)],
            None => {
                let steps = (0..=ALPHA_STEPS).map(|i| f32::from(i) / f32::from(ALPHA_STEPS));
                std::iter::once(vec![1.0; channels.peaks.len()]).chain(steps.map(alpha_scales)).collect()
            }
        }
    }
}

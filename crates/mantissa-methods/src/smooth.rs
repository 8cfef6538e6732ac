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
use toml::Value;

use crate::options::{Key, OptionError, Options, Setting, TableSpec, shortest};
use crate::transform::{Change, Channels, ScaleChannels, Transform};

/// The smallest magnitude of a column of the weight, and the smallest scale.
const LEAST: f32 = 1e-5;

/// Default migration strength α.
pub const ALPHA: f32 = 0.5;

/// Options of SmoothQuant.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SmoothOptions {
    /// α, 0 to 1; `None` searches 0, 0.05, … per input for the least output error of its layers.
    pub alpha: Option<f32>,
}

impl Default for SmoothOptions {
    fn default() -> Self {
        SmoothOptions { alpha: Some(ALPHA) }
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

const TABLE: TableSpec = TableSpec {
    name: "smooth",
    keys: &[Key { name: "alpha", help: "migration strength α, 0.0 to 1.0, or \"search\"" }],
};

/// Steps of a search for α, from 0 to 1.
const ALPHA_STEPS: u16 = 20;

/// SmoothQuant: scales down large channels of activations and scales up their weight columns.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Smooth {
    /// Options.
    pub options: SmoothOptions,
}

impl Transform for Smooth {
    fn name(&self) -> &'static str {
        "smooth"
    }

    fn change(&self) -> Change<'_> {
        Change::Scales(self)
    }

    fn tables(&self) -> &'static [TableSpec] {
        &[TABLE]
    }

    fn set(&mut self, _: &str, options: Options<'_>) -> Result<(), OptionError> {
        let alpha = |value: &Value| match value {
            Value::String(text) if text == "search" => Some(None),
            value => value.as_float().filter(|alpha| (0.0..=1.0).contains(alpha)).map(Some),
        };
        let allowed = || "a number from 0.0 to 1.0, or \"search\"".to_owned();
        if let Some(alpha) = options.read("alpha", alpha, allowed)? {
            self.options.alpha = alpha.map(|alpha| alpha as f32);
        }
        Ok(())
    }

    fn settings(&self) -> Vec<Setting> {
        let alpha = self.options.alpha.map_or(Value::from("search"), |alpha| shortest(alpha).into());
        vec![Setting::new(TABLE.name, "alpha", alpha)]
    }
}

impl ScaleChannels for Smooth {
    /// False: SmoothQuant scales only the outputs of norms, whose channels differ most.
    fn scales_inner(&self) -> bool {
        false
    }

    fn candidates(&self, channels: &Channels<'_>) -> Vec<Vec<f32>> {
        let of_alpha = |alpha| scales(channels.peaks, channels.weights, alpha);
        match self.options.alpha {
            Some(alpha) => vec![of_alpha(alpha)],
            None => {
                let steps = (0..=ALPHA_STEPS).map(|i| f32::from(i) / f32::from(ALPHA_STEPS));
                std::iter::once(vec![1.0; channels.peaks.len()]).chain(steps.map(of_alpha)).collect()
            }
        }
    }
}

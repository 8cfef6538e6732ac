//! End-to-end training of a quantized model's continuous parameters: scales, offsets and norms, with fixed codes
//! (E2E-QP of EfficientQAT: Chen et al. 2024, "EfficientQAT: Efficient Quantization-Aware Training for Large
//! Language Models", arXiv:2407.11062, section 3.3).
//!
//! A weight `ŵ = s (q - z)` has fixed codes q. With the gradient g of ŵ, `dL/ds = Σ g (q - z)` over the group of
//! s, and `dL/db = Σ g` for a stored offset b. [`Tuner`] keeps the decoded weights in a [`TrainModel`](crate::TrainModel), whose
//! backward gives g; after every step of Adam it decodes the weights again.
//!
//! Three differences from the paper:
//! * Trained values are relative to their start: `s = s₀ (1 + δ)` and `b = b₀ + s₀ δ`, with δ = 0 at first. One
//!   rate then suits every layer and model.
//! * The forward uses scales as they are stored, rounded to their dtype (gradients pass the rounding unchanged), so
//!   that the last weights are those of the file.
//! * Norms, and for trellis codes the channel scales of both sides, are trained too, as in QuIP# (Tseng et al.
//!   2024, arXiv:2402.04396, section 5). Integer zero points are codes and stay.

mod adam;
mod blocks;
mod trellis;
mod tuner;

use std::fmt::Debug;

use mantissa_num::Quantized;

pub use tuner::{Dense, Tuner};

/// Smallest and largest factor of a scale relative to its start.
const FACTORS: (f32, f32) = (1.0 / 16.0, 16.0);

/// Quantized weight as a function of its continuous parameters.
trait Continuous: Debug + Send + Sync {
    /// Number of trained values.
    fn len(&self) -> usize;

    /// Writes the weight `[rows, cols]` with the values `x`, as stored, to `out`.
    fn decode(&mut self, x: &[f32], out: &mut [f32]);

    /// Writes the gradient of `x` that belongs to the gradient `dw` of the weight to `out`.
    fn pull_back(&self, dw: &[f32], out: &mut [f32]);

    /// Returns the weight with the values of the last [`decode`](Self::decode).
    fn quantized(&self) -> &Quantized;

    /// Bytes beside the codes and scales.
    fn bytes(&self) -> u64;
}

/// Quantized weight to be trained.
#[derive(Clone, Debug)]
pub struct Coded {
    /// Name of its dense parameter.
    pub name: String,
    /// Codes and scales. The codes of a trellis are not used.
    pub quantized: Quantized,
    /// For a trellis, `H C H` `[rows, cols]`: the weight under scales of 1.
    pub inner: Option<Vec<f32>>,
}

/// Returns the continuous parameters of a weight; `None` if its format has none that can be trained: block types of
/// llama.cpp, and scales that are quantized together (double quantization).
fn continuous(quantized: Quantized, inner: Option<Vec<f32>>) -> Option<Box<dyn Continuous>> {
    match inner {
        Some(inner) => Some(Box::new(trellis::ChannelScales::new(quantized, inner)?)),
        None => Some(Box::new(blocks::BlockScales::new(quantized)?)),
    }
}

/// Returns the scale `start` times `1 + x`, within [`FACTORS`].
fn scaled(start: f32, x: f32) -> f32 {
    start * (1.0 + x).clamp(FACTORS.0, FACTORS.1)
}

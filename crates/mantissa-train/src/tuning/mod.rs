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
//!   that the last weights equal the file's.
//! * Norms, and for trellis codes the channel scales of both sides, are trained too, as in QuIP# (Tseng et al.
//!   2024, arXiv:2402.04396, section 5). Integer zero points are codes and stay.

mod blocks;
mod continuous;
mod trellis;
mod tuner;

use mantissa_num::Quantized;

use continuous::Continuous;
pub use tuner::{Dense, Tuner};

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

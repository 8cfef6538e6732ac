//! Continuous parameters of a quantized weight.

use std::fmt::Debug;

use mantissa_num::Quantized;

/// Quantized weight as a function of its continuous parameters.
pub(super) trait Continuous: Debug + Send + Sync {
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

/// Smallest and largest factor of a scale relative to its start.
const FACTORS: (f32, f32) = (1.0 / 16.0, 16.0);

/// Returns the scale `start` times `1 + x`, within [`FACTORS`].
pub(super) fn scaled(start: f32, x: f32) -> f32 {
    start * (1.0 + x).clamp(FACTORS.0, FACTORS.1)
}

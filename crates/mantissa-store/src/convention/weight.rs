//! What a convention hands to the model: a linear layer's weight and how its input is to be quantized.

use mantissa_num::stored::Transforms;
use mantissa_num::{Quantized, Scheme};

/// The weight of a linear layer, `[rows, cols]` = `[out, in]`, row-major.
#[derive(Clone, Debug, PartialEq)]
#[expect(
    clippy::large_enum_variant,
    reason = "one exists per layer being loaded; its lists are on the heap anyway"
)]
pub enum Weight {
    /// f32 values.
    F32(Vec<f32>),
    /// bf16 bit patterns.
    Bf16(Vec<u16>),
    /// f16 bit patterns.
    F16(Vec<u16>),
    /// Codes and scales.
    Quantized(Quantized),
}

/// How a checkpoint asks for a linear layer's input to be quantized at run time, each token by itself.
#[derive(Clone, Debug, PartialEq)]
pub struct ActivationQuant {
    /// The scheme; its source says whether scales are taken from each input or were stored.
    pub scheme: Scheme,
    /// Stored tensor-wide scale (NVFP4's `input_global_scale`), or the static per-tensor scale.
    pub outer: Option<f32>,
}

/// A linear layer as stored.
#[derive(Clone, Debug, PartialEq)]
pub struct LinearWeight {
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
    /// The weight.
    pub weight: Weight,
    /// Bias `[rows]`, widened to f32.
    pub bias: Option<Vec<f32>>,
    /// Quantization of the input, if the checkpoint asks for it; of what the maps before the weight make of it.
    pub input: Option<ActivationQuant>,
    /// What stands around the codes.
    pub transforms: Transforms,
}

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
    /// Values of at least this magnitude stay as they are, and scales are taken from the others: LLM.int8() (Dettmers et al.
    /// 2022, section 3.2). bitsandbytes keeps a column for every token of the batch where one has such a value; here each token
    /// is by itself, so that none depends on its neighbours.
    pub keep_above: Option<f32>,
}

impl ActivationQuant {
    /// `scheme`, with the scale that is stored for it.
    pub fn new(scheme: Scheme, outer: Option<f32>) -> Self {
        ActivationQuant { scheme, outer, keep_above: None }
    }
}

/// How a checkpoint asks for keys (after their rotation) and values to be quantized as they enter the cache: `round(x / scale)`
/// in the element of the scheme, times the scale.
#[derive(Clone, Debug, PartialEq)]
pub struct KvQuant {
    /// The scheme: static with one block for all of a head's values; or dynamic, in the native container.
    pub scheme: Scheme,
    /// Scales of the keys: one, or one per key-value head; none of a dynamic scheme.
    pub k_scale: Vec<f32>,
    /// Scales of the values, likewise.
    pub v_scale: Vec<f32>,
}

/// All of a stored layer but its bias, as conventions read it.
#[derive(Debug)]
pub(super) struct Parts {
    pub(super) weight: Weight,
    pub(super) input: Option<ActivationQuant>,
    pub(super) transforms: Transforms,
}

impl From<Weight> for Parts {
    fn from(weight: Weight) -> Self {
        Parts { weight, input: None, transforms: Transforms::default() }
    }
}

impl From<(Weight, Option<ActivationQuant>)> for Parts {
    fn from((weight, input): (Weight, Option<ActivationQuant>)) -> Self {
        Parts { weight, input, transforms: Transforms::default() }
    }
}

impl From<(Weight, Transforms)> for Parts {
    fn from((weight, transforms): (Weight, Transforms)) -> Self {
        Parts { weight, input: None, transforms }
    }
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

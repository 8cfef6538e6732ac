//! Linear layers as formats pass them to the model: the weight, and the quantization of its input.

use mantissa_num::stored::Transforms;
use mantissa_num::{Codes, Quantized, Scheme, StaticScale};

/// Weight of a linear layer, `[rows, cols]` = `[out, in]`, row-major.
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

/// Run-time quantization of a linear layer's input, each token by itself, as stated by the checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct ActivationQuant {
    /// Scheme; its source determines if scales are computed from each input or stored.
    pub scheme: Scheme,
    /// Stored global scale (NVFP4's `input_global_scale`), or the static per-tensor scale.
    pub outer: Option<f32>,
    /// Zero point beside the static scale of an asymmetric scheme, in the signed domain; else 0.
    pub zero: i32,
    /// Values of at least this magnitude stay unquantized, and scales are computed from the others: LLM.int8()
    /// (Dettmers et al. 2022, section 3.2). bitsandbytes leaves a column unquantized for the whole batch if one token
    /// has such a value. Here each token is quantized independently of the rest of the batch.
    pub keep_above: Option<f32>,
}

impl ActivationQuant {
    /// Creates the quantization by `scheme` with its stored scale.
    pub fn new(scheme: Scheme, outer: Option<f32>) -> Self {
        ActivationQuant { scheme, outer, zero: 0, keep_above: None }
    }

    /// Creates the quantization by `scheme` with its stored scale and zero point.
    pub fn of(scheme: Scheme, stored: Option<StaticScale>) -> Self {
        let zero = stored.map_or(0, |stored| stored.zero);
        ActivationQuant { zero, ..Self::new(scheme, stored.map(|stored| stored.scale)) }
    }

    /// Returns the stored scale with its zero point.
    pub fn stored(&self) -> Option<StaticScale> {
        self.outer.map(|scale| StaticScale { scale, zero: self.zero })
    }
}

/// Quantization of keys (after RoPE) and values when they enter the cache, as stated by the checkpoint: `round(x /
/// scale)` in the element of the scheme, times the scale.
#[derive(Clone, Debug, PartialEq)]
pub struct KvQuant {
    /// Scheme: static with one block for all values of a head; or dynamic, in the native format.
    pub scheme: Scheme,
    /// Scales of the keys: one, or one per key-value head; empty for a dynamic scheme.
    pub k_scale: Vec<f32>,
    /// Scales of the values, in the same form.
    pub v_scale: Vec<f32>,
}

/// Stored linear layer without its bias.
#[derive(Debug)]
pub struct StoredLinear {
    /// The weight.
    pub weight: Weight,
    /// Quantization of the input, if the checkpoint has one.
    pub input: Option<ActivationQuant>,
    /// Side tensors and transforms.
    pub transforms: Transforms,
}

impl From<Weight> for StoredLinear {
    fn from(weight: Weight) -> Self {
        StoredLinear { weight, input: None, transforms: Transforms::default() }
    }
}

impl From<(Weight, Option<ActivationQuant>)> for StoredLinear {
    fn from((weight, input): (Weight, Option<ActivationQuant>)) -> Self {
        StoredLinear { weight, input, transforms: Transforms::default() }
    }
}

impl From<(Weight, Transforms)> for StoredLinear {
    fn from((weight, transforms): (Weight, Transforms)) -> Self {
        StoredLinear { weight, input: None, transforms }
    }
}

/// Linear layer as stored.
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
    /// Quantization of the input, after the maps before the weight, if the checkpoint has one.
    pub input: Option<ActivationQuant>,
    /// Side tensors and transforms.
    pub transforms: Transforms,
}

/// Restores the original column order of a weight that the reader sorted by group (`order` is its permutation), with
/// the group of each column (`g_idx`).
pub fn in_own_order(q: &Quantized, order: &[u32]) -> (Quantized, Vec<u32>) {
    let size = q.format.blocks().len(1, q.cols).max(1);
    let mut g_idx = vec![0; q.cols];
    let mut sorted = q.clone();
    order.iter().enumerate().for_each(|(place, &column)| g_idx[column as usize] = (place / size) as u32);
    if let (Codes::U8(to), Codes::U8(from)) = (&mut sorted.codes, &q.codes) {
        for (to, from) in to.chunks_exact_mut(q.cols.max(1)).zip(from.chunks_exact(q.cols.max(1))) {
            order.iter().zip(from).for_each(|(&column, &code)| to[column as usize] = code);
        }
    }
    (sorted, g_idx)
}

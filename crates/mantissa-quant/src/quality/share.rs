//! Share of a model's parameters that is quantized: the bytes of each scheme, and what stays unquantized.

use serde::{Deserialize, Serialize};

/// Share of a model's parameters that a plan quantizes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct QuantizedShare {
    /// Parameters of the quantized linear layers.
    pub quantized: u64,
    /// Parameters of the linear layers of the decoder that the recipe covers: all but the layers that it keeps.
    pub covered: u64,
    /// Parameters of all linear layers, including towers and other parts, without embedding and head.
    pub linear: u64,
    /// All parameters of the source.
    pub parameters: u64,
    /// Expected bytes by scheme; the last entry is what stays unquantized.
    pub schemes: Vec<SchemeShare>,
    /// Modules that stay unquantized.
    pub kept: Vec<Kept>,
}

impl QuantizedShare {
    /// Percentage of the covered linear layers that is quantized.
    pub fn percent(&self) -> f64 {
        100.0 * self.quantized as f64 / self.covered.max(1) as f64
    }
}

/// Layers of one scheme.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SchemeShare {
    /// Name of the scheme; `None` for tensors that stay unquantized.
    pub scheme: Option<String>,
    /// Number of weights.
    pub layers: usize,
    /// Their parameters.
    pub parameters: u64,
    /// Expected bytes of all their tensors.
    pub bytes: u64,
}

/// Modules that stay unquantized for one reason.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Kept {
    /// Names of the modules, with `*` for numbers, or the prefix of a part.
    pub modules: String,
    /// Number of modules; for a part, of its tensors.
    pub count: usize,
    /// Their parameters.
    pub parameters: u64,
    /// Reason.
    pub why: String,
}

//! Reports of quantized layers.

use serde::{Deserialize, Serialize};

use mantissa_methods::judge::Judgement;

use crate::error_stats::ErrorReport;

/// The error of one layer's weight.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerReport {
    /// Module name.
    pub module: String,
    /// Scheme.
    pub scheme: String,
    /// Method that chose its codes.
    pub method: String,
    /// Why scheme or method are not what the recipe asks for, where they are not.
    pub fallback: Option<String>,
    /// Dtype in which its scales are stored.
    pub scale_dtype: String,
    /// `[out, in]`.
    pub shape: [usize; 2],
    /// Bits per weight by the scheme: scales, zero points and outliers counted, zero points as wide as codes.
    pub bits_per_weight: f64,
    /// Bits per weight of all tensors of the layer as the container stores them; `None` in files of older versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stored_bits_per_weight: Option<f64>,
    /// Single weights that stand beside the codes, where some do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outliers: Option<usize>,
    /// Mean over the tokens of the calibration of the squared error of the layer's output, `tr((W - Q) H (W - Q)ᵀ)`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output_error: Option<f64>,
    /// Comparison of the method's solution with RTN, if both were measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub judged: Option<Judgement>,
    /// Notes for the user.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// Error figures of the weight.
    #[serde(flatten)]
    pub error: ErrorReport,
}

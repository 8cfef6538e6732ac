//! Reports of quantized layers.

use serde::{Deserialize, Serialize};

use mantissa_methods::error_gate::Judgement;

use crate::error_stats::ErrorReport;

/// Report of one quantized layer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerReport {
    /// Module name.
    pub module: String,
    /// Name of the scheme.
    pub scheme: String,
    /// Method that chose the codes.
    pub method: String,
    /// Reason why scheme or method differ from the recipe; `None` if they do not.
    pub fallback: Option<String>,
    /// Dtype of the stored scales.
    pub scale_dtype: String,
    /// Shape of the weight, `[out, in]`.
    pub shape: [usize; 2],
    /// Bits per weight by the scheme, including scales, zero points (as wide as codes) and outliers.
    pub bits_per_weight: f64,
    /// Bits per weight of all stored tensors of the layer; `None` in files of older versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stored_bits_per_weight: Option<f64>,
    /// Number of outliers stored beside the codes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outliers: Option<usize>,
    /// Mean squared error of the layer's output over the calibration tokens, `tr((W - Q) H (W - Q)ᵀ)`.
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

impl LayerReport {
    /// Returns the squared output error on the calibration inputs, relative to RTN, which has 1; `None` if no method was
    /// compared with RTN.
    pub fn error_vs_rtn(&self) -> Option<f64> {
        self.judged.map(|judged| judged.solved / judged.nearest)
    }

    /// Returns the error by which reports rank layers: that of outputs `by_output`, where a layer without one is RTN's,
    /// else that of weights.
    pub fn ranked_error(&self, by_output: bool) -> f64 {
        if by_output { self.error_vs_rtn().unwrap_or(1.0) } else { self.error.relative_error }
    }
}

//! The per-layer error report, as JSON beside the weights.

use mantissa_model::LinearInfo;
use mantissa_num::Scheme;
use mantissa_num::{Code, format::Format};
use serde::{Deserialize, Serialize};

use crate::error_stats::ErrorReport;
use crate::layers::Solved;
use crate::plan::Plan;
use crate::recipe::Method;

/// What quantizing a model did.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Tool and version.
    pub tool: String,
    /// The recipe, as given.
    pub recipe: String,
    /// Its method.
    pub method: String,
    /// Scheme of linear weights where no exception applies.
    pub weights: String,
    /// Scheme of their inputs.
    pub activations: Option<String>,
    /// The container.
    pub container: String,
    /// Bits per weight of the quantized layers, scales and zero points counted.
    pub linear_bits_per_weight: f64,
    /// Bytes of all tensors of the output, embeddings and head included.
    pub bytes: u64,
    /// The quantized layers.
    pub layers: Vec<LayerReport>,
    /// Layers left as they are.
    pub kept: Vec<String>,
    /// What the user should know.
    pub notes: Vec<String>,
}

/// The error of one layer's weight.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerReport {
    /// Module name.
    pub module: String,
    /// Scheme.
    pub scheme: String,
    /// Dtype in which its scales are stored.
    pub scale_dtype: String,
    /// `[out, in]`.
    pub shape: [usize; 2],
    /// Bits per weight, scales and zero points counted.
    pub bits_per_weight: f64,
    /// The method that chose its codes.
    pub method: String,
    /// Why that is not the recipe's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fallback: Option<String>,
    /// Mean over the tokens of the calibration of the squared error of the layer's output, `tr((W - Q) H (W - Q)ᵀ)`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output_error: Option<f64>,
    /// What the user should know of it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// Error figures of the weight.
    #[serde(flatten)]
    pub error: ErrorReport,
}

impl LayerReport {
    pub(crate) fn new(info: &LinearInfo, scheme: &Scheme, method: Method, solved: Solved) -> Self {
        LayerReport {
            module: info.module.clone(),
            scheme: scheme.to_string(),
            scale_dtype: scale_dtype(&scheme.format).to_owned(),
            shape: [info.rows, info.cols],
            bits_per_weight: scheme.format.bits_per_weight(info.rows, info.cols),
            method: method.name().to_owned(),
            fallback: solved.fallback,
            output_error: solved.output_error,
            notes: solved.notes,
            error: solved.stats.report(),
        }
    }
}

fn scale_dtype(format: &Format) -> &'static str {
    if format.codec().is_some() {
        return "in blocks";
    }
    match format.scale().map(|scale| scale.code) {
        None => "none",
        Some(Code::Float(float)) => float.name,
        Some(Code::E8m0) => "e8m0",
        Some(_) => "f32",
    }
}

impl Report {
    pub(crate) fn new(plan: &Plan, layers: Vec<LayerReport>) -> Self {
        Report {
            tool: concat!("mantissa ", env!("CARGO_PKG_VERSION")).to_owned(),
            recipe: plan.recipe.name.clone(),
            method: plan.recipe.method.name().to_owned(),
            weights: plan.recipe.weights.to_string(),
            activations: plan.recipe.activations.as_ref().map(ToString::to_string),
            container: plan.container.name().to_owned(),
            linear_bits_per_weight: plan.linear_bits_per_weight(),
            bytes: plan.output_bytes(),
            layers,
            kept: plan.linears.iter().filter(|l| l.scheme.is_none()).map(|l| l.info.module.clone()).collect(),
            notes: plan.notes.clone(),
        }
    }
}

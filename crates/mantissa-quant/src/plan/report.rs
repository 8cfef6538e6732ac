//! Reports of the layers of a plan.

use mantissa_methods::Solved;
use mantissa_model::LinearInfo;
use mantissa_num::format::Format;
use mantissa_num::{Code, Scheme};

use super::Plan;
use crate::report::LayerReport;

impl Plan {
    /// Builds the report of a layer that was solved by `method`.
    pub(crate) fn layer_report(
        &self,
        info: &LinearInfo,
        scheme: &Scheme,
        method: &str,
        solved: Solved,
    ) -> LayerReport {
        LayerReport {
            module: info.module.clone(),
            scheme: scheme.to_string(),
            method: method.to_owned(),
            fallback: solved.fallback.or_else(|| self.fallbacks.get(&info.module).cloned()),
            scale_dtype: scale_dtype(&scheme.format).to_owned(),
            shape: [info.rows, info.cols],
            bits_per_weight: self.bits(info, scheme) as f64 / (info.rows * info.cols).max(1) as f64,
            stored_bits_per_weight: Some(
                self.stored_bits(info, scheme) as f64 / (info.rows * info.cols).max(1) as f64,
            ),
            outliers: Some(self.outliers(info)).filter(|&count| count > 0),
            output_error: solved.output_error,
            judged: solved.judged,
            notes: solved.notes,
            error: solved.stats.report(),
        }
    }
}

/// Returns the dtype of a format's scales.
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

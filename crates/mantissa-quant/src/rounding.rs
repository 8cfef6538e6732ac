//! RTN of a layer's weight as its format stores it, values of weights for methods, and errors with the layer's name.

use mantissa_methods::{MethodError, Solved};
use mantissa_model::LinearInfo;
use mantissa_num::{Scheme, TensorError, quantize_with_scales};
use mantissa_store::{Error, ErrorClass};
use mantissa_train::TrainError;

use crate::error::{QuantError, Result};
use crate::error_stats::ErrorStats;
use crate::exl2;
use crate::fold::Folded;
use crate::plan::Plan;
use crate::range;
use crate::rtn;
use crate::source::{DenseError, DenseTensor, Scratch, WeightReader as _};
use crate::spqr;

/// Returns all values of a weight as f32.
pub(crate) fn whole<'w>(
    source: &Folded<'_>,
    info: &LinearInfo,
    w: &'w DenseTensor<'_>,
    scratch: &'w mut Scratch,
) -> Result<&'w [f32]> {
    w.elements(0..info.rows * info.cols, scratch).map_err(|error| dense_error(source, info, error))
}

/// Quantizes a weight by RTN, with the kind of scales that its container stores.
pub(crate) fn round_to_nearest(
    plan: &Plan,
    source: &Folded<'_>,
    info: &LinearInfo,
    scheme: &Scheme,
    w: &DenseTensor<'_>,
    outer: Option<f32>,
) -> Result<Solved> {
    if let Some(scales) = plan.options.scales.as_ref().and_then(|scales| scales.get(&info.module)) {
        return under_learned_scales(source, info, scheme, w, scales);
    }
    if plan.container.facts().square_scales {
        return under_square_scales(source, info, scheme, w);
    }
    let quantized = rtn::quantize_source(scheme, w, info.rows, info.cols, outer, plan.options.threads);
    let solved = quantized.map(Solved::rounded).map_err(|error| dense_error(source, info, error))?;
    match plan.outliers(info) {
        0 => Ok(solved),
        count => with_outliers(source, info, w, count, solved),
    }
}

/// Adds outliers to a weight quantized by RTN: the weights of largest error.
fn with_outliers(
    source: &Folded<'_>,
    info: &LinearInfo,
    w: &DenseTensor<'_>,
    count: usize,
    solved: Solved,
) -> Result<Solved> {
    let mut scratch = Scratch::default();
    let w = whole(source, info, w, &mut scratch)?;
    let tensor = |error: TensorError| dense_error(source, info, error.into());
    let outliers = Some(spqr::furthest(w, &solved.quantized, count).map_err(tensor)?);
    let solved = Solved { outliers, ..solved };
    let stats = ErrorStats::of_rows(w, &solved.values().map_err(tensor)?, info.cols);
    Ok(Solved { stats, ..solved })
}

/// Refuses a weight outside the range of `scheme`; `stats` is its error under it.
pub(crate) fn check_range(
    plan: &Plan,
    source: &Folded<'_>,
    info: &LinearInfo,
    scheme: &Scheme,
    w: &DenseTensor<'_>,
    stats: &ErrorStats,
) -> Result<()> {
    range::check(scheme, w, (info.rows, info.cols), stats, plan.options.threads)
        .map_err(|error| dense_error(source, info, error))
}

/// Adds the names of model and tensor to an error of a layer's weight.
pub(crate) fn dense_error(source: &Folded<'_>, info: &LinearInfo, error: DenseError) -> QuantError {
    error.of(source.files(), &info.tensor_in(source.files()).0, &format!("{}.weight", info.module))
}

/// Returns the error of a weight whose scales do not fit f16.
fn out_of_reach(source: &Folded<'_>, info: &LinearInfo) -> QuantError {
    let got = "values that are not finite, or scales beyond f16";
    Error::field(source.path(), &info.module, got, "weights whose scales fit f16", "").into()
}

/// Adds the names of model and layer or input (`what`) to an error of a method.
pub(crate) fn method_error(source: &Folded<'_>, what: &str, error: MethodError) -> QuantError {
    let path = source.path().to_owned();
    match error {
        MethodError::Weight(error) => QuantError::Tensor { path, tensor: format!("{what}.weight"), error },
        MethodError::Stopped => QuantError::Interrupted,
        error => QuantError::Method { path, what: what.to_owned(), error: Box::new(error) },
    }
}

/// Error of a layer without forward or backward pass.
#[derive(Debug, thiserror::Error)]
#[error("{0}; fix: use gptq, which needs no gradients")]
struct NoGradients(#[source] TrainError);

/// Converts an error of training to one of a method.
pub(crate) fn train_error(error: TrainError) -> MethodError {
    match error.class() {
        ErrorClass::Environment => MethodError::Environment(NoGradients(error).into()),
        _ => MethodError::input(NoGradients(error)),
    }
}

/// Rounds a weight to nearest under `scales` that were learned with it.
fn under_learned_scales(
    source: &Folded<'_>,
    info: &LinearInfo,
    scheme: &Scheme,
    w: &DenseTensor<'_>,
    scales: &[f32],
) -> Result<Solved> {
    let mut scratch = Scratch::default();
    let w = whole(source, info, w, &mut scratch)?;
    let quantized = quantize_with_scales(scheme, w, info.rows, info.cols, scales)
        .map_err(|error| dense_error(source, info, error.into()))?;
    let stats = ErrorStats::of(w, &quantized);
    Ok(Solved::rounded((quantized, stats)))
}

/// Rounds a weight to nearest under the scales that EXL2 stores.
fn under_square_scales(
    source: &Folded<'_>,
    info: &LinearInfo,
    scheme: &Scheme,
    w: &DenseTensor<'_>,
) -> Result<Solved> {
    let mut scratch = Scratch::default();
    let w = whole(source, info, w, &mut scratch)?;
    let quantized = exl2::quantize(scheme, w, info.rows, info.cols);
    let quantized = quantized.ok_or_else(|| out_of_reach(source, info))?;
    let stats = ErrorStats::of(w, &quantized);
    Ok(Solved::rounded((quantized, stats)))
}

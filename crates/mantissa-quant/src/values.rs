//! Weights of linear layers of dense and quantized models.

use mantissa_model::{LinearInfo, linear_weight};
use mantissa_store::convention::{LinearWeight, ModelFiles};

use crate::error::Result;

/// Reads the weight of a layer, without its bias.
///
/// # Errors
/// The weight cannot be read.
pub(crate) fn weight_of(source: &ModelFiles, info: &LinearInfo) -> Result<LinearWeight> {
    Ok(linear_weight(source, &LinearInfo { bias: false, ..info.clone() })?)
}

/// Returns the effective weight of a layer, including rotations and diagonals.
///
/// # Errors
/// The tensors do not fit each other.
pub(crate) fn values_of(info: &LinearInfo, mut weight: LinearWeight) -> Result<Vec<f32>> {
    let transforms = std::mem::take(&mut weight.transforms);
    weight.input = None;
    let linear = mantissa_model::Linear::new(&info.module, weight)?;
    let mut values = vec![0.0; info.rows * info.cols];
    for (row, out) in values.chunks_exact_mut(info.cols.max(1)).enumerate() {
        linear.row(row, out);
    }
    transforms.fold(&mut values, info.rows, info.cols);
    Ok(values)
}

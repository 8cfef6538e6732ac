//! Decoded values of a stored weight.

use mantissa_model::{Linear, LoadError};
use mantissa_store::convention::LinearWeight;

/// Decodes the weight `[rows, cols]` that the layer multiplies with, its side tensors and transforms
/// included.
///
/// # Errors
/// The parts of the weight do not fit together.
pub(crate) fn values(module: &str, mut weight: LinearWeight) -> Result<Vec<f32>, LoadError> {
    let transforms = std::mem::take(&mut weight.transforms);
    weight.input = None;
    let (rows, cols) = (weight.rows, weight.cols);
    let linear = Linear::new(module, weight)?;
    let mut values = vec![0.0; rows * cols];
    for (row, out) in values.chunks_exact_mut(cols.max(1)).enumerate() {
        linear.row(row, out);
    }
    transforms.fold(&mut values, rows, cols);
    Ok(values)
}

/// Returns `||a - b|| / ||b||`; 0 if both are 0.
pub(crate) fn relative_error(a: &[f32], b: &[f32]) -> f64 {
    let square = |x: f32| f64::from(x) * f64::from(x);
    let error: f64 = a.iter().zip(b).map(|(a, b)| square(a - b)).sum();
    let norm: f64 = b.iter().map(|&b| square(b)).sum();
    if error == 0.0 { 0.0 } else { (error / norm).sqrt() }
}

//! Merging: one dense weight instead of a weight and its adapter.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::AdapterModule;
use crate::convention::Weight;

/// Error of merging an adapter into a weight.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum MergeError {
    /// The weight has another size.
    #[error("weight: expected {rows} x {cols} values as in the adapter, got {found}")]
    Size {
        /// Rows of the adapter.
        rows: usize,
        /// Columns of the adapter.
        cols: usize,
        /// Values of the weight.
        found: usize,
    },
    /// The weight is quantized.
    #[error("weight: expected f32, bf16 or f16 values, got codes; fix: dequantize the base first")]
    Quantized,
    /// A merged value does not fit the dtype of the weight.
    #[error(
        "weight: expected finite values in {dtype} after merging, got {value} at element {index}; fix: store the merged weight in bf16 or f32"
    )]
    NotFinite {
        /// Dtype of the weight.
        dtype: &'static str,
        /// First such element.
        index: usize,
        /// Its value.
        value: f32,
    },
}

impl AdapterModule {
    /// Adds `s·B·A` to `weight`, row `row` of the base (`[cols]`), and returns the factor that DoRA multiplies the row
    /// by: `magnitude / ‖W + s·B·A‖`, 1 without a magnitude. A row of zeros has factor 0.
    ///
    /// # Panics
    /// If there is no such row or `weight` has another length.
    pub fn merge_row(&self, row: usize, weight: &mut [f32]) -> f32 {
        assert_eq!(
            weight.len(),
            self.cols,
            "merge_row: the row has another length than the adapter's inputs"
        );
        let scale = self.scale();
        let b = &self.b[row * self.rank..(row + 1) * self.rank];
        for (b, a) in b.iter().zip(self.a.chunks_exact(self.cols.max(1))) {
            let factor = scale * b;
            weight.iter_mut().zip(a).for_each(|(w, a)| *w += factor * a);
        }
        let Some(magnitude) = &self.magnitude else { return 1.0 };
        let norm = weight.iter().map(|w| f64::from(*w) * f64::from(*w)).sum::<f64>().sqrt();
        if norm == 0.0 { 0.0 } else { (f64::from(magnitude[row]) / norm) as f32 }
    }

    /// Merges the adapter into `weight` `[rows, cols]`, in f32.
    ///
    /// # Errors
    /// [`MergeError::Size`].
    pub fn merge(&self, weight: &mut [f32]) -> Result<(), MergeError> {
        if weight.len() != self.rows * self.cols {
            return Err(MergeError::Size { rows: self.rows, cols: self.cols, found: weight.len() });
        }
        for (row, weight) in weight.chunks_exact_mut(self.cols.max(1)).enumerate() {
            let factor = self.merge_row(row, weight);
            if self.magnitude.is_some() {
                weight.iter_mut().for_each(|w| *w *= factor);
            }
        }
        Ok(())
    }

    /// Merges the adapter into a dense weight: computes in f32 and rounds once, to nearest even, to the weight's dtype.
    ///
    /// # Errors
    /// [`MergeError`].
    pub fn merged(&self, weight: Weight) -> Result<Weight, MergeError> {
        match weight {
            Weight::F32(mut values) => {
                self.merge(&mut values)?;
                finite(&values, "f32")?;
                Ok(Weight::F32(values))
            }
            Weight::Bf16(bits) => {
                let mut values: Vec<f32> = bits.iter().map(|bits| bf16::from_bits(*bits).to_f32()).collect();
                self.merge(&mut values)?;
                let rounded: Vec<bf16> = values.into_iter().map(bf16::from_f32).collect();
                finite(&rounded.to_f32_vec(), "bf16")?;
                Ok(Weight::Bf16(rounded.into_iter().map(bf16::to_bits).collect()))
            }
            Weight::F16(bits) => {
                let mut values: Vec<f32> = bits.iter().map(|bits| f16::from_bits(*bits).to_f32()).collect();
                self.merge(&mut values)?;
                let rounded: Vec<f16> = values.into_iter().map(f16::from_f32).collect();
                finite(&rounded.to_f32_vec(), "f16")?;
                Ok(Weight::F16(rounded.into_iter().map(f16::to_bits).collect()))
            }
            Weight::Quantized(_) => Err(MergeError::Quantized),
        }
    }
}

fn finite(values: &[f32], dtype: &'static str) -> Result<(), MergeError> {
    match values.iter().enumerate().find(|(_, value)| !value.is_finite()) {
        Some((index, &value)) => Err(MergeError::NotFinite { dtype, index, value }),
        None => Ok(()),
    }
}

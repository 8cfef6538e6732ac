//! A weight as a method leaves it.

use mantissa_num::stored::Extra;
use mantissa_num::{Quantized, TensorError};

use crate::dequantize::dequantize_by_group;
use crate::error_stats::ErrorStats;
use crate::judge::Judgement;

/// A layer's weight as a method leaves it.
#[derive(Clone, Debug)]
pub struct Solved {
    /// Codes and scales.
    pub quantized: Quantized,
    /// Group of each column, where groups are not of neighbours.
    pub g_idx: Option<Vec<u32>>,
    /// Single weights beside the codes.
    pub outliers: Option<Extra>,
    /// The scale of the layer's inputs that is stored, of a model as it was read.
    pub input_scale: Option<f32>,
    /// Error of the weight.
    pub stats: ErrorStats,
    /// Why another method than the recipe's was taken.
    pub fallback: Option<String>,
    /// `tr((W - Q) H (W - Q)ᵀ)` on the calibration, where the method has an H.
    pub output_error: Option<f64>,
    /// Comparison with rounding to nearest, where it was measured.
    pub judged: Option<Judgement>,
    /// Notes for the user.
    pub notes: Vec<String>,
}

impl Solved {
    /// Rounded to nearest.
    pub fn rounded((quantized, stats): (Quantized, ErrorStats)) -> Self {
        Solved {
            quantized,
            g_idx: None,
            outliers: None,
            input_scale: None,
            stats,
            fallback: None,
            output_error: None,
            judged: None,
            notes: Vec::new(),
        }
    }

    /// The weight `[rows, cols]` as it is stored.
    ///
    /// # Errors
    /// [`TensorError`] where the parts do not fit together.
    pub fn values(&self) -> Result<Vec<f32>, TensorError> {
        let mut values = dequantize_by_group(&self.quantized, self.g_idx.as_deref())?;
        let (rows, cols) = (self.quantized.rows, self.quantized.cols);
        self.outliers.iter().for_each(|outliers| outliers.fold(&mut values, rows, cols));
        Ok(values)
    }
}

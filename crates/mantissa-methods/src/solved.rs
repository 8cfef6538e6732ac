//! Result of a method for one weight.

use mantissa_num::stored::Extra;
use mantissa_num::{Quantized, StaticScale, TensorError};

use crate::dequantize::dequantize_by_group;
use crate::error_gate::Judgement;
use crate::error_stats::ErrorStats;

/// Quantized weight with its error and notes.
#[derive(Clone, Debug)]
pub struct Solved {
    /// Codes and scales.
    pub quantized: Quantized,
    /// Group of each column, if groups are not adjacent columns.
    pub g_idx: Option<Vec<u32>>,
    /// Outliers stored outside the codes.
    pub outliers: Option<Extra>,
    /// Stored scale of the layer's inputs, from the model that was read.
    pub input_scale: Option<StaticScale>,
    /// Error of the weight.
    pub stats: ErrorStats,
    /// Reason for a fallback to another method.
    pub fallback: Option<String>,
    /// Output error `tr((W - Q) H (W - Q)ᵀ)` on the calibration, if the method has an H.
    pub output_error: Option<f64>,
    /// Comparison with RTN, if measured.
    pub judged: Option<Judgement>,
    /// Notes for the user.
    pub notes: Vec<String>,
}

impl Solved {
    /// Result of RTN.
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

    /// Dequantized weight `[rows, cols]`.
    ///
    /// # Errors
    /// [`TensorError`] if the parts have inconsistent lengths.
    pub fn values(&self) -> Result<Vec<f32>, TensorError> {
        let mut values = dequantize_by_group(&self.quantized, self.g_idx.as_deref())?;
        let (rows, cols) = (self.quantized.rows, self.quantized.cols);
        self.outliers.iter().for_each(|outliers| outliers.fold(&mut values, rows, cols));
        Ok(values)
    }
}

//! Error of a quantized tensor against its source.

use mantissa_kernels::{ErrorSums, kernels};
use mantissa_num::Quantized;
use serde::{Deserialize, Serialize};

use crate::dequantize::Dequantizer;

/// Sums over a tensor's elements, in f64; merging parts in a fixed order gives the same bits every time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ErrorStats {
    count: u64,
    squared_error: f64,
    squared_value: f64,
    max_error: f32,
}

/// Error figures of a tensor in reports.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ErrorReport {
    /// Mean squared error.
    pub mse: f64,
    /// `10 log10(sum x² / sum (x - x̂)²)` in dB; absent if the error is zero.
    pub sqnr_db: Option<f64>,
    /// `||x - x̂|| / ||x||` (Frobenius); 0 for a zero tensor.
    pub relative_error: f64,
    /// Largest `|x - x̂|`.
    pub max_abs_error: f64,
}

impl ErrorStats {
    /// Sums for `w` against `q`, which must have the same shape.
    pub fn of(w: &[f32], q: &Quantized) -> Self {
        let mut stats = ErrorStats::default();
        let mut row = vec![0.0; q.cols];
        let mut dequantizer = Dequantizer::new(q);
        for (r, w) in w.chunks_exact(q.cols.max(1)).enumerate() {
            dequantizer.row(r, &mut row);
            stats.merge(&Self::of_values(w, &row));
        }
        stats
    }

    /// Sums for `w` against `approximation`, both `[_, cols]`, row by row as [`of`](Self::of).
    pub fn of_rows(w: &[f32], approximation: &[f32], cols: usize) -> Self {
        let mut stats = ErrorStats::default();
        let rows = w.chunks_exact(cols.max(1)).zip(approximation.chunks_exact(cols.max(1)));
        rows.for_each(|(w, approximation)| stats.merge(&Self::of_values(w, approximation)));
        stats
    }

    /// Sums for `w` against `approximation`, element by element. Panics if the lengths differ.
    pub fn of_values(w: &[f32], approximation: &[f32]) -> Self {
        Self::of_sums(w.len(), kernels().error_sums(w, approximation))
    }

    /// Wraps the sums over `count` elements.
    pub fn of_sums(count: usize, sums: ErrorSums) -> Self {
        let ErrorSums { squared_error, squared_value, max_error } = sums;
        ErrorStats { count: count as u64, squared_error, squared_value, max_error }
    }

    /// Adds the sums of another part.
    pub fn merge(&mut self, other: &Self) {
        self.count += other.count;
        self.squared_error += other.squared_error;
        self.squared_value += other.squared_value;
        self.max_error = self.max_error.max(other.max_error);
    }

    /// Returns the number of elements, the sums of squared errors and of squared values, and the largest error.
    pub fn parts(&self) -> (u64, [f64; 2], f32) {
        (self.count, [self.squared_error, self.squared_value], self.max_error)
    }

    /// Makes the sums from their [`parts`](Self::parts).
    pub fn from_parts(count: u64, [squared_error, squared_value]: [f64; 2], max_error: f32) -> Self {
        ErrorStats { count, squared_error, squared_value, max_error }
    }

    /// Sum of the squares of the source's elements.
    pub fn power(&self) -> f64 {
        self.squared_value
    }

    /// True if no error was infinite or NaN.
    pub fn is_finite(&self) -> bool {
        self.squared_error.is_finite()
    }

    /// The figures of a report.
    pub fn report(&self) -> ErrorReport {
        let ratio = self.squared_error / self.squared_value;
        ErrorReport {
            mse: if self.count == 0 { 0.0 } else { self.squared_error / self.count as f64 },
            sqnr_db: (self.squared_error > 0.0 && self.squared_value > 0.0).then(|| -10.0 * ratio.log10()),
            relative_error: if self.squared_value > 0.0 { ratio.sqrt() } else { 0.0 },
            max_abs_error: self.max_error.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_of_a_known_error() {
        let stats = ErrorStats::of_values(&[3.0, -4.0], &[3.0, -3.5]);
        let report = stats.report();
        assert_eq!((report.mse, report.max_abs_error, report.relative_error), (0.125, 0.5, 0.1));
        assert!(report.sqnr_db.is_some_and(|db| (db - 20.0).abs() < 1e-12));
        assert_eq!(ErrorStats::of_values(&[0.0], &[0.0]).report().sqnr_db, None);
    }
}

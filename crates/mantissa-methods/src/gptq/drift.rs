//! GPTAQ (Li, Yin, Lee, Xiao & Panda 2025, "GPTAQ: Efficient Finetuning-Free Quantization for Asymmetric
//! Calibration", arXiv 2504.02692): corrects weights for the change of their input by the quantized layers before
//! them.
//!
//! After quantized layers a linear layer reads `X̃` instead of the original `X`, but should still give `X Wᵀ`. The
//! part of `‖X Wᵀ - X̃ Qᵀ‖²` that depends on Q is, with GPTQ's `H = X̃ᵀX̃ / t`,
//!
//! ```text
//! tr((W' - Q) H (W' - Q)ᵀ),   W' = W + W D H⁻¹,   D = (X - X̃)ᵀ X̃ / t
//! ```
//!
//! so GPTAQ is GPTQ of `W'`. (The paper instead updates columns by the current row of `W D`, an approximation of the
//! same.) `H + λI` replaces H as in GPTQ. Only a share of the correction may be applied, because W' also fits
//! sampling noise of the calibration in D.

use mantissa_kernels::{MatMut, MatRef, for_each, kernels};
use mantissa_num::stored::Map;

use super::hessian::{map_both_sides, zeros};
use super::{GptqError, InverseFactor};

/// Rows of `D` that a thread takes at a time.
const BAND: usize = 64;

/// Rows of a weight that a thread corrects at a time.
const ROWS: usize = 128;

/// Rows of U that are widened together.
const STRIP: usize = 128;

/// Drift `D = (X - X̃)ᵀ X̃ / t` between the inputs `X[t, k]` of a linear layer in the original model and `X̃[t, k]`
/// in the quantized one. Stored as the sum and the number of tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct Drift {
    cols: usize,
    tokens: u64,
    /// `[cols, cols]`.
    sum: Vec<f32>,
}

impl Drift {
    /// Creates the drift of zero tokens, for inputs of width `cols`.
    ///
    /// # Errors
    /// [`GptqError::Memory`].
    pub fn new(cols: usize) -> Result<Self, GptqError> {
        Ok(Drift { cols, tokens: 0, sum: zeros(cols)? })
    }

    /// Memory of one drift, in bytes.
    pub fn bytes_needed(cols: usize) -> u64 {
        4 * (cols as u64).saturating_mul(cols as u64)
    }

    /// Adds the inputs `original` and `now` (`[t, cols]`) of the same tokens; overwrites `original` by the
    /// difference. The sum's bits do not depend on `threads`.
    ///
    /// # Panics
    /// If the lengths differ or are not whole rows.
    pub fn add(&mut self, original: &mut [f32], now: &[f32], threads: usize) {
        let k = self.cols.max(1);
        let tokens = now.len() / k;
        assert!(
            tokens * k == now.len() && original.len() == now.len(),
            "{} and {} values are not the same rows of {k}",
            original.len(),
            now.len()
        );
        original.iter_mut().zip(now).for_each(|(original, now)| *original -= now);
        let change = &*original;
        for_each(threads, self.sum.chunks_mut(BAND * k).enumerate(), |(band, sum)| {
            let rows = sum.len() / k;
            let change = MatRef::with_stride(&change[band * BAND..], tokens, rows, k);
            kernels().gemm_tn(change, MatRef::new(now, tokens, k), MatMut::new(sum, rows, k), true);
        });
        self.tokens += tokens as u64;
    }

    /// Drift of the inputs after `maps` in order: `M D Mᵀ`.
    ///
    /// # Errors
    /// [`GptqError::Memory`].
    pub fn mapped(&self, maps: &[Map]) -> Result<Self, GptqError> {
        let mut sum = zeros(self.cols)?;
        sum.copy_from_slice(&self.sum);
        map_both_sides(&mut sum, self.cols, maps);
        Ok(Drift { sum, ..*self })
    }

    /// True if no input differs from the original model.
    pub fn is_zero(&self) -> bool {
        self.sum.iter().all(|v| *v == 0.0)
    }
}

/// Anonymous memory of [`InverseFactor::corrected`], in bytes: the corrected weight `[rows, cols]` and the threads'
/// scratch.
pub fn correction_bytes(rows: usize, cols: usize, threads: usize) -> u64 {
    let (n, k, threads) = (rows as u64, cols as u64, threads.max(1) as u64);
    4 * n * k + threads * 4 * k * (3 * ROWS as u64 + STRIP as u64)
}

impl InverseFactor {
    /// Returns `W + share · W D (H + λI)⁻¹` for `w` `[n, k]`: the weight corrected for `drift`, fully at `share` 1.
    /// Values do not depend on `threads`. Takes `2 n k²` multiply-adds.
    ///
    /// # Errors
    /// [`GptqError::Length`] if the widths differ, and [`GptqError::Weight`] for non-finite values.
    pub fn corrected(
        &self,
        w: &[f32],
        drift: &Drift,
        share: f32,
        threads: usize,
    ) -> Result<Vec<f32>, GptqError> {
        let k = self.order.len();
        super::check_weight(w, k)?;
        if drift.cols != k {
            return Err(GptqError::Length { what: "columns of the drift", found: drift.cols, expected: k });
        }
        let mut out = w.to_vec();
        let scale = share / drift.tokens.max(1) as f32;
        for_each(threads, out.chunks_mut((ROWS * k).max(1)), |rows| {
            let change = self.change(rows, drift);
            for (row, change) in rows.chunks_exact_mut(k).zip(change.chunks_exact(k)) {
                for (&column, change) in self.order.iter().zip(change) {
                    row[column] += scale * change;
                }
            }
        });
        Ok(out)
    }

    /// Change `W D (H + λI)⁻¹` of some rows of the weight, by position, from the sum of `drift`.
    fn change(&self, w: &[f32], drift: &Drift) -> Vec<f32> {
        let k = self.order.len();
        let n = w.len() / k.max(1);
        let kernels = &self.kernels;
        let mut product = vec![0.0; n * k];
        let (w, all) = (MatRef::new(w, n, k), MatRef::new(&drift.sum, k, k));
        kernels.gemm_nn(w, all, MatMut::new(&mut product, n, k), false);
        let ordered: Vec<f32> = product
            .chunks_exact(k.max(1))
            .flat_map(|row| self.order.iter().map(|&column| row[column]))
            .collect();
        let mut change = product;
        change.fill(0.0);
        // Uᵀ U, some rows of U at a time: columns before the first of them are zero.
        for first in (0..k).step_by(STRIP) {
            let (rows, cols) = (STRIP.min(k - first), k - first);
            let strip: Vec<f32> = (first..first + rows)
                .flat_map(|row| self.upper[row * k + first..(row + 1) * k].iter().map(|v| *v as f32))
                .collect();
            let strip = MatRef::new(&strip, rows, cols);
            let mut part = vec![0.0; n * rows];
            let right = MatRef::with_stride(&ordered[first..], n, cols, k);
            kernels.gemm_nt(right, strip, MatMut::new(&mut part, n, rows), false);
            let to = MatMut::with_stride(&mut change[first..], n, cols, k);
            kernels.gemm_nn(MatRef::new(&part, n, rows), strip, to, true);
        }
        change
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::{GptqOptions, Hessian, gptq};
    use super::*;
    use crate::testing::values;

    /// Correlated inputs, and the same inputs with rounding error.
    fn inputs(tokens: usize, cols: usize) -> [Vec<f32>; 2] {
        let mut original = values(1, tokens * cols);
        for row in original.chunks_exact_mut(cols) {
            (1..cols).for_each(|i| row[i] = 0.5 * row[i] + 0.7 * row[i - 1]);
        }
        let noise = values(2, tokens * cols);
        let mixed = |i: usize| 0.9 * original[i] + 0.1 * original[i / cols * cols] + 0.05 * noise[i];
        let now = (0..tokens * cols).map(mixed).collect();
        [original, now]
    }

    /// Mean squared difference of `X Wᵀ` and `X̃ Qᵀ`.
    fn error([original, now]: &[Vec<f32>; 2], w: &[f32], q: &[f32], cols: usize) -> f64 {
        let dot =
            |x: &[f32], w: &[f32]| x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum::<f64>();
        let tokens = original.chunks_exact(cols).zip(now.chunks_exact(cols));
        let token_error = |(x, y): (&[f32], &[f32])| {
            let rows = w.chunks_exact(cols).zip(q.chunks_exact(cols));
            rows.map(|(w, q)| (dot(x, w) - dot(y, q)).powi(2)).sum::<f64>()
        };
        tokens.map(token_error).sum::<f64>() / (original.len() / cols) as f64
    }

    fn statistics([original, now]: &[Vec<f32>; 2], cols: usize, threads: usize) -> (Hessian, Drift) {
        let (mut hessian, mut drift) = (Hessian::new(cols).unwrap(), Drift::new(cols).unwrap());
        hessian.add(now, threads);
        // In two windows.
        let half = original.len() / cols / 2 * cols;
        let mut original = original.clone();
        let (first, second) = original.split_at_mut(half);
        drift.add(first, &now[..half], threads);
        drift.add(second, &now[half..], threads);
        (hessian, drift)
    }

    /// Without damping the full correction is the least squares solution, in any column order. Its codes err less
    /// than the codes of the uncorrected weight.
    #[test]
    fn corrected_weights_preserve_the_layers_output() {
        let (tokens, rows, cols) = (600, 10, 80);
        let (x, w) = (inputs(tokens, cols), values(3, rows * cols));
        let (hessian, drift) = statistics(&x, cols, 2);
        assert!(!drift.is_zero());
        for act_order in [false, true] {
            let options = GptqOptions { damp: 0.0, act_order, ..GptqOptions::default() };
            let factor = InverseFactor::new(&hessian, options, 1).unwrap();
            let whole = factor.corrected(&w, &drift, 1.0, 1).unwrap();
            let least = error(&x, &w, &whole, cols);
            assert!(least < 0.2 * error(&x, &w, &w, cols));
            // At the solution of a least squares problem the gradient is zero, so no step improves it.
            for (i, step) in [(3, 1e-2), (cols + 7, -1e-2), (5 * cols + 79, 1e-2)] {
                let mut other = whole.clone();
                other[i] += step;
                assert!(error(&x, &w, &other, cols) > least);
            }
            let half = factor.corrected(&w, &drift, 0.5, 1).unwrap();
            let between = half.iter().zip(&whole).zip(&w).map(|((h, a), w)| (h - (a + w) / 2.0).abs());
            assert!(between.fold(0.0, f32::max) < 1e-5);
            let scheme = "int4-g16".parse().unwrap();
            let of = |w: &[f32]| gptq(&scheme, w, &hessian, options, None, 1).unwrap().dequantize().unwrap();
            assert!(error(&x, &w, &of(&whole), cols) < 0.5 * error(&x, &w, &of(&w), cols));
        }
    }

    #[test]
    fn threads_change_nothing_and_dead_columns_stay_dead() {
        let (tokens, rows, cols) = (300, 150, 70);
        let mut x = inputs(tokens, cols);
        x[1].iter_mut().skip(5).step_by(cols).for_each(|v| *v = 0.0);
        let w = values(3, rows * cols);
        let (hessian, drift) = statistics(&x, cols, 1);
        assert_eq!(statistics(&x, cols, 3), (hessian.clone(), drift.clone()));
        let factor = InverseFactor::new(&hessian, GptqOptions::default(), 1).unwrap();
        let corrected = factor.corrected(&w, &drift, 0.5, 1).unwrap();
        assert_eq!(factor.corrected(&w, &drift, 0.5, 3).unwrap(), corrected);
        let dead = |w: &[f32]| w.iter().skip(5).step_by(cols).copied().collect::<Vec<_>>();
        assert_eq!(dead(&corrected), dead(&w));
        assert!(factor.corrected(&w, &Drift::new(cols + 1).unwrap(), 1.0, 1).is_err());
        let same = [x[1].clone(), x[1].clone()];
        assert!(statistics(&same, cols, 1).1.is_zero());
    }
}

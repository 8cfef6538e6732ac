//! Second moments of a linear layer's inputs, and the factor of their inverse that GPTQ needs.

use std::ops::Range;

use mantissa_kernels::NotPositiveDefinite;
use mantissa_kernels::device::{Cpu, Device, Factors};
use mantissa_num::stored::Map;

use super::GptqError;

/// Hessian `H = XᵀX / t` of the inputs `X[t, k]` of a linear layer. Stored as the sum and the number of tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct Hessian {
    cols: usize,
    tokens: u64,
    /// `[cols, cols]`, the upper triangle.
    sum: Vec<f32>,
}

/// Replaces `a` `[k, k]` by `M a Mᵀ`, where `M` is `maps` in order.
pub(super) fn map_both_sides(a: &mut [f32], k: usize, maps: &[Map]) {
    for _ in 0..2 {
        maps.iter().for_each(|map| map.apply(a, k));
        for i in 0..k {
            (0..i).for_each(|j| a.swap(i * k + j, j * k + i));
        }
    }
}

impl Hessian {
    /// Creates the Hessian of zero tokens, for inputs of width `cols`.
    ///
    /// # Errors
    /// [`GptqError::Memory`].
    pub fn new(cols: usize) -> Result<Self, GptqError> {
        Ok(Hessian { cols, tokens: 0, sum: zeros(cols)? })
    }

    /// Creates a Hessian from the upper triangle of `sum` (`[cols, cols]`) over `tokens` tokens.
    ///
    /// # Errors
    /// [`GptqError::Length`].
    pub fn from_sum(sum: Vec<f32>, cols: usize, tokens: u64) -> Result<Self, GptqError> {
        match cols.checked_mul(cols) {
            Some(expected) if expected == sum.len() => Ok(Hessian { cols, tokens, sum }),
            expected => {
                let expected = expected.unwrap_or(usize::MAX);
                Err(GptqError::Length { what: "Hessian", found: sum.len(), expected })
            }
        }
    }

    /// Creates the identity: independent inputs, one token.
    ///
    /// # Errors
    /// [`GptqError::Memory`].
    pub(crate) fn identity(cols: usize) -> Result<Self, GptqError> {
        let mut sum = zeros(cols)?;
        sum.iter_mut().step_by(cols + 1).for_each(|v| *v = 1.0);
        Ok(Hessian { cols, tokens: 1, sum })
    }

    /// Hessian of the inputs after `maps` in order: `M H Mᵀ`.
    ///
    /// # Errors
    /// [`GptqError::Memory`].
    pub fn mapped(&self, maps: &[Map]) -> Result<Self, GptqError> {
        let k = self.cols;
        let mut sum = zeros(k)?;
        for i in 0..k {
            for j in 0..k {
                sum[i * k + j] = self.sum[i.min(j) * k + i.max(j)];
            }
        }
        map_both_sides(&mut sum, k, maps);
        Ok(Hessian { sum, ..*self })
    }

    /// Inner products `a[i] H b[i]ᵀ` of each row `i` of `a` and `b` (`[n, k]`), in f64. Takes `n k²` multiply-adds.
    pub(crate) fn inner(&self, a: &[f32], b: &[f32]) -> Vec<f64> {
        let (k, tokens) = (self.cols.max(1), self.tokens.max(1) as f64);
        let row = |(a, b): (&[f32], &[f32])| {
            let b: Vec<f64> = b.iter().copied().map(f64::from).collect();
            let a: Vec<f64> = a.iter().copied().map(f64::from).collect();
            let one = |i: usize| {
                // Row i of the upper triangle stands for row i and column i of H.
                let right = self.sum[i * k + i + 1..(i + 1) * k].iter().zip(&a[i + 1..]).zip(&b[i + 1..]);
                let beside: f64 = right.map(|((h, x), y)| f64::from(*h) * (a[i] * y + x * b[i])).sum();
                f64::from(self.sum[i * k + i]) * a[i] * b[i] + beside
            };
            (0..k).map(one).sum::<f64>() / tokens
        };
        a.chunks_exact(k).zip(b.chunks_exact(k)).map(row).collect()
    }

    /// Memory of a Hessian of this width, in bytes.
    pub fn bytes_needed(cols: usize) -> u64 {
        4 * (cols as u64).saturating_mul(cols as u64)
    }

    /// Adds the inputs `x` (`[t, cols]`). The sum's bits depend on how calls split the inputs (except at multiples of
    /// 256 tokens), never on `threads`.
    ///
    /// # Panics
    /// If `x` is not whole rows.
    pub fn add(&mut self, x: &[f32], threads: usize) {
        self.add_rows(x, 0..self.cols, Factors::F32, threads);
    }

    /// Like [`add`](Self::add), with inputs rounded to bf16; takes two more bytes per input.
    ///
    /// # Panics
    /// As [`add`](Self::add).
    pub fn add_bf16(&mut self, x: &[f32], threads: usize) {
        self.add_rows(x, 0..self.cols, Factors::Bf16, threads);
    }

    /// Adds the inputs `x` (`[t, cols]`) to some rows of the sum, one of the [bands](Self::bands). Each has the bits that
    /// it has in the whole.
    ///
    /// # Panics
    /// As [`add`](Self::add), or if `rows` are no bands.
    pub fn add_rows(&mut self, x: &[f32], rows: Range<usize>, factors: Factors, threads: usize) {
        self.count(x);
        Cpu::new(threads).add_xtx(x, self.cols, rows, factors, &mut self.sum);
    }

    /// Divides the rows of the sum of width `cols` into at most `count` bands of about equal work: row `i` has
    /// `cols - i` products.
    pub fn bands(cols: usize, count: usize, factors: Factors) -> Vec<Range<usize>> {
        let (unit, count) = (factors.rows(), count.max(1));
        let end = |band: usize| {
            let left = 1.0 - band as f64 / count as f64;
            let row = cols as f64 * (1.0 - left.sqrt());
            if band == count { cols } else { ((row / unit as f64).round() as usize * unit).min(cols) }
        };
        let bands = (0..count).map(|band| end(band)..end(band + 1));
        bands.filter(|rows| !rows.is_empty()).collect()
    }

    /// Returns the number of tokens and the `rows` of the sum as bytes, little-endian.
    pub fn rows_to_bytes(&self, rows: Range<usize>) -> Vec<u8> {
        let rows = &self.sum[rows.start * self.cols..rows.end * self.cols];
        let values = rows.iter().flat_map(|value| value.to_bits().to_le_bytes());
        self.tokens.to_le_bytes().into_iter().chain(values).collect()
    }

    /// Takes the number of tokens and the `rows` of the sum from what [`rows_to_bytes`](Self::rows_to_bytes) returned for
    /// them; false if the bytes are not that.
    pub fn put_rows(&mut self, rows: Range<usize>, bytes: &[u8]) -> bool {
        let cols = self.cols;
        let Some(own) = self.sum.get_mut(rows.start * cols..rows.end * cols) else { return false };
        let Some((tokens, values)) = bytes.split_first_chunk::<8>() else { return false };
        if values.len() != 4 * own.len() {
            return false;
        }
        self.tokens = u64::from_le_bytes(*tokens);
        let values = values.as_chunks::<4>().0.iter().map(|bits| f32::from_bits(u32::from_le_bytes(*bits)));
        own.iter_mut().zip(values).for_each(|(own, value)| *own = value);
        true
    }

    /// Counts the tokens of `x`.
    fn count(&mut self, x: &[f32]) {
        let tokens = x.len() / self.cols.max(1);
        assert!(tokens * self.cols == x.len(), "{} values are not rows of {}", x.len(), self.cols);
        self.tokens += tokens as u64;
    }

    /// Width of the inputs.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Tokens seen.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Sum `XᵀX` `[cols, cols]` with both triangles, computed in place.
    pub(crate) fn into_symmetric(mut self) -> Vec<f32> {
        let k = self.cols;
        for i in 1..k {
            for j in 0..i {
                self.sum[i * k + j] = self.sum[j * k + i];
            }
        }
        self.sum
    }

    /// H `[cols, cols]`, both triangles.
    pub(crate) fn to_dense(&self) -> Vec<f32> {
        let (k, tokens) = (self.cols, self.tokens.max(1) as f64);
        let element = |at: usize| {
            let (i, j) = (at / k, at % k);
            (f64::from(self.sum[i.min(j) * k + i.max(j)]) / tokens) as f32
        };
        (0..k * k).map(element).collect()
    }

    /// Loss `tr((a - b) H (a - b)ᵀ)` of `a` and `b` `[n, k]`, in f64: the mean over tokens of the squared error of
    /// the layer's output. Takes `n k²` multiply-adds.
    pub fn loss(&self, a: &[f32], b: &[f32]) -> f64 {
        let k = self.cols.max(1);
        let rows = a.chunks_exact(k).zip(b.chunks_exact(k));
        let losses = rows.map(|(a, b)| {
            let d: Vec<f64> = a.iter().zip(b).map(|(a, b)| f64::from(*a) - f64::from(*b)).collect();
            (0..k).map(|i| d[i] * self.upper_row_product(i, &d)).sum::<f64>()
        });
        losses.sum::<f64>() / self.tokens.max(1) as f64
    }

    /// `H[i, i] d[i] + 2 sum_{j > i} H[i, j] d[j]`, not divided by the tokens.
    fn upper_row_product(&self, i: usize, d: &[f64]) -> f64 {
        let row = self.sum[i * self.cols + i..(i + 1) * self.cols].iter().zip(&d[i..]);
        let twice: f64 = row.skip(1).map(|(h, d)| f64::from(*h) * d).sum();
        f64::from(self.sum[i * self.cols + i]) * d[i] + 2.0 * twice
    }

    /// Diagonal of H.
    ///
    /// # Errors
    /// [`GptqError::NoTokens`] and [`GptqError::Value`].
    pub(crate) fn diagonal(&self) -> Result<Vec<f64>, GptqError> {
        if self.tokens == 0 {
            return Err(GptqError::NoTokens);
        }
        for (column, row) in self.sum.chunks_exact(self.cols.max(1)).enumerate() {
            let bad = row[column..].iter().find(|v| !v.is_finite());
            if let Some(&value) = bad.or(row.get(column).filter(|v| **v < 0.0)) {
                return Err(GptqError::Value { column, value });
            }
        }
        let diagonal = (0..self.cols).map(|i| f64::from(self.sum[i * self.cols + i]) / self.tokens as f64);
        Ok(diagonal.collect())
    }

    /// Factor `U[k, k]`, upper triangular with zeros below, with `(H + λI)⁻¹ = Uᵀ U` for columns in `order`. Dead
    /// columns have a diagonal of 1.
    pub(super) fn inverse_factor(
        &self,
        device: &impl Device,
        order: &[usize],
        lambda: f64,
    ) -> Result<Result<Vec<f64>, NotPositiveDefinite>, GptqError> {
        let k = self.cols;
        let mut a = zeros(k)?;
        // The factorization reads the lower triangle of the reversed matrix.
        for (i, row) in a.chunks_exact_mut(k.max(1)).enumerate() {
            let column = order[k - 1 - i];
            for (j, out) in row[..=i].iter_mut().enumerate() {
                *out = self.element(column, order[k - 1 - j]);
            }
            row[i] = if row[i] > 0.0 { row[i] + lambda } else { 1.0 };
        }
        if let Err(error) = device.cholesky(&mut a, k) {
            return Ok(Err(error));
        }
        device.invert_lower(&mut a, k);
        // Reversing both axes of a row-major square matrix reverses its elements.
        a.reverse();
        Ok(Ok(a))
    }

    fn element(&self, i: usize, j: usize) -> f64 {
        f64::from(self.sum[i.min(j) * self.cols + i.max(j)]) / self.tokens as f64
    }
}

/// A `[k, k]` matrix of zeros.
pub(super) fn zeros<T: Clone + Default>(k: usize) -> Result<Vec<T>, GptqError> {
    let bytes = (k as u64).saturating_mul(k as u64).saturating_mul(size_of::<T>() as u64);
    let memory = || GptqError::Memory { bytes };
    let len = k.checked_mul(k).ok_or_else(memory)?;
    let mut values = Vec::new();
    values.try_reserve_exact(len).map_err(|_| memory())?;
    values.resize(len, T::default());
    Ok(values)
}

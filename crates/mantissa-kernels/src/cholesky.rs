//! Cholesky factorization and triangular inverse in f64, blocked so that nearly all of the work is
//! [`Kernels::gemm_sub_f64`].
//!
//! Every element is one chain of fused multiply-adds in ascending order, as in the textbook loops, and blocks only
//! split the chains. So the bits depend on neither blocks nor threads nor the level.

use crate::{Kernels, for_each};
use std::fmt;

/// Columns factored, and rows inverted, before a product updates the rest.
const BLOCK: usize = 128;

/// The same, within a block.
const INNER: usize = 16;

/// A matrix is not positive definite: a pivot of its factorization is not a positive number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NotPositiveDefinite {
    /// Row of the pivot.
    pub pivot: usize,
    /// The pivot.
    pub value: f64,
}

impl fmt::Display for NotPositiveDefinite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pivot, value } = self;
        write!(
            f,
            "pivot {pivot}: expected a positive value, got {value:e}: the matrix is not positive definite"
        )
    }
}

impl std::error::Error for NotPositiveDefinite {}

impl Kernels {
    /// Replaces the symmetric row-major `a` `[n, n]`, of which only the lower triangle is read, by its Cholesky
    /// factor: `A = L Lᵀ`, `L` lower triangular with a positive diagonal and zeros above it. Takes `n³ / 3`
    /// multiply-adds and `BLOCK n` values of scratch.
    ///
    /// # Errors
    /// [`NotPositiveDefinite`] with the first pivot that is not a positive finite number; `a` is then undefined.
    ///
    /// # Panics
    /// If `a` is not `[n, n]`.
    pub fn cholesky_f64(&self, a: &mut [f64], n: usize, threads: usize) -> Result<(), NotPositiveDefinite> {
        check("cholesky_f64", a.len(), n);
        let mut panel = vec![0.0; BLOCK.min(n) * n];
        for first in (0..n).step_by(BLOCK) {
            let width = BLOCK.min(n - first);
            let (block, below) = a[first * n..].split_at_mut(width * n);
            factor_block(block, n, first, width)?;
            let factor = transposed(block, n, first, width, width);
            for_each(threads, below.chunks_mut(rows_per_piece(n) * n), |rows| {
                self.solve_rows(rows, n, first, width, &factor);
            });
            let rest = n - first - width;
            let panel = &mut panel[..width * rest];
            transpose(below, n, first, panel, rest);
            let panel = &*panel;
            for_each(threads, below.chunks_mut(rows_per_piece(n) * n).enumerate(), |(i, rows)| {
                let (top, count) = (i * rows_per_piece(n), rows.len() / n);
                let left = transposed_back(panel, rest, top, count, width);
                // Up to the diagonal block of these rows; the other triangle is right of it.
                let shape = (count, top + count, width);
                self.gemm_sub_f64(shape, &left, width, panel, rest, &mut rows[first + width..], n);
            });
        }
        (0..n).for_each(|i| a[i * n + i + 1..(i + 1) * n].fill(0.0));
        Ok(())
    }

    /// Replaces the lower triangular row-major `l` `[n, n]` (zeros above the diagonal) by its inverse. Takes
    /// `n³ / 6` multiply-adds and `BLOCK n` values of scratch.
    ///
    /// # Panics
    /// If `l` is not `[n, n]`.
    pub fn invert_lower_f64(&self, l: &mut [f64], n: usize, threads: usize) {
        check("invert_lower_f64", l.len(), n);
        let mut left = vec![0.0; BLOCK.min(n) * n];
        for first in (0..n).step_by(BLOCK) {
            let width = BLOCK.min(n - first);
            let (done, rest) = l.split_at_mut(first * n);
            let (done, block) = (&*done, &mut rest[..width * n]);
            left[..width * n].copy_from_slice(block);
            identity_rows(block, n, first);
            let grain = width.div_ceil(threads.max(1)).next_multiple_of(8);
            let pieces = block.chunks_mut(grain * n).zip(left.chunks(grain * n));
            for_each(threads, pieces, |(rows, left)| self.sub_products(rows, left, done, n));
            self.invert_block(block, &left, n, first, width);
        }
    }

    /// `rows[., first..] L⁻ᵀ` for rows below a factored block: `row[j] = (row[j] - sum_p row[p] L[j, p]) / L[j,
    /// j]`. `factor` is `Lᵀ`, `[width, width]`.
    fn solve_rows(&self, rows: &mut [f64], n: usize, first: usize, width: usize, factor: &[f64]) {
        let count = rows.len() / n;
        let mut solved = vec![0.0; count * INNER];
        for start in (0..width).step_by(INNER) {
            let end = width.min(start + INNER);
            for (row, solved) in rows.chunks_exact_mut(n).zip(solved.chunks_exact_mut(INNER)) {
                let row = &mut row[first + start..first + end];
                for p in 0..end - start {
                    let factor = &factor[(start + p) * width + start..][..end - start];
                    row[p] /= factor[p];
                    let (value, rest) = (row[p], &mut row[p + 1..]);
                    self.sub_axpy_f64(value, &factor[p + 1..], rest);
                }
                solved[..end - start].copy_from_slice(row);
            }
            let shape = (count, width - end, end - start);
            // The last piece has nothing to its right.
            if end < width {
                let factor = &factor[start * width + end..];
                self.gemm_sub_f64(shape, &solved, INNER, factor, width, &mut rows[first + end..], n);
            }
        }
    }

    /// Subtracts `L[rows, ..] X` for the finished rows of X, where row p ends at column p.
    fn sub_products(&self, rows: &mut [f64], left: &[f64], done: &[f64], n: usize) {
        let first = done.len() / n;
        for p in (0..first).step_by(BLOCK) {
            let depth = BLOCK.min(first - p);
            let shape = (rows.len() / n, p + depth, depth);
            self.gemm_sub_f64(shape, &left[p..], n, &done[p * n..], n, rows, n);
        }
    }

    /// Finishes the rows of a block, after the products with all rows above were subtracted.
    fn invert_block(&self, block: &mut [f64], left: &[f64], n: usize, first: usize, width: usize) {
        for start in (0..width).step_by(INNER) {
            let end = width.min(start + INNER);
            let (above, rows) = block.split_at_mut(start * n);
            let rows = &mut rows[..(end - start) * n];
            let shape = (end - start, first + start, start);
            self.gemm_sub_f64(shape, &left[start * n + first..], n, above, n, rows, n);
            for i in start..end {
                let (above, row) = rows.split_at_mut((i - start) * n);
                let (left, row) = (&left[i * n..][..n], &mut row[..first + i + 1]);
                for (p, above) in above.chunks_exact(n).enumerate() {
                    let len = first + start + p + 1;
                    self.sub_axpy_f64(left[first + start + p], &above[..len], &mut row[..len]);
                }
                let pivot = left[first + i];
                row.iter_mut().for_each(|x| *x /= pivot);
            }
        }
    }
}

/// Rows per piece of work: enough to amortize packing the other operand.
fn rows_per_piece(n: usize) -> usize {
    if n < 4 * BLOCK { 32 } else { BLOCK }
}

/// Factors the diagonal block at column `first`, row by row.
fn factor_block(block: &mut [f64], n: usize, first: usize, width: usize) -> Result<(), NotPositiveDefinite> {
    for i in 0..width {
        let (above, row) = block.split_at_mut(i * n);
        let row = &mut row[first..][..i + 1];
        for j in 0..i {
            let factor = &above[j * n + first..][..j + 1];
            row[j] = chain(row[j], &row[..j], factor) / factor[j];
        }
        let value = chain(row[i], &row[..i], &row[..i]);
        if !(value > 0.0 && value.is_finite()) {
            return Err(NotPositiveDefinite { pivot: first + i, value });
        }
        row[i] = value.sqrt();
    }
    Ok(())
}

fn chain(start: f64, a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).fold(start, |sum, (a, b)| (-a).mul_add(*b, sum))
}

/// Columns `first..` of the rows, as rows of `width`.
fn transposed(rows: &[f64], n: usize, first: usize, count: usize, width: usize) -> Vec<f64> {
    let mut out = vec![0.0; width * count];
    transpose(&rows[..count * n], n, first, &mut out, count);
    out
}

/// `out[p, i] = rows[i, first + p]` for the `count` rows.
fn transpose(rows: &[f64], n: usize, first: usize, out: &mut [f64], count: usize) {
    // Several columns at a time, so that each cache line is used completely.
    for (group, out) in out.chunks_mut(INNER * count.max(1)).enumerate() {
        let at = first + group * INNER;
        for (i, row) in rows.chunks_exact(n).enumerate() {
            for (p, out) in out.chunks_exact_mut(count).enumerate() {
                out[i] = row[at + p];
            }
        }
    }
}

/// Columns `top..top + count` of `panel` `[width, rest]`, as rows of `width`.
fn transposed_back(panel: &[f64], rest: usize, top: usize, count: usize, width: usize) -> Vec<f64> {
    let mut out = vec![0.0; count * width];
    transpose(panel, rest, top, &mut out, width);
    out
}

fn identity_rows(rows: &mut [f64], n: usize, first: usize) {
    rows.fill(0.0);
    for (i, row) in rows.chunks_exact_mut(n).enumerate() {
        row[first + i] = 1.0;
    }
}

fn check(kernel: &str, len: usize, n: usize) {
    assert!(n.checked_mul(n) == Some(len), "{kernel}: {len} values are not [{n}, {n}]");
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::Isa;

    /// `B Bᵀ / n` plus a diagonal.
    fn positive_definite(n: usize, diagonal: f64) -> Vec<f64> {
        let b: Vec<f64> = (0..n * n).map(|i| ((i * i % 1009) as f64 * 0.71).sin()).collect();
        let dot = |i: usize, j: usize| -> f64 { (0..n).map(|p| b[i * n + p] * b[j * n + p]).sum() };
        let element = |e: usize| dot(e / n, e % n) / n as f64 + if e / n == e % n { diagonal } else { 0.0 };
        (0..n * n).map(element).collect()
    }

    fn textbook_cholesky(a: &[f64], n: usize) -> Vec<f64> {
        let mut l = vec![0.0; n * n];
        for i in 0..n {
            for j in 0..=i {
                let sum = chain(a[i * n + j], &l[i * n..][..j], &l[j * n..][..j]);
                l[i * n + j] = if i == j { sum.sqrt() } else { sum / l[j * n + j] };
            }
        }
        l
    }

    fn textbook_inverse(l: &[f64], n: usize) -> Vec<f64> {
        let mut x = vec![0.0; n * n];
        for j in 0..n {
            for i in j..n {
                let start = if i == j { 1.0 } else { 0.0 };
                let sum = (j..i).fold(start, |sum, p| (-l[i * n + p]).mul_add(x[p * n + j], sum));
                x[i * n + j] = sum / l[i * n + i];
            }
        }
        x
    }

    const SIZES: [usize; 8] = [0, 1, 7, 16, 33, 128, 129, 300];

    #[test]
    fn bits_match_the_textbook_at_every_level_and_thread_count() {
        for n in SIZES {
            let a = positive_definite(n, 0.1);
            let factor = textbook_cholesky(&a, n);
            let inverse = textbook_inverse(&factor, n);
            for isa in Isa::available() {
                let kernels = Kernels::new(isa).unwrap();
                for threads in [1, 2, 3] {
                    let mut work = a.clone();
                    // Only the lower triangle may be read.
                    (0..n).for_each(|i| work[i * n + i + 1..(i + 1) * n].fill(f64::NAN));
                    kernels.cholesky_f64(&mut work, n, threads).unwrap();
                    assert!(work == factor, "factor of {n} at {isa}, {threads} threads");
                    kernels.invert_lower_f64(&mut work, n, threads);
                    assert!(work == inverse, "inverse of {n} at {isa}, {threads} threads");
                }
            }
        }
    }

    #[test]
    fn the_inverse_is_one() {
        let n = 200;
        let a = positive_definite(n, 0.1);
        let mut x = a.clone();
        crate::kernels().cholesky_f64(&mut x, n, 2).unwrap();
        crate::kernels().invert_lower_f64(&mut x, n, 2);
        // X A Xᵀ = I.
        let xa = |i: usize, j: usize| -> f64 { (0..=i).map(|p| x[i * n + p] * a[p * n + j]).sum() };
        for i in (0..n).step_by(17) {
            let row: Vec<f64> = (0..n).map(|j| xa(i, j)).collect();
            for j in 0..n {
                let one: f64 = (0..=j).map(|p| row[p] * x[j * n + p]).sum();
                assert!((one - f64::from(u8::from(i == j))).abs() < 1e-10, "({i}, {j}): {one}");
            }
        }
    }

    #[test]
    fn the_first_pivot_that_is_not_positive_is_named() {
        for (n, bad) in [(3, 0), (150, 140), (300, 299)] {
            for value in [-1.0, f64::NAN, f64::INFINITY] {
                let mut a = positive_definite(n, 0.1);
                a[bad * n + bad] = value;
                let error = crate::kernels().cholesky_f64(&mut a, n, 2).unwrap_err();
                assert_eq!(error.pivot, bad, "{error}");
            }
        }
        let error = crate::kernels().cholesky_f64(&mut [1.0, 0.0, 1.0, 1.0], 2, 1).unwrap_err();
        assert_eq!(error, NotPositiveDefinite { pivot: 1, value: 0.0 });
    }
}

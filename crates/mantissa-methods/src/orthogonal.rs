//! Learned orthogonal matrices and their update steps.
//!
//! A step along a skew-symmetric `A` is the Cayley transform `M ← (1 - A/2)⁻¹ (1 + A/2) M`, which stays orthogonal
//! for any step length. It is the retraction of Li, Li & Todorovic 2020, "Efficient Riemannian Optimization on the
//! Stiefel Manifold via the Cayley Transform" (arXiv:2002.01113), section 3.2, which SpinQuant uses. It is solved
//! exactly, in f64, in a fixed order of operations.

use mantissa_kernels::{MatMut, MatRef, kernels};
use mantissa_num::Hadamard;

/// Vectors multiplied at a time.
const ROWS: usize = 512;

/// Largest allowed entry of `M Mᵀ - 1` for a matrix read from a file.
const MOST_ERROR: f32 = 1e-4;

/// An orthogonal matrix `M`.
#[derive(Clone, Debug, PartialEq)]
pub struct Orthogonal {
    n: usize,
    /// `[n, n]`, at the precision of learning.
    exact: Vec<f64>,
    /// The same matrix in f32, as it is multiplied and stored.
    values: Vec<f32>,
}

impl Orthogonal {
    fn new(n: usize, exact: Vec<f64>) -> Self {
        let values = exact.iter().map(|v| *v as f32).collect();
        Orthogonal { n, exact, values }
    }

    /// Block-diagonal matrix of `n` rows with `hadamard` as each block; `n` must be a multiple of its order.
    pub fn of_hadamard(hadamard: &Hadamard, n: usize) -> Self {
        // Each row is the image of a unit vector, which is a column of M.
        let mut columns = vec![0.0; n * n];
        columns.iter_mut().step_by(n + 1).for_each(|v| *v = 1.0);
        hadamard.forward(&mut columns);
        Self::new(n, mantissa_num::pack::transpose(&columns, n, n))
    }

    /// Length of the vectors.
    pub fn order(&self) -> usize {
        self.n
    }

    /// Multiplies every vector of `x` by `M`, in place.
    pub fn forward(&self, x: &mut [f32]) {
        let n = self.n;
        let mut product = vec![0.0; ROWS.min(x.len() / n) * n];
        for x in x.chunks_mut(ROWS * n) {
            let (rows, product) = (x.len() / n, &mut product[..x.len()]);
            let matrix = MatRef::new(&self.values, n, n);
            kernels().gemm_nt(MatRef::new(x, rows, n), matrix, MatMut::new(product, rows, n), false);
            x.copy_from_slice(product);
        }
    }

    /// Takes one step along the skew-symmetric `a` (`[n, n]`).
    pub fn turned(&self, a: &[f64]) -> Self {
        let n = self.n;
        let (mut left, mut right) = (a.to_vec(), self.exact.clone());
        for (row, to) in a.chunks_exact(n).zip(right.chunks_exact_mut(n)) {
            for (factor, from) in row.iter().zip(self.exact.chunks_exact(n)) {
                to.iter_mut().zip(from).for_each(|(to, from)| *to += factor / 2.0 * from);
            }
        }
        left.iter_mut().for_each(|v| *v /= -2.0);
        left.iter_mut().step_by(n + 1).for_each(|v| *v += 1.0);
        solve(&mut left, &mut right, n);
        Self::new(n, right)
    }

    /// Largest absolute entry of `M Mᵀ - 1`, for the f32 matrix.
    pub fn error(&self) -> f32 {
        let n = self.n;
        let mut product = self.values.clone();
        self.forward(&mut product);
        let unit = |i: usize| if i.is_multiple_of(n + 1) { 1.0 } else { 0.0 };
        product.iter().enumerate().fold(0.0, |most, (i, v)| most.max((v - unit(i)).abs()))
    }

    /// Entries row by row, as hexadecimal digits of their f32 bits.
    pub fn digits(&self) -> String {
        self.values.iter().map(|v| format!("{:08x}", v.to_bits())).collect()
    }

    /// Parses the matrix of `n` rows from [`digits`](Self::digits); `None` if the digits are invalid or the matrix is
    /// not orthogonal.
    pub fn from_digits(digits: &str, n: usize) -> Option<Self> {
        if n == 0 || digits.len() != n.checked_mul(n)?.checked_mul(8)? {
            return None;
        }
        let entry = |chunk: &[u8]| {
            let bits = u32::from_str_radix(std::str::from_utf8(chunk).ok()?, 16).ok()?;
            Some(f64::from(f32::from_bits(bits))).filter(|v| v.abs() <= 2.0)
        };
        let exact = digits.as_bytes().chunks(8).map(entry).collect::<Option<_>>()?;
        Some(Self::new(n, exact)).filter(|matrix| matrix.error() <= MOST_ERROR)
    }
}

/// Solves `a x = b` (`[n, n]` each) in place of `b`, by elimination without pivoting. That is stable because the
/// symmetric part of `a` is 1.
fn solve(a: &mut [f64], b: &mut [f64], n: usize) {
    for k in 0..n {
        let (above, below) = a.split_at_mut((k + 1) * n);
        let (solved, rest) = b.split_at_mut((k + 1) * n);
        let (pivots, known) = (&above[k * n + k..], &solved[k * n..]);
        for (row, right) in below.chunks_exact_mut(n).zip(rest.chunks_exact_mut(n)) {
            let factor = row[k] / pivots[0];
            row[k..].iter_mut().zip(pivots).for_each(|(v, pivot)| *v -= factor * pivot);
            right.iter_mut().zip(known).for_each(|(v, known)| *v -= factor * known);
        }
    }
    for k in (0..n).rev() {
        let (rest, solved) = b.split_at_mut((k + 1) * n);
        let (row, right) = (&a[k * n..(k + 1) * n], &mut rest[k * n..]);
        for (factor, known) in row[k + 1..].iter().zip(solved.chunks_exact(n)) {
            right.iter_mut().zip(known).for_each(|(v, known)| *v -= factor * known);
        }
        right.iter_mut().for_each(|v| *v /= row[k]);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use mantissa_num::round::random_u32;

    use super::*;

    fn skew(n: usize, seed: u64) -> Vec<f64> {
        let word =
            |i: usize, j: usize| f64::from(random_u32(seed, (i * n + j) as u64)) / f64::from(u32::MAX) - 0.5;
        let entry = |i: usize, j: usize| word(i, j) - word(j, i);
        (0..n * n).map(|at| entry(at / n, at % n)).collect()
    }

    #[test]
    fn every_step_is_orthogonal_however_long() {
        let mut matrix = Orthogonal::of_hadamard(&Hadamard::new(32).unwrap().randomized(3), 64);
        assert!(matrix.error() <= 1e-6);
        for step in 0..200 {
            let length = if step % 50 == 49 { 30.0 } else { 0.3 };
            let a: Vec<f64> = skew(64, step).iter().map(|v| v * length).collect();
            let next = matrix.turned(&a);
            assert!(next.error() <= 1e-6, "step {step}: {:e}", next.error());
            assert_ne!(next, matrix);
            matrix = next;
        }
    }

    #[test]
    fn a_small_step_is_the_matrix_and_the_step_times_it() {
        let matrix = Orthogonal::of_hadamard(&Hadamard::new(8).unwrap().randomized(5), 8);
        let a: Vec<f64> = skew(8, 1).iter().map(|v| v * 1e-4).collect();
        let next = matrix.turned(&a);
        for i in 0..64 {
            let (row, column) = (i / 8, i % 8);
            let moved: f64 = (0..8).map(|k| a[row * 8 + k] * matrix.exact[k * 8 + column]).sum();
            assert!((next.exact[i] - matrix.exact[i] - moved).abs() < 1e-7);
        }
    }

    #[test]
    fn it_multiplies_as_the_hadamard_that_it_is_made_of() {
        let hadamard = Hadamard::new(16).unwrap().randomized(9);
        let matrix = Orthogonal::of_hadamard(&hadamard, 48);
        let x: Vec<f32> = (0..48 * 1100).map(|i| (i as f32 * 0.37).sin()).collect();
        let (mut found, mut expected) = (x.clone(), x);
        matrix.forward(&mut found);
        hadamard.forward(&mut expected);
        assert!(found.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-5));
    }

    #[test]
    fn digits_are_read_to_the_bit_and_others_refused() {
        let matrix = Orthogonal::of_hadamard(&Hadamard::new(4).unwrap(), 4).turned(&skew(4, 2));
        let digits = matrix.digits();
        let read = Orthogonal::from_digits(&digits, 4).unwrap();
        assert_eq!(read.values, matrix.values);
        for (other, n) in [
            (digits[8..].to_owned(), 4),
            (digits.clone(), 2),
            (digits.replacen(&digits[..8], "3f000000", 1), 4),
            (digits.replacen(&digits[..8], "7fc00000", 1), 4),
            (digits.replacen(&digits[..2], "zz", 1), 4),
            (String::new(), 0),
        ] {
            assert!(Orthogonal::from_digits(&other, n).is_none(), "{other}");
        }
    }
}

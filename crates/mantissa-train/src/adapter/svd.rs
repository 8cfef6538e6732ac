//! Leading singular vectors of a matrix, by subspace iteration in f64 (Halko, Martinsson & Tropp 2011,
//! arXiv:0909.4061, algorithm 4.4).
//!
//! With `R ≈ U Σ Vᵀ`: start with random columns `Y [cols, k]`, iterate `Y ← orth(Rᵀ orth(R Y))`, then rotate by the
//! eigenvectors of `(R Y)ᵀ (R Y)` (cyclic Jacobi). Random numbers are counter-based, so the result depends only on
//! matrix, rank and seed.

use mantissa_num::round::random_u32;

/// Columns beyond the rank; they speed up convergence.
const EXTRA: usize = 8;
/// Iterations. The spectra of rounding errors are flat: more change the error by less than a percent.
const ITERATIONS: usize = 6;
/// Sweeps of Jacobi's method; it converges quadratically.
const SWEEPS: usize = 12;

/// Returns `U Σ^½` `[rows, rank]` and `Σ^½ Vᵀ` `[rank, cols]` of the leading `rank` singular values of `r`
/// `[rows, cols]`: their product is the best approximation of that rank, up to convergence. Factors beyond the
/// smaller side of `r` are 0.
pub(crate) fn halves(
    r: &[f32],
    (rows, cols): (usize, usize),
    rank: usize,
    seed: u64,
) -> (Vec<f32>, Vec<f32>) {
    let k = (rank + EXTRA).min(rows).min(cols);
    // Columns of Y and Z are stored as rows.
    let mut y: Vec<Vec<f64>> =
        (0..k).map(|i| (0..cols).map(|j| uniform(seed, i * cols + j)).collect()).collect();
    orthonormalize(&mut y);
    let mut z = Vec::new();
    for i in 0..=ITERATIONS {
        z = times(r, cols, &y);
        if i < ITERATIONS {
            orthonormalize(&mut z);
            y = transposed_times(r, (rows, cols), &z);
            orthonormalize(&mut y);
        }
    }
    let gram: Vec<Vec<f64>> = z.iter().map(|a| z.iter().map(|b| dot(a, b)).collect()).collect();
    let (values, vectors) = eigen(gram);
    let mut order: Vec<usize> = (0..k).collect();
    order.sort_by(|&a, &b| values[b].total_cmp(&values[a]));
    let (mut left, mut right) = (vec![0.0; rows * rank], vec![0.0; rank * cols]);
    for (i, &e) in order.iter().take(rank).enumerate() {
        let sigma = values[e].max(0.0).sqrt();
        if sigma == 0.0 {
            continue;
        }
        let root = sigma.sqrt();
        for row in 0..rows {
            let u: f64 = (0..k).map(|j| z[j][row] * vectors[j][e]).sum();
            left[row * rank + i] = (u / sigma * root) as f32;
        }
        for col in 0..cols {
            let v: f64 = (0..k).map(|j| y[j][col] * vectors[j][e]).sum();
            right[i * cols + col] = (v * root) as f32;
        }
    }
    (left, right)
}

/// Uniform value in [-1, 1).
fn uniform(seed: u64, index: usize) -> f64 {
    f64::from(random_u32(seed, index as u64)) / 2_147_483_648.0 - 1.0
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Orthonormalizes vectors by modified Gram-Schmidt, twice. A vector that depends on the others becomes 0.
fn orthonormalize(vectors: &mut [Vec<f64>]) {
    for i in 0..vectors.len() {
        let (before, rest) = vectors.split_at_mut(i);
        let Some(own) = rest.first_mut() else { return };
        let first = dot(own, own).sqrt();
        for _ in 0..2 {
            for other in before.iter() {
                let share = dot(own, other);
                own.iter_mut().zip(other).for_each(|(v, o)| *v -= share * o);
            }
        }
        let norm = dot(own, own).sqrt();
        let factor = if norm > 1e-12 * first { 1.0 / norm } else { 0.0 };
        own.iter_mut().for_each(|v| *v *= factor);
    }
}

/// Computes `R yᵢ` for every vector.
fn times(r: &[f32], cols: usize, y: &[Vec<f64>]) -> Vec<Vec<f64>> {
    let wide: Vec<Vec<f64>> = vec![Vec::with_capacity(r.len() / cols.max(1)); y.len()];
    let mut out = wide;
    let mut line = vec![0.0; cols];
    for row in r.chunks_exact(cols) {
        line.iter_mut().zip(row).for_each(|(to, v)| *to = f64::from(*v));
        y.iter().zip(&mut out).for_each(|(y, out)| out.push(lanes(&line, y)));
    }
    out
}

/// Dot product in eight lanes, for speed.
fn lanes(a: &[f64], b: &[f64]) -> f64 {
    let (a8, ar) = a.as_chunks::<8>();
    let (b8, br) = b.as_chunks::<8>();
    let mut sums = [0.0; 8];
    for (a, b) in a8.iter().zip(b8) {
        sums.iter_mut().zip(a.iter().zip(b)).for_each(|(sum, (a, b))| *sum += a * b);
    }
    sums.iter().sum::<f64>() + dot(ar, br)
}

/// Computes `Rᵀ zᵢ` for every vector.
fn transposed_times(r: &[f32], (rows, cols): (usize, usize), z: &[Vec<f64>]) -> Vec<Vec<f64>> {
    let mut out = vec![vec![0.0; cols]; z.len()];
    let mut line = vec![0.0; cols];
    for (i, row) in r.chunks_exact(cols).take(rows).enumerate() {
        line.iter_mut().zip(row).for_each(|(to, v)| *to = f64::from(*v));
        for (z, out) in z.iter().zip(&mut out) {
            let factor = z[i];
            out.iter_mut().zip(&line).for_each(|(out, v)| *out += factor * v);
        }
    }
    out
}

/// Returns eigenvalues and eigenvectors (columns) of a symmetric matrix by cyclic Jacobi rotations (Golub & Van Loan,
/// "Matrix Computations", algorithm 8.5.3).
fn eigen(mut a: Vec<Vec<f64>>) -> (Vec<f64>, Vec<Vec<f64>>) {
    let n = a.len();
    let mut v: Vec<Vec<f64>> =
        (0..n).map(|i| (0..n).map(|j| f64::from(u8::from(i == j))).collect()).collect();
    for _ in 0..SWEEPS {
        for p in 0..n {
            for q in p + 1..n {
                if a[p][q] == 0.0 {
                    continue;
                }
                let tau = (a[q][q] - a[p][p]) / (2.0 * a[p][q]);
                let t = tau.signum() / (tau.abs() + (1.0 + tau * tau).sqrt());
                let c = 1.0 / (1.0 + t * t).sqrt();
                let s = t * c;
                let turn = |x: f64, y: f64| (c * x - s * y, s * x + c * y);
                for row in a.iter_mut().chain(&mut v) {
                    (row[p], row[q]) = turn(row[p], row[q]);
                }
                for i in 0..n {
                    (a[p][i], a[q][i]) = turn(a[p][i], a[q][i]);
                }
            }
        }
    }
    ((0..n).map(|i| a[i][i]).collect(), v)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(r: &[f32], (rows, cols): (usize, usize), rank: usize) -> f64 {
        let (left, right) = halves(r, (rows, cols), rank, 1);
        let at = |i: usize| {
            let product = (0..rank)
                .map(|k| f64::from(left[i / cols * rank + k]) * f64::from(right[k * cols + i % cols]));
            (f64::from(r[i]) - product.sum::<f64>()).powi(2)
        };
        (0..rows * cols).map(at).sum::<f64>().sqrt()
    }

    /// A matrix with known singular values: the error of rank k is the root of the sum of the other squares.
    #[test]
    fn low_rank_approximation_is_the_best_one() {
        let (rows, cols, n) = (60, 40, 6);
        let wave = |len: usize, k: usize, phase: f64| -> Vec<f64> {
            (0..len).map(|i| (i as f64 * (0.31 + 0.17 * k as f64) + phase).sin()).collect()
        };
        let mut u: Vec<_> = (0..n).map(|k| wave(rows, k, 0.0)).collect();
        let mut v: Vec<_> = (0..n).map(|k| wave(cols, k, 1.0)).collect();
        orthonormalize(&mut u);
        orthonormalize(&mut v);
        let sigma = [9.0, 5.0, 3.0, 2.0, 1.0, 0.5];
        let at = |i: usize, j: usize| (0..n).map(|k| sigma[k] * u[k][i] * v[k][j]).sum::<f64>() as f32;
        let r: Vec<f32> = (0..rows * cols).map(|i| at(i / cols, i % cols)).collect();
        for rank in 1..=n {
            let best = sigma[rank..].iter().map(|s| s * s).sum::<f64>().sqrt();
            let found = error(&r, (rows, cols), rank);
            assert!((found - best).abs() < 1e-4 * (1.0 + best), "rank {rank}: {found} for {best}");
        }
        assert!(error(&r, (rows, cols), 50) < 1e-4, "a rank above both sides");
        assert_eq!(halves(&r, (rows, cols), 3, 7), halves(&r, (rows, cols), 3, 7));
    }

    #[test]
    fn a_matrix_of_zeros_has_no_factors() {
        let (left, right) = halves(&[0.0; 12], (3, 4), 2, 1);
        assert!(left.iter().chain(&right).all(|v| *v == 0.0));
    }
}

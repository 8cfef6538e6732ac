//! Linear algebra of matrix optimizers. Products are the kernels' GEMMs on fixed parts of the rows, and factorizations
//! run on one thread in f64: results do not depend on the number of threads.

use mantissa_kernels::{MatMut, MatRef, for_each, kernels};
use mantissa_model::Role;

use crate::param_table::ParamInfo;

/// Rows of a product that one thread computes at a time.
pub(super) const ROWS: usize = 96;

/// Returns number, rows and columns of the matrices of a parameter: tensors of experts hold several.
pub(super) fn shape(param: &ParamInfo) -> Option<(usize, usize, usize)> {
    let (count, [rows, cols]) = param.tensor.shape.split_last_chunk::<2>()?;
    Some((count.iter().product(), *rows, *cols))
}

/// Returns the matrices of a parameter if it is the weight of a linear layer other than the head.
pub(super) fn shape_of_linear(param: &ParamInfo) -> Option<(usize, usize, usize)> {
    shape(param).filter(|_| matches!(param.tensor.role, Role::Linear { .. }))
}

/// Operands of a product: transposed or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Product {
    /// `A[m, k] B[k, n]`.
    Nn,
    /// `A[m, k] B[n, k]ᵀ`.
    Nt,
    /// `A[k, m]ᵀ B[k, n]`.
    Tn,
}

/// Computes `C[m, n]` for `shape` = (m, n, k) and contiguous operands.
pub(super) fn product(
    threads: usize,
    form: Product,
    (m, n, k): (usize, usize, usize),
    a: &[f32],
    b: &[f32],
    c: &mut [f32],
) {
    let parts = c[..m * n].chunks_mut(ROWS * n).enumerate();
    for_each(threads, parts, |(part, c)| {
        let (first, rows) = (part * ROWS, c.len() / n);
        let c = MatMut::new(c, rows, n);
        match form {
            Product::Nn => {
                kernels().gemm_nn(MatRef::new(&a[first * k..], rows, k), MatRef::new(b, k, n), c, false);
            }
            Product::Nt => {
                kernels().gemm_nt(MatRef::new(&a[first * k..], rows, k), MatRef::new(b, n, k), c, false);
            }
            Product::Tn => {
                let a = MatRef::new(a, k, m).columns(first..first + rows);
                kernels().gemm_tn(a, MatRef::new(b, k, n), c, false);
            }
        }
    });
}

/// Sum of products in eight lanes.
fn dot(a: &[f64], b: &[f64]) -> f64 {
    let (a, a_rest) = a.as_chunks::<8>();
    let (b, b_rest) = b.as_chunks::<8>();
    let mut lanes = [0.0; 8];
    for (a, b) in a.iter().zip(b) {
        (0..8).for_each(|i| lanes[i] += a[i] * b[i]);
    }
    let rest: f64 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    lanes.iter().sum::<f64>() + rest
}

/// `y += alpha x`.
fn axpy(alpha: f64, x: &[f64], y: &mut [f64]) {
    y.iter_mut().zip(x).for_each(|(y, x)| *y += alpha * x);
}

/// Makes the Householder reflection `I - beta v vᵀ` that maps `x` to `(alpha, 0, …)`; `x` becomes `v`. Returns
/// (alpha, beta); beta is 0 if `x` is 0.
fn reflector(x: &mut [f64]) -> (f64, f64) {
    let norm = dot(x, x).sqrt();
    if norm == 0.0 {
        return (0.0, 0.0);
    }
    let alpha = if x[0] > 0.0 { -norm } else { norm };
    x[0] -= alpha;
    (alpha, 2.0 / dot(x, x))
}

/// Replaces the symmetric matrix `a[n, n]` by its eigenvectors, one per column, by descending eigenvalue: Householder
/// tridiagonalization and the implicit QL algorithm (Golub & Van Loan, "Matrix Computations", sections 8.3).
pub(super) fn eigenvectors(a: &mut [f32], n: usize) {
    let mut work: Vec<f64> = a.iter().map(|x| f64::from(*x)).collect();
    let (mut diagonal, mut next) = (vec![0.0; n], vec![0.0; n]);
    let mut vectors = tridiagonal(&mut work, n, &mut diagonal, &mut next);
    implicit_ql(&mut diagonal, &mut next, &mut vectors, n);
    let mut order: Vec<usize> = (0..n).collect();
    order.sort_by(|i, j| diagonal[*j].total_cmp(&diagonal[*i]));
    for (to, from) in order.into_iter().enumerate() {
        let vector = &vectors[from * n..][..n];
        vector.iter().enumerate().for_each(|(row, x)| a[row * n + to] = *x as f32);
    }
}

/// Reduces `a` to the tridiagonal matrix with `diagonal` and `next` to it; returns the transposed transformation.
fn tridiagonal(a: &mut [f64], n: usize, diagonal: &mut [f64], next: &mut [f64]) -> Vec<f64> {
    let mut betas = vec![0.0; n];
    let mut w = vec![0.0; n];
    for k in 0..n.saturating_sub(1) {
        diagonal[k] = a[k * n + k];
        let (done, rest) = a.split_at_mut((k + 1) * n);
        let v = &mut done[k * n + k + 1..];
        let (alpha, beta) = reflector(v);
        (next[k], betas[k]) = (alpha, beta);
        let (v, w) = (&*v, &mut w[k + 1..]);
        for (w, row) in w.iter_mut().zip(rest.chunks(n)) {
            *w = beta * dot(&row[k + 1..], v);
        }
        let half = 0.5 * beta * dot(w, v);
        axpy(-half, v, w);
        for (i, row) in rest.chunks_mut(n).enumerate() {
            let row = &mut row[k + 1..];
            axpy(-v[i], w, row);
            axpy(-w[i], v, row);
        }
    }
    if n > 0 {
        diagonal[n - 1] = a[n * n - 1];
    }
    // Q = H₀ H₁ …, from the last reflection, which leaves the leading rows and columns as in the identity.
    let mut q = vec![0.0; n * n];
    (0..n).for_each(|i| q[i * n + i] = 1.0);
    for k in (0..n.saturating_sub(1)).rev() {
        let v = &a[k * n + k + 1..(k + 1) * n];
        reflect(v, betas[k], &mut q[(k + 1) * n..], n, k + 1, &mut w);
    }
    transposed(&q, n)
}

/// Applies a reflection to rows of `n` elements, from column `first` on.
fn reflect(v: &[f64], beta: f64, rows: &mut [f64], n: usize, first: usize, sum: &mut [f64]) {
    let sum = &mut sum[first..n];
    sum.fill(0.0);
    rows.chunks(n).zip(v).for_each(|(row, v)| axpy(*v, &row[first..], sum));
    rows.chunks_mut(n).zip(v).for_each(|(row, v)| axpy(-beta * v, sum, &mut row[first..]));
}

fn transposed(a: &[f64], n: usize) -> Vec<f64> {
    (0..n * n).map(|i| a[i % n * n + i / n]).collect()
}

/// Diagonalizes a symmetric tridiagonal matrix; `diagonal` becomes the eigenvalues, and the rows of `vectors` are
/// rotated to eigenvectors.
fn implicit_ql(diagonal: &mut [f64], next: &mut [f64], vectors: &mut [f64], n: usize) {
    /// Iterations per eigenvalue; two are usual.
    const MOST: usize = 60;
    let (d, e) = (diagonal, next);
    for l in 0..n {
        for _ in 0..MOST {
            let small = |m: &usize| {
                let size = d[*m].abs() + d[*m + 1].abs();
                e[*m].abs() <= f64::EPSILON * size
            };
            let m = (l..n - 1).find(small).unwrap_or(n - 1);
            if m == l {
                break;
            }
            let g = (d[l + 1] - d[l]) / (2.0 * e[l]);
            let r = (g * g + 1.0).sqrt();
            let mut g = d[m] - d[l] + e[l] / (g + if g < 0.0 { -r } else { r });
            let (mut s, mut c, mut p) = (1.0, 1.0, 0.0);
            let mut whole = true;
            for i in (l..m).rev() {
                let (f, b) = (s * e[i], c * e[i]);
                let r = (f * f + g * g).sqrt();
                e[i + 1] = r;
                if r == 0.0 {
                    d[i + 1] -= p;
                    e[m] = 0.0;
                    whole = false;
                    break;
                }
                (s, c) = (f / r, g / r);
                g = d[i + 1] - p;
                let r = (d[i] - g) * s + 2.0 * c * b;
                p = s * r;
                d[i + 1] = g + p;
                g = c * r - b;
                rotate(vectors, n, i, (s, c));
            }
            if whole {
                d[l] -= p;
                e[l] = g;
                e[m] = 0.0;
            }
        }
    }
}

/// Rotates rows `i` and `i + 1`.
fn rotate(rows: &mut [f64], n: usize, i: usize, (s, c): (f64, f64)) {
    let (low, high) = rows[i * n..(i + 2) * n].split_at_mut(n);
    for (low, high) in low.iter_mut().zip(high) {
        (*low, *high) = (c * *low - s * *high, s * *low + c * *high);
    }
}

/// Replaces `a[n, n]` by the orthogonal factor of its QR factorization (Householder).
pub(super) fn orthogonal(a: &mut [f32], n: usize) {
    // Columns of `a` as rows, so that they are contiguous.
    let mut columns: Vec<f64> = (0..n * n).map(|i| f64::from(a[i % n * n + i / n])).collect();
    let mut betas = vec![0.0; n];
    for k in 0..n {
        let (done, rest) = columns.split_at_mut((k + 1) * n);
        let v = &mut done[k * n + k..];
        betas[k] = reflector(v).1;
        for column in rest.chunks_mut(n) {
            let column = &mut column[k..];
            let along = betas[k] * dot(v, column);
            axpy(-along, v, column);
        }
    }
    let mut q = vec![0.0; n * n];
    (0..n).for_each(|i| q[i * n + i] = 1.0);
    let mut sum = vec![0.0; n];
    for k in (0..n).rev() {
        reflect(&columns[k * n + k..(k + 1) * n], betas[k], &mut q[k * n..], n, k, &mut sum);
    }
    a.iter_mut().zip(q).for_each(|(a, q)| *a = q as f32);
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn values(n: usize) -> Vec<f32> {
        (0..n).map(|i| ((i * i % 97) as f32 * 0.37).sin()).collect()
    }

    /// Returns `Aᵀ B`.
    fn tn(a: &[f32], b: &[f32], n: usize) -> Vec<f64> {
        let entry =
            |i: usize, j: usize| (0..n).map(|k| f64::from(a[k * n + i]) * f64::from(b[k * n + j])).sum();
        (0..n * n).map(|at| entry(at / n, at % n)).collect()
    }

    #[test]
    fn products_do_not_depend_on_threads() {
        let (m, n, k) = (250, 70, 33);
        let (a, b) = (values(m * k), values(n * k));
        for form in [Product::Nn, Product::Nt, Product::Tn] {
            let run = |threads| {
                let mut c = vec![0.0; m * n];
                product(threads, form, (m, n, k), &a, &b, &mut c);
                c
            };
            let one = run(1);
            let at = |i: usize, j: usize| {
                let term = |p: usize| match form {
                    Product::Nn => a[i * k + p] * b[p * n + j],
                    Product::Nt => a[i * k + p] * b[j * k + p],
                    Product::Tn => a[p * m + i] * b[p * n + j],
                };
                (0..k).map(|p| f64::from(term(p))).sum::<f64>()
            };
            for (i, j) in [(0, 0), (97, 3), (249, 69)] {
                assert!((f64::from(one[i * n + j]) - at(i, j)).abs() < 1e-4, "{form:?}");
            }
            assert!(run(3) == one, "{form:?}");
        }
    }

    /// Eigenvectors are orthonormal and diagonalize the matrix, in descending order; also if it is singular.
    #[test]
    fn eigenvectors_diagonalize() {
        for (n, rank) in [(1, 1), (2, 2), (7, 7), (40, 40), (40, 3), (5, 0)] {
            let mut x = values(n * n);
            x.chunks_mut(n).skip(rank).for_each(|row| row.fill(0.0));
            let a: Vec<f32> = tn(&x, &x, n).into_iter().map(|v| v as f32).collect();
            let mut q = a.clone();
            eigenvectors(&mut q, n);
            let mut aq = vec![0.0; n * n];
            product(1, Product::Nn, (n, n, n), &a, &q, &mut aq);
            let (unit, diagonal) = (tn(&q, &q, n), tn(&q, &aq, n));
            let scale = a.iter().fold(1.0f32, |max, v| max.max(v.abs()));
            for i in 0..n {
                for j in 0..n {
                    let expected = if i == j { 1.0 } else { 0.0 };
                    assert!((unit[i * n + j] - expected).abs() < 1e-5, "{n} {rank}");
                    let off = if i == j { 0.0 } else { diagonal[i * n + j] };
                    assert!(off.abs() < 2e-5 * f64::from(scale), "{n} {rank}: {off}");
                }
            }
            let sorted = (1..n)
                .all(|i| diagonal[(i - 1) * n + i - 1] >= diagonal[i * n + i] - 1e-5 * f64::from(scale));
            assert!(sorted, "{n} {rank}");
        }
    }

    /// The orthogonal factor spans the leading columns in order, and is orthonormal also for a singular matrix.
    #[test]
    fn orthogonal_factors_are_orthonormal() {
        for (n, rank) in [(1, 1), (6, 6), (33, 33), (33, 4)] {
            let mut a = values(n * n);
            a.chunks_mut(n).for_each(|row| row[rank..].fill(0.0));
            let mut q = a.clone();
            orthogonal(&mut q, n);
            let (unit, r) = (tn(&q, &q, n), tn(&q, &a, n));
            for i in 0..n {
                for j in 0..n {
                    let expected = if i == j { 1.0 } else { 0.0 };
                    assert!((unit[i * n + j] - expected).abs() < 1e-5, "{n} {rank}");
                    assert!(j >= i || r[i * n + j].abs() < 1e-4, "R is upper triangular");
                }
            }
        }
    }
}

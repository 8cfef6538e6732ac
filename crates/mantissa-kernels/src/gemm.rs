//! f32 matrix products: packed panels for real matrices, row loops if one operand is nearly a vector.
//!
//! Names as in BLAS for row-major operands: the letters state which operand is transposed (`n`: as stored, `t`:
//! transposed). A forward pass is `nt` (`Y = X Wᵀ`), its backward passes are `nn` (`dX = dY W`) and `tn` (`dW = dYᵀ
//! X`). One thread: callers split rows.

use crate::{Kernels, MatMut, MatRef, Operand};

/// Up to this many rows, reading B in place is faster than packing it for the blocked product.
const SMALL_ROWS: usize = 24;

/// The same for B `[k, n]`.
const SMALL_ROWS_ACROSS: usize = 8;

impl Kernels {
    /// `C[t, n] = A[t, k] Bᵀ`, `B[n, k]`; added to C if `accumulate`.
    ///
    /// Up to 24 rows, every element has the bits of [`Self::dot`]. Beyond that, every block of 512 along k is one
    /// chain of fused multiply-adds that starts at 0 and takes the products in order, and the blocks' sums are added
    /// to C in order. Either way an element depends only on its row of A, its column of B and its old value, and has
    /// the same bits at every level and on every processor. A thread keeps up to 2 MiB for packed operands.
    ///
    /// # Panics
    /// If the shapes do not agree.
    pub fn gemm_nt(&self, a: MatRef<'_>, b: MatRef<'_>, mut c: MatMut<'_>, accumulate: bool) {
        let (t, n, k) = (a.rows(), b.rows(), a.cols());
        check("gemm_nt", (t, n), (k, b.cols()), &c);
        if t > SMALL_ROWS {
            return self.gemm_f32(Operand::Rows(a), Operand::Rows(b), c, accumulate);
        }
        let ldc = c.stride();
        self.gemm_nt_small(
            (t, n, k),
            a.as_slice(),
            a.stride(),
            b.as_slice(),
            b.stride(),
            c.as_mut_slice(),
            ldc,
            accumulate,
        );
    }

    /// `C[t, n] = A[t, k] B`, `B[k, n]`; added to C if `accumulate`.
    ///
    /// Up to 8 rows each has the bits of [`Self::gevm`]; beyond that as [`Self::gemm_nt`] of many rows.
    ///
    /// # Panics
    /// If the shapes do not agree.
    pub fn gemm_nn(&self, a: MatRef<'_>, b: MatRef<'_>, mut c: MatMut<'_>, accumulate: bool) {
        let (t, n, k) = (a.rows(), b.cols(), a.cols());
        check("gemm_nn", (t, n), (k, b.rows()), &c);
        if t > SMALL_ROWS_ACROSS {
            return self.gemm_f32(Operand::Rows(a), Operand::Columns(b), c, accumulate);
        }
        for r in 0..t {
            self.gevm(a.row(r), b.as_slice(), b.stride().max(n), c.row_mut(r), accumulate);
        }
    }

    /// `C[m, n] = Aᵀ B`, `A[k, m]`, `B[k, n]`; added to C if `accumulate`. As [`Self::gemm_nt`] of many rows.
    ///
    /// # Panics
    /// If the shapes do not agree.
    pub fn gemm_tn(&self, a: MatRef<'_>, b: MatRef<'_>, c: MatMut<'_>, accumulate: bool) {
        check("gemm_tn", (a.cols(), b.cols()), (a.rows(), b.rows()), &c);
        self.gemm_f32(Operand::Columns(a), Operand::Columns(b), c, accumulate);
    }
}

fn check(kernel: &str, (m, n): (usize, usize), (k_a, k_b): (usize, usize), c: &MatMut<'_>) {
    assert_eq!(k_a, k_b, "{kernel}: the inner dimensions of A and B differ");
    assert_eq!((m, n), (c.rows(), c.cols()), "{kernel}: C does not have the shape of the product");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels;

    fn wave(len: usize, phase: f32) -> Vec<f32> {
        (0..len).map(|i| (i as f32 * 0.37 + phase).sin()).collect()
    }

    /// C = A B + `beta` C in f64, from element accessors.
    fn naive(
        (m, n, k): (usize, usize, usize),
        a: impl Fn(usize, usize) -> f32,
        b: impl Fn(usize, usize) -> f32,
    ) -> Vec<f64> {
        let dot = |i, j| (0..k).map(|p| f64::from(a(i, p)) * f64::from(b(p, j))).sum();
        (0..m * n).map(|e| dot(e / n, e % n)).collect()
    }

    fn close(c: &[f32], ldc: usize, n: usize, exact: &[f64], start: f32) {
        for (e, exact) in exact.iter().enumerate() {
            let got = f64::from(c[e / n * ldc + e % n]);
            let exact = exact + f64::from(start);
            assert!((got - exact).abs() < 1e-4 * (1.0 + exact.abs()), "element {e}: {got} for {exact}");
        }
    }

    #[test]
    fn all_three_products_with_strides() {
        let kernels = kernels();
        for (m, n, k) in
            [(1, 1, 1), (1, 7, 33), (2, 5, 40), (3, 19, 64), (17, 16, 100), (65, 33, 257), (2, 3, 0)]
        {
            let (ld_k, ld_m, ld_n) = (k + 3, m + 1, n + 2);
            let (a, at) = (wave(m * ld_k, 0.0), wave(k * ld_m, 0.0));
            let (b, bt) = (wave(k * ld_n, 1.0), wave(n * ld_k, 1.0));
            for accumulate in [false, true] {
                let start = if accumulate { 0.5 } else { 0.0 };
                let fresh = || vec![0.5_f32; m * ld_n];
                let view_b = MatRef::with_stride(&b, k, n, ld_n);
                let view_a = MatRef::with_stride(&a, m, k, ld_k);

                let mut c = fresh();
                let view_bt = MatRef::with_stride(&bt, n, k, ld_k);
                kernels.gemm_nt(view_a, view_bt, MatMut::with_stride(&mut c, m, n, ld_n), accumulate);
                close(&c, ld_n, n, &naive((m, n, k), |i, p| a[i * ld_k + p], |p, j| bt[j * ld_k + p]), start);
                assert!((0..m).all(|r| c[r * ld_n + n..][..2] == [0.5; 2]), "padding is untouched");

                let mut c = fresh();
                kernels.gemm_nn(view_a, view_b, MatMut::with_stride(&mut c, m, n, ld_n), accumulate);
                close(&c, ld_n, n, &naive((m, n, k), |i, p| a[i * ld_k + p], |p, j| b[p * ld_n + j]), start);

                let mut c = fresh();
                let view_at = MatRef::with_stride(&at, k, m, ld_m);
                kernels.gemm_tn(view_at, view_b, MatMut::with_stride(&mut c, m, n, ld_n), accumulate);
                close(&c, ld_n, n, &naive((m, n, k), |i, p| at[p * ld_m + i], |p, j| b[p * ld_n + j]), start);
            }
        }
    }

    /// A row of a product must not depend on its neighbours, so that the caller's split of rows cannot affect the
    /// result.
    #[test]
    fn rows_do_not_depend_on_how_many_there_are() {
        let (n, k) = (131, 1031);
        let (a, b) = (wave(150 * k, 0.0), wave(n * k, 1.0));
        let run = |t: usize| {
            let mut c = vec![0.0; t * n];
            kernels().gemm_nt(MatRef::new(&a, t, k), MatRef::new(&b, n, k), MatMut::new(&mut c, t, n), false);
            c
        };
        let all = run(150);
        for t in SMALL_ROWS + 1..150 {
            assert!(run(t).iter().zip(&all).all(|(x, y)| x.to_bits() == y.to_bits()), "{t} rows");
        }
    }

    #[test]
    #[should_panic(expected = "gemm_nt: the inner dimensions")]
    fn shapes_are_checked() {
        let mut c = [0.0; 4];
        kernels().gemm_nt(
            MatRef::new(&[0.0; 6], 2, 3),
            MatRef::new(&[0.0; 8], 2, 4),
            MatMut::new(&mut c, 2, 2),
            false,
        );
    }
}

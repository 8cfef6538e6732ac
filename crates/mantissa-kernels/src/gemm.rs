//! f32 matrix products: the `gemm` crate for real matrices, our own row loops where one operand is nearly a
//! vector.
//!
//! Names as in BLAS for row-major operands: the letters say which operand is transposed (`n`: as stored, `t`:
//! transposed). A forward pass is `nt` (`Y = X Wᵀ`), its backward passes are `nn` (`dX = dY W`) and `tn` (`dW
//! = dYᵀ X`). One thread: callers split rows.

use crate::{Kernels, MatMut, MatRef};
use gemm::Parallelism;

/// Up to this many rows, reading B in place beats packing it for the blocked product.
const SMALL_ROWS: usize = 24;

impl Kernels {
    /// `C[t, n] = A[t, k] Bᵀ`, `B[n, k]`; added to C if `accumulate`.
    ///
    /// Up to 24 rows every element has the bits of [`Self::dot`]; beyond that the product runs in the `gemm`
    /// crate.
    ///
    /// # Panics
    /// If the shapes do not agree.
    pub fn gemm_nt(&self, a: MatRef<'_>, b: MatRef<'_>, mut c: MatMut<'_>, accumulate: bool) {
        let (t, n, k) = (a.rows(), b.rows(), a.cols());
        check("gemm_nt", (t, n), (k, b.cols()), &c);
        if t > SMALL_ROWS {
            return product((t, n, k), Operand::stored(&a), Operand::transposed(&b), &mut c, accumulate);
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
    /// A single row has the bits of [`Self::gevm`]; beyond that every product runs in the `gemm` crate.
    ///
    /// # Panics
    /// If the shapes do not agree.
    pub fn gemm_nn(&self, a: MatRef<'_>, b: MatRef<'_>, mut c: MatMut<'_>, accumulate: bool) {
        let (t, n, k) = (a.rows(), b.cols(), a.cols());
        check("gemm_nn", (t, n), (k, b.rows()), &c);
        if t > 1 {
            return product((t, n, k), Operand::stored(&a), Operand::stored(&b), &mut c, accumulate);
        }
        for r in 0..t {
            self.gevm(a.row(r), b.as_slice(), b.stride().max(n), c.row_mut(r), accumulate);
        }
    }

    /// `C[m, n] = Aᵀ B`, `A[k, m]`, `B[k, n]`; added to C if `accumulate`.
    ///
    /// # Panics
    /// If the shapes do not agree.
    pub fn gemm_tn(&self, a: MatRef<'_>, b: MatRef<'_>, mut c: MatMut<'_>, accumulate: bool) {
        let (m, n, k) = (a.cols(), b.cols(), a.rows());
        check("gemm_tn", (m, n), (k, b.rows()), &c);
        product((m, n, k), Operand::transposed(&a), Operand::stored(&b), &mut c, accumulate);
    }
}

/// A matrix as the `gemm` crate wants it: where it begins, and the distance between neighbouring rows and
/// columns.
#[derive(Clone, Copy)]
struct Operand {
    data: *const f32,
    row_stride: isize,
    col_stride: isize,
}

impl Operand {
    fn stored(m: &MatRef<'_>) -> Self {
        Self { data: m.as_slice().as_ptr(), row_stride: m.stride() as isize, col_stride: 1 }
    }

    fn transposed(m: &MatRef<'_>) -> Self {
        Self { data: m.as_slice().as_ptr(), row_stride: 1, col_stride: m.stride() as isize }
    }
}

/// `C = A B (+ C)` with shapes (m, n, k) that [`check`] has compared with all three matrices.
fn product((m, n, k): (usize, usize, usize), a: Operand, b: Operand, c: &mut MatMut<'_>, accumulate: bool) {
    if m == 0 || n == 0 {
        return;
    }
    if k == 0 {
        if !accumulate {
            (0..m).for_each(|r| c.row_mut(r).fill(0.0));
        }
        return;
    }
    let (c_stride, c_data) = (c.stride() as isize, c.as_mut_slice().as_mut_ptr());
    // SAFETY: `MatRef` and `MatMut` guarantee that every element (r, s) of a non-empty matrix lies inside its
    // slice, `check` that the operands are m x k, k x n and m x n, and the borrow of `c` that nothing aliases
    // it.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            c_data,
            1,
            c_stride,
            accumulate,
            a.data,
            a.col_stride,
            a.row_stride,
            b.data,
            b.col_stride,
            b.row_stride,
            1.0,
            1.0,
            false,
            false,
            false,
            Parallelism::None,
        );
    }
}

fn check(kernel: &str, (m, n): (usize, usize), (k_a, k_b): (usize, usize), c: &MatMut<'_>) {
    assert_eq!(k_a, k_b, "{kernel}: the inner dimensions of A and B differ");
    assert_eq!((m, n), (c.rows(), c.cols()), "{kernel}: C has not the shape of the product");
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

    /// A row of a product must not depend on its neighbours, so that how a caller cuts its rows cannot show
    /// in the result.
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

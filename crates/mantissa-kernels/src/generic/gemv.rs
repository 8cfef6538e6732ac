//! Matrix times vector, for products with so few rows that a blocked GEMM would mostly pack.
//!
//! Row-major `B[n, k]`. [`gemv`]: `c[i] = sum_p B[i, p] x[p]`, each row reduced as in `dot`, so that the result does
//! not depend on the grouping of rows; [`gemm_nt_small`] does this for a few `x` per read of B. [`gevm`]: `c[i] =
//! sum_p x[p] B[p, i]`, summed in the order of `p`.

use super::reduce::dot;
use super::{padded, tree};
use crate::simd::{LANES, Simd};

/// Rows read together, to hide the latency of one accumulator chain.
const ROWS: usize = 4;

#[inline(always)]
pub(crate) fn gemv<S: Simd>(simd: S, b: &[f32], ldb: usize, x: &[f32], out: &mut [f32], accumulate: bool) {
    let n = out.len();
    gemm_nt_small(simd, (1, n, x.len()), x, x.len(), b, ldb, out, n, accumulate);
}

#[inline(always)]
pub(crate) fn gemm_nt_small<S: Simd>(
    simd: S,
    (t, n, k): (usize, usize, usize),
    a: &[f32],
    lda: usize,
    b: &[f32],
    ldb: usize,
    c: &mut [f32],
    ldc: usize,
    accumulate: bool,
) {
    check("gemm_nt_small: A", a, lda, t, k);
    check("gemm_nt_small: B", b, ldb, n, k);
    check("gemm_nt_small: C", c, ldc, t, n);
    if k == 0 {
        if !accumulate {
            (0..t).for_each(|r| c[r * ldc..][..n].fill(0.0));
        }
        return;
    }
    let row = |i: usize| &b[i * ldb..][..k];
    let whole = n - n % ROWS;
    // B, the large operand, in the outer loop is read from memory once.
    for i in (0..whole).step_by(ROWS) {
        let rows = [row(i), row(i + 1), row(i + 2), row(i + 3)];
        for r in 0..t {
            let sums = dot_rows(simd, &a[r * lda..][..k], rows);
            for (c, sum) in c[r * ldc + i..][..ROWS].iter_mut().zip(sums) {
                *c = if accumulate { *c + sum } else { sum };
            }
        }
    }
    for i in whole..n {
        for r in 0..t {
            let sum = dot(simd, row(i), &a[r * lda..][..k]);
            let c = &mut c[r * ldc + i];
            *c = if accumulate { *c + sum } else { sum };
        }
    }
}

#[inline(always)]
fn dot_rows<S: Simd>(simd: S, x: &[f32], rows: [&[f32]; ROWS]) -> [f32; ROWS] {
    let (x_chunks, x_tail) = x.as_chunks::<LANES>();
    let chunks = rows.map(|row| &row.as_chunks::<LANES>().0[..x_chunks.len()]);
    let mut lanes = [simd.splat(0.0); ROWS];
    for (c, x) in x_chunks.iter().enumerate() {
        let x = simd.load(x);
        for r in 0..ROWS {
            lanes[r] = simd.add(lanes[r], simd.mul(simd.load(&chunks[r][c]), x));
        }
    }
    if !x_tail.is_empty() {
        let (start, x) = (x.len() - x_tail.len(), simd.load(&padded(x_tail, 0.0)));
        for r in 0..ROWS {
            let tail = simd.load(&padded(&rows[r][start..], 0.0));
            lanes[r] = simd.add(lanes[r], simd.mul(tail, x));
        }
    }
    lanes.map(|lanes| tree(simd.to_array(lanes), |a, b| a + b))
}

#[inline(always)]
pub(crate) fn gevm(x: &[f32], b: &[f32], ldb: usize, out: &mut [f32], accumulate: bool) {
    let n = out.len();
    check("gevm: B", b, ldb, x.len(), n);
    if !accumulate {
        out.fill(0.0);
    }
    if n == 0 {
        return;
    }
    let row = |p: usize| &b[p * ldb..][..n];
    let whole = x.len() - x.len() % ROWS;
    for p in (0..whole).step_by(ROWS) {
        let (b0, b1, b2, b3) = (row(p), row(p + 1), row(p + 2), row(p + 3));
        let out = &mut out[..n];
        for i in 0..n {
            out[i] = (((out[i] + x[p] * b0[i]) + x[p + 1] * b1[i]) + x[p + 2] * b2[i]) + x[p + 3] * b3[i];
        }
    }
    for p in whole..x.len() {
        for (out, b) in out.iter_mut().zip(row(p)) {
            *out += x[p] * b;
        }
    }
}

#[inline(always)]
fn check(operand: &str, m: &[f32], stride: usize, rows: usize, cols: usize) {
    if rows > 0 && cols > 0 {
        assert!(stride >= cols, "{operand}: row stride {stride} is less than {cols} columns");
        let needed = (rows - 1).checked_mul(stride).and_then(|last| last.checked_add(cols));
        assert!(
            needed.is_some_and(|needed| needed <= m.len()),
            "{operand} is shorter than {rows} rows of {cols}"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::Portable;

    #[test]
    fn a_row_of_gemv_is_dot() {
        let (n, k, ldb) = (7, 37, 40);
        let b: Vec<f32> = (0..(n * ldb) as u16).map(|i| f32::from(i).sin()).collect();
        let x: Vec<f32> = (0..k as u16).map(|i| f32::from(i).cos()).collect();
        let mut out = vec![1.0; n];
        gemv(Portable, &b, ldb, &x, &mut out, false);
        for i in 0..n {
            assert_eq!(out[i].to_bits(), dot(Portable, &b[i * ldb..][..k], &x).to_bits());
        }
        gemv(Portable, &b, ldb, &x, &mut out, true);
        assert_eq!(out[2], 2.0 * dot(Portable, &b[2 * ldb..][..k], &x));
    }

    #[test]
    fn gevm_sums_in_order() {
        let b = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0];
        let mut out = [100.0, 100.0];
        gevm(&[1.0, 0.5, 2.0, -1.0, 3.0], &b, 2, &mut out, false);
        assert_eq!(out, [1.0 + 1.5 + 10.0 - 7.0 + 27.0, 2.0 + 2.0 + 12.0 - 8.0 + 30.0]);
        gevm(&[], &[], 2, &mut out, false);
        assert_eq!(out, [0.0, 0.0]);
    }
}

//! `C -= A B` in f64, the block update of factorizations and of GPTQ.
//!
//! Every element is one chain of fused multiply-adds in the order of p that starts at its old value. A chain may be
//! split anywhere and continued later, so the result depends on neither tiles nor blocks nor threads.

use crate::simd::{LANES, Simd};

/// Terms of a chain that are processed while a tile is in registers; a packed panel of B is 16 KiB.
const DEPTH: usize = 128;

/// Rows of a tile: with 32 registers 8 x 16, else 2 x 16.
const ROWS_WIDE: usize = 8;
const ROWS: usize = 2;

#[inline(always)]
pub(crate) fn sub_axpy_f64(alpha: f64, x: &[f64], y: &mut [f64]) {
    assert_eq!(x.len(), y.len(), "sub_axpy_f64: lengths differ");
    for (y, x) in y.iter_mut().zip(x) {
        *y = (-alpha).mul_add(*x, *y);
    }
}

#[inline(always)]
pub(crate) fn gemm_sub_f64<S: Simd>(
    simd: S,
    (m, n, depth): (usize, usize, usize),
    a: &[f64],
    lda: usize,
    b: &[f64],
    ldb: usize,
    c: &mut [f64],
    ldc: usize,
) {
    if m == 0 || n == 0 || depth == 0 {
        return;
    }
    check("gemm_sub_f64: A", a.len(), lda, m, depth);
    check("gemm_sub_f64: B", b.len(), ldb, depth, n);
    check("gemm_sub_f64: C", c.len(), ldc, m, n);
    for p in (0..depth).step_by(DEPTH) {
        let some = DEPTH.min(depth - p);
        if S::WIDE {
            product::<S, ROWS_WIDE>(simd, (m, n, some), &a[p..], lda, &b[p * ldb..], ldb, c, ldc);
        } else {
            product::<S, ROWS>(simd, (m, n, some), &a[p..], lda, &b[p * ldb..], ldb, c, ldc);
        }
    }
}

/// [`gemm_sub_f64`] for up to [`DEPTH`] terms, in tiles of `R` rows.
#[inline(always)]
fn product<S: Simd, const R: usize>(
    simd: S,
    (m, n, depth): (usize, usize, usize),
    a: &[f64],
    lda: usize,
    b: &[f64],
    ldb: usize,
    c: &mut [f64],
    ldc: usize,
) {
    let packed_a = pack_rows::<R>(a, lda, m, depth);
    let mut packed_b = [[0.0; LANES]; DEPTH];
    for col in (0..n).step_by(LANES) {
        let width = LANES.min(n - col);
        for (p, packed) in packed_b[..depth].iter_mut().enumerate() {
            packed[..width].copy_from_slice(&b[p * ldb + col..][..width]);
        }
        for (tile, a) in packed_a.chunks_exact(depth).enumerate() {
            let rows = R.min(m - tile * R);
            let mut sums = [[0.0; LANES]; R];
            for (r, sums) in sums[..rows].iter_mut().enumerate() {
                sums[..width].copy_from_slice(&c[(tile * R + r) * ldc + col..][..width]);
            }
            let sums = chains(simd, a, &packed_b[..depth], &sums);
            for (r, sums) in sums[..rows].iter().enumerate() {
                c[(tile * R + r) * ldc + col..][..width].copy_from_slice(&sums[..width]);
            }
        }
    }
}

/// Tiles of `R` rows, term by term; the last is padded with zeros.
#[inline(always)]
fn pack_rows<const R: usize>(a: &[f64], lda: usize, m: usize, depth: usize) -> Vec<[f64; R]> {
    let mut packed = vec![[0.0; R]; m.div_ceil(R) * depth];
    for row in 0..m {
        let tile = &mut packed[row / R * depth..][..depth];
        for (packed, &a) in tile.iter_mut().zip(&a[row * lda..][..depth]) {
            packed[row % R] = a;
        }
    }
    packed
}

#[inline(always)]
fn chains<S: Simd, const R: usize>(
    simd: S,
    a: &[[f64; R]],
    b: &[[f64; LANES]],
    start: &[[f64; LANES]; R],
) -> [[f64; LANES]; R] {
    let mut sums = [simd.splat_f64(0.0); R];
    for r in 0..R {
        sums[r] = simd.load_f64(&start[r]);
    }
    for (a, b) in a.iter().zip(b) {
        let b = simd.load_f64(b);
        for r in 0..R {
            sums[r] = simd.sub_mul_f64(simd.splat_f64(a[r]), b, sums[r]);
        }
    }
    let mut out = [[0.0; LANES]; R];
    for r in 0..R {
        out[r] = simd.to_array_f64(sums[r]);
    }
    out
}

#[inline(always)]
fn check(operand: &str, len: usize, stride: usize, rows: usize, cols: usize) {
    assert!(stride >= cols, "{operand}: row stride {stride} is less than {cols} columns");
    let needed = (rows - 1).checked_mul(stride).and_then(|last| last.checked_add(cols));
    assert!(needed.is_some_and(|needed| needed <= len), "{operand} is shorter than {rows} rows of {cols}");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::Portable;

    fn wave(n: usize, phase: f64) -> Vec<f64> {
        (0..n).map(|i| (i as f64 * 0.731 + phase).sin()).collect()
    }

    #[test]
    fn every_element_is_one_chain_in_the_order_of_p() {
        for (m, n, depth) in [(1, 1, 1), (3, 17, 5), (9, 33, 130), (16, 16, 257), (2, 40, 0)] {
            let (lda, ldb, ldc) = (depth + 2, n + 1, n + 3);
            let (a, b) = (wave(m * lda, 0.0), wave(depth * ldb + 1, 1.0));
            let mut c = wave(m * ldc, 2.0);
            let mut expected = c.clone();
            for i in 0..m {
                for j in 0..n {
                    for p in 0..depth {
                        let c = &mut expected[i * ldc + j];
                        *c = (-a[i * lda + p]).mul_add(b[p * ldb + j], *c);
                    }
                }
            }
            gemm_sub_f64(Portable, (m, n, depth), &a, lda, &b, ldb, &mut c, ldc);
            assert_eq!(c, expected, "[{m}, {n}], {depth} terms");
        }
    }
}

//! `H += XᵀX` for one block of tokens: each sum over the tokens is one f32 chain of fused multiply-adds in token
//! order, starting at 0, and is then added to H. The tiling of the output does not affect the result.

use crate::simd::{LANES, Simd};

/// Columns of a packed panel, and rows of a band of H.
pub(crate) const PANEL: usize = 48;

/// Rows of a tile of the output: with 32 registers 8 x 48, else 4 x 16.
const ROWS_WIDE: usize = 8;
const ROWS: usize = 4;

#[inline(always)]
pub(crate) fn xtx_band<S: Simd>(
    simd: S,
    packed: &[f32],
    tokens: usize,
    k: usize,
    band: usize,
    h: &mut [f32],
) {
    let panels = k.div_ceil(PANEL);
    let rows = k.saturating_sub(band * PANEL).min(PANEL);
    assert_eq!(packed.len(), panels * PANEL * tokens, "xtx_band: packed is not {panels} panels");
    assert_eq!(h.len(), rows * k, "xtx_band: h is not {rows} rows of {k}");
    let packed = packed.as_chunks::<PANEL>().0;
    let panel = |p: usize| &packed[p * tokens..][..tokens];
    for p in band..panels {
        if S::WIDE {
            add_tiles::<S, ROWS_WIDE, 3, 0>(simd, panel(band), panel(p), p * PANEL, k, h);
        } else {
            add_tiles::<S, ROWS, 1, 0>(simd, panel(band), panel(p), p * PANEL, k, h);
            add_tiles::<S, ROWS, 1, 1>(simd, panel(band), panel(p), p * PANEL, k, h);
            add_tiles::<S, ROWS, 1, 2>(simd, panel(band), panel(p), p * PANEL, k, h);
        }
    }
}

/// Adds `AᵀB` for the `V` vectors of B's panel from vector `FIRST` on, whose panel begins at column `col`.
#[inline(always)]
fn add_tiles<S: Simd, const R: usize, const V: usize, const FIRST: usize>(
    simd: S,
    a: &[[f32; PANEL]],
    b: &[[f32; PANEL]],
    col: usize,
    k: usize,
    h: &mut [f32],
) {
    let first_col = col + FIRST * LANES;
    if first_col >= k {
        return;
    }
    let width = (k - first_col).min(V * LANES);
    let rows = h.len() / k;
    for tile in 0..rows.div_ceil(R) {
        let sums = tile_sums::<S, R, V, FIRST>(simd, a, b, tile);
        for (r, sums) in sums.iter().enumerate().take(rows - tile * R) {
            let out = &mut h[(tile * R + r) * k + first_col..][..width];
            for (out, &sums) in out.chunks_mut(LANES).zip(sums) {
                for (out, sum) in out.iter_mut().zip(simd.to_array(sums)) {
                    *out += sum;
                }
            }
        }
    }
}

#[inline(always)]
fn tile_sums<S: Simd, const R: usize, const V: usize, const FIRST: usize>(
    simd: S,
    a: &[[f32; PANEL]],
    b: &[[f32; PANEL]],
    tile: usize,
) -> [[S::F32; V]; R] {
    assert!(tile < PANEL / R);
    let mut sums = [[simd.splat(0.0); V]; R];
    for (a, b) in a.iter().zip(b) {
        let (a, b) = (&a.as_chunks::<R>().0[tile], b.as_chunks::<LANES>().0);
        let mut vectors = [simd.splat(0.0); V];
        for v in 0..V {
            vectors[v] = simd.load(&b[FIRST + v]);
        }
        for r in 0..R {
            let a = simd.splat(a[r]);
            for v in 0..V {
                sums[r][v] = simd.mul_add(a, vectors[v], sums[r][v]);
            }
        }
    }
    sums
}

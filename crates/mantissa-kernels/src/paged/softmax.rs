//! Online softmax over tiles (Milakov and Gimelshein 2018, arXiv 1805.02867, algorithm 3).

use super::layout::TILE_TOKENS;
use super::queries::Queries;
use super::scores::{load, store};
use super::simd::{LANES, ROUND, TileSimd};

/// Tokens `from..to` of a tile, which a query sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Visible {
    /// First visible token.
    pub from: u8,
    /// One past the last, at most 64.
    pub to: u8,
}

/// Running softmax of some queries: their largest score, the sum of their weights and the weighted sum of values.
/// Reused without allocation.
#[derive(Clone, Debug, Default)]
pub struct Softmax {
    pub(super) rows: usize,
    pub(super) head_dim: usize,
    pub(super) dims: usize,
    /// Scores and then weights of a tile, `[rows, 64]`.
    pub(super) weights: Vec<f32>,
    /// Largest weight of the tile.
    pub(super) top: Vec<f32>,
    pub(super) max: Vec<f32>,
    pub(super) sum: Vec<f32>,
    /// `[rows, dims]`.
    pub(super) acc: Vec<f32>,
}

impl Softmax {
    /// Begins with no token seen, for the queries `q`.
    pub fn begin(&mut self, q: &Queries) {
        (self.rows, self.head_dim, self.dims) = (q.rows, q.head_dim, q.dims);
        let fills = [
            (&mut self.weights, TILE_TOKENS * q.rows, 0.0),
            (&mut self.top, q.rows, 0.0),
            (&mut self.max, q.rows, f32::NEG_INFINITY),
            (&mut self.sum, q.rows, 0.0),
            (&mut self.acc, q.rows * q.dims, 0.0),
        ];
        for (values, len, fill) in fills {
            values.clear();
            values.resize(len, fill);
        }
    }

    /// Floats of a query's partial result: its values, then the largest score and the sum of weights.
    pub const fn partial_len(head_dim: usize) -> usize {
        head_dim + 2
    }

    /// Writes the partial results of all queries, `[rows, partial_len]`, for [`combine_partials`](super::combine_partials).
    ///
    /// # Panics
    /// If `out` is shorter.
    pub fn write_partial(&self, out: &mut [f32]) {
        let len = Self::partial_len(self.head_dim);
        assert!(out.len() >= self.rows * len, "paged: partial results of {} rows do not fit", self.rows);
        let rows = out.chunks_exact_mut(len).zip(self.acc.chunks_exact(self.dims.max(1)));
        for ((out, acc), (max, sum)) in rows.zip(self.max.iter().zip(&self.sum)) {
            out[..self.head_dim].copy_from_slice(&acc[..self.head_dim]);
            out[self.head_dim..].copy_from_slice(&[*max, *sum]);
        }
    }
}

/// 355/512 and ln 2 minus it, for the range reduction of e^x; coefficients as in [`crate::generic`]'s `exp`.
const LN2_HIGH: f32 = 0.693_359_375;
const LN2_LOW: f32 = -2.121_944_4e-4;
const P: [f32; 5] = [0.499_999_94, 0.166_665_21, 0.041_668_39, 0.008_368_735, 0.001_381_455_9];
/// Below this e^x counts as e^LOWEST, 1.2e-38, the smallest normal result.
const LOWEST: f32 = -87.3;

/// e^x for x <= 0, within 2 ulp; NaN gives an unspecified value.
#[inline(always)]
fn exp_nonpositive<S: TileSimd>(simd: S, x: S::F32) -> S::F32 {
    let x = simd.greater(x, simd.splat(LOWEST));
    let shifted = simd.mul_add(x, simd.splat(std::f32::consts::LOG2_E), simd.splat(ROUND));
    let n = simd.add(shifted, simd.splat(-ROUND));
    let r = simd.mul_add(n, simd.splat(-LN2_HIGH), x);
    let r = simd.mul_add(n, simd.splat(-LN2_LOW), r);
    let mut p = simd.splat(P[4]);
    for c in [P[3], P[2], P[1], P[0]] {
        p = simd.mul_add(p, r, simd.splat(c));
    }
    let e = simd.add(simd.mul_add(p, simd.mul(r, r), r), simd.splat(1.0));
    simd.add_exponent(e, shifted)
}

/// Replaces the scores of a tile by weights relative to the largest score so far, and rescales what was summed before.
/// Weights of hidden tokens are 0.
#[inline(always)]
pub(super) fn weigh<S: TileSimd>(
    simd: S,
    visible: &[Visible],
    softcap: Option<f32>,
    dims: usize,
    state: &mut Softmax,
) {
    let Softmax { weights, max, sum, acc, top, .. } = state;
    let rows = weights.chunks_exact_mut(TILE_TOKENS).zip(acc.chunks_exact_mut(dims));
    let stats = max.iter_mut().zip(sum).zip(top);
    for (((row, acc), visible), ((max, sum), top)) in rows.zip(visible).zip(stats) {
        let (from, to) = (usize::from(visible.from), usize::from(visible.to));
        if from >= to {
            row.fill(0.0);
            *top = 0.0;
            continue;
        }
        if let Some(cap) = softcap {
            crate::generic::softcap(row, 1.0, cap);
        }
        let whole = from == 0 && to == TILE_TOKENS;
        if !whole {
            row[..from].fill(f32::NEG_INFINITY);
            row[to..].fill(f32::NEG_INFINITY);
        }
        let mut highest = simd.splat(f32::NEG_INFINITY);
        for strip in row.chunks_exact(LANES) {
            highest = simd.greater(highest, load(simd, strip));
        }
        let tile_max = simd.max_lane(highest);
        let new = if tile_max > *max { tile_max } else { *max };
        let minus = simd.splat(-new);
        let mut sums = simd.splat(0.0);
        for (i, strip) in row.chunks_exact_mut(LANES).enumerate() {
            let p = exp_nonpositive(simd, simd.add(load(simd, strip), minus));
            store(simd, p, strip);
            if !whole {
                let hidden = strip.iter_mut().enumerate();
                let hidden = hidden.filter(|(lane, _)| !(from..to).contains(&(i * LANES + lane)));
                hidden.for_each(|(_, p)| *p = 0.0);
            }
            sums = simd.add(sums, load(simd, strip));
        }
        let mut one = [0.0; LANES];
        if new > tile_max {
            simd.store(exp_nonpositive(simd, simd.splat(tile_max - new)), &mut one);
        }
        *top = if new > tile_max { one[0] } else { 1.0 };
        if new > *max && *sum > 0.0 {
            simd.store(exp_nonpositive(simd, simd.splat(*max - new)), &mut one);
            let factor = one[0];
            *sum *= factor;
            for strip in acc.chunks_exact_mut(LANES) {
                let scaled = simd.mul(load(simd, strip), simd.splat(factor));
                store(simd, scaled, strip);
            }
        }
        *max = new;
        *sum += simd.sum_lanes(sums);
    }
}

//! Online softmax over tiles (Milakov and Gimelshein 2018, arXiv 1805.02867, algorithm 3).

use super::layout::TILE_TOKENS;
use super::scores::{load, store};
use super::simd::{LANES, TileSimd};
use super::{ROUND, Softmax, Visible};

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

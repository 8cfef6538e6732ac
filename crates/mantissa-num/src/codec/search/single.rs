//! Types with one f16 scale for a block: IQ4_NL.
//!
//! Sixteen candidates at once, one per lane; each lane's scale of least squares is rounded to f16 before lanes are compared.

use super::super::iq4;
use super::symmetric::{Element, Table};
use super::{INFINITE, LANES, Lanes, Target, extremes, inverse, least};

#[inline(always)]
pub(super) fn encode_iq4_nl<L: Lanes>(l: L, target: &mut Target, block: &mut [u8]) {
    let mut values = [0i8; 32];
    let mut d = (INFINITE, 0.0);
    if !target.beyond(target.amax, -Table::RANGE.0) {
        d = single::<L, Table>(l, target, 32);
        let mut codes = [0.0; 32];
        assign::<L, Table>(l, &target.x[..32], d.1, &mut codes);
        values = codes.map(|v| v as i8);
    }
    iq4::put_iq4_nl(d.0, &values, block);
}

/// The f16 scale of a block of `n` elements.
#[inline(always)]
fn single<L: Lanes, E: Element>(l: L, target: &Target, n: usize) -> (u16, f32) {
    /// Sixteen at a time, from 1.2 to 0.3 of what brings the largest element to an end of the codes.
    const GUESSES: usize = 18;
    let (x, w) = (&target.x[..n], &target.w[..n]);
    let mut best = ((0, 0.0), f32::INFINITY);
    // From fine to coarse, with one fit and with two; then twice the f16 scales next to the best.
    for guess in 0..GUESSES + 2 {
        let halves: [(u16, f32); LANES] = if guess < GUESSES {
            let (to, passes) = (1.2 - 0.1 * (guess / 2) as f32, 1 + guess % 2);
            fit::<L, E>(l, (to, 0.0125), passes, x, w).map(|s| target.half(s.into()))
        } else {
            std::array::from_fn(|i| {
                let magnitude = i32::from(best.0.0 & 0x7fff) + i as i32 - 8;
                target.half_of(best.0.0 & 0x8000 | magnitude.clamp(0, 0x7bff) as u16)
            })
        };
        let (lane, error) = least(l, errors::<L, E>(l, x, w, l.load(&halves.map(|h| h.1))));
        if error < best.1 {
            best = (halves[lane], error);
        }
    }
    best.0
}

/// The scales of least squares for the codes of sixteen guesses, then codes anew. Guesses bring the largest element to either
/// end of the codes times `to`, `to - step` …
#[inline(always)]
fn fit<L: Lanes, E: Element>(
    l: L,
    (to, step): (f32, f32),
    passes: usize,
    x: &[f32],
    w: &[f32],
) -> [f32; LANES] {
    let (low, high) = extremes(l, x);
    let extreme = if high < -low { low } else { high };
    if extreme == 0.0 {
        return [0.0; LANES];
    }
    let (zero, tiny) = (l.splat(0.0), l.splat(1e-30));
    // Both ends of the codes in turn, times `to`, `to - step` … in twos.
    let ends: [f32; LANES] = std::array::from_fn(|i| if i % 2 == 0 { E::RANGE.0 } else { E::RANGE.1 });
    let twos: [f32; LANES] = std::array::from_fn(|i| (i / 2) as f32);
    let factors = l.sub(l.splat(to), l.mul(l.load(&twos), l.splat(step)));
    let mut inv = l.mul(l.mul(l.load(&ends), factors), l.splat(1.0 / extreme));
    let mut s = zero;
    for _ in 0..passes {
        let (mut sqq, mut sxq) = (zero, zero);
        for (&x, &w) in x.iter().zip(w) {
            let x = l.splat(x);
            let q = E::nearest(l, l.mul(x, inv));
            let wq = l.mul(l.splat(w), q);
            sqq = l.add(sqq, l.mul(wq, q));
            sxq = l.add(sxq, l.mul(wq, x));
        }
        s = l.div(sxq, l.greater(tiny, sqq));
        inv = inverse(l, s);
    }
    l.to_array(s)
}

/// `sum w (x - s q)²` for the scales of sixteen lanes.
#[inline(always)]
fn errors<L: Lanes, E: Element>(l: L, x: &[f32], w: &[f32], s: L::V) -> L::V {
    let inv = inverse(l, s);
    let mut error = l.splat(0.0);
    for (&x, &w) in x.iter().zip(w) {
        let x = l.splat(x);
        let miss = l.sub(x, l.mul(s, E::nearest(l, l.mul(x, inv))));
        error = l.add(error, l.mul(l.splat(w), l.mul(miss, miss)));
    }
    error
}

/// Writes the codes under scale `s`.
#[inline(always)]
fn assign<L: Lanes, E: Element>(l: L, x: &[f32], s: f32, codes: &mut [f32]) {
    let inv = inverse(l, l.splat(s));
    for (x, out) in x.as_chunks::<LANES>().0.iter().zip(codes.as_chunks_mut::<LANES>().0) {
        *out = l.to_array(E::nearest(l, l.mul(l.load(x), inv)));
    }
}

//! Types with one f16 scale per block, or one and a minimum: IQ4_NL, and with importance Q4_0, Q5_0, Q4_1, Q5_1.
//!
//! Sixteen candidates at once, one per lane. Each lane's scale by least squares is rounded to f16 before lanes are
//! compared.

use super::super::{CodecId, iq4, legacy};
use super::sub_blocks::nearest;
use super::symmetric::{Element, Int, Table};
use super::{COUNT, INFINITE, LANES, Lanes, Target, extremes, inverse, least, total};

#[inline(always)]
pub(super) fn encode_iq4_nl<L: Lanes>(l: L, target: &mut Target, block: &mut [u8]) {
    let mut values = [0i8; 32];
    let mut d = (INFINITE, 0.0);
    if !target.beyond(target.amax, -Table::RANGE.0) {
        d = single::<L, Table>(l, target, 32, 18);
        let mut codes = [0.0; 32];
        assign::<L, Table>(l, &target.x[..32], d.1, &mut codes);
        values = codes.map(|v| v as i8);
    }
    iq4::put_iq4_nl(d.0, &values, block);
}

/// Elements of the 4- and 5-bit blocks.
const BLOCK: usize = 32;

/// Q4_0, Q4_1, Q5_0 and Q5_1.
#[inline(always)]
pub(super) fn encode_legacy<L: Lanes>(l: L, codec: CodecId, target: &mut Target, block: &mut [u8]) {
    let mut codes = [0.0; BLOCK];
    let (x, zero) = (&target.x[..BLOCK], (0, 0.0));
    let (d, m) = match codec {
        CodecId::Q4_0 => (single::<L, Int<-8, 7>>(l, target, BLOCK, 8), zero),
        CodecId::Q5_0 => (single::<L, Int<-16, 15>>(l, target, BLOCK, 8), zero),
        CodecId::Q4_1 => pair(l, target, 15.0),
        _ => pair(l, target, 31.0),
    };
    match codec {
        CodecId::Q4_0 => {
            assign::<L, Int<-8, 7>>(l, x, d.1, &mut codes);
            codes.iter_mut().for_each(|code| *code += 8.0);
        }
        CodecId::Q5_0 => {
            assign::<L, Int<-16, 15>>(l, x, d.1, &mut codes);
            codes.iter_mut().for_each(|code| *code += 16.0);
        }
        _ => {
            let most = if codec == CodecId::Q4_1 { 15.0 } else { 31.0 };
            let (inv, min) = (inverse(l, l.splat(d.1)), l.splat(m.1));
            for (x, out) in x.as_chunks::<LANES>().0.iter().zip(codes.as_chunks_mut::<LANES>().0) {
                *out = l.to_array(nearest(l, l.mul(l.sub(l.load(x), min), inv), 0.0, most));
            }
        }
    }
    legacy::put_codes(codec, d.0, m.0, &codes, block);
}

/// f16 scale and minimum of a block with codes up to `most`. For sixteen cuts of its range, alternates between codes
/// and least squares; compares after rounding to f16.
#[inline(always)]
fn pair<L: Lanes>(l: L, target: &Target, most: f32) -> ((u16, f32), (u16, f32)) {
    const PASSES: usize = 4;
    let (x, w) = (&target.x[..BLOCK], &target.w[..BLOCK]);
    let low = x.iter().copied().fold(f32::MAX, f32::min);
    let high = x.iter().copied().fold(f32::MIN, f32::max);
    let (zero, tiny) = (l.splat(0.0), l.splat(1e-30));
    let (sw, sx) = weights(l, x, w);
    // From one cut more than there are codes to three fewer; the first pair is the formula's, without a fit.
    let cuts = l.sub(l.splat(most + 1.0), l.mul(l.load(&COUNT), l.splat(0.25)));
    let mut scale = l.div(l.splat(high - low), cuts);
    let mut min = l.splat(low);
    let mut best = ((target.half(0.0), target.half(low.into())), f32::INFINITY);
    for pass in 0..=PASSES {
        let (scales, mins) = (l.to_array(scale), l.to_array(min));
        let mut rounded = [((0, 0.0), (0, 0.0)); LANES];
        let (mut d, mut m) = ([0.0; LANES], [0.0; LANES]);
        for i in 0..LANES {
            rounded[i] = (target.half(scales[i].into()), target.half(mins[i].into()));
            (d[i], m[i]) = (rounded[i].0.1, rounded[i].1.1);
        }
        let (step, offset) = (l.load(&d), l.load(&m));
        let inv = inverse(l, step);
        let (mut error, mut sq, mut sqq, mut sxq) = (zero, zero, zero, zero);
        for (&x, &w) in x.iter().zip(w) {
            let (x, w) = (l.splat(x), l.splat(w));
            let above = l.sub(x, offset);
            let q = nearest(l, l.mul(above, inv), 0.0, most);
            let miss = l.sub_mul(step, q, above);
            error = l.mul_add(l.mul(w, miss), miss, error);
            let wq = l.mul(w, q);
            sq = l.add(sq, wq);
            sqq = l.mul_add(wq, q, sqq);
            sxq = l.mul_add(wq, x, sxq);
        }
        let (lane, error) = least(l, error);
        if error < best.1 {
            best = (rounded[lane], error);
        }
        if pass < PASSES {
            let det = l.greater(tiny, l.sub(l.mul(sw, sqq), l.mul(sq, sq)));
            scale = l.greater(zero, l.div(l.sub(l.mul(sw, sxq), l.mul(sx, sq)), det));
            // Minimum by least squares for the scale.
            min = l.div(l.sub(sx, l.mul(scale, sq)), sw);
        }
    }
    best.0
}

/// `sum w` and `sum w x`, in every lane.
#[inline(always)]
fn weights<L: Lanes>(l: L, x: &[f32], w: &[f32]) -> (L::V, L::V) {
    let (mut sw, mut sx) = (l.splat(0.0), l.splat(0.0));
    for (x, w) in x.as_chunks::<LANES>().0.iter().zip(w.as_chunks::<LANES>().0) {
        sw = l.add(sw, l.load(w));
        sx = l.mul_add(l.load(w), l.load(x), sx);
    }
    (l.splat(total(l, sw)), l.splat(total(l, sx)))
}

/// f16 scale of a block of `n` elements. Tries `guesses` times sixteen scales that map the largest element to an end
/// of the codes, from factor 1.2 down in steps of 1/80.
#[inline(always)]
fn single<L: Lanes, E: Element>(l: L, target: &Target, n: usize, guesses: usize) -> (u16, f32) {
    let (x, w) = (&target.x[..n], &target.w[..n]);
    let mut best = ((0, 0.0), f32::INFINITY);
    // From fine to coarse, with one fit and with two; then twice the f16 scales next to the best.
    for guess in 0..guesses + 2 {
        let halves: [(u16, f32); LANES] = if guess < guesses {
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

/// Scales by least squares for the codes of sixteen guesses, then the codes again. Guesses map the largest element to
/// either end of the codes times `to`, `to - step` …
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
    // Alternate between both ends of the codes, times `to`, `to - step` …, in pairs.
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

//! Q2_K, Q4_K, Q5_K: sub-blocks `(d·scale)·q - dmin·min` with small integers `scale` and `min`, neither negative.

use super::super::k_quants::{self, SuperBlock};
use super::{INFINITE, LANES, Lanes, MOST, Target, choose_scales, inverse, least, moments, round};

/// What distinguishes the types.
struct Kind {
    /// Elements of a sub-block.
    sub: usize,
    /// The largest code.
    codes: f32,
    /// The largest integer scale and minimum.
    levels: f32,
    /// Offsets of the first guess: a sub-block's range is cut into `codes + from + i·step`.
    from: f32,
    step: f32,
    /// How often codes and scales are fitted to each other before anything is rounded.
    fits: usize,
    /// How often the integers are chosen anew after the f16 scales.
    rounds: usize,
}

const Q2_K: Kind = Kind { sub: 16, codes: 3.0, levels: 15.0, from: -1.2, step: 0.16, fits: 3, rounds: 5 };
const Q4_K: Kind = Kind { sub: 32, codes: 15.0, levels: 63.0, from: -1.6, step: 0.2, fits: 2, rounds: 2 };
const Q5_K: Kind = Kind { sub: 32, codes: 31.0, levels: 63.0, from: -1.2, step: 0.16, fits: 2, rounds: 2 };

#[inline(always)]
pub(super) fn encode_q2_k<L: Lanes>(l: L, target: &mut Target, block: &mut [u8]) {
    k_quants::put_q2_k(&search(l, &Q2_K, target), block);
}

#[inline(always)]
pub(super) fn encode_q4_k<L: Lanes>(l: L, target: &mut Target, block: &mut [u8]) {
    k_quants::put_q4_k(&search(l, &Q4_K, target), block);
}

#[inline(always)]
pub(super) fn encode_q5_k<L: Lanes>(l: L, target: &mut Target, block: &mut [u8]) {
    k_quants::put_q5_k(&search(l, &Q5_K, target), block);
}

/// A sub-block's scale and minimum, and the sums of its codes.
#[derive(Clone, Copy, Default)]
struct Fit {
    s: f32,
    m: f32,
    /// `sum w q²`.
    qq: f32,
}

/// Sums of a sub-block that do not depend on codes.
#[derive(Clone, Copy, Default)]
struct Sums {
    w: f32,
    x: f32,
    xx: f32,
}

/// A choice for the whole block.
#[derive(Clone, Copy)]
struct Choice {
    d: (u16, f32),
    dmin: (u16, f32),
    scales: [f32; 16],
    mins: [f32; 16],
    error: f32,
}

#[inline(always)]
fn search<L: Lanes>(l: L, kind: &Kind, target: &Target) -> SuperBlock {
    let subs = MOST / kind.sub;
    let reach = kind.levels * kind.codes;
    let (low, high) = target.x.iter().fold((0f32, 0f32), |(low, high), &v| (low.min(v), high.max(v)));
    if target.beyond(high, reach) || target.beyond(-low, kind.levels) {
        return SuperBlock { d: INFINITE, ..SuperBlock::ZERO };
    }
    let mut fits = [Fit::default(); 16];
    let mut sums = [Sums::default(); 16];
    for sub in 0..subs {
        let (x, w) = part(kind, target, sub);
        sums[sub] = sums_of(l, x, w);
        fits[sub] = fit(l, kind, x, w, sums[sub]);
    }
    let s: [f32; 16] = std::array::from_fn(|i| fits[i].s);
    let m: [f32; 16] = std::array::from_fn(|i| fits[i].m);
    let qq: [f32; 16] = std::array::from_fn(|i| fits[i].qq);
    let ww: [f32; 16] = std::array::from_fn(|i| sums[i].w);
    let step = kind.levels / 160.0;
    let [d] = choose_scales(l, &s[..subs], &qq[..subs], kind.levels, step);
    let [dmin] = choose_scales(l, &m[..subs], &ww[..subs], kind.levels, step);
    let (d, dmin) = (target.half(d.into()), target.half(dmin.into()));
    let mut best = choose_integers(l, kind, target, d, dmin, &s, &m);
    let mut codes = [0.0; MOST];
    for _ in 1..kind.rounds {
        let (d, dmin) = refit(l, kind, target, &best, &sums, &mut codes);
        let (d, dmin) = (target.half(d), target.half(dmin));
        if (d.0, dmin.0) == (best.d.0, best.dmin.0) {
            break;
        }
        let s: [f32; 16] = std::array::from_fn(|i| best.scales[i] * best.d.1);
        let m: [f32; 16] = std::array::from_fn(|i| best.mins[i] * best.dmin.1);
        let next = choose_integers(l, kind, target, d, dmin, &s, &m);
        if next.error >= best.error {
            break;
        }
        best = next;
    }
    let mut out = SuperBlock { d: best.d.0, dmin: best.dmin.0, ..SuperBlock::ZERO };
    for sub in 0..subs {
        out.scales[sub] = best.scales[sub] as i8;
        out.mins[sub] = best.mins[sub] as u8;
        assign(l, kind, target, &best, sub, &mut codes);
    }
    for (out, code) in out.codes.iter_mut().zip(codes) {
        *out = code as i8;
    }
    out
}

#[inline(always)]
fn part<'a>(kind: &Kind, target: &'a Target, sub: usize) -> (&'a [f32], &'a [f32]) {
    let range = sub * kind.sub..(sub + 1) * kind.sub;
    (&target.x[range.clone()], &target.w[range])
}

#[inline(always)]
fn sums_of<L: Lanes>(l: L, x: &[f32], w: &[f32]) -> Sums {
    let (mut ww, mut wx, mut wxx) = (l.splat(0.0), l.splat(0.0), l.splat(0.0));
    for (x, w) in x.as_chunks::<LANES>().0.iter().zip(w.as_chunks::<LANES>().0) {
        let (x, w) = (l.load(x), l.load(w));
        let wx1 = l.mul(w, x);
        ww = l.add(ww, w);
        wx = l.add(wx, wx1);
        wxx = l.add(wxx, l.mul(wx1, x));
    }
    Sums { w: super::total(l, ww), x: super::total(l, wx), xx: super::total(l, wxx) }
}

/// Codes of sixteen cuts of the range, then for each the scale and minimum of least squares, then codes anew.
#[inline(always)]
fn fit<L: Lanes>(l: L, kind: &Kind, x: &[f32], w: &[f32], sums: Sums) -> Fit {
    let (low, high) = x.iter().fold((0f32, f32::MIN), |(low, high), &v| (low.min(v), high.max(v)));
    if high <= low {
        return Fit { s: 0.0, m: -low, qq: 0.0 };
    }
    let cuts: [f32; LANES] =
        std::array::from_fn(|i| (kind.codes + kind.from + i as f32 * kind.step) / (high - low));
    let zero = l.splat(0.0);
    let (mut inv, mut m) = (l.load(&cuts), l.splat(-low));
    let mut best = (Fit::default(), f32::INFINITY);
    for _ in 0..kind.fits {
        let (q, qq, xq) = code_sums(l, kind.codes, x, w, inv, m);
        let tiny = l.splat(1e-30);
        let (sw, sx) = (l.splat(sums.w), l.splat(sums.x));
        let det = l.greater(tiny, l.sub(l.mul(sw, qq), l.mul(q, q)));
        let scale = l.div(l.sub(l.mul(sw, xq), l.mul(sx, q)), det);
        let offset = l.div(l.sub(l.mul(qq, sx), l.mul(q, xq)), det);
        // Where the offset would be positive it is 0.
        let plain = l.div(xq, l.greater(tiny, qq));
        let scale = l.greater(zero, l.if_less(zero, offset, plain, scale));
        let offset = l.lesser(zero, offset);
        let explained = l.add(l.mul(scale, xq), l.mul(offset, sx));
        let (lane, error) = least(l, l.sub(l.splat(sums.xx), explained));
        if error < best.1 {
            let at = |v| l.to_array(v)[lane];
            best = (Fit { s: at(scale), m: -at(offset), qq: at(qq) }, error);
        }
        (inv, m) = (inverse(l, scale), l.sub(zero, offset));
    }
    best.0
}

/// `sum w q`, `sum w q²` and `sum w x q` of the codes `round((x + m)·inv)` of each lane.
#[inline(always)]
fn code_sums<L: Lanes>(l: L, codes: f32, x: &[f32], w: &[f32], inv: L::V, m: L::V) -> (L::V, L::V, L::V) {
    let (zero, most) = (l.splat(0.0), l.splat(codes));
    let (mut sq, mut sqq, mut sxq) = (zero, zero, zero);
    for (&x, &w) in x.iter().zip(w) {
        let x = l.splat(x);
        let q = code(l, l.mul(l.add(x, m), inv), zero, most);
        let wq = l.mul(l.splat(w), q);
        sq = l.add(sq, wq);
        sqq = l.add(sqq, l.mul(wq, q));
        sxq = l.add(sxq, l.mul(wq, x));
    }
    (sq, sqq, sxq)
}

#[inline(always)]
fn code<L: Lanes>(l: L, v: L::V, low: L::V, high: L::V) -> L::V {
    round(l, l.lesser(l.greater(v, low), high))
}

/// The integers of every sub-block for given f16 scales: of four times four around `s / d` and `m / dmin`, those with which
/// the decoder errs least.
#[inline(always)]
fn choose_integers<L: Lanes>(
    l: L,
    kind: &Kind,
    target: &Target,
    d: (u16, f32),
    dmin: (u16, f32),
    s: &[f32; 16],
    m: &[f32; 16],
) -> Choice {
    let quotient = |a: f32, b: f32| if b == 0.0 { 0.0 } else { (a / b).floor().clamp(-1.0, 64.0) };
    let limit = |v: f32| v.clamp(0.0, kind.levels);
    let mut choice = Choice { d, dmin, scales: [0.0; 16], mins: [0.0; 16], error: 0.0 };
    for sub in 0..MOST / kind.sub {
        let (x, w) = part(kind, target, sub);
        let (scale, min) = (quotient(s[sub], d.1), quotient(m[sub], dmin.1));
        let scales: [f32; LANES] = std::array::from_fn(|i| limit(scale - 1.0 + (i % 4) as f32));
        let mins: [f32; LANES] = std::array::from_fn(|i| limit(min - 1.0 + (i / 4) as f32));
        let (steps, offsets) = (l.mul(l.splat(d.1), l.load(&scales)), l.mul(l.splat(dmin.1), l.load(&mins)));
        let inv = inverse(l, steps);
        let (zero, most) = (l.splat(0.0), l.splat(kind.codes));
        let mut error = zero;
        for (&x, &w) in x.iter().zip(w) {
            let shifted = l.add(l.splat(x), offsets);
            let q = code(l, l.mul(shifted, inv), zero, most);
            let miss = l.sub(shifted, l.mul(steps, q));
            error = l.add(error, l.mul(l.splat(w), l.mul(miss, miss)));
        }
        let (lane, error) = least(l, error);
        choice.scales[sub] = scales[lane];
        choice.mins[sub] = mins[lane];
        choice.error += error;
    }
    choice
}

/// Writes the codes of a sub-block.
#[inline(always)]
fn assign<L: Lanes>(
    l: L,
    kind: &Kind,
    target: &Target,
    choice: &Choice,
    sub: usize,
    codes: &mut [f32; MOST],
) {
    let (x, _) = part(kind, target, sub);
    let step = l.splat(choice.d.1 * choice.scales[sub]);
    let offset = l.splat(choice.dmin.1 * choice.mins[sub]);
    let inv = inverse(l, step);
    let (zero, most) = (l.splat(0.0), l.splat(kind.codes));
    let codes = &mut codes[sub * kind.sub..(sub + 1) * kind.sub];
    for (x, out) in x.as_chunks::<LANES>().0.iter().zip(codes.as_chunks_mut::<LANES>().0) {
        *out = l.to_array(code(l, l.mul(l.add(l.load(x), offset), inv), zero, most));
    }
}

/// The two f16 scales of least squares for integers and codes as they are: with `x ~ d·(L q) - dmin·M`.
#[inline(always)]
fn refit<L: Lanes>(
    l: L,
    kind: &Kind,
    target: &Target,
    choice: &Choice,
    sums: &[Sums; 16],
    codes: &mut [f32; MOST],
) -> (f64, f64) {
    let (mut aa, mut ab, mut bb, mut ax, mut bx) = (0f64, 0f64, 0f64, 0f64, 0f64);
    for sub in 0..MOST / kind.sub {
        assign(l, kind, target, choice, sub, codes);
        let (x, w) = part(kind, target, sub);
        let (q, qq, xq) = moments(l, x, w, &codes[sub * kind.sub..(sub + 1) * kind.sub]);
        let (scale, min) = (f64::from(choice.scales[sub]), f64::from(choice.mins[sub]));
        aa += scale * scale * f64::from(qq);
        ax += scale * f64::from(xq);
        ab -= scale * min * f64::from(q);
        bb += min * min * f64::from(sums[sub].w);
        bx -= min * f64::from(sums[sub].x);
    }
    let det = aa * bb - ab * ab;
    if bb == 0.0 || det <= 1e-12 * aa * bb {
        return (if aa > 0.0 { ax / aa } else { 0.0 }, choice.dmin.1.into());
    }
    (((ax * bb - bx * ab) / det).max(0.0), ((bx * aa - ax * ab) / det).max(0.0))
}

//! Q2_K, Q4_K, Q5_K: sub-blocks `(d·scale)·q - dmin·min` with small integers `scale` and `min`, neither negative.

use super::super::k_quants::{self, SuperBlock};
use super::{
    COUNT, INFINITE, LANES, Lanes, MOST, ROUND, Target, earlier, extremes, inverse, least, moments, round,
    uneven,
};

/// What distinguishes the types.
struct Kind {
    /// Elements of a sub-block.
    sub: usize,
    /// The largest code.
    codes: f32,
    /// The largest integer scale and minimum.
    levels: f32,
    /// Offsets of the first guess: a sub-block's range is cut into `codes + to - i·step`, finest first: of two cuts that
    /// are as good, the one with the smaller scale leaves more room to the other sub-blocks.
    to: f32,
    step: f32,
    /// How often codes and scales are fitted to each other before anything is rounded.
    fits: usize,
    /// Pairs of f16 scales that are tried (of an [uneven] block, [`STARTS`]), and how often the integers are chosen under
    /// each.
    starts: usize,
    rounds: usize,
}

const Q2_K: Kind =
    Kind { sub: 16, codes: 3.0, levels: 15.0, to: 1.2, step: 0.16, fits: 3, starts: 3, rounds: 5 };
const Q4_K: Kind =
    Kind { sub: 32, codes: 15.0, levels: 63.0, to: 2.4, step: 0.3, fits: 2, starts: 1, rounds: 2 };
const Q5_K: Kind =
    Kind { sub: 32, codes: 31.0, levels: 63.0, to: 4.3, step: 0.5, fits: 3, starts: 2, rounds: 3 };

/// Most pairs of f16 scales that are tried.
const STARTS: usize = 16;

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
    /// `sum w q²` and `sum w q`.
    qq: f32,
    q: f32,
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
    let (low, high) = extremes(l, &target.x);
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
    let starts: [(f32, f32); STARTS] = choose_scales(l, kind, &fits[..subs], &sums[..subs]);
    let s: [f32; 16] = std::array::from_fn(|i| fits[i].s);
    let m: [f32; 16] = std::array::from_fn(|i| fits[i].m);
    let mut best: Option<Choice> = None;
    let many = uneven(&s[..subs]) || uneven(&m[..subs]);
    for (d, dmin) in &starts[..if many { STARTS } else { kind.starts }] {
        let (d, dmin) = (target.half((*d).into()), target.half((*dmin).into()));
        let choice = descend(l, kind, target, &sums, (d, dmin), (s, m));
        if best.is_none_or(|best| choice.error < best.error) {
            best = Some(choice);
        }
    }
    let Some(best) = best else { return SuperBlock::ZERO };
    let mut codes = [0.0; MOST];
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

/// From two f16 scales: the sub-blocks' integers, then the f16 scales of least squares, and so on while it gains.
#[inline(always)]
fn descend<L: Lanes>(
    l: L,
    kind: &Kind,
    target: &Target,
    sums: &[Sums; 16],
    (mut d, mut dmin): ((u16, f32), (u16, f32)),
    (mut s, mut m): ([f32; 16], [f32; 16]),
) -> Choice {
    let mut best = Choice { d, dmin, scales: [0.0; 16], mins: [0.0; 16], error: f32::INFINITY };
    let mut codes = [0.0; MOST];
    for round in 1..=kind.rounds {
        let next = choose_integers(l, kind, target, d, dmin, &s, &m);
        if next.error >= best.error {
            break;
        }
        best = next;
        if round == kind.rounds {
            break;
        }
        let (scale, min) = refit(l, kind, target, &best, sums, &mut codes);
        (d, dmin) = (target.half(scale), target.half(min));
        if (d.0, dmin.0) == (best.d.0, best.dmin.0) {
            break;
        }
        s = std::array::from_fn(|i| best.scales[i] * best.d.1);
        m = std::array::from_fn(|i| best.mins[i] * best.dmin.1);
    }
    best
}

/// Candidates of the two f16 scales, the best first: of sixteen that bring the largest scale to `levels` or little below it,
/// times sixteen that do so with the largest minimum, those whose integers meet all scales and minima best. Off by `ds` and
/// `dm`, a sub-block loses `ds² sum w q² - 2 ds dm sum w q + dm² sum w` more.
#[inline(always)]
fn choose_scales<L: Lanes>(l: L, kind: &Kind, fits: &[Fit], sums: &[Sums]) -> [(f32, f32); STARTS] {
    let largest = |of: fn(&Fit) -> f32| fits.iter().map(of).fold(0f32, f32::max);
    let (scale, min) = (largest(|fit| fit.s), largest(|fit| fit.m));
    let steps: [f32; LANES] = std::array::from_fn(|i| kind.levels * (1.0 - i as f32 / 160.0));
    let d = l.div(l.splat(scale), l.load(&steps));
    let inv = inverse(l, d);
    let mut misses = [l.splat(0.0); 16];
    for (miss, fit) in misses.iter_mut().zip(fits) {
        let s = l.splat(fit.s);
        *miss = l.sub(l.mul(round(l, l.mul(s, inv)), d), s);
    }
    let d = l.to_array(d);
    let mut best = [(f32::INFINITY, (0.0, 0.0)); STARTS];
    for step in steps {
        let dmin = min / step;
        let inverse = if dmin == 0.0 { 0.0 } else { 1.0 / dmin };
        let mut cost = l.splat(0.0);
        for ((fit, sums), &miss) in fits.iter().zip(sums).zip(&misses) {
            let min = (fit.m * inverse + ROUND - ROUND) * dmin - fit.m;
            let own = l.mul(miss, l.sub(l.mul(miss, l.splat(fit.qq)), l.splat(2.0 * min * fit.q)));
            cost = l.add(cost, l.add(own, l.splat(min * min * sums.w)));
        }
        let (lane, cost) = least(l, cost);
        let mut candidate = (cost, (d[lane], dmin));
        for best in &mut best {
            if candidate.0 < best.0 {
                std::mem::swap(best, &mut candidate);
            }
        }
    }
    best.map(|(_, scales)| scales)
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
    let (low, high) = extremes(l, x);
    if high <= low {
        return Fit { m: -low, ..Fit::default() };
    }
    let zero = l.splat(0.0);
    let cuts = l.sub(l.splat(kind.codes + kind.to), l.mul(l.load(&COUNT), l.splat(kind.step)));
    let (mut inv, mut m) = (l.mul(cuts, l.splat(1.0 / (high - low))), l.splat(-low));
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
        let (lane, error) = least(l, l.sub(l.splat(sums.xx), l.mul(explained, earlier(l))));
        if error < best.1 {
            let at = |v| l.to_array(v)[lane];
            best = (Fit { s: at(scale), m: -at(offset), qq: at(qq), q: at(q) }, error);
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

/// The neighbours of a pair of integers, lane by lane.
const ACROSS: [f32; LANES] =
    [-1.0, 0.0, 1.0, 2.0, -1.0, 0.0, 1.0, 2.0, -1.0, 0.0, 1.0, 2.0, -1.0, 0.0, 1.0, 2.0];
const DOWN: [f32; LANES] =
    [-1.0, -1.0, -1.0, -1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0];

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
    let limit = |v: L::V| l.lesser(l.greater(v, l.splat(0.0)), l.splat(kind.levels));
    let mut choice = Choice { d, dmin, scales: [0.0; 16], mins: [0.0; 16], error: 0.0 };
    for sub in 0..MOST / kind.sub {
        let (x, w) = part(kind, target, sub);
        let (scale, min) = (quotient(s[sub], d.1), quotient(m[sub], dmin.1));
        let scales = limit(l.add(l.splat(scale), l.load(&ACROSS)));
        let mins = limit(l.add(l.splat(min), l.load(&DOWN)));
        let (steps, offsets) = (l.mul(l.splat(d.1), scales), l.mul(l.splat(dmin.1), mins));
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
        choice.scales[sub] = l.to_array(scales)[lane];
        choice.mins[sub] = l.to_array(mins)[lane];
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

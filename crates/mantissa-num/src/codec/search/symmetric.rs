//! Types without a minimum: Q3_K, Q6_K, IQ4_XS, whose sub-blocks have a signed integer scale, and IQ4_NL, which has one
//! f16 scale.
//!
//! Codes reach one step further down than up (or, in the tables of IQ4, unevenly), so that the sign of a scale matters: both
//! are tried.

use super::super::iq4::{self, LEVELS};
use super::super::k_quants::{self, SuperBlock};
use super::{
    COUNT, INFINITE, LANES, Lanes, MOST, Target, choose_scales, earlier, extremes, inverse, least, moments,
    round, uneven,
};

/// What a code stands for before scaling.
trait Element: Copy {
    /// The least and the largest value.
    const RANGE: (f32, f32);
    /// The values nearest to `v`.
    fn nearest<L: Lanes>(l: L, v: L::V) -> L::V;
}

/// Integers from `LOW` to `HIGH`.
#[derive(Clone, Copy)]
struct Int<const LOW: i32, const HIGH: i32>;

impl<const LOW: i32, const HIGH: i32> Element for Int<LOW, HIGH> {
    const RANGE: (f32, f32) = (LOW as f32, HIGH as f32);

    #[inline(always)]
    fn nearest<L: Lanes>(l: L, v: L::V) -> L::V {
        round(l, l.lesser(l.greater(v, l.splat(LOW as f32)), l.splat(HIGH as f32)))
    }
}

/// The table of IQ4.
#[derive(Clone, Copy)]
struct Table;

impl Element for Table {
    const RANGE: (f32, f32) = (LEVELS[0], LEVELS[15]);

    /// Steps up at every midpoint that is passed.
    #[inline(always)]
    fn nearest<L: Lanes>(l: L, v: L::V) -> L::V {
        let mut level = l.splat(LEVELS[0]);
        for pair in LEVELS.windows(2) {
            level = l.if_less(l.splat((pair[0] + pair[1]) / 2.0), v, l.splat(pair[1]), level);
        }
        level
    }
}

/// What distinguishes the types with sub-blocks.
struct Kind {
    /// Elements of a sub-block.
    sub: usize,
    /// The least and the largest integer scale.
    scales: (f32, f32),
    /// Spacing of the scales that are tried for the whole block, in units of the largest integer.
    step: f32,
    /// First guesses of a sub-block's scale: see [`fit`].
    guesses: (f32, f32),
    /// How often codes and scales are fitted to each other before anything is rounded.
    fits: usize,
    /// Block scales that are tried (of an [uneven] block, [`STARTS`]), and how often the integers are chosen under each.
    starts: usize,
    rounds: usize,
}

const Q3_K: Kind =
    Kind { sub: 16, scales: (-32.0, 31.0), step: 0.4, guesses: (1.17, 0.06), fits: 3, starts: 4, rounds: 4 };
const Q6_K: Kind = Kind {
    sub: 16,
    scales: (-128.0, 127.0),
    step: 0.4,
    guesses: (1.03, 0.008),
    fits: 1,
    starts: 1,
    rounds: 3,
};
const IQ4_XS: Kind =
    Kind { sub: 32, scales: (-32.0, 31.0), step: 0.4, guesses: (1.17, 0.06), fits: 2, starts: 3, rounds: 3 };

/// Most block scales that are tried.
const STARTS: usize = LANES;

#[inline(always)]
pub(super) fn encode_q3_k<L: Lanes>(l: L, target: &mut Target, block: &mut [u8]) {
    let found = search::<L, Int<-4, 3>>(l, &Q3_K, target);
    k_quants::put_q3_k(&found, block);
}

#[inline(always)]
pub(super) fn encode_q6_k<L: Lanes>(l: L, target: &mut Target, block: &mut [u8]) {
    let found = search::<L, Int<-32, 31>>(l, &Q6_K, target);
    k_quants::put_q6_k(&found, block);
}

#[inline(always)]
pub(super) fn encode_iq4_xs<L: Lanes>(l: L, target: &mut Target, block: &mut [u8]) {
    let found = search::<L, Table>(l, &IQ4_XS, target);
    iq4::put_iq4_xs(&found, block);
}

/// One f16 scale: each lane's scale of least squares is rounded to f16 before lanes are compared.
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

/// A sub-block's scale, and `sum w q²`.
#[derive(Clone, Copy, Default)]
struct Fit {
    s: f32,
    qq: f32,
}

/// A choice for the whole block.
#[derive(Clone, Copy)]
struct Choice {
    d: (u16, f32),
    scales: [f32; 16],
    error: f32,
}

#[inline(always)]
fn search<L: Lanes, E: Element>(l: L, kind: &Kind, target: &Target) -> SuperBlock {
    let subs = MOST / kind.sub;
    if target.beyond(target.amax, -E::RANGE.0 * -kind.scales.0) {
        return SuperBlock { d: INFINITE, ..SuperBlock::ZERO };
    }
    let mut fits = [Fit::default(); 16];
    for sub in 0..subs {
        let (x, w) = part(kind, target, sub);
        fits[sub] = fit::<L, E>(l, kind.guesses, kind.fits, x, w).0;
    }
    let s: [f32; 16] = std::array::from_fn(|i| fits[i].s);
    let qq: [f32; 16] = std::array::from_fn(|i| fits[i].qq);
    let starts: [f32; STARTS] = choose_scales(l, &s[..subs], &qq[..subs], kind.scales.0, -kind.step);
    let mut best = Choice { d: (0, 0.0), scales: [0.0; 16], error: f32::INFINITY };
    let many = uneven(&s[..subs]);
    for d in &starts[..if many { STARTS } else { kind.starts }] {
        let choice = descend::<L, E>(l, kind, target, target.half((*d).into()), s);
        if choice.error < best.error {
            best = choice;
        }
    }
    let mut codes = [0.0; MOST];
    let mut out = SuperBlock { d: best.d.0, ..SuperBlock::ZERO };
    for sub in 0..subs {
        let (x, _) = part(kind, target, sub);
        let codes = &mut codes[sub * kind.sub..(sub + 1) * kind.sub];
        assign::<L, E>(l, x, best.d.1 * best.scales[sub], codes);
        out.scales[sub] = best.scales[sub] as i8;
    }
    for (out, code) in out.codes.iter_mut().zip(codes) {
        *out = code as i8;
    }
    out
}

/// From an f16 scale: the sub-blocks' integers, then the f16 scale for them, and so on while it gains.
#[inline(always)]
fn descend<L: Lanes, E: Element>(
    l: L,
    kind: &Kind,
    target: &Target,
    mut d: (u16, f32),
    mut s: [f32; 16],
) -> Choice {
    let mut best = Choice { d, scales: [0.0; 16], error: f32::INFINITY };
    let mut codes = [0.0; MOST];
    for round in 1..=kind.rounds {
        let next = choose_integers::<L, E>(l, kind, target, d, &s);
        if next.error >= best.error {
            break;
        }
        best = next;
        if round == kind.rounds {
            break;
        }
        d = target.half(refit::<L, E>(l, kind, target, &best, &mut codes));
        if d.0 == best.d.0 {
            break;
        }
        s = std::array::from_fn(|i| best.scales[i] * best.d.1);
    }
    best
}

#[inline(always)]
fn part<'a>(kind: &Kind, target: &'a Target, sub: usize) -> (&'a [f32], &'a [f32]) {
    let range = sub * kind.sub..(sub + 1) * kind.sub;
    (&target.x[range.clone()], &target.w[range])
}

/// The scale of least squares for the codes of sixteen guesses, then codes anew. Also the scales of all lanes. Guesses bring
/// the largest element to either end of the codes times `to`, `to - step` …: the finest first, as of two that are as good the
/// smaller scale leaves more room to the other sub-blocks.
#[inline(always)]
fn fit<L: Lanes, E: Element>(
    l: L,
    (to, step): (f32, f32),
    passes: usize,
    x: &[f32],
    w: &[f32],
) -> (Fit, [f32; LANES]) {
    let (low, high) = extremes(l, x);
    let extreme = if high < -low { low } else { high };
    if extreme == 0.0 {
        return (Fit::default(), [0.0; LANES]);
    }
    let (zero, tiny) = (l.splat(0.0), l.splat(1e-30));
    // Both ends of the codes in turn, times `to`, `to - step` … in twos.
    let ends: [f32; LANES] = std::array::from_fn(|i| if i % 2 == 0 { E::RANGE.0 } else { E::RANGE.1 });
    let twos: [f32; LANES] = std::array::from_fn(|i| (i / 2) as f32);
    let factors = l.sub(l.splat(to), l.mul(l.load(&twos), l.splat(step)));
    let mut inv = l.mul(l.mul(l.load(&ends), factors), l.splat(1.0 / extreme));
    let mut best = (Fit::default(), 0.0, [0.0; LANES]);
    for _ in 0..passes {
        let (mut sqq, mut sxq) = (zero, zero);
        for (&x, &w) in x.iter().zip(w) {
            let x = l.splat(x);
            let q = E::nearest(l, l.mul(x, inv));
            let wq = l.mul(l.splat(w), q);
            sqq = l.add(sqq, l.mul(wq, q));
            sxq = l.add(sxq, l.mul(wq, x));
        }
        let s = l.div(sxq, l.greater(tiny, sqq));
        let (lane, error) = least(l, l.sub(zero, l.mul(l.mul(s, sxq), earlier(l))));
        let scales = l.to_array(s);
        best.2 = scales;
        if error < best.1 {
            best.0 = Fit { s: scales[lane], qq: l.to_array(sqq)[lane] };
            best.1 = error;
        }
        inv = inverse(l, s);
    }
    (best.0, best.2)
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

/// The integers of every sub-block for a given f16 scale: of sixteen around `s / d`, the one with which the decoder errs
/// least.
#[inline(always)]
fn choose_integers<L: Lanes, E: Element>(
    l: L,
    kind: &Kind,
    target: &Target,
    d: (u16, f32),
    s: &[f32; 16],
) -> Choice {
    let mut choice = Choice { d, scales: [0.0; 16], error: 0.0 };
    let (low, high) = kind.scales;
    for sub in 0..MOST / kind.sub {
        let (x, w) = part(kind, target, sub);
        let middle = if d.1 == 0.0 { 0.0 } else { (s[sub] / d.1).floor().clamp(low, high) };
        let scales = l.add(l.splat(middle - 7.0), l.load(&COUNT));
        let scales = l.lesser(l.greater(scales, l.splat(low)), l.splat(high));
        let error = errors::<L, E>(l, x, w, l.mul(l.splat(d.1), scales));
        let (lane, error) = least(l, error);
        choice.scales[sub] = l.to_array(scales)[lane];
        choice.error += error;
    }
    choice
}

/// Writes the codes under scale `s`.
#[inline(always)]
fn assign<L: Lanes, E: Element>(l: L, x: &[f32], s: f32, codes: &mut [f32]) {
    let inv = inverse(l, l.splat(s));
    for (x, out) in x.as_chunks::<LANES>().0.iter().zip(codes.as_chunks_mut::<LANES>().0) {
        *out = l.to_array(E::nearest(l, l.mul(l.load(x), inv)));
    }
}

/// The f16 scale of least squares for integers and codes as they are.
#[inline(always)]
fn refit<L: Lanes, E: Element>(
    l: L,
    kind: &Kind,
    target: &Target,
    choice: &Choice,
    codes: &mut [f32; MOST],
) -> f64 {
    let (mut squares, mut products) = (0f64, 0f64);
    for sub in 0..MOST / kind.sub {
        let (x, w) = part(kind, target, sub);
        let codes = &mut codes[sub * kind.sub..(sub + 1) * kind.sub];
        assign::<L, E>(l, x, choice.d.1 * choice.scales[sub], codes);
        let (_, qq, xq) = moments(l, x, w, codes);
        let scale = f64::from(choice.scales[sub]);
        squares += scale * scale * f64::from(qq);
        products += scale * f64::from(xq);
    }
    if squares > 0.0 { products / squares } else { 0.0 }
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
            fit::<L, E>(l, (to, 0.0125), passes, x, w).1.map(|s| target.half(s.into()))
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

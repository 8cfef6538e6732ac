//! Search of the lattice types, and IQ2 and IQ3: magnitudes are a grid point, signs are stored separately.

use super::super::CodecId;
use super::super::grids;
use super::super::iq::{self, IQ2_LEVELS, IQ3_S_LEVELS, IQ3_XXS_LEVELS, Lattice};
use super::span::{LatticeType, Met, SignsOrShift, meet, planes};
use super::{INFINITE, LANES, Lanes, MOST, Target, inverse, least, round};

static IQ2_XXS_PLANES: [[f32; LANES]; 128] = planes(&grids::IQ2_XXS, 8, 2, &IQ2_LEVELS);
static IQ2_XS_PLANES: [[f32; LANES]; 256] = planes(&grids::IQ2_XS, 8, 2, &IQ2_LEVELS);
static IQ2_S_PLANES: [[f32; LANES]; 512] = planes(&grids::IQ2_S, 8, 2, &IQ2_LEVELS);
static IQ3_XXS_PLANES: [[f32; LANES]; 64] = planes(&grids::IQ3_XXS, 4, 3, &IQ3_XXS_LEVELS);
static IQ3_S_PLANES: [[f32; LANES]; 128] = planes(&grids::IQ3_S, 4, 3, &IQ3_S_LEVELS);

const IQ2_XXS: LatticeType = LatticeType {
    span: 32,
    coords: 8,
    planes: &IQ2_XXS_PLANES,
    scales: 16.0,
    unit: 0.125,
    // The grids do not use the fourth level.
    levels: &[IQ2_LEVELS[0], IQ2_LEVELS[1], IQ2_LEVELS[2]],
    from: 0.55,
    step: 0.05,
    choice: SignsOrShift::EvenSigns,
};
const IQ2_XS: LatticeType = LatticeType { span: 16, planes: &IQ2_XS_PLANES, ..IQ2_XXS };
const IQ2_S: LatticeType =
    LatticeType { span: 16, planes: &IQ2_S_PLANES, choice: SignsOrShift::Signs, ..IQ2_XXS };
const IQ3_XXS: LatticeType = LatticeType {
    span: 32,
    coords: 4,
    planes: &IQ3_XXS_PLANES,
    scales: 16.0,
    unit: 0.25,
    levels: &IQ3_XXS_LEVELS,
    from: 0.7,
    step: 0.03,
    choice: SignsOrShift::EvenSigns,
};
const IQ3_S: LatticeType = LatticeType {
    planes: &IQ3_S_PLANES,
    unit: 1.0,
    levels: &IQ3_S_LEVELS,
    choice: SignsOrShift::Signs,
    ..IQ3_XXS
};

#[inline(always)]
pub(super) fn encode<L: Lanes>(l: L, codec: CodecId, target: &mut Target, block: &mut [u8]) {
    match codec {
        CodecId::Iq2Xxs => iq::put_iq2_xxs(&search(l, &IQ2_XXS, target), block),
        CodecId::Iq2Xs => iq::put_iq2_xs(&search(l, &IQ2_XS, target), block),
        CodecId::Iq2S => iq::put_iq2_s(&search(l, &IQ2_S, target), block),
        CodecId::Iq3Xxs => iq::put_iq3_xxs(&search(l, &IQ3_XXS, target), block),
        _ => iq::put_iq3_s(&search(l, &IQ3_S, target), block),
    }
}

/// Searches a block.
#[inline(always)]
pub(super) fn search<L: Lanes>(l: L, kind: &LatticeType, target: &Target) -> Lattice {
    let spans = MOST / kind.span;
    let reach = kind.levels[kind.levels.len() - 1] * kind.unit * (2.0 * kind.scales - 1.0);
    let mut out = Lattice::ZERO;
    if target.beyond(target.amax, reach) {
        out.d = INFINITE;
        return out;
    }
    let (mut s, mut a) = ([0f32; 16], [0f32; 16]);
    for span in 0..spans {
        let (x, w) = part(kind, target, span);
        let (scale, met) = free_scale(l, kind, x, w);
        (s[span], a[span]) = (scale, met.qq);
    }
    let d = choose_scale(l, kind, &s[..spans], &a[..spans]);
    let best = descend(l, kind, target, target.half(d.into()), s);
    out.d = best.d.0;
    for span in 0..spans {
        out.scales[span] = best.scales[span] as u8;
        out.spans[span] = best.met[span].span;
    }
    out
}

/// Alternates from an f16 scale: the spans' integers and points, then the f16 scale for them, while the error falls.
#[inline(always)]
fn descend<L: Lanes>(l: L, kind: &LatticeType, target: &Target, d: (u16, f32), s: [f32; 16]) -> Chosen {
    const ROUNDS: usize = 3;
    let (mut d, mut s) = (d, s);
    let mut best = Chosen { d, scales: [0.0; 16], met: [Met::NOTHING; 16], error: f32::INFINITY };
    for _ in 0..ROUNDS {
        let next = choose_integers(l, kind, target, d, &s);
        if next.error >= best.error {
            break;
        }
        best = next;
        d = target.half(refit(kind, &best));
        if d.0 == best.d.0 {
            break;
        }
        s = std::array::from_fn(|i| kind.unit * (2.0 * best.scales[i] + 1.0) * best.d.1);
    }
    best
}

#[inline(always)]
fn part<'a>(kind: &LatticeType, target: &'a Target, span: usize) -> (&'a [f32], &'a [f32]) {
    let range = span * kind.span..(span + 1) * kind.span;
    (&target.x[range.clone()], &target.w[range])
}

/// Best scale of a single span. Sixteen scales with every element at its nearest level, ignoring the grid, give a
/// first guess. From there, below and above, points and scale are fitted alternately.
#[inline(always)]
fn free_scale<L: Lanes>(l: L, kind: &LatticeType, x: &[f32], w: &[f32]) -> (f32, Met) {
    let amax = x.iter().fold(0f32, |max, v| max.max(v.abs()));
    if amax == 0.0 {
        return (0.0, Met::NOTHING);
    }
    let unit = amax / kind.levels[kind.levels.len() - 1];
    let scales: [f32; LANES] = std::array::from_fn(|i| unit * (kind.from + i as f32 * kind.step));
    let steps = l.load(&scales);
    let inv = inverse(l, steps);
    let mut error = l.splat(0.0);
    for (&x, &w) in x.iter().zip(w) {
        let magnitude = l.splat(x.abs());
        let v = l.mul(magnitude, inv);
        let mut level = l.splat(kind.levels[0]);
        for pair in kind.levels.windows(2) {
            level = l.if_less(l.splat((pair[0] + pair[1]) / 2.0), v, l.splat(pair[1]), level);
        }
        let miss = l.sub(magnitude, l.mul(level, steps));
        error = l.add(error, l.mul(l.splat(w), l.mul(miss, miss)));
    }
    let first = scales[least(l, error).0];
    let mut best = (0.0, Met { error: f32::INFINITY, ..Met::NOTHING });
    for start in [1.0, 0.88, 1.14] {
        let mut scale = first * start;
        for _ in 0..2 {
            let met = meet(l, kind, x, w, scale);
            if met.error < best.1.error {
                best = (scale, met);
            }
            scale = met.scale();
            if scale == 0.0 {
                break;
            }
        }
    }
    (best.1.scale(), best.1)
}

/// Like [`super::choose_scales`], for odd multiples of the unit.
#[inline(always)]
fn choose_scale<L: Lanes>(l: L, kind: &LatticeType, s: &[f32], a: &[f32]) -> f32 {
    let largest = s.iter().fold(0f32, |max, &v| max.max(v)) / kind.unit;
    if largest == 0.0 {
        return 0.0;
    }
    let most = 2.0 * kind.scales - 1.0;
    let steps: [f32; LANES] = std::array::from_fn(|i| most * (1.06 - 0.03 * i as f32));
    let d = l.div(l.splat(largest), l.load(&steps));
    let inv = inverse(l, l.mul(d, l.splat(kind.unit)));
    let (one, half) = (l.splat(1.0), l.splat(0.5));
    let (low, high) = (l.splat(0.0), l.splat(kind.scales - 1.0));
    let mut cost = l.splat(0.0);
    for (&s, &a) in s.iter().zip(a) {
        let s = l.splat(s);
        let k = round(l, l.mul(l.sub(l.mul(s, inv), one), half));
        let k = l.lesser(l.greater(k, low), high);
        let stored = l.mul(l.mul(l.add(l.add(k, k), one), d), l.splat(kind.unit));
        let miss = l.sub(stored, s);
        cost = l.add(cost, l.mul(l.splat(a), l.mul(miss, miss)));
    }
    l.to_array(d)[least(l, cost).0]
}

/// Candidate for the whole block.
struct Chosen {
    d: (u16, f32),
    scales: [f32; 16],
    met: [Met; 16],
    error: f32,
}

/// Integers of every span for a given f16 scale: the better of the two next to its own scale.
#[inline(always)]
fn choose_integers<L: Lanes>(
    l: L,
    kind: &LatticeType,
    target: &Target,
    d: (u16, f32),
    s: &[f32; 16],
) -> Chosen {
    let mut chosen = Chosen { d, scales: [0.0; 16], met: [Met::NOTHING; 16], error: 0.0 };
    for span in 0..MOST / kind.span {
        let (x, w) = part(kind, target, span);
        let step = d.1 * kind.unit;
        let middle = if step == 0.0 { 0.0 } else { ((s[span] / step - 1.0) / 2.0).floor() };
        let mut best = Met { error: f32::INFINITY, ..Met::NOTHING };
        for scale in [middle, middle + 1.0] {
            let scale = scale.clamp(0.0, kind.scales - 1.0);
            let met = meet(l, kind, x, w, step * (2.0 * scale + 1.0));
            if met.error < best.error {
                (best, chosen.scales[span]) = (met, scale);
            }
        }
        chosen.error += best.error;
        chosen.met[span] = best;
    }
    chosen
}

/// f16 scale by least squares for fixed integers and points.
#[inline(always)]
fn refit(kind: &LatticeType, chosen: &Chosen) -> f64 {
    let (mut squares, mut products) = (0f64, 0f64);
    for (scale, met) in chosen.scales.iter().zip(&chosen.met) {
        let factor = f64::from(kind.unit * (2.0 * scale + 1.0));
        squares += factor * factor * f64::from(met.qq);
        products += factor * f64::from(met.xq);
    }
    if squares > 0.0 { (products / squares).max(0.0) } else { 0.0 }
}

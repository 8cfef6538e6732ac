//! Common parts of the lattice types, and IQ2 and IQ3: magnitudes are a grid point, signs are stored separately.
//!
//! The search for the nearest grid point is exact under the given weights. It compares all points, sixteen at a time,
//! using `w (t - s g)² = w t² + g (s² w g - 2 s w t)` for coordinate `g` of a point.

use super::super::CodecId;
use super::super::grids;
use super::super::iq::{self, IQ2_LEVELS, IQ3_S_LEVELS, IQ3_XXS_LEVELS, Lattice, Span};
use super::{INFINITE, LANES, Lanes, MOST, Target, inverse, least, round, ternary_lattice};

/// Coordinates of sixteen points, by coordinate, for all points of a grid.
type Planes = [[f32; LANES]];

/// Differences between the types.
pub(super) struct Kind {
    /// Elements that share a scale: 16 or 32.
    pub(super) span: usize,
    /// Coordinates of a point.
    pub(super) coords: usize,
    /// The grid.
    pub(super) planes: &'static Planes,
    /// Scales are `d · unit · (2k + 1)` for `k` below this.
    pub(super) scales: f32,
    pub(super) unit: f32,
    /// The levels of a coordinate, ascending.
    pub(super) levels: &'static [f32],
    /// First scales tried, in units of the largest element over the largest level: `from`, `from + step` …
    pub(super) from: f32,
    pub(super) step: f32,
    pub(super) choice: Choice,
}

/// Further choices of a span besides its points.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Choice {
    /// Any signs.
    Signs,
    /// Signs with an even number of minus signs in every eight.
    EvenSigns,
    /// A shift of all coordinates of the span.
    ShiftOfSpan,
    /// A shift of the coordinates of each point.
    ShiftOfPoint,
}

/// Fit of a span under one scale.
#[derive(Clone, Copy)]
pub(super) struct Met {
    pub(super) span: Span,
    /// `sum w x y / s` and `sum w (y / s)²`, for the scale by least squares.
    pub(super) xq: f32,
    pub(super) qq: f32,
    pub(super) error: f32,
}

impl Met {
    pub(super) const NOTHING: Met = Met { span: Span::ZERO, xq: 0.0, qq: 0.0, error: 0.0 };

    /// Scale by least squares for fixed points.
    fn scale(&self) -> f32 {
        if self.qq > 0.0 { (self.xq / self.qq).max(0.0) } else { 0.0 }
    }
}

/// Planes of a grid whose words hold `bits` bits per coordinate.
pub(super) const fn planes<const POINTS: usize, const OUT: usize>(
    grid: &[u16; POINTS],
    coords: usize,
    bits: usize,
    levels: &[f32],
) -> [[f32; LANES]; OUT] {
    let mut out = [[0.0; LANES]; OUT];
    let mut point = 0;
    while point < POINTS {
        let mut i = 0;
        while i < coords {
            let level = levels[(grid[point] >> (bits * i)) as usize & ((1 << bits) - 1)];
            out[point / LANES * coords + i][point % LANES] = level;
            i += 1;
        }
        point += 1;
    }
    out
}

static IQ2_XXS_PLANES: [[f32; LANES]; 128] = planes(&grids::IQ2_XXS, 8, 2, &IQ2_LEVELS);
static IQ2_XS_PLANES: [[f32; LANES]; 256] = planes(&grids::IQ2_XS, 8, 2, &IQ2_LEVELS);
static IQ2_S_PLANES: [[f32; LANES]; 512] = planes(&grids::IQ2_S, 8, 2, &IQ2_LEVELS);
static IQ3_XXS_PLANES: [[f32; LANES]; 64] = planes(&grids::IQ3_XXS, 4, 3, &IQ3_XXS_LEVELS);
static IQ3_S_PLANES: [[f32; LANES]; 128] = planes(&grids::IQ3_S, 4, 3, &IQ3_S_LEVELS);

const IQ2_XXS: Kind = Kind {
    span: 32,
    coords: 8,
    planes: &IQ2_XXS_PLANES,
    scales: 16.0,
    unit: 0.125,
    // The grids do not use the fourth level.
    levels: &[IQ2_LEVELS[0], IQ2_LEVELS[1], IQ2_LEVELS[2]],
    from: 0.55,
    step: 0.05,
    choice: Choice::EvenSigns,
};
const IQ2_XS: Kind = Kind { span: 16, planes: &IQ2_XS_PLANES, ..IQ2_XXS };
const IQ2_S: Kind = Kind { span: 16, planes: &IQ2_S_PLANES, choice: Choice::Signs, ..IQ2_XXS };
const IQ3_XXS: Kind = Kind {
    span: 32,
    coords: 4,
    planes: &IQ3_XXS_PLANES,
    scales: 16.0,
    unit: 0.25,
    levels: &IQ3_XXS_LEVELS,
    from: 0.7,
    step: 0.03,
    choice: Choice::EvenSigns,
};
const IQ3_S: Kind =
    Kind { planes: &IQ3_S_PLANES, unit: 1.0, levels: &IQ3_S_LEVELS, choice: Choice::Signs, ..IQ3_XXS };

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
pub(super) fn search<L: Lanes>(l: L, kind: &Kind, target: &Target) -> Lattice {
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
fn descend<L: Lanes>(l: L, kind: &Kind, target: &Target, d: (u16, f32), s: [f32; 16]) -> Chosen {
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
fn part<'a>(kind: &Kind, target: &'a Target, span: usize) -> (&'a [f32], &'a [f32]) {
    let range = span * kind.span..(span + 1) * kind.span;
    (&target.x[range.clone()], &target.w[range])
}

/// Best scale of a single span. Sixteen scales with every element at its nearest level, ignoring the grid, give a
/// first guess. From there, below and above, points and scale are fitted alternately.
#[inline(always)]
fn free_scale<L: Lanes>(l: L, kind: &Kind, x: &[f32], w: &[f32]) -> (f32, Met) {
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
fn choose_scale<L: Lanes>(l: L, kind: &Kind, s: &[f32], a: &[f32]) -> f32 {
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
fn choose_integers<L: Lanes>(l: L, kind: &Kind, target: &Target, d: (u16, f32), s: &[f32; 16]) -> Chosen {
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
fn refit(kind: &Kind, chosen: &Chosen) -> f64 {
    let (mut squares, mut products) = (0f64, 0f64);
    for (scale, met) in chosen.scales.iter().zip(&chosen.met) {
        let factor = f64::from(kind.unit * (2.0 * scale + 1.0));
        squares += factor * factor * f64::from(met.qq);
        products += factor * f64::from(met.xq);
    }
    if squares > 0.0 { (products / squares).max(0.0) } else { 0.0 }
}

/// Grid point nearest to `t` (one value per coordinate) under scale `s`.
#[inline(always)]
pub(super) fn nearest_point<L: Lanes>(l: L, kind: &Kind, t: &[f32], w: &[f32], s: f32) -> usize {
    let (mut linear, mut square) = ([l.splat(0.0); 8], [l.splat(0.0); 8]);
    for i in 0..kind.coords {
        linear[i] = l.splat(-2.0 * s * w[i] * t[i]);
        square[i] = l.splat(s * s * w[i]);
    }
    let mut best = l.splat(f32::INFINITY);
    let mut chunk_of_best = l.splat(0.0);
    for (chunk, planes) in kind.planes.chunks_exact(kind.coords).enumerate() {
        let mut cost = l.splat(0.0);
        for i in 0..kind.coords {
            let g = l.load(&planes[i]);
            cost = l.add(cost, l.mul(g, l.add(linear[i], l.mul(square[i], g))));
        }
        chunk_of_best = l.if_less(cost, best, l.splat(chunk as f32), chunk_of_best);
        best = l.lesser(best, cost);
    }
    let lane = least(l, best).0;
    l.to_array(chunk_of_best)[lane] as usize * LANES + lane
}

/// Coordinate `i` of a point.
#[inline(always)]
pub(super) fn coordinate(kind: &Kind, point: usize, i: usize) -> f32 {
    kind.planes[point / LANES * kind.coords + i][point % LANES]
}

/// Returns the fit of a span under scale `s`.
#[inline(always)]
fn meet<L: Lanes>(l: L, kind: &Kind, x: &[f32], w: &[f32], s: f32) -> Met {
    match kind.choice {
        Choice::Signs | Choice::EvenSigns => signed(l, kind, x, w, s),
        Choice::ShiftOfSpan | Choice::ShiftOfPoint => ternary_lattice::shifted(l, kind, x, w, s),
    }
}

/// Points and signs of a span.
#[inline(always)]
fn signed<L: Lanes>(l: L, kind: &Kind, x: &[f32], w: &[f32], s: f32) -> Met {
    let mut met = Met::NOTHING;
    for (eight, (x, w)) in x.chunks_exact(8).zip(w.chunks_exact(8)).enumerate() {
        let mut t: [f32; 8] = std::array::from_fn(|i| x[i].abs());
        let mut signs = (0..8).fold(0, |signs, i| signs | u8::from(x[i] < 0.0) << i);
        if kind.choice == Choice::EvenSigns && signs.count_ones() % 2 == 1 {
            let flipped = cheapest_flip(kind, &t, w, s);
            t[flipped] = -t[flipped];
            signs ^= 1 << flipped;
        }
        met.span.bits[eight] = signs;
        for group in 0..8 / kind.coords {
            let at = group * kind.coords;
            let point = nearest_point(l, kind, &t[at..], &w[at..], s);
            met.span.points[eight * 8 / kind.coords + group] = point as u16;
            for i in 0..kind.coords {
                let g = coordinate(kind, point, i);
                let (t, w) = (t[at + i], w[at + i]);
                let miss = t - s * g;
                met.xq += w * t * g;
                met.qq += w * g * g;
                met.error += w * miss * miss;
            }
        }
    }
    met
}

/// Element whose wrong sign costs least: it gets the lowest level with the other sign.
#[inline(always)]
fn cheapest_flip(kind: &Kind, t: &[f32; 8], w: &[f32], s: f32) -> usize {
    let lowest = s * kind.levels[0];
    let mut best = (0, f32::INFINITY);
    for i in 0..8 {
        let right = kind.levels.iter().fold(f32::INFINITY, |min, level| {
            let miss = t[i] - s * level;
            min.min(miss * miss)
        });
        let cost = w[i] * ((t[i] + lowest) * (t[i] + lowest) - right);
        if cost < best.1 {
            best = (i, cost);
        }
    }
    best.0
}

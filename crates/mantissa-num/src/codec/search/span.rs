//! Fits of a span of a lattice type under one scale: its points, and its signs or shifts.
//!
//! The search for the nearest grid point is exact under the given weights. It compares all points, sixteen at a time,
//! using `w (t - s g)² = w t² + g (s² w g - 2 s w t)` for coordinate `g` of a point.

use super::super::iq::{IQ1_DELTA, Span};
use super::{LANES, Lanes, least};

/// Coordinates of sixteen points, by coordinate, for all points of a grid.
type Planes = [[f32; LANES]];

/// Differences between the types.
pub(super) struct LatticeType {
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
    pub(super) choice: SignsOrShift,
}

/// Further choices of a span besides its points.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum SignsOrShift {
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
    pub(super) fn scale(&self) -> f32 {
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

/// Grid point nearest to `t` (one value per coordinate) under scale `s`.
#[inline(always)]
pub(super) fn nearest_point<L: Lanes>(l: L, kind: &LatticeType, t: &[f32], w: &[f32], s: f32) -> usize {
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
pub(super) fn coordinate(kind: &LatticeType, point: usize, i: usize) -> f32 {
    kind.planes[point / LANES * kind.coords + i][point % LANES]
}

/// Returns the fit of a span under scale `s`.
#[inline(always)]
pub(super) fn meet<L: Lanes>(l: L, kind: &LatticeType, x: &[f32], w: &[f32], s: f32) -> Met {
    match kind.choice {
        SignsOrShift::Signs | SignsOrShift::EvenSigns => signed(l, kind, x, w, s),
        SignsOrShift::ShiftOfSpan | SignsOrShift::ShiftOfPoint => shifted(l, kind, x, w, s),
    }
}

/// Points and signs of a span.
#[inline(always)]
fn signed<L: Lanes>(l: L, kind: &LatticeType, x: &[f32], w: &[f32], s: f32) -> Met {
    let mut met = Met::NOTHING;
    for (eight, (x, w)) in x.chunks_exact(8).zip(w.chunks_exact(8)).enumerate() {
        let mut t: [f32; 8] = std::array::from_fn(|i| x[i].abs());
        let mut signs = (0..8).fold(0, |signs, i| signs | u8::from(x[i] < 0.0) << i);
        if kind.choice == SignsOrShift::EvenSigns && signs.count_ones() % 2 == 1 {
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

/// Points and shifts of a span under scale `s`: each point with either shift, then the better one per point or for
/// the whole span.
#[inline(always)]
fn shifted<L: Lanes>(l: L, kind: &LatticeType, x: &[f32], w: &[f32], s: f32) -> Met {
    const SHIFTS: [f32; 2] = [IQ1_DELTA, -IQ1_DELTA];
    let mut mets = [Met::NOTHING; 2];
    for (eight, (x, w)) in x.chunks_exact(8).zip(w.chunks_exact(8)).enumerate() {
        let mut found = [Met::NOTHING; 2];
        for (negative, one) in found.iter_mut().enumerate() {
            let shift = SHIFTS[negative];
            let t: [f32; 8] = std::array::from_fn(|i| x[i] - s * shift);
            let point = nearest_point(l, kind, &t, w, s);
            (one.span.points[0], one.span.bits[0]) = (point as u16, negative as u8);
            for i in 0..8 {
                let q = coordinate(kind, point, i) + shift;
                let miss = x[i] - s * q;
                one.xq += w[i] * x[i] * q;
                one.qq += w[i] * q * q;
                one.error += w[i] * miss * miss;
            }
        }
        let better = usize::from(found[1].error < found[0].error);
        for (i, met) in mets.iter_mut().enumerate() {
            let one = &found[if kind.choice == SignsOrShift::ShiftOfPoint { better } else { i }];
            met.span.points[eight] = one.span.points[0];
            met.span.bits[eight] = one.span.bits[0];
            met.xq += one.xq;
            met.qq += one.qq;
            met.error += one.error;
        }
    }
    mets[usize::from(mets[1].error < mets[0].error)]
}

/// Element whose wrong sign costs least: it gets the lowest level with the other sign.
#[inline(always)]
fn cheapest_flip(kind: &LatticeType, t: &[f32; 8], w: &[f32], s: f32) -> usize {
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

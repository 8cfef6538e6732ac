//! IQ1_S and IQ1_M: points of eight coordinates in {-1, 0, 1}, shifted up or down by an eighth.

use super::super::grids;
use super::super::iq::{self, IQ1_DELTA};
use super::lattice::{Choice, Kind, Met, coordinate, nearest_point, planes, search};
use super::{LANES, Lanes, Target};

static PLANES: [[f32; LANES]; 1024] = planes(&grids::IQ1, 8, 2, &[-1.0, 0.0, 1.0, 0.0]);

const IQ1_S: Kind = Kind {
    span: 32,
    coords: 8,
    planes: &PLANES,
    scales: 8.0,
    unit: 1.0,
    // Of magnitudes, for the first guess.
    levels: &[0.0, 1.0],
    from: 0.3,
    step: 0.045,
    choice: Choice::ShiftOfSpan,
};
const IQ1_M: Kind = Kind { span: 16, choice: Choice::ShiftOfPoint, ..IQ1_S };

#[inline(always)]
pub(super) fn encode_iq1_s<L: Lanes>(l: L, target: &mut Target, block: &mut [u8]) {
    iq::put_iq1_s(&search(l, &IQ1_S, target, |x, w, s| meet(l, &IQ1_S, x, w, s)), block);
}

#[inline(always)]
pub(super) fn encode_iq1_m<L: Lanes>(l: L, target: &mut Target, block: &mut [u8]) {
    iq::put_iq1_m(&search(l, &IQ1_M, target, |x, w, s| meet(l, &IQ1_M, x, w, s)), block);
}

/// Points and shifts of a span under scale `s`.
#[inline(always)]
fn meet<L: Lanes>(l: L, kind: &Kind, x: &[f32], w: &[f32], s: f32) -> Met {
    let shifts = [IQ1_DELTA, -IQ1_DELTA];
    if kind.choice == Choice::ShiftOfSpan {
        let [up, down] = shifts.map(|shift| shifted(l, kind, x, w, s, &[shift]));
        return if down.error < up.error { down } else { up };
    }
    shifted(l, kind, x, w, s, &shifts)
}

/// Each eight elements by the point and the shift, of `shifts`, that lose least.
#[inline(always)]
fn shifted<L: Lanes>(l: L, kind: &Kind, x: &[f32], w: &[f32], s: f32, shifts: &[f32]) -> Met {
    let mut met = Met::NOTHING;
    for (eight, (x, w)) in x.chunks_exact(8).zip(w.chunks_exact(8)).enumerate() {
        let mut best = Met { error: f32::INFINITY, ..Met::NOTHING };
        for &shift in shifts {
            let t: [f32; 8] = std::array::from_fn(|i| x[i] - s * shift);
            let point = nearest_point(l, kind, &t, w, s);
            let mut one = Met::NOTHING;
            one.span.points[0] = point as u16;
            one.span.bits[0] = u8::from(shift < 0.0);
            for i in 0..8 {
                let q = coordinate(kind, point, i) + shift;
                let miss = x[i] - s * q;
                one.xq += w[i] * x[i] * q;
                one.qq += w[i] * q * q;
                one.error += w[i] * miss * miss;
            }
            if one.error < best.error {
                best = one;
            }
        }
        met.span.points[eight] = best.span.points[0];
        met.span.bits[eight] = best.span.bits[0];
        met.xq += best.xq;
        met.qq += best.qq;
        met.error += best.error;
    }
    met
}

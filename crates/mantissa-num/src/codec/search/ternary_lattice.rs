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
    // Levels of magnitudes, for the first guess.
    levels: &[0.0, 1.0],
    from: 0.3,
    step: 0.045,
    choice: Choice::ShiftOfSpan,
};
const IQ1_M: Kind = Kind { span: 16, choice: Choice::ShiftOfPoint, ..IQ1_S };

#[inline(always)]
pub(super) fn encode_iq1_s<L: Lanes>(l: L, target: &mut Target, block: &mut [u8]) {
    iq::put_iq1_s(&search(l, &IQ1_S, target), block);
}

#[inline(always)]
pub(super) fn encode_iq1_m<L: Lanes>(l: L, target: &mut Target, block: &mut [u8]) {
    iq::put_iq1_m(&search(l, &IQ1_M, target), block);
}

/// Points and shifts of a span under scale `s`: each point with either shift, then the better one per point or for
/// the whole span.
#[inline(always)]
pub(super) fn shifted<L: Lanes>(l: L, kind: &Kind, x: &[f32], w: &[f32], s: f32) -> Met {
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
            let one = &found[if kind.choice == Choice::ShiftOfPoint { better } else { i }];
            met.span.points[eight] = one.span.points[0];
            met.span.bits[eight] = one.span.bits[0];
            met.xq += one.xq;
            met.qq += one.qq;
            met.error += one.error;
        }
    }
    mets[usize::from(mets[1].error < mets[0].error)]
}

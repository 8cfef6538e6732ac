//! IQ1_S and IQ1_M: points of eight coordinates in {-1, 0, 1}, shifted up or down by an eighth.

use super::super::grids;
use super::super::iq;
use super::lattice::search;
use super::span::{LatticeType, SignsOrShift, planes};
use super::{LANES, Lanes, Target};

static PLANES: [[f32; LANES]; 1024] = planes(&grids::IQ1, 8, 2, &[-1.0, 0.0, 1.0, 0.0]);

const IQ1_S: LatticeType = LatticeType {
    span: 32,
    coords: 8,
    planes: &PLANES,
    scales: 8.0,
    unit: 1.0,
    // Levels of magnitudes, for the first guess.
    levels: &[0.0, 1.0],
    from: 0.3,
    step: 0.045,
    choice: SignsOrShift::ShiftOfSpan,
};
const IQ1_M: LatticeType = LatticeType { span: 16, choice: SignsOrShift::ShiftOfPoint, ..IQ1_S };

#[inline(always)]
pub(super) fn encode_iq1_s<L: Lanes>(l: L, target: &mut Target, block: &mut [u8]) {
    iq::put_iq1_s(&search(l, &IQ1_S, target), block);
}

#[inline(always)]
pub(super) fn encode_iq1_m<L: Lanes>(l: L, target: &mut Target, block: &mut [u8]) {
    iq::put_iq1_m(&search(l, &IQ1_M, target), block);
}

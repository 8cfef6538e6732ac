//! Quantization of one token to 8 bits.

use super::dot::Dot;
use super::{BLOCK, ROWS};

/// Grid of the 8-bit activations.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Grid {
    /// Columns that share a scale: 16, a multiple of 32, or `usize::MAX` for a whole token.
    pub group: usize,
    /// The scale is `amax / steps`.
    pub steps: f32,
    /// Smallest and largest code.
    pub range: (f32, f32),
    /// Scale of every group, if it does not depend on the values.
    pub fixed: Option<f32>,
}

impl Grid {
    /// One scale for 32 columns; codes -127 to 127.
    pub const BLOCKS: Grid = Grid { group: BLOCK, steps: 127.0, range: (-127.0, 127.0), fixed: None };
}

/// Sizes of a quantization.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(super) group: usize,
    pub(super) unit: usize,
    pub(super) grid: Grid,
}

/// Quantizes one token. A token with NaN or infinity gets scales of NaN or infinity, and so outputs that are not
/// finite.
#[inline(always)]
pub(crate) fn quantize<D: Dot>(
    d: D,
    shape: &Shape,
    x: &[f32],
    codes: &mut [[i8; BLOCK]],
    scales: &mut [f32],
    sums: &mut [i32],
) {
    let Shape { group, unit, grid } = *shape;
    let codes = codes.as_flattened_mut();
    let units_per_group = group / unit;
    let groups = x.chunks(group).zip(codes.chunks_mut(group));
    let parts = scales.chunks_mut(units_per_group).zip(sums.chunks_mut(units_per_group));
    for ((x, codes), (scales, sums)) in groups.zip(parts) {
        // The bits of magnitudes are ordered as the magnitudes, NaN last.
        let amax =
            f32::from_bits(x.iter().fold(0i32, |max, x| max.max((x.to_bits() & 0x7fff_ffff) as i32)) as u32);
        // Values that are not finite must not disappear in the codes.
        let scale = grid.fixed.filter(|_| amax.is_finite()).unwrap_or(amax / grid.steps);
        let divisor = if scale > 0.0 { scale } else { 1.0 };
        let (whole, rest) = x.as_chunks::<ROWS>();
        for (x, codes) in whole.iter().zip(codes.as_chunks_mut().0) {
            d.codes(x, divisor, grid.range, codes);
        }
        // The padding may hold codes of a wider input.
        codes[ROWS * whole.len()..].fill(0);
        if !rest.is_empty() {
            let (mut x, mut some) = ([0.0; ROWS], [0; ROWS]);
            x[..rest.len()].copy_from_slice(rest);
            d.codes(&x, divisor, grid.range, &mut some);
            codes[ROWS * whole.len()..][..rest.len()].copy_from_slice(&some[..rest.len()]);
        }
        scales.fill(scale);
        for (sum, codes) in sums.iter_mut().zip(codes.chunks(unit)) {
            *sum = codes.iter().fold(0, |sum, code| sum + i32::from(*code));
        }
    }
}

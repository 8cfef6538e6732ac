//! Weight `[rows, cols]` of trellis codes between two rotations, as a [`Format`](crate::Format): `W = diag(v) · H · C
//! · H · diag(u)`.
//!
//! `C` holds the values of the states, tile by tile along the outputs, then along the inputs. `H` are Sylvester's
//! matrices over their square roots, of the largest power of two up to 128 that divides the width (always 128 in
//! EXL3). `u` and `v` are signs times scales in f16. In a [`Quantized`](crate::Quantized) the codes are the words of
//! the tiles as little-endian bytes, and the scales are `u`, then `v`.

use super::{TILE, TrellisBook};
use crate::hadamard::Hadamard;

/// Largest order of a rotation.
const MAX_ORDER: usize = 128;

/// Allowed rates in half bits.
const HALF_BITS: std::ops::RangeInclusive<u8> = 2..=16;

/// Trellis codes of one rate and code book.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Trellis {
    half_bits: u8,
    /// Map from a state to a value.
    pub book: TrellisBook,
    /// True if each input and each output has its own scale, an f16 with the sign, as in EXL3. Otherwise outputs that
    /// are rotated together share a scale, inputs have none, and both have one bit per sign.
    pub channels: bool,
}

impl Trellis {
    /// Codes of `half_bits / 2` bits; `None` for other than 1 to 8 bits.
    pub fn new(half_bits: u8, book: TrellisBook, channels: bool) -> Option<Self> {
        HALF_BITS.contains(&half_bits).then_some(Trellis { half_bits, book, channels })
    }

    /// Twice the bits of a code.
    pub const fn half_bits(&self) -> usize {
        self.half_bits as usize
    }

    /// Bits of a code; `None` at half-integer rates.
    pub const fn whole_bits(&self) -> Option<u32> {
        if self.half_bits.is_multiple_of(2) { Some(self.half_bits as u32 / 2) } else { None }
    }

    /// Words of a tile.
    pub const fn tile_words(&self) -> usize {
        4 * self.half_bits()
    }

    /// True if the shape is a whole number of tiles.
    pub const fn fits(rows: usize, cols: usize) -> bool {
        rows.is_multiple_of(TILE) && cols.is_multiple_of(TILE)
    }

    /// Bytes of the codes of a `[rows, cols]` tensor.
    pub fn code_bytes(&self, rows: usize, cols: usize) -> usize {
        (rows.div_ceil(TILE) * cols.div_ceil(TILE)).saturating_mul(4 * self.tile_words())
    }

    /// Bits of signs and scales of a `[rows, cols]` tensor.
    pub fn scale_bits(&self, rows: usize, cols: usize) -> u64 {
        let both = rows as u64 + cols as u64;
        if self.channels { 16 * both } else { both + 16 * (rows / order(rows).max(1)) as u64 }
    }
}

/// Order of the rotations of vectors of `width`: the largest power of two up to 128 that divides it.
pub fn order(width: usize) -> usize {
    (1usize << width.trailing_zeros().min(MAX_ORDER.trailing_zeros())).min(width)
}

/// Rotation of vectors of `width`; `None` for width 0.
pub fn rotation(width: usize) -> Option<Hadamard> {
    Hadamard::new(order(width))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::Scheme;

    #[test]
    fn orders_divide_the_width() {
        let orders = [16, 48, 64, 96, 128, 256, 352, 384, 768].map(order);
        assert_eq!(orders, [16, 16, 64, 32, 128, 128, 32, 128, 128]);
        assert!(rotation(0).is_none() && rotation(352).unwrap().order() == 32);
    }

    #[test]
    fn sizes_count_signs_and_scales() {
        let bits = |text: &str, rows, cols| text.parse::<Scheme>().unwrap().format.total_bits(rows, cols);
        assert_eq!(bits("trellis2", 352, 128), 2 * 352 * 128 + 352 + 128 + 16 * 11);
        assert_eq!(bits("trellis2-channel", 256, 128), 2 * 256 * 128 + 16 * (256 + 128));
        assert_eq!(bits("trellis7", 128, 128), 7 * 128 * 128 + 256 + 16);
    }
}

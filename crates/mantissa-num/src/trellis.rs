//! EXL3's trellis (turboderp's exllamav3, after QTIP: Tseng et al. 2024, arXiv 2406.11235): tiles of 16 × 16 weights.
//! Each weight is the value of a 16-bit state, and adjacent states share all but `b` bits.
//!
//! A tile is a ring of `256 · b` bits, the highest bit of each 32-bit word first. State `i` is the 16 bits that end
//! with bit `⌊(i + 1) · b⌋`, so at half-integer rates every second weight has one bit more. Its value is a few
//! integer operations, the *code book*. Source: `exllamav3_ext/quant/codebook.cuh`, `pack.cu`, and
//! `exl3_lib/quantize.py` for the order of weights.

mod format;

use crate::minifloat::{F16, Overflow};
use crate::round::Rounding;

pub use format::{Trellis, order, rotation};

/// Rows and columns of a tile.
pub const TILE: usize = 16;

/// Weights of a tile.
pub const TILE_WEIGHTS: usize = TILE * TILE;

/// Map from a state to a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TrellisBook {
    /// "3INST": the two halves, masked to small f16, of a linear congruence.
    ThreeInst,
    /// Like "3INST", with a product.
    Mcg,
    /// Sum of the bytes of a product.
    Mul1,
}

impl TrellisBook {
    /// Every code book with its name in the Scheme grammar, the default first.
    pub const NAMES: [(TrellisBook, &'static str); 3] =
        [(TrellisBook::Mcg, "mcg"), (TrellisBook::Mul1, "mul1"), (TrellisBook::ThreeInst, "3inst")];

    /// Name in the Scheme grammar.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(book, _)| *book == self).map_or("", |(_, name)| name)
    }

    /// Multiplier, by which a file identifies its book.
    pub const fn multiplier(self) -> u32 {
        match self {
            TrellisBook::ThreeInst => 89_226_354,
            TrellisBook::Mcg => 0xCBAC_1FED,
            TrellisBook::Mul1 => 0x83DC_D12D,
        }
    }

    /// f16 pattern of the value of `state`. Each operation is a single f16 operation, as on the GPU.
    pub fn value(self, state: u16) -> u16 {
        let x = u32::from(state).wrapping_mul(self.multiplier());
        match self {
            TrellisBook::ThreeInst => sum_of_halves(x.wrapping_add(64_248_484)),
            TrellisBook::Mcg => sum_of_halves(x),
            TrellisBook::Mul1 => {
                // 0x6400 is 1024, where f16 has steps of 1: adding the sum of bytes to the pattern adds it to the
                // value.
                let sum: u32 = x.to_le_bytes().into_iter().map(u32::from).sum();
                let (inverse, bias) = (F16.decode(0x1eee), F16.decode(0xc931));
                // 22 bits of product and the bias fit f32 exactly, so the rounding to f16 is the only one.
                f16(F16.decode(0x6400 + sum) * inverse + bias)
            }
        }
    }

    /// Values of all states.
    pub fn table(self) -> Vec<u16> {
        (0..=u16::MAX).map(|state| self.value(state)).collect()
    }
}

fn sum_of_halves(x: u32) -> u16 {
    // Sign and mantissa come from the state; the exponent is nearly fixed.
    let x = (x & 0x8fff_8fff) ^ 0x3b60_3b60;
    f16(F16.decode(x & 0xffff) + F16.decode(x >> 16))
}

fn f16(x: f32) -> u16 {
    F16.encode(x, Overflow::Special, Rounding::NearestEven, 0) as u16
}

/// Row (input feature) and column (output feature) in its tile for the weight of each state: the fragment order of a
/// 16 × 16 matrix in tensor cores.
pub fn place(i: usize) -> (usize, usize) {
    let (lane, element) = (i / 8, i % 8);
    let row = lane % 4 * 2 + [0, 1, 8, 9][element % 4];
    (row, lane / 4 + element / 4 * 8)
}

/// States of a tile with `half_bits / 2` bits per weight, `4 · half_bits` words; `None` for another number of words,
/// or outside 1 to 8 bits.
pub fn states(words: &[u32], half_bits: usize) -> Option<[u16; TILE_WEIGHTS]> {
    if !(2..=16).contains(&half_bits) || words.len() != 4 * half_bits {
        return None;
    }
    let ring = TILE_WEIGHTS * half_bits / 2;
    Some(std::array::from_fn(|i| {
        let start = ((i + 1) * half_bits / 2 + ring - 16) % ring;
        let pair = u64::from(words[start / 32]) << 32 | u64::from(words[(start / 32 + 1) % words.len()]);
        (pair >> (48 - start % 32)) as u16
    }))
}

/// Words of a tile with the states `states`, using only the bits that each adds to the ring. Inverse of [`states`] if
/// each begins with the end of the one before it, cyclically. `None` outside 1 to 8 bits.
pub fn words(states: &[u16; TILE_WEIGHTS], half_bits: usize) -> Option<Vec<u32>> {
    if !(2..=16).contains(&half_bits) {
        return None;
    }
    let mut words = vec![0; 4 * half_bits];
    for (i, state) in states.iter().enumerate() {
        let (start, end) = (i * half_bits / 2, (i + 1) * half_bits / 2);
        for at in start..end {
            words[at / 32] |= u32::from(state >> (end - 1 - at) & 1) << (31 - at % 32);
        }
    }
    Some(words)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn words_and_states_round_trip() {
        for half_bits in 2..=16 {
            let words: Vec<u32> = (0..4 * half_bits as u64).map(|i| crate::round::random_u32(5, i)).collect();
            let states = states(&words, half_bits).unwrap();
            assert_eq!(super::words(&states, half_bits).unwrap(), words, "{half_bits}");
        }
        assert!(
            super::words(&[0; TILE_WEIGHTS], 1).is_none() && super::words(&[0; TILE_WEIGHTS], 17).is_none()
        );
    }

    #[test]
    fn states_are_windows_of_the_ring() {
        for half_bits in 2..=16 {
            let words: Vec<u32> = (0..4 * half_bits as u64).map(|i| crate::round::random_u32(3, i)).collect();
            let ring = 128 * half_bits;
            let bit = |at: usize| u16::from(words[at % ring / 32] >> (31 - at % 32) & 1 == 1);
            let mut last = ring;
            for (i, state) in states(&words, half_bits).unwrap().into_iter().enumerate() {
                // At half-integer rates, odd weights have the extra bit.
                last += half_bits / 2 + half_bits % 2 * (i % 2);
                let expected = (last - 16..last).fold(0u16, |state, at| state << 1 | bit(at));
                assert_eq!(state, expected, "{half_bits} {i}");
            }
            assert_eq!(last, 2 * ring);
        }
        assert!(super::states(&[0; 7], 2).is_none() && super::states(&[0; 72], 18).is_none());
        assert!(super::states(&[0; 4], 1).is_none());
    }

    #[test]
    fn places_cover_a_tile_once() {
        let mut seen = [false; TILE_WEIGHTS];
        (0..TILE_WEIGHTS).map(place).for_each(|(row, col)| seen[row * TILE + col] = true);
        assert!(seen.iter().all(|&seen| seen));
        assert_eq!(
            [place(0), place(1), place(2), place(4), place(8), place(32)],
            [(0, 0), (1, 0), (8, 0), (0, 8), (2, 0), (0, 1)]
        );
    }

    #[test]
    fn values_match_a_unit_normal() {
        // exllamav3 scales weights to match the code book: mean 0, standard deviation 1.24.
        for book in [TrellisBook::ThreeInst, TrellisBook::Mcg, TrellisBook::Mul1] {
            let values: Vec<f64> = book.table().iter().map(|&v| f64::from(F16.decode(v.into()))).collect();
            let mean = values.iter().sum::<f64>() / 65_536.0;
            let deviation = (values.iter().map(|v| v * v).sum::<f64>() / 65_536.0).sqrt();
            assert!(mean.abs() < 0.02 && (0.9..1.5).contains(&deviation), "{book:?} {mean} {deviation}");
            assert!(values.iter().all(|v| v.abs() < 5.0));
        }
        // By hand: 64248484 = 0x03d45aa4, masked and flipped 0x38b431c4: f16 0.58789 + 0.18018.
        assert_eq!(TrellisBook::ThreeInst.value(0), f16(F16.decode(0x38b4) + F16.decode(0x31c4)));
        assert_eq!(TrellisBook::Mul1.value(0), f16(1024.0 * F16.decode(0x1eee) + F16.decode(0xc931)));
    }
}

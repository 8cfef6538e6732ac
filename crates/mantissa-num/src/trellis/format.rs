//! A weight `[rows, cols]` of trellis codes between two rotations, as a [`Format`]: `W = diag(v) · H · C · H · diag(u)`.
//!
//! `C` holds the values of the states, tile after tile along the outputs, then along the inputs; `H` are Sylvester's matrices over
//! their square roots, of the largest power of two up to 128 that divides the width (EXL3's own 128 where that divides both); `u` and `v`
//! are signs times scales in f16. In a [`Quantized`] the codes are the words of the tiles in little-endian bytes, the scales `u` and then `v`.

use super::{TILE, TILE_WEIGHTS, TrellisBook, place, states};
use crate::codes::Codes;
use crate::format::Format;
use crate::hadamard::Hadamard;
use crate::minifloat::F16;
use crate::stored::{Map, Transforms};
use crate::tensor::{Quantized, TensorError};

/// Largest order of a rotation.
const MAX_ORDER: usize = 128;

/// Rates in half bits that a tile may have.
const HALF_BITS: std::ops::RangeInclusive<u8> = 2..=16;

/// Trellis codes of one rate and code book.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Trellis {
    half_bits: u8,
    /// How a state becomes a value.
    pub book: TrellisBook,
    /// Whether each input and each output has a scale of its own, an f16 with the sign, as EXL3 stores them. Otherwise
    /// outputs that are rotated together share one, inputs have none, and each of both has a bit for its sign.
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

    /// Bits of a code, where they are whole.
    pub const fn whole_bits(&self) -> Option<u32> {
        if self.half_bits.is_multiple_of(2) { Some(self.half_bits as u32 / 2) } else { None }
    }

    /// Words of a tile.
    pub const fn tile_words(&self) -> usize {
        4 * self.half_bits()
    }

    /// Whether there are whole tiles only.
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

/// The rotation of vectors of `width`; `None` of no width.
pub fn rotation(width: usize) -> Option<Hadamard> {
    Hadamard::new(order(width))
}

impl Quantized {
    /// The values between the rotations, `[rows, cols]` as f16 patterns, and the maps around them. `None` of another format.
    ///
    /// # Errors
    /// [`TensorError::Length`] and [`TensorError::Tiles`].
    pub fn unfold(&self) -> Option<Result<(Vec<u16>, Transforms), TensorError>> {
        let Format::Trellis(trellis) = self.format else { return None };
        Some(self.check().map(|()| (self.values(&trellis), self.maps())))
    }

    fn values(&self, trellis: &Trellis) -> Vec<u16> {
        let (Codes::Packed(bytes) | Codes::U8(bytes)) = &self.codes else { return Vec::new() };
        let (table, down) = (trellis.book.table(), (self.rows / TILE).max(1));
        let mut values = vec![0; self.rows * self.cols];
        for (tile, bytes) in bytes.chunks_exact(4 * trellis.tile_words()).enumerate() {
            let words: Vec<u32> = bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
            let states = states(&words, trellis.half_bits()).unwrap_or([0; TILE_WEIGHTS]);
            let (first_row, first_col) = (tile % down * TILE, tile / down * TILE);
            for (i, state) in states.into_iter().enumerate() {
                let (input, output) = place(i);
                values[(first_row + output) * self.cols + first_col + input] = table[usize::from(state)];
            }
        }
        values
    }

    fn maps(&self) -> Transforms {
        let scale = |i: usize| F16.decode(self.scales.get(i));
        let diagonal = |range: std::ops::Range<usize>| Map::Diag(range.map(scale).collect());
        let rotated = |width: usize| rotation(width).map(Map::Hadamard);
        let (inputs, outputs) = (diagonal(0..self.cols), diagonal(self.cols..self.cols + self.rows));
        Transforms {
            before: std::iter::once(inputs).chain(rotated(self.cols)).collect(),
            after: rotated(self.rows).into_iter().chain([outputs]).collect(),
            extras: Vec::new(),
        }
    }

    /// The weight itself, from what [`unfold`](Self::unfold) gives. The tensor must have passed [`check`](Self::check).
    pub(crate) fn folded(&self, trellis: &Trellis) -> Vec<f32> {
        let mut values: Vec<f32> = self.values(trellis).into_iter().map(|v| F16.decode(v.into())).collect();
        self.maps().fold(&mut values, self.rows, self.cols);
        values
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::words;
    use super::*;
    use crate::round::random_u32;
    use crate::{Scheme, quantize};

    fn random(scheme: &str, rows: usize, cols: usize) -> Quantized {
        let scheme: Scheme = scheme.parse().unwrap();
        let Format::Trellis(trellis) = scheme.format else { unreachable!() };
        let bytes = (0..trellis.code_bytes(rows, cols) as u64).map(|i| random_u32(1, i) as u8).collect();
        let scale = |i: u64| (0x2c00 | random_u32(2, i) & 0x83ff) as u16;
        let scales = (0..(rows + cols) as u64).map(scale).collect();
        Quantized {
            codes: Codes::Packed(bytes),
            scales: Codes::U16(scales).into(),
            ..Quantized::empty(scheme.format, rows, cols)
        }
    }

    #[test]
    fn orders_divide_the_width() {
        let orders = [16, 48, 64, 96, 128, 256, 352, 384, 768].map(order);
        assert_eq!(orders, [16, 16, 64, 32, 128, 128, 32, 128, 128]);
        assert!(rotation(0).is_none() && rotation(352).unwrap().order() == 32);
    }

    #[test]
    fn a_weight_is_its_values_between_its_maps() {
        for text in ["trellis1", "trellis2-channel", "trellis3-mul1", "trellis8-3inst"] {
            let (rows, cols) = (48, 32);
            let q = random(text, rows, cols);
            let (values, transforms) = q.unfold().unwrap().unwrap();
            transforms.check(rows, cols).unwrap();
            let whole = q.dequantize().unwrap();
            let x: Vec<f32> = (0..cols).map(|i| (i as f32 * 0.7).cos()).collect();
            let mut mapped = x.clone();
            transforms.before.iter().for_each(|map| map.apply(&mut mapped, cols));
            let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
            let values: Vec<f32> = values.into_iter().map(|v| F16.decode(v.into())).collect();
            let mut y: Vec<f32> = values.chunks_exact(cols).map(|row| dot(row, &mapped)).collect();
            transforms.after.iter().for_each(|map| map.apply(&mut y, rows));
            for (row, y) in whole.chunks_exact(cols).zip(y) {
                assert!((dot(row, &x) - y).abs() < 1e-3 * y.abs().max(1.0), "{text}");
            }
            let mut part = vec![0.0; 3 * cols];
            q.dequantize_rows(17..20, &mut part);
            assert_eq!(part, whole[17 * cols..20 * cols]);
        }
    }

    #[test]
    fn tiles_follow_the_outputs_then_the_inputs() {
        let (rows, cols) = (32, 48);
        let mut q = random("trellis2", rows, cols);
        let bytes: Vec<u8> =
            words(&[7; TILE_WEIGHTS], 4).unwrap().iter().flat_map(|w| w.to_le_bytes()).collect();
        let Codes::Packed(codes) = &mut q.codes else { unreachable!() };
        // Of 2 × 3 tiles the fourth: the second along the outputs of the second along the inputs.
        codes[3 * bytes.len()..4 * bytes.len()].copy_from_slice(&bytes);
        let tile = q.unfold().unwrap().unwrap().0[16 * cols + 16];
        assert_eq!(states(&words(&[7; TILE_WEIGHTS], 4).unwrap(), 4).unwrap()[0], 0xffff);
        assert_eq!(tile, TrellisBook::Mcg.value(0xffff));
    }

    #[test]
    fn sizes_count_signs_and_scales() {
        let bits = |text: &str, rows, cols| text.parse::<Scheme>().unwrap().format.total_bits(rows, cols);
        assert_eq!(bits("trellis2", 352, 128), 2 * 352 * 128 + 352 + 128 + 16 * 11);
        assert_eq!(bits("trellis2-channel", 256, 128), 2 * 256 * 128 + 16 * (256 + 128));
        assert_eq!(bits("trellis7", 128, 128), 7 * 128 * 128 + 256 + 16);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let mut q = random("trellis2", 32, 32);
        q.scales = Codes::U16(vec![0; 63]).into();
        assert!(matches!(q.dequantize(), Err(TensorError::Length { what: "scales", .. })));
        let q = random("trellis2", 24, 32);
        assert!(matches!(q.unfold(), Some(Err(TensorError::Tiles { .. }))));
        // Values are coded together, by a search that this crate does not have.
        let scheme: Scheme = "trellis2".parse().unwrap();
        let found = quantize(&scheme, &[0.0; 256], 16, 16, crate::Given::default());
        assert!(matches!(found, Err(TensorError::Searched { .. })));
        assert!(Trellis::new(1, TrellisBook::Mcg, false).is_none());
        assert!(Trellis::new(17, TrellisBook::Mcg, false).is_none());
    }
}

//! Trellis weights as values between two maps: the part of [`Quantized`] that only [`Format::Trellis`] has.

use crate::codes::Codes;
use crate::error::TensorError;
use crate::format::Format;
use crate::minifloat::F16;
use crate::stored::{Map, Transforms};
use crate::tensor::Quantized;
use crate::trellis::{TILE, TILE_WEIGHTS, Trellis, place, rotation, states};

impl Quantized {
    /// Values between the rotations, `[rows, cols]` as f16 patterns, and the maps around them. `None` for any other
    /// format.
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

    /// Effective weight, from the result of [`unfold`](Self::unfold). The tensor must have passed
    /// [`check`](Self::check).
    pub(crate) fn folded(&self, trellis: &Trellis) -> Vec<f32> {
        let mut values: Vec<f32> = self.values(trellis).into_iter().map(|v| F16.decode(v.into())).collect();
        self.maps().fold(&mut values, self.rows, self.cols);
        values
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::round::random_u32;
    use crate::trellis::{TrellisBook, words};
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
        // Fourth of 2 × 3 tiles: the second along the outputs of the second along the inputs.
        codes[3 * bytes.len()..4 * bytes.len()].copy_from_slice(&bytes);
        let tile = q.unfold().unwrap().unwrap().0[16 * cols + 16];
        assert_eq!(states(&words(&[7; TILE_WEIGHTS], 4).unwrap(), 4).unwrap()[0], 0xffff);
        assert_eq!(tile, TrellisBook::Mcg.value(0xffff));
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let mut q = random("trellis2", 32, 32);
        q.scales = Codes::U16(vec![0; 63]).into();
        assert!(matches!(q.dequantize(), Err(TensorError::Length { what: "scales", .. })));
        let q = random("trellis2", 24, 32);
        assert!(matches!(q.unfold(), Some(Err(TensorError::Tiles { .. }))));
        // Values are coded together, by a search that this crate lacks.
        let scheme: Scheme = "trellis2".parse().unwrap();
        let found = quantize(&scheme, &[0.0; 256], 16, 16, crate::Given::default());
        assert!(matches!(found, Err(TensorError::Searched { .. })));
        assert!(Trellis::new(1, TrellisBook::Mcg, false).is_none());
        assert!(Trellis::new(17, TrellisBook::Mcg, false).is_none());
    }
}

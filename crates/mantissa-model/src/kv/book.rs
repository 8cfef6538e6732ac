//! One row of keys or values as codes of a codebook: packed codes, then the scaling of the row, then the outliers.
//! [`super::scheme`] describes the schemes.

use mantissa_num::minifloat::F16;
use mantissa_num::pack::Packing;
use mantissa_num::{TensorError, lloyd};

use super::codec::raw_code;

/// Bytes of an outlier: its index in 16 bits and its value in f16.
const KEPT: usize = 4;

/// Stores rows of `cols` values, at most 65 536.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct BookCodec {
    /// Levels, ascending, one per code.
    levels: Vec<f32>,
    bits: u32,
    cols: usize,
    scaling: Scaling,
    /// Number of outliers of a row.
    kept: usize,
}

/// Scaling of the elements of a row to the levels: each is `middle + half · level`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Scaling {
    /// Root mean square of the row, stored in f16; the middle is 0.
    Length,
    /// Range of the row, stored as two f16.
    Range,
    /// Range of each column, not stored with the row.
    Columns(Vec<Span>),
}

/// A range as its middle and half its width.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Span {
    pub(crate) middle: f32,
    pub(crate) half: f32,
}

/// Calibrated levels of one layer.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct LayerBooks {
    pub(crate) keys: Option<KeyBook>,
    /// Levels of the values.
    pub(crate) values: Option<Vec<f32>>,
}

/// Calibrated levels of keys, and what is not stored with a row.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct KeyBook {
    pub(crate) levels: Vec<f32>,
    /// Range of each channel.
    pub(crate) spans: Vec<Span>,
}

impl Span {
    /// Creates a range from the least and the greatest value.
    pub(crate) fn of(least: f32, greatest: f32) -> Self {
        Span { middle: least / 2.0 + greatest / 2.0, half: greatest / 2.0 - least / 2.0 }
    }

    /// Scales `x` to -1 to 1 within the range; 0 if the range has no width.
    pub(crate) fn place(self, x: f32) -> f32 {
        if self.half > 0.0 { (x - self.middle) / self.half } else { 0.0 }
    }

    fn value(self, place: f32) -> f32 {
        self.middle + self.half * place
    }

    /// Rounds the range as it is stored with a row.
    fn stored(self) -> Self {
        Span { middle: f16(self.middle), half: f16(self.half) }
    }
}

impl BookCodec {
    /// Creates a codec for codes of `levels`, `2^bits` of them, with `kept` outliers per row.
    pub(crate) fn new(levels: Vec<f32>, cols: usize, scaling: Scaling, kept: usize) -> Self {
        BookCodec { bits: levels.len().max(2).ilog2(), levels, cols, scaling, kept: kept.min(cols) }
    }

    /// Number of elements that `hundredths` of a percent of a row of `cols` are, rounded up.
    pub(crate) fn kept_of(cols: usize, hundredths: u32) -> usize {
        cols.saturating_mul(hundredths as usize).div_ceil(10_000)
    }

    /// Values of a row.
    pub(crate) fn cols(&self) -> usize {
        self.cols
    }

    fn code_bytes(&self) -> usize {
        Packing::rows(self.bits).line_bytes(self.cols)
    }

    fn span_bytes(&self) -> usize {
        match self.scaling {
            Scaling::Length => 2,
            Scaling::Range => 4,
            Scaling::Columns(_) => 0,
        }
    }

    /// Bytes of a row.
    pub(crate) fn row_bytes(&self) -> usize {
        self.code_bytes() + self.span_bytes() + KEPT * self.kept
    }

    /// Encodes a row.
    ///
    /// # Errors
    /// [`TensorError::NonFinite`].
    pub(crate) fn encode(&self, x: &[f32], out: &mut [u8]) -> Result<(), TensorError> {
        if let Some(index) = x.iter().position(|x| !x.is_finite()) {
            let count = x.iter().filter(|x| !x.is_finite()).count();
            return Err(TensorError::NonFinite { count, index, value: x[index] });
        }
        let kept = self.farthest(x);
        let span = self.span(x, &kept);
        let code =
            |(i, x): (usize, &f32)| lloyd::nearest(&self.levels, self.span_of(i, span).place(*x)) as u8;
        let codes: Vec<u8> = x.iter().enumerate().map(code).collect();
        let (packed, rest) = out.split_at_mut(self.code_bytes());
        packed.copy_from_slice(&Packing::rows(self.bits).pack(&codes, self.cols));
        let (spans, rest) = rest.split_at_mut(self.span_bytes());
        // The root mean square, or middle and half of a range.
        let parts = if self.scaling == Scaling::Length { [span.half, 0.0] } else { [span.middle, span.half] };
        spans.chunks_exact_mut(2).zip(parts).for_each(|(out, part)| out.copy_from_slice(&bits16(part)));
        for (&i, out) in kept.iter().zip(rest.chunks_exact_mut(KEPT)) {
            out[..2].copy_from_slice(&(i as u16).to_le_bytes());
            out[2..].copy_from_slice(&bits16(x[i]));
        }
        Ok(())
    }

    /// Decodes a row.
    pub(crate) fn decode(&self, bytes: &[u8], out: &mut [f32]) {
        let (codes, rest) = bytes.split_at(self.code_bytes());
        let (spans, kept) = rest.split_at(self.span_bytes());
        let span = match self.scaling {
            Scaling::Length => Span { middle: 0.0, half: read16(spans, 0) },
            Scaling::Range => Span { middle: read16(spans, 0), half: read16(spans, 1) },
            Scaling::Columns(_) => Span::default(),
        };
        for (i, out) in out.iter_mut().enumerate() {
            let level = self.levels[usize::from(raw_code(codes, self.bits, i))];
            *out = self.span_of(i, span).value(level);
        }
        for kept in kept.chunks_exact(KEPT) {
            if let Some(out) = out.get_mut(usize::from(u16::from_le_bytes([kept[0], kept[1]]))) {
                *out = read16(kept, 1);
            }
        }
    }

    /// Replaces whole rows by their stored values; a row without codes is unchanged.
    pub(crate) fn round_trip(&self, x: &mut [f32]) {
        let mut bytes = vec![0; self.row_bytes()];
        for row in x.chunks_exact_mut(self.cols.max(1)) {
            if self.encode(row, &mut bytes).is_ok() {
                self.decode(&bytes, row);
            }
        }
    }

    /// Range of a row without its outliers.
    pub(crate) fn span(&self, x: &[f32], kept: &[usize]) -> Span {
        match self.scaling {
            Scaling::Length => {
                let squares: f64 = x.iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
                Span { middle: 0.0, half: f16((squares / self.cols.max(1) as f64).sqrt() as f32) }
            }
            Scaling::Range => {
                let others = x.iter().enumerate().filter(|(i, _)| !kept.contains(i)).map(|(_, x)| *x);
                let (least, greatest) = others
                    .fold((f32::INFINITY, f32::NEG_INFINITY), |(low, high), x| (low.min(x), high.max(x)));
                if least > greatest { Span::default() } else { Span::of(least, greatest).stored() }
            }
            Scaling::Columns(_) => Span::default(),
        }
    }

    fn span_of(&self, col: usize, row: Span) -> Span {
        match &self.scaling {
            Scaling::Columns(spans) => spans[col],
            _ => row,
        }
    }

    /// Indices of the outliers: farthest from their columns' ranges, or from the mean of the row.
    pub(crate) fn farthest(&self, x: &[f32]) -> Vec<usize> {
        if self.kept == 0 {
            return Vec::new();
        }
        let mean = x.iter().sum::<f32>() / x.len().max(1) as f32;
        let distance = |i: usize| match &self.scaling {
            Scaling::Columns(spans) => spans[i].place(x[i]).abs(),
            _ => (x[i] - mean).abs(),
        };
        let mut order: Vec<usize> = (0..x.len()).collect();
        order.sort_by(|&a, &b| distance(b).total_cmp(&distance(a)).then(a.cmp(&b)));
        order.truncate(self.kept);
        order
    }
}

fn bits16(x: f32) -> [u8; 2] {
    (F16.encode_saturating(x) as u16).to_le_bytes()
}

/// Rounds `x` to f16.
fn f16(x: f32) -> f32 {
    read16(&bits16(x), 0)
}

fn read16(bytes: &[u8], i: usize) -> f32 {
    F16.decode(u32::from(u16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]])))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn wave(n: usize) -> Vec<f32> {
        (0..n).map(|i| (i as f32 * 0.77).sin() * (1.0 + (i % 7) as f32)).collect()
    }

    fn through(codec: &BookCodec, x: &[f32]) -> Vec<f32> {
        let (mut bytes, mut out) = (vec![0; codec.row_bytes()], vec![f32::NAN; x.len()]);
        codec.encode(x, &mut bytes).unwrap();
        codec.decode(&bytes, &mut out);
        let mut whole = x.to_vec();
        codec.round_trip(&mut whole);
        assert_eq!(out, whole);
        out
    }

    /// Outliers come back in f16, the others at the nearest level of the range without outliers.
    #[test]
    fn rows_decode_to_levels_and_outliers_exactly() {
        let levels: Vec<f32> = (0..8).map(|i| i as f32 / 3.5 - 1.0).collect();
        let mut x = wave(20);
        (x[4], x[17]) = (100.0, -50.25);
        let plain = BookCodec::new(levels.clone(), 20, Scaling::Range, 0);
        assert_eq!(plain.row_bytes(), 8 + 4);
        assert!(through(&plain, &x).iter().zip(&x).any(|(a, b)| (a - b).abs() > 5.0));
        let codec = BookCodec::new(levels, 20, Scaling::Range, BookCodec::kept_of(20, 1000));
        assert_eq!(codec.row_bytes(), 8 + 4 + 2 * 4);
        let out = through(&codec, &x);
        assert_eq!((out[4], out[17]), (100.0, -50.25));
        let others = || x.iter().enumerate().filter(|(i, _)| ![4, 17].contains(i));
        let (low, high) = others().fold((0f32, 0f32), |(low, high), (_, x)| (low.min(*x), high.max(*x)));
        for (i, x) in others() {
            assert!((out[i] - x).abs() <= (high - low) / 14.0 * 1.01, "{i}");
        }
    }

    #[test]
    fn columns_have_calibrated_ranges_and_store_none() {
        let spans = (0..16).map(|i| Span::of(-1.0 - i as f32, 1.0 + i as f32)).collect();
        let codec = BookCodec::new(vec![-1.0, 0.0, 0.5, 1.0], 16, Scaling::Columns(spans), 1);
        assert_eq!(codec.row_bytes(), 4 + 4);
        let mut x: Vec<f32> = (0..16).map(|i| (1.0 + i as f32) * [-1.0, 0.0, 0.5, 1.0][i % 4]).collect();
        assert_eq!(through(&codec, &x), x);
        x[3] = 77.0;
        assert_eq!(through(&codec, &x), x, "kept");
    }

    /// The error of a random direction equals that of the density's levels, for any length.
    #[test]
    fn a_length_scales_the_levels_of_a_sphere() {
        for (bits, expected) in [(2, 0.1175), (4, 0.0095)] {
            let codec = BookCodec::new(lloyd::sphere_levels(64, bits), 64, Scaling::Length, 0);
            assert_eq!(codec.row_bytes(), 8 * bits as usize + 2);
            let (mut error, mut energy) = (0.0, 0.0);
            for row in 0..200u64 {
                let normal = |i: u64| {
                    let u = |k| f64::from(mantissa_num::round::random_u32(row, 12 * i + k)) / 2f64.powi(32);
                    ((0..12).map(u).sum::<f64>() - 6.0) as f32 * 10f32.powi(row as i32 % 5 - 2)
                };
                let x: Vec<f32> = (0..64).map(normal).collect();
                let out = through(&codec, &x);
                let scale = f64::from(codec.span(&x, &[]).half);
                let sum = |e: &dyn Fn(usize) -> f32| (0..64).map(|i| f64::from(e(i) * e(i))).sum::<f64>();
                error += sum(&|i| x[i] - out[i]) / (scale * scale);
                energy += sum(&|i| x[i]) / (scale * scale);
            }
            assert!((error / energy / expected - 1.0).abs() < 0.1, "{bits}: {}", error / energy);
        }
    }

    #[test]
    fn rows_without_width_or_numbers() {
        let codec = BookCodec::new(vec![-1.0, 1.0], 8, Scaling::Range, 0);
        assert_eq!(through(&codec, &[0.5; 8]), [0.5; 8]);
        let codec = BookCodec::new(vec![-1.0, 1.0], 8, Scaling::Length, 0);
        assert_eq!(through(&codec, &[0.0; 8]), [0.0; 8]);
        let mut x = [f32::NAN; 8];
        assert!(codec.encode(&x, &mut vec![0; codec.row_bytes()]).is_err());
        codec.round_trip(&mut x);
        assert!(x[0].is_nan());
    }
}

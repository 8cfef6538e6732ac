//! Queries of a key/value head, as floats or as digits.

use super::layout::{TileFormat, padded};
use super::simd::{LANES, ROUND};

/// Radix of the two digits of a query for 8-bit keys: both are within [-127, 127].
pub(super) const RADIX: f32 = 254.0;

/// Queries of one key/value head, prepared for keys of any format. Reused without allocation.
#[derive(Clone, Debug, Default)]
pub struct Queries {
    pub(super) rows: usize,
    pub(super) head_dim: usize,
    pub(super) dims: usize,
    /// `[rows, dims]`, scaled.
    pub(super) values: Vec<f32>,
    /// Digits for 8-bit keys, four dims per element: `(high * 254 + low) * scales`, with the sums of a row's digits.
    pub(super) high: Vec<i32>,
    pub(super) low: Vec<i32>,
    pub(super) scales: Vec<f32>,
    pub(super) high_sums: Vec<i32>,
    pub(super) low_sums: Vec<i32>,
    /// The single digit for 4-bit keys.
    pub(super) single: Vec<i32>,
    pub(super) single_scales: Vec<f32>,
    pub(super) single_sums: Vec<i32>,
}

/// Largest value of the two digits, whose high one does not round up to 128.
const TWO_DIGITS: f32 = 127.0 * RADIX + 126.0;

impl Queries {
    /// Prepares `rows`, each of `head_dim` values, times `scale`, for keys of `format`.
    pub fn prepare<'q>(
        &mut self,
        rows: impl ExactSizeIterator<Item = &'q [f32]>,
        head_dim: usize,
        scale: f32,
        format: TileFormat,
    ) {
        (self.rows, self.head_dim, self.dims) = (rows.len(), head_dim, padded(head_dim));
        self.values.clear();
        self.values.resize(self.rows * self.dims, 0.0);
        for (row, values) in rows.zip(self.values.chunks_exact_mut(self.dims.max(1))) {
            values.iter_mut().zip(row).for_each(|(value, x)| *value = x * scale);
        }
        match format {
            TileFormat::Int8 => self.two_digits(),
            TileFormat::Int4 => self.one_digit(),
            _ => {}
        }
    }

    /// Number of queries.
    pub fn rows(&self) -> usize {
        self.rows
    }

    fn two_digits(&mut self) {
        for digits in [&mut self.high, &mut self.low, &mut self.high_sums, &mut self.low_sums] {
            digits.clear();
        }
        self.scales.clear();
        for row in self.values.chunks_exact(self.dims) {
            let (inverse, scale) = step(row, TWO_DIGITS);
            let (mut high_sum, mut low_sum) = (0, 0);
            for block in row.as_chunks::<LANES>().0 {
                let whole = block.map(|x| round(x * inverse));
                let high = whole.map(|x| round(x * (1.0 / RADIX)));
                let mut low = [0.0; LANES];
                for i in 0..LANES {
                    low[i] = whole[i] - high[i] * RADIX;
                }
                push_quads(high, &mut self.high, &mut high_sum);
                push_quads(low, &mut self.low, &mut low_sum);
            }
            self.scales.push(scale);
            self.high_sums.push(high_sum);
            self.low_sums.push(low_sum);
        }
    }

    fn one_digit(&mut self) {
        self.single.clear();
        self.single_sums.clear();
        self.single_scales.clear();
        for row in self.values.chunks_exact(self.dims) {
            let (inverse, scale) = step(row, 127.0);
            let mut sum = 0;
            for block in row.as_chunks::<LANES>().0 {
                push_quads(block.map(|x| round(x * inverse)), &mut self.single, &mut sum);
            }
            self.single_scales.push(scale);
            self.single_sums.push(sum);
        }
    }
}

/// Inverse and value of the step that maps the largest magnitude of `row` to `largest`.
fn step(row: &[f32], largest: f32) -> (f32, f32) {
    let amax = row.iter().fold(0.0f32, |amax, x| amax.max(x.abs()));
    // A NaN or an infinity in the query shows in the result.
    let bad = row.iter().any(|x| !x.is_finite());
    let scale = if bad { f32::NAN } else { amax / largest };
    (if amax > 1e-30 && !bad { largest / amax } else { 0.0 }, scale)
}

/// Nearest integer, ties to even, of `|x| < 2^22`, without a call at levels that lack the instruction.
#[inline(always)]
fn round(x: f32) -> f32 {
    (x + ROUND) - ROUND
}

/// Appends digits, four to an i32, and adds them to `sum`.
#[inline(always)]
fn push_quads(digits: [f32; LANES], quads: &mut Vec<i32>, sum: &mut i32) {
    let digits = digits.map(|x| (x + ROUND).to_bits() as i8);
    let mut total = 0i16;
    digits.iter().for_each(|&x| total = total.wrapping_add(i16::from(x)));
    *sum += i32::from(total);
    quads.extend(digits.as_chunks::<4>().0.iter().map(|four| i32::from_le_bytes(four.map(|x| x as u8))));
}

//! HQQ weights: arrays with distant lines sharing a byte or word.

use crate::reader::Reader;
use crate::tensors::Tensors;
use crate::weight::Weight;

/// A table of `[lines, cols]` unsigned codes.
pub(crate) struct Array {
    pub(crate) codes: Vec<u8>,
    pub(crate) cols: usize,
}

impl<T: Tensors + ?Sized> Reader<'_, T> {
    /// Unpacks the array `suffix`: `fields` codes of `bits` bits per unit of `unit` bytes, the first one highest or
    /// lowest.
    pub(crate) fn strided(
        &self,
        suffix: &str,
        (bits, unit, fields): (usize, usize, usize),
        high_first: bool,
        cols: usize,
    ) -> Result<Array, T::Error> {
        let bytes = self.bytes(suffix)?;
        let total = self.rows * self.cols;
        let units = bytes.len() / unit;
        if cols == 0 || !total.is_multiple_of(cols) || units * fields < total {
            return Err(self.short(suffix));
        }
        // Lines of units in the file.
        let step = units / cols;
        let code = |i: usize| {
            let (line, col) = (i / cols, i % cols);
            let (field, at) = (line / step, unit * (line % step * cols + col));
            let word = bytes[at..at + unit].iter().rev().fold(0u32, |w, &b| w << 8 | u32::from(b));
            let place = if high_first { fields - 1 - field } else { field };
            (word >> (place * bits)) as u8 & ((1u16 << bits) - 1) as u8
        };
        Ok(Array { codes: (0..total).map(code).collect(), cols })
    }

    /// Reads a weight of HQQ, given the name of its packing.
    pub(crate) fn hqq(&self) -> Result<Weight, T::Error> {
        if !self.has("W_q") {
            return self.dense();
        }
        let packing = self.bytes("packing")?;
        let bits = usize::from(packing.first().map_or(0, |digit| digit.wrapping_sub(b'0')));
        let words = packing.ends_with(b"32");
        let unit = if words { (bits, 4, 32 / bits.max(1)) } else { (bits, 1, 8 / bits.max(1)) };
        if !(1..=8).contains(&bits) {
            return Err(self.short("packing"));
        }
        let shape = |suffix: &str| self.tensor(suffix).map(|tensor| tensor.shape);
        let cols = shape("W_q").and_then(|shape| shape.get(1).copied()).unwrap_or(0);
        let array = self.strided("W_q", unit, true, cols)?;
        let by_line = shape("scale").is_some_and(|shape| shape.get(1) == Some(&1) && cols != 1);
        let read = |suffix: &str| self.floats(suffix);
        let (scales, zeros) = (read("scale")?, read("zero")?);
        let count = if by_line { array.codes.len() / cols } else { cols };
        if scales.len() != count || zeros.len() != count {
            return Err(self.short("scale"));
        }
        if !by_line || !self.cols.is_multiple_of(cols) {
            let group = |i: usize| if by_line { i / cols } else { i % cols };
            let value = |(i, &code): (usize, &u8)| (f32::from(code) - zeros[group(i)]) * scales[group(i)];
            let values = array.codes.iter().enumerate().map(value);
            let bytes = values.flat_map(f32::to_le_bytes).collect();
            return Ok(self.stored(bytes, 32, 32, Vec::new()));
        }
        let biases = zeros.iter().zip(&scales).map(|(zero, scale)| -zero * scale).collect();
        Ok(self.in_groups(array, scales, biases))
    }

    /// Unsigned codes whose lines are groups of a row.
    pub(crate) fn in_groups(&self, array: Array, scales: Vec<f32>, biases: Vec<f32>) -> Weight {
        let values = (0..=255u8).map(f32::from).collect();
        let scales = Some(self.lines(scales, array.cols));
        Weight { scales, biases, ..self.stored(array.codes, 8, 8, values) }
    }
}

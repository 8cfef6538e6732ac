//! HQQ's and quanto's weights: arrays of which lines far apart share a byte or word.

use super::{Reader, Result, Scales, Stored, float_values};
use mantissa_store::Dtype;

/// A table of `[lines, cols]` unsigned codes.
struct Array {
    codes: Vec<u8>,
    cols: usize,
}

impl Reader<'_> {
    /// Takes the array `suffix` apart: `fields` codes of `bits` bits in a unit of `unit` bytes, the first of them highest or lowest.
    fn strided(
        &self,
        suffix: &str,
        (bits, unit, fields): (usize, usize, usize),
        high_first: bool,
        cols: usize,
    ) -> Result<Array> {
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

    /// A weight of HQQ, by the name of its packing.
    pub(super) fn hqq(&self) -> Result<Stored> {
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
        let shape = |suffix: &str| self.files.checkpoint().get(&self.name(suffix)).map(|m| m.shape.clone());
        let cols = shape("W_q").and_then(|shape| shape.get(1).copied()).unwrap_or(0);
        let array = self.strided("W_q", unit, true, cols)?;
        let by_line = shape("scale").is_some_and(|shape| shape.get(1) == Some(&1) && cols != 1);
        let read = |suffix: &str| self.files.checkpoint().read_f32(&self.name(suffix));
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

    /// A weight of quanto; its codes' dtype and name show which kind.
    pub(super) fn quanto(&self) -> Result<Stored> {
        let dtype = |suffix: &str| self.files.checkpoint().get(&self.name(suffix)).map(|m| m.dtype);
        if self.has("weight") {
            return self.dense();
        }
        let scales = self.files.checkpoint().read_f32(&self.name("weight._scale"))?;
        if self.has("weight._data") {
            let values = match dtype("weight._data") {
                Some(Dtype::F8E4M3) => float_values(4, 3, 7),
                Some(Dtype::F8E4M3Fnuz) => float_values(4, 3, 8),
                Some(Dtype::F8E5M2) => float_values(5, 2, 15),
                _ => (0..=255u8).map(|code| f32::from(code as i8)).collect(),
            };
            let bytes = self.bytes("weight._data")?;
            if bytes.len() != self.rows * self.cols || scales.len() != self.rows {
                return Err(self.short("weight._data"));
            }
            let stored = self.stored(bytes, 8, 8, values);
            return Ok(Stored { scales: Some(self.lines(scales, self.cols)), ..stored });
        }
        let name = "weight._data._data";
        let cols = self.rows * self.cols / scales.len().max(1);
        let bytes = self.files.checkpoint().get(&self.name(name)).map_or(0, |meta| meta.len) as usize;
        // Two codes to the byte, or four.
        let bits = if bytes * 3 > self.rows * self.cols { 4 } else { 2 };
        let array = self.strided(name, (bits, 1, 8 / bits), false, cols)?;
        if matches!(dtype("weight._shift"), Some(Dtype::I8 | Dtype::U8)) {
            let zeros = self.bytes("weight._shift")?.into_iter().map(f32::from).collect();
            return Ok(Stored { zeros, ..self.in_groups(array, scales, Vec::new()) });
        }
        let shift = self.files.checkpoint().read_f32(&self.name("weight._shift"))?;
        if shift.len() != scales.len() {
            return Err(self.short("weight._shift"));
        }
        Ok(self.in_groups(array, scales, shift.into_iter().map(|shift| -shift).collect()))
    }

    /// Unsigned codes of which each line is a group of a row.
    fn in_groups(&self, array: Array, scales: Vec<f32>, biases: Vec<f32>) -> Stored {
        let values = (0..=255u8).map(f32::from).collect();
        let scales = Some(self.lines(scales, array.cols));
        Stored { scales, biases, ..self.stored(array.codes, 8, 8, values) }
    }

    /// Scales of groups of `group` columns.
    fn lines(&self, values: Vec<f32>, group: usize) -> Scales {
        let across = (self.cols / group.max(1)).max(1);
        Scales { down: values.len() / across, across, values, side: (1, group), flat: None }
    }
}

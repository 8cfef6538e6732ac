//! A weight as stored, decoded row by row.

use crate::elements::{field, float_values};
use crate::gguf::{BlockType, Blocks};
use crate::outliers::Outliers;
use crate::reader::Reader;
use crate::scales::Scales;
use crate::tensors::Tensors;

/// A weight as stored: its codes, their values, and the factors of its blocks.
pub struct Weight {
    pub(crate) cols: usize,
    pub(crate) bytes: Vec<u8>,
    /// Bits of a code.
    pub(crate) bits: usize,
    /// Bits from the start of one row to the start of the next.
    pub(crate) row_bits: usize,
    /// True if the first of two nibbles is the high one.
    pub(crate) high_first: bool,
    /// Value of each code; empty for f32 and f64 bit patterns.
    pub(crate) values: Vec<f32>,
    pub(crate) scales: Option<Scales>,
    /// Zero points, one per scale; empty if all are 0.
    pub(crate) zeros: Vec<f32>,
    /// Global scale, multiplied last.
    pub(crate) tail: Option<f32>,
    /// Biases of the blocks, one per scale, added at the end; may be empty.
    pub(crate) biases: Vec<f32>,
    /// Group of each column, if groups are not adjacent columns.
    pub(crate) groups: Vec<usize>,
    /// Layouts that are decoded as a whole, instead of the fields above.
    pub(crate) layout: Layout,
    /// Outliers added to the decoded values.
    pub(crate) outliers: Option<Outliers>,
}

/// Arrangement of the codes.
pub(crate) enum Layout {
    /// A stream of codes in row order.
    Rows,
    /// Blocks of bytes.
    Blocks(Blocks, BlockType),
    /// A layout of the format's own.
    Own(Box<dyn Rows>),
}

/// Codes of a weight in a layout of the format's own.
pub(crate) trait Rows: Send + Sync {
    /// Decodes row `row` of the weight into `out`.
    fn row(&self, row: usize, out: &mut [f32]);
}

impl Weight {
    /// Weight of codes of `bits` bits with these values, in rows padded to units of `unit` bits.
    pub(crate) fn new(cols: usize, bytes: Vec<u8>, bits: usize, unit: usize, values: Vec<f32>) -> Self {
        Weight {
            cols,
            bytes,
            bits,
            row_bits: (cols * bits).div_ceil(unit) * unit,
            high_first: false,
            values,
            scales: None,
            zeros: Vec::new(),
            tail: None,
            biases: Vec::new(),
            groups: Vec::new(),
            layout: Layout::Rows,
            outliers: None,
        }
    }

    /// A weight whose codes are `rows`.
    pub(crate) fn of_rows(cols: usize, rows: impl Rows + 'static) -> Self {
        Weight { layout: Layout::Own(Box::new(rows)), ..Weight::new(cols, Vec::new(), 8, 8, Vec::new()) }
    }

    /// Decodes row `row` into `out` (`[cols]`).
    pub fn row(&self, row: usize, out: &mut [f32]) {
        match &self.layout {
            Layout::Rows => self.coded(row, out),
            Layout::Blocks(blocks, ty) => {
                blocks.decode(*ty, &self.bytes[row * self.row_bits / 8..], None, out);
            }
            Layout::Own(rows) => rows.row(row, out),
        }
        if let Some(outliers) = &self.outliers {
            outliers.add(row, out);
        }
    }

    /// Decodes all `rows` rows.
    pub fn whole(&self, rows: usize) -> Vec<f32> {
        let mut values = vec![0.0; rows * self.cols];
        values.chunks_exact_mut(self.cols.max(1)).enumerate().for_each(|(row, out)| self.row(row, out));
        values
    }

    fn coded(&self, row: usize, out: &mut [f32]) {
        self.elements(row, out);
        let Some(scales) = &self.scales else { return };
        if !self.groups.is_empty() {
            for (v, group) in out.iter_mut().zip(&self.groups) {
                let at = (row * scales.across + group).min(scales.values.len() - 1);
                *v = (*v - self.zeros.get(at).copied().unwrap_or(0.0)) * scales.values[at];
            }
            return;
        }
        let mut start = 0;
        while start < self.cols {
            let (at, end) = scales.run(row, start, self.cols);
            let (scale, zero) = (scales.values[at], self.zeros.get(at).copied().unwrap_or(0.0));
            let bias = self.biases.get(at).copied().unwrap_or(0.0);
            for v in &mut out[start..end] {
                *v = (*v - zero) * scale + bias;
            }
            start = end;
        }
        if let Some(tail) = self.tail {
            out.iter_mut().for_each(|v| *v *= tail);
        }
    }

    /// Values of the codes of a row, before scaling.
    fn elements(&self, row: usize, out: &mut [f32]) {
        let first = row * self.row_bits;
        let bytes = &self.bytes[first / 8..];
        // Rows of code books may begin within a byte.
        let whole = first.is_multiple_of(8);
        match self.bits {
            64 => {
                let values = bytes.as_chunks::<8>().0.iter().map(|b| f64::from_le_bytes(*b) as f32);
                out.iter_mut().zip(values).for_each(|(v, value)| *v = value);
            }
            32 => out.iter_mut().zip(bytes.as_chunks::<4>().0).for_each(|(v, b)| *v = f32::from_le_bytes(*b)),
            16 => out
                .iter_mut()
                .zip(bytes.as_chunks::<2>().0)
                .for_each(|(v, b)| *v = self.values[usize::from(u16::from_le_bytes(*b))]),
            8 => out.iter_mut().zip(bytes).for_each(|(v, &b)| *v = self.values[usize::from(b)]),
            4 if whole => self.nibbles(bytes, out),
            bits => {
                for (i, v) in out.iter_mut().enumerate() {
                    *v = self.values[usize::from(self.field(first + i * bits))];
                }
            }
        }
    }

    /// Values of codes stored two per byte.
    fn nibbles(&self, bytes: &[u8], out: &mut [f32]) {
        let (pairs, last) = out.as_chunks_mut::<2>();
        let (first, second) = if self.high_first { (4, 0) } else { (0, 4) };
        for (pair, byte) in pairs.iter_mut().zip(bytes) {
            *pair = [first, second].map(|shift| self.values[usize::from(byte >> shift & 15)]);
        }
        if let ([v], Some(byte)) = (last, bytes.get(pairs.len())) {
            *v = self.values[usize::from(byte >> first & 15)];
        }
    }

    /// The code at bit `at` of the stream.
    fn field(&self, at: usize) -> u8 {
        if self.high_first {
            let byte = self.bytes[at / 8];
            return if at.is_multiple_of(8) { byte >> 4 } else { byte & 15 };
        }
        field(&self.bytes, at, self.bits)
    }
}

impl<T: Tensors + ?Sized> Reader<'_, T> {
    /// Weight of `bits`-bit codes with these values, in rows padded to units of `unit` bits.
    pub(crate) fn stored(&self, bytes: Vec<u8>, bits: usize, unit: usize, values: Vec<f32>) -> Weight {
        Weight::new(self.cols, bytes, bits, unit, values)
    }

    /// An unquantized weight.
    pub(crate) fn dense(&self) -> Result<Weight, T::Error> {
        let (bits, values) = match self.dtype("weight") {
            None => return Err(self.missing("weight")),
            Some("F32") => (32, Vec::new()),
            Some("F64") => (64, Vec::new()),
            Some("F16") => (16, float_values(5, 10, 15)),
            Some("BF16") => (16, float_values(8, 7, 127)),
            Some(other) => return Err(self.wrong("weight", "F64, F32, F16 or BF16", other)),
        };
        let bytes = self.bytes("weight")?;
        match bytes.len() / (bits / 8) < self.rows * self.cols {
            true => Err(self.short("weight")),
            false => Ok(self.stored(bytes, bits, bits, values)),
        }
    }
}

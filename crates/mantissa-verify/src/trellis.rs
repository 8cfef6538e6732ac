//! Trellis-coded weights (QTIP, EXL3): states read bit by bit from the ring, values from the code book, rotations as
//! signed sums in f64.

use mantissa_num::trellis::TrellisBook;

use crate::elements::float_value;
use crate::reader::Reader;
use crate::tensors::Tensors;

/// Side of a tile.
const SIDE: usize = 16;

/// A weight of trellis codes as it is stored.
pub struct Trellis {
    rows: usize,
    cols: usize,
    /// Decoded values between the rotations, `[rows, cols]`.
    pub values: Vec<f32>,
    /// Signs of the columns, or signs times scales.
    pub inputs: Vec<f32>,
    /// Signs of the rows, or signs times scales.
    pub outputs: Vec<f32>,
}

/// Reads the trellis codes of `module`; `None` if it has none.
///
/// # Errors
/// A missing tensor, or one that does not match the shape.
pub fn open<T: Tensors + ?Sized>(
    tensors: &T,
    module: &str,
    rows: usize,
    cols: usize,
) -> Result<Option<Trellis>, T::Error> {
    let reader = Reader { tensors, module, rows, cols };
    let scheme = reader.native_scheme();
    if reader.has("trellis") {
        return reader.exl3().map(Some);
    }
    match scheme.strip_prefix("trellis") {
        Some(text) => reader.native_trellis(text).map(Some),
        None => Ok(None),
    }
}

impl<T: Tensors + ?Sized> Reader<'_, T> {
    fn exl3(&self) -> Result<Trellis, T::Error> {
        let name = if self.has("mcg") { "mcg" } else { "mul1" };
        let book = if self.has(name) { book(name) } else { book("3inst") };
        let codes = self.bytes("trellis")?;
        let side = |scales: &str, signs: &str, n: usize| match self.has(scales) {
            true => self.halves(scales),
            false => Ok(signs_of(&self.bytes(signs)?, 0..n)),
        };
        let (inputs, outputs) = (side("suh", "su", self.cols)?, side("svh", "sv", self.rows)?);
        self.coded(&codes, book, inputs, outputs, "trellis")
    }

    /// Weight with the scheme named by `trellis` and `text`.
    fn native_trellis(&self, text: &str) -> Result<Trellis, T::Error> {
        let (rows, cols) = (self.rows, self.cols);
        let codes = self.bytes("weight.packed")?;
        let scales = self.halves("weight.scale")?;
        let named = ["mul1", "3inst"].into_iter().find(|name| text.ends_with(name));
        let book = book(named.unwrap_or("mcg"));
        let (inputs, outputs) = if text.contains("-channel") {
            if scales.len() != rows + cols {
                return Err(self.short("weight.scale"));
            }
            (scales[..cols].to_vec(), scales[cols..].to_vec())
        } else {
            let signs = self.bytes("weight.signs")?;
            let run = run_of(rows);
            if signs.len() * 8 < rows + cols || scales.len() * run < rows {
                return Err(self.short("weight.signs"));
            }
            let outputs = signs_of(&signs, cols..cols + rows).into_iter().enumerate();
            (signs_of(&signs, 0..cols), outputs.map(|(row, sign)| sign * scales[row / run]).collect())
        };
        self.coded(&codes, book, inputs, outputs, "weight.packed")
    }

    /// Half-precision floats.
    fn halves(&self, suffix: &str) -> Result<Vec<f32>, T::Error> {
        match self.dtype(suffix) {
            Some("F16") => self.floats(suffix),
            Some(dtype) => Err(self.wrong(suffix, "F16", &format!("dtype {dtype}"))),
            None => Err(self.missing(suffix)),
        }
    }

    fn coded(
        &self,
        codes: &[u8],
        book: TrellisBook,
        inputs: Vec<f32>,
        outputs: Vec<f32>,
        suffix: &str,
    ) -> Result<Trellis, T::Error> {
        let (rows, cols) = (self.rows, self.cols);
        let tiles = rows / SIDE * (cols / SIDE);
        let whole = rows.is_multiple_of(SIDE) && cols.is_multiple_of(SIDE) && tiles > 0;
        if !whole || codes.is_empty() || !codes.len().is_multiple_of(16 * tiles) {
            return Err(self.short(suffix));
        }
        if inputs.len() != cols || outputs.len() != rows {
            return Err(self.short("suh"));
        }
        let bytes = codes.len() / tiles;
        let mut values = vec![0.0; rows * cols];
        for (tile, codes) in codes.chunks_exact(bytes).enumerate() {
            let (output, input) = (tile % (rows / SIDE) * SIDE, tile / (rows / SIDE) * SIDE);
            for (i, value) in ring(codes, book).into_iter().enumerate() {
                // Tensor-core fragments: a thread holds two adjacent values, two values eight rows further down, and
                // the same eight columns across.
                let (thread, part) = (i / 8, i % 8);
                let down = thread % 4 * 2 + part % 2 + part / 2 % 2 * 8;
                let across = thread / 4 + part / 4 * 8;
                values[(output + across) * cols + input + down] = value;
            }
        }
        Ok(Trellis { rows, cols, values, inputs, outputs })
    }
}

impl Trellis {
    /// Decoded weight, `[rows, cols]`.
    pub fn whole(&self) -> Vec<f32> {
        let (rows, cols) = (self.rows, self.cols);
        let mut w: Vec<f64> = self.values.iter().copied().map(f64::from).collect();
        w.chunks_exact_mut(cols).for_each(|row| rotate(row, run_of(cols)));
        let mut column = vec![0.0; rows];
        for c in 0..cols {
            column.iter_mut().enumerate().for_each(|(r, v)| *v = w[r * cols + c]);
            rotate(&mut column, run_of(rows));
            column.iter().enumerate().for_each(|(r, v)| w[r * cols + c] = *v);
        }
        let scale = |i: usize| f64::from(self.outputs[i / cols]) * f64::from(self.inputs[i % cols]);
        w.into_iter().enumerate().map(|(i, v)| (v * scale(i)) as f32).collect()
    }
}

fn book(name: &str) -> TrellisBook {
    match name {
        "mcg" => TrellisBook::Mcg,
        "mul1" => TrellisBook::Mul1,
        _ => TrellisBook::ThreeInst,
    }
}

/// The 256 values of a tile, whose bits are stored in 32-bit words from the highest to the lowest.
fn ring(codes: &[u8], book: TrellisBook) -> Vec<f32> {
    let n = 8 * codes.len();
    let bit = |at: usize| {
        let at = at % n;
        codes[at / 32 * 4 + 3 - at % 32 / 8] >> (7 - at % 8) & 1
    };
    let state = |i: usize| {
        let end = (i + 1) * n / 256;
        (0..16).fold(0u16, |state, j| state << 1 | u16::from(bit(n + end - 16 + j)))
    };
    let half = |pattern: u16| float_value(pattern.into(), 5, 10, 15);
    (0..256).map(|i| half(book.value(state(i)))).collect()
}

/// Multiplies runs of `run` values by Sylvester's matrix over its square root.
fn rotate(x: &mut [f64], run: usize) {
    for x in x.chunks_exact_mut(run) {
        let old = x.to_vec();
        for (i, out) in x.iter_mut().enumerate() {
            let signed = |(j, v): (usize, &f64)| if (i & j).count_ones() % 2 == 1 { -v } else { *v };
            *out = old.iter().enumerate().map(signed).sum::<f64>() / (run as f64).sqrt();
        }
    }
}

/// Largest power of two up to 128 that divides `n`.
fn run_of(n: usize) -> usize {
    [128, 64, 32, 16, 8, 4, 2].into_iter().find(|run| n.is_multiple_of(*run)).unwrap_or(1)
}

fn signs_of(bits: &[u8], range: std::ops::Range<usize>) -> Vec<f32> {
    let set = |i: usize| bits.get(i / 8).is_some_and(|byte| byte >> (i % 8) & 1 == 1);
    range.map(|i| if set(i) { -1.0 } else { 1.0 }).collect()
}

//! A second decoder of quantized weights, written from the format descriptions and not from the writer: a code's value comes
//! from arithmetic in f64, once for each code of a tensor; codes are cut from the byte stream by their bit positions; and
//! nothing but the layout tables (code books, the packing of each convention) is shared with `mantissa-num`.

mod columns;
mod exl2;
mod floats;
mod native;
mod onnx;
mod outliers;
mod stacked;
mod strided;
pub(super) mod trellis;

use std::path::Path;

use mantissa_model::{LoadError, WeightSource};
use mantissa_num::stored::Transforms;
use mantissa_store::convention::{
    KvQuant, LinearWeight, ModelFiles, Stack, Weight, bitsandbytes, fp8, hqq, mlx, modelopt,
    onnx as onnx_files, quanto,
};
use mantissa_store::gguf::GgmlType;
use mantissa_store::{Dtype, Error};
use serde_json::Value;

use self::columns::Columns;
use self::exl2::Exl2;
use self::outliers::Outliers;
pub(super) use self::stacked::open as open_stacked;
use super::gguf_blocks::Blocks;

type Result<T> = std::result::Result<T, Error>;

/// Decodes the weight of linear layer `module` (`[rows, cols]`), in whichever convention it is stored.
///
/// # Errors
/// A tensor that is missing or does not hold enough bytes.
pub fn decode(files: &ModelFiles, module: &str, rows: usize, cols: usize) -> Result<Vec<f32>> {
    let stored = open(files, module, rows, cols)?;
    let mut values = vec![0.0; rows * cols];
    for (row, out) in values.chunks_exact_mut(cols.max(1)).enumerate() {
        stored.row(row, out);
    }
    Ok(values)
}

/// Reads the weight of linear layer `module` (`[rows, cols]`), to be decoded row by row.
///
/// # Errors
/// As [`decode`].
pub(super) fn open(files: &ModelFiles, module: &str, rows: usize, cols: usize) -> Result<Stored> {
    let reader = Reader { files, module, rows, cols };
    let has = |suffix: &str| files.has(&format!("{module}.{suffix}"));
    match files.convention_name() {
        modelopt::QUANT_METHOD => return reader.modelopt(),
        bitsandbytes::QUANT_METHOD => return reader.bitsandbytes(),
        fp8::QUANT_METHOD => return reader.fp8_blocks(),
        mlx::NAME => return reader.mlx(),
        onnx_files::QUANT_METHOD => return reader.onnx(),
        hqq::QUANT_METHOD => return reader.hqq(),
        quanto::NAME => return reader.quanto(),
        _ => {}
    }
    if has("weight.packed") {
        reader.native()
    } else if has("qweight") {
        reader.columns()
    } else if has("q_weight") {
        reader.exl2()
    } else if has("weight_global_scale") {
        reader.fp4(Some(reader.scalar("weight_global_scale")?))
    } else if has("weight_packed") && !has("weight_shape") {
        reader.fp4(None)
    } else if has("weight_packed") {
        reader.pack_quantized()
    } else if has("weight_scale") {
        reader.one_byte_codes()
    } else {
        reader.dense()
    }
}

/// A weight as stored: codes, what each code stands for, and the factors of its blocks.
pub(super) struct Stored {
    cols: usize,
    bytes: Vec<u8>,
    /// Bits of a code.
    bits: usize,
    /// Bits from the start of one row to the start of the next.
    row_bits: usize,
    /// Whether the first of two nibbles is the high one.
    high_first: bool,
    /// Value of each code; empty for f32 bit patterns.
    values: Vec<f32>,
    scales: Option<Scales>,
    /// One per scale; empty where all are 0.
    zeros: Vec<f32>,
    /// A second factor, the same for all.
    tail: Option<f32>,
    /// Added at the end, one per scale; empty where there is none.
    biases: Vec<f32>,
    /// Group of each column, where groups are not of neighbours.
    groups: Vec<usize>,
    /// Instead of all this: blocks of bytes.
    blocks: Option<(Blocks, GgmlType)>,
    /// Instead of all this: words along columns.
    columns: Option<Columns>,
    /// Instead of all this: groups of several widths.
    exl2: Option<Exl2>,
    /// Added to all this.
    outliers: Option<Outliers>,
}

impl Stored {
    /// Decodes row `row` into `out` (`[cols]`).
    pub(super) fn row(&self, row: usize, out: &mut [f32]) {
        self.coded(row, out);
        if let Some(outliers) = &self.outliers {
            outliers.add(row, out);
        }
    }

    fn coded(&self, row: usize, out: &mut [f32]) {
        if let Some((blocks, ty)) = &self.blocks {
            return blocks.decode(*ty, &self.bytes[row * self.row_bits / 8..], None, out);
        }
        if let Some(columns) = &self.columns {
            return columns.row(row, out);
        }
        if let Some(exl2) = &self.exl2 {
            return exl2.row(row, out);
        }
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

    /// What the codes of a row stand for, before scaling.
    fn elements(&self, row: usize, out: &mut [f32]) {
        let first = row * self.row_bits;
        let bytes = &self.bytes[first / 8..];
        // Rows of code books follow each other within a byte.
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

    /// Two codes to the byte.
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

/// A model whose linear layers are decoded independently.
pub struct Source<'a> {
    files: &'a ModelFiles,
}

impl<'a> Source<'a> {
    /// Of an opened model.
    pub fn new(files: &'a ModelFiles) -> Self {
        Source { files }
    }
}

impl WeightSource for Source<'_> {
    fn config(&self) -> Option<&Value> {
        self.files.config()
    }

    fn dir(&self) -> Option<&Path> {
        Some(self.files.dir())
    }

    fn location(&self) -> String {
        self.files.dir().display().to_string()
    }

    fn has(&self, tensor: &str) -> bool {
        self.files.has(tensor)
    }

    fn tensor_f32(&self, tensor: &str, shape: &[usize]) -> std::result::Result<Vec<f32>, LoadError> {
        Ok(self.files.tensor_f32(tensor, shape)?)
    }

    fn linear(
        &self,
        module: &str,
        rows: usize,
        cols: usize,
        bias: bool,
    ) -> std::result::Result<LinearWeight, LoadError> {
        // Bias and input scheme are not part of what is decoded twice.
        let ordinary = self.files.linear(module, rows, cols, bias)?;
        if !matches!(ordinary.weight, Weight::Quantized(_)) && !ordinary.transforms.is_empty() {
            // The rotations around a trellis are the weight's own.
            return Ok(match trellis::open(self.files, module, rows, cols)? {
                Some(trellis) => {
                    let weight = Weight::F32(trellis.whole());
                    LinearWeight { weight, transforms: Transforms::default(), ..ordinary }
                }
                None => ordinary,
            });
        }
        let weight = Weight::F32(decode(self.files, module, rows, cols)?);
        // What is decoded here has its columns in their own order.
        // Single weights beside the codes are among the values.
        let transforms = match super::column_order(&ordinary.transforms) {
            Ok(Some(_)) => Transforms::default(),
            Ok(None) => Transforms { extras: Vec::new(), ..ordinary.transforms },
            Err(_) => ordinary.transforms,
        };
        Ok(LinearWeight { weight, transforms, ..ordinary })
    }

    fn is_dense(&self, tensor: &str) -> bool {
        self.files.is_dense(tensor)
    }

    fn has_linear(&self, module: &str) -> bool {
        self.files.has_linear(module)
    }

    fn expert(&self, stack: &Stack, rows: usize, cols: usize) -> std::result::Result<Weight, LoadError> {
        if self.files.is_dense(&stack.tensor) {
            return Ok(self.files.expert(stack, rows, cols)?);
        }
        let stored = open_stacked(self.files, &stack.tensor, stack, rows, cols)?;
        let mut values = vec![0.0; rows * cols];
        values.chunks_exact_mut(cols.max(1)).enumerate().for_each(|(row, out)| stored.row(row, out));
        Ok(Weight::F32(values))
    }

    fn kv_quant(&self, module: &str, kv_heads: usize) -> std::result::Result<Option<KvQuant>, LoadError> {
        Ok(self.files.kv_quant(module, kv_heads)?)
    }
}

struct Reader<'a> {
    files: &'a ModelFiles,
    module: &'a str,
    rows: usize,
    cols: usize,
}

/// A list of scales as read, with the shape of their grid and the rows and columns that share one.
struct Scales {
    values: Vec<f32>,
    down: usize,
    across: usize,
    side: (usize, usize),
    /// Instead of a grid: elements of a block of the flattened tensor, and of a row.
    flat: Option<(usize, usize)>,
}

impl Scales {
    /// The scale of (`row`, `start`), and the column of `cols` at which another begins.
    fn run(&self, row: usize, start: usize, cols: usize) -> (usize, usize) {
        let (at, end) = match self.flat {
            Some((block, per_row)) => {
                let (block, i) = (block.max(1), row * per_row + start);
                (i / block, start + block - i % block)
            }
            None => {
                let (rows, side) = (self.side.0.max(1), self.side.1.max(1));
                let (down, across) = ((row / rows).min(self.down - 1), (start / side).min(self.across - 1));
                (down * self.across + across, (start / side + 1) * side)
            }
        };
        (at.min(self.values.len() - 1), end.min(cols))
    }

    fn map(mut self, f: impl Fn(f32) -> f32) -> Self {
        self.values.iter_mut().for_each(|scale| *scale = f(*scale));
        self
    }
}

impl Reader<'_> {
    fn name(&self, suffix: &str) -> String {
        format!("{}.{suffix}", self.module)
    }

    fn bytes(&self, suffix: &str) -> Result<Vec<u8>> {
        self.files.checkpoint().read(&self.name(suffix))
    }

    fn has(&self, suffix: &str) -> bool {
        self.files.has(&self.name(suffix))
    }

    fn scalar(&self, suffix: &str) -> Result<f32> {
        let values = self.files.checkpoint().read_f32(&self.name(suffix))?;
        values.first().copied().ok_or_else(|| self.short(suffix))
    }

    fn short(&self, suffix: &str) -> Error {
        Error::field(self.files.dir(), self.name(suffix), "too few bytes", "what the shape needs", "")
    }

    fn scales(&self, suffix: &str) -> Result<Scales> {
        let name = self.name(suffix);
        let missing = || Error::NoTensor { path: self.files.dir().to_owned(), tensor: name.clone() };
        let meta = self.files.checkpoint().get(&name).ok_or_else(missing)?.clone();
        let values = match meta.dtype {
            // The native container keeps all kinds of 8-bit scale as raw bytes; the scheme tells them apart.
            Dtype::U8 if self.has("weight.nested_scale") => self.nested_scales(suffix)?,
            Dtype::U8 | Dtype::F8E8M0 if !self.native_scheme().starts_with("nvfp4") => {
                let values: [f32; 256] = std::array::from_fn(|code| power_of_two(code as u8));
                self.bytes(suffix)?.into_iter().map(|code| values[usize::from(code)]).collect()
            }
            Dtype::U8 | Dtype::F8E4M3 => {
                let values = float_values(4, 3, 7);
                self.bytes(suffix)?.into_iter().map(|code| values[usize::from(code)]).collect()
            }
            _ => self.files.checkpoint().read_f32(&name)?,
        };
        let (down, across) = match meta.shape.as_slice() {
            [down, across] => (*down, *across),
            [n] => (1, *n),
            _ => (1, 1),
        };
        if values.len() != down * across || values.is_empty() {
            return Err(self.short(suffix));
        }
        let block = self.block(&meta.name);
        let even = |n: usize, blocks: usize| n.div_ceil(blocks.max(1)).max(1);
        let side = block.unwrap_or((even(self.rows, down), even(self.cols, across)));
        Ok(Scales { values, down, across, side, flat: None })
    }

    /// Rows and columns of a block where the file says so: in the scheme's text, or in the group's arguments. Otherwise the
    /// grid divides the weight evenly (a scale per row, or one for all).
    fn block(&self, scale: &str) -> Option<(usize, usize)> {
        if let Some(n) = scale.strip_suffix(".scale") {
            let (file, _) = self.files.checkpoint().locate(scale)?;
            return native::block_of_text(file.metadata().get(n)?);
        }
        let weights = self.group_weights()?;
        if let Some([rows, cols]) =
            weights.get("block_structure").and_then(Value::as_array).map(Vec::as_slice)
        {
            return Some((rows.as_u64()? as usize, cols.as_u64()? as usize));
        }
        Some((1, weights.get("group_size")?.as_u64()? as usize))
    }

    /// The `weights` arguments of the compressed-tensors group that names this module, or of the first.
    fn group_weights(&self) -> Option<&Value> {
        let groups = self.files.config()?.get("quantization_config")?.get("config_groups")?.as_object()?;
        let quoted = format!("\"{}\"", self.module);
        let names = |group: &&Value| group.get("targets").is_some_and(|t| t.to_string().contains(&quoted));
        groups.values().find(names).or_else(|| groups.values().next())?.get("weights")
    }

    /// A weight of `bits`-bit codes with these values, in rows that fill units of `unit` bits.
    fn stored(&self, bytes: Vec<u8>, bits: usize, unit: usize, values: Vec<f32>) -> Stored {
        let row_bits = (self.cols * bits).div_ceil(unit) * unit;
        let (scales, zeros) = (None, Vec::new());
        Stored {
            cols: self.cols,
            bytes,
            bits,
            row_bits,
            high_first: false,
            values,
            scales,
            zeros,
            tail: None,
            biases: Vec::new(),
            groups: Vec::new(),
            blocks: None,
            columns: None,
            exl2: None,
            outliers: None,
        }
    }

    fn dense(&self) -> Result<Stored> {
        let values = self.files.checkpoint().read_f32(&self.name("weight"))?;
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        if values.len() < self.rows * self.cols {
            return Err(self.short("weight"));
        }
        Ok(self.stored(bytes, 32, 32, Vec::new()))
    }

    fn fp4(&self, global: Option<f32>) -> Result<Stored> {
        let packed = self.bytes("weight_packed")?;
        let scales = self.scales("weight_scale")?;
        let stride = self.cols.div_ceil(2);
        if packed.len() < self.rows * stride {
            return Err(self.short("weight_packed"));
        }
        let values = float_values(2, 1, 1);
        let scales = scales.map(|scale| global.map_or(scale, |g| scale / g));
        Ok(Stored { scales: Some(scales), ..self.stored(packed, 4, 8, values) })
    }

    fn one_byte_codes(&self) -> Result<Stored> {
        let name = self.name("weight");
        let integer = self.files.checkpoint().get(&name).is_some_and(|m| m.dtype == Dtype::I8);
        let codes = self.bytes("weight")?;
        let scales = self.scales("weight_scale")?;
        if codes.len() < self.rows * self.cols {
            return Err(self.short("weight"));
        }
        let zeros = if self.files.has(&self.name("weight_zero_point")) {
            self.bytes("weight_zero_point")?
        } else {
            Vec::new()
        };
        let values = if integer {
            (0..=255u8).map(|code| f32::from(code as i8)).collect()
        } else {
            float_values(4, 3, 7)
        };
        let zeros = zeros.iter().map(|&z| f32::from(z as i8)).collect();
        Ok(Stored { scales: Some(scales), zeros, ..self.stored(codes, 8, 8, values) })
    }

    fn pack_quantized(&self) -> Result<Stored> {
        let packed = self.bytes("weight_packed")?;
        let scales = self.scales("weight_scale")?;
        let words = packed.len() / 4 / self.rows.max(1);
        let bits = self.group_weights().and_then(|w| w.get("num_bits")).and_then(Value::as_u64).unwrap_or(8)
            as usize;
        if !(1..=8).contains(&bits) || words * 32 < self.cols * bits {
            return Err(self.short("weight_packed"));
        }
        let zeros = self.packed_zeros(bits, &scales)?.unwrap_or_default();
        let groups = self.column_groups()?;
        let stored = match words == (self.cols * bits).div_ceil(32) {
            true => Stored { row_bits: words * 32, ..self.stored(packed, bits, 32, int_values(bits)) },
            false => {
                let codes = self.padded_words(&packed, bits, self.cols);
                self.stored(codes, 8, 8, int_values(bits))
            }
        };
        Ok(Stored { scales: Some(scales), zeros, groups, ..stored })
    }

    /// Zero points of `pack-quantized`: word `w` of line `l` holds rows from `32 w / bits` of group column `l`.
    fn packed_zeros(&self, bits: usize, scales: &Scales) -> Result<Option<Vec<f32>>> {
        if !self.files.has(&self.name("weight_zero_point")) {
            return Ok(None);
        }
        let bytes = self.bytes("weight_zero_point")?;
        let per_line = bytes.len() / 4 / scales.across.max(1);
        let (dense, offset) = ((scales.down * bits).div_ceil(32), f32::from(1u8 << (bits - 1)));
        if bytes.len() < dense * scales.across * 4 {
            return Err(self.short("weight_zero_point"));
        }
        let line = |line: usize| -> Vec<f32> {
            let words = (0..per_line).map(|w| 4 * (w * scales.across + line));
            let bytes: Vec<u8> = words.flat_map(|at| bytes[at..at + 4].iter().copied()).collect();
            let codes: Vec<u8> = match per_line == dense {
                true => (0..scales.down).map(|row| field(&bytes, row * bits, bits)).collect(),
                false => self.padded_words(&bytes, bits, scales.down),
            };
            codes.into_iter().map(|code| f32::from(code) - offset).collect()
        };
        let lines: Vec<Vec<f32>> = (0..scales.across).map(line).collect();
        Ok(Some((0..scales.down).flat_map(|row| lines.iter().map(move |line| line[row])).collect()))
    }
}

/// The values of offset-binary integers.
fn int_values(bits: usize) -> Vec<f32> {
    (0..1u16 << bits).map(|code| f32::from(code) - f32::from(1u8 << (bits - 1))).collect()
}

/// The value of every code of a float of 1 + `exponent` + `mantissa` bits.
pub(super) fn float_values(exponent: u32, mantissa: u32, bias: i32) -> Vec<f32> {
    let value = |code| {
        special(code, exponent, mantissa, bias).unwrap_or(mini_float(code, exponent, mantissa, bias)) as f32
    };
    (0..1u32 << (1 + exponent + mantissa)).map(value).collect()
}

/// `bits` bits from bit `at` of a little-endian stream: they lie in one byte or two.
fn field(bytes: &[u8], at: usize, bits: usize) -> u8 {
    let next = bytes.get(at / 8 + 1).copied().unwrap_or(0);
    let pair = u16::from(bytes[at / 8]) | u16::from(next) << 8;
    (pair >> (at % 8) & ((1 << bits) - 1)) as u8
}

fn power_of_two(code: u8) -> f32 {
    if code == 255 { f32::NAN } else { 2f64.powi(i32::from(code) - 127) as f32 }
}

/// Infinities and NaN of the formats that have them.
fn special(code: u32, exponent: u32, mantissa: u32, bias: i32) -> Option<f64> {
    let magnitude = code & ((1 << (exponent + mantissa)) - 1);
    let negative = code >> (exponent + mantissa) & 1 == 1;
    let top = ((1 << exponent) - 1) << mantissa;
    match (exponent, mantissa, bias) {
        // fnuz: the code of negative zero.
        (4, 3, 8) | (5, 2, 16) => (negative && magnitude == 0).then_some(f64::NAN),
        (4, 3, 7) => (magnitude == 0x7f).then_some(f64::NAN),
        (2, ..) | (3, ..) => None,
        _ if magnitude == top => Some(if negative { f64::NEG_INFINITY } else { f64::INFINITY }),
        _ => (magnitude > top).then_some(f64::NAN),
    }
}

/// `(-1)^s · 2^(E-B) · (1 + M/2^m)`, or `(-1)^s · 2^(1-B) · M/2^m` where `E` is 0.
fn mini_float(code: u32, exponent: u32, mantissa: u32, bias: i32) -> f64 {
    let fraction = f64::from(code & ((1 << mantissa) - 1)) / f64::from(1u32 << mantissa);
    let field = (code >> mantissa & ((1 << exponent) - 1)) as i32;
    let sign = if code >> (exponent + mantissa) & 1 == 1 { -1.0 } else { 1.0 };
    match field {
        0 => sign * fraction * 2f64.powi(1 - bias),
        e => sign * (1.0 + fraction) * 2f64.powi(e - bias),
    }
}

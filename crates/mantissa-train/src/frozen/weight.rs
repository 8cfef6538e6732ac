//! Frozen weight: kept packed in its scheme, and dequantized for one layer at a time.

use std::ops::Range;

use mantissa_kernels::{for_each_with, kernels};
use mantissa_model::LoadError;
use mantissa_model::flow::parts;
use mantissa_num::stored::Transforms;
use mantissa_num::{Affine, Code, Codes, Format, Offsets, Quantized, TensorError};

use crate::rows::rows_mut;

/// Rows that a thread dequantizes at a time.
const ROWS: usize = 64;

/// Frozen weight `[rows, cols]` of a linear layer, packed.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct FrozenWeight {
    /// Format and scales as stored; codes only if they are not in `packed`.
    q: Quantized,
    /// Codes of `bits` each, rows beginning on bytes. Empty for codes that fill whole bytes.
    packed: Vec<u8>,
    bits: u32,
    /// Side tensors and transforms that belong to the weight.
    transforms: Transforms,
}

/// Offset that makes the codes of a format unsigned: half the range of integers, 0 for indices.
fn offset(format: &Format) -> u8 {
    match format {
        Format::Affine(Affine { code: Code::Int(_) | Code::Ternary, .. }) => 1 << (format.code_bits() - 1),
        _ => 0,
    }
}

/// True if codes of this format are packed more densely than in [`Quantized`].
fn packs(format: &Format) -> bool {
    format.codec().is_none() && format.trellis().is_none() && format.code_bits() < 8
}

impl FrozenWeight {
    /// Packs a quantized weight with the transforms that belong to it.
    ///
    /// # Errors
    /// [`TensorError`] if its parts do not fit its shape.
    pub(crate) fn new(mut q: Quantized, transforms: Transforms) -> Result<Self, TensorError> {
        q.check()?;
        let (bits, mut packed) = (q.format.code_bits(), Vec::new());
        if let (true, Codes::U8(codes)) = (packs(&q.format), &q.codes) {
            let stride = stride(q.cols, bits);
            packed = vec![0; q.rows * stride];
            let signed: Vec<i8> = codes.iter().map(|code| *code as i8).collect();
            let lines = signed.chunks_exact(q.cols.max(1)).zip(packed.chunks_exact_mut(stride.max(1)));
            lines.for_each(|(codes, out)| kernels().pack_codes_le(codes, offset(&q.format), bits, out));
            q.codes = Codes::U8(Vec::new());
        }
        Ok(FrozenWeight { q, packed, bits, transforms })
    }

    /// Bytes of codes, scales and zero points.
    pub(crate) fn bytes(&self) -> u64 {
        let mut bytes = self.packed.len() + code_bytes(&self.q.codes);
        let mut level = Some(&self.q.scales);
        while let Some(scales) = level {
            let offsets = match &scales.offsets {
                Offsets::Zero(zeros) => zeros.len(),
                Offsets::Bias(biases) => biases.len(),
                Offsets::Mean(_) | Offsets::None => 0,
            };
            bytes += code_bytes(&scales.codes) + 4 * offsets;
            level = scales.outer.as_deref();
        }
        bytes as u64
    }

    /// Returns the stored bytes of codes, scales and offsets, in pieces.
    pub(crate) fn bits(&self) -> Vec<Vec<u8>> {
        let mut pieces = vec![self.packed.clone(), self.q.codes.to_le_bytes()];
        let mut level = Some(&self.q.scales);
        while let Some(scales) = level {
            pieces.push(scales.codes.to_le_bytes());
            pieces.push(match &scales.offsets {
                Offsets::Zero(zeros) => zeros.iter().flat_map(|v| v.to_le_bytes()).collect(),
                Offsets::Bias(biases) => biases.iter().flat_map(|v| v.to_le_bytes()).collect(),
                Offsets::Mean(mean) => mean.to_le_bytes().to_vec(),
                Offsets::None => Vec::new(),
            });
            level = scales.outer.as_deref();
        }
        pieces
    }

    /// Predicts [`bytes`](Self::bytes) for a weight `[rows, cols]` in `format`.
    pub(crate) fn bytes_in(format: &Format, rows: usize, cols: usize) -> u64 {
        let elements = rows.saturating_mul(cols);
        if format.codec().is_some() || format.trellis().is_some() {
            return format.total_bits(rows, cols).div_ceil(8);
        }
        let unit = mantissa_num::code_unit(format);
        let codes = if packs(format) {
            rows.saturating_mul(stride(cols, format.code_bits()))
        } else {
            elements.saturating_mul(unit)
        };
        let blocks = format.blocks().count(rows, cols);
        let scale_bytes = format.scale().map_or(0, |tree| {
            let nested = tree.nested().map_or(0, |(nested, _)| 4 * nested.count(1, blocks));
            blocks * tree.code.unit_bytes() + nested + if tree.tensor_wide().is_some() { 4 } else { 0 }
        });
        let offsets = if format.has_zero() || format.has_bias() { 4 * blocks } else { 0 };
        (codes + scale_bytes + offsets) as u64
    }

    /// Rows and columns.
    pub(crate) fn shape(&self) -> (usize, usize) {
        (self.q.rows, self.q.cols)
    }

    /// Returns the value of every packed code.
    fn levels(&self) -> Box<[f32; 256]> {
        let (format, offset) = (&self.q.format, offset(&self.q.format));
        let shift = if self.packed.is_empty() { 0 } else { offset };
        let limit = 1u32 << self.bits.min(8);
        Box::new(std::array::from_fn(|code| match (code as u32) < limit {
            true => format.element(u32::from((code as u8).wrapping_sub(shift))),
            false => 0.0,
        }))
    }

    /// Returns a reader of rows.
    pub(crate) fn reader(&self) -> Reader<'_> {
        let whole = (!self.reads_by_rows() || !self.transforms.is_empty()).then(|| {
            let (rows, cols) = self.shape();
            let mut values = vec![0.0; rows * cols];
            if self.reads_by_rows() {
                Reader { weight: self, levels: self.levels(), whole: None }.rows(
                    0..rows,
                    &mut Vec::new(),
                    &mut values,
                );
            } else {
                self.q.dequantize_rows(0..rows, &mut values);
            }
            self.transforms.fold(&mut values, rows, cols);
            values
        });
        Reader { weight: self, levels: self.levels(), whole }
    }

    /// Dequantizes the weight to `out` `[rows, cols]`.
    pub(crate) fn dequantize(&self, out: &mut [f32], threads: usize) {
        let ((rows, cols), reader) = (self.shape(), self.reader());
        let cut = parts(rows, ROWS);
        let pieces = cut.clone().zip(rows_mut(out, cols, cut));
        for_each_with(threads, Vec::new, pieces, |codes, (span, out)| reader.rows(span, codes, out));
    }

    /// True if single rows can be decoded with a table of levels.
    fn reads_by_rows(&self) -> bool {
        !self.packed.is_empty()
            || (matches!(self.q.codes, Codes::U8(_))
                && self.q.format.codec().is_none()
                && self.q.format.trellis().is_none())
    }
}

/// Reads rows of a frozen weight as f32: the bits of [`Quantized::dequantize`], then the transforms.
pub(crate) struct Reader<'a> {
    weight: &'a FrozenWeight,
    /// Value of every code.
    levels: Box<[f32; 256]>,
    /// All values, of a weight that is not read row by row: with transforms, or in a codec.
    whole: Option<Vec<f32>>,
}

impl Reader<'_> {
    /// Writes the rows `span` to `out` `[span, cols]`; `codes` is a buffer.
    pub(crate) fn rows(&self, span: Range<usize>, codes: &mut Vec<u8>, out: &mut [f32]) {
        let cols = self.weight.q.cols;
        match &self.whole {
            Some(whole) => out.copy_from_slice(&whole[span.start * cols..span.end * cols]),
            None => {
                let rows = span.zip(out.chunks_exact_mut(cols.max(1)));
                rows.for_each(|(row, out)| self.row(row, codes, out));
            }
        }
    }

    /// Dequantizes row `row`; `codes` is a buffer.
    fn row(&self, row: usize, codes: &mut Vec<u8>, out: &mut [f32]) {
        let FrozenWeight { q, packed, bits, .. } = self.weight;
        let cols = q.cols;
        let codes: &[u8] = match &q.codes {
            Codes::U8(all) if packed.is_empty() => &all[row * cols..(row + 1) * cols],
            _ => {
                codes.resize(cols, 0);
                let stride = stride(cols, *bits);
                kernels().unpack_codes_le(&packed[row * stride..(row + 1) * stride], *bits, codes);
                codes
            }
        };
        for (block, start, end) in q.format.blocks().runs(cols, row) {
            let (decoder, out) = (q.block_decoder(block), &mut out[start..end]);
            let codes = &codes[start..end];
            match decoder.parts() {
                (0.0, inner, tail) if !q.format.has_bias() => {
                    kernels().dequant_lut8(codes, &self.levels, &[inner], codes.len(), out);
                    if let Some(tail) = tail {
                        out.iter_mut().for_each(|v| *v *= tail);
                    }
                }
                _ => out
                    .iter_mut()
                    .zip(codes)
                    .for_each(|(v, code)| *v = decoder.value(self.levels[usize::from(*code)])),
            }
        }
    }
}

/// Bytes of a line of packed codes.
fn stride(cols: usize, bits: u32) -> usize {
    cols.saturating_mul(bits as usize).div_ceil(8)
}

fn code_bytes(codes: &Codes) -> usize {
    match codes {
        Codes::U8(codes) | Codes::Packed(codes) => codes.len(),
        Codes::U16(codes) => 2 * codes.len(),
        Codes::U32(codes) => 4 * codes.len(),
        Codes::U64(codes) => 8 * codes.len(),
    }
}

/// Returns the error of a weight of `module` that does not fit its shape.
pub(crate) fn misfit(module: &str) -> impl Fn(TensorError) -> LoadError {
    let module = module.to_owned();
    move |error| LoadError::Weight { module: module.clone(), error }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use mantissa_num::{Given, Scheme, quantize};

    use super::*;

    /// Every kind of format gives the bits of the reference, in the predicted bytes.
    #[test]
    fn packed_weights_are_the_reference_bit_for_bit() {
        for (rows, cols) in [(3, 256), (70, 512), (5, 768)] {
            let w: Vec<f32> = (0..rows * cols).map(|i| (i as f32 * 0.37).sin() * 0.1).collect();
            for text in [
                "nf4",
                "nf4-dq",
                "fp4-bnb",
                "int2-g32",
                "int3-g64-asym",
                "int4-g32",
                "int5-channel",
                "int8-channel",
                "int4-g64-asym",
                "fp8-e4m3-channel",
                "fp6-e2m3-channel",
                "mxfp4",
                "nvfp4",
                "nvfp4:te",
                "ternary-tensor",
                "q4_0",
                "q4_k",
                "iq4_nl",
                "bf16",
                "mxint8",
            ] {
                let scheme: Scheme = text.parse().unwrap();
                if scheme.format.codec().is_some_and(|codec| cols % codec.elements != 0) {
                    continue;
                }
                let q = quantize(&scheme, &w, rows, cols, Given::default()).unwrap();
                let expected = q.dequantize().unwrap();
                let frozen = FrozenWeight::new(q, Transforms::default()).unwrap();
                assert_eq!(frozen.bytes(), FrozenWeight::bytes_in(&scheme.format, rows, cols), "{text}");
                for threads in [1, 3] {
                    let mut found = vec![f32::NAN; rows * cols];
                    frozen.dequantize(&mut found, threads);
                    let same = found.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(same, "{text} [{rows}, {cols}]");
                }
            }
        }
    }

    /// NF4 with double quantization takes 4.127 bits per weight.
    #[test]
    fn double_quantization_is_packed() {
        let format = "nf4-dq".parse::<Scheme>().unwrap().format;
        let bytes = FrozenWeight::bytes_in(&format, 1024, 4096) as f64;
        assert!((bytes * 8.0 / (1024.0 * 4096.0) - 4.127).abs() < 0.001, "{bytes}");
    }
}

//! One row of keys or values as bytes: packed codes, then the scales, zero points, minima and tensor-wide scale of the
//! row. Every row is stored by itself, so that cached bytes are never changed.

mod heads;

use mantissa_kernels::Element;
use mantissa_num::pack::{Packing, sign_extend};
use mantissa_num::{
    Affine, Blocks, Code, Codes, Format, Given, RowKind, Scheme, Source, TensorError, code_unit,
    fake_quantize, quantize,
};
use mantissa_store::convention::ActivationQuant;

use crate::error::LoadError;
use crate::input::{InputQuantizer, fast_element};

pub use self::heads::{HeadElement, HeadScale};

/// Stores rows of `cols` values.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RowCodec {
    scheme: Scheme,
    cols: usize,
    /// Stored scales of a checkpoint, row `i` using number `i % len`; empty if each row has its own scales.
    stored: Vec<f32>,
    /// Fast path for whole sequences, if the scheme has one.
    fast: Fast,
    layout: Layout,
    /// Unscaled value of each code of at most 8 bits, by its stored bits.
    elements: Vec<f32>,
}

#[derive(Clone, Debug, PartialEq)]
enum Fast {
    Stored(Element),
    Rows(InputQuantizer),
    Reference,
}

/// Bytes of the parts of a row, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Layout {
    codes: usize,
    scales: usize,
    zeros: usize,
    biases: usize,
    outer: usize,
}

impl Layout {
    fn total(self) -> usize {
        self.codes + self.scales + self.zeros + self.biases + self.outer
    }
}

impl RowCodec {
    /// Creates a codec for rows of `cols` values, each with its own scales.
    ///
    /// # Errors
    /// [`LoadError::KvScheme`] if a row cannot be stored by itself.
    pub(crate) fn new(scheme: &Scheme, cols: usize) -> Result<Self, LoadError> {
        let refuse = |allowed| Err(LoadError::KvScheme { scheme: scheme.to_string(), allowed });
        let format = &scheme.format;
        if scheme.source == Source::Static {
            return refuse(
                "scales computed from the cached values, or stored in the checkpoint (recipe +kv-SCHEME)",
            );
        }
        let by_itself = format.scale().is_none()
            || matches!(format.blocks(), Blocks::Row | Blocks::Group(_) | Blocks::Flat(_));
        if !by_itself {
            return refuse(
                "a scale per head, token or group, or the scale of a tensor stored in the checkpoint (@static)",
            );
        }
        if scheme.needs_whole_tensor() || code_unit(format) > 4 {
            return refuse("codes of at most 32 bits with unquantized scales");
        }
        if format.codec().is_some_and(|codec| !cols.is_multiple_of(codec.elements)) {
            return refuse(
                "blocks that divide a token's row; with a scheme by group the last one may be short",
            );
        }
        let plain = ActivationQuant::new(scheme.clone(), None);
        let fast = InputQuantizer::new("KV cache", &plain).map_or(Fast::Reference, Fast::Rows);
        Ok(Self::assemble(scheme.clone(), cols, Vec::new(), fast))
    }

    /// Creates a codec for rows of `cols` values with the scales `stored` in a checkpoint; `None` if the scheme has no
    /// stored scales.
    pub(crate) fn with_stored(scheme: &Scheme, cols: usize, stored: &[f32]) -> Option<Self> {
        let whole = scheme.format.blocks() == Blocks::Tensor && !scheme.has_outer_scale();
        let mut in_rows = scheme.clone();
        if let Format::Affine(affine) = &mut in_rows.format {
            affine.blocks = Blocks::Row;
        }
        let element = fast_element(&in_rows).filter(|_| whole)?;
        Some(Self::assemble(in_rows, cols, stored.to_vec(), Fast::Stored(element)))
    }

    fn assemble(scheme: Scheme, cols: usize, stored: Vec<f32>, fast: Fast) -> Self {
        let format = &scheme.format;
        let layout = match packing(format) {
            _ if format.codec().is_some() => {
                let codes = format.codec().and_then(|codec| codec.total_bytes(1, cols)).unwrap_or(0);
                Layout { codes, scales: 0, zeros: 0, biases: 0, outer: 0 }
            }
            packing => {
                let blocks = format.blocks().count(1, cols);
                let own = if stored.is_empty() { blocks } else { 0 };
                Layout {
                    codes: packing.map_or(cols * code_unit(format), |packing| packing.line_bytes(cols)),
                    scales: format.scale().map_or(0, |scale| own * scale.code.unit_bytes()),
                    zeros: match (format.has_zero(), packing) {
                        (true, Some(packing)) => packing.line_bytes(blocks),
                        _ => 0,
                    },
                    biases: if format.has_bias() { 4 * blocks } else { 0 },
                    outer: if scheme.has_outer_scale() { 4 } else { 0 },
                }
            }
        };
        let bits = if packing(format).is_some() { format.code_bits() } else { 0 };
        let element = |raw: u32| match is_signed(format) {
            true => format.element(sign_extend(raw as u8, bits).into()),
            false => format.element(raw),
        };
        let elements = if bits > 0 { (0..1 << bits).map(element).collect() } else { Vec::new() };
        RowCodec { scheme, cols, stored, fast, layout, elements }
    }

    /// Values of a row.
    pub(crate) fn cols(&self) -> usize {
        self.cols
    }

    /// Bytes of a row.
    pub(crate) fn row_bytes(&self) -> usize {
        self.layout.total()
    }

    fn given(&self, row: usize) -> Given {
        let outer = (!self.stored.is_empty()).then(|| self.stored[row % self.stored.len()]);
        Given { outer, first_index: 0, ..Given::default() }
    }

    /// Encodes row `row`.
    ///
    /// # Errors
    /// [`TensorError`] for values without a code.
    pub(crate) fn encode(&self, row: usize, x: &[f32], out: &mut [u8]) -> Result<(), TensorError> {
        let q = quantize(&self.scheme, x, 1, x.len(), self.given(row))?;
        let (codes, rest) = out.split_at_mut(self.layout.codes);
        let (scales, rest) = rest.split_at_mut(self.layout.scales);
        let (zeros, rest) = rest.split_at_mut(self.layout.zeros);
        let (biases, outer) = rest.split_at_mut(self.layout.biases);
        match (packing(&q.format), &q.codes) {
            (Some(packing), Codes::U8(list)) => {
                codes.copy_from_slice(&packing.pack(list, self.cols));
                let unsigned: Vec<u8> = q.zeros().iter().map(|&zero| zero as i8 as u8).collect();
                zeros.copy_from_slice(&packing.pack(&unsigned, unsigned.len()));
            }
            (_, list) => codes.copy_from_slice(&list.to_le_bytes()),
        }
        if !scales.is_empty() {
            scales.copy_from_slice(&q.scales.to_le_bytes());
        }
        copy_f32(q.biases(), biases);
        copy_f32(&q.outer().map_or(Vec::new(), |outer| vec![outer]), outer);
        Ok(())
    }

    /// Decodes row `row`, to the values of [`mantissa_num::Quantized::dequantize`].
    pub(crate) fn decode(&self, row: usize, bytes: &[u8], out: &mut [f32]) {
        let format = &self.scheme.format;
        let (codes, rest) = bytes.split_at(self.layout.codes);
        let (scales, rest) = rest.split_at(self.layout.scales);
        let (zeros, rest) = rest.split_at(self.layout.zeros);
        let (biases, outer) = rest.split_at(self.layout.biases);
        if let Some(codec) = format.codec() {
            return codec.decode(codes, out);
        }
        self.elements_of(codes, out);
        let Some(tree) = format.scale() else { return };
        let unit = tree.code.unit_bytes();
        let stored = self.given(row).outer.map(|scale| self.scheme.block_with_scale(scale).scale);
        let outer = read_f32(outer, 0);
        for (block, start, end) in format.blocks().runs(self.cols, 0) {
            let scale = stored.unwrap_or_else(|| little_endian(&scales[block * unit..(block + 1) * unit]));
            let zero = if zeros.is_empty() { 0 } else { signed_code(zeros, format.code_bits(), block) };
            let decoder = format.decoder(scale, zero, outer);
            let decoder = read_f32(biases, block).map_or(decoder, |bias| decoder.with_bias(bias));
            out[start..end].iter_mut().for_each(|x| *x = decoder.value(*x));
        }
    }

    /// Looks up the unscaled values of codes.
    fn elements_of(&self, codes: &[u8], out: &mut [f32]) {
        let bits = self.scheme.format.code_bits();
        match (self.elements.is_empty(), bits) {
            (true, _) => {
                let unit = code_unit(&self.scheme.format);
                let values = codes.chunks_exact(unit).map(|c| self.scheme.format.element(little_endian(c)));
                out.iter_mut().zip(values).for_each(|(x, value)| *x = value);
            }
            (false, 8) => {
                out.iter_mut().zip(codes).for_each(|(x, &code)| *x = self.elements[usize::from(code)]);
            }
            (false, 4) => {
                for (pair, &byte) in out.chunks_mut(2).zip(codes) {
                    pair[0] = self.elements[usize::from(byte & 15)];
                    if let Some(x) = pair.get_mut(1) {
                        *x = self.elements[usize::from(byte >> 4)];
                    }
                }
            }
            _ => {
                for (i, x) in out.iter_mut().enumerate() {
                    *x = self.elements[usize::from(raw_code(codes, bits, i))];
                }
            }
        }
    }

    /// Replaces whole rows, starting with row 0, by their stored values. A row with a NaN, an infinity or a value out
    /// of range is unchanged, so that it shows in the result instead of being rounded to a number.
    pub(crate) fn round_trip(&self, x: &mut [f32], cols: usize) {
        for (i, row) in x.chunks_exact_mut(cols.max(1)).enumerate() {
            if row.iter().any(|x| !x.is_finite()) {
                continue;
            }
            // A row without codes is unchanged.
            let _ = match &self.fast {
                Fast::Stored(element) => {
                    let scale = self.stored[i % self.stored.len()];
                    row.iter_mut().for_each(|x| *x = element.round(*x / scale) * scale);
                    Ok(())
                }
                Fast::Rows(quantizer) => quantizer.apply(row, cols),
                Fast::Reference => fake_quantize(&self.scheme, row, 1, cols, self.given(i)),
            };
        }
    }
}

/// True if a row of `scheme` is a head's vector, false if it is a token.
pub(crate) fn is_by_head(scheme: &Scheme) -> bool {
    scheme.row == RowKind::Head
}

/// Packing of codes of at most 8 bits; `None` for wider ones and blocks of bytes.
fn packing(format: &Format) -> Option<Packing> {
    let bits = format.code_bits();
    (bits > 0 && bits <= 8).then(|| Packing::rows(bits))
}

fn is_signed(format: &Format) -> bool {
    matches!(format, Format::Affine(Affine { code: Code::Int(_) | Code::Ternary, .. }))
}

/// Returns code `i` of codes of `bits` bits, low bits first.
pub(super) fn raw_code(codes: &[u8], bits: u32, i: usize) -> u8 {
    let bit = i * bits as usize;
    let word = u16::from(codes[bit / 8]) | u16::from(codes.get(bit / 8 + 1).copied().unwrap_or(0)) << 8;
    ((word >> (bit % 8)) & ((1 << bits) - 1)) as u8
}

fn signed_code(codes: &[u8], bits: u32, i: usize) -> i32 {
    i32::from(sign_extend(raw_code(codes, bits, i), bits) as i8)
}

/// Reads up to four bytes as a number.
fn little_endian(bytes: &[u8]) -> u32 {
    bytes.iter().rev().fold(0, |word, &byte| word << 8 | u32::from(byte))
}

fn read_f32(bytes: &[u8], i: usize) -> Option<f32> {
    bytes.get(4 * i..4 * i + 4).map(|bytes| f32::from_bits(little_endian(bytes)))
}

fn copy_f32(values: &[f32], out: &mut [u8]) {
    for (value, out) in values.iter().zip(out.chunks_exact_mut(4)) {
        out.copy_from_slice(&value.to_le_bytes());
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use mantissa_num::parse_activation;

    use super::*;

    fn wave(n: usize) -> Vec<f32> {
        (0..n).map(|i| (i as f32 * 0.77).sin() * (1.0 + (i % 7) as f32)).collect()
    }

    /// Bytes decode to the values of the reference, and whole sequences see the same.
    #[test]
    fn rows_decode_to_the_values_of_the_reference() {
        let schemes = [
            "int8-head",
            "int8-head:restricted",
            "int8-head-asym:minmax",
            "int4-head-asym",
            "int4-head-asym:minmax",
            "int2-g32-asym:minmax",
            "int3-g24-asym",
            "int6-token",
            "fp8-e4m3-head",
            "fp8-e5m2-token",
            "fp6-e3m2-g32",
            "mxfp4",
            "mxint8",
            "nvfp4",
            "nvfp4:te",
            "nvfp4:torchao-1level",
            "nf4-g32",
            "dyn8",
            "ternary-g32",
            "q8_0",
            "q4_0",
            "bf16",
            "fp8-e4m3",
            "f32",
        ];
        for text in schemes {
            for cols in [32, 96] {
                let scheme = parse_activation(text).unwrap();
                let codec = RowCodec::new(&scheme, cols).unwrap();
                let x = wave(3 * cols);
                let mut whole = x.clone();
                codec.round_trip(&mut whole, cols);
                for (row, (x, whole)) in x.chunks(cols).zip(whole.chunks(cols)).enumerate() {
                    let (mut bytes, mut out) = (vec![0; codec.row_bytes()], vec![f32::NAN; cols]);
                    codec.encode(row, x, &mut bytes).unwrap();
                    codec.decode(row, &bytes, &mut out);
                    let expected = quantize(&scheme, x, 1, cols, Given::default()).unwrap();
                    assert_eq!(out, expected.dequantize().unwrap(), "{text} {cols}");
                    assert_eq!(out, whole, "{text} {cols}");
                }
                let bits = scheme.format.total_bits(1, cols);
                let padded = codec.row_bytes() as u64 * 8;
                assert!((bits..bits + 16).contains(&padded), "{text} {cols}: {padded} for {bits}");
            }
        }
    }

    #[test]
    fn schemes_beyond_one_row_are_refused() {
        for text in ["fp8-e4m3-tensor", "int8-t16x16", "nf4-dq", "f64", "int8-tensor@static"] {
            let error = RowCodec::new(&parse_activation(text).unwrap(), 64).unwrap_err().to_string();
            assert!(error.contains(text), "{error}");
        }
        assert!(RowCodec::new(&parse_activation("q4_0").unwrap(), 48).is_err(), "ragged");
    }

    #[test]
    fn values_that_have_no_code_are_errors_in_the_cache_and_stay_in_windows() {
        let codec = RowCodec::new(&parse_activation("int8-head").unwrap(), 4).unwrap();
        let mut x = vec![1.0, f32::NAN, 2.0, 3.0, 1.0, 0.3, 2.0, 3.0];
        assert!(codec.encode(0, &x[..4], &mut vec![0; codec.row_bytes()]).is_err());
        codec.round_trip(&mut x, 4);
        assert!(x[1].is_nan() && x[0] == 1.0 && x[5] != 0.3);
    }
}

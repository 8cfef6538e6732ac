//! A quantized weight in memory: codes one or two to a byte, scales decoded to f32, rows dequantized on demand to the
//! bits of [`Quantized::dequantize`].

use mantissa_kernels::kernels;
use mantissa_num::{Affine, Blocks, Code, Codes, Format, Quantized, Sense};

use crate::factored::{Factored, is_float8};

/// Codes of at most 8 bits, `[rows, cols]`.
#[derive(Clone, Debug)]
pub(crate) struct Packed {
    cols: usize,
    data: Data,
    blocks: Blocks,
    /// Scale of each block.
    scales: Vec<f32>,
    /// Second factor of every value, in formats that multiply twice (Transformer Engine's NVFP4).
    tail: Option<f32>,
    /// True if elements are 8-bit floats.
    float8: bool,
}

/// Codes and their unscaled values. Nibbles: two codes per byte, the first in the low half, each row starting a byte.
#[derive(Clone, Debug)]
enum Data {
    Nibbles {
        codes: Vec<u8>,
        table: [f32; 16],
    },
    Bytes {
        codes: Vec<u8>,
        table: Box<[f32; 256]>,
    },
    /// Unsigned codes, and each block's zero point in their domain.
    ZeroNibbles {
        codes: Vec<u8>,
        zeros: Vec<f32>,
    },
    ZeroBytes {
        codes: Vec<u8>,
        zeros: Vec<f32>,
    },
}

impl Packed {
    /// Packs a weight; `None` if codes are wider than a byte, or blocks have a bias or nested scales. `q` must have
    /// passed [`Quantized::check`].
    pub(crate) fn new(q: &Quantized) -> Option<Self> {
        let Codes::U8(codes) = &q.codes else { return None };
        if q.format.has_bias() || q.nested().is_some() {
            return None;
        }
        let blocks = q.format.blocks().simplest(q.rows, q.cols);
        // A flat block may begin inside a row and so inside a byte.
        let nibbles = q.format.code_bits() <= 4 && !matches!(blocks, Blocks::Flat(_));
        let data = match (unsigned_offset(&q.format), nibbles) {
            (None, true) => {
                let table = std::array::from_fn(|n| nibble_element(&q.format, n as u8));
                Data::Nibbles { codes: pack(codes, q.cols, 0), table }
            }
            (None, false) => {
                let table = Box::new(std::array::from_fn(|code| q.format.element(code as u32)));
                Data::Bytes { codes: codes.clone(), table }
            }
            (Some(offset), _) => {
                let zeros = q.zeros().iter().map(|&z| (z + i32::from(offset)) as f32).collect();
                match nibbles {
                    true => Data::ZeroNibbles { codes: pack(codes, q.cols, offset), zeros },
                    false => {
                        let codes = codes.iter().map(|c| c.wrapping_add(offset)).collect();
                        Data::ZeroBytes { codes, zeros }
                    }
                }
            }
        };
        let (scales, tail) = decoded_scales(q);
        Some(Packed { cols: q.cols, data, blocks, scales, tail, float8: is_float8(&q.format) })
    }

    /// Returns elements and factors, if elements are 8-bit floats.
    pub(crate) fn factored(&self) -> Option<Factored> {
        match &self.data {
            Data::Bytes { codes, table } if self.float8 && self.tail.is_none() => Some(Factored {
                cols: self.cols,
                elements: codes.iter().map(|code| table[usize::from(*code)]).collect(),
                blocks: self.blocks,
                factors: self.scales.clone(),
            }),
            _ => None,
        }
    }

    /// Bytes in memory.
    pub(crate) fn bytes(&self) -> usize {
        let codes = match &self.data {
            Data::Nibbles { codes, .. } | Data::Bytes { codes, .. } => codes.len(),
            Data::ZeroNibbles { codes, zeros } | Data::ZeroBytes { codes, zeros } => {
                codes.len() + 4 * zeros.len()
            }
        };
        codes + 4 * self.scales.len()
    }

    /// Dequantizes row `row` into `out` (`[cols]`).
    pub(crate) fn row(&self, row: usize, out: &mut [f32]) {
        let group = match self.blocks {
            Blocks::Flat(_) => {
                for (block, start, end) in self.blocks.runs(self.cols, row) {
                    self.run(row, start, block, end - start, &mut out[start..end]);
                }
                return;
            }
            Blocks::Group(g) | Blocks::Tile { cols: g, .. } => g as usize,
            _ => self.cols,
        };
        if self.cols > 0 {
            self.run(row, 0, self.blocks.index(self.cols, row, 0), group, out);
        }
        if let Some(tail) = self.tail {
            out.iter_mut().for_each(|x| *x *= tail);
        }
    }

    /// Dequantizes `out.len()` elements of a row from column `col` on, `group` per block, the first in block `block`.
    /// Nibbles are dequantized by whole rows only.
    fn run(&self, row: usize, col: usize, block: usize, group: usize, out: &mut [f32]) {
        let kernels = kernels();
        let blocks = block..block + out.len().div_ceil(group);
        let scales = &self.scales[blocks.clone()];
        let bytes = row * self.cols + col..row * self.cols + col + out.len();
        let stride = self.cols.div_ceil(2);
        let nibbles = row * stride..(row + 1) * stride;
        match &self.data {
            Data::Nibbles { codes, table } => {
                kernels.dequant_lut4(&codes[nibbles], table, scales, group, out);
            }
            Data::Bytes { codes, table } => kernels.dequant_lut8(&codes[bytes], table, scales, group, out),
            Data::ZeroNibbles { codes, zeros } => {
                kernels.dequant_int4_zero(&codes[nibbles], &zeros[blocks], scales, group, out);
            }
            Data::ZeroBytes { codes, zeros } => {
                kernels.dequant_int8_zero(&codes[bytes], &zeros[blocks], scales, group, out);
            }
        }
    }
}

/// Offset that makes the codes of a format with zero points unsigned.
fn unsigned_offset(format: &Format) -> Option<u8> {
    match format {
        Format::Affine(Affine { code: Code::Int(bits), .. }) if format.has_zero() => Some(1 << (bits - 1)),
        _ => None,
    }
}

/// Element of the code whose low four bits are `nibble`.
fn nibble_element(format: &Format, nibble: u8) -> f32 {
    match format {
        Format::Affine(Affine { code: Code::Int(_) | Code::Ternary, .. }) => {
            f32::from((nibble << 4) as i8 >> 4)
        }
        _ => format.element(u32::from(nibble)),
    }
}

fn pack(codes: &[u8], cols: usize, offset: u8) -> Vec<u8> {
    let nibble = |code: &u8| code.wrapping_add(offset) & 15;
    let byte = |pair: &[u8]| nibble(&pair[0]) | pair.get(1).map_or(0, |code| nibble(code) << 4);
    codes.chunks(cols.max(1)).flat_map(|row| row.chunks(2).map(byte)).collect()
}

/// Factor of every block, and the second factor if there is one.
fn decoded_scales(q: &Quantized) -> (Vec<f32>, Option<f32>) {
    let Some(tree) = q.format.scale() else { return (vec![1.0], None) };
    let amax = match tree.outer.as_ref().map(|(_, outer)| outer.sense) {
        Some(Sense::Amax { full_scale }) => q.outer().map(|amax| amax / full_scale as f32),
        _ => None,
    };
    let scales = (0..q.scales.len()).map(|block| match amax {
        Some(_) => tree.code.decode(q.scales.get(block)),
        // (1 - 0) · inner is the factor itself.
        None => q.format.decoder(q.scales.get(block), 0, q.outer()).value(1.0),
    });
    (scales.collect(), amax)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use mantissa_num::{Given, Scheme, grammar, quantize};

    use super::*;

    fn weights(n: usize) -> Vec<f32> {
        (0..n).map(|i| (i as f32 * 0.913).sin() * (1.0 + (i % 17) as f32)).collect()
    }

    fn check(scheme: &Scheme, rows: usize, cols: usize) {
        // Codecs without an encoder, and rows that their blocks do not divide.
        let Ok(q) = quantize(scheme, &weights(rows * cols), rows, cols, Given::default()) else { return };
        let Some(packed) = Packed::new(&q) else {
            let codec = q.format.codec().is_some();
            assert!(
                codec || q.format.code_bits() > 8 || q.format.has_bias() || q.nested().is_some(),
                "{scheme}"
            );
            return;
        };
        let expected = q.dequantize().unwrap();
        let mut out = vec![f32::NAN; cols];
        for row in 0..rows {
            packed.row(row, &mut out);
            let same = out.iter().zip(&expected[row * cols..]).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same, "{scheme} [{rows}, {cols}] row {row}");
        }
    }

    #[test]
    fn every_scheme_of_the_catalogue_dequantizes_to_the_reference() {
        for scheme in grammar::catalogue() {
            for (rows, cols) in [(3, 64), (2, 65), (5, 33), (1, 1), (4, 7)] {
                check(&scheme, rows, cols);
            }
        }
    }

    #[test]
    fn every_granularity_does() {
        for text in [
            "int4-tensor",
            "int4-channel",
            "int4-g32",
            "int4-g3-asym",
            "int3-g8-asym",
            "int8-g16-asym",
            "int2-t2x16",
            "int8-t16x2",
            "fp8-e4m3-t128x128",
            "fp6-e2m3-g32",
            "nf4-g5",
            "nf4-g16",
            "nvfp4:te",
        ] {
            for (rows, cols) in [(3, 64), (2, 65), (5, 33), (1, 1), (4, 7)] {
                check(&text.parse().unwrap(), rows, cols);
            }
        }
    }
}

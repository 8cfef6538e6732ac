//! Closed block formats: a block of elements becomes a fixed number of bytes, without a separate code per element.
//!
//! These are the quantized types of GGUF (ggml's `ggml-common.h` and `ggml-quants.c`, named as in ggml's
//! `docs/gguf.md`). Decoding matches the C reference bit for bit: one f32 operation at a time, in its order, without
//! fused multiply-add. Each family is one file, which holds its [`Codec`]s; `table.rs` lists them by [`CodecId`]. To
//! add a closed format, add one codec to a file, or a file, and its rows in the table.

mod coder;
mod fp4;
mod grids;
mod integers;
mod iq;
mod iq4;
mod k_quants;
mod legacy;
mod nibbles;
mod search;
mod sixteen;
mod table;
mod ternary;

pub use coder::encode_with;
pub use integers::{BlockIntegers, Integers, ScaleStorage};
pub use nibbles::Nibbles;

use crate::minifloat::{F16, f16_bits};

/// Name of a closed block format.
///
/// GGUF's own MXFP4 and NVFP4 are `gguf-mxfp4` and `gguf-nvfp4`: they hold the elements of
/// [`mxfp4`](crate::Scheme::mx) and of NVFP4 in another order, and NVFP4 there has no global scale. GGUF's F32, F16
/// and BF16 are plain casts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
#[allow(missing_docs)] // Named as GGUF names them.
pub enum CodecId {
    Iq1M,
    Iq1S,
    Iq2S,
    Iq2Xs,
    Iq2Xxs,
    Iq3S,
    Iq3Xxs,
    Iq4Nl,
    Iq4Xs,
    Mxfp4,
    Nvfp4,
    Q1_0,
    Q2_0,
    Q2K,
    Q3K,
    Q4_0,
    Q4_1,
    Q4K,
    Q5_0,
    Q5_1,
    Q5K,
    Q6K,
    Q8_0,
    Q8_1,
    Q8K,
    Tq1_0,
    Tq2_0,
}

type DecodeBlock = fn(&[u8], &mut [f32]);
type EncodeBlock = fn(&[f32], &mut [u8]);

/// Encoder of a block.
#[derive(Clone, Copy, Debug)]
enum Encode {
    /// The reference's formula, bit for bit.
    Formula(EncodeBlock),
    /// The reference's formula; with an importance per column, our own search.
    Weighed(EncodeBlock),
    /// Our own search for the least error.
    Search,
}

/// Closed block format: its sizes, its decoder and its encoder.
#[derive(Debug)]
pub struct Codec {
    /// Identifier of the format.
    pub id: CodecId,
    /// Name in the Scheme grammar.
    pub name: &'static str,
    /// Elements of a block.
    pub elements: usize,
    /// Bytes of a block.
    pub bytes: usize,
    decode: DecodeBlock,
    encode: Encode,
}

impl CodecId {
    /// Every codec, smallest types first, as tables list them.
    pub const ALL: [CodecId; 27] = [
        CodecId::Q1_0,
        CodecId::Q2_0,
        CodecId::Q4_0,
        CodecId::Q4_1,
        CodecId::Q5_0,
        CodecId::Q5_1,
        CodecId::Q8_0,
        CodecId::Q8_1,
        CodecId::Q2K,
        CodecId::Q3K,
        CodecId::Q4K,
        CodecId::Q5K,
        CodecId::Q6K,
        CodecId::Q8K,
        CodecId::Iq1S,
        CodecId::Iq1M,
        CodecId::Iq2Xxs,
        CodecId::Iq2Xs,
        CodecId::Iq2S,
        CodecId::Iq3Xxs,
        CodecId::Iq3S,
        CodecId::Iq4Nl,
        CodecId::Iq4Xs,
        CodecId::Tq1_0,
        CodecId::Tq2_0,
        CodecId::Mxfp4,
        CodecId::Nvfp4,
    ];
}

impl Codec {
    /// True if an importance per column changes the bytes.
    pub const fn takes_importance(&self) -> bool {
        !matches!(self.encode, Encode::Formula(_))
    }

    /// True if blocks are always written by a search for the least error, never by a formula.
    pub const fn is_searched(&self) -> bool {
        matches!(self.encode, Encode::Search)
    }

    /// Bytes of a `[rows, cols]` tensor; `None` if blocks do not divide a row, or on overflow.
    pub fn total_bytes(&self, rows: usize, cols: usize) -> Option<usize> {
        let whole = cols.is_multiple_of(self.elements);
        (cols / self.elements).checked_mul(self.bytes)?.checked_mul(rows).filter(|_| whole)
    }

    /// Decodes one block of [`bytes`](Self::bytes) into [`elements`](Self::elements) values.
    ///
    /// # Panics
    /// A slice is shorter than a block.
    pub fn decode_block(&self, block: &[u8], out: &mut [f32]) {
        (self.decode)(&block[..self.bytes], &mut out[..self.elements]);
    }
}

fn u16_at(block: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([block[at], block[at + 1]])
}

fn u32_at(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}

#[inline]
fn f16_at(block: &[u8], at: usize) -> f32 {
    f16_value(u16_at(block, at))
}

/// Value of an f16: moves the bits to the fields of f32 and corrects the bias, which is exact down to subnormals.
#[inline]
fn f16_value(bits: u16) -> f32 {
    const INFINITY: u32 = 0x7c00;
    // The biases of f32 and f16 are 127 and 15.
    const BIAS: f32 = f32::from_bits((127 + 127 - 15) << 23);
    let magnitude = u32::from(bits & 0x7fff);
    if magnitude >= INFINITY {
        return F16.decode(bits.into());
    }
    let value = f32::from_bits(magnitude << 13) * BIAS;
    if bits >> 15 == 1 { -value } else { value }
}

#[inline]
fn put_f16(block: &mut [u8], at: usize, x: f32) {
    block[at..at + 2].copy_from_slice(&f16_bits(x).to_le_bytes());
}

/// `1 / scale` of the unrounded scale, as in the reference, or 0 for scale 0. A scale with an overflowing inverse is
/// zero in f16; it also gives 0, because its codes decode to zero anyway.
fn inverse(scale: f32) -> f32 {
    let inverse = 1.0 / scale;
    if inverse.is_finite() { inverse } else { 0.0 }
}

/// The value of largest magnitude with its sign, the first of equals; 0 of zeros.
fn signed_amax(x: &[f32]) -> f32 {
    x.iter().fold(0.0, |max: f32, &v| if max.abs() < v.abs() { v } else { max })
}

fn amax(x: &[f32]) -> f32 {
    signed_amax(x).abs()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_f16_has_its_value() {
        for bits in 0..=u16::MAX {
            assert_eq!(f16_value(bits).to_bits(), F16.decode(bits.into()).to_bits(), "{bits:#06x}");
        }
    }

    #[test]
    fn sizes_are_those_of_the_format() {
        let sizes: Vec<_> =
            CodecId::ALL.iter().map(|id| (id.name(), id.codec().elements, id.codec().bytes)).collect();
        let expected = [
            ("q1_0", 128, 18),
            ("q2_0", 64, 18),
            ("q4_0", 32, 18),
            ("q4_1", 32, 20),
            ("q5_0", 32, 22),
            ("q5_1", 32, 24),
            ("q8_0", 32, 34),
            ("q8_1", 32, 36),
            ("q2_k", 256, 84),
            ("q3_k", 256, 110),
            ("q4_k", 256, 144),
            ("q5_k", 256, 176),
            ("q6_k", 256, 210),
            ("q8_k", 256, 292),
            ("iq1_s", 256, 50),
            ("iq1_m", 256, 56),
            ("iq2_xxs", 256, 66),
            ("iq2_xs", 256, 74),
            ("iq2_s", 256, 82),
            ("iq3_xxs", 256, 98),
            ("iq3_s", 256, 110),
            ("iq4_nl", 32, 18),
            ("iq4_xs", 256, 136),
            ("tq1_0", 256, 54),
            ("tq2_0", 256, 66),
            ("gguf-mxfp4", 32, 17),
            ("gguf-nvfp4", 64, 36),
        ];
        assert_eq!(sizes, expected);
    }

    #[test]
    fn no_bytes_make_a_decoder_panic_and_no_values_an_encoder() {
        for id in CodecId::ALL {
            let codec = id.codec();
            let mut out = vec![0.0; codec.elements];
            for fill in [0x00, 0xff, 0x7f, 0x80, 0x55] {
                codec.decode_block(&vec![fill; codec.bytes], &mut out);
            }
            for value in [0.0, -0.0, f32::MAX, -f32::MAX, f32::MIN_POSITIVE, 1e-45, -3e-39, 6e4, -1e4] {
                let x: Vec<f32> = (0..codec.elements).map(|i| if i % 3 == 0 { value } else { 0.0 }).collect();
                let mut block = vec![0; codec.bytes];
                codec.encode_block(&x, &mut block);
                codec.decode_block(&block, &mut out);
                let fits = value.abs() <= 65504.0 || codec.name.starts_with("gguf");
                assert!(!fits || out.iter().all(|v| v.is_finite()), "{} of {value:e}", codec.name);
            }
        }
    }
}

//! Closed block formats: a block of elements becomes a fixed number of bytes, without a separate code per element.
//!
//! These are the quantized types of GGUF (ggml's `ggml-common.h` and `ggml-quants.c`, named as in ggml's
//! `docs/gguf.md`). Decoding matches the C reference bit for bit: one f32 operation at a time, in its order, without
//! fused multiply-add. Each file below holds one family. To add a closed format, add one [`Codec`] to a file, or a
//! file.

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
mod ternary;

pub use integers::{BlockIntegers, Integers, Part};
pub use nibbles::Nibbles;

use crate::error::TensorError;
use crate::lanes::{Lanes, Portable};
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

    /// The codec itself.
    pub const fn codec(self) -> &'static Codec {
        match self {
            CodecId::Iq1M => &iq::IQ1_M,
            CodecId::Iq1S => &iq::IQ1_S,
            CodecId::Iq2S => &iq::IQ2_S,
            CodecId::Iq2Xs => &iq::IQ2_XS,
            CodecId::Iq2Xxs => &iq::IQ2_XXS,
            CodecId::Iq3S => &iq::IQ3_S,
            CodecId::Iq3Xxs => &iq::IQ3_XXS,
            CodecId::Iq4Nl => &iq4::IQ4_NL,
            CodecId::Iq4Xs => &iq4::IQ4_XS,
            CodecId::Mxfp4 => &fp4::MXFP4,
            CodecId::Nvfp4 => &fp4::NVFP4,
            CodecId::Q1_0 => &legacy::Q1_0,
            CodecId::Q2_0 => &legacy::Q2_0,
            CodecId::Q2K => &k_quants::Q2_K,
            CodecId::Q3K => &k_quants::Q3_K,
            CodecId::Q4_0 => &legacy::Q4_0,
            CodecId::Q4_1 => &legacy::Q4_1,
            CodecId::Q4K => &k_quants::Q4_K,
            CodecId::Q5_0 => &legacy::Q5_0,
            CodecId::Q5_1 => &legacy::Q5_1,
            CodecId::Q5K => &k_quants::Q5_K,
            CodecId::Q6K => &k_quants::Q6_K,
            CodecId::Q8_0 => &legacy::Q8_0,
            CodecId::Q8_1 => &legacy::Q8_1,
            CodecId::Q8K => &k_quants::Q8_K,
            CodecId::Tq1_0 => &ternary::TQ1_0,
            CodecId::Tq2_0 => &ternary::TQ2_0,
        }
    }

    /// Name in the Scheme grammar.
    pub const fn name(self) -> &'static str {
        self.codec().name
    }

    /// Grid of a lattice type (IQ1 to IQ3), data of the format. Each entry holds the level indices of a point's
    /// coordinates, the first in the low bits: two bits each, three in IQ3.
    pub const fn grid(self) -> Option<&'static [u16]> {
        match self {
            CodecId::Iq1S | CodecId::Iq1M => Some(&grids::IQ1),
            CodecId::Iq2Xxs => Some(&grids::IQ2_XXS),
            CodecId::Iq2Xs => Some(&grids::IQ2_XS),
            CodecId::Iq2S => Some(&grids::IQ2_S),
            CodecId::Iq3Xxs => Some(&grids::IQ3_XXS),
            CodecId::Iq3S => Some(&grids::IQ3_S),
            _ => None,
        }
    }
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

    /// Decodes all whole blocks that both slices hold.
    #[inline(always)]
    pub fn decode(&self, blocks: &[u8], out: &mut [f32]) {
        // Call hot decoders by name: code behind a pointer is not compiled for the caller's instruction set.
        match self.id {
            CodecId::Q4_0 => self.decode_by(legacy::decode_q4_0, blocks, out),
            CodecId::Q8_0 => self.decode_by(legacy::decode_q8_0, blocks, out),
            CodecId::Q4K => self.decode_by(k_quants::decode_q4_k, blocks, out),
            CodecId::Q6K => self.decode_by(k_quants::decode_q6_k, blocks, out),
            _ => self.decode_by(self.decode, blocks, out),
        }
    }

    #[inline(always)]
    fn decode_by(&self, decode: impl Fn(&[u8], &mut [f32]), blocks: &[u8], out: &mut [f32]) {
        for (block, out) in blocks.chunks_exact(self.bytes).zip(out.chunks_exact_mut(self.elements)) {
            decode(block, out);
        }
    }

    /// Encodes one block of finite values. A scale beyond f16 is stored as infinity, as in the reference. Such a
    /// block decodes to infinities and NaN; it needs magnitudes beyond 65504 times the largest code, and
    /// [`quantize`](crate::quantize) refuses it.
    ///
    /// # Panics
    /// A slice is shorter than a block.
    pub fn encode_block(&self, x: &[f32], block: &mut [u8]) {
        self.encode(&x[..self.elements], None, &mut block[..self.bytes]);
    }

    /// Encodes all whole blocks that both slices hold. `importance` has one finite, non-negative weight per column of
    /// whole rows, by which a search weights squared errors; formulas [ignore](Self::takes_importance) it.
    pub fn encode(&self, x: &[f32], importance: Option<&[f32]>, blocks: &mut [u8]) {
        encode_with(Portable, self, x, importance, blocks);
    }
}

/// Like [`Codec::encode`], using the lanes `l`, which give the same bytes.
#[inline(always)]
pub fn encode_with<L: Lanes>(l: L, codec: &Codec, x: &[f32], importance: Option<&[f32]>, blocks: &mut [u8]) {
    let n = codec.elements;
    let (x, blocks) = match importance.filter(|_| codec.takes_importance()) {
        None => sixteen::encode(l, codec.id, x, blocks),
        Some(_) => (x, blocks),
    };
    let mut weights = importance.map(|all| all.chunks_exact(n).cycle());
    for (x, block) in x.chunks_exact(n).zip(blocks.chunks_exact_mut(codec.bytes)) {
        let weights = weights.as_mut().and_then(Iterator::next);
        match (codec.encode, weights) {
            (Encode::Search, _) => search::encode_block(l, codec.id, x, weights, block),
            // The formula handles larger values.
            (Encode::Weighed(_), Some(_)) if amax(x) <= F16.max() => {
                search::encode_block(l, codec.id, x, weights, block);
            }
            // Call by name: code behind a pointer is not compiled for the level of `l`.
            (Encode::Formula(_) | Encode::Weighed(_), _) if codec.id == CodecId::Q4_0 => {
                legacy::encode_q4_0(x, block);
            }
            (Encode::Formula(_), _) if codec.id == CodecId::Q8_0 => legacy::encode_q8_0(x, block),
            (Encode::Formula(encode) | Encode::Weighed(encode), _) => encode(x, block),
        }
    }
}

impl Codec {
    /// Refuses blocks that decode to infinity. A scale never exceeds the values of its block, so most blocks pass
    /// without decoding.
    ///
    /// # Errors
    /// [`TensorError::ScaleOverflow`].
    pub fn check_scales(&self, x: &[f32], blocks: &[u8]) -> Result<(), TensorError> {
        let mut values = vec![0.0; self.elements];
        let mut count = 0;
        let mut first = None;
        for (i, (x, block)) in x.chunks_exact(self.elements).zip(blocks.chunks_exact(self.bytes)).enumerate()
        {
            let amax = amax(x);
            if amax <= F16.max() {
                continue;
            }
            self.decode_block(block, &mut values);
            if values.iter().any(|v| !v.is_finite()) {
                count += 1;
                first = first.or(Some((i * self.elements, amax)));
            }
        }
        match first {
            None => Ok(()),
            Some((index, amax)) => Err(TensorError::ScaleOverflow { count, index, amax, codec: self.name }),
        }
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

//! Block types that hold only codes and scales, as formats of single codes: MXFP4, NVFP4, Q4_0 and Q8_0.

use crate::codec::CodecId;
use crate::format::Format;
use crate::minifloat::{E2M1, F16};
use crate::{Blocks, Code, Codes, Quantized, Scheme};

/// Elements of a block of integers.
const INTEGERS: usize = 32;

/// Returns the format of symmetric integers with a scale in 16 bits for each block.
fn integers(bits: u32) -> Format {
    Scheme::int_symmetric(bits, Blocks::Group(INTEGERS as u32)).format.with_scale_code(Code::Float(F16))
}

impl CodecId {
    /// Block types of symmetric integers with a scale for each block, by width.
    const OF_INTEGERS: [(u32, CodecId); 2] = [(4, CodecId::Q4_0), (8, CodecId::Q8_0)];

    /// Returns the block type that holds symmetric integers of `bits` bits.
    pub fn of_integers(bits: u32) -> Option<Self> {
        Self::OF_INTEGERS.into_iter().find(|(width, _)| *width == bits).map(|(_, id)| id)
    }

    /// Width of the symmetric integers that the block type holds, if it holds such.
    pub fn integer_bits(self) -> Option<u32> {
        Self::OF_INTEGERS.into_iter().find(|(_, id)| *id == self).map(|(width, _)| width)
    }

    /// Appends a block of symmetric integers `codes`, two's complement in bytes, with the f16 bits of their scale.
    pub fn pack_integers(self, scale: u16, codes: &[u8], out: &mut Vec<u8>) {
        out.extend(scale.to_le_bytes());
        if self.integer_bits() == Some(8) {
            return out.extend_from_slice(codes);
        }
        let nibble = |code: u8| (code as i8 + 8) as u8 & 15;
        let half = codes.len() / 2;
        out.extend((0..half).map(|j| nibble(codes[j]) | nibble(codes[j + half]) << 4));
    }

    /// Unpacks blocks into single codes and scales that decode to the same values; `None` for a type that holds more than
    /// these.
    pub fn unpack_affine(self, bytes: &[u8], rows: usize, cols: usize) -> Option<Quantized> {
        let (format, unpack): (Format, fn(&[u8], &mut Quantized)) = match self {
            CodecId::Mxfp4 => (Scheme::mx(Code::Float(E2M1)).format, unpack_mxfp4),
            CodecId::Nvfp4 => (Scheme::nvfp4(None).format, unpack_nvfp4),
            CodecId::Q4_0 => (integers(4), unpack_q4_0),
            CodecId::Q8_0 => (integers(8), unpack_q8_0),
            _ => return None,
        };
        let mut out = Quantized::empty(format, rows, cols);
        bytes.chunks_exact(self.codec().bytes).for_each(|block| unpack(block, &mut out));
        Some(out)
    }
}

fn unpack_mxfp4(block: &[u8], out: &mut Quantized) {
    out.scales.push(block[0].into());
    half_split(&block[1..], &mut out.codes, u32::from);
}

fn unpack_nvfp4(block: &[u8], out: &mut Quantized) {
    for (scale, nibbles) in block[..4].iter().zip(block[4..].chunks_exact(8)) {
        // llama.cpp ignores the sign and decodes NaN as 0.
        let scale = u32::from(scale & 0x7f);
        out.scales.push(if scale == 0x7f { 0 } else { scale });
        half_split(nibbles, &mut out.codes, u32::from);
    }
}

fn unpack_q4_0(block: &[u8], out: &mut Quantized) {
    out.scales.push(u16::from_le_bytes([block[0], block[1]]).into());
    half_split(&block[2..], &mut out.codes, |code| u32::from((code as i8 - 8) as u8));
}

fn unpack_q8_0(block: &[u8], out: &mut Quantized) {
    out.scales.push(u16::from_le_bytes([block[0], block[1]]).into());
    block[2..].iter().for_each(|&code| out.codes.push(code.into()));
}

/// Appends the nibbles of a block: low nibbles are the first half of its elements.
fn half_split(bytes: &[u8], codes: &mut Codes, value: impl Fn(u8) -> u32) {
    bytes.iter().for_each(|byte| codes.push(value(byte & 15)));
    bytes.iter().for_each(|byte| codes.push(value(byte >> 4)));
}

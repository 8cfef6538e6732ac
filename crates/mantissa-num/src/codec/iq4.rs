//! A table of 16 unevenly spaced levels: IQ4_NL (blocks of 32) and IQ4_XS (super-blocks of 256).
//!
//! `d` is f16; nibbles are half-split over 32 elements.

use super::k_quants::SuperBlock;
use super::{Codec, CodecId, Encode, f16_at, u16_at};

/// `d | 16 bytes of nibbles`.
pub(super) const IQ4_NL: Codec = Codec {
    id: CodecId::Iq4Nl,
    name: "iq4_nl",
    elements: 32,
    bytes: 18,
    decode: decode_iq4_nl,
    encode: Encode::Search,
};
/// `d | 8 high pairs of scales | 8 low nibbles of scales | 128 bytes of nibbles`.
pub(super) const IQ4_XS: Codec = Codec {
    id: CodecId::Iq4Xs,
    name: "iq4_xs",
    elements: 256,
    bytes: 136,
    decode: decode_iq4_xs,
    encode: Encode::Search,
};

/// `kvalues_iq4nl` of ggml.
pub(super) const LEVELS: [f32; 16] = [
    -127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0,
];

fn decode_iq4_nl(block: &[u8], out: &mut [f32]) {
    put_levels(&block[2..], f16_at(block, 0), out);
}

fn decode_iq4_xs(block: &[u8], out: &mut [f32]) {
    let (d, high) = (f16_at(block, 0), u16_at(block, 2));
    for (sub, out) in out.chunks_exact_mut(32).enumerate() {
        let low = block[4 + sub / 2] >> (sub % 2 * 4) & 15;
        let scale = (low | ((high >> (2 * sub) & 3) as u8) << 4) as i8 - 32;
        put_levels(&block[8 + 16 * sub..][..16], d * f32::from(scale), out);
    }
}

fn put_levels(nibbles: &[u8], scale: f32, out: &mut [f32]) {
    let (low, high) = out.split_at_mut(16);
    for ((byte, low), high) in nibbles.iter().zip(low).zip(high) {
        *low = scale * LEVELS[usize::from(byte & 15)];
        *high = scale * LEVELS[usize::from(byte >> 4)];
    }
}

/// Fills a block of zeros.
pub(super) fn put_iq4_nl(d: u16, values: &[i8; 32], block: &mut [u8]) {
    block[..2].copy_from_slice(&d.to_le_bytes());
    put_nibbles(values, &mut block[2..]);
}

/// Fills a block of zeros.
pub(super) fn put_iq4_xs(from: &SuperBlock, block: &mut [u8]) {
    block[..2].copy_from_slice(&from.d.to_le_bytes());
    let mut high = 0u16;
    for sub in 0..8 {
        let scale = (from.scales[sub] + 32) as u8;
        block[4 + sub / 2] |= (scale & 15) << (sub % 2 * 4);
        high |= u16::from(scale >> 4) << (2 * sub);
        put_nibbles(&from.codes[32 * sub..][..32], &mut block[8 + 16 * sub..][..16]);
    }
    block[2..4].copy_from_slice(&high.to_le_bytes());
}

/// The codes of 32 levels.
fn put_nibbles(values: &[i8], nibbles: &mut [u8]) {
    for (i, &value) in values.iter().enumerate() {
        let code = LEVELS.iter().filter(|&&level| level < f32::from(value)).count() as u8;
        nibbles[i % 16] |= code << (i / 16 * 4);
    }
}

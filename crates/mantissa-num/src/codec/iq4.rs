//! A table of 16 unevenly spaced levels: IQ4_NL (blocks of 32) and IQ4_XS (super-blocks of 256).
//!
//! `d` is f16; nibbles are half-split over 32 elements.

use super::{Codec, f16_at, u16_at};

/// `d | 16 bytes of nibbles`.
pub(super) const IQ4_NL: Codec =
    Codec { name: "iq4_nl", elements: 32, bytes: 18, decode: decode_iq4_nl, encode: None };
/// `d | 8 high pairs of scales | 8 low nibbles of scales | 128 bytes of nibbles`.
pub(super) const IQ4_XS: Codec =
    Codec { name: "iq4_xs", elements: 256, bytes: 136, decode: decode_iq4_xs, encode: None };

/// `kvalues_iq4nl` of ggml.
const LEVELS: [f32; 16] = [
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

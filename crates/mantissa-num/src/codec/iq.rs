//! Lattice types: groups of eight (IQ1, IQ2) or four (IQ3) magnitudes are a point of a grid, with signs apart.
//!
//! Super-blocks of 256 with an f16 scale `d` (IQ1_M spreads its bits over the scale words), cut into 8 sub-blocks of 32 with
//! small integer scales. The grids are data of the format, in [`super::grids`].

use super::{Codec, f16_at, grids, u16_at, u32_at};
use crate::minifloat::F16;

/// `32 low index bytes | 16 bytes of high index bits and shift signs | 8 bytes: 16 3-bit scales and the f16 scale`.
pub(super) const IQ1_M: Codec =
    Codec { name: "iq1_m", elements: 256, bytes: 56, decode: decode_iq1_m, encode: None };
/// `d | 32 low index bytes | 8 words: four 3-bit high indices, 3-bit scale, shift sign`.
pub(super) const IQ1_S: Codec =
    Codec { name: "iq1_s", elements: 256, bytes: 50, decode: decode_iq1_s, encode: None };
/// `d | 32 low index bytes | 32 sign bytes | 8 bytes of high index pairs | 8 bytes of two 4-bit scales`.
pub(super) const IQ2_S: Codec =
    Codec { name: "iq2_s", elements: 256, bytes: 82, decode: decode_iq2_s, encode: None };
/// `d | 32 words: 9-bit index, 7-bit signs | 8 bytes of two 4-bit scales`.
pub(super) const IQ2_XS: Codec =
    Codec { name: "iq2_xs", elements: 256, bytes: 74, decode: decode_iq2_xs, encode: None };
/// `d | 8 times: four index bytes, a word of four 7-bit signs and a 4-bit scale`.
pub(super) const IQ2_XXS: Codec =
    Codec { name: "iq2_xxs", elements: 256, bytes: 66, decode: decode_iq2_xxs, encode: None };
/// `d | 64 low index bytes | 8 bytes of high index bits | 32 sign bytes | 4 bytes of two 4-bit scales`.
pub(super) const IQ3_S: Codec =
    Codec { name: "iq3_s", elements: 256, bytes: 110, decode: decode_iq3_s, encode: None };
/// `d | 64 index bytes | 8 words of four 7-bit signs and a 4-bit scale`.
pub(super) const IQ3_XXS: Codec =
    Codec { name: "iq3_xxs", elements: 256, bytes: 98, decode: decode_iq3_xxs, encode: None };

/// Shift of every IQ1 grid point.
const IQ1_DELTA: f32 = 0.125;
const IQ2_LEVELS: [f32; 4] = [8.0, 25.0, 43.0, 0.0];
const IQ3_XXS_LEVELS: [f32; 8] = [4.0, 12.0, 20.0, 28.0, 36.0, 44.0, 52.0, 62.0];
const IQ3_S_LEVELS: [f32; 8] = [1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.0];

/// The eight signs of a 7-bit index: the eighth makes the number of minus signs even.
fn signs(index: u32) -> u8 {
    let low = (index & 127) as u8;
    low | ((low.count_ones() as u8 & 1) << 7)
}

/// `scale · level · sign` of each coordinate of a grid point of `out.len()` coordinates of `bits` bits.
fn put_point(point: u16, bits: usize, levels: &[f32], signs: u8, scale: f32, out: &mut [f32]) {
    for (i, out) in out.iter_mut().enumerate() {
        let level = levels[usize::from(point >> (bits * i)) & ((1 << bits) - 1)];
        let sign = if signs >> i & 1 == 1 { -1.0 } else { 1.0 };
        *out = scale * level * sign;
    }
}

fn decode_iq2_xxs(block: &[u8], out: &mut [f32]) {
    let d = f16_at(block, 0);
    for (sub, out) in out.chunks_exact_mut(32).enumerate() {
        let indices = &block[2 + 8 * sub..][..4];
        let word = u32_at(block, 2 + 8 * sub + 4);
        let scale = d * (0.5 + (word >> 28) as f32) * 0.25;
        for (l, out) in out.chunks_exact_mut(8).enumerate() {
            let point = grids::IQ2_XXS[usize::from(indices[l])];
            put_point(point, 2, &IQ2_LEVELS, signs(word >> (7 * l)), scale, out);
        }
    }
}

/// The scale of the `half` of a sub-block whose two 4-bit scales share a byte.
fn iq2_scale(d: f32, scales: u8, half: usize) -> f32 {
    d * (0.5 + f32::from(scales >> (4 * half) & 15)) * 0.25
}

fn decode_iq2_xs(block: &[u8], out: &mut [f32]) {
    let d = f16_at(block, 0);
    for (group, out) in out.chunks_exact_mut(8).enumerate() {
        let word = u16_at(block, 2 + 2 * group);
        let scale = iq2_scale(d, block[66 + group / 4], group % 4 / 2);
        let point = grids::IQ2_XS[usize::from(word & 511)];
        put_point(point, 2, &IQ2_LEVELS, signs(u32::from(word >> 9)), scale, out);
    }
}

fn decode_iq2_s(block: &[u8], out: &mut [f32]) {
    let d = f16_at(block, 0);
    for (group, out) in out.chunks_exact_mut(8).enumerate() {
        let (sub, l) = (group / 4, group % 4);
        let high = usize::from(block[66 + sub] >> (2 * l) & 3) << 8;
        let scale = iq2_scale(d, block[74 + sub], l / 2);
        let point = grids::IQ2_S[usize::from(block[2 + group]) | high];
        put_point(point, 2, &IQ2_LEVELS, block[34 + group], scale, out);
    }
}

fn decode_iq3_xxs(block: &[u8], out: &mut [f32]) {
    let d = f16_at(block, 0);
    for (sub, out) in out.chunks_exact_mut(32).enumerate() {
        let word = u32_at(block, 66 + 4 * sub);
        let scale = d * (0.5 + (word >> 28) as f32) * 0.5;
        for (quad, out) in out.chunks_exact_mut(4).enumerate() {
            let signs = signs(word >> (7 * (quad / 2))) >> (quad % 2 * 4);
            let point = grids::IQ3_XXS[usize::from(block[2 + 8 * sub + quad])];
            put_point(point, 3, &IQ3_XXS_LEVELS, signs, scale, out);
        }
    }
}

fn decode_iq3_s(block: &[u8], out: &mut [f32]) {
    let d = f16_at(block, 0);
    for (sub, out) in out.chunks_exact_mut(32).enumerate() {
        let scale = d * (1 + 2 * (block[106 + sub / 2] >> (sub % 2 * 4) & 15)) as f32;
        for (quad, out) in out.chunks_exact_mut(4).enumerate() {
            let high = usize::from(block[66 + sub] >> quad & 1) << 8;
            let signs = block[74 + 4 * sub + quad / 2] >> (quad % 2 * 4);
            let point = grids::IQ3_S[usize::from(block[2 + 8 * sub + quad]) | high];
            put_point(point, 3, &IQ3_S_LEVELS, signs, scale, out);
        }
    }
}

/// `scale · (coordinate + shift)` of each of the eight coordinates of an IQ1 grid point.
fn put_shifted(index: usize, scale: f32, negative_shift: bool, out: &mut [f32]) {
    let (point, shift) = (grids::IQ1[index], if negative_shift { -IQ1_DELTA } else { IQ1_DELTA });
    for (i, out) in out.iter_mut().enumerate() {
        *out = scale * (f32::from((point >> (2 * i) & 3) as i8 - 1) + shift);
    }
}

fn decode_iq1_s(block: &[u8], out: &mut [f32]) {
    let d = f16_at(block, 0);
    for (sub, out) in out.chunks_exact_mut(32).enumerate() {
        let word = u16_at(block, 34 + 2 * sub);
        let scale = d * f32::from(2 * (word >> 12 & 7) + 1);
        for (l, out) in out.chunks_exact_mut(8).enumerate() {
            let high = usize::from(word >> (3 * l) & 7) << 8;
            put_shifted(usize::from(block[2 + 4 * sub + l]) | high, scale, word >> 15 == 1, out);
        }
    }
}

fn decode_iq1_m(block: &[u8], out: &mut [f32]) {
    let scales = [0, 1, 2, 3].map(|i| u16_at(block, 48 + 2 * i));
    // The top nibbles of the four words are the f16 scale.
    let d = F16.decode((0..4).map(|i| u32::from(scales[i] >> 12) << (4 * i)).sum());
    for (group, out) in out.chunks_exact_mut(8).enumerate() {
        let (sub, half) = (group / 4, group % 4 / 2);
        let scale = scales[sub / 2] >> (sub % 2 * 6 + half * 3) & 7;
        // A nibble per group: three high index bits, then the sign of the shift.
        let nibble = block[32 + group / 2] >> (group % 2 * 4) & 15;
        let index = usize::from(block[group]) | usize::from(nibble & 7) << 8;
        put_shifted(index, d * f32::from(2 * scale + 1), nibble >> 3 == 1, out);
    }
}

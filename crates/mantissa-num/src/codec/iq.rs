//! Lattice types: groups of eight (IQ1, IQ2) or four (IQ3) magnitudes are a grid point, with separate signs.
//!
//! Super-blocks of 256 with an f16 scale `d` (IQ1_M spreads its bits over the scale words) are split into 8
//! sub-blocks of 32 with small integer scales. The grids are data of the format, in [`super::grids`].

use super::{Codec, CodecId, Encode, f16_at, grids, u16_at, u32_at};
use crate::minifloat::F16;

/// `32 low index bytes | 16 bytes of high index bits and shift signs | 8 bytes: 16 3-bit scales and the f16 scale`.
pub(super) const IQ1_M: Codec = Codec {
    id: CodecId::Iq1M,
    name: "iq1_m",
    elements: 256,
    bytes: 56,
    decode: decode_iq1_m,
    encode: Encode::Search,
};
/// `d | 32 low index bytes | 8 words: four 3-bit high indices, 3-bit scale, shift sign`.
pub(super) const IQ1_S: Codec = Codec {
    id: CodecId::Iq1S,
    name: "iq1_s",
    elements: 256,
    bytes: 50,
    decode: decode_iq1_s,
    encode: Encode::Search,
};
/// `d | 32 low index bytes | 32 sign bytes | 8 bytes of high index pairs | 8 bytes of two 4-bit scales`.
pub(super) const IQ2_S: Codec = Codec {
    id: CodecId::Iq2S,
    name: "iq2_s",
    elements: 256,
    bytes: 82,
    decode: decode_iq2_s,
    encode: Encode::Search,
};
/// `d | 32 words: 9-bit index, 7-bit signs | 8 bytes of two 4-bit scales`.
pub(super) const IQ2_XS: Codec = Codec {
    id: CodecId::Iq2Xs,
    name: "iq2_xs",
    elements: 256,
    bytes: 74,
    decode: decode_iq2_xs,
    encode: Encode::Search,
};
/// `d | 8 times: four index bytes, a word of four 7-bit signs and a 4-bit scale`.
pub(super) const IQ2_XXS: Codec = Codec {
    id: CodecId::Iq2Xxs,
    name: "iq2_xxs",
    elements: 256,
    bytes: 66,
    decode: decode_iq2_xxs,
    encode: Encode::Search,
};
/// `d | 64 low index bytes | 8 bytes of high index bits | 32 sign bytes | 4 bytes of two 4-bit scales`.
pub(super) const IQ3_S: Codec = Codec {
    id: CodecId::Iq3S,
    name: "iq3_s",
    elements: 256,
    bytes: 110,
    decode: decode_iq3_s,
    encode: Encode::Search,
};
/// `d | 64 index bytes | 8 words of four 7-bit signs and a 4-bit scale`.
pub(super) const IQ3_XXS: Codec = Codec {
    id: CodecId::Iq3Xxs,
    name: "iq3_xxs",
    elements: 256,
    bytes: 98,
    decode: decode_iq3_xxs,
    encode: Encode::Search,
};

/// Shift of every IQ1 grid point.
pub(super) const IQ1_DELTA: f32 = 0.125;
pub(super) const IQ2_LEVELS: [f32; 4] = [8.0, 25.0, 43.0, 0.0];
pub(super) const IQ3_XXS_LEVELS: [f32; 8] = [4.0, 12.0, 20.0, 28.0, 36.0, 44.0, 52.0, 62.0];
pub(super) const IQ3_S_LEVELS: [f32; 8] = [1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.0];

/// Parts of a searched block before packing.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lattice {
    /// The f16 scale.
    pub(super) d: u16,
    /// Integer scale of each span.
    pub(super) scales: [u8; 16],
    pub(super) spans: [Span; 16],
}

/// Elements that share a scale.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    /// Index of each point in the grid.
    pub(super) points: [u16; 8],
    /// Signs of each eight elements, 1 = minus; or 1 if their shift is negative.
    pub(super) bits: [u8; 4],
}

impl Span {
    pub(super) const ZERO: Span = Span { points: [0; 8], bits: [0; 4] };
}

impl Lattice {
    pub(super) const ZERO: Lattice = Lattice { d: 0, scales: [0; 16], spans: [Span::ZERO; 16] };

    /// The bits of eight elements, in spans of `eights`.
    fn bits(&self, eight: usize, eights: usize) -> u8 {
        self.spans[eight / eights].bits[eight % eights]
    }

    fn put_d(&self, block: &mut [u8]) {
        block[..2].copy_from_slice(&self.d.to_le_bytes());
    }
}

/// Eight signs of a 7-bit index: the eighth makes the number of minus signs even.
fn signs(index: u32) -> u8 {
    let low = (index & 127) as u8;
    low | ((low.count_ones() as u8 & 1) << 7)
}

/// `scale · level · sign` of each coordinate of a grid point with `out.len()` coordinates of `bits` bits.
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

/// Scale of the `half` of a sub-block with two 4-bit scales per byte.
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
    // The top nibbles of the four words form the f16 scale.
    let d = F16.decode((0..4).map(|i| u32::from(scales[i] >> 12) << (4 * i)).sum());
    for (group, out) in out.chunks_exact_mut(8).enumerate() {
        let (sub, half) = (group / 4, group % 4 / 2);
        let scale = scales[sub / 2] >> (sub % 2 * 6 + half * 3) & 7;
        // One nibble per group: three high index bits, then the sign of the shift.
        let nibble = block[32 + group / 2] >> (group % 2 * 4) & 15;
        let index = usize::from(block[group]) | usize::from(nibble & 7) << 8;
        put_shifted(index, d * f32::from(2 * scale + 1), nibble >> 3 == 1, out);
    }
}

/// Fills a block of zeros.
pub(super) fn put_iq2_xxs(from: &Lattice, block: &mut [u8]) {
    from.put_d(block);
    for sub in 0..8 {
        let span = &from.spans[sub];
        let mut word = u32::from(from.scales[sub]) << 28;
        for l in 0..4 {
            block[2 + 8 * sub + l] = span.points[l] as u8;
            word |= u32::from(span.bits[l] & 127) << (7 * l);
        }
        block[2 + 8 * sub + 4..][..4].copy_from_slice(&word.to_le_bytes());
    }
}

/// Fills a block of zeros.
pub(super) fn put_iq2_xs(from: &Lattice, block: &mut [u8]) {
    from.put_d(block);
    for group in 0..32 {
        let word = from.spans[group / 2].points[group % 2] | u16::from(from.bits(group, 2) & 127) << 9;
        block[2 + 2 * group..][..2].copy_from_slice(&word.to_le_bytes());
    }
    put_scale_pairs(from, &mut block[66..74]);
}

/// Fills a block of zeros.
pub(super) fn put_iq2_s(from: &Lattice, block: &mut [u8]) {
    from.put_d(block);
    for group in 0..32 {
        let point = from.spans[group / 2].points[group % 2];
        block[2 + group] = point as u8;
        block[34 + group] = from.bits(group, 2);
        block[66 + group / 4] |= ((point >> 8) as u8) << (group % 4 * 2);
    }
    put_scale_pairs(from, &mut block[74..82]);
}

/// Packs two 4-bit scales per byte.
fn put_scale_pairs(from: &Lattice, bytes: &mut [u8]) {
    for (i, byte) in bytes.iter_mut().enumerate() {
        *byte = from.scales[2 * i] | from.scales[2 * i + 1] << 4;
    }
}

/// Fills a block of zeros.
pub(super) fn put_iq3_xxs(from: &Lattice, block: &mut [u8]) {
    from.put_d(block);
    for sub in 0..8 {
        let mut word = u32::from(from.scales[sub]) << 28;
        for l in 0..4 {
            word |= u32::from(from.spans[sub].bits[l] & 127) << (7 * l);
        }
        block[66 + 4 * sub..][..4].copy_from_slice(&word.to_le_bytes());
        for quad in 0..8 {
            block[2 + 8 * sub + quad] = from.spans[sub].points[quad] as u8;
        }
    }
}

/// Fills a block of zeros.
pub(super) fn put_iq3_s(from: &Lattice, block: &mut [u8]) {
    from.put_d(block);
    for sub in 0..8 {
        let span = &from.spans[sub];
        for quad in 0..8 {
            block[2 + 8 * sub + quad] = span.points[quad] as u8;
            block[66 + sub] |= ((span.points[quad] >> 8) as u8) << quad;
        }
        block[74 + 4 * sub..][..4].copy_from_slice(&span.bits);
        block[106 + sub / 2] |= from.scales[sub] << (sub % 2 * 4);
    }
}

/// Fills a block of zeros.
pub(super) fn put_iq1_s(from: &Lattice, block: &mut [u8]) {
    from.put_d(block);
    for sub in 0..8 {
        let span = &from.spans[sub];
        let mut word = u16::from(from.scales[sub]) << 12 | u16::from(span.bits[0]) << 15;
        for l in 0..4 {
            block[2 + 4 * sub + l] = span.points[l] as u8;
            word |= (span.points[l] >> 8) << (3 * l);
        }
        block[34 + 2 * sub..][..2].copy_from_slice(&word.to_le_bytes());
    }
}

/// Fills a block of zeros.
pub(super) fn put_iq1_m(from: &Lattice, block: &mut [u8]) {
    let mut words = [0u16; 4];
    for (i, word) in words.iter_mut().enumerate() {
        *word = (from.d >> (4 * i) & 15) << 12;
    }
    for (span, scale) in from.scales.iter().enumerate() {
        words[span / 4] |= u16::from(*scale) << (span % 4 * 3);
    }
    for group in 0..32 {
        let point = from.spans[group / 2].points[group % 2];
        let nibble = (point >> 8) as u8 | from.bits(group, 2) << 3;
        block[group] = point as u8;
        block[32 + group / 2] |= nibble << (group % 2 * 4);
    }
    for (i, word) in words.iter().enumerate() {
        block[48 + 2 * i..][..2].copy_from_slice(&word.to_le_bytes());
    }
}

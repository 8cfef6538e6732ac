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
    decode: |block, out| decode(CodecId::Iq1M, block, out),
    encode: Encode::Search,
};
/// `d | 32 low index bytes | 8 words: four 3-bit high indices, 3-bit scale, shift sign`.
pub(super) const IQ1_S: Codec = Codec {
    id: CodecId::Iq1S,
    name: "iq1_s",
    elements: 256,
    bytes: 50,
    decode: |block, out| decode(CodecId::Iq1S, block, out),
    encode: Encode::Search,
};
/// `d | 32 low index bytes | 32 sign bytes | 8 bytes of high index pairs | 8 bytes of two 4-bit scales`.
pub(super) const IQ2_S: Codec = Codec {
    id: CodecId::Iq2S,
    name: "iq2_s",
    elements: 256,
    bytes: 82,
    decode: |block, out| decode(CodecId::Iq2S, block, out),
    encode: Encode::Search,
};
/// `d | 32 words: 9-bit index, 7-bit signs | 8 bytes of two 4-bit scales`.
pub(super) const IQ2_XS: Codec = Codec {
    id: CodecId::Iq2Xs,
    name: "iq2_xs",
    elements: 256,
    bytes: 74,
    decode: |block, out| decode(CodecId::Iq2Xs, block, out),
    encode: Encode::Search,
};
/// `d | 8 times: four index bytes, a word of four 7-bit signs and a 4-bit scale`.
pub(super) const IQ2_XXS: Codec = Codec {
    id: CodecId::Iq2Xxs,
    name: "iq2_xxs",
    elements: 256,
    bytes: 66,
    decode: |block, out| decode(CodecId::Iq2Xxs, block, out),
    encode: Encode::Search,
};
/// `d | 64 low index bytes | 8 bytes of high index bits | 32 sign bytes | 4 bytes of two 4-bit scales`.
pub(super) const IQ3_S: Codec = Codec {
    id: CodecId::Iq3S,
    name: "iq3_s",
    elements: 256,
    bytes: 110,
    decode: |block, out| decode(CodecId::Iq3S, block, out),
    encode: Encode::Search,
};
/// `d | 64 index bytes | 8 words of four 7-bit signs and a 4-bit scale`.
pub(super) const IQ3_XXS: Codec = Codec {
    id: CodecId::Iq3Xxs,
    name: "iq3_xxs",
    elements: 256,
    bytes: 98,
    decode: |block, out| decode(CodecId::Iq3Xxs, block, out),
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

/// A point of a block's grid.
#[derive(Clone, Copy, Debug)]
pub(super) struct Point {
    /// First of its elements.
    pub(super) element: usize,
    /// Level of each coordinate, the first in the low bits.
    point: u16,
    /// Sign of each coordinate, 1 = minus; or all ones if their shift is negative.
    signs: u8,
    /// Integer scale, which is odd.
    pub(super) scale: u8,
}

/// Elements of a lattice type as a table of signed levels: `d · factor · scale · levels[code]`, where a code is the
/// index of a level and the sign above it. `d`, the integers of at most 5 bits and the levels of at most 6 make a
/// product that f32 holds exactly.
#[derive(Clone, Copy, Debug)]
pub(super) struct Form {
    /// Bits of the index of a level.
    bits: usize,
    /// Coordinates of a point.
    pub(super) coordinates: usize,
    pub(super) factor: f32,
    pub(super) levels: [f32; 16],
}

/// Form of a lattice type; `None` for other codecs.
pub(super) fn form(id: CodecId) -> Option<Form> {
    let magnitudes = |bits: usize, factor: f32, levels: &[f32]| {
        let mut table = [0.0; 16];
        for (i, level) in levels.iter().enumerate() {
            (table[i], table[i | 1 << bits]) = (*level, -level);
        }
        Form { bits, coordinates: if bits == 2 { 8 } else { 4 }, factor, levels: table }
    };
    Some(match id {
        CodecId::Iq2Xxs | CodecId::Iq2Xs | CodecId::Iq2S => magnitudes(2, 0.125, &IQ2_LEVELS[..3]),
        CodecId::Iq3Xxs => magnitudes(3, 0.25, &IQ3_XXS_LEVELS),
        CodecId::Iq3S => magnitudes(3, 1.0, &IQ3_S_LEVELS),
        CodecId::Iq1S | CodecId::Iq1M => {
            // Coordinates -1, 0 and 1 plus or minus the shift.
            let mut form = magnitudes(2, IQ1_DELTA, &[]);
            for coordinate in 0..3 {
                let steps = (coordinate as f32 - 1.0) / IQ1_DELTA;
                (form.levels[coordinate], form.levels[coordinate | 4]) = (steps + 1.0, steps - 1.0);
            }
            form
        }
        _ => return None,
    })
}

impl Form {
    /// Code of coordinate `i` of a point.
    pub(super) fn code(&self, point: &Point, i: usize) -> u8 {
        let level = (point.point >> (self.bits * i)) as u8 & ((1 << self.bits) - 1);
        level | (point.signs >> i & 1) << self.bits
    }
}

/// The f16 scale of a block.
pub(super) fn block_scale(id: CodecId, block: &[u8]) -> f32 {
    match id {
        // The top nibbles of the four words of scales.
        CodecId::Iq1M => {
            F16.decode((0..4).map(|i| u32::from(u16_at(block, 48 + 2 * i) >> 12) << (4 * i)).sum())
        }
        _ => f16_at(block, 0),
    }
}

fn decode(id: CodecId, block: &[u8], out: &mut [f32]) {
    let Some(form) = form(id) else { return };
    let d = block_scale(id, block) * form.factor;
    points(id, block, |point| {
        let scale = d * f32::from(point.scale);
        for (i, out) in out[point.element..][..form.coordinates].iter_mut().enumerate() {
            *out = scale * form.levels[usize::from(form.code(&point, i))];
        }
    });
}

/// Calls `put` with every point of a block, in order.
pub(super) fn points(id: CodecId, block: &[u8], put: impl FnMut(Point)) {
    let mut put = put;
    let scale = |nibble: u8| 2 * (nibble & 15) + 1;
    let mut each = |coordinates: usize, of: &dyn Fn(usize) -> (u16, u8, u8)| {
        for i in 0..256 / coordinates {
            let (point, signs, scale) = of(i);
            put(Point { element: coordinates * i, point, signs, scale });
        }
    };
    match id {
        CodecId::Iq2Xxs => each(8, &|i| {
            let (sub, l) = (i / 4, i % 4);
            let word = u32_at(block, 2 + 8 * sub + 4);
            let point = grids::IQ2_XXS[usize::from(block[2 + 8 * sub + l])];
            (point, signs(word >> (7 * l)), scale((word >> 28) as u8))
        }),
        CodecId::Iq2Xs => each(8, &|i| {
            let word = u16_at(block, 2 + 2 * i);
            let point = grids::IQ2_XS[usize::from(word & 511)];
            (point, signs(u32::from(word >> 9)), scale(block[66 + i / 4] >> (i % 4 / 2 * 4)))
        }),
        CodecId::Iq2S => each(8, &|i| {
            let (sub, l) = (i / 4, i % 4);
            let high = usize::from(block[66 + sub] >> (2 * l) & 3) << 8;
            let point = grids::IQ2_S[usize::from(block[2 + i]) | high];
            (point, block[34 + i], scale(block[74 + sub] >> (l / 2 * 4)))
        }),
        CodecId::Iq3Xxs => each(4, &|i| {
            let (sub, quad) = (i / 8, i % 8);
            let word = u32_at(block, 66 + 4 * sub);
            let signs = signs(word >> (7 * (quad / 2))) >> (quad % 2 * 4);
            (grids::IQ3_XXS[usize::from(block[2 + i])], signs, scale((word >> 28) as u8))
        }),
        CodecId::Iq3S => each(4, &|i| {
            let (sub, quad) = (i / 8, i % 8);
            let high = usize::from(block[66 + sub] >> quad & 1) << 8;
            let signs = block[74 + i / 2] >> (quad % 2 * 4);
            let point = grids::IQ3_S[usize::from(block[2 + i]) | high];
            (point, signs, scale(block[106 + sub / 2] >> (sub % 2 * 4)))
        }),
        CodecId::Iq1S => each(8, &|i| {
            let word = u16_at(block, 34 + i / 4 * 2);
            let high = usize::from(word >> (3 * (i % 4)) & 7) << 8;
            let shift = if word >> 15 == 1 { 0xff } else { 0 };
            (grids::IQ1[usize::from(block[2 + i]) | high], shift, scale((word >> 12 & 7) as u8))
        }),
        CodecId::Iq1M => each(8, &|i| {
            let (sub, half) = (i / 4, i % 4 / 2);
            let three = u16_at(block, 48 + sub / 2 * 2) >> (sub % 2 * 6 + half * 3) & 7;
            // One nibble: three high index bits, then the sign of the shift.
            let nibble = block[32 + i / 2] >> (i % 2 * 4) & 15;
            let index = usize::from(block[i]) | usize::from(nibble & 7) << 8;
            (grids::IQ1[index], if nibble >> 3 == 1 { 0xff } else { 0 }, scale(three as u8))
        }),
        _ => {}
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

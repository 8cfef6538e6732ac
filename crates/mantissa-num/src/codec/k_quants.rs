//! Super-blocks of 256 with quantized scales (K-quants): Q2_K to Q6_K, and Q8_K, their partner in integer dot
//! products.
//!
//! `d` and `dmin` are f16. A sub-block decodes `(d·scale)·q`, or `(d·scale)·q - dmin·min` if it has a minimum.

use super::{Codec, CodecId, Encode, f16_at, signed_amax};

/// `16 scale and min nibbles | 64 bytes of 2-bit codes | d | dmin`.
pub(super) const Q2_K: Codec = Codec {
    id: CodecId::Q2K,
    name: "q2_k",
    elements: 256,
    bytes: 84,
    decode: decode_q2_k,
    encode: Encode::Search,
};
/// `32 bytes of high bits | 64 bytes of low pairs | 12 bytes of 6-bit scales | d`.
pub(super) const Q3_K: Codec = Codec {
    id: CodecId::Q3K,
    name: "q3_k",
    elements: 256,
    bytes: 110,
    decode: decode_q3_k,
    encode: Encode::Search,
};
/// `d | dmin | 12 bytes of 6-bit scales and mins | 128 bytes of nibbles`.
pub(super) const Q4_K: Codec = Codec {
    id: CodecId::Q4K,
    name: "q4_k",
    elements: 256,
    bytes: 144,
    decode: decode_q4_k,
    encode: Encode::Search,
};
/// `d | dmin | 12 bytes of 6-bit scales and mins | 32 bytes of high bits | 128 bytes of nibbles`.
pub(super) const Q5_K: Codec = Codec {
    id: CodecId::Q5K,
    name: "q5_k",
    elements: 256,
    bytes: 176,
    decode: decode_q5_k,
    encode: Encode::Search,
};
/// `128 bytes of nibbles | 64 bytes of high pairs | 16 signed scales | d`.
pub(super) const Q6_K: Codec = Codec {
    id: CodecId::Q6K,
    name: "q6_k",
    elements: 256,
    bytes: 210,
    decode: decode_q6_k,
    encode: Encode::Search,
};
/// `d as f32 | 256 signed bytes | 16 sums of 16 bytes as i16`.
pub(super) const Q8_K: Codec = Codec {
    id: CodecId::Q8K,
    name: "q8_k",
    elements: 256,
    bytes: 292,
    decode: decode_q8_k,
    encode: Encode::Formula(encode_q8_k),
};

fn decode_q2_k(block: &[u8], out: &mut [f32]) {
    let (scales, codes) = (&block[..16], &block[16..80]);
    let (d, dmin) = (f16_at(block, 80), f16_at(block, 82));
    for (sub, out) in out.chunks_exact_mut(16).enumerate() {
        let scale = d * f32::from(scales[sub] & 15);
        let min = dmin * f32::from(scales[sub] >> 4);
        let (codes, shift) = pairs(codes, sub);
        out.iter_mut().zip(codes).for_each(|(out, q)| *out = scale * f32::from(q >> shift & 3) - min);
    }
}

/// Byte and shift of sub-block `sub` of 16 among 2-bit codes: four shifts over 32 bytes, then the next 32 bytes.
pub(super) fn pairs(codes: &[u8], sub: usize) -> (&[u8], usize) {
    (&codes[sub / 8 * 32 + sub % 2 * 16..][..16], sub % 8 / 2 * 2)
}

fn decode_q3_k(block: &[u8], out: &mut [f32]) {
    let (high, low, scales) = (&block[..32], &block[32..96], &block[96..108]);
    let d = f16_at(block, 108);
    for (sub, out) in out.chunks_exact_mut(16).enumerate() {
        let scale = d * q3_scale(scales, sub);
        let (low, shift) = pairs(low, sub);
        let (high, bit) = (&high[sub % 2 * 16..][..16], sub / 2);
        for ((out, low), high) in out.iter_mut().zip(low).zip(high) {
            let q = (low >> shift & 3) as i8 - if high >> bit & 1 == 1 { 0 } else { 4 };
            *out = scale * f32::from(q);
        }
    }
}

/// Scale `sub` of 16, 6 bits each: the low four bits fill 8 bytes, half-split; the high two fill 4 bytes, quarter-split.
#[inline]
pub(super) fn q3_scale(scales: &[u8], sub: usize) -> f32 {
    let low = if sub < 8 { scales[sub] & 15 } else { scales[sub - 8] >> 4 };
    let high = scales[8 + sub % 4] >> (sub / 4 * 2) & 3;
    f32::from((low | high << 4) as i8 - 32)
}

/// Scale and minimum `i` of 8, 6 bits each: the first four whole, the others' high pairs above those.
#[inline]
pub(super) fn scale_min(packed: &[u8], i: usize) -> (f32, f32) {
    let (scale, min) = if i < 4 {
        (packed[i] & 63, packed[i + 4] & 63)
    } else {
        let byte = packed[i + 4];
        (byte & 15 | packed[i - 4] >> 6 << 4, byte >> 4 | packed[i] >> 6 << 4)
    };
    (scale.into(), min.into())
}

#[inline(always)]
pub(super) fn decode_q4_k(block: &[u8], out: &mut [f32]) {
    decode_nibbles_k(block, &[0; 32], &block[16..], out);
}

fn decode_q5_k(block: &[u8], out: &mut [f32]) {
    decode_nibbles_k(block, &block[16..48], &block[48..], out);
}

/// Sub-blocks of 32; two of them share 32 bytes of nibbles, low half first. Bit `sub` of `high[i]` is code bit 4.
#[inline(always)]
fn decode_nibbles_k(block: &[u8], high: &[u8], nibbles: &[u8], out: &mut [f32]) {
    let (d, dmin) = (f16_at(block, 0), f16_at(block, 2));
    for (sub, out) in out.chunks_exact_mut(32).enumerate() {
        let (scale, min) = scale_min(&block[4..16], sub);
        let (scale, min) = (d * scale, dmin * min);
        let nibbles = &nibbles[sub / 2 * 32..][..32];
        for ((out, byte), high) in out.iter_mut().zip(nibbles).zip(high) {
            let q = byte >> (sub % 2 * 4) & 15 | (high >> sub & 1) << 4;
            *out = scale * f32::from(q) - min;
        }
    }
}

#[inline(always)]
pub(super) fn decode_q6_k(block: &[u8], out: &mut [f32]) {
    let d = f16_at(block, 208);
    for (sub, out) in out.chunks_exact_mut(16).enumerate() {
        // Half `sub / 8` has four runs of 32: nibbles of bytes 0..32, of 32..64, then their high halves.
        let (half, run, start) = (sub / 8, sub % 8 / 2, sub % 2 * 16);
        let low = &block[half * 64 + run % 2 * 32 + start..][..16];
        let high = &block[128 + half * 32 + start..][..16];
        let scale = d * f32::from(block[192 + sub] as i8);
        for ((out, low), high) in out.iter_mut().zip(low).zip(high) {
            let q = low >> (run / 2 * 4) & 15 | (high >> (run * 2) & 3) << 4;
            *out = scale * f32::from(q as i8 - 32);
        }
    }
}

fn decode_q8_k(block: &[u8], out: &mut [f32]) {
    let d = f32::from_bits(super::u32_at(block, 0));
    out.iter_mut().zip(&block[4..260]).for_each(|(out, &q)| *out = d * f32::from(q as i8));
}

fn encode_q8_k(x: &[f32], block: &mut [u8]) {
    block.fill(0);
    let max = signed_amax(x);
    // The inverse of a subnormal overflows, so such a block is stored as zeros.
    let inverse = -127.0 / max;
    if max == 0.0 || !inverse.is_finite() {
        return;
    }
    // Rounding must not carry 127 times the scale past f32.
    let limit = (f32::MAX / 127.0).next_down();
    block[..4].copy_from_slice(&(1.0 / inverse).clamp(-limit, limit).to_le_bytes());
    for (v, out) in x.iter().zip(&mut block[4..260]) {
        *out = (inverse * v).round_ties_even().min(127.0) as i8 as u8;
    }
    for sub in 0..16 {
        let sum: i16 = block[4 + 16 * sub..][..16].iter().map(|&q| i16::from(q as i8)).sum();
        block[260 + 2 * sub..][..2].copy_from_slice(&sum.to_le_bytes());
    }
}

/// Parts of a searched super-block before packing.
#[derive(Clone, Copy, Debug)]
pub(super) struct SuperBlock {
    /// f16 scales of the integer scales and minima.
    pub(super) d: u16,
    pub(super) dmin: u16,
    /// One per sub-block; unused entries follow.
    pub(super) scales: [i8; 16],
    pub(super) mins: [u8; 16],
    /// Factor of the scale: signed where the type has no minimum, in IQ4_XS a level.
    pub(super) codes: [i8; 256],
}

impl SuperBlock {
    pub(super) const ZERO: SuperBlock =
        SuperBlock { d: 0, dmin: 0, scales: [0; 16], mins: [0; 16], codes: [0; 256] };
}

impl SuperBlock {
    /// Runs of 32 codes that the types keep together. A byte with several codes takes them from the same position of
    /// several runs, so a whole register of bytes is built at once.
    fn runs(&self) -> &[[i8; 32]] {
        self.codes.as_chunks::<32>().0
    }
}

/// Puts codes, shifted by `raise` to 0 to 3, in the places of [`pairs`].
fn put_pairs(from: &SuperBlock, raise: i8, bytes: &mut [u8]) {
    let place = |code: i8, run: usize| ((code + raise) as u8 & 3) << (2 * run);
    for (runs, bytes) in from.runs().as_chunks::<4>().0.iter().zip(bytes.as_chunks_mut::<32>().0) {
        for i in 0..32 {
            bytes[i] =
                place(runs[0][i], 0) | place(runs[1][i], 1) | place(runs[2][i], 2) | place(runs[3][i], 3);
        }
    }
}

/// One bit of each code; run `r` is bit `r` of a byte.
fn put_bits(from: &SuperBlock, bit: impl Fn(i8) -> bool, bytes: &mut [u8]) {
    for (r, run) in from.runs().iter().enumerate() {
        for (byte, &code) in bytes.iter_mut().zip(run) {
            *byte |= u8::from(bit(code)) << r;
        }
    }
}

/// Fills a block of zeros.
pub(super) fn put_q2_k(from: &SuperBlock, block: &mut [u8]) {
    for sub in 0..16 {
        block[sub] = from.scales[sub] as u8 | from.mins[sub] << 4;
    }
    put_pairs(from, 0, &mut block[16..80]);
    block[80..82].copy_from_slice(&from.d.to_le_bytes());
    block[82..84].copy_from_slice(&from.dmin.to_le_bytes());
}

/// Fills a block of zeros.
pub(super) fn put_q3_k(from: &SuperBlock, block: &mut [u8]) {
    put_bits(from, |code| code >= 0, &mut block[..32]);
    put_pairs(from, 4, &mut block[32..96]);
    for (sub, scale) in from.scales.iter().enumerate() {
        let scale = (scale + 32) as u8;
        block[96 + sub % 8] |= (scale & 15) << (sub / 8 * 4);
        block[104 + sub % 4] |= (scale >> 4) << (sub / 4 * 2);
    }
    block[108..110].copy_from_slice(&from.d.to_le_bytes());
}

/// Fills a block of zeros.
pub(super) fn put_q4_k(from: &SuperBlock, block: &mut [u8]) {
    put_scales_k(from, block);
    put_nibbles_k(from, &mut block[16..]);
}

/// Fills a block of zeros.
pub(super) fn put_q5_k(from: &SuperBlock, block: &mut [u8]) {
    put_scales_k(from, block);
    put_bits(from, |code| code >= 16, &mut block[16..48]);
    put_nibbles_k(from, &mut block[48..]);
}

/// f16 scales, and the bytes that [`scale_min`] reads.
fn put_scales_k(from: &SuperBlock, block: &mut [u8]) {
    block[..2].copy_from_slice(&from.d.to_le_bytes());
    block[2..4].copy_from_slice(&from.dmin.to_le_bytes());
    let packed = &mut block[4..16];
    for i in 0..4 {
        packed[i] = from.scales[i] as u8 | (from.scales[i + 4] as u8 >> 4) << 6;
        packed[i + 4] = from.mins[i] | (from.mins[i + 4] >> 4) << 6;
        packed[i + 8] = from.scales[i + 4] as u8 & 15 | (from.mins[i + 4] & 15) << 4;
    }
}

fn put_nibbles_k(from: &SuperBlock, nibbles: &mut [u8]) {
    for (runs, bytes) in from.runs().as_chunks::<2>().0.iter().zip(nibbles.as_chunks_mut::<32>().0) {
        for i in 0..32 {
            bytes[i] = (runs[0][i] as u8 & 15) | (runs[1][i] as u8) << 4;
        }
    }
}

/// Fills a block of zeros.
pub(super) fn put_q6_k(from: &SuperBlock, block: &mut [u8]) {
    let (low, high) = block[..192].split_at_mut(128);
    let code = |code: i8| (code + 32) as u8;
    for (half, runs) in from.runs().as_chunks::<4>().0.iter().enumerate() {
        let (first, second) = low[half * 64..half * 64 + 64].split_at_mut(32);
        let high = &mut high[half * 32..half * 32 + 32];
        for i in 0..32 {
            let (a, b) = (code(runs[0][i]), code(runs[1][i]));
            let (c, d) = (code(runs[2][i]), code(runs[3][i]));
            first[i] = a & 15 | c << 4;
            second[i] = b & 15 | d << 4;
            high[i] = a >> 4 | b >> 4 << 2 | c >> 4 << 4 | d >> 4 << 6;
        }
    }
    for (out, scale) in block[192..208].iter_mut().zip(from.scales) {
        *out = scale as u8;
    }
    block[208..210].copy_from_slice(&from.d.to_le_bytes());
}

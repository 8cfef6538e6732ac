//! Second decoder of super-blocks (K-quants) and of the IQ types. It computes each element from its index in f64 and
//! rounds once. Grids and the type table are data of the format, shared with the first decoder.
//!
//! Products of an f16, a scale of up to 8 bits and a code of up to 7 are exact in f64. So one rounding at the end
//! equals the C reference's f32 operations, of which at most one rounds.

use mantissa_num::CodecId;

/// The value of an f16.
pub(super) type Half<'a> = &'a dyn Fn(u16) -> f64;

/// Value of one element of a block, given its bytes, its index and the f16 table.
pub(super) type Element = fn(&[u8], usize, Half<'_>) -> f64;

/// Levels of IQ4, as ggml's `kvalues_iq4nl`.
const LEVELS: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// `bits` bits of `byte` from `shift` on.
fn field(byte: u8, shift: usize, bits: u32) -> f64 {
    f64::from(u32::from(byte) >> shift & ((1 << bits) - 1))
}

/// 16 bits from byte `at` on.
fn word(b: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([b[at], b[at + 1]])
}

/// Byte and shift of 2-bit code `i`.
fn pair(i: usize) -> (usize, usize) {
    (i / 128 * 32 + i % 32, i % 128 / 32 * 2)
}

pub(super) fn q2_k(b: &[u8], i: usize, half: Half<'_>) -> f64 {
    let (at, shift) = pair(i);
    let (scale, min) = (field(b[i / 16], 0, 4), field(b[i / 16], 4, 4));
    half(word(b, 80)) * scale * field(b[16 + at], shift, 2) - half(word(b, 82)) * min
}

pub(super) fn q3_k(b: &[u8], i: usize, half: Half<'_>) -> f64 {
    let (at, shift) = pair(i);
    let code = field(b[32 + at], shift, 2) + 4.0 * field(b[i % 32], i / 32, 1) - 4.0;
    let sub = i / 16;
    let scale =
        field(b[96 + sub % 8], sub / 8 * 4, 4) + 16.0 * field(b[104 + sub % 4], sub / 4 * 2, 2) - 32.0;
    half(word(b, 108)) * scale * code
}

/// Scale and minimum of sub-block `sub`, six bits each in 12 bytes. Bytes 0 to 3 hold the scales 0 to 3 and, above
/// them, two bits of the scales 4 to 7; bytes 4 to 7 hold the same for the minima; bytes 8 to 11 hold the low nibbles
/// of the last four of both.
fn six_bits(b: &[u8], sub: usize) -> (f64, f64) {
    let at = sub % 4;
    if sub < 4 {
        return (field(b[at], 0, 6), field(b[4 + at], 0, 6));
    }
    let (low, high) = ((0, 4), (b[at], b[4 + at]));
    (
        field(b[8 + at], low.0, 4) + 16.0 * field(high.0, 6, 2),
        field(b[8 + at], low.1, 4) + 16.0 * field(high.1, 6, 2),
    )
}

/// Nibble of element `i`: 32 bytes per 64 elements.
fn nibble(b: &[u8], i: usize) -> f64 {
    field(b[i / 64 * 32 + i % 32], i / 32 % 2 * 4, 4)
}

pub(super) fn q4_k(b: &[u8], i: usize, half: Half<'_>) -> f64 {
    let (scale, min) = six_bits(&b[4..16], i / 32);
    half(word(b, 0)) * scale * nibble(&b[16..], i) - half(word(b, 2)) * min
}

pub(super) fn q5_k(b: &[u8], i: usize, half: Half<'_>) -> f64 {
    let (scale, min) = six_bits(&b[4..16], i / 32);
    let code = nibble(&b[48..], i) + 16.0 * field(b[16 + i % 32], i / 32, 1);
    half(word(b, 0)) * scale * code - half(word(b, 2)) * min
}

pub(super) fn q6_k(b: &[u8], i: usize, half: Half<'_>) -> f64 {
    let (part, run, at) = (i / 128, i % 128 / 32, i % 32);
    let low = field(b[part * 64 + run % 2 * 32 + at], run / 2 * 4, 4);
    let high = field(b[128 + part * 32 + at], run * 2, 2);
    half(word(b, 208)) * f64::from(b[192 + i / 16] as i8) * (low + 16.0 * high - 32.0)
}

/// The level of element `i` of 32 nibbles, half-split.
fn level(nibbles: &[u8], i: usize) -> f64 {
    f64::from(LEVELS[usize::from(nibbles[i % 16] >> (i / 16 * 4) & 15)])
}

pub(super) fn iq4_nl(b: &[u8], i: usize, half: Half<'_>) -> f64 {
    half(word(b, 0)) * level(&b[2..], i)
}

pub(super) fn iq4_xs(b: &[u8], i: usize, half: Half<'_>) -> f64 {
    let sub = i / 32;
    let high = u16::from_le_bytes([b[2], b[3]]) >> (2 * sub) & 3;
    let scale = field(b[4 + sub / 2], sub % 2 * 4, 4) + 16.0 * f64::from(high) - 32.0;
    half(word(b, 0)) * scale * level(&b[8 + 16 * sub..], i % 32)
}

/// Levels of the magnitudes of IQ2 and of IQ3_XXS; IQ3_S has the odd numbers.
const IQ2: [f64; 4] = [8.0, 25.0, 43.0, 0.0];
const IQ3_XXS: [f64; 8] = [4.0, 12.0, 20.0, 28.0, 36.0, 44.0, 52.0, 62.0];

/// Level index of coordinate `i`, of `bits` bits, of point `point`.
fn coordinate(codec: CodecId, point: usize, i: usize, bits: usize) -> usize {
    let word = codec.grid().and_then(|grid| grid.get(point)).copied().unwrap_or(0);
    usize::from(word >> (bits * i)) & ((1 << bits) - 1)
}

/// -1 if bit `i` is set. Of seven stored signs, the eighth makes the number of minus signs even.
fn sign(bits: u32, stored: u32, i: usize) -> f64 {
    let minus = if i as u32 == stored { bits.count_ones() % 2 == 1 } else { bits >> i & 1 == 1 };
    if minus { -1.0 } else { 1.0 }
}

/// Four bytes from `at` on: four times seven sign bits, with a 4-bit scale on top.
fn signs_and_scale(b: &[u8], at: usize, i: usize) -> (f64, f64) {
    let word = u32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]]);
    (sign(word >> (7 * (i % 32 / 8)) & 127, 7, i % 8), f64::from(word >> 28))
}

pub(super) fn iq2_xxs(b: &[u8], i: usize, half: Half<'_>) -> f64 {
    let at = 2 + i / 32 * 8;
    let (sign, scale) = signs_and_scale(b, at + 4, i);
    let level = IQ2[coordinate(CodecId::Iq2Xxs, b[at + i % 32 / 8].into(), i % 8, 2)];
    half(word(b, 0)) * (0.5 + scale) * 0.25 * level * sign
}

/// Scale of 16 elements, two per byte from `at` on.
fn sixteen(b: &[u8], at: usize, i: usize) -> f64 {
    (0.5 + field(b[at + i / 32], i / 16 % 2 * 4, 4)) * 0.25
}

pub(super) fn iq2_xs(b: &[u8], i: usize, half: Half<'_>) -> f64 {
    let packed = word(b, 2 + i / 8 * 2);
    let level = IQ2[coordinate(CodecId::Iq2Xs, usize::from(packed & 511), i % 8, 2)];
    half(word(b, 0)) * sixteen(b, 66, i) * level * sign(u32::from(packed >> 9), 7, i % 8)
}

pub(super) fn iq2_s(b: &[u8], i: usize, half: Half<'_>) -> f64 {
    let eight = i / 8;
    let high = usize::from(b[66 + eight / 4] >> (eight % 4 * 2) & 3);
    let level = IQ2[coordinate(CodecId::Iq2S, usize::from(b[2 + eight]) + 256 * high, i % 8, 2)];
    half(word(b, 0)) * sixteen(b, 74, i) * level * sign(b[34 + eight].into(), 8, i % 8)
}

pub(super) fn iq3_xxs(b: &[u8], i: usize, half: Half<'_>) -> f64 {
    let (sign, scale) = signs_and_scale(b, 66 + i / 32 * 4, i);
    let level = IQ3_XXS[coordinate(CodecId::Iq3Xxs, b[2 + i / 4].into(), i % 4, 3)];
    half(word(b, 0)) * (0.5 + scale) * 0.5 * level * sign
}

pub(super) fn iq3_s(b: &[u8], i: usize, half: Half<'_>) -> f64 {
    let high = usize::from(b[66 + i / 32] >> (i % 32 / 4) & 1);
    let index = coordinate(CodecId::Iq3S, usize::from(b[2 + i / 4]) + 256 * high, i % 4, 3);
    let scale = 1.0 + 2.0 * field(b[106 + i / 64], i / 32 % 2 * 4, 4);
    half(word(b, 0)) * scale * (1 + 2 * index) as f64 * sign(b[74 + i / 8].into(), 8, i % 8)
}

/// `-1`, `0` or `1`, shifted by an eighth.
fn shifted(point: usize, i: usize, negative: bool) -> f64 {
    coordinate(CodecId::Iq1S, point, i, 2) as f64 - 1.0 + if negative { -0.125 } else { 0.125 }
}

pub(super) fn iq1_s(b: &[u8], i: usize, half: Half<'_>) -> f64 {
    let (eight, packed) = (i / 8, word(b, 34 + i / 32 * 2));
    let point = usize::from(b[2 + eight]) + 256 * usize::from(packed >> (eight % 4 * 3) & 7);
    half(word(b, 0)) * f64::from(2 * (packed >> 12 & 7) + 1) * shifted(point, i % 8, packed >> 15 == 1)
}

pub(super) fn iq1_m(b: &[u8], i: usize, half: Half<'_>) -> f64 {
    // The f16 is spread over the top nibbles of four words; the three bits below are a scale of 16 elements each.
    let bits = (0..4).fold(0, |bits, n| bits | word(b, 48 + 2 * n) >> 12 << (4 * n));
    let scale = word(b, 48 + i / 64 * 2) >> (i / 16 % 4 * 3) & 7;
    let (eight, nibble) = (i / 8, b[32 + i / 16] >> (i / 8 % 2 * 4) & 15);
    let point = usize::from(b[eight]) + 256 * usize::from(nibble & 7);
    half(bits) * f64::from(2 * scale + 1) * shifted(point, i % 8, nibble >> 3 == 1)
}

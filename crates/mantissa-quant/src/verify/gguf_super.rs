//! The second decoder of super-blocks (K-quants) and of IQ4: each element by itself, from its index, in f64, rounded once.
//!
//! Products of an f16, a scale of up to 8 bits and a code of up to 7 are exact in f64, so that one rounding at the end gives
//! what the C reference gives with f32 operations, of which at most one rounds.

/// The value of one element of a block: bytes, index, and how an f16 is read at a position.
pub(super) type Element = fn(&[u8], usize, &dyn Fn(usize) -> f64) -> f64;

/// Levels of IQ4, as ggml's `kvalues_iq4nl`.
const LEVELS: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// `bits` bits of `byte` from `shift` on.
fn field(byte: u8, shift: usize, bits: u32) -> f64 {
    f64::from(u32::from(byte) >> shift & ((1 << bits) - 1))
}

/// The place of 2-bit code `i` among its bytes, and the shift there.
fn pair(i: usize) -> (usize, usize) {
    (i / 128 * 32 + i % 32, i % 128 / 32 * 2)
}

pub(super) fn q2_k(b: &[u8], i: usize, half: &dyn Fn(usize) -> f64) -> f64 {
    let (at, shift) = pair(i);
    let (scale, min) = (field(b[i / 16], 0, 4), field(b[i / 16], 4, 4));
    half(80) * scale * field(b[16 + at], shift, 2) - half(82) * min
}

pub(super) fn q3_k(b: &[u8], i: usize, half: &dyn Fn(usize) -> f64) -> f64 {
    let (at, shift) = pair(i);
    let code = field(b[32 + at], shift, 2) + 4.0 * field(b[i % 32], i / 32, 1) - 4.0;
    let sub = i / 16;
    let scale =
        field(b[96 + sub % 8], sub / 8 * 4, 4) + 16.0 * field(b[104 + sub % 4], sub / 4 * 2, 2) - 32.0;
    half(108) * scale * code
}

/// Scale and minimum of sub-block `sub`, six bits each in 12 bytes: bytes 0 to 3 are the scales 0 to 3 and, above them, two
/// bits of the scales 4 to 7; bytes 4 to 7 the same of the minima; bytes 8 to 11 the low nibbles of the last four of both.
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

/// The nibble of element `i`: 64 elements to 32 bytes.
fn nibble(b: &[u8], i: usize) -> f64 {
    field(b[i / 64 * 32 + i % 32], i / 32 % 2 * 4, 4)
}

pub(super) fn q4_k(b: &[u8], i: usize, half: &dyn Fn(usize) -> f64) -> f64 {
    let (scale, min) = six_bits(&b[4..16], i / 32);
    half(0) * scale * nibble(&b[16..], i) - half(2) * min
}

pub(super) fn q5_k(b: &[u8], i: usize, half: &dyn Fn(usize) -> f64) -> f64 {
    let (scale, min) = six_bits(&b[4..16], i / 32);
    let code = nibble(&b[48..], i) + 16.0 * field(b[16 + i % 32], i / 32, 1);
    half(0) * scale * code - half(2) * min
}

pub(super) fn q6_k(b: &[u8], i: usize, half: &dyn Fn(usize) -> f64) -> f64 {
    let (part, run, at) = (i / 128, i % 128 / 32, i % 32);
    let low = field(b[part * 64 + run % 2 * 32 + at], run / 2 * 4, 4);
    let high = field(b[128 + part * 32 + at], run * 2, 2);
    half(208) * f64::from(b[192 + i / 16] as i8) * (low + 16.0 * high - 32.0)
}

/// The level of element `i` of 32 nibbles, half-split.
fn level(nibbles: &[u8], i: usize) -> f64 {
    f64::from(LEVELS[usize::from(nibbles[i % 16] >> (i / 16 * 4) & 15)])
}

pub(super) fn iq4_nl(b: &[u8], i: usize, half: &dyn Fn(usize) -> f64) -> f64 {
    half(0) * level(&b[2..], i)
}

pub(super) fn iq4_xs(b: &[u8], i: usize, half: &dyn Fn(usize) -> f64) -> f64 {
    let sub = i / 32;
    let high = u16::from_le_bytes([b[2], b[3]]) >> (2 * sub) & 3;
    let scale = field(b[4 + sub / 2], sub % 2 * 4, 4) + 16.0 * f64::from(high) - 32.0;
    half(0) * scale * level(&b[8 + 16 * sub..], i % 32)
}

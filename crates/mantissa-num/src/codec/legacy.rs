//! One scale per block of 32: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q8_1; Q1_0, signs with one scale per 128; and Q2_0, two
//! bits with one scale per 64.
//!
//! `d` and `m` are f16. Elements of the 4- and 5-bit types are half-split: byte `j` holds element `j` (low nibble)
//! and element `j + 16` (high nibble). Type 0 decodes `(q - 2^(b-1))·d` with `d` signed, type 1 decodes `q·d + m`.

use super::{Codec, CodecId, Encode, amax, f16_at, inverse, put_f16, signed_amax, u32_at};

/// `d | 128 sign bits, 1 = positive`.
pub(super) const Q1_0: Codec = Codec {
    id: CodecId::Q1_0,
    name: "q1_0",
    elements: 128,
    bytes: 18,
    decode: decode_q1_0,
    encode: Encode::Formula(encode_q1_0),
};
/// `d | 16 bytes of four 2-bit codes`; the code minus one is scaled.
pub(super) const Q2_0: Codec = Codec {
    id: CodecId::Q2_0,
    name: "q2_0",
    elements: 64,
    bytes: 18,
    decode: decode_q2_0,
    encode: Encode::Formula(encode_q2_0),
};
/// `d | 16 bytes of nibbles`.
pub(super) const Q4_0: Codec = Codec {
    id: CodecId::Q4_0,
    name: "q4_0",
    elements: 32,
    bytes: 18,
    decode: decode_q4_0,
    encode: Encode::Weighed(encode_q4_0),
};
/// `d | m | 16 bytes of nibbles`.
pub(super) const Q4_1: Codec = Codec {
    id: CodecId::Q4_1,
    name: "q4_1",
    elements: 32,
    bytes: 20,
    decode: decode_q4_1,
    encode: Encode::Weighed(encode_q4_1),
};
/// `d | 32 high bits | 16 bytes of nibbles`.
pub(super) const Q5_0: Codec = Codec {
    id: CodecId::Q5_0,
    name: "q5_0",
    elements: 32,
    bytes: 22,
    decode: decode_q5_0,
    encode: Encode::Weighed(encode_q5_0),
};
/// `d | m | 32 high bits | 16 bytes of nibbles`.
pub(super) const Q5_1: Codec = Codec {
    id: CodecId::Q5_1,
    name: "q5_1",
    elements: 32,
    bytes: 24,
    decode: decode_q5_1,
    encode: Encode::Weighed(encode_q5_1),
};
/// `d | 32 signed bytes`.
pub(super) const Q8_0: Codec = Codec {
    id: CodecId::Q8_0,
    name: "q8_0",
    elements: 32,
    bytes: 34,
    decode: decode_q8_0,
    encode: Encode::Formula(encode_q8_0),
};
/// `d | s | 32 signed bytes`, with `s = d · sum of the bytes` for the integer dot products.
pub(super) const Q8_1: Codec = Codec {
    id: CodecId::Q8_1,
    name: "q8_1",
    elements: 32,
    bytes: 36,
    decode: decode_q8_1,
    encode: Encode::Formula(encode_q8_1),
};

const HALF: usize = 16;

fn decode_q1_0(block: &[u8], out: &mut [f32]) {
    let d = f16_at(block, 0);
    for (i, out) in out.iter_mut().enumerate() {
        let positive = block[2 + i / 8] >> (i % 8) & 1 == 1;
        *out = if positive { d } else { -d };
    }
}

/// `d` is the mean magnitude.
fn encode_q1_0(x: &[f32], block: &mut [u8]) {
    let sum = x.iter().fold(0.0f32, |sum, v| sum + v.abs());
    put_f16(block, 0, sum / x.len() as f32);
    block[2..].fill(0);
    for (i, v) in x.iter().enumerate() {
        block[2 + i / 8] |= u8::from(*v >= 0.0) << (i % 8);
    }
}

fn decode_q2_0(block: &[u8], out: &mut [f32]) {
    let d = f16_at(block, 0);
    for (i, out) in out.iter_mut().enumerate() {
        *out = (f32::from(block[2 + i / 4] >> (2 * (i % 4)) & 3) - 1.0) * d;
    }
}

/// `d` is the largest magnitude, so the highest of the four codes is never written: the type is for ternary weights.
fn encode_q2_0(x: &[f32], block: &mut [u8]) {
    let d = amax(x);
    put_f16(block, 0, d);
    let id = inverse(d);
    block[2..].fill(0);
    for (i, v) in x.iter().enumerate() {
        block[2 + i / 4] |= (((v * id).round() + 1.0) as u8) << (2 * (i % 4));
    }
}

/// Unsigned element codes of a half-split block: nibbles from `nibbles` on, combined with `high` bits.
fn half_split(block: &[u8], nibbles: usize, high: u32) -> impl Iterator<Item = (usize, f32)> {
    (0..2 * HALF).map(move |i| {
        let byte = block[nibbles + i % HALF];
        let low = if i < HALF { byte & 15 } else { byte >> 4 };
        (i, f32::from(low | ((high >> i & 1) as u8) << 4))
    })
}

fn put_half_split(block: &mut [u8], nibbles: usize, codes: impl Iterator<Item = u8>) -> u32 {
    block[nibbles..nibbles + HALF].fill(0);
    let mut high = 0;
    for (i, code) in codes.enumerate() {
        block[nibbles + i % HALF] |= (code & 15) << (i / HALF * 4);
        high |= u32::from(code >> 4) << i;
    }
    high
}

/// Writes a block of Q4_0, Q4_1, Q5_0 or Q5_1 from its codes and scales (f16 bits).
pub(super) fn put_codes(codec: CodecId, d: u16, m: u16, codes: &[f32; 2 * HALF], block: &mut [u8]) {
    let (nibbles, high_at, has_min) = match codec {
        CodecId::Q4_0 => (2, None, false),
        CodecId::Q4_1 => (4, None, true),
        CodecId::Q5_0 => (6, Some(2), false),
        _ => (8, Some(4), true),
    };
    block[..2].copy_from_slice(&d.to_le_bytes());
    if has_min {
        block[2..4].copy_from_slice(&m.to_le_bytes());
    }
    let high = put_half_split(block, nibbles, codes.iter().map(|code| *code as u8));
    if let Some(at) = high_at {
        block[at..at + 4].copy_from_slice(&high.to_le_bytes());
    }
}

#[inline(always)]
pub(super) fn decode_q4_0(block: &[u8], out: &mut [f32]) {
    let d = f16_at(block, 0);
    // Integers first, then one long conversion: both vectorize at every instruction-set level.
    let mut codes = [0i8; 2 * HALF];
    let (low, high) = codes.split_at_mut(HALF);
    for ((low, high), byte) in low.iter_mut().zip(high).zip(&block[2..]) {
        *low = (byte & 15) as i8 - 8;
        *high = (byte >> 4) as i8 - 8;
    }
    out.iter_mut().zip(codes).for_each(|(out, q)| *out = f32::from(q) * d);
}

fn decode_q4_1(block: &[u8], out: &mut [f32]) {
    let (d, m) = (f16_at(block, 0), f16_at(block, 2));
    half_split(block, 4, 0).for_each(|(i, q)| out[i] = q * d + m);
}

fn decode_q5_0(block: &[u8], out: &mut [f32]) {
    let d = f16_at(block, 0);
    half_split(block, 6, u32_at(block, 2)).for_each(|(i, q)| out[i] = (q - 16.0) * d);
}

fn decode_q5_1(block: &[u8], out: &mut [f32]) {
    let (d, m) = (f16_at(block, 0), f16_at(block, 2));
    half_split(block, 8, u32_at(block, 4)).for_each(|(i, q)| out[i] = q * d + m);
}

#[inline(always)]
pub(super) fn decode_q8_0(block: &[u8], out: &mut [f32]) {
    let d = f16_at(block, 0);
    out.iter_mut().zip(&block[2..]).for_each(|(out, &q)| *out = f32::from(q as i8) * d);
}

fn decode_q8_1(block: &[u8], out: &mut [f32]) {
    let d = f16_at(block, 0);
    out.iter_mut().zip(&block[4..]).for_each(|(out, &q)| *out = f32::from(q as i8) * d);
}

/// Structured so that a compiler keeps it in vector registers at any level it is inlined.
#[inline(always)]
pub(super) fn encode_q4_0(x: &[f32], block: &mut [u8]) {
    let (Some(x), Some(block)) = (x.first_chunk::<{ 2 * HALF }>(), block.first_chunk_mut::<{ 2 + HALF }>())
    else {
        return;
    };
    let (d, id, bias) = signed_scale(signed_amax_of_block(x), 8.0);
    put_f16(block, 0, d);
    let codes: [u32; 2 * HALF] = std::array::from_fn(|i| {
        let code = x[i] * id + bias;
        let code = if code < 15.0 { code } else { 15.0 };
        (code.trunc() + INTEGERS).to_bits()
    });
    for (j, byte) in block[2..].iter_mut().enumerate() {
        *byte = (codes[j] | codes[j + HALF] << 4) as u8;
    }
}

fn encode_q5_0(x: &[f32], block: &mut [u8]) {
    let high = encode_signed(x, block, 6, 16.0);
    block[2..6].copy_from_slice(&high.to_le_bytes());
}

fn encode_q4_1(x: &[f32], block: &mut [u8]) {
    encode_ranged(x, block, 4, 15.0);
}

fn encode_q5_1(x: &[f32], block: &mut [u8]) {
    let high = encode_ranged(x, block, 8, 31.0);
    block[4..8].copy_from_slice(&high.to_le_bytes());
}

/// Maps the value of largest magnitude to code 0, `-half`, so `d` has the opposite sign.
fn encode_signed(x: &[f32], block: &mut [u8], nibbles: usize, half: f32) -> u32 {
    let (d, id, bias) = signed_scale(signed_amax(x), half);
    put_f16(block, 0, d);
    // Truncation after adding a half and the bias; the cast saturates at 0 and the top is clamped.
    let code = |v: &f32| (*v * id + bias).min(2.0 * half - 1.0) as u8;
    put_half_split(block, nibbles, x.iter().map(code))
}

/// Scale, inverse and bias of [`encode_signed`] for the value of largest magnitude.
#[inline(always)]
fn signed_scale(extreme: f32, half: f32) -> (f32, f32, f32) {
    let d = extreme / -half;
    let id = inverse(d);
    // The reference's casts of infinities give code 0 if the scale has no inverse.
    let bias = if id == 0.0 && d != 0.0 { 0.0 } else { half + 0.5 };
    (d, id, bias)
}

/// Added to an integer of magnitude below 2^22, it leaves the integer in the low bits, in two's complement. Compilers
/// vectorize this conversion, but not a saturating cast.
const INTEGERS: f32 = 12_582_912.0; // 1.5 · 2^23

/// [`signed_amax`] of one block: smallest and largest by halves, comparing positions only if they are opposites.
#[inline(always)]
fn signed_amax_of_block(x: &[f32; 2 * HALF]) -> f32 {
    let min = fold_halves(x, |a, b| if b < a { b } else { a });
    let max = fold_halves(x, |a, b| if a < b { b } else { a });
    match (max > -min, -min > max) {
        (true, _) => max,
        (_, true) => min,
        _ => signed_amax(x),
    }
}

/// Folds halves onto each other; the result of `f` must not depend on the order.
#[inline(always)]
fn fold_halves(x: &[f32; 2 * HALF], f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut folded: [f32; HALF] = std::array::from_fn(|i| f(x[i], x[i + HALF]));
    let mut width = HALF / 2;
    while width > 0 {
        for i in 0..width {
            folded[i] = f(folded[i], folded[i + width]);
        }
        width /= 2;
    }
    folded[0]
}

fn encode_ranged(x: &[f32], block: &mut [u8], nibbles: usize, levels: f32) -> u32 {
    let min = x.iter().copied().fold(f32::MAX, f32::min);
    let max = x.iter().copied().fold(f32::MIN, f32::max);
    let d = (max - min) / levels;
    put_f16(block, 0, d);
    put_f16(block, 2, min);
    let id = inverse(d);
    let code = |v: &f32| ((*v - min) * id + 0.5).min(levels) as u8;
    put_half_split(block, nibbles, x.iter().map(code))
}

/// As [`encode_q4_0`].
#[inline(always)]
pub(super) fn encode_q8_0(x: &[f32], block: &mut [u8]) {
    encode_bytes(x, block, 2);
}

fn encode_q8_1(x: &[f32], block: &mut [u8]) {
    let d = encode_bytes(x, block, 4);
    let sum: i32 = block[4..].iter().map(|&q| i32::from(q as i8)).sum();
    put_f16(block, 2, sum as f32 * d);
}

#[inline(always)]
fn encode_bytes(x: &[f32], block: &mut [u8], at: usize) -> f32 {
    let codes = block.get_mut(at..).and_then(<[u8]>::first_chunk_mut::<{ 2 * HALF }>);
    let (Some(x), Some(codes)) = (x.first_chunk::<{ 2 * HALF }>(), codes) else { return 0.0 };
    let magnitudes: [f32; 2 * HALF] = std::array::from_fn(|i| x[i].abs());
    let d = fold_halves(&magnitudes, |a, b| if a < b { b } else { a }) / 127.0;
    let id = inverse(d);
    for (v, code) in x.iter().zip(codes) {
        *code = nearest_byte(v * id);
    }
    put_f16(block, 0, d);
    d
}

/// Largest float below a half. Added before truncation it rounds half away from zero. A half itself would round the
/// float below a half up to 1, and ties at larger magnitudes up to the next integer.
pub(super) const BELOW_HALF: f32 = 0.5 - f32::EPSILON / 4.0;

/// Rounds `v`, of magnitude below 127.5, like `roundf`: half away from zero.
#[inline(always)]
fn nearest_byte(v: f32) -> u8 {
    ((v + BELOW_HALF.copysign(v)).trunc() + INTEGERS).to_bits() as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes from ggml's `quantize_row_q2_0_ref` for these elements.
    #[test]
    fn q2_0_has_the_bytes_of_the_reference() {
        let x: [f32; 64] = std::array::from_fn(|i| ((i * 37 % 64) as f32 - 32.0) / 16.0);
        let bytes = [0, 64, 68, 25, 97, 70, 152, 81, 70, 152, 17, 102, 148, 17, 102, 132, 25, 101];
        let (mut block, mut out) = ([0; 18], [0.0; 64]);
        Q2_0.encode_block(&x, &mut block);
        assert_eq!(block, bytes);
        Q2_0.decode_block(&[&bytes[..2], &[0b11_10_01_00; 16]].concat(), &mut out);
        assert_eq!(out[..4], [-2.0, 0.0, 2.0, 4.0]);
    }

    #[test]
    fn bytes_are_rounded_half_away_from_zero() {
        let same = |v: f32| assert_eq!(nearest_byte(v), v.round() as i8 as u8, "{v:e}");
        for ties in -254..=254 {
            let tie = ties as f32 / 2.0;
            for v in [tie, tie.next_down(), tie.next_up()] {
                same(v);
            }
        }
        let largest = 127.4f32.to_bits();
        (0..largest).step_by(4099).map(f32::from_bits).for_each(|v| {
            same(v);
            same(-v);
        });
    }

    /// Tests that the order of equal magnitudes decides the sign of the scale; also zeros, subnormals and the largest
    /// values.
    #[test]
    fn extremes_of_a_block_are_found_in_any_place() {
        let signs = |seed: u32, i: u32| if seed.wrapping_mul(0x9e37_79b9) >> i & 1 == 1 { -1.0 } else { 1.0 };
        for seed in 0..2000 {
            for level in [0.0, 1e-45, 3e-39, 1.0, f32::MAX] {
                let x: [f32; 32] = std::array::from_fn(|i| {
                    let i = i as u32;
                    let part = if (seed + i).is_multiple_of(5) { 1.0 } else { 0.5 };
                    signs(seed, i) * level * part
                });
                let (found, expected) = (signed_amax_of_block(&x), signed_amax(&x));
                assert_eq!(found.to_bits(), expected.to_bits(), "{x:?}");
                let (mut block, mut expected) = ([0; 18], [0; 18]);
                encode_q4_0(&x, &mut block);
                encode_signed(&x, &mut expected, 2, 8.0);
                assert_eq!(block, expected, "{x:?}");
            }
        }
    }

    /// Weighted squared errors of both encoders.
    fn errors(codec: &Codec, seed: u64) -> (f64, f64) {
        let at = |i: u64, stream: u64| {
            let bits = crate::round::random_u32(seed, i | stream << 32);
            bits as f32 / u32::MAX as f32
        };
        let x: [f32; 32] = std::array::from_fn(|i| (at(i as u64, 0) - 0.4) * (0.1 + at(i as u64, 1)));
        let w: [f32; 32] = std::array::from_fn(|i| at(i as u64, 2).powi(3));
        let error = |weights: Option<&[f32]>| {
            let (mut block, mut y) = (vec![0; codec.bytes], [0.0; 32]);
            codec.encode(&x, weights, &mut block);
            codec.decode_block(&block, &mut y);
            let square = |i: usize| f64::from(w[i]) * f64::from(x[i] - y[i]).powi(2);
            (0..32).map(square).sum()
        };
        (error(Some(&w)), error(None))
    }

    #[test]
    fn importance_lowers_the_error_that_it_weighs() {
        for codec in [&Q4_0, &Q4_1, &Q5_0, &Q5_1] {
            let (mut weighed, mut formula) = (0.0, 0.0);
            for seed in 0..200 {
                let (a, b) = errors(codec, seed);
                assert!(a <= b * 1.0001, "{} of {seed}: {a} {b}", codec.name);
                (weighed, formula) = (weighed + a, formula + b);
            }
            assert!(weighed < 0.85 * formula, "{}: {weighed} {formula}", codec.name);
        }
    }
}

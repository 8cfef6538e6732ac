//! One scale per block of 32: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q8_1; and Q1_0, signs with one scale per 128.
//!
//! `d` and `m` are f16. Elements of the 4- and 5-bit types are half-split: byte `j` holds element `j` (low nibble) and
//! element `j + 16` (high nibble). Type 0 decodes `(q - 2^(b-1))·d` with `d` signed, type 1 decodes `q·d + m`.

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
/// `d | 16 bytes of nibbles`.
pub(super) const Q4_0: Codec = Codec {
    id: CodecId::Q4_0,
    name: "q4_0",
    elements: 32,
    bytes: 18,
    decode: decode_q4_0,
    encode: Encode::Formula(encode_q4_0),
};
/// `d | m | 16 bytes of nibbles`.
pub(super) const Q4_1: Codec = Codec {
    id: CodecId::Q4_1,
    name: "q4_1",
    elements: 32,
    bytes: 20,
    decode: decode_q4_1,
    encode: Encode::Formula(encode_q4_1),
};
/// `d | 32 high bits | 16 bytes of nibbles`.
pub(super) const Q5_0: Codec = Codec {
    id: CodecId::Q5_0,
    name: "q5_0",
    elements: 32,
    bytes: 22,
    decode: decode_q5_0,
    encode: Encode::Formula(encode_q5_0),
};
/// `d | m | 32 high bits | 16 bytes of nibbles`.
pub(super) const Q5_1: Codec = Codec {
    id: CodecId::Q5_1,
    name: "q5_1",
    elements: 32,
    bytes: 24,
    decode: decode_q5_1,
    encode: Encode::Formula(encode_q5_1),
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

/// The unsigned element codes of a half-split block: nibbles from `nibbles` on, joined by `high` bits.
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

fn decode_q4_0(block: &[u8], out: &mut [f32]) {
    let d = f16_at(block, 0);
    half_split(block, 2, 0).for_each(|(i, q)| out[i] = (q - 8.0) * d);
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

fn decode_q8_0(block: &[u8], out: &mut [f32]) {
    let d = f16_at(block, 0);
    out.iter_mut().zip(&block[2..]).for_each(|(out, &q)| *out = f32::from(q as i8) * d);
}

fn decode_q8_1(block: &[u8], out: &mut [f32]) {
    let d = f16_at(block, 0);
    out.iter_mut().zip(&block[4..]).for_each(|(out, &q)| *out = f32::from(q as i8) * d);
}

fn encode_q4_0(x: &[f32], block: &mut [u8]) {
    encode_signed(x, block, 2, 8.0);
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

/// Maps the value of largest magnitude to code 0, `-half`, so that `d` takes the opposite sign of it.
fn encode_signed(x: &[f32], block: &mut [u8], nibbles: usize, half: f32) -> u32 {
    let d = signed_amax(x) / -half;
    put_f16(block, 0, d);
    let id = inverse(d);
    // The reference's casts of infinities give code 0 where the scale has no inverse.
    let bias = if id == 0.0 && d != 0.0 { 0.0 } else { half + 0.5 };
    // Truncation after adding a half and the bias; the cast saturates at 0 and the top is clamped.
    let code = |v: &f32| (*v * id + bias).min(2.0 * half - 1.0) as u8;
    put_half_split(block, nibbles, x.iter().map(code))
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

fn encode_q8_0(x: &[f32], block: &mut [u8]) {
    encode_bytes(x, block, 2);
}

fn encode_q8_1(x: &[f32], block: &mut [u8]) {
    let d = encode_bytes(x, block, 4);
    let sum: i32 = block[4..].iter().map(|&q| i32::from(q as i8)).sum();
    put_f16(block, 2, sum as f32 * d);
}

fn encode_bytes(x: &[f32], block: &mut [u8], at: usize) -> f32 {
    let d = amax(x) / 127.0;
    put_f16(block, 0, d);
    let id = inverse(d);
    for (v, out) in x.iter().zip(&mut block[at..]) {
        // `roundf`: half away from zero. The cast saturates.
        *out = (v * id).round() as i8 as u8;
    }
    d
}

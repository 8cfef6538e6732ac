//! E2M1 elements in GGUF's order: MXFP4 (32 with an E8M0 scale) and NVFP4 (four times 16 with an unsigned E4M3
//! scale).
//!
//! Nibbles are half-split within a scale's elements. As in ggml, scales decode to half their value and elements to
//! twice theirs. That changes results only for the smallest and largest scale: MXFP4's byte 255 is the finite 2^128.

use super::{Codec, CodecId, Encode, amax};
use crate::e8m0;
use crate::minifloat::{E4M3, pow2};

/// `scale | 16 bytes of nibbles`.
pub(super) const MXFP4: Codec = Codec {
    id: CodecId::Mxfp4,
    name: "gguf-mxfp4",
    elements: 32,
    bytes: 17,
    decode: decode_mxfp4,
    encode: Encode::Formula(encode_mxfp4),
};
/// `4 scales | 32 bytes of nibbles`.
pub(super) const NVFP4: Codec = Codec {
    id: CodecId::Nvfp4,
    name: "gguf-nvfp4",
    elements: 64,
    bytes: 36,
    decode: decode_nvfp4,
    encode: Encode::Formula(encode_nvfp4),
};

/// Twice the E2M1 values; index = code.
pub(super) const DOUBLED: [f32; 16] =
    [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0];

fn decode_mxfp4(block: &[u8], out: &mut [f32]) {
    put_elements(&block[1..], half_e8m0(block[0]), out);
}

fn decode_nvfp4(block: &[u8], out: &mut [f32]) {
    for (sub, out) in out.chunks_exact_mut(16).enumerate() {
        put_elements(&block[4 + 8 * sub..][..8], half_ue4m3(block[sub]), out);
    }
}

fn encode_mxfp4(x: &[f32], block: &mut [u8]) {
    block[0] = mxfp4_scale(amax(x));
    encode_elements(x, half_e8m0(block[0]), &mut block[1..]);
}

fn encode_nvfp4(x: &[f32], block: &mut [u8]) {
    for (sub, x) in x.chunks_exact(16).enumerate() {
        block[sub] = ue4m3(amax(x) / 6.0);
        encode_elements(x, half_ue4m3(block[sub]), &mut block[4 + 8 * sub..][..8]);
    }
}

fn put_elements(nibbles: &[u8], scale: f32, out: &mut [f32]) {
    let (low, high) = out.split_at_mut(nibbles.len());
    for ((byte, low), high) in nibbles.iter().zip(low).zip(high) {
        *low = DOUBLED[usize::from(byte & 15)] * scale;
        *high = DOUBLED[usize::from(byte >> 4)] * scale;
    }
}

fn encode_elements(x: &[f32], scale: f32, nibbles: &mut [u8]) {
    let (low, high) = x.split_at(nibbles.len());
    for ((low, high), out) in low.iter().zip(high).zip(nibbles) {
        *out = nearest(*low, scale) | nearest(*high, scale) << 4;
    }
}

/// Code with the scaled value nearest to `x`, the first among equals: ties go to the smaller magnitude.
fn nearest(x: f32, scale: f32) -> u8 {
    let error = |code: u8| (DOUBLED[usize::from(code)] * scale - x).abs();
    (1..16).fold(0, |best, code| if error(code) < error(best) { code } else { best })
}

/// Half of `2^(code-127)`; every code is a number.
pub(super) fn half_e8m0(code: u8) -> f32 {
    pow2(i32::from(code) - 128) as f32
}

/// Code of `2^(floor(log2 amax) - 2)`, 0 for zero. The reference takes an f32 logarithm, which just below a power of
/// two rounds up to it. If its byte would wrap around (amax below 2^-125), this is clamped to 0.
fn mxfp4_scale(amax: f32) -> u8 {
    let Some(floor) = e8m0::floor_log2(amax) else { return 0 };
    // log2(2 - e) = 1 - e/(2 ln 2) to far below an f32 ulp, for every e that matters.
    let missing = (2.0 - f64::from(amax) / pow2(floor)) / 2.0 * std::f64::consts::LOG2_E;
    let next = floor + 1;
    let rounded = (f64::from(next) - missing.min(0.5)) as f32;
    let exponent = if rounded == next as f32 { next } else { floor };
    e8m0::from_exponent(exponent - 2)
}

/// Half the value of an unsigned E4M3 byte. As in the reference, the sign bit is ignored and 0x7f (NaN elsewhere) is
/// 0.
pub(super) fn half_ue4m3(code: u8) -> f32 {
    let (field, fraction) = (i32::from(code >> 3 & 15), f64::from(code & 7));
    let raw = match (code, field) {
        (0x7f, _) => 0.0,
        (_, 0) => fraction * pow2(-9),
        _ => (8.0 + fraction) * pow2(field - 10),
    };
    (raw * 0.5) as f32
}

/// Nearest unsigned E4M3 code of `x >= 0`, ties up, as in ggml; from 2^8 on the largest finite code.
fn ue4m3(x: f32) -> u8 {
    const LARGEST: u32 = 0x7e;
    if x < E4M3.min_normal() {
        return (x * 512.0 + 0.5).min(7.0) as u8;
    }
    // Bias 127 becomes 7, and three fraction bits stay, rounded by the fourth.
    let bits = x.to_bits() - (120 << 23);
    let code = (bits >> 20) + (bits >> 19 & 1);
    (if code >= 15 << 3 { LARGEST } else { code }) as u8
}

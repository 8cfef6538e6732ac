//! Ternary super-blocks of 256 with one f16 scale, the block's amax: TQ1_0 (five trits a byte) and TQ2_0 (two bits each).

use super::{Codec, CodecId, Encode, amax, f16_at, inverse, put_f16};

/// `48 bytes of five trits | 4 bytes of four trits | d`.
pub(super) const TQ1_0: Codec = Codec {
    id: CodecId::Tq1_0,
    name: "tq1_0",
    elements: 256,
    bytes: 54,
    decode: decode_tq1_0,
    encode: Encode::Formula(encode_tq1_0),
};
/// `64 bytes of four 2-bit codes | d`.
pub(super) const TQ2_0: Codec = Codec {
    id: CodecId::Tq2_0,
    name: "tq2_0",
    elements: 256,
    bytes: 66,
    decode: decode_tq2_0,
    encode: Encode::Formula(encode_tq2_0),
};

/// Runs of bytes as (first byte, bytes, trits per byte): trit `n` of byte `m` of a run is its element `n·bytes + m`.
const RUNS: [(usize, usize, usize); 3] = [(0, 32, 5), (32, 16, 5), (48, 4, 4)];

/// Calls `f` with each element's index, byte and trit position.
fn for_each_trit(mut f: impl FnMut(usize, usize, usize)) {
    let mut element = 0;
    for (first, bytes, trits) in RUNS {
        for trit in 0..trits {
            for byte in first..first + bytes {
                f(element, byte, trit);
                element += 1;
            }
        }
    }
}

/// A byte is a fraction of 256 with the trits as base-3 digits: multiplying by 3 moves the next digit above the
/// point.
fn decode_tq1_0(block: &[u8], out: &mut [f32]) {
    const POWERS: [u8; 5] = [1, 3, 9, 27, 81];
    let d = f16_at(block, 52);
    for_each_trit(|element, byte, trit| {
        let rest = block[byte].wrapping_mul(POWERS[trit]);
        let digit = (u16::from(rest) * 3) >> 8;
        out[element] = (f32::from(digit) - 1.0) * d;
    });
}

fn encode_tq1_0(x: &[f32], block: &mut [u8]) {
    let id = put_scale(x, block, 52);
    let mut digits = [0u16; 52];
    for_each_trit(|element, byte, _| digits[byte] = digits[byte] * 3 + trit(x[element], id));
    // The last run holds four trits; the fifth digit is zero.
    digits[48..].iter_mut().for_each(|d| *d *= 3);
    for (out, d) in block.iter_mut().zip(digits) {
        // Rounded up, so that truncation in the decoder gives the digits back.
        *out = (d * 256).div_ceil(243) as u8;
    }
}

fn decode_tq2_0(block: &[u8], out: &mut [f32]) {
    let d = f16_at(block, 64);
    for (i, out) in out.iter_mut().enumerate() {
        let (byte, shift) = tq2_place(i);
        *out = (f32::from(block[byte] >> shift & 3) - 1.0) * d;
    }
}

fn encode_tq2_0(x: &[f32], block: &mut [u8]) {
    let id = put_scale(x, block, 64);
    block[..64].fill(0);
    for (i, &v) in x.iter().enumerate() {
        let (byte, shift) = tq2_place(i);
        block[byte] |= (trit(v, id) as u8) << shift;
    }
}

/// Byte and shift of element `i`: four shifts over 32 bytes, then the next 32 bytes.
fn tq2_place(i: usize) -> (usize, usize) {
    (i / 128 * 32 + i % 32, i % 128 / 32 * 2)
}

fn put_scale(x: &[f32], block: &mut [u8], at: usize) -> f32 {
    let d = amax(x);
    put_f16(block, at, d);
    inverse(d)
}

/// 0, 1 or 2 for -1, 0 and 1; halves away from zero.
fn trit(v: f32, inverse: f32) -> u16 {
    ((v * inverse).round().clamp(-1.0, 1.0) + 1.0) as u16
}

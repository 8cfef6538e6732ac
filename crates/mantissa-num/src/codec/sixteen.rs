//! Q4_0 and Q8_0 by their formulas, sixteen blocks at a time: a lane per block for scales, their inverses and f16
//! bits, a lane per element for codes. The bytes equal [`legacy`](super::legacy)'s.

use super::legacy::BELOW_HALF;
use super::{CodecId, signed_amax};
use crate::lanes::{LANES, Lanes};

/// Elements of a block.
const BLOCK: usize = 2 * LANES;

type Elements = [[f32; BLOCK]; LANES];

/// Encodes multiples of sixteen blocks; returns the rest, or everything for other codecs.
#[inline(always)]
pub(super) fn encode<'x, 'b, L: Lanes>(
    l: L,
    codec: CodecId,
    x: &'x [f32],
    blocks: &'b mut [u8],
) -> (&'x [f32], &'b mut [u8]) {
    match codec {
        CodecId::Q4_0 => each::<L, 18>(l, q4_0, x, blocks),
        CodecId::Q8_0 => each::<L, 34>(l, q8_0, x, blocks),
        _ => (x, blocks),
    }
}

#[inline(always)]
fn each<'x, 'b, L: Lanes, const BYTES: usize>(
    l: L,
    encode: impl Fn(L, &Elements, &mut [[u8; BYTES]; LANES]),
    x: &'x [f32],
    blocks: &'b mut [u8],
) -> (&'x [f32], &'b mut [u8]) {
    let n = (x.len() / (LANES * BLOCK)).min(blocks.len() / (LANES * BYTES));
    let (x, x_rest) = x.split_at(n * LANES * BLOCK);
    let (blocks, rest) = blocks.split_at_mut(n * LANES * BYTES);
    let x = x.as_chunks::<BLOCK>().0.as_chunks::<LANES>().0;
    let blocks = blocks.as_chunks_mut::<BYTES>().0.as_chunks_mut::<LANES>().0;
    for (x, blocks) in x.iter().zip(blocks) {
        encode(l, x, blocks);
    }
    (x_rest, rest)
}

/// The two halves of a block.
#[inline(always)]
fn halves<L: Lanes>(l: L, x: &[f32; BLOCK]) -> [L::V; 2] {
    let halves = x.as_chunks::<LANES>().0;
    [l.load(&halves[0]), l.load(&halves[1])]
}

/// Like [`super::inverse`].
#[inline(always)]
fn inverse<L: Lanes>(l: L, d: L::V) -> L::V {
    let inverse = l.div(l.splat(1.0), d);
    l.if_less(l.abs(inverse), l.splat(f32::INFINITY), inverse, l.splat(0.0))
}

#[inline(always)]
fn q8_0<L: Lanes>(l: L, x: &Elements, blocks: &mut [[u8; 34]; LANES]) {
    let (zero, up, down) = (l.splat(0.0), l.splat(BELOW_HALF), l.splat(-BELOW_HALF));
    let mut amax = [0.0; LANES];
    for (amax, x) in amax.iter_mut().zip(x) {
        let [a, b] = halves(l, x);
        *amax = l.greatest(l.greater(l.abs(a), l.abs(b)));
    }
    let d = l.div(l.load(&amax), l.splat(127.0));
    let (bits, ids) = (l.halves(d), l.to_array(inverse(l, d)));
    for (i, block) in blocks.iter_mut().enumerate() {
        block[..2].copy_from_slice(&bits[i].to_le_bytes());
        let id = l.splat(ids[i]);
        let [a, b] = halves(l, &x[i]);
        let codes = block[2..].as_chunks_mut::<LANES>().0;
        // Round half away from zero.
        for (v, codes) in [l.mul(a, id), l.mul(b, id)].into_iter().zip(codes) {
            *codes = l.bytes(l.add(v, l.if_less(v, zero, down, up)));
        }
    }
}

#[inline(always)]
fn q4_0<L: Lanes>(l: L, x: &Elements, blocks: &mut [[u8; 18]; LANES]) {
    let (zero, top, shift) = (l.splat(0.0), l.splat(15.0), l.splat(16.0));
    let extremes = signed_extremes(l, x);
    let d = l.div(extremes, l.splat(-8.0));
    let id = inverse(l, d);
    // The reference's casts of infinities give code 0 if the scale has no inverse.
    let without = l.if_less(zero, l.abs(d), zero, l.splat(8.5));
    let bias = l.if_less(zero, l.abs(id), l.splat(8.5), without);
    let (bits, ids, biases) = (l.halves(d), l.to_array(id), l.to_array(bias));
    for (i, block) in blocks.iter_mut().enumerate() {
        block[..2].copy_from_slice(&bits[i].to_le_bytes());
        let (id, bias) = (l.splat(ids[i]), l.splat(biases[i]));
        let [a, b] = halves(l, &x[i]);
        let low = l.trunc(l.lesser(top, l.add(l.mul(a, id), bias)));
        let high = l.trunc(l.lesser(top, l.add(l.mul(b, id), bias)));
        block[2..].copy_from_slice(&l.bytes(l.add(l.mul(high, shift), low)));
    }
}

/// [`signed_amax`] of each block: smallest and largest, comparing positions only if they are opposites.
#[inline(always)]
fn signed_extremes<L: Lanes>(l: L, x: &Elements) -> L::V {
    let (mut low, mut high) = ([0.0; LANES], [0.0; LANES]);
    for (i, x) in x.iter().enumerate() {
        let [a, b] = halves(l, x);
        low[i] = l.least(l.lesser(a, b)).1;
        high[i] = l.greatest(l.greater(a, b));
    }
    let below = l.sub(l.splat(0.0), l.load(&low));
    let mut extremes = l.to_array(l.if_less(below, l.load(&high), l.load(&high), l.load(&low)));
    for i in 0..LANES {
        if high[i] == -low[i] {
            extremes[i] = signed_amax(&x[i]);
        }
    }
    l.load(&extremes)
}

#[cfg(test)]
mod tests {
    use super::super::legacy;
    use super::*;
    use crate::lanes::Portable;

    /// Tests signs and positions of equal magnitudes, zeros of both signs, subnormals, ties and the largest values,
    /// block by block.
    #[test]
    fn sixteen_blocks_have_the_bytes_of_each() {
        let levels = [0.0, -0.0, 1e-45, 3e-39, 1e-7, 0.02, 1.0, 6e4, 1e30, f32::MAX];
        let value = |i: usize| {
            let random = crate::round::random_u32(3, i as u64);
            let part = [1.0, 0.5, 0.25, random as f32 / u32::MAX as f32][random as usize >> 8 & 3];
            let signed = if random & 1 == 1 { -part } else { part };
            levels[i / BLOCK % levels.len()] * signed
        };
        let x: Vec<f32> = (0..70 * BLOCK).map(value).collect();
        let same = |codec: CodecId, one: fn(&[f32], &mut [u8])| {
            let bytes = codec.codec().bytes;
            let mut found = vec![0; 70 * bytes];
            let (rest, left) = encode(Portable, codec, &x, &mut found);
            assert_eq!((rest.len(), left.len()), (6 * BLOCK, 6 * bytes));
            for (i, (x, block)) in x.chunks(BLOCK).zip(found.chunks(bytes)).take(64).enumerate() {
                let mut expected = vec![0; bytes];
                one(x, &mut expected);
                assert_eq!(block, expected, "{codec:?}, block {i}: {x:?}");
            }
        };
        same(CodecId::Q4_0, legacy::encode_q4_0);
        same(CodecId::Q8_0, legacy::encode_q8_0);
        let mut short = [0; 34 * 20];
        assert_eq!(encode(Portable, CodecId::Q8_0, &x, &mut short).1.len(), 34 * 4);
    }
}

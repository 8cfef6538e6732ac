//! Weighted sums of a tile of values.

use super::layout::{TILE_TOKENS, Tile, TileFormat};
use super::scores::{
    Bf16Elements, E4m3Elements, Elements, F16Elements, F32Elements, ahead, load, store, with_rows,
};
use super::simd::{LANES, ROUND, TileSimd};
use super::softmax::{Softmax, Visible};

/// Registers of a row that are summed together at levels with 32 registers.
const WIDTH: usize = 4;

/// Largest weight as an integer: 15 bits and a sign.
const LARGEST: f32 = 32_767.0;

/// Adds the values of the visible tokens, times their weights, to the sums of all queries. Prefetches `next`.
#[inline(always)]
pub(super) fn sum<S: TileSimd>(
    simd: S,
    values: Tile<'_>,
    next: &[u8],
    dims: usize,
    visible: &[Visible],
    state: &mut Softmax,
) {
    // Hidden tokens at the end of the tile may hold anything; none is read beyond the last visible one.
    let tokens = visible.iter().map(|range| usize::from(range.to)).max().unwrap_or(0);
    let (codes, sides) = values.bytes.split_at(values.format.code_bytes(dims));
    match values.format {
        TileFormat::F32 => floats(simd, F32Elements, codes, next, dims, tokens, state),
        TileFormat::F16 => floats(simd, F16Elements, codes, next, dims, tokens, state),
        TileFormat::Bf16 => floats(simd, Bf16Elements, codes, next, dims, tokens, state),
        TileFormat::Fp8E4m3 => {
            let rows = state.weights.chunks_exact_mut(TILE_TOKENS);
            // Elements are read as 2^-8 of their value.
            rows.for_each(|row| by_token(simd, sides, 256.0, row));
            floats(simd, E4m3Elements, codes, next, dims, tokens, state);
        }
        TileFormat::Int8 => integers::<S, false>(simd, codes, sides, next, dims, tokens, visible, state),
        TileFormat::Int4 => integers::<S, true>(simd, codes, sides, next, dims, tokens, visible, state),
    }
}

/// Multiplies the weights of a query by the scales of their tokens; a weight of 0 stays 0.
#[inline(always)]
fn by_token<S: TileSimd>(simd: S, scales: &[u8], factor: f32, row: &mut [f32]) {
    for (strip, scales) in row.chunks_exact_mut(LANES).zip(scales.chunks_exact(4 * LANES)) {
        let scales = simd.mul(F32Elements.load(simd, scales), simd.splat(factor));
        let scaled = simd.mul(load(simd, strip), scales);
        store(simd, scaled, strip);
    }
}

#[inline(always)]
fn floats<S: TileSimd, E: Elements>(
    simd: S,
    element: E,
    codes: &[u8],
    mut next: &[u8],
    dims: usize,
    tokens: usize,
    state: &mut Softmax,
) {
    let rows = state.weights.chunks(4 * TILE_TOKENS).zip(state.acc.chunks_mut(4 * dims));
    for (weights, acc) in rows {
        with_rows!(acc.len() / dims, N => {
            let mut dim = 0;
            while S::WIDE && dim + WIDTH * LANES <= dims {
                float_rows::<S, E, N, WIDTH>(simd, element, weights, codes, next, dims, dim, tokens, acc);
                dim += WIDTH * LANES;
            }
            while dim < dims {
                float_rows::<S, E, N, 1>(simd, element, weights, codes, next, dims, dim, tokens, acc);
                dim += LANES;
            }
        });
        next = &[];
    }
}

/// `N` queries, `W` registers of dims from `dim` on.
#[inline(always)]
fn float_rows<S: TileSimd, E: Elements, const N: usize, const W: usize>(
    simd: S,
    element: E,
    weights: &[f32],
    codes: &[u8],
    next: &[u8],
    dims: usize,
    dim: usize,
    tokens: usize,
    acc: &mut [f32],
) {
    let weights: [&[f32]; N] = std::array::from_fn(|n| &weights[n * TILE_TOKENS..][..TILE_TOKENS]);
    let mut sums = [[simd.splat(0.0); W]; N];
    for (token, line) in codes.chunks_exact(dims * E::BYTES).enumerate().take(tokens.min(TILE_TOKENS)) {
        ahead(simd, next, (token * dims + dim) * E::BYTES, W * LANES * E::BYTES);
        let line = &line[dim * E::BYTES..][..W * LANES * E::BYTES];
        let mut values = [simd.splat(0.0); W];
        for w in 0..W {
            values[w] = element.load(simd, &line[w * LANES * E::BYTES..][..LANES * E::BYTES]);
        }
        for n in 0..N {
            let x = simd.splat(weights[n][token]);
            for w in 0..W {
                sums[n][w] = simd.mul_add(values[w], x, sums[n][w]);
            }
        }
    }
    // A copy, so that the loop above has the sums in registers, though this one indexes them.
    let sums = sums;
    for n in 0..N {
        for w in 0..W {
            let acc = &mut acc[n * dims + dim + w * LANES..][..LANES];
            let added = simd.add(load(simd, acc), sums[n][w]);
            store(simd, added, acc);
        }
    }
}

/// Integer products: weights times scales are rounded to 15 bits of the tile's largest weight times its largest scale,
/// which errs by at most 2^-16 of that; sums of codes times integers are exact.
#[inline(always)]
fn integers<S: TileSimd, const NIBBLES: bool>(
    simd: S,
    codes: &[u8],
    sides: &[u8],
    mut next: &[u8],
    dims: usize,
    tokens: usize,
    visible: &[Visible],
    state: &mut Softmax,
) {
    let (scales, zeros) = sides.split_at(4 * TILE_TOKENS);
    let whole = largest_of(simd, scales);
    let rows = state.weights.chunks_mut(4 * TILE_TOKENS).zip(state.acc.chunks_mut(4 * dims));
    for (((weights, acc), tops), visible) in rows.zip(state.top.chunks(4)).zip(visible.chunks(4)) {
        let mut pairs = [[0; TILE_TOKENS / 2]; 4];
        let (mut steps, mut offsets) = ([0.0; 4], [0; 4]);
        for (n, row) in weights.chunks_exact_mut(TILE_TOKENS).enumerate() {
            let largest = tops[n] * largest_scale(visible[n], whole, scales);
            (steps[n], offsets[n]) =
                integer_weights(simd, row, largest, scales, zeros, NIBBLES, &mut pairs[n]);
        }
        with_rows!(acc.len() / dims, N => {
            let mut dim = 0;
            while S::WIDE && dim + WIDTH * LANES <= dims {
                integer_rows::<S, NIBBLES, N, WIDTH>(simd, &pairs, &steps, &offsets, codes, next, dims, dim, tokens, acc);
                dim += WIDTH * LANES;
            }
            while dim < dims {
                integer_rows::<S, NIBBLES, N, 1>(simd, &pairs, &steps, &offsets, codes, next, dims, dim, tokens, acc);
                dim += LANES;
            }
        });
        next = &[];
    }
}

/// Largest scale of a tile.
#[inline(always)]
fn largest_of<S: TileSimd>(simd: S, scales: &[u8]) -> f32 {
    let mut largest = simd.splat(0.0);
    for scales in scales.chunks_exact(4 * LANES) {
        largest = simd.greater(largest, F32Elements.load(simd, scales));
    }
    simd.max_lane(largest)
}

/// Largest scale of the visible tokens; `whole` is the largest of all tokens. Others may hold anything.
#[inline(always)]
fn largest_scale(visible: Visible, whole: f32, scales: &[u8]) -> f32 {
    let (from, to) = (usize::from(visible.from), usize::from(visible.to));
    if to - from.min(to) == TILE_TOKENS {
        return whole;
    }
    let scales = scales.as_chunks::<4>().0.iter().take(to).skip(from);
    scales.fold(0.0, |largest: f32, scale| largest.max(f32::from_le_bytes(*scale)))
}

/// Rounds weights times scales, at most `largest`, to pairs of i16; returns their step, and the sum of integers times
/// zero points.
#[inline(always)]
fn integer_weights<S: TileSimd>(
    simd: S,
    row: &[f32],
    largest: f32,
    scales: &[u8],
    zeros: &[u8],
    nibbles: bool,
    pairs: &mut [i32; TILE_TOKENS / 2],
) -> (f32, i32) {
    // Too small a weight to divide by counts as none; a NaN or an infinity shows through the step.
    let inverse = simd.splat(if largest > 1e-30 { LARGEST / largest } else { 0.0 });
    let mut words = [0i16; TILE_TOKENS];
    let rows = row.chunks_exact(LANES).zip(scales.chunks_exact(4 * LANES));
    for (words, (row, scales)) in words.chunks_exact_mut(LANES).zip(rows) {
        let mut rounded = [0.0; LANES];
        let scaled = simd.mul(load(simd, row), F32Elements.load(simd, scales));
        simd.store(simd.mul_add(scaled, inverse, simd.splat(ROUND)), &mut rounded);
        words.iter_mut().zip(rounded).for_each(|(word, x)| *word = x.to_bits() as i16);
    }
    let mut offset = 0i32;
    if nibbles {
        for (word, zero) in words.iter().zip(zeros) {
            // 64 products below 2^19: wrapping only spares the check.
            offset = offset.wrapping_add(i32::from(*word).wrapping_mul(i32::from(*zero)));
        }
    }
    for (pair, words) in pairs.iter_mut().zip(words.as_chunks::<2>().0) {
        *pair = i32::from(words[0] as u16) | i32::from(words[1]) << 16;
    }
    (largest / LARGEST, offset)
}

#[inline(always)]
fn integer_rows<S: TileSimd, const NIBBLES: bool, const N: usize, const W: usize>(
    simd: S,
    pairs: &[[i32; TILE_TOKENS / 2]; 4],
    steps: &[f32; 4],
    offsets: &[i32; 4],
    codes: &[u8],
    next: &[u8],
    dims: usize,
    dim: usize,
    tokens: usize,
    acc: &mut [f32],
) {
    let mut sums = [[simd.zero(); W]; N];
    if NIBBLES {
        for (eight, lines) in codes.chunks_exact(4 * dims).enumerate().take(tokens.div_ceil(8)) {
            ahead(simd, next, 4 * (eight * dims + dim), W * 4 * LANES);
            let lines = &lines[4 * dim..][..W * 4 * LANES];
            let mut lines_of = [simd.bytes(&[0; 64]); W];
            for (bytes, line) in lines_of.iter_mut().zip(lines.as_chunks().0) {
                *bytes = simd.bytes(line);
            }
            let lines = lines_of;
            nibble_pairs::<S, 0, N, W>(simd, &lines, pairs, 4 * eight, &mut sums);
            nibble_pairs::<S, 1, N, W>(simd, &lines, pairs, 4 * eight + 1, &mut sums);
            nibble_pairs::<S, 2, N, W>(simd, &lines, pairs, 4 * eight + 2, &mut sums);
            nibble_pairs::<S, 3, N, W>(simd, &lines, pairs, 4 * eight + 3, &mut sums);
        }
    } else {
        for (pair, lines) in codes.chunks_exact(2 * dims).enumerate().take(tokens.div_ceil(2)) {
            ahead(simd, next, 2 * (pair * dims + dim), W * 2 * LANES);
            let lines = &lines[2 * dim..][..W * 2 * LANES];
            let mut words = [simd.words(&[0; 32]); W];
            for (words, bytes) in words.iter_mut().zip(lines.as_chunks().0) {
                *words = simd.words(bytes);
            }
            for n in 0..N {
                for w in 0..W {
                    sums[n][w] = simd.dot_words(sums[n][w], words[w], pairs[n][pair]);
                }
            }
        }
    }
    let sums = sums;
    for n in 0..N {
        let step = simd.splat(steps[n]);
        for w in 0..W {
            let at = &mut acc[n * dims + dim + w * LANES..][..LANES];
            let sum = simd.to_f32(simd.minus(sums[n][w], offsets[n]));
            let added = simd.mul_add(sum, step, load(simd, at));
            store(simd, added, at);
        }
    }
}

/// Adds the products of nibble `I` of each word: a pair of tokens with the weights `pair`.
#[inline(always)]
fn nibble_pairs<S: TileSimd, const I: u32, const N: usize, const W: usize>(
    simd: S,
    lines: &[S::Bytes; W],
    pairs: &[[i32; TILE_TOKENS / 2]; 4],
    pair: usize,
    sums: &mut [[S::I32; W]; N],
) {
    for w in 0..W {
        let words = simd.nibble_words::<I>(lines[w]);
        for n in 0..N {
            sums[n][w] = simd.dot_words(sums[n][w], words, pairs[n][pair]);
        }
    }
}

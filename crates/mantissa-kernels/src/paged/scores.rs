//! Scores of queries against a tile of keys.

use super::layout::{TILE_TOKENS, Tile, TileFormat};
use super::queries::{Queries, RADIX};
use super::simd::{LANES, TileSimd};

/// Strips of 16 tokens of a tile.
const STRIPS: usize = TILE_TOKENS / LANES;

/// Reads 16 stored floats.
pub(super) trait Elements: Copy {
    /// Bytes of an element.
    const BYTES: usize;

    fn load<S: TileSimd>(self, simd: S, x: &[u8]) -> S::F32;
}

/// Declares the formats of floats.
macro_rules! elements {
    ($($name:ident: $bytes:literal, $load:ident;)*) => { $(
        #[derive(Clone, Copy)]
        pub(super) struct $name;

        impl Elements for $name {
            const BYTES: usize = $bytes;

            #[inline(always)]
            fn load<S: TileSimd>(self, simd: S, x: &[u8]) -> S::F32 {
                match x.first_chunk() {
                    Some(x) => simd.$load(x),
                    None => simd.splat(0.0),
                }
            }
        }
    )* };
}

elements! {
    F32Elements: 4, f32;
    F16Elements: 2, f16;
    Bf16Elements: 2, bf16;
    E4m3Elements: 1, e4m3;
}

/// Runs `$body` with the constant `$n` equal to `$count` (1 to 4).
macro_rules! with_rows {
    ($count:expr, $n:ident => $body:expr) => {
        match $count {
            1 => {
                const $n: usize = 1;
                $body
            }
            2 => {
                const $n: usize = 2;
                $body
            }
            3 => {
                const $n: usize = 3;
                $body
            }
            _ => {
                const $n: usize = 4;
                $body
            }
        }
    };
}
pub(super) use with_rows;

/// Writes the scores of all queries, `[rows][64]`, of which only the visible tokens' have a meaning. Prefetches
/// `next`.
#[inline(always)]
pub(super) fn scores<S: TileSimd>(simd: S, q: &Queries, keys: Tile<'_>, next: &[u8], out: &mut [f32]) {
    let dims = q.dims;
    let (codes, sides) = keys.bytes.split_at(keys.format.code_bytes(dims));
    match keys.format {
        TileFormat::F32 => floats(simd, F32Elements, q, codes, next, out),
        TileFormat::F16 => floats(simd, F16Elements, q, codes, next, out),
        TileFormat::Bf16 => floats(simd, Bf16Elements, q, codes, next, out),
        TileFormat::Fp8E4m3 => {
            floats(simd, E4m3Elements, q, codes, next, out);
            // Elements are read as 2^-8 of their value.
            scale_by_token(simd, sides, 256.0, out);
        }
        TileFormat::Int8 => int8(simd, q, codes, sides, next, out),
        TileFormat::Int4 => int4(simd, q, codes, sides, next, out),
    }
}

#[inline(always)]
fn floats<S: TileSimd, E: Elements>(
    simd: S,
    element: E,
    q: &Queries,
    codes: &[u8],
    mut next: &[u8],
    out: &mut [f32],
) {
    let rows = q.values.chunks(4 * q.dims).zip(out.chunks_mut(4 * TILE_TOKENS));
    for (q_rows, out) in rows {
        with_rows!(out.len() / TILE_TOKENS, N => match S::WIDE {
            true => float_rows::<S, E, N, STRIPS>(simd, element, q_rows, q.dims, codes, next, out),
            false => float_rows::<S, E, N, 1>(simd, element, q_rows, q.dims, codes, next, out),
        });
        next = &[];
    }
}

/// `N` queries, `W` strips of tokens at a time.
#[inline(always)]
fn float_rows<S: TileSimd, E: Elements, const N: usize, const W: usize>(
    simd: S,
    element: E,
    q: &[f32],
    dims: usize,
    codes: &[u8],
    next: &[u8],
    out: &mut [f32],
) {
    let q: [&[f32]; N] = std::array::from_fn(|n| &q[n * dims..][..dims]);
    for strip in (0..STRIPS).step_by(W) {
        let mut sums = [[simd.splat(0.0); W]; N];
        for (dim, line) in codes.chunks_exact(TILE_TOKENS * E::BYTES).enumerate().take(dims) {
            ahead(simd, next, (dim * TILE_TOKENS + strip * LANES) * E::BYTES, W * LANES * E::BYTES);
            let line = &line[strip * LANES * E::BYTES..][..W * LANES * E::BYTES];
            let mut keys = [simd.splat(0.0); W];
            for w in 0..W {
                keys[w] = element.load(simd, &line[w * LANES * E::BYTES..][..LANES * E::BYTES]);
            }
            for n in 0..N {
                let x = simd.splat(q[n][dim]);
                for w in 0..W {
                    sums[n][w] = simd.mul_add(keys[w], x, sums[n][w]);
                }
            }
        }
        // A copy, so that the loop above has the sums in registers, though this one indexes them.
        let sums = sums;
        for n in 0..N {
            for w in 0..W {
                store(simd, sums[n][w], &mut out[n * TILE_TOKENS + (strip + w) * LANES..]);
            }
        }
    }
}

/// Prefetches `len` bytes of the next tile, as many as have just been read of this one.
#[inline(always)]
pub(super) fn ahead<S: TileSimd>(simd: S, next: &[u8], at: usize, len: usize) {
    if let Some(bytes) = next.get(at..at + len) {
        simd.prefetch(bytes);
    }
}

#[inline(always)]
pub(super) fn load<S: TileSimd>(simd: S, x: &[f32]) -> S::F32 {
    match x.first_chunk() {
        Some(x) => simd.load(x),
        None => simd.splat(0.0),
    }
}

#[inline(always)]
pub(super) fn store<S: TileSimd>(simd: S, a: S::F32, x: &mut [f32]) {
    if let Some(x) = x.first_chunk_mut() {
        simd.store(a, x);
    }
}

/// Multiplies scores by the scale of their token and by `factor`.
#[inline(always)]
fn scale_by_token<S: TileSimd>(simd: S, sides: &[u8], factor: f32, out: &mut [f32]) {
    for row in out.chunks_exact_mut(TILE_TOKENS) {
        for (out, scales) in row.chunks_exact_mut(LANES).zip(sides.chunks_exact(4 * LANES)) {
            let scales = simd.mul(F32Elements.load(simd, scales), simd.splat(factor));
            let scaled = simd.mul(load(simd, out), scales);
            store(simd, scaled, out);
        }
    }
}

/// Integer sums of a line of 256 bytes of codes at a time: `N` rows of quads, `W` strips of tokens.
#[inline(always)]
fn quad_sums<S: TileSimd, const N: usize, const W: usize>(
    simd: S,
    q: [&[i32]; N],
    strip: usize,
    codes: &[u8],
    next: &[u8],
    nibbles: bool,
) -> [[S::I32; W]; N] {
    let mut sums = [[simd.zero(); W]; N];
    for (i, line) in codes.chunks_exact(4 * TILE_TOKENS).enumerate() {
        ahead(simd, next, i * 4 * TILE_TOKENS + strip * 4 * LANES, W * 4 * LANES);
        let line = &line[strip * 4 * LANES..][..W * 4 * LANES];
        let mut codes = [simd.bytes(&[0; 64]); W];
        for (codes, bytes) in codes.iter_mut().zip(line.as_chunks().0) {
            *codes = simd.bytes(bytes);
        }
        if nibbles {
            for w in 0..W {
                let (low, high) = (simd.low_nibbles(codes[w]), simd.high_nibbles(codes[w]));
                for n in 0..N {
                    sums[n][w] = simd.dot_nibbles(sums[n][w], low, q[n][2 * i]);
                    sums[n][w] = simd.dot_nibbles(sums[n][w], high, q[n][2 * i + 1]);
                }
            }
        } else {
            for n in 0..N {
                for w in 0..W {
                    sums[n][w] = simd.dot_codes(sums[n][w], codes[w], q[n][i]);
                }
            }
        }
    }
    sums
}

/// 8-bit codes with queries of two 8-bit digits: `(high * 254 + low) * scale`.
#[inline(always)]
fn int8<S: TileSimd>(simd: S, q: &Queries, codes: &[u8], sides: &[u8], mut next: &[u8], out: &mut [f32]) {
    for (first, out) in out.chunks_mut(4 * TILE_TOKENS).enumerate() {
        with_rows!(out.len() / TILE_TOKENS, N => match S::WIDE {
            true => int8_rows::<S, N, STRIPS>(simd, q, 4 * first, codes, sides, next, out),
            false => int8_rows::<S, N, 1>(simd, q, 4 * first, codes, sides, next, out),
        });
        next = &[];
    }
}

#[inline(always)]
fn int8_rows<S: TileSimd, const N: usize, const W: usize>(
    simd: S,
    q: &Queries,
    first: usize,
    codes: &[u8],
    sides: &[u8],
    next: &[u8],
    out: &mut [f32],
) {
    let quads = q.dims / 4;
    let high: [&[i32]; N] = std::array::from_fn(|n| &q.high[(first + n) * quads..][..quads]);
    let low: [&[i32]; N] = std::array::from_fn(|n| &q.low[(first + n) * quads..][..quads]);
    for strip in (0..STRIPS).step_by(W) {
        let sums = quad_sums::<S, N, W>(simd, high, strip, codes, next, false);
        for n in 0..N {
            for w in 0..W {
                let sum = simd.minus(sums[n][w], S::CODE_OFFSET * q.high_sums[first + n]);
                store(simd, simd.to_f32(sum), &mut out[n * TILE_TOKENS + (strip + w) * LANES..]);
            }
        }
        let sums = quad_sums::<S, N, W>(simd, low, strip, codes, &[], false);
        for n in 0..N {
            let scale = simd.splat(q.scales[first + n]);
            for w in 0..W {
                let out = &mut out[n * TILE_TOKENS + (strip + w) * LANES..][..LANES];
                let low = simd.to_f32(simd.minus(sums[n][w], S::CODE_OFFSET * q.low_sums[first + n]));
                let sum = simd.mul_add(load(simd, out), simd.splat(RADIX), low);
                let keys = F32Elements.load(simd, &sides[(strip + w) * 4 * LANES..]);
                store(simd, simd.mul(simd.mul(sum, scale), keys), out);
            }
        }
    }
}

/// 4-bit codes with queries of one 8-bit digit.
#[inline(always)]
fn int4<S: TileSimd>(simd: S, q: &Queries, codes: &[u8], sides: &[u8], mut next: &[u8], out: &mut [f32]) {
    for (first, out) in out.chunks_mut(4 * TILE_TOKENS).enumerate() {
        with_rows!(out.len() / TILE_TOKENS, N => match S::WIDE {
            true => int4_rows::<S, N, STRIPS>(simd, q, 4 * first, codes, sides, next, out),
            false => int4_rows::<S, N, 1>(simd, q, 4 * first, codes, sides, next, out),
        });
        next = &[];
    }
}

#[inline(always)]
fn int4_rows<S: TileSimd, const N: usize, const W: usize>(
    simd: S,
    q: &Queries,
    first: usize,
    codes: &[u8],
    sides: &[u8],
    next: &[u8],
    out: &mut [f32],
) {
    let quads = q.dims / 4;
    let digit: [&[i32]; N] = std::array::from_fn(|n| &q.single[(first + n) * quads..][..quads]);
    let (scales, zeros) = sides.split_at(4 * TILE_TOKENS);
    for strip in (0..STRIPS).step_by(W) {
        let sums = quad_sums::<S, N, W>(simd, digit, strip, codes, next, true);
        for w in 0..W {
            let keys = F32Elements.load(simd, &scales[(strip + w) * 4 * LANES..]);
            let zero = match zeros[(strip + w) * LANES..].first_chunk() {
                Some(zeros) => simd.unsigned(zeros),
                None => simd.splat(0.0),
            };
            for n in 0..N {
                // Both products are integers below 2^24: the difference is exact.
                let minus = simd.splat(-(q.single_sums[first + n] as f32));
                let sum = simd.mul_add(zero, minus, simd.to_f32(sums[n][w]));
                let scaled = simd.mul(simd.mul(sum, simd.splat(q.single_scales[first + n])), keys);
                store(simd, scaled, &mut out[n * TILE_TOKENS + (strip + w) * LANES..]);
            }
        }
    }
}

//! Activations of floating-point products.

use super::floats::FloatPanels;
use super::level::PackedLevel;
use super::{BLOCK, LEAST_TO_SPLIT};
use crate::buffer::Lines;
use crate::parallel::for_each;

/// Activations of floating-point products, tile by tile with the token as innermost index. Memory is kept between
/// calls.
#[derive(Debug, Default)]
pub struct FloatActivations {
    pub(super) tokens: usize,
    pub(super) cols: usize,
    /// f32 bits `[blocks, 32, tokens of the tile]`, or pairs of bf16 `[blocks, 16, tokens]`,
    /// on AMX tiles `[blocks, tokens, 16]`.
    pub(super) values: Lines<u32>,
    pub(super) in_bf16: bool,
}

impl FloatActivations {
    /// Arranges `x` `[tokens, cols]` for products with `weight`, on up to `threads` threads.
    ///
    /// # Panics
    /// If `x` is not whole tokens.
    pub fn arrange(&mut self, x: &[f32], weight: &FloatPanels, threads: usize) {
        let (cols, in_bf16) = (weight.cols(), weight.in_bf16());
        let tokens = x.len().checked_div(cols).unwrap_or(0);
        assert_eq!(x.len(), tokens * cols, "FloatActivations: input is not rows of {cols}");
        (self.tokens, self.cols, self.in_bf16) = (tokens, cols, in_bf16);
        let per_token = cols.div_ceil(BLOCK) * if in_bf16 { BLOCK / 2 } else { BLOCK };
        let sizes = PackedLevel::best().float_sizes(in_bf16);
        #[cfg(target_arch = "x86_64")]
        let by_tiles = PackedLevel::best().floats_by_tiles(in_bf16);
        let (mut x, mut values) = (x, self.values.resize(sizes.padded(tokens) * per_token));
        let pieces = sizes.tiles(tokens).map(|tile| {
            let x = x.split_off(..(tile.end.min(tokens) - tile.start) * cols).unwrap_or_default();
            (tile.len(), x, values.split_off_mut(..tile.len() * per_token).unwrap_or_default())
        });
        let threads = if tokens * cols <= LEAST_TO_SPLIT { 1 } else { threads };
        for_each(threads, pieces, |(tokens, x, values)| {
            if x.len() < tokens * cols {
                // Tokens of padding.
                values.fill(0);
            }
            for (t, x) in x.chunks_exact(cols).enumerate() {
                #[cfg(target_arch = "x86_64")]
                if by_tiles {
                    let rows = values.chunks_exact_mut(BLOCK / 2).skip(t).step_by(tokens);
                    pairs_in_rows(x, rows);
                    continue;
                }
                let places = values.chunks_exact_mut(tokens).map(|place| &mut place[t]);
                match in_bf16 {
                    true => pairs(x, places),
                    false => {
                        let bits = x.iter().map(|x| x.to_bits()).chain(std::iter::repeat(0));
                        places.zip(bits).for_each(|(place, bits)| *place = bits);
                    }
                }
            }
        });
    }
}

/// Rounds pairs of values to bf16, the first in the low half.
fn pairs<'a>(x: &[f32], places: impl Iterator<Item = &'a mut u32>) {
    let mut halves = [0u16; 64];
    let mut places = places;
    for x in x.chunks(halves.len()) {
        halves.fill(0);
        crate::kernels().f32_to_bf16(x, &mut halves[..x.len()]);
        for pair in halves.as_chunks::<2>().0.iter().take(x.len().div_ceil(2)) {
            if let Some(place) = places.next() {
                *place = u32::from(pair[0]) | u32::from(pair[1]) << 16;
            }
        }
    }
    places.for_each(|place| *place = 0);
}

/// Rounds the values of a token to bf16, to rows of 32 of which the last are padded with 0.
#[cfg(target_arch = "x86_64")]
fn pairs_in_rows<'a>(x: &[f32], rows: impl Iterator<Item = &'a mut [u32]>) {
    const AT_ONCE: usize = 8;
    let mut halves = [0u16; AT_ONCE * BLOCK];
    let mut rows = rows;
    for x in x.chunks(halves.len()) {
        halves[x.len()..].fill(0);
        crate::kernels().f32_to_bf16(x, &mut halves[..x.len()]);
        for (row, halves) in rows.by_ref().zip(halves.as_chunks::<BLOCK>().0).take(x.len().div_ceil(BLOCK)) {
            for (place, pair) in row.iter_mut().zip(halves.as_chunks::<2>().0) {
                *place = u32::from(pair[0]) | u32::from(pair[1]) << 16;
            }
        }
    }
}

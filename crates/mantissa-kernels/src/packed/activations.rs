//! Activations quantized to 8 bits, token by token.

use std::cell::RefCell;
use std::ops::Range;

use super::level::PackedLevel;
use super::product::Tile;
use super::quantize::{Grid, Shape};
use super::{BLOCK, LEAST_TO_SPLIT, QUADS};
use crate::buffer::Lines;
use crate::parallel::for_each;

/// Tokens `[tokens, cols]` as `scale · code`. Memory is kept between calls.
#[derive(Debug)]
pub struct Activations {
    pub(crate) tokens: usize,
    pub(crate) cols: usize,
    pub(crate) grid: Grid,
    /// Columns of a unit.
    pub(crate) unit: usize,
    /// Quads of a token, with padding to whole rows of AMX tiles.
    pub(crate) quads: usize,
    /// Quads of a token that lie together: 1, or the quads of a row of an AMX tile.
    together: usize,
    /// Codes, four to an integer, padded with 0: tile by tile, `[quads / together, tokens of the tile, together]`.
    pub(crate) codes: Lines<i32>,
    /// Scale of each unit, tile by tile, `[units, tokens of the tile]`.
    pub(crate) scales: Vec<f32>,
    /// Sum of the codes of each unit.
    pub(crate) sums: Vec<i32>,
    /// Scale times sum.
    pub(crate) products: Vec<f32>,
}

impl Default for Activations {
    fn default() -> Self {
        Activations {
            tokens: 0,
            cols: 0,
            grid: Grid::BLOCKS,
            unit: BLOCK,
            quads: 0,
            together: 1,
            codes: Lines::default(),
            scales: Vec::new(),
            sums: Vec::new(),
            products: Vec::new(),
        }
    }
}

impl Activations {
    /// Quantizes `x` `[tokens, cols]` on `grid` for weights with units of `unit` columns, on up to `threads` threads.
    ///
    /// # Panics
    /// If `x` is not whole tokens, or a group is not whole units.
    pub fn quantize(&mut self, x: &[f32], cols: usize, grid: Grid, unit: usize, threads: usize) {
        self.quantize_at(PackedLevel::best(), x, cols, grid, unit, threads);
    }

    /// [`quantize`](Self::quantize) for products at a given level.
    pub(crate) fn quantize_at(
        &mut self,
        level: &PackedLevel,
        x: &[f32],
        cols: usize,
        grid: Grid,
        unit: usize,
        threads: usize,
    ) {
        let tokens = x.len() / cols.max(1);
        assert_eq!(x.len(), tokens * cols, "Activations: input is not rows of {cols}");
        let blocks = cols.div_ceil(BLOCK);
        let group = grid.group.min(blocks * BLOCK);
        assert!(
            group.is_multiple_of(BLOCK / 2) && (group.is_multiple_of(unit) || unit > group),
            "Activations: units of {unit} columns in groups of {group}"
        );
        let unit = unit.min(group);
        let units = (blocks * BLOCK).div_ceil(unit);
        (self.tokens, self.cols, self.grid, self.unit) = (tokens, cols, grid, unit);
        let (padded, together) = (level.sizes(unit).padded(tokens), level.together(tokens, unit));
        let quads = (blocks * QUADS).next_multiple_of(together);
        (self.quads, self.together) = (quads, together);
        let codes = self.codes.resize(padded * quads);
        self.scales.resize(padded * units, 0.0);
        self.sums.resize(padded * units, 0);
        self.products.resize(padded * units, 0.0);
        if tokens == 0 || cols == 0 {
            return;
        }
        let shape = Shape { group, unit, grid };
        let mut rest = (x, codes, &mut *self.scales, &mut *self.sums, &mut *self.products);
        let pieces = level.sizes(unit).tiles(tokens).map(|tile| Piece {
            tokens: tile.len(),
            together,
            x: rest.0.split_off(..(tile.end.min(tokens) - tile.start) * cols).unwrap_or_default(),
            codes: rest.1.split_off_mut(..tile.len() * quads).unwrap_or_default(),
            scales: rest.2.split_off_mut(..tile.len() * units).unwrap_or_default(),
            sums: rest.3.split_off_mut(..tile.len() * units).unwrap_or_default(),
            products: rest.4.split_off_mut(..tile.len() * units).unwrap_or_default(),
        });
        let threads = if x.len() <= LEAST_TO_SPLIT { 1 } else { threads };
        for_each(threads, pieces, |mut piece| {
            TOKEN.with_borrow_mut(|token| {
                token.codes.resize(quads.div_ceil(QUADS), [0; BLOCK]);
                token.codes[blocks..].fill([0; BLOCK]);
                token.scales.resize(units, 0.0);
                token.sums.resize(units, 0);
                piece.quantize(level, &shape, (cols, blocks), token);
            });
        });
    }

    /// Units of a token.
    pub(crate) fn units(&self) -> usize {
        (self.cols.div_ceil(BLOCK) * BLOCK).div_ceil(self.unit)
    }

    /// Returns quad `quad` of token `t`, which is in `tile`.
    #[cfg(test)]
    pub(crate) fn code(&self, tile: &Range<usize>, t: usize, quad: usize) -> i32 {
        let row = quad / self.together * tile.len() + (t - tile.start);
        self.codes.get()[tile.start * self.quads + row * self.together + quad % self.together]
    }

    /// Number of tokens.
    pub fn tokens(&self) -> usize {
        self.tokens
    }
}

/// One tile, for a thread.
struct Piece<'a> {
    tokens: usize,
    together: usize,
    x: &'a [f32],
    codes: &'a mut [i32],
    scales: &'a mut [f32],
    sums: &'a mut [i32],
    products: &'a mut [f32],
}

/// One quantized token, before it takes its place in its tile.
#[derive(Default)]
struct Token {
    codes: Vec<[i8; BLOCK]>,
    scales: Vec<f32>,
    sums: Vec<i32>,
}

thread_local! {
    /// Kept between calls, so that a call of a known shape allocates nothing.
    static TOKEN: RefCell<Token> = RefCell::default();
}

impl Piece<'_> {
    fn quantize(
        &mut self,
        level: &PackedLevel,
        shape: &Shape,
        (cols, blocks): (usize, usize),
        token: &mut Token,
    ) {
        if self.x.len() < self.tokens * cols {
            // Tokens of padding.
            self.codes.fill(0);
            self.scales.fill(0.0);
            self.sums.fill(0);
            self.products.fill(0.0);
        }
        for (t, x) in self.x.chunks_exact(cols).enumerate() {
            let Token { codes, scales, sums } = &mut *token;
            level.quantize(shape, x, &mut codes[..blocks], scales, sums);
            let fours = codes.as_flattened().as_chunks::<4>().0;
            let code = |four: &[i8; 4]| i32::from_le_bytes(four.map(|code| code as u8));
            if self.together == 1 {
                let places = self.codes.chunks_exact_mut(self.tokens).map(|quad| &mut quad[t]);
                places.zip(fours).for_each(|(place, four)| *place = code(four));
            } else {
                let rows = self.codes.chunks_exact_mut(self.together).skip(t).step_by(self.tokens);
                for (row, fours) in rows.zip(fours.chunks_exact(self.together)) {
                    row.iter_mut().zip(fours).for_each(|(place, four)| *place = code(four));
                }
            }
            for (u, (scale, sum)) in scales.iter().zip(sums).enumerate() {
                let at = u * self.tokens + t;
                (self.scales[at], self.sums[at], self.products[at]) = (*scale, *sum, *scale * *sum as f32);
            }
        }
    }
}

/// Returns the codes and units of a tile.
pub(super) fn tokens<'a>(x: &'a Activations, starts: &'a [i32], tile: &Range<usize>) -> Tile<'a> {
    let (quads, units) = (x.quads, x.units());
    let units = tile.start * units..tile.end * units;
    Tile {
        codes: &x.codes.get()[tile.start * quads..tile.end * quads],
        scales: &x.scales[units.clone()],
        starts: &starts[units.clone()],
        products: &x.products[units],
    }
}

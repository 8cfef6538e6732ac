//! Codes the tiles of a rotated weight along both dimensions, each compensating for the errors of earlier tiles.

use mantissa_kernels::{Kernels, TrellisScratch, TrellisValues, for_each};
use mantissa_num::trellis::{TILE, TILE_WEIGHTS, place, words};

/// 16 × 16 values, row after row.
type Tile = [f64; TILE_WEIGHTS];

/// Values to code, `[rows, cols]`, and the factors that weight their errors.
pub(super) struct Problem<'a> {
    pub(super) kernels: &'a Kernels,
    pub(super) values: &'a TrellisValues,
    /// Value of each state.
    pub(super) table: &'a [f32],
    pub(super) targets: &'a [f32],
    pub(super) rows: usize,
    pub(super) cols: usize,
    /// `U[cols, cols]` of the inputs.
    pub(super) inputs: &'a [f64],
    /// `Uᵀ[rows, rows]` of the outputs, if errors of outputs interact.
    pub(super) outputs: Option<&'a [f64]>,
}

/// Errors of coded tiles that later tiles compensate for.
struct Errors {
    /// For each 16 outputs `[16, cols]`: errors that later inputs compensate for.
    across: Vec<Vec<f64>>,
    /// For each 16 inputs `[rows, 16]`: errors that later outputs compensate for.
    down: Vec<Vec<f64>>,
}

/// A tile that has been coded.
struct Coded {
    words: Vec<u32>,
    across: Tile,
    down: Tile,
}

impl Problem<'_> {
    /// Tiles by outputs, then inputs, as they are stored. Tiles on one anti-diagonal are independent.
    pub(super) fn solve(&self, threads: usize) -> Vec<u8> {
        let (down, across) = (self.rows / TILE, self.cols / TILE);
        let mut errors = Errors {
            across: vec![vec![0.0; TILE * self.cols]; down],
            down: vec![vec![0.0; if self.outputs.is_some() { self.rows * TILE } else { 0 }]; across],
        };
        let threads = threads.clamp(1, down.min(across).max(1));
        let mut scratch: Vec<_> =
            (0..threads).map(|_| TrellisScratch::new(self.values, TILE_WEIGHTS)).collect();
        let mut coded: Vec<Vec<u32>> = vec![Vec::new(); down * across];
        for diagonal in 0..(down + across).saturating_sub(1) {
            let first = diagonal.saturating_sub(across - 1);
            let places: Vec<_> = (first..down.min(diagonal + 1)).map(|i| (i, diagonal - i)).collect();
            let mut found: Vec<Option<Coded>> = places.iter().map(|_| None).collect();
            let each = places.len().div_ceil(threads);
            let work = places.chunks(each).zip(found.chunks_mut(each)).zip(&mut scratch);
            for_each(threads, work, |((places, found), scratch)| {
                for (&(i, j), found) in places.iter().zip(found) {
                    *found = Some(self.tile(i, j, &errors, scratch));
                }
            });
            for ((i, j), found) in places.into_iter().zip(found) {
                let Some(tile) = found else { continue };
                errors.put(i, j, self.cols, &tile);
                coded[j * down + i] = tile.words;
            }
        }
        coded.concat().into_iter().flat_map(u32::to_le_bytes).collect()
    }

    /// Codes tile `i` of the outputs, `j` of the inputs; the errors above it and to its left are known.
    fn tile(&self, i: usize, j: usize, errors: &Errors, scratch: &mut TrellisScratch) -> Coded {
        let (n, k, row, col) = (self.rows, self.cols, i * TILE, j * TILE);
        let mut target = [0.0; TILE_WEIGHTS];
        for (r, target) in target.chunks_exact_mut(TILE).enumerate() {
            let from = &self.targets[(row + r) * k + col..][..TILE];
            target.iter_mut().zip(from).for_each(|(target, v)| *target = f64::from(*v));
        }
        let square = &self.inputs[col * k + col..];
        let left = &self.inputs[col..];
        self.kernels.gemm_sub_f64((TILE, TILE, col), &errors.across[i], k, left, k, &mut target, TILE);
        let mut above = [0.0; TILE_WEIGHTS];
        if let Some(lower) = self.outputs {
            let lines = &lower[row * n..];
            self.kernels.gemm_sub_f64((TILE, TILE, row), lines, n, &errors.down[j], TILE, &mut above, TILE);
            above.iter_mut().for_each(|v| *v = -*v);
            self.kernels.gemm_sub_f64((TILE, TILE, TILE), &above, TILE, square, k, &mut target, TILE);
        }
        let (states, mut across) = self.coded(&target, scratch);
        divide(&mut across, square, k);
        let mut down = across;
        if let Some(lower) = self.outputs {
            divide_rows(&mut down, &lower[row * n + row..], n);
        }
        across.iter_mut().zip(&above).for_each(|(v, above)| *v += above);
        let words = words(&states, 2 * self.values.bits() as usize).unwrap_or_default();
        Coded { words, across, down }
    }

    /// States of a tile, and the distance of their values from the target.
    fn coded(&self, target: &Tile, scratch: &mut TrellisScratch) -> ([u16; TILE_WEIGHTS], Tile) {
        let at = |i: usize| {
            let (input, output) = place(i);
            output * TILE + input
        };
        let ring: [f32; TILE_WEIGHTS] = std::array::from_fn(|i| target[at(i)] as f32);
        let mut states = [0; TILE_WEIGHTS];
        self.kernels.trellis_ring(self.values, &ring, scratch, &mut states);
        let mut errors = [0.0; TILE_WEIGHTS];
        for (i, &state) in states.iter().enumerate() {
            errors[at(i)] = target[at(i)] - f64::from(self.table[usize::from(state)]);
        }
        (states, errors)
    }
}

impl Errors {
    fn put(&mut self, i: usize, j: usize, cols: usize, tile: &Coded) {
        for (r, line) in tile.across.chunks_exact(TILE).enumerate() {
            self.across[i][r * cols + j * TILE..][..TILE].copy_from_slice(line);
        }
        if let Some(down) = self.down[j].get_mut(i * TILE_WEIGHTS..(i + 1) * TILE_WEIGHTS) {
            down.copy_from_slice(&tile.down);
        }
    }
}

/// Returns `x` times the inverse of the upper triangle at the start of `upper`, with row stride `stride`.
fn divide(x: &mut Tile, upper: &[f64], stride: usize) {
    for row in x.chunks_exact_mut(TILE) {
        for j in 0..TILE {
            let known: f64 = (0..j).map(|i| row[i] * upper[i * stride + j]).sum();
            row[j] = (row[j] - known) / upper[j * stride + j];
        }
    }
}

/// Returns the inverse of the lower triangle at the start of `lower`, with row stride `stride`, times `x`.
fn divide_rows(x: &mut Tile, lower: &[f64], stride: usize) {
    for i in 0..TILE {
        for c in 0..TILE {
            let known: f64 = (0..i).map(|j| lower[i * stride + j] * x[j * TILE + c]).sum();
            x[i * TILE + c] = (x[i * TILE + c] - known) / lower[i * stride + i];
        }
    }
}

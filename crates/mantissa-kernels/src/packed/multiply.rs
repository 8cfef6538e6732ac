//! Products of several weights with the same tokens, split over threads by bytes.

use std::cell::RefCell;
use std::ops::Range;

use super::dot::Quad;
use super::level::MOST_TOKENS;
use super::product::{Scales, Shared, Tile};
use super::share::{panels_per_piece, split};
use super::{Activations, BLOCK, PackedLevel, Panels, QUADS, ROWS};

/// One weight of [`multiply`] and its output `[tokens, rows]`.
#[derive(Debug)]
pub struct PanelJob<'a> {
    /// The weight.
    pub panels: &'a Panels,
    /// Output, `[tokens, rows]`.
    pub out: &'a mut [f32],
    /// True to add to the output, false to overwrite it.
    pub accumulate: bool,
}

/// Bytes of a chunk's activations that stay in a core's second-level cache, beside the sums of
/// [`MOST_PANELS`] panels, while panels pass them.
const TOKENS_BYTES: usize = 192 << 10;

/// Most panels that a thread takes at a time for many tokens.
const MOST_PANELS: usize = 8;

/// Computes `out = x Wᵀ`, or adds it to `out`, for every job (at most 16), on up to `threads` threads. Bits do not
/// depend on the number of threads or tokens, nor on the level.
///
/// # Panics
/// If a weight has other columns or units than the activations, or an output another shape.
pub fn multiply<'a>(jobs: impl Iterator<Item = PanelJob<'a>>, x: &Activations, threads: usize) {
    multiply_at(PackedLevel::best(), jobs, x, threads);
}

/// [`multiply`] at a given level.
pub(crate) fn multiply_at<'a>(
    level: &PackedLevel,
    jobs: impl Iterator<Item = PanelJob<'a>>,
    x: &Activations,
    threads: usize,
) {
    let targets = jobs.map(|PanelJob { panels, out, accumulate }| {
        let unit = panels.format().unit.min(panels.cols().div_ceil(BLOCK) * BLOCK);
        assert!(
            panels.cols() == x.cols && (unit == x.unit || x.unit < unit),
            "packed product: weight has {} columns in units of {unit}, activations {} in {}",
            panels.cols(),
            x.cols,
            x.unit
        );
        assert_eq!(out.len(), x.tokens * panels.rows(), "packed product: output is not [tokens, rows]");
        if x.cols == 0 && !accumulate {
            out.fill(0.0);
        }
        (panels, accumulate, out)
    });
    if x.tokens == 0 || x.cols == 0 {
        return targets.for_each(|_| ());
    }
    let expands = level.expands(x.tokens);
    let pieces = |panels: &Panels| {
        let count = panels.rows().div_ceil(ROWS);
        match expands {
            true => (count / (4 * threads.max(1))).clamp(1, MOST_PANELS),
            false => panels_per_piece(count, panels.panel_bytes(), threads),
        }
    };
    let count = |panels: &Panels| panels.rows().div_ceil(ROWS).div_ceil(pieces(panels));
    split(targets, threads, count, |target, piece| {
        let (panels, per_piece) = (target.weight, pieces(target.weight));
        let rows = piece * per_piece..((piece + 1) * per_piece).min(panels.rows().div_ceil(ROWS));
        SCRATCH.with_borrow_mut(|scratch| {
            let write = |panel: usize, t: usize, sums: &[f32; ROWS]| {
                let first = panel * ROWS;
                let sums = &sums[..ROWS.min(panels.rows() - first)];
                // SAFETY: every panel belongs to one piece, and `split` hands out every piece once.
                unsafe { target.out.put_lanes(t * panels.rows() + first, sums, target.accumulate) };
            };
            scratch.prepare(panels, x);
            match expands {
                true => many(level, panels, rows, x, scratch, write),
                false => few(level, panels, rows, x, scratch, write),
            }
        });
    });
}

/// Memory of a thread, kept between calls.
#[derive(Default)]
struct Scratch {
    /// Scales and minima of a chunk.
    scales: Vec<[f32; ROWS]>,
    mins: Vec<[f32; ROWS]>,
    /// Levels of a chunk.
    levels: Vec<Quad>,
    starts: Vec<i32>,
    /// Sums so far, `[panels, tokens]`.
    sums: Vec<[f32; ROWS]>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

impl Scratch {
    /// Makes room, and computes the integers that every unit starts with.
    fn prepare(&mut self, panels: &Panels, x: &Activations) {
        self.scales.resize(panels.chunk_groups(), [0.0; ROWS]);
        self.mins.resize(panels.chunk_groups(), [0.0; ROWS]);
        self.levels.resize(panels.chunk_cols().div_ceil(BLOCK) * QUADS, [0; 4 * ROWS]);
        let zero = -i32::from(panels.format().zero);
        self.starts.clear();
        self.starts.extend(x.sums.iter().map(|sum| zero.wrapping_mul(*sum)));
    }
}

/// Returns the codes and units of a tile in a range of blocks.
fn tokens<'a>(x: &'a Activations, starts: &'a [i32], tile: &Range<usize>, blocks: Range<usize>) -> Tile<'a> {
    let (all_blocks, all_units, len) = (x.cols.div_ceil(BLOCK), x.units(), tile.len());
    let codes = tile.start * all_blocks + blocks.start * len..tile.start * all_blocks + blocks.end * len;
    let unit = |block: usize| (block * BLOCK).div_ceil(x.unit);
    let first = tile.start * all_units;
    let units = first + unit(blocks.start) * len..first + unit(blocks.end) * len;
    Tile {
        codes: &x.codes[codes.start * QUADS..codes.end * QUADS],
        scales: &x.scales[units.clone()],
        starts: &starts[units.clone()],
        products: &x.products[units],
    }
}

/// Runs some panels of a weight with few tokens, which read the codes directly.
fn few(
    level: &PackedLevel,
    panels: &Panels,
    rows: Range<usize>,
    x: &Activations,
    scratch: &mut Scratch,
    write: impl Fn(usize, usize, &[f32; ROWS]),
) {
    let format = panels.format();
    let shared = Shared::new(format, panels.chunk_cols(), x);
    let mut scales = Scales { scales: &mut scratch.scales, mins: &mut scratch.mins };
    let blocks = x.cols.div_ceil(BLOCK);
    for i in rows {
        let panel = panels.panel(i);
        for tile in level.tiles(x.tokens) {
            let x = tokens(x, &scratch.starts, &tile, 0..blocks);
            let mut out = [[0.0; ROWS]; MOST_TOKENS];
            let out = &mut out[..tile.len()];
            level.product(format, &shared, &panel, &x, &mut scales, out);
            tile.zip(&*out).for_each(|(t, sums)| write(i, t, sums));
        }
    }
}

/// Runs some panels of a weight with many tokens, chunk by chunk: a chunk of a panel is expanded to bytes once, stays in
/// the first-level cache, and multiplies as many tokens as stay in the second-level cache.
fn many(
    level: &PackedLevel,
    panels: &Panels,
    rows: Range<usize>,
    x: &Activations,
    scratch: &mut Scratch,
    write: impl Fn(usize, usize, &[f32; ROWS]),
) {
    let Scratch { scales, mins, levels, starts, sums } = scratch;
    let (chunks, per_chunk) = (panels.chunks(), panels.chunk_cols().div_ceil(BLOCK));
    let blocks = x.cols.div_ceil(BLOCK);
    let shared = Shared::new(panels.format(), panels.chunk_cols(), x);
    let most = (TOKENS_BYTES / (per_chunk * BLOCK)).max(48);
    let mut tiles = level.tiles(x.tokens).peekable();
    while let Some(first) = tiles.peek().map(|tile| tile.start) {
        let end = first.saturating_add(most);
        let some = tiles.clone().take_while(|tile| tile.end <= end);
        let count = some.clone().map(|tile| tile.len()).sum();
        sums.clear();
        sums.resize(rows.len() * count, [0.0; ROWS]);
        for c in 0..chunks {
            let here = c * per_chunk..((c + 1) * per_chunk).min(blocks);
            for (i, sums) in rows.clone().zip(sums.chunks_exact_mut(count)) {
                let Some(chunk) = panels.panel(i).chunks().nth(c) else { continue };
                let levels = &mut levels[..here.len() * QUADS];
                level.widen(&chunk.scales, &[], scales);
                level.widen(&chunk.mins, scales, mins);
                level.expand(panels.format(), chunk.codes, levels);
                let scales = Scales { scales: &mut *scales, mins: &mut *mins };
                for tile in some.clone() {
                    let x = tokens(x, starts, &tile, here.clone());
                    let out = &mut sums[tile.start - first..tile.end - first];
                    level.wide_product(&shared, levels, &scales, &x, out);
                    if c + 1 == chunks {
                        tile.zip(&*out).for_each(|(t, sums)| write(i, t, sums));
                    }
                }
            }
        }
        while tiles.next_if(|tile| tile.end <= end).is_some() {}
    }
}

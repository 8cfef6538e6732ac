//! Several products of a weight with tokens, split over threads by bytes.

use std::cell::RefCell;
use std::ops::Range;

use super::activations::{Activations, tokens};
use super::dot::Quad;
use super::level::{MOST_TOKENS, PackedLevel};
use super::panels::Panels;
use super::product::{Scales, Shared};
use super::share::{panels_per_piece, split};
use super::{BLOCK, QUADS, ROWS};
use crate::buffer::{Aligned, Lines};

/// One product of [`multiply`].
#[derive(Debug)]
pub struct PanelJob<'a> {
    /// The weight.
    pub panels: &'a Panels,
    /// The tokens.
    pub x: &'a Activations,
    /// Output, `[tokens, rows]`.
    pub out: &'a mut [f32],
    /// True to add to the output, false to overwrite it.
    pub accumulate: bool,
}

/// Bytes of activations that stay in a core's second-level cache while panels stream past them.
const TOKENS_BYTES: usize = 384 << 10;

/// Panels that a thread takes at a time for many tokens.
const MANY_PANELS: usize = 4;
#[cfg(target_arch = "x86_64")]
const _: () = assert!(MANY_PANELS <= super::by_tiles::MOST_PANELS);

/// Computes `out = x Wᵀ`, or adds it to `out`, for every job (at most 16) in one dispatch, on up to `threads` threads.
/// Bits do not depend on the number of threads, tokens or jobs, nor on the level.
///
/// # Panics
/// If a weight has other columns or units than the activations, or an output another shape.
pub fn multiply<'a>(jobs: impl Iterator<Item = PanelJob<'a>>, threads: usize) {
    multiply_at(PackedLevel::best(), jobs, threads);
}

/// [`multiply`] at a given level.
pub(crate) fn multiply_at<'a>(level: &PackedLevel, jobs: impl Iterator<Item = PanelJob<'a>>, threads: usize) {
    let targets = jobs.filter_map(|PanelJob { panels, x, out, accumulate }| {
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
        (x.tokens > 0 && x.cols > 0).then_some(((panels, x), accumulate, out))
    });
    let expands = |x: &Activations| level.sizes(x.unit).expands(x.tokens);
    let pieces = |(panels, x): (&Panels, &Activations)| match expands(x) {
        true => MANY_PANELS,
        false => panels_per_piece(panels.rows().div_ceil(ROWS), panels.panel_bytes(), threads),
    };
    let count = |factors: (&Panels, _)| factors.0.rows().div_ceil(ROWS).div_ceil(pieces(factors));
    split(targets, threads, count, |target, piece| {
        let ((panels, x), per_piece) = (target.factors, pieces(target.factors));
        let rows = piece * per_piece..((piece + 1) * per_piece).min(panels.rows().div_ceil(ROWS));
        SCRATCH.with_borrow_mut(|scratch| {
            let write = |panel: usize, t: usize, sums: &[f32; ROWS]| {
                if t >= x.tokens {
                    return;
                }
                let first = panel * ROWS;
                let sums = &sums[..ROWS.min(panels.rows() - first)];
                // SAFETY: every panel belongs to one piece, and `split` hands out every piece once.
                unsafe { target.out.put_lanes(t * panels.rows() + first, sums, target.accumulate) };
            };
            #[cfg(target_arch = "x86_64")]
            if level.by_tiles(x.tokens, x.unit) {
                return scratch.by_tiles.multiply(level, panels, rows, x, write);
            }
            scratch.prepare(level, panels, x, expands(x));
            match expands(x) {
                true => many(level, panels, rows, x, scratch, write),
                false => few(level, panels, rows, x, scratch, write),
            }
        });
    });
}

/// Memory of a thread, kept between calls.
#[derive(Default)]
struct Scratch {
    scales: Lines<f32>,
    mins: Lines<f32>,
    levels: Lines<u8>,
    starts: Vec<i32>,
    #[cfg(target_arch = "x86_64")]
    by_tiles: super::by_tiles::Memory,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

impl Scratch {
    /// Makes room, and computes the integers that every unit starts with.
    fn prepare(&mut self, level: &PackedLevel, panels: &Panels, x: &Activations, expands: bool) {
        let groups = if expands { panels.format().groups(x.cols) } else { panels.chunk_groups() };
        self.scales.resize(groups * ROWS);
        self.mins.resize(groups * ROWS);
        if expands {
            self.levels.resize(x.cols.div_ceil(BLOCK) * QUADS * size_of::<Quad>());
        }
        let zero = -level.zero(panels.format());
        self.starts.clear();
        self.starts.extend(x.sums.iter().map(|sum| zero.wrapping_mul(*sum)));
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
    let shared = Shared::new(format, panels.chunk_cols(), x.unit);
    let last = shared.last_tile(panels.panel_bytes());
    let tiles = level.sizes(x.unit).tiles(x.tokens);
    let several = tiles.clone().nth(1).is_some();
    let mut out = Aligned([[0.0; ROWS]; MOST_TOKENS]);
    let mut scales = Scales {
        scales: scratch.scales.get_mut().as_chunks_mut().0,
        mins: scratch.mins.get_mut().as_chunks_mut().0,
    };
    for i in rows {
        let panel = panels.panel(i);
        for tile in tiles.clone() {
            let shared = if several && tile.end >= x.tokens { &last } else { &shared };
            let x = tokens(x, &scratch.starts, &tile);
            let out = &mut out.0[..tile.len()];
            level.product(format, shared, &panel, &x, &mut scales, out);
            tile.zip(&*out).for_each(|(t, sums)| write(i, t, sums));
        }
    }
}

/// Runs some panels of a weight with many tokens: a panel is expanded to bytes once for as many tokens as stay in the
/// second-level cache. (Chunk by chunk for all tokens, with sums in memory, prefill was 6 % slower: activations come
/// in pieces of 3 KB then.)
fn many(
    level: &PackedLevel,
    panels: &Panels,
    rows: Range<usize>,
    x: &Activations,
    scratch: &mut Scratch,
    write: impl Fn(usize, usize, &[f32; ROWS]),
) {
    let Scratch { scales, mins, levels, starts, .. } = scratch;
    let scales = scales.get_mut().as_chunks_mut().0;
    let (mins, levels) = (mins.get_mut().as_chunks_mut().0, levels.get_mut().as_chunks_mut().0);
    let (groups, quads) = (panels.chunk_groups(), panels.chunk_cols() / BLOCK * QUADS);
    let shared = Shared::new(panels.format(), x.cols, x.unit);
    let most = (TOKENS_BYTES / (x.cols.div_ceil(BLOCK) * BLOCK)).max(48);
    let mut tiles = level.sizes(x.unit).tiles(x.tokens).peekable();
    while let Some(first) = tiles.peek() {
        let end = first.start.saturating_add(most);
        let some = tiles.clone().take_while(|tile| tile.end <= end);
        for i in rows.clone() {
            let places = scales.chunks_mut(groups).zip(mins.chunks_mut(groups));
            let places = places.zip(levels.chunks_mut(quads));
            for (chunk, ((scales, mins), levels)) in panels.panel(i).chunks().zip(places) {
                level.widen(&chunk.scales, &[], scales);
                level.widen(&chunk.mins, scales, mins);
                level.expand(panels.format(), chunk.codes, levels);
            }
            let scales = Scales { scales: &mut *scales, mins: &mut *mins };
            for tile in some.clone() {
                let x = tokens(x, starts, &tile);
                let mut out = Aligned([[0.0; ROWS]; MOST_TOKENS]);
                let out = &mut out.0[..tile.len()];
                level.wide_product(&shared, levels, &scales, &x, out);
                tile.zip(&*out).for_each(|(t, sums)| write(i, t, sums));
            }
        }
        while tiles.next_if(|tile| tile.end <= end).is_some() {}
    }
}

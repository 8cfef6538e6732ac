//! Products of several weights with the same tokens, split over threads by bytes.

use std::cell::RefCell;
use std::ops::Range;

use super::dot::Quad;
use super::level::MOST_TOKENS;
use super::product::{Tile, Wide};
use super::share::split;
use super::{Activations, BLOCK, PackedLevel, PanelFormat, Panels, QUADS, ROWS, ScaleCode};

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

/// Bytes of weights that a thread takes at a time for few tokens: many times the cost of taking them.
const PIECE: usize = 96 << 10;

/// Bytes of activations that stay in a core's second-level cache while panels stream past them.
const TOKENS_BYTES: usize = 384 << 10;

/// Panels that a thread takes at a time for many tokens.
const MANY_PANELS: usize = 4;

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
    let pieces = |panels: &Panels| match PackedLevel::expands(x.tokens) {
        true => MANY_PANELS,
        false => (PIECE / panels.panel_bytes()).max(1),
    };
    let count = |panels: &Panels| panels.rows().div_ceil(ROWS).div_ceil(pieces(panels));
    split(targets, threads, count, |target, piece| {
        let (panels, per_piece) = (target.weight, pieces(target.weight));
        let rows = piece * per_piece..((piece + 1) * per_piece).min(panels.rows().div_ceil(ROWS));
        SCRATCH.with_borrow_mut(|scratch| {
            run(level, panels, rows, x, scratch, |panel, t, sums| {
                let first = panel * ROWS;
                let sums = &sums[..ROWS.min(panels.rows() - first)];
                // SAFETY: every panel belongs to one piece, and `split` hands out every piece once.
                unsafe { target.out.put_lanes(t * panels.rows() + first, sums, target.accumulate) };
            });
        });
    });
}

/// Memory of a thread, kept between calls.
#[derive(Default)]
struct Scratch {
    scales: Vec<[f32; ROWS]>,
    mins: Vec<[f32; ROWS]>,
    levels: Vec<Quad>,
    starts: Vec<i32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Returns the first `len` values of `values`, which grows if it is shorter.
fn first<T: Copy>(values: &mut Vec<T>, len: usize, fill: T) -> &mut [T] {
    if values.len() < len {
        values.resize(len, fill);
    }
    &mut values[..len]
}

/// Runs some panels of a weight with all tokens.
fn run(
    level: &PackedLevel,
    panels: &Panels,
    rows: Range<usize>,
    x: &Activations,
    scratch: &mut Scratch,
    write: impl Fn(usize, usize, &[f32; ROWS]),
) {
    let format = panels.format();
    let (blocks, units, groups) = (x.cols.div_ceil(BLOCK), x.units(), format.groups(x.cols));
    let expanded = PackedLevel::expands(x.tokens) && format.bits < 8;
    let kind = if expanded { (8, false) } else { (format.bits, format.levels.is_some()) };
    let Scratch { scales, mins, levels, starts } = scratch;
    let (scales, mins) = (first(scales, groups, [0.0; ROWS]), first(mins, groups, [0.0; ROWS]));
    let levels = first(levels, if expanded { blocks * QUADS } else { 0 }, [0; 4 * ROWS]);
    let starts = first(starts, x.sums.len(), 0);
    let zero = -i32::from(format.zero);
    starts.iter_mut().zip(&x.sums).for_each(|(start, sum)| *start = zero.wrapping_mul(*sum));
    let most = (TOKENS_BYTES / (blocks * BLOCK)).max(48);
    let mut tiles = level.tiles(x.tokens).peekable();
    while let Some(first) = tiles.peek() {
        let end = first.start.saturating_add(most);
        let some = tiles.clone().take_while(|tile| tile.end <= end);
        for i in rows.clone() {
            let panel = panels.panel(i);
            level.widen(panel.scales, &[], scales);
            level.widen(panel.mins, scales, mins);
            if expanded {
                let table = format.levels.unwrap_or([0; 16]);
                level.expand(format.bits, format.levels.is_some(), panel.codes, &table, levels);
            }
            let codes = if expanded { &*levels } else { panel.codes };
            let wide = widened(format, codes, scales, mins, x);
            for tile in some.clone() {
                let part = tile.start * units..tile.end * units;
                let tokens = Tile {
                    codes: &x.codes[tile.start * blocks * QUADS..tile.end * blocks * QUADS],
                    scales: &x.scales[part.clone()],
                    starts: &starts[part.clone()],
                    products: &x.products[part],
                };
                let mut out = [[0.0; ROWS]; MOST_TOKENS];
                let out = &mut out[..tile.len()];
                level.product(kind.0, kind.1, &wide, &tokens, out);
                tile.zip(&*out).for_each(|(t, sums)| write(i, t, sums));
            }
        }
        while tiles.next_if(|tile| tile.end <= end).is_some() {}
    }
}

fn widened<'a>(
    format: &'a PanelFormat,
    codes: &'a [Quad],
    scales: &'a [[f32; ROWS]],
    mins: &'a [[f32; ROWS]],
    x: &Activations,
) -> Wide<'a> {
    Wide {
        codes,
        scales,
        mins: if format.mins == ScaleCode::Absent { &[] } else { mins },
        levels: format.levels.as_ref().unwrap_or(&[0; 16]),
        blocks_per_unit: x.unit / BLOCK,
        units_per_group: format.group / x.unit,
    }
}

//! Several floating-point products of a weight with tokens, split over threads by bytes.

use std::cell::RefCell;
use std::ops::Range;

use super::float_activations::FloatActivations;
use super::float_product::Strip;
use super::floats::FloatPanels;
use super::level::PackedLevel;
use super::share::{panels_per_piece, split};
use super::{BLOCK, ROWS};
use crate::buffer::{Aligned, Lines};

/// One weight of [`FloatPanels::multiply`] and its output.
#[derive(Debug)]
pub struct FloatJob<'a> {
    /// The weight.
    pub weight: &'a FloatPanels,
    /// The tokens.
    pub x: &'a FloatActivations,
    /// Output, `[tokens, rows]`.
    pub out: &'a mut [f32],
    /// True to add to the output, false to overwrite it.
    pub accumulate: bool,
}

/// Panels that a thread takes at a time for many tokens.
const MANY_PANELS: usize = 8;

/// Largest number of panels and of sums of one product.
const MOST: usize = 24;

thread_local! {
    /// Panels expanded to bf16, kept between calls.
    static EXPANDED: RefCell<Lines<u8>> = RefCell::default();
}

impl Strip<'_> {
    /// Multiplies the panels with all tokens.
    fn run(&self, level: &PackedLevel, x: &FloatActivations, write: impl Fn(usize, usize, &[f32; ROWS])) {
        let count = self.bytes.len() / self.panel.max(1);
        let per_token = self.blocks * if x.in_bf16 { BLOCK / 2 } else { BLOCK };
        for tile in level.float_sizes(x.in_bf16).tiles(x.tokens) {
            let values = &x.values.get()[tile.start * per_token..tile.end * per_token];
            let functions = level.float_tile(tile.len(), x.in_bf16);
            let mut first = 0;
            while first < count {
                let several = count - first >= functions.panels;
                let some = if several { functions.panels } else { 1 };
                let part = Strip {
                    bytes: &self.bytes[first * self.panel..(first + some) * self.panel],
                    scales: &self.scales[first * self.groups..(first + some) * self.groups],
                    ..*self
                };
                let mut out = Aligned([[0.0; ROWS]; MOST]);
                let out = &mut out.0[..some * tile.len()];
                let product = if several { functions.several } else { functions.one };
                // SAFETY: the functions belong to `level`, whose features `PackedLevel::available` has checked.
                unsafe { product(&part, values, out) };
                for (i, out) in out.chunks_exact(tile.len()).enumerate() {
                    tile.clone().zip(out).for_each(|(t, sums)| write(first + i, t, sums));
                }
                first += some;
            }
        }
    }
}

impl FloatPanels {
    /// Computes `out = x Wᵀ`, or adds it to `out`, for every job (at most 16) in one dispatch.
    ///
    /// # Panics
    /// If a weight has other columns or another arithmetic than the activations, or an output another shape.
    pub fn multiply<'a>(jobs: impl Iterator<Item = FloatJob<'a>>, threads: usize) {
        let level = PackedLevel::best();
        let targets = jobs.filter_map(|FloatJob { weight, x, out, accumulate }| {
            assert!(
                weight.cols == x.cols && weight.in_bf16() == x.in_bf16,
                "FloatPanels: weight has {} columns, activations {}, or another arithmetic",
                weight.cols,
                x.cols
            );
            assert_eq!(out.len(), x.tokens * weight.rows, "FloatPanels: output is not [tokens, rows]");
            if x.cols == 0 && !accumulate {
                out.fill(0.0);
            }
            (x.tokens > 0 && x.cols > 0).then_some(((weight, x), accumulate, out))
        });
        let pieces = |(w, x): (&FloatPanels, &FloatActivations)| match level
            .float_sizes(x.in_bf16)
            .expands(x.tokens)
        {
            true => MANY_PANELS,
            false => panels_per_piece(w.rows.div_ceil(ROWS), w.panel_bytes(), threads)
                .next_multiple_of(MANY_PANELS),
        };
        let count = |factors: (&FloatPanels, _)| factors.0.rows.div_ceil(ROWS).div_ceil(pieces(factors));
        split(targets, threads, count, |target, piece| {
            let ((weight, x), per_piece) = (target.factors, pieces(target.factors));
            let panels = piece * per_piece..((piece + 1) * per_piece).min(weight.rows.div_ceil(ROWS));
            weight.run(level, panels, x, |panel, t, sums| {
                if t >= x.tokens {
                    return;
                }
                let first = panel * ROWS;
                let sums = &sums[..ROWS.min(weight.rows - first)];
                // SAFETY: every panel belongs to one piece, and `split` hands out every piece once.
                unsafe { target.out.put_lanes(t * weight.rows + first, sums, target.accumulate) };
            });
        });
    }

    /// Multiplies some panels with all tokens.
    fn run(
        &self,
        level: &PackedLevel,
        panels: Range<usize>,
        x: &FloatActivations,
        write: impl Fn(usize, usize, &[f32; ROWS]),
    ) {
        let (size, groups) = (self.panel_bytes(), self.groups());
        let strip = Strip {
            code: self.code,
            mini: self.code.mini(),
            table: &self.table,
            bytes: &self.bytes.bytes()[panels.start * size..panels.end * size],
            panel: size,
            scales: &self.scales[panels.start * groups..panels.end * groups],
            groups,
            blocks: self.blocks,
            group: self.group,
        };
        let write = |panel: usize, t: usize, sums: &[f32; ROWS]| write(panels.start + panel, t, sums);
        #[cfg(target_arch = "x86_64")]
        if level.floats_by_tiles(x.in_bf16) {
            return super::float_tiles::multiply(level, &strip, x, write);
        }
        if !(x.in_bf16 && strip.code.bytes() == 1 && level.float_sizes(x.in_bf16).expands(x.tokens)) {
            return strip.run(level, x, write);
        }
        EXPANDED.with_borrow_mut(|expanded| {
            let codes = strip.bytes.as_chunks().0;
            let expanded = expanded.resize(2 * strip.bytes.len());
            level.expand_pairs(codes, strip.table, expanded.as_chunks_mut().0);
            strip.expanded(expanded).run(level, x, write);
        });
    }
}

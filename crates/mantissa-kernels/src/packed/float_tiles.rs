//! Products of a weight of bf16 or 8-bit floats on AMX tiles, four panels at a time.

use std::cell::RefCell;

use super::ROWS;
use super::float_activations::FloatActivations;
use super::float_product::Strip;
use super::level::PackedLevel;
use super::tiles::{self, FloatBlock, FloatPanel, Sums, TOKENS};
use crate::buffer::{Aligned, Lines};

/// Panels of a call.
const PANELS: usize = 4;

thread_local! {
    /// Panels expanded to bf16, kept between calls.
    static EXPANDED: RefCell<Lines<u8>> = RefCell::default();
}

/// Multiplies panels with all tokens. Only if the level multiplies floats [by tiles](PackedLevel::floats_by_tiles).
pub(super) fn multiply(
    level: &PackedLevel,
    strip: &Strip<'_>,
    x: &FloatActivations,
    write: impl Fn(usize, usize, &[f32; ROWS]),
) {
    EXPANDED.with_borrow_mut(|expanded| {
        let all = strip.bytes.len() / strip.panel.max(1);
        for first in (0..all).step_by(PANELS) {
            let here = PANELS.min(all - first);
            let bytes = &strip.bytes[first * strip.panel..(first + here) * strip.panel];
            let quads = match strip.code.bytes() {
                1 => {
                    let pairs = expanded.resize(2 * bytes.len()).as_chunks_mut().0;
                    level.expand_pairs(bytes.as_chunks().0, strip.table, pairs);
                    &*pairs
                }
                _ => bytes.as_chunks().0,
            };
            let size = quads.len() / here;
            let panels: [_; PANELS] = std::array::from_fn(|i| {
                let (i, at) = (i.min(here - 1), first + i.min(here - 1));
                let scales = &strip.scales[at * strip.groups..(at + 1) * strip.groups];
                (&quads[i * size..(i + 1) * size], scales)
            });
            with_panels(&panels[..here], strip, x, |panel, t, sums| write(first + panel, t, sums));
        }
    });
}

/// Multiplies some panels with all tokens, two tiles at a time.
fn with_panels(
    panels: &[FloatPanel<'_>],
    strip: &Strip<'_>,
    x: &FloatActivations,
    write: impl Fn(usize, usize, &[f32; ROWS]),
) {
    let per_token = strip.blocks * ROWS;
    let tile = |start: usize| &x.values.get()[start * per_token..x.tokens.min(start + TOKENS) * per_token];
    let mut start = 0;
    while start < x.tokens {
        let left = x.tokens - start;
        let (count, rows) = if left >= 2 * TOKENS { (2, TOKENS) } else { (1, left.min(TOKENS)) };
        let tokens = [tile(start), tile(if count == 2 { start + TOKENS } else { start })];
        let (blocks, group) = (strip.blocks, strip.group);
        let block = FloatBlock { tokens: &tokens[..count], rows, panels, blocks, group };
        let mut out: Aligned<[Sums; 2 * PANELS]> = Aligned([[[0.0; ROWS]; TOKENS]; 2 * PANELS]);
        // SAFETY: `floats_by_tiles` is true of levels only that `PackedLevel::available` gives where tiles are; they
        // are configured for these rows.
        unsafe {
            let _tiles = tiles::configure_floats(rows);
            tiles::multiply_floats(&block, &mut out.0);
        }
        for (i, sums) in out.0.chunks(panels.len()).take(count).enumerate() {
            for lane in 0..rows {
                // Panels of a token are neighbours in the output.
                for (panel, sums) in sums.iter().enumerate() {
                    write(panel, start + i * TOKENS + lane, &sums[lane]);
                }
            }
        }
        start += count * rows;
    }
}

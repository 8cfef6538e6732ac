//! Products of a weight of integer codes with many tokens on AMX tiles: panels are expanded to bytes, some at a time,
//! and multiplied with all tokens.

use std::ops::Range;

use super::activations::{Activations, tokens};
use super::dot::Quad;
use super::level::PackedLevel;
use super::panels::Panels;
use super::scales::ScaleCode;
use super::tiles::{self, IntBlock, IntShape, Signs, TOKENS};
use super::{BLOCK, QUADS, ROWS};
use crate::buffer::Lines;

/// Most panels of a call.
pub(super) const MOST_PANELS: usize = 4;

/// Tiles of tokens at a time: their results stay in the second-level cache.
const MOST_TILES: usize = 32;

/// Memory of a thread, kept between calls.
#[derive(Default)]
pub(super) struct Memory {
    /// Levels less the zero point, `[panels, quads]`.
    levels: Lines<u8>,
    /// `[panels, groups]`.
    scales: Lines<f32>,
    mins: Lines<f32>,
    /// Start values of every unit, if levels less the zero point are no bytes.
    starts: Vec<i32>,
    /// Results `[tiles, panels]`.
    sums: Lines<f32>,
}

impl Memory {
    /// Multiplies panels `rows` of a weight with all tokens. Only if the level multiplies so many
    /// [by tiles](PackedLevel::by_tiles).
    pub(super) fn multiply(
        &mut self,
        level: &PackedLevel,
        panels: &Panels,
        rows: Range<usize>,
        x: &Activations,
        write: impl Fn(usize, usize, &[f32; ROWS]),
    ) {
        let format = panels.format();
        let most = format
            .levels
            .map_or(((1u32 << format.bits) - 1) as u8, |levels| levels.into_iter().max().unwrap_or(0));
        let shape = IntShape {
            unit: x.unit,
            units_per_group: format.group / x.unit,
            quads: x.quads,
            has_mins: format.mins != ScaleCode::Absent,
            signs: Signs::new(format.zero, most),
        };
        let groups = panels.chunk_groups().max(format.groups(x.cols));
        self.expand(level, panels, rows.clone(), &shape, groups);
        if shape.signs.starts {
            let zero = -i32::from(format.zero);
            self.starts.clear();
            self.starts.extend(x.sums.iter().map(|sum| zero.wrapping_mul(*sum)));
        }
        let starts = if shape.signs.starts { &self.starts } else { &x.sums };
        let levels = self.levels.get().as_chunks().0;
        let (scales, mins) = (self.scales.get().as_chunks().0, self.mins.get().as_chunks().0);
        let panel = |i: usize| {
            let i = i.min(rows.len() - 1);
            let groups = i * groups..(i + 1) * groups;
            (&levels[i * shape.quads..(i + 1) * shape.quads], (&scales[groups.clone()], &mins[groups]))
        };
        let weights: [_; MOST_PANELS] = std::array::from_fn(panel);
        // SAFETY: `by_tiles` is true of levels only that `PackedLevel::available` gives where tiles are.
        let _tiles = unsafe { tiles::configure_ints(&shape) };
        for first in (0..x.tokens).step_by(MOST_TILES * TOKENS) {
            let end = x.tokens.min(first + MOST_TILES * TOKENS);
            let count = (end - first).div_ceil(TOKENS);
            let tile = |i: usize| {
                let start = first + i.min(count - 1) * TOKENS;
                tokens(x, starts, &(start..start + TOKENS))
            };
            let inputs: [_; MOST_TILES] = std::array::from_fn(tile);
            let block = IntBlock { tokens: &inputs[..count], panels: &weights[..rows.len()] };
            let sums = self.sums.resize(count * rows.len() * TOKENS * ROWS);
            sums.fill(0.0);
            let sums = sums.as_chunks_mut::<ROWS>().0.as_chunks_mut::<TOKENS>().0;
            // SAFETY: as above, and the tiles are configured for the shape.
            unsafe { tiles::multiply_ints(&shape, &block, sums) };
            for t in first..end {
                // Panels of a token are neighbours in the output.
                let (tile, lane) = ((t - first) / TOKENS, (t - first) % TOKENS);
                for (panel, sums) in rows.clone().zip(&sums[tile * rows.len()..]) {
                    write(panel, t, &sums[lane]);
                }
            }
        }
    }

    /// Expands panels `rows`.
    fn expand(
        &mut self,
        level: &PackedLevel,
        panels: &Panels,
        rows: Range<usize>,
        shape: &IntShape,
        groups: usize,
    ) {
        let levels = self.levels.resize(rows.len() * shape.quads * size_of::<Quad>()).as_chunks_mut().0;
        let scales = self.scales.resize(rows.len() * groups * ROWS).as_chunks_mut().0;
        let mins = self.mins.resize(rows.len() * groups * ROWS).as_chunks_mut().0;
        let parts = levels.chunks_exact_mut(shape.quads).zip(scales.chunks_exact_mut(groups));
        let parts = parts.zip(mins.chunks_exact_mut(groups));
        for (i, ((levels, scales), mins)) in rows.zip(parts) {
            let places = scales.chunks_mut(panels.chunk_groups()).zip(mins.chunks_mut(panels.chunk_groups()));
            let places = places.zip(levels.chunks_mut(panels.chunk_cols() / BLOCK * QUADS));
            for (chunk, ((scales, mins), levels)) in panels.panel(i).chunks().zip(places) {
                level.widen(&chunk.scales, &[], scales);
                level.widen(&chunk.mins, scales, mins);
                level.expand(panels.format(), chunk.codes, levels);
                if shape.signs.shift > 0 {
                    let written = levels.len().min(chunk.codes.len() / panels.format().bits as usize * QUADS);
                    // SAFETY: as in `multiply`.
                    unsafe { tiles::shift(&mut levels[..written], shape.signs) };
                }
            }
        }
    }
}

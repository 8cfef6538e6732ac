//! A weight repacked to panels of 16 rows.
//!
//! A panel is a sequence of *chunks* of columns: scales, minima and codes of one chunk, then of the next. So a
//! product reads a panel from its first byte to its last, as the processor's prefetcher expects: with all scales of a
//! panel ahead of its codes, every panel began with waits for memory, and a product of Q4_K took twice the time.

use std::cell::RefCell;

use super::codes::code_at;
use super::dot::Quad;
use super::level::PackedLevel;
use super::panel_format::{Chunk, Layout, Panel, PanelFormat};
use super::scales::{SUPER, ScaleCode};
use super::{BLOCK, ROWS};
use crate::buffer::Buffer;
use crate::parallel::for_each_with;

/// Panels that a thread packs at a time.
const PIECE: usize = 8;

/// One row of a weight, filled by its owner for [`Panels::pack`].
#[derive(Debug)]
pub struct Row {
    /// Unsigned codes, `[cols]`.
    pub codes: Vec<u8>,
    /// Scales without the factor, `[groups]`; integers for [`ScaleCode::Integer`].
    pub scales: Vec<f32>,
    /// Minima, `[groups]`; integers for [`ScaleCode::Integer`].
    pub mins: Vec<f32>,
    /// Factors of integer scales, `[ceil(cols / 256)]`.
    pub scale_supers: Vec<f32>,
    /// Factors of integer minima, `[ceil(cols / 256)]`.
    pub min_supers: Vec<f32>,
}

/// A weight `[rows, cols]` in panels. Rows and columns are padded with codes and scales of 0.
#[derive(Clone, Debug)]
pub struct Panels {
    format: PanelFormat,
    rows: usize,
    cols: usize,
    layout: Layout,
    bytes: Buffer,
}

thread_local! {
    /// Scales and minima of a panel, kept between calls.
    static WIDE: RefCell<Vec<[f32; ROWS]>> = RefCell::default();
}

impl Panels {
    /// Packs a weight `[rows, cols]` on up to `threads` threads; `fill` writes row `i`. Returns `None` if memory does
    /// not hold it.
    ///
    /// # Panics
    /// If the format is not [valid](PanelFormat::is_valid).
    pub fn pack(
        format: PanelFormat,
        rows: usize,
        cols: usize,
        threads: usize,
        fill: impl Fn(usize, &mut Row) + Sync,
    ) -> Option<Self> {
        assert!(format.is_valid(), "Panels::pack: no product for {format:?}");
        let layout = format.layout(cols)?;
        let mut bytes = Buffer::zeroed(layout.panel.checked_mul(rows.div_ceil(ROWS))?)?;
        let held = || (0..ROWS).map(|_| Row::new(&format, cols)).collect::<Vec<_>>();
        let pieces = bytes.bytes_mut().chunks_mut((PIECE * layout.panel).max(1)).enumerate();
        for_each_with(threads, held, pieces, |held, (piece, panels)| {
            for (i, panel) in panels.chunks_exact_mut(layout.panel.max(1)).enumerate() {
                for (r, row) in held.iter_mut().enumerate() {
                    match (piece * PIECE + i) * ROWS + r {
                        at if at < rows => fill(at, row),
                        _ => row.clear(),
                    }
                }
                format.write(held, &layout, panel);
            }
        });
        Some(Panels { format, rows, cols, layout, bytes })
    }

    /// Format of the panels.
    pub fn format(&self) -> &PanelFormat {
        &self.format
    }

    /// Output features.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Input features.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Bytes in memory.
    pub fn bytes(&self) -> usize {
        self.bytes.bytes().len()
    }

    /// Dequantizes row `row` into `out`. Reads the whole panel: for single rows, such as an embedding's.
    ///
    /// # Panics
    /// If there is no such row, or `out` is not `[cols]`.
    pub fn row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.rows && out.len() == self.cols, "Panels::row: row {row} of {}", self.rows);
        self.with_scales(|scales, mins| {
            for (chunk, out) in self.panel(row / ROWS).chunks().zip(out.chunks_mut(self.layout.cols)) {
                chunk.widen(scales, mins);
                for (c, out) in out.iter_mut().enumerate() {
                    *out = self.format.value(&chunk, scales, mins, (row % ROWS, c));
                }
            }
        });
    }

    /// Dequantizes column `col` into `out` `[rows]`.
    ///
    /// # Panics
    /// If there is no such column, or `out` is not `[rows]`.
    pub fn column(&self, col: usize, out: &mut [f32]) {
        assert!(col < self.cols && out.len() == self.rows, "Panels::column: column {col} of {}", self.cols);
        self.with_scales(|scales, mins| {
            for (i, out) in out.chunks_mut(ROWS).enumerate() {
                let Some(chunk) = self.panel(i).chunks().nth(col / self.layout.cols) else { continue };
                chunk.widen(scales, mins);
                for (lane, out) in out.iter_mut().enumerate() {
                    *out = self.format.value(&chunk, scales, mins, (lane, col % self.layout.cols));
                }
            }
        });
    }

    /// Calls `f` with places for the scales and minima of a chunk. Minima that the format does not have stay 0.
    fn with_scales(&self, f: impl FnOnce(&mut [[f32; ROWS]], &mut [[f32; ROWS]])) {
        WIDE.with_borrow_mut(|wide| {
            wide.clear();
            wide.resize(2 * self.chunk_groups(), [0.0; ROWS]);
            let (scales, mins) = wide.split_at_mut(self.chunk_groups());
            f(scales, mins);
        });
    }

    /// Bytes of a panel.
    pub(crate) fn panel_bytes(&self) -> usize {
        self.layout.panel
    }

    /// Columns of a chunk, without those past the end of the last one.
    pub(crate) fn chunk_cols(&self) -> usize {
        self.layout.cols
    }

    /// Groups of a chunk.
    pub(crate) fn chunk_groups(&self) -> usize {
        self.format.groups(self.layout.cols)
    }

    /// Returns panel `i`.
    pub(crate) fn panel(&self, i: usize) -> Panel<'_> {
        let bytes = &self.bytes.bytes()[i * self.layout.panel..][..self.layout.panel];
        Panel { bytes, format: &self.format, layout: &self.layout }
    }
}

impl Row {
    fn new(format: &PanelFormat, cols: usize) -> Self {
        let (groups, supers) = (format.groups(cols), cols.div_ceil(SUPER));
        Row {
            codes: vec![0; PanelFormat::blocks(cols) * BLOCK],
            scales: vec![0.0; groups],
            mins: vec![0.0; groups],
            scale_supers: vec![0.0; supers],
            min_supers: vec![0.0; supers],
        }
    }

    fn clear(&mut self) {
        self.codes.fill(0);
        for values in [&mut self.scales, &mut self.mins, &mut self.scale_supers, &mut self.min_supers] {
            values.fill(0.0);
        }
    }
}

impl PanelFormat {
    /// Dequantizes the element of row `lane` of a panel and column `c` of a chunk.
    fn value(
        &self,
        chunk: &Chunk<'_>,
        scales: &[[f32; ROWS]],
        mins: &[[f32; ROWS]],
        (lane, c): (usize, usize),
    ) -> f32 {
        let block = &chunk.codes[c / BLOCK * self.bits as usize..][..self.bits as usize];
        let code = code_at(block, self.bits, lane, c % BLOCK);
        let level = self.levels.map_or(code, |levels| levels[usize::from(code)]);
        let (scale, min) = (scales[c / self.group][lane], mins[c / self.group][lane]);
        scale * (f32::from(level) - f32::from(self.zero)) + min
    }

    /// Writes one panel of 16 rows.
    fn write(&self, rows: &[Row], layout: &Layout, panel: &mut [u8]) {
        let (mut codes, level) = ([[0; BLOCK]; ROWS], PackedLevel::best());
        for chunk in 0..layout.chunks {
            let last = chunk + 1 == layout.chunks;
            let parts = if last { &layout.last } else { &layout.whole };
            let bytes = &mut panel[chunk * layout.whole.total..][..parts.total];
            let (head, quads) = bytes.split_at_mut(parts.codes);
            let mut line =
                |code: ScaleCode, at: std::ops::Range<usize>, value: &dyn Fn(&Row, usize) -> f32| {
                    for (i, out) in head[at].chunks_exact_mut((ROWS * code.bytes()).max(1)).enumerate() {
                        code.put(&std::array::from_fn(|r| value(&rows[r], i)), out);
                    }
                };
            let (group, of) = (layout.cols / self.group * chunk, layout.cols / SUPER * chunk);
            line(self.scales, 0..parts.scale_supers, &|row, i| row.scales[group + i]);
            line(ScaleCode::F16, parts.scale_supers..parts.mins, &|row, i| row.scale_supers[of + i]);
            line(self.mins, parts.mins..parts.min_supers, &|row, i| row.mins[group + i]);
            line(ScaleCode::F16, parts.min_supers..parts.end, &|row, i| row.min_supers[of + i]);
            let quads = quads.as_chunks_mut::<{ size_of::<Quad>() }>().0;
            for (block, quads) in quads.chunks_exact_mut(self.bits as usize).enumerate() {
                let first = chunk * layout.cols + block * BLOCK;
                for (codes, row) in codes.iter_mut().zip(rows) {
                    codes.copy_from_slice(&row.codes[first..][..BLOCK]);
                }
                level.pack(&codes, self.bits, quads);
            }
        }
    }
}

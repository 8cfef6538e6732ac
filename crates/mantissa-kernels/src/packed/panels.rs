//! A weight repacked to panels of 16 rows.
//!
//! A panel is a sequence of *chunks* of columns: scales, minima and codes of one chunk, then those of the next. So a
//! product reads a panel from its first byte to its last, as the processor's prefetcher expects: with all scales of a
//! panel ahead of its codes, every panel began with waits for memory, and a product of Q4_K took twice the time.

use std::cell::RefCell;

use super::codes::{WIDTHS, code_at};
use super::dot::{Plain, Quad};
use super::scales::{Stored, widen};
use super::{BLOCK, PackedLevel, ROWS, SUPER, ScaleCode};
use crate::buffer::Buffer;
use crate::parallel::for_each_with;

/// Panels that a thread packs at a time.
const PIECE: usize = 8;

/// Format of the panels of a weight.
#[derive(Clone, Debug, PartialEq)]
pub struct PanelFormat {
    /// Bits of a code: 2, 3, 4, 5, 6 or 8.
    pub bits: u32,
    /// Levels of 3-bit or 4-bit codes; `None` if a code is its own level.
    pub levels: Option<[u8; 16]>,
    /// Level that stands for 0.
    pub zero: u8,
    /// Columns that share a scale and a minimum: 16, or a multiple of 32 (the last group may be short).
    pub group: usize,
    /// Columns that share an activation scale: 16 or a multiple of 32, and a divisor of `group`.
    pub unit: usize,
    /// Storage of the scales.
    pub scales: ScaleCode,
    /// Storage of the minima.
    pub mins: ScaleCode,
    /// Factor of all scales.
    pub factor: f32,
}

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

/// Places of the chunks of a panel.
#[derive(Clone, Copy, Debug)]
struct Layout {
    /// Columns of a chunk; the last may be shorter.
    cols: usize,
    /// Parts of a chunk, and of the last one.
    whole: Parts,
    last: Parts,
    chunks: usize,
    /// Bytes of a panel.
    panel: usize,
}

/// Start of the parts of a chunk, in bytes, and its size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Parts {
    scale_supers: usize,
    mins: usize,
    min_supers: usize,
    /// End of the minima's factors; the codes are aligned.
    end: usize,
    codes: usize,
    total: usize,
}

/// One panel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Panel<'a> {
    bytes: &'a [u8],
    format: &'a PanelFormat,
    layout: &'a Layout,
}

/// One chunk of a panel, as a product reads it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Chunk<'a> {
    pub(crate) scales: Stored<'a>,
    pub(crate) mins: Stored<'a>,
    pub(crate) codes: &'a [Quad],
}

impl PanelFormat {
    /// Blocks of 32 columns.
    pub(crate) fn blocks(cols: usize) -> usize {
        cols.div_ceil(BLOCK)
    }

    pub(crate) fn groups(&self, cols: usize) -> usize {
        (Self::blocks(cols) * BLOCK).div_ceil(self.group)
    }

    /// True if a product can run: widths and sizes as documented.
    pub fn is_valid(&self) -> bool {
        let size = |n: usize| n == BLOCK / 2 || (n > 0 && n.is_multiple_of(BLOCK));
        WIDTHS.contains(&self.bits)
            && (self.levels.is_none() || matches!(self.bits, 3 | 4))
            && size(self.unit)
            && size(self.group)
            && self.group.is_multiple_of(self.unit)
            && (!self.has_integers() || SUPER.is_multiple_of(self.group))
            && self.scales != ScaleCode::Absent
            && self.factor.is_finite()
    }

    fn has_integers(&self) -> bool {
        self.scales == ScaleCode::Integer || self.mins == ScaleCode::Integer
    }

    /// Bytes of the panels of a weight; `None` on overflow.
    pub fn bytes(&self, rows: usize, cols: usize) -> Option<usize> {
        self.layout(cols)?.panel.checked_mul(rows.div_ceil(ROWS))
    }

    /// Columns of a chunk: whole groups, and at least [`SUPER`].
    fn chunk(&self) -> usize {
        SUPER.next_multiple_of(self.group)
    }

    fn layout(&self, cols: usize) -> Option<Layout> {
        let chunk = self.chunk().min(cols.checked_next_multiple_of(BLOCK)?.max(BLOCK));
        let chunks = cols.div_ceil(chunk);
        let whole = self.parts(chunk)?;
        let last = self.parts(cols - chunks.saturating_sub(1) * chunk)?;
        let panel = match chunks {
            0 => 0,
            _ => whole.total.checked_mul(chunks - 1)?.checked_add(last.total)?,
        };
        Some(Layout { cols: chunk, whole, last, chunks, panel })
    }

    /// Parts of a chunk of `cols` columns.
    fn parts(&self, cols: usize) -> Option<Parts> {
        let groups = self.groups(cols);
        let line = |code: ScaleCode| groups.checked_mul(ROWS * code.bytes());
        let supers = |code| if code == ScaleCode::Integer { cols.div_ceil(SUPER) * 2 * ROWS } else { 0 };
        let scale_supers = line(self.scales)?;
        let mins = scale_supers.checked_add(supers(self.scales))?;
        let min_supers = mins.checked_add(line(self.mins)?)?;
        let end = min_supers.checked_add(supers(self.mins))?;
        let codes = end.checked_next_multiple_of(size_of::<Quad>())?;
        let quads = Self::blocks(cols).checked_mul(self.bits as usize)?;
        let total = codes.checked_add(quads.checked_mul(size_of::<Quad>())?)?;
        Some(Parts { scale_supers, mins, min_supers, end, codes, total })
    }
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

    /// Dequantizes row `row` into `out`. Reads the whole panel: for single rows, such as those of an embedding.
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

impl<'a> Panel<'a> {
    /// Iterates over its chunks.
    #[inline(always)]
    pub(crate) fn chunks(&self) -> impl Iterator<Item = Chunk<'a>> + use<'a> {
        let (format, layout) = (self.format, self.layout);
        let groups_per_super = (SUPER / format.group).max(1);
        let last = layout.chunks.wrapping_sub(1);
        self.bytes.chunks(layout.whole.total.max(1)).enumerate().map(move |(i, bytes)| {
            let parts = if i == last { &layout.last } else { &layout.whole };
            let (scales, rest) = bytes.split_at(parts.scale_supers);
            let (scale_supers, rest) = rest.split_at(parts.mins - parts.scale_supers);
            let (mins, rest) = rest.split_at(parts.min_supers - parts.mins);
            let (min_supers, rest) = rest.split_at(parts.end - parts.min_supers);
            let stored =
                |code, bytes, supers, factor| Stored { code, bytes, supers, groups_per_super, factor };
            Chunk {
                scales: stored(format.scales, scales, scale_supers, format.factor),
                mins: stored(format.mins, mins, min_supers, 1.0),
                codes: rest[parts.codes - parts.end..].as_chunks().0,
            }
        })
    }
}

impl Chunk<'_> {
    /// Widens scales and minima.
    fn widen(&self, scales: &mut [[f32; ROWS]], mins: &mut [[f32; ROWS]]) {
        widen(Plain, &self.scales, &[], scales);
        widen(Plain, &self.mins, scales, mins);
    }

    /// Returns where the chunk begins.
    #[inline(always)]
    pub(crate) fn start(&self) -> *const u8 {
        self.scales.bytes.as_ptr()
    }

    /// Returns its bytes.
    #[inline(always)]
    pub(crate) fn bytes(&self) -> usize {
        self.codes.as_ptr_range().end.addr() - self.start().addr()
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

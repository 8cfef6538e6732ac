//! A weight repacked to panels of 16 rows.

use std::cell::RefCell;

use super::codes::{WIDTHS, code_at, pack_block};
use super::dot::{Plain, Quad};
use super::scales::{Stored, widen};
use super::{BLOCK, ROWS, SUPER, ScaleCode};
use crate::buffer::Buffer;
use crate::parallel::for_each_with;

/// Panels that a thread packs at a time.
const PIECE: usize = 8;

/// Format of the panels of a weight.
#[derive(Clone, Debug, PartialEq)]
pub struct PanelFormat {
    /// Bits of a code: 2, 3, 4, 5, 6 or 8.
    pub bits: u32,
    /// Levels of 4-bit codes; `None` if a code is its own level.
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
    /// Start of each part of a panel, in bytes, and the size of a panel.
    parts: Parts,
    bytes: Buffer,
}

/// Start of the parts of a panel, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Parts {
    scale_supers: usize,
    mins: usize,
    min_supers: usize,
    codes: usize,
    total: usize,
}

/// One panel, as a product reads it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Panel<'a> {
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
            && (self.levels.is_none() || self.bits == 4)
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
        self.parts(cols)?.total.checked_mul(rows.div_ceil(ROWS))
    }

    fn parts(&self, cols: usize) -> Option<Parts> {
        let groups = self.groups(cols);
        let line = |code: ScaleCode| groups.checked_mul(ROWS * code.bytes());
        let supers = |code| if code == ScaleCode::Integer { cols.div_ceil(SUPER) * 2 * ROWS } else { 0 };
        let scale_supers = line(self.scales)?;
        let mins = scale_supers.checked_add(supers(self.scales))?;
        let min_supers = mins.checked_add(line(self.mins)?)?;
        let codes = min_supers.checked_add(supers(self.mins))?.checked_next_multiple_of(size_of::<Quad>())?;
        let quads = Self::blocks(cols).checked_mul(self.bits as usize)?;
        let total = codes.checked_add(quads.checked_mul(size_of::<Quad>())?)?;
        Some(Parts { scale_supers, mins, min_supers, codes, total })
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
        let parts = format.parts(cols)?;
        let mut bytes = Buffer::zeroed(parts.total.checked_mul(rows.div_ceil(ROWS))?)?;
        let held = || (0..ROWS).map(|_| Row::new(&format, cols)).collect::<Vec<_>>();
        let pieces = bytes.bytes_mut().chunks_mut((PIECE * parts.total).max(1)).enumerate();
        for_each_with(threads, held, pieces, |held, (piece, panels)| {
            for (i, panel) in panels.chunks_exact_mut(parts.total.max(1)).enumerate() {
                for (r, row) in held.iter_mut().enumerate() {
                    match (piece * PIECE + i) * ROWS + r {
                        at if at < rows => fill(at, row),
                        _ => row.clear(),
                    }
                }
                format.write(held, parts, panel);
            }
        });
        Some(Panels { format, rows, cols, parts, bytes })
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
        let (panel, lane, format) = (self.panel(row / ROWS), row % ROWS, &self.format);
        WIDE.with_borrow_mut(|wide| {
            wide.clear();
            wide.resize(2 * format.groups(self.cols), [0.0; ROWS]);
            let (scales, mins) = wide.split_at_mut(format.groups(self.cols));
            widen(Plain, panel.scales, &[], scales);
            widen(Plain, panel.mins, scales, mins);
            let zero = f32::from(format.zero);
            for (c, out) in out.iter_mut().enumerate() {
                let block = &panel.codes[c / BLOCK * format.bits as usize..][..format.bits as usize];
                let code = code_at(block, format.bits, lane, c % BLOCK);
                let level = format.levels.map_or(code, |levels| levels[usize::from(code)]);
                let (scale, min) = (scales[c / format.group][lane], mins[c / format.group][lane]);
                *out = scale * (f32::from(level) - zero) + min;
            }
        });
    }

    /// Bytes of a panel.
    pub(crate) fn panel_bytes(&self) -> usize {
        self.parts.total
    }

    pub(crate) fn panel(&self, i: usize) -> Panel<'_> {
        let bytes = &self.bytes.bytes()[i * self.parts.total..][..self.parts.total];
        let Parts { scale_supers, mins, min_supers, codes, .. } = self.parts;
        let groups_per_super = (SUPER / self.format.group).max(1);
        let stored = |code, bytes, supers, factor| Stored { code, bytes, supers, groups_per_super, factor };
        Panel {
            scales: stored(
                self.format.scales,
                &bytes[..scale_supers],
                &bytes[scale_supers..mins],
                self.format.factor,
            ),
            mins: stored(self.format.mins, &bytes[mins..min_supers], &bytes[min_supers..codes], 1.0),
            codes: bytes[codes..].as_chunks().0,
        }
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
    /// Writes one panel of 16 rows.
    fn write(&self, rows: &[Row], parts: Parts, panel: &mut [u8]) {
        let mut head = Vec::with_capacity(parts.codes);
        let mut lines = |code: ScaleCode, values: fn(&Row) -> &[f32]| {
            for group in 0..values(&rows[0]).len() {
                rows.iter().for_each(|row| code.put(values(row)[group], &mut head));
            }
        };
        lines(self.scales, |row| &row.scales);
        if self.scales == ScaleCode::Integer {
            lines(ScaleCode::F16, |row| &row.scale_supers);
        }
        lines(self.mins, |row| &row.mins);
        if self.mins == ScaleCode::Integer {
            lines(ScaleCode::F16, |row| &row.min_supers);
        }
        panel[..head.len()].copy_from_slice(&head);
        let quads = panel[parts.codes..].as_chunks_mut::<{ size_of::<Quad>() }>().0;
        let mut codes = [[0; BLOCK]; ROWS];
        for (block, quads) in quads.chunks_exact_mut(self.bits as usize).enumerate() {
            for (codes, row) in codes.iter_mut().zip(rows) {
                codes.copy_from_slice(&row.codes[block * BLOCK..][..BLOCK]);
            }
            pack_block(&codes, self.bits, quads);
        }
    }
}

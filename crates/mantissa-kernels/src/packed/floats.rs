//! Floating-point weights in panels of 16 rows, whose products are one chain of multiply-adds per row.
//!
//! A panel holds, column by column, the codes of its 16 rows; bf16 and 8-bit floats multiply pairs of columns where
//! the processor has `VDPBF16PS`. There 8-bit floats are widened by a table of bf16, in registers for few tokens and
//! once to memory for many. A row's products are added in the order of the columns, group by group, and every
//! group's sum is multiplied by its scale. So a token's bits do not depend on the other tokens, the threads or the
//! tile that it is in. They depend on the arithmetic: with `VDPBF16PS` activations are rounded to bf16, without it
//! they are f32. That choice follows from the level and the code alone ([`FloatPanels::in_bf16`]).

use super::float_code::{FloatCode, PairTable};
use super::level::PackedLevel;
use super::{BLOCK, ROWS};
use crate::buffer::Buffer;
use crate::parallel::for_each;

impl FloatCode {
    /// True if products round activations to bf16.
    fn in_bf16(self) -> bool {
        PackedLevel::best().has_bf16() && matches!(self, FloatCode::Bf16 | FloatCode::Mini { .. })
    }
}

/// A weight `[rows, cols]` of floating-point codes, in panels. Rows and columns are padded with zeros.
#[derive(Clone, Debug)]
pub struct FloatPanels {
    pub(super) code: FloatCode,
    pub(super) rows: usize,
    pub(super) cols: usize,
    /// Blocks of 32 columns.
    pub(super) blocks: usize,
    pub(super) bytes: Buffer,
    /// Blocks that share a scale.
    pub(super) group: usize,
    /// `[panels, groups, 16]`, with the factor of the codes.
    pub(super) scales: Vec<[f32; ROWS]>,
    pub(super) table: Box<PairTable>,
}

impl FloatPanels {
    /// Makes panels from the little-endian codes of a weight, row by row, and its scales `[rows, ceil(cols / group)]`,
    /// on up to `threads` threads. Returns `None` if memory does not hold them.
    ///
    /// # Panics
    /// If the group is neither a multiple of 32 nor the whole row, or a slice has another length.
    pub fn new(
        code: FloatCode,
        (rows, cols): (usize, usize),
        bytes: &[u8],
        group: usize,
        scales: &[f32],
        threads: usize,
    ) -> Option<Self> {
        let (blocks, in_bf16) = (cols.div_ceil(BLOCK), code.in_bf16());
        let group = if group >= cols { blocks.max(1) * BLOCK } else { group };
        assert!(group.is_multiple_of(BLOCK), "FloatPanels: groups of {group} columns");
        let groups = cols.div_ceil(group);
        assert_eq!(bytes.len(), rows * cols * code.bytes(), "FloatPanels: bytes");
        assert_eq!(scales.len(), rows * groups, "FloatPanels: scales");
        let panel = blocks * BLOCK * ROWS * code.bytes();
        let panels = rows.div_ceil(ROWS);
        let mut own = Buffer::zeroed(panel.checked_mul(panels)?)?;
        let width = cols * code.bytes();
        let lines = own.bytes_mut().chunks_mut(panel.max(1)).zip(bytes.chunks((ROWS * width).max(1)));
        for_each(threads, lines, |(to, from)| match code {
            FloatCode::F32 => interleave::<4>(from, width, to),
            FloatCode::F16 => interleave::<2>(from, width, to),
            // Pairs of columns stay together.
            FloatCode::Bf16 => interleave::<4>(from, width, to),
            FloatCode::Mini { .. } if in_bf16 => interleave_fours(from, width, to),
            FloatCode::Mini { .. } => interleave::<1>(from, width, to),
        });
        let factor = code.factor();
        let scale = |panel: usize, g: usize| -> [f32; ROWS] {
            std::array::from_fn(|r| {
                scales.get((panel * ROWS + r) * groups + g).map_or(0.0, |scale| scale * factor)
            })
        };
        let scales = (0..panels).flat_map(|panel| (0..groups).map(move |g| (panel, g)));
        let scales = scales.map(|(panel, g)| scale(panel, g)).collect();
        Some(FloatPanels {
            code,
            rows,
            cols,
            blocks,
            bytes: own,
            group: group / BLOCK,
            scales,
            table: Box::new(code.pair_table()),
        })
    }

    /// Code of the elements.
    pub fn code(&self) -> FloatCode {
        self.code
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
        self.bytes.bytes().len() + size_of_val(self.scales.as_slice())
    }

    /// True if products round activations to bf16 and use the processor's dot product of bf16.
    pub fn in_bf16(&self) -> bool {
        self.code.in_bf16()
    }

    pub(super) fn panel_bytes(&self) -> usize {
        self.blocks * BLOCK * ROWS * self.code.bytes()
    }

    pub(super) fn groups(&self) -> usize {
        self.blocks.div_ceil(self.group)
    }

    /// Dequantizes row `row` into `out`.
    ///
    /// # Panics
    /// If there is no such row, or `out` is not `[cols]`.
    pub fn row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.rows && out.len() == self.cols, "FloatPanels::row: row {row} of {}", self.rows);
        let (lane, bytes, mini) = (row % ROWS, self.code.bytes(), self.code.mini());
        let panel = &self.bytes.bytes()[row / ROWS * self.panel_bytes()..][..self.panel_bytes()];
        for (c, out) in out.iter_mut().enumerate() {
            let at = match self.code {
                FloatCode::Bf16 => ((c / 2 * ROWS + lane) * 2 + c % 2) * bytes,
                FloatCode::Mini { .. } if self.in_bf16() => c / 4 * 4 * ROWS + at_four(lane, c % 4),
                _ => (c * ROWS + lane) * bytes,
            };
            let half = |bits: u16| {
                let mut wide = [0.0];
                crate::generic::f16_to_f32(&[bits], &mut wide);
                wide[0]
            };
            let value = match (self.code, &panel[at..at + bytes]) {
                (FloatCode::Mini { .. }, [code]) => half(mini.half(*code)),
                (FloatCode::F16, [low, high]) => half(u16::from_le_bytes([*low, *high])),
                (_, [low, high]) => f32::from_bits(u32::from(u16::from_le_bytes([*low, *high])) << 16),
                (_, word) => f32::from_le_bytes(std::array::from_fn(|i| word.get(i).copied().unwrap_or(0))),
            };
            *out = value * self.scales[row / ROWS * self.groups() + c / BLOCK / self.group][lane];
        }
    }
}

/// Interleaves the rows of a panel, `width` bytes each, by elements of `N` bytes. The last element of a row may be
/// short.
fn interleave<const N: usize>(from: &[u8], width: usize, to: &mut [u8]) {
    let lines = to.as_chunks_mut::<N>().0;
    for (r, row) in from.chunks(width.max(1)).enumerate() {
        let (whole, rest) = row.as_chunks::<N>();
        whole.iter().enumerate().for_each(|(i, element)| lines[i * ROWS + r] = *element);
        if !rest.is_empty() {
            lines[whole.len() * ROWS + r][..rest.len()].copy_from_slice(rest);
        }
    }
}

/// Place of column `c` of row `r` in four columns of 16 rows, as [`PairDot::wide_pairs`](super::float_product::PairDot::wide_pairs) reads them.
fn at_four(r: usize, c: usize) -> usize {
    r / 4 * 16 + c / 2 * 8 + r % 4 * 2 + c % 2
}

/// Interleaves the rows of a panel of bytes by four columns.
fn interleave_fours(from: &[u8], width: usize, to: &mut [u8]) {
    let fours = to.as_chunks_mut::<{ 4 * ROWS }>().0;
    for (r, row) in from.chunks(width.max(1)).enumerate() {
        for (four, columns) in fours.iter_mut().zip(row.chunks(4)) {
            columns.iter().enumerate().for_each(|(c, code)| four[at_four(r, c)] = *code);
        }
    }
}

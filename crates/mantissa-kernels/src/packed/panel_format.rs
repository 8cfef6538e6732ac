//! Format of the panels of a weight, and the places of their parts.

use super::codes::WIDTHS;
use super::dot::{Plain, Quad};
use super::scales::{SUPER, ScaleCode, Stored, widen};
use super::{BLOCK, ROWS};

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

/// Places of the chunks of a panel.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    /// Columns of a chunk; the last may be shorter.
    pub(super) cols: usize,
    /// Parts of a chunk, and of the last one.
    pub(super) whole: ChunkOffsets,
    pub(super) last: ChunkOffsets,
    pub(super) chunks: usize,
    /// Bytes of a panel.
    pub(super) panel: usize,
}

/// Start of the parts of a chunk, in bytes, and its size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ChunkOffsets {
    pub(super) scale_supers: usize,
    pub(super) mins: usize,
    pub(super) min_supers: usize,
    /// End of the minima's factors; the codes are aligned.
    pub(super) end: usize,
    pub(super) codes: usize,
    pub(super) total: usize,
}

/// One panel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Panel<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) format: &'a PanelFormat,
    pub(super) layout: &'a Layout,
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

    pub(super) fn layout(&self, cols: usize) -> Option<Layout> {
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
    fn parts(&self, cols: usize) -> Option<ChunkOffsets> {
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
        Some(ChunkOffsets { scale_supers, mins, min_supers, end, codes, total })
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
    pub(super) fn widen(&self, scales: &mut [[f32; ROWS]], mins: &mut [[f32; ROWS]]) {
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

//! `Format`: everything a decoder needs to turn stored codes into numbers, and nothing else.
//!
//! Two formats are equal if they decode equally. The choice of scales and rounding belongs to the
//! [`Encoder`](crate::Encoder).

use std::hash::{Hash, Hasher};

use crate::codebook::Book;
use crate::codec::{Codec, CodecId};
use crate::e8m0;
use crate::minifloat::{F16, MiniFloat, Overflow};
use crate::round::Rounding;
use crate::trellis::Trellis;

/// Code: bits that represent one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Code {
    /// IEEE 754 binary64. Every value here is an f32, so codes are passed as f32 patterns, which
    /// [`Codes::U64`](crate::Codes::U64) converts without loss.
    F64,
    /// IEEE 754 binary32; the code is its bit pattern.
    F32,
    /// TensorFloat-32: an f32 rounded to 10 mantissa bits, nearest-even; the code is the f32 pattern.
    Tf32,
    /// A floating-point element of at most 16 bits.
    Float(MiniFloat),
    /// A two's complement integer of 1 to 8 bits, kept sign-extended in 8 bits.
    Int(u32),
    /// -1, 0 or 1, in two's complement.
    Ternary,
    /// Index into a code book, for scales that are quantized themselves ([`Table`] is for elements).
    Book(Book),
    /// 8-bit two's complement integer `k` with value `k/64` (the INT8 element of OCP MX v1.0, section 5.3.4).
    Fixed64,
    /// An unsigned power of two, `2^(code-127)`.
    E8m0,
}

impl Code {
    /// Bits of the code in packed storage.
    pub const fn bits(self) -> u32 {
        match self {
            Code::F64 => 64,
            Code::F32 | Code::Tf32 => 32,
            Code::Float(f) => f.bits(),
            Code::Int(b) => b,
            Code::Ternary => 2,
            Code::Book(b) => b.bits(),
            Code::Fixed64 | Code::E8m0 => 8,
        }
    }

    /// Number represented by `code`. Integers read the low 8 bits as two's complement.
    pub fn decode(self, code: u32) -> f32 {
        match self {
            Code::F64 | Code::F32 | Code::Tf32 => f32::from_bits(code),
            Code::Float(f) => f.decode(code),
            Code::Int(_) | Code::Ternary => f32::from(code as u8 as i8),
            Code::Book(b) => b.level(code),
            Code::Fixed64 => f32::from(code as u8 as i8) / 64.0,
            Code::E8m0 => e8m0::decode(code as u8),
        }
    }

    /// Largest finite magnitude on the positive side.
    pub fn max(self) -> f32 {
        match self {
            Code::F64 | Code::F32 => f32::MAX,
            Code::Tf32 => f32::from_bits(0x7f7f_e000),
            Code::Float(f) => f.max(),
            Code::Ternary | Code::Book(_) => 1.0,
            Code::Int(b) => ((1i32 << (b - 1)) - 1) as f32,
            Code::Fixed64 => 127.0 / 64.0,
            Code::E8m0 => e8m0::decode(254),
        }
    }

    /// Bytes of one code if each code has its own storage unit (`cast`'s `n.codes`).
    pub const fn unit_bytes(self) -> usize {
        match self.bits() {
            0..=8 => 1,
            9..=16 => 2,
            17..=32 => 4,
            _ => 8,
        }
    }
}

/// Elements of a `[rows, cols]` tensor that share a scale. Leading axes are folded into rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Blocks {
    /// One block.
    Tensor,
    /// A block per row: an output channel of a weight, a token of an activation, a head vector of a KV cache.
    Row,
    /// Consecutive elements of a row; a ragged last group is short.
    Group(u32),
    /// Rectangles of `rows × cols`, ragged at the edges.
    Tile {
        /// Rows of a tile.
        rows: u32,
        /// Columns of a tile.
        cols: u32,
    },
    /// Consecutive elements of the flattened tensor; the last block may be short.
    Flat(u32),
}

impl Blocks {
    /// Shape of the array of blocks: `[1]`, `[rows, 1]`, `[rows, groups]`, `[tile rows, tile cols]` or `[blocks]`.
    pub fn grid(self, rows: usize, cols: usize) -> Vec<usize> {
        match self {
            Blocks::Tensor => vec![1],
            Blocks::Row => vec![rows, 1],
            Blocks::Group(g) => vec![rows, cols.div_ceil(g as usize)],
            Blocks::Tile { rows: r, cols: c } => vec![rows.div_ceil(r as usize), cols.div_ceil(c as usize)],
            Blocks::Flat(g) => vec![(rows * cols).div_ceil(g as usize)],
        }
    }

    /// Number of blocks of a `[rows, cols]` tensor.
    pub fn count(self, rows: usize, cols: usize) -> usize {
        self.grid(rows, cols).iter().product()
    }

    /// Largest number of elements in a block of a `[rows, cols]` tensor.
    pub fn len(self, rows: usize, cols: usize) -> usize {
        match self {
            Blocks::Tensor => rows * cols,
            Blocks::Row => cols,
            Blocks::Group(g) => (g as usize).min(cols),
            Blocks::Tile { rows: r, cols: c } => (r as usize).min(rows) * (c as usize).min(cols),
            Blocks::Flat(g) => (g as usize).min(rows * cols),
        }
    }

    /// Block of the element at (`row`, `col`).
    pub fn index(self, cols: usize, row: usize, col: usize) -> usize {
        match self {
            Blocks::Tensor => 0,
            Blocks::Row => row,
            Blocks::Group(g) => row * cols.div_ceil(g as usize) + col / g as usize,
            Blocks::Tile { rows: r, cols: c } => {
                (row / r as usize) * cols.div_ceil(c as usize) + col / c as usize
            }
            Blocks::Flat(g) => (row * cols + col) / g as usize,
        }
    }

    /// Splits one row into runs of consecutive elements in the same block, as (block, first column, end column).
    pub fn runs(self, cols: usize, row: usize) -> impl Iterator<Item = (usize, usize, usize)> {
        let mut start = 0;
        std::iter::from_fn(move || {
            if start >= cols {
                return None;
            }
            let end = self.run_end(cols, row, start);
            let run = (self.index(cols, row, start), start, end);
            start = end;
            Some(run)
        })
    }

    fn run_end(self, cols: usize, row: usize, start: usize) -> usize {
        match self {
            Blocks::Tensor | Blocks::Row => cols,
            Blocks::Group(g) | Blocks::Tile { cols: g, .. } => {
                cols.min((start / g as usize + 1) * g as usize)
            }
            Blocks::Flat(g) => {
                let (g, at) = (g as usize, row * cols + start);
                cols.min(start + (g - at % g))
            }
        }
    }

    /// Returns equivalent blocks of a `[rows, cols]` tensor: flat blocks that divide its rows are groups.
    pub fn simplest(self, rows: usize, cols: usize) -> Blocks {
        match self {
            Blocks::Flat(g) if g as usize >= rows * cols => Blocks::Tensor,
            Blocks::Flat(g) if cols.is_multiple_of(g as usize) => Blocks::Group(g),
            blocks => blocks,
        }
    }

    /// True if every block lies within one row, so rows can be processed independently.
    pub const fn within_rows(self) -> bool {
        matches!(self, Blocks::Row | Blocks::Group(_))
    }
}

/// Effect of a stored outer scale on the values below it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Sense {
    /// `value = element · scale`.
    Multiplier,
    /// `value = element · (inner / scale)`: compressed-tensors stores NVFP4's global scale as `2688 / amax`.
    Divisor,
    /// `value = (element · inner) · (amax / full_scale)`: Transformer Engine stores the tensor's amax itself.
    Amax {
        /// Product of the largest element and the largest inner scale, 6 · 448 = 2688 for NVFP4.
        full_scale: u32,
    },
    /// `value = element · (inner · scale + mean)`: double quantization (QLoRA, Dettmers et al. 2023, section 3)
    /// stores the difference of scales from their mean, which is stored once per tensor.
    Residual,
}

/// Scale of a block: its own code and, if scales are scaled themselves, the level above.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ScaleTree {
    /// Code of the stored scale.
    pub code: Code,
    /// Meaning of the scale for the level below.
    pub sense: Sense,
    /// Level above: the blocks of *these* scales that share one, and that level's own tree.
    pub outer: Option<(Blocks, Box<ScaleTree>)>,
}

impl ScaleTree {
    /// A single level that multiplies.
    pub const fn leaf(code: Code) -> Self {
        ScaleTree { code, sense: Sense::Multiplier, outer: None }
    }

    /// Tree of these scales below `outer`, shared by `blocks` of them.
    pub fn below(code: Code, blocks: Blocks, outer: ScaleTree) -> Self {
        ScaleTree { code, sense: Sense::Multiplier, outer: Some((blocks, Box::new(outer))) }
    }

    /// Tree of the global scale, if there is one.
    pub fn tensor_wide(&self) -> Option<&ScaleTree> {
        self.outer.as_ref().filter(|(blocks, _)| *blocks == Blocks::Tensor).map(|(_, tree)| &**tree)
    }

    /// Under double quantization, the blocks of these scales that share a nested scale, and that level's tree.
    pub fn nested(&self) -> Option<(Blocks, &ScaleTree)> {
        self.outer.as_ref().filter(|(_, tree)| tree.sense == Sense::Residual).map(|(b, tree)| (*b, &**tree))
    }
}

/// Shift of codes before they are scaled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Offset {
    /// `value = code · scale`.
    None,
    /// `value = (code - zero) · scale` with an integer zero point per block, in the signed domain of the code.
    Zero,
    /// `value = (code + 2^(b-1)) · scale + bias` with an f32 bias per block, the block's minimum: the lowest code
    /// means the bias itself (KV caches).
    Bias,
    /// As [`Bias`](Offset::Bias), with a bias in f16 (HQQ's package stores scales and zero points so).
    HalfBias,
}

impl Offset {
    /// True if blocks have a bias, of either dtype.
    pub const fn is_bias(self) -> bool {
        matches!(self, Offset::Bias | Offset::HalfBias)
    }

    /// Returns the stored bias nearest to `x`: `x` itself but under [`HalfBias`](Offset::HalfBias). One beyond the range of f16
    /// becomes its largest value.
    pub fn nearest_bias(self, x: f32) -> f32 {
        match self {
            Offset::HalfBias => F16.decode(F16.encode(x, Overflow::Saturate, Rounding::NearestEven, 0)),
            _ => x,
        }
    }
}

/// Format whose codes are numbers.
#[derive(Clone, Debug, Eq)]
pub struct Affine {
    /// The element.
    pub code: Code,
    /// Elements that share a scale. [`Blocks::Tensor`] without a scale.
    pub blocks: Blocks,
    /// The scale; `None` for a plain cast.
    pub scale: Option<ScaleTree>,
    /// Zero point.
    pub offset: Offset,
}

/// Affine formats are equal if they decode equally: tiles of one row are groups, and without scales blocks do not
/// matter.
impl PartialEq for Affine {
    fn eq(&self, other: &Self) -> bool {
        self.decoded_by() == other.decoded_by()
    }
}

impl Hash for Affine {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.decoded_by().hash(state);
    }
}

impl Affine {
    /// Parts used by a decoder, with canonical blocks.
    fn decoded_by(&self) -> (Code, Option<(Blocks, &ScaleTree)>, Offset) {
        let blocks = match self.blocks {
            Blocks::Tile { rows: 1, cols } => Blocks::Group(cols),
            blocks => blocks,
        };
        (self.code, self.scale.as_ref().map(|scale| (blocks, scale)), self.offset)
    }
}

/// Format whose codes index a table: `value = table[code] · scale`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Table {
    /// The table.
    pub book: Book,
    /// Elements that share a scale.
    pub blocks: Blocks,
    /// The scale (the block's amax).
    pub scale: ScaleTree,
}

/// Stored form of a tensor: everything a reader needs, and nothing else.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Format {
    /// Codes are numbers.
    Affine(Affine),
    /// Codes are table indices.
    Table(Table),
    /// Blocks of bytes without a code per element.
    Codec(CodecId),
    /// Tiles of trellis states between two rotations.
    Trellis(Trellis),
}

impl Format {
    /// A plain cast to `code`, without scales.
    pub const fn plain(code: Code) -> Self {
        Format::Affine(Affine { code, blocks: Blocks::Tensor, scale: None, offset: Offset::None })
    }

    /// Elements that share a scale, or are encoded together.
    pub const fn blocks(&self) -> Blocks {
        match self {
            Format::Affine(a) => a.blocks,
            Format::Table(t) => t.blocks,
            Format::Codec(id) => Blocks::Group(id.codec().elements as u32),
            Format::Trellis(_) => Blocks::Tensor,
        }
    }

    /// The scale tree, if the format has scales.
    pub const fn scale(&self) -> Option<&ScaleTree> {
        match self {
            Format::Affine(a) => a.scale.as_ref(),
            Format::Table(t) => Some(&t.scale),
            Format::Codec(_) | Format::Trellis(_) => None,
        }
    }

    /// Bits of an element's code; 0 without element codes (a codec, a trellis).
    pub const fn code_bits(&self) -> u32 {
        match self {
            Format::Affine(a) => a.code.bits(),
            Format::Table(t) => t.book.bits(),
            Format::Codec(_) | Format::Trellis(_) => 0,
        }
    }

    /// True if there is a zero point per block.
    pub const fn has_zero(&self) -> bool {
        matches!(self, Format::Affine(Affine { offset: Offset::Zero, .. }))
    }

    /// True if there is a bias per block.
    pub const fn has_bias(&self) -> bool {
        matches!(self, Format::Affine(Affine { offset, .. }) if offset.is_bias())
    }

    /// Returns the same format with scales and biases in f16, if scales are f32 without a level above.
    #[must_use]
    pub fn with_half_scales(mut self) -> Self {
        if self.scale().is_some_and(|scale| scale.code == Code::F32 && scale.outer.is_none()) {
            self = self.with_scale_code(Code::Float(F16));
            if let Format::Affine(affine) = &mut self
                && affine.offset.is_bias()
            {
                affine.offset = Offset::HalfBias;
            }
        }
        self
    }

    /// The codec, if the format is one.
    pub const fn codec(&self) -> Option<&'static Codec> {
        match self {
            Format::Codec(id) => Some(id.codec()),
            _ => None,
        }
    }

    /// The trellis, if the format is one.
    pub const fn trellis(&self) -> Option<Trellis> {
        match self {
            Format::Trellis(trellis) => Some(*trellis),
            _ => None,
        }
    }

    /// The same format with its innermost scale stored as `code`. Checkpoint formats that keep scales in the model's
    /// dtype (compressed-tensors) use this before codes are chosen. Formats without a scale are returned unchanged.
    pub fn with_scale_code(mut self, code: Code) -> Self {
        match &mut self {
            Format::Affine(Affine { scale: Some(scale), .. }) => scale.code = code,
            Format::Affine(_) => {}
            Format::Table(t) => t.scale.code = code,
            Format::Codec(_) | Format::Trellis(_) => {}
        }
        self
    }

    /// Bits of a `[rows, cols]` tensor in packed storage, including scales, zero points and biases. A zero point
    /// takes the bits of a code, a bias 32 or 16.
    pub fn total_bits(&self, rows: usize, cols: usize) -> u64 {
        let blocks = self.blocks().count(rows, cols);
        if let Format::Trellis(trellis) = self {
            return 8 * trellis.code_bytes(rows, cols) as u64 + trellis.scale_bits(rows, cols);
        }
        if let Some(codec) = self.codec() {
            return blocks as u64 * codec.bytes as u64 * 8;
        }
        let offset = match self {
            Format::Affine(Affine { offset: Offset::Zero, code, .. }) => code.bits(),
            Format::Affine(Affine { offset: Offset::Bias, .. }) => 32,
            Format::Affine(Affine { offset: Offset::HalfBias, .. }) => 16,
            _ => 0,
        };
        let elements = rows as u64 * cols as u64;
        elements * u64::from(self.code_bits())
            + blocks as u64 * u64::from(offset)
            + scale_bits(self.scale(), blocks)
    }

    /// Average bits per element of a `[rows, cols]` tensor, scales and zero points included. 0 for an empty tensor.
    pub fn bits_per_weight(&self, rows: usize, cols: usize) -> f64 {
        match rows * cols {
            0 => 0.0,
            n => self.total_bits(rows, cols) as f64 / n as f64,
        }
    }
}

fn scale_bits(tree: Option<&ScaleTree>, count: usize) -> u64 {
    let Some(tree) = tree else { return 0 };
    let outer = tree.outer.as_ref().map_or(0, |(blocks, outer)| {
        let mean = if outer.sense == Sense::Residual { 32 } else { 0 };
        scale_bits(Some(outer), blocks.count(1, count)) + mean
    });
    count as u64 * u64::from(tree.code.bits()) + outer
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::minifloat::{E2M1, E4M3};

    #[test]
    fn runs_cover_each_row_once_and_agree_with_index() {
        let all = [
            Blocks::Tensor,
            Blocks::Row,
            Blocks::Group(4),
            Blocks::Tile { rows: 2, cols: 3 },
            Blocks::Flat(5),
            Blocks::Flat(64),
        ];
        for blocks in all {
            let (rows, cols) = (3, 7);
            for row in 0..rows {
                let mut next = 0;
                for (block, start, end) in blocks.runs(cols, row) {
                    assert_eq!(start, next, "{blocks:?}");
                    assert!((start..end).all(|c| blocks.index(cols, row, c) == block), "{blocks:?}");
                    next = end;
                }
                assert_eq!(next, cols);
            }
            assert_eq!(blocks.index(cols, rows - 1, cols - 1) + 1, blocks.count(rows, cols), "{blocks:?}");
        }
    }

    #[test]
    fn bits_per_weight_counts_every_level() {
        let global = ScaleTree { code: Code::F32, sense: Sense::Divisor, outer: None };
        let nvfp4 = Format::Affine(Affine {
            code: Code::Float(E2M1),
            blocks: Blocks::Group(16),
            scale: Some(ScaleTree {
                code: Code::Float(E4M3),
                sense: Sense::Multiplier,
                outer: Some((Blocks::Tensor, Box::new(global))),
            }),
            offset: Offset::None,
        });
        assert_eq!(nvfp4.total_bits(4, 32), 4 * 32 * 4 + 8 * 8 + 32);
        assert_eq!(Format::plain(Code::Float(E4M3)).bits_per_weight(3, 5), 8.0);
    }
}

//! Formats of moments (running means of gradients or their squares), and their storage.

use std::sync::LazyLock;

use mantissa_kernels::{CodeTable, for_each_with, kernels};
use mantissa_model::{LoadError, zeros};
use mantissa_num::codebook::Book;
use mantissa_num::minifloat::E4M3;

use super::map::StateMap;
use super::paged::{Extent, PageBuffer};
use super::{PIECE, Unpaged};
use crate::blockwise::{BLOCK, BLOCKWISE_RULES, BlockwiseRule, MIN_ELEMENTS, maps};
use crate::error::TrainError;

/// Storage format of moments. Tensors with fewer than [`MIN_ELEMENTS`] elements keep f32 instead of codes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum MomentFormat {
    /// Stored as f32.
    #[default]
    F32,
    /// Stored as bf16, rounded to nearest.
    Bf16,
    /// 8-bit blocks of bitsandbytes; see [`crate::blockwise`].
    Blockwise8(BlockwiseRule),
    /// 8-bit blocks of torchao (`OptimState8bit`): 256 values with a scale, dynamic maps, ties to the larger code.
    Torchao8,
    /// 4-bit blocks of torchao (`OptimState4bit`): 128 values with a scale; dynamic map for first moments, sixteen
    /// even levels without zero for second moments.
    Torchao4,
    /// E4M3 in blocks of 256, scale `max(amax, 1e-12) / 448` (torchao's `OptimStateFp8`).
    Fp8,
    /// Codes of an 8-bit map with its own block size.
    Map(StateMap),
}

/// Formats with a name of their own.
const NAMED: [(&str, MomentFormat); 6] = [
    ("f32", MomentFormat::F32),
    ("bf16", MomentFormat::Bf16),
    ("fp8", MomentFormat::Fp8),
    ("8bit", MomentFormat::Blockwise8(BlockwiseRule::Cuda)),
    ("8bit:torchao", MomentFormat::Torchao8),
    ("4bit", MomentFormat::Torchao4),
];

/// Blocks of codes with a scale each.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Coding {
    /// Elements that share a scale.
    block: usize,
    /// True for two codes per byte, the first in the high nibble.
    packed: bool,
    /// Maps of first and second moments.
    tables: [&'static CodeTable; 2],
    /// Smallest amax.
    floor: f32,
    /// Level that the amax is scaled to.
    top: f32,
    /// Codes of a block whose amax is 0; without them it is encoded with the smallest amax.
    zeros: Option<[u8; 2]>,
    /// Name of the scales in checkpoints.
    scale: &'static str,
}

static TORCHAO8: LazyLock<[CodeTable; 2]> =
    LazyLock::new(|| [Book::Dyn8, Book::Dyn8Unsigned].map(|book| torchao(book.levels())));
static TORCHAO4: LazyLock<[CodeTable; 2]> = LazyLock::new(|| {
    let even: [f32; 16] = std::array::from_fn(|i| (i + 1) as f32 / 16.0);
    [torchao(Book::Dyn4.levels()), torchao(&even)]
});
static FP8: LazyLock<CodeTable> = LazyLock::new(|| {
    let levels: [f32; 256] = std::array::from_fn(|code| E4M3.decode(code as u32));
    CodeTable::new(&levels, |v| E4M3.encode_saturating(v) as u8)
});

/// Table of torchao's `quantize_8bit_with_qmap`: the last level not above the value, or the next one if the value is
/// at least half way to it.
fn torchao(levels: &'_ [f32]) -> CodeTable {
    CodeTable::new(levels, |v| {
        let low = levels.partition_point(|level| *level <= v).saturating_sub(1);
        let high = (low + 1).min(levels.len() - 1);
        let up = v - levels[low] >= (levels[high] - levels[low]) * 0.5;
        (if up { high } else { low }) as u8
    })
}

impl MomentFormat {
    /// Accepted names, for messages.
    pub const ALLOWED: &'static str = "f32, bf16, fp8, 8bit, 8bit:cpu, 8bit:torchao, 4bit, or the scheme of a \
                                       signed 8-bit map such as lin8, dyn8-tensor, lin8-g128";

    /// Returns the format called `name`.
    pub fn parse(name: &str) -> Option<Self> {
        if let Some((_, format)) = NAMED.iter().find(|(known, _)| *known == name) {
            return Some(*format);
        }
        match name.strip_prefix("8bit:") {
            Some(rule) => {
                let found = BLOCKWISE_RULES.iter().find(|(known, _)| *known == rule)?;
                Some(MomentFormat::Blockwise8(found.1))
            }
            None => StateMap::new(&mantissa_num::parse_weight(name).ok()?).map(MomentFormat::Map),
        }
    }

    /// Returns the format for a parameter of `n` elements.
    fn of(self, n: usize) -> Self {
        match self {
            MomentFormat::F32 | MomentFormat::Bf16 => self,
            _ if n < MIN_ELEMENTS => MomentFormat::F32,
            format => format,
        }
    }

    /// True if a parameter of `n` elements is decoded whole, because its blocks are not those of an update.
    pub(crate) fn is_whole(self, n: usize) -> bool {
        matches!(self.of(n), MomentFormat::Map(_))
    }

    /// Returns the blocks of formats with codes, except for maps.
    fn coding(self) -> Option<Coding> {
        let (torchao, fp8) = (1e-12, (1e-12, 448.0));
        Some(match self {
            MomentFormat::F32 | MomentFormat::Bf16 | MomentFormat::Map(_) => return None,
            MomentFormat::Blockwise8(rule) => {
                let (tables, zeros) = maps(rule);
                Coding {
                    block: BLOCK,
                    packed: false,
                    tables,
                    floor: 0.0,
                    top: 1.0,
                    zeros: Some(zeros),
                    scale: "absmax",
                }
            }
            MomentFormat::Torchao8 => {
                let tables = [&TORCHAO8[0], &TORCHAO8[1]];
                let (block, packed) = (256, false);
                Coding { block, packed, tables, floor: torchao, top: 1.0, zeros: None, scale: "scale" }
            }
            MomentFormat::Torchao4 => {
                let tables = [&TORCHAO4[0], &TORCHAO4[1]];
                let (block, packed) = (128, true);
                Coding { block, packed, tables, floor: torchao, top: 1.0, zeros: None, scale: "scale" }
            }
            MomentFormat::Fp8 => {
                let tables = [&*FP8, &*FP8];
                let (block, packed, (floor, top)) = (256, false, fp8);
                Coding { block, packed, tables, floor, top, zeros: None, scale: "scale" }
            }
        })
    }

    /// Bytes of the values or codes of a moment of `n` elements.
    pub(crate) fn code_bytes(self, n: usize) -> u64 {
        self.of(n).stored_bytes(n)
    }

    /// Bytes of the values or codes of `n` elements in this format.
    fn stored_bytes(self, n: usize) -> u64 {
        match self {
            MomentFormat::F32 => 4 * n as u64,
            MomentFormat::Bf16 => 2 * n as u64,
            MomentFormat::Torchao4 => n.div_ceil(2) as u64,
            _ => n as u64,
        }
    }

    /// Number of scales of `n` elements in this format.
    fn scales(self, n: usize) -> usize {
        match self {
            MomentFormat::F32 | MomentFormat::Bf16 => 0,
            MomentFormat::Torchao4 => n.div_ceil(128),
            MomentFormat::Map(map) => map.count(n),
            _ => n.div_ceil(BLOCK),
        }
    }

    /// Bytes of a moment of `n` elements.
    pub(crate) fn bytes(self, n: usize) -> u64 {
        self.code_bytes(n) + 4 * self.of(n).scales(n) as u64
    }
}

impl Coding {
    /// Decodes a block of an update, at most [`BLOCK`] elements.
    fn decode(&self, second: bool, codes: &[u8], scales: &[f32], out: &mut [f32]) {
        let table = self.tables[usize::from(second)];
        if !self.packed {
            return kernels().dequant_lut8(codes, table.levels(), scales, self.block, out);
        }
        let mut wide = [0u8; BLOCK];
        for (i, code) in wide[..out.len()].iter_mut().enumerate() {
            *code = codes[i / 2] >> (4 * (1 - i % 2)) & 15;
        }
        kernels().dequant_lut8(&wide[..out.len()], table.levels(), scales, self.block, out);
    }

    /// Encodes a block of an update and computes its scales.
    fn encode(&self, second: bool, values: &[f32], codes: &mut [u8], scales: &mut [f32]) {
        let table = self.tables[usize::from(second)];
        let mut wide = [0u8; BLOCK];
        let to: &mut [u8] = if self.packed { &mut wide[..values.len()] } else { &mut *codes };
        for ((values, to), scale) in values.chunks(self.block).zip(to.chunks_mut(self.block)).zip(scales) {
            let amax = kernels().amax(values);
            match self.zeros {
                Some(zeros) if amax == 0.0 => {
                    *scale = 0.0;
                    to.fill(zeros[usize::from(second)]);
                }
                _ => {
                    *scale = amax.max(self.floor) / self.top;
                    kernels().table_codes(table, values, *scale, to);
                }
            }
        }
        if self.packed {
            for (byte, pair) in codes.iter_mut().zip(wide[..values.len()].chunks(2)) {
                *byte = pair[0] << 4 | pair.get(1).copied().unwrap_or(0);
            }
        }
    }
}

/// Values or codes of a moment.
#[derive(Debug)]
pub(crate) enum Codes {
    F32(Vec<f32>),
    Bf16(Vec<u16>),
    U8(Vec<u8>),
    /// In a file.
    Paged(Extent),
}

/// Moment of one parameter.
#[derive(Debug)]
pub(crate) struct Moment {
    name: &'static str,
    /// True for means of squares, which are not negative.
    second: bool,
    /// Format for this number of elements.
    format: MomentFormat,
    n: usize,
    codes: Codes,
    scales: Vec<f32>,
}

/// Part of a moment, in whole blocks.
pub(crate) struct MomentPiece<'a> {
    second: bool,
    format: MomentFormat,
    place: Place<'a>,
    scales: &'a mut [f32],
}

enum Place<'a> {
    Memory(CodesMut<'a>),
    /// Units (values or bytes of codes) of a file.
    Paged {
        extent: &'a Extent,
        first: usize,
        len: usize,
    },
}

/// Values or codes in memory.
pub(crate) enum CodesMut<'a> {
    F32(&'a mut [f32]),
    Bf16(&'a mut [u16]),
    U8(&'a mut [u8]),
}

/// Part of a moment in memory.
pub(crate) struct MomentMut<'a> {
    second: bool,
    pub(crate) format: MomentFormat,
    coding: Option<Coding>,
    pub(crate) codes: CodesMut<'a>,
    pub(crate) scales: &'a mut [f32],
}

impl Moment {
    /// Allocates a zero moment of `n` elements; `pages` makes the codes a part of a file.
    pub(crate) fn new(
        of: (&'static str, bool),
        format: MomentFormat,
        n: usize,
        pages: Option<&mut Unpaged>,
    ) -> Result<Self, LoadError> {
        Self::stored_as(of, format.of(n), n, pages)
    }

    /// Allocates a zero moment in `format`, however few its elements are.
    pub(crate) fn stored_as(
        (name, second): (&'static str, bool),
        format: MomentFormat,
        n: usize,
        pages: Option<&mut Unpaged>,
    ) -> Result<Self, LoadError> {
        let memory = || LoadError::Memory { what: "optimizer state", bytes: format.stored_bytes(n) };
        let codes = match (format, pages) {
            (MomentFormat::Map(map), _) => {
                let (first, other) = map.zeros();
                Codes::U8(vec![if second { other } else { first }; n])
            }
            (format, Some(pages)) => Codes::Paged(pages.reserve(format.stored_bytes(n))),
            (MomentFormat::F32, None) => Codes::F32(zeros(n).ok_or_else(memory)?),
            (MomentFormat::Bf16, None) => Codes::Bf16(zeros(n).ok_or_else(memory)?),
            (format, None) => {
                // The codes that an update writes for a block of zeros; every code decodes to 0 with scale 0.
                let start = format.coding().and_then(|coding| coding.zeros).unwrap_or_default();
                let mut codes = zeros(format.stored_bytes(n) as usize).ok_or_else(memory)?;
                codes.fill(start[usize::from(second)]);
                Codes::U8(codes)
            }
        };
        let scales = zeros(format.scales(n)).ok_or_else(memory)?;
        Ok(Moment { name, second, format, n, codes, scales })
    }

    /// True if it is decoded whole.
    pub(crate) fn is_whole(&self) -> bool {
        matches!(self.format, MomentFormat::Map(_))
    }

    /// Splits into pieces of [`PIECE`] elements; the last may be shorter. Not for moments that are decoded whole.
    pub(crate) fn pieces(&mut self) -> Vec<MomentPiece<'_>> {
        let Moment { second, format, n, .. } = *self;
        let block = format.coding().map_or(usize::MAX, |coding| coding.block);
        let mut scales = self.scales.chunks_mut((PIECE / block).max(1));
        let piece = |place| MomentPiece { second, format, place, scales: scales.next().unwrap_or_default() };
        match &mut self.codes {
            Codes::F32(x) => {
                x.chunks_mut(PIECE).map(|x| Place::Memory(CodesMut::F32(x))).map(piece).collect()
            }
            Codes::Bf16(x) => {
                x.chunks_mut(PIECE).map(|x| Place::Memory(CodesMut::Bf16(x))).map(piece).collect()
            }
            Codes::U8(x) => {
                let units = if format == MomentFormat::Torchao4 { PIECE / 2 } else { PIECE };
                x.chunks_mut(units).map(|x| Place::Memory(CodesMut::U8(x))).map(piece).collect()
            }
            Codes::Paged(extent) => {
                let extent = &*extent;
                let packed = format == MomentFormat::Torchao4;
                let units = |n: usize| if packed { n.div_ceil(2) } else { n };
                let place = |first: usize| Place::Paged {
                    extent,
                    first: units(first),
                    len: units(PIECE.min(n - first)),
                };
                (0..n).step_by(PIECE).map(place).map(piece).collect()
            }
        }
    }

    /// Decodes the whole moment.
    ///
    /// # Errors
    /// [`TrainError::Store`] if its file cannot be read.
    pub(crate) fn read_all(&mut self, threads: usize, out: &mut [f32]) -> Result<(), TrainError> {
        if let (MomentFormat::Map(map), Codes::U8(codes)) = (self.format, &self.codes) {
            map.decode(self.second, codes, &self.scales, out);
            return Ok(());
        }
        let failed = std::sync::Mutex::new(None);
        let pieces = self.pieces().into_iter().zip(out.chunks_mut(PIECE));
        for_each_with(threads, PageBuffer::default, pieces, |buffer, (mut piece, out)| {
            let read = piece.open(buffer).map(|moment| {
                out.chunks_mut(BLOCK).enumerate().for_each(|(block, out)| moment.read(block, out));
            });
            keep_first(&failed, read);
        });
        failed.into_inner().unwrap_or_default().map_or(Ok(()), Err)
    }

    /// Encodes the whole moment.
    ///
    /// # Errors
    /// [`TrainError::Store`] if its file cannot be written.
    pub(crate) fn write_all(&mut self, threads: usize, values: &[f32]) -> Result<(), TrainError> {
        if let (MomentFormat::Map(map), Codes::U8(codes)) = (self.format, &mut self.codes) {
            map.encode(self.second, values, codes, &mut self.scales);
            return Ok(());
        }
        let failed = std::sync::Mutex::new(None);
        let pieces = self.pieces().into_iter().zip(values.chunks(PIECE));
        for_each_with(threads, PageBuffer::default, pieces, |buffer, (mut piece, values)| {
            let written = piece.fresh(buffer).map(|mut moment| {
                values.chunks(BLOCK).enumerate().for_each(|(block, values)| moment.write_any(block, values));
            });
            keep_first(&failed, written.and_then(|()| piece.close(buffer)));
        });
        failed.into_inner().unwrap_or_default().map_or(Ok(()), Err)
    }

    /// Returns the array of the values or codes with its name.
    pub(crate) fn array(&self) -> (String, Array<'_>) {
        let array = match &self.codes {
            Codes::F32(x) => Array::F32(x),
            Codes::Bf16(x) => Array::Bf16(x),
            Codes::U8(x) => Array::U8(x),
            Codes::Paged(extent) => Array::Paged(extent.of(self.format)),
        };
        (self.name.to_owned(), array)
    }

    /// Returns the array of the scales with its name.
    pub(crate) fn scale_array(&self) -> Option<(String, Array<'_>)> {
        (!self.scales.is_empty()).then(|| (self.scale_name(), Array::F32(&self.scales)))
    }

    /// Returns the arrays for restoring: values or codes, then scales.
    pub(crate) fn arrays_mut(&mut self) -> [Option<(String, ArrayMut<'_>)>; 2] {
        let scale_name = self.scale_name();
        let array = match &mut self.codes {
            Codes::F32(x) => ArrayMut::F32(x),
            Codes::Bf16(x) => ArrayMut::Bf16(x),
            Codes::U8(x) => ArrayMut::U8(x),
            Codes::Paged(extent) => ArrayMut::Paged(extent.of(self.format)),
        };
        let scales = (!self.scales.is_empty()).then_some((scale_name, ArrayMut::F32(&mut self.scales)));
        [Some((self.name.to_owned(), array)), scales]
    }

    fn scale_name(&self) -> String {
        format!("{}_{}", self.name, self.format.coding().map_or("absmax", |coding| coding.scale))
    }
}

/// Keeps the first error of several threads.
pub(crate) fn keep_first(failed: &std::sync::Mutex<Option<TrainError>>, result: Result<(), TrainError>) {
    if let (Err(error), Ok(mut failed)) = (result, failed.lock()) {
        failed.get_or_insert(error);
    }
}

impl MomentPiece<'_> {
    /// Makes the piece of a buffer of f32 values.
    pub(crate) fn wide(values: &mut [f32]) -> MomentPiece<'_> {
        let place = Place::Memory(CodesMut::F32(values));
        MomentPiece { second: false, format: MomentFormat::F32, place, scales: &mut [] }
    }

    /// Brings the piece into memory.
    ///
    /// # Errors
    /// [`TrainError::Store`] if its file cannot be read.
    pub(crate) fn open<'b>(&'b mut self, buffer: &'b mut PageBuffer) -> Result<MomentMut<'b>, TrainError> {
        if let Place::Paged { extent, first, len } = self.place {
            buffer.read(extent, self.format, first, len)?;
        }
        self.fresh(buffer)
    }

    /// Brings the piece into memory without its content, which must be overwritten.
    pub(crate) fn fresh<'b>(&'b mut self, buffer: &'b mut PageBuffer) -> Result<MomentMut<'b>, TrainError> {
        let codes = match &mut self.place {
            Place::Memory(CodesMut::F32(x)) => CodesMut::F32(x),
            Place::Memory(CodesMut::Bf16(x)) => CodesMut::Bf16(x),
            Place::Memory(CodesMut::U8(x)) => CodesMut::U8(x),
            Place::Paged { len, .. } => buffer.codes(self.format, *len),
        };
        let coding = self.format.coding();
        Ok(MomentMut { second: self.second, format: self.format, coding, codes, scales: self.scales })
    }

    /// Writes an opened piece back to its file.
    ///
    /// # Errors
    /// [`TrainError::Store`] if the file cannot be written.
    pub(crate) fn close(&self, buffer: &mut PageBuffer) -> Result<(), TrainError> {
        match self.place {
            Place::Paged { extent, first, len } => buffer.write(extent, self.format, first, len),
            Place::Memory(_) => Ok(()),
        }
    }
}

/// Range of block `block` of [`BLOCK`] units in a slice of `len`.
fn span(block: usize, unit: usize, len: usize) -> std::ops::Range<usize> {
    (block * unit).min(len)..((block + 1) * unit).min(len)
}

impl MomentMut<'_> {
    /// Returns the values of a block that is stored as f32.
    pub(crate) fn f32_block(&mut self, block: usize) -> Option<&mut [f32]> {
        match &mut self.codes {
            CodesMut::F32(x) => {
                let span = span(block, BLOCK, x.len());
                Some(&mut x[span])
            }
            _ => None,
        }
    }

    /// Decodes a block.
    pub(crate) fn read(&self, block: usize, out: &mut [f32]) {
        match (&self.codes, &self.coding) {
            (CodesMut::F32(x), _) => out.copy_from_slice(&x[span(block, BLOCK, x.len())]),
            (CodesMut::Bf16(x), _) => kernels().bf16_to_f32(&x[span(block, BLOCK, x.len())], out),
            (CodesMut::U8(codes), Some(coding)) => {
                let (codes, scales) = (&codes[coding.codes(block, codes.len())], &self.scales);
                coding.decode(self.second, codes, &scales[coding.scales(block, scales.len())], out);
            }
            // Maps are decoded whole.
            (CodesMut::U8(_), None) => out.fill(0.0),
        }
    }

    /// Encodes a block, unless it is stored as f32 and was updated in place.
    pub(crate) fn write(&mut self, block: usize, values: &[f32]) {
        if !matches!(self.codes, CodesMut::F32(_)) {
            self.write_any(block, values);
        }
    }

    /// Encodes a block.
    fn write_any(&mut self, block: usize, values: &[f32]) {
        match (&mut self.codes, &self.coding) {
            (CodesMut::F32(x), _) => {
                let span = span(block, BLOCK, x.len());
                x[span].copy_from_slice(values);
            }
            (CodesMut::Bf16(x), _) => {
                let span = span(block, BLOCK, x.len());
                kernels().f32_to_bf16(values, &mut x[span]);
            }
            (CodesMut::U8(codes), Some(coding)) => {
                let (at, scales) =
                    (coding.codes(block, codes.len()), coding.scales(block, self.scales.len()));
                coding.encode(self.second, values, &mut codes[at], &mut self.scales[scales]);
            }
            (CodesMut::U8(_), None) => {}
        }
    }

    /// Returns codes and absmax of a block of bitsandbytes' format.
    pub(crate) fn coded_block(&mut self, block: usize) -> Option<(&mut [u8], &mut f32)> {
        match (&mut self.codes, self.format) {
            (CodesMut::U8(codes), MomentFormat::Blockwise8(_)) => {
                let span = span(block, BLOCK, codes.len());
                Some((&mut codes[span], &mut self.scales[block]))
            }
            _ => None,
        }
    }
}

impl Coding {
    /// Range of the bytes of a block of an update.
    fn codes(&self, block: usize, len: usize) -> std::ops::Range<usize> {
        span(block, if self.packed { BLOCK / 2 } else { BLOCK }, len)
    }

    /// Range of the scales of a block of an update.
    fn scales(&self, block: usize, len: usize) -> std::ops::Range<usize> {
        span(block, BLOCK / self.block, len)
    }
}

/// Array of weights or of an optimizer state.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Array<'a> {
    /// f32 values.
    F32(&'a [f32]),
    /// bf16 bits.
    Bf16(&'a [u16]),
    /// f16 bits.
    F16(&'a [u16]),
    /// Low halves of f32 values.
    U16(&'a [u16]),
    /// 8-bit codes.
    U8(&'a [u8]),
    /// INT8 codes of weights.
    I8(&'a [i8]),
    /// Values or codes in a file.
    Paged(super::Paged<'a>),
}

/// Array of weights or of an optimizer state, for restoring.
#[derive(Debug, PartialEq)]
pub enum ArrayMut<'a> {
    /// f32 values.
    F32(&'a mut [f32]),
    /// bf16 bits.
    Bf16(&'a mut [u16]),
    /// f16 bits.
    F16(&'a mut [u16]),
    /// Low halves of f32 values.
    U16(&'a mut [u16]),
    /// 8-bit codes.
    U8(&'a mut [u8]),
    /// INT8 codes of weights.
    I8(&'a mut [i8]),
    /// Values or codes in a file.
    Paged(super::Paged<'a>),
}

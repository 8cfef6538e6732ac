//! Storage formats of moments (running means of gradients or their squares), and the coding of their blocks.

use std::sync::LazyLock;

use mantissa_kernels::{CodeTable, kernels};
use mantissa_num::codebook::Book;
use mantissa_num::minifloat::E4M3;
use mantissa_store::Dtype;

use super::map::StateMap;
use crate::blockwise::{BLOCK, BLOCKWISE_RULES, BlockwiseRule, MIN_ELEMENTS, maps};

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
    pub(super) block: usize,
    /// True for two codes per byte, the first in the high nibble.
    packed: bool,
    /// Maps of first and second moments.
    tables: [&'static CodeTable; 2],
    /// Smallest amax.
    floor: f32,
    /// Level that the amax is scaled to.
    top: f32,
    /// Codes of a block whose amax is 0; without them it is encoded with the smallest amax.
    pub(super) zeros: Option<[u8; 2]>,
    /// Name of the scales in checkpoints.
    pub(super) scale: &'static str,
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
    pub(super) fn of(self, n: usize) -> Self {
        match self {
            MomentFormat::F32 | MomentFormat::Bf16 => self,
            _ if n < MIN_ELEMENTS => MomentFormat::F32,
            format => format,
        }
    }

    /// True if a parameter of `n` elements is decoded whole, because its blocks differ from the pieces of an update.
    pub(crate) fn is_whole(self, n: usize) -> bool {
        matches!(self.of(n), MomentFormat::Map(_))
    }

    /// Dtype of the array of values or codes.
    pub(super) fn dtype(self) -> Dtype {
        match self {
            MomentFormat::F32 => Dtype::F32,
            MomentFormat::Bf16 => Dtype::BF16,
            _ => Dtype::U8,
        }
    }

    /// Returns the blocks of formats with codes, except for maps.
    pub(super) fn coding(self) -> Option<Coding> {
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
    pub(super) fn stored_bytes(self, n: usize) -> u64 {
        match self {
            MomentFormat::F32 => 4 * n as u64,
            MomentFormat::Bf16 => 2 * n as u64,
            MomentFormat::Torchao4 => n.div_ceil(2) as u64,
            _ => n as u64,
        }
    }

    /// Number of scales of `n` elements in this format.
    pub(super) fn scales(self, n: usize) -> usize {
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
    pub(super) fn decode(&self, second: bool, codes: &[u8], scales: &[f32], out: &mut [f32]) {
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
    pub(super) fn encode(&self, second: bool, values: &[f32], codes: &mut [u8], scales: &mut [f32]) {
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

impl Coding {
    /// Range of the bytes of a block of an update.
    pub(super) fn codes(&self, block: usize, len: usize) -> std::ops::Range<usize> {
        span(block, if self.packed { BLOCK / 2 } else { BLOCK }, len)
    }

    /// Range of the scales of a block of an update.
    pub(super) fn scales(&self, block: usize, len: usize) -> std::ops::Range<usize> {
        span(block, BLOCK / self.block, len)
    }
}

/// Range of block `block` of [`BLOCK`] units in a slice of `len`.
pub(super) fn span(block: usize, unit: usize, len: usize) -> std::ops::Range<usize> {
    (block * unit).min(len)..((block + 1) * unit).min(len)
}

/// Values or codes in memory.
pub(crate) enum CodesMut<'a> {
    F32(&'a mut [f32]),
    Bf16(&'a mut [u16]),
    U8(&'a mut [u8]),
}

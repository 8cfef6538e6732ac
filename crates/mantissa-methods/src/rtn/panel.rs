//! Fast path of RTN: ranges and codes by kernels, scales by the reference rules. Gives the same bits as
//! [`mantissa_num::quantize`].

use mantissa_kernels::{IntGrid, MinifloatLayout, Step, kernels};
use mantissa_num::blockwise::{self, Block, Range};
use mantissa_num::format::{Affine, Format, Offset, Table};
use mantissa_num::minifloat::{BF16, F16, MiniFloat, Special};
use mantissa_num::scheme::Rule;
use mantissa_num::{Blocks, Code, Codes, Quantized, Rounding, ScaleLevel, Scheme};

/// The elements for which there are kernels.
pub(super) enum Elements {
    Int(IntGrid),
    /// `k / 64`: an integer whose step is 64 times smaller.
    Fixed64,
    Minifloat(MinifloatLayout),
    Book {
        midpoints: [f32; 15],
        order: [u8; 16],
    },
    Bf16,
    F16,
    F32,
}

impl Elements {
    /// Those of `scheme`; `None` where only the reference encodes.
    pub(super) fn of(scheme: &Scheme) -> Option<Self> {
        // Rules that look at more than a block's range, or round in their own way.
        let special = matches!(scheme.encoder.rule, Rule::FourOverSix | Rule::DeepGemm | Rule::Cpu);
        if special || scheme.encoder.rounding != Rounding::NearestEven {
            return None;
        }
        let affine = match &scheme.format {
            Format::Table(table) => return book(table),
            Format::Affine(affine) => affine,
            _ => return None,
        };
        match affine {
            Affine { code: Code::Int(bits), offset: Offset::None | Offset::Zero, .. } => {
                Some(Elements::Int(int_grid(*bits, scheme.encoder.rule)))
            }
            Affine { code: Code::Fixed64, .. } => Some(Elements::Fixed64),
            Affine { code: Code::Float(f), .. } if f.bits() <= 8 => Some(Elements::Minifloat(layout(f))),
            Affine { code: Code::Float(f), scale: None, .. } if *f == BF16 => Some(Elements::Bf16),
            Affine { code: Code::Float(f), scale: None, .. } if *f == F16 => Some(Elements::F16),
            Affine { code: Code::F32, scale: None, .. } => Some(Elements::F32),
            _ => None,
        }
    }
}

fn int_grid(bits: u32, rule: Rule) -> IntGrid {
    let high = ((1i16 << (bits - 1)) - 1) as i8;
    let low = if rule == Rule::Restricted { -high } else { -high - 1 };
    IntGrid { low, high, zero_after_rounding: rule == Rule::Torchao }
}

fn layout(f: &MiniFloat) -> MinifloatLayout {
    MinifloatLayout {
        mantissa_bits: f.mantissa_bits,
        bias: f.bias.unsigned_abs(),
        sign_bit: f.exponent_bits + f.mantissa_bits,
        max_code: f.max_code() as u8,
        signed_zero: f.special != Special::Fnuz,
    }
}

fn book(table: &Table) -> Option<Elements> {
    let (levels, ascending) = (table.book.levels(), table.book.ascending());
    let order: [u8; 16] = ascending.try_into().ok()?;
    let level = |i: usize| levels[usize::from(order[i])];
    Some(Elements::Book { midpoints: std::array::from_fn(|i| (level(i) + level(i + 1)) / 2.0), order })
}

/// Cut of a panel: lines of `len` elements, blocks of `group` elements of a line, and of `depth` lines.
struct Lines {
    len: usize,
    group: usize,
    depth: usize,
}

impl Lines {
    fn of(blocks: Blocks, rows: usize, cols: usize) -> Option<Self> {
        let all = rows * cols;
        let (len, group, depth) = match blocks {
            Blocks::Row => (cols, cols, 1),
            Blocks::Group(group) => (cols, group as usize, 1),
            Blocks::Tile { rows, cols: group } => (cols, group as usize, rows as usize),
            Blocks::Flat(group) => (all, group as usize, 1),
            Blocks::Tensor => (all, all, 1),
            _ => return None,
        };
        Some(Lines { len, group, depth })
    }

    fn per_line(&self) -> usize {
        self.len.div_ceil(self.group)
    }

    /// Blocks of line `i`.
    fn blocks(&self, i: usize) -> std::ops::Range<usize> {
        let first = i / self.depth * self.per_line();
        first..first + self.per_line()
    }
}

/// Quantizes `x` (`[rows, cols]`, whole blocks). `fixed` is the block of a single-block tensor, chosen from all of
/// it. `None` if a value is not finite, which the reference handles.
pub(super) fn quantize(
    scheme: &Scheme,
    elements: &Elements,
    x: &[f32],
    cols: usize,
    outer: Option<f32>,
    fixed: Option<Block>,
) -> Option<Quantized> {
    let format = &scheme.format;
    let rows = x.len() / cols;
    let lines = Lines::of(format.blocks(), rows, cols)?;
    let blocks = match (format.scale(), fixed) {
        (None, _) => kernels().amax(x).is_finite().then(|| vec![scheme.block(Range::EMPTY, false, outer)])?,
        (_, Some(block)) => vec![block],
        _ => choose_blocks(scheme, &lines, x, outer)?,
    };
    let mut scales = Codes::with_capacity(format.scale().map_or(1, |s| s.code.unit_bytes()), blocks.len());
    if format.scale().is_some() {
        blocks.iter().for_each(|block| scales.push(block.scale));
    }
    let zeros = if format.has_zero() { blocks.iter().map(|block| block.zero).collect() } else { Vec::new() };
    let codes = encode(elements, &lines, &blocks, x)?;
    Some(Quantized {
        codes,
        scales: ScaleLevel::from(scales).with_zeros(zeros).with_outer(outer),
        ..Quantized::empty(format.clone(), rows, cols)
    })
}

/// The reference's choice for every block, from its range.
fn choose_blocks(scheme: &Scheme, lines: &Lines, x: &[f32], outer: Option<f32>) -> Option<Vec<Block>> {
    let signed = scheme.format.has_zero() || scheme.encoder.rule == Rule::NoClippingErr;
    let per_line = lines.per_line();
    let block_lines = (x.len() / lines.len).div_ceil(lines.depth);
    let mut ranges = vec![Range::EMPTY; block_lines * per_line];
    // Where only magnitudes matter the range is [0, amax].
    let (mut low, mut high) = (vec![0.0; per_line], vec![0.0; per_line]);
    for (i, line) in x.chunks_exact(lines.len).enumerate() {
        if signed {
            kernels().group_min_max(line, lines.group, &mut low, &mut high);
        } else {
            kernels().group_amax(line, lines.group, &mut high);
        }
        if !low.iter().chain(&high).all(|v| v.is_finite()) {
            return None;
        }
        for (range, (&min, &max)) in ranges[lines.blocks(i)].iter_mut().zip(low.iter().zip(&high)) {
            *range = range.union(Range { min, max, ..Range::EMPTY });
        }
    }
    let last = match scheme.format.blocks() {
        Blocks::Flat(_) if !x.len().is_multiple_of(lines.group) => ranges.len() - 1,
        _ => ranges.len(),
    };
    Some(ranges.iter().enumerate().map(|(i, &range)| scheme.block(range, i == last, outer)).collect())
}

fn encode(elements: &Elements, lines: &Lines, blocks: &[Block], x: &[f32]) -> Option<Codes> {
    match elements {
        Elements::F32 => return Some(Codes::U32(x.iter().map(|v| v.to_bits()).collect())),
        Elements::Bf16 | Elements::F16 => {
            let mut codes = vec![0; x.len()];
            match elements {
                Elements::Bf16 => kernels().f32_to_bf16(x, &mut codes),
                _ => kernels().f32_to_f16(x, &mut codes),
            }
            return Some(Codes::U16(codes));
        }
        _ => {}
    }
    let unit = if matches!(elements, Elements::Fixed64) { 64.0 } else { 1.0 };
    let steps: Vec<Step> = blocks.iter().map(|block| step(block, unit)).collect::<Option<_>>()?;
    let zeros: Vec<f32> = blocks.iter().map(|block| block.zero as f32).collect();
    let mut codes = vec![0; x.len()];
    for (i, (x, codes)) in x.chunks_exact(lines.len).zip(codes.chunks_exact_mut(lines.len)).enumerate() {
        let (steps, zeros) = (&steps[lines.blocks(i)], &zeros[lines.blocks(i)]);
        encode_line(elements, x, lines.group, steps, zeros, codes);
    }
    Some(Codes::U8(codes))
}

fn encode_line(
    elements: &Elements,
    x: &[f32],
    group: usize,
    steps: &[Step],
    zeros: &[f32],
    codes: &mut [u8],
) {
    match elements {
        Elements::Int(grid) => kernels().int_codes(x, group, steps, zeros, *grid, codes),
        Elements::Fixed64 => {
            let grid = IntGrid { low: -127, high: 127, zero_after_rounding: false };
            kernels().int_codes(x, group, steps, zeros, grid, codes);
        }
        Elements::Minifloat(layout) => kernels().minifloat_codes(x, group, steps, layout, codes),
        Elements::Book { midpoints, order } => {
            kernels().book_codes(x, group, steps, midpoints, order, codes);
        }
        Elements::Bf16 | Elements::F16 | Elements::F32 => {}
    }
}

/// Step of a block, for elements counted in `1 / unit`. Only power-of-two scales occur with a unit other than 1, so
/// the division is exact, down to subnormal scales.
fn step(block: &Block, unit: f32) -> Option<Step> {
    match block.step() {
        blockwise::Step::Unit => Some(Step::Divide(1.0 / unit)),
        blockwise::Step::Divide(scale) => Some(Step::Divide(scale / unit)),
        blockwise::Step::Multiply(inverse) => Some(Step::Multiply(inverse * unit)),
        blockwise::Step::Constant(_) => None,
    }
}

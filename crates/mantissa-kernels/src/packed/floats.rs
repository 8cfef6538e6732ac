//! Products of floating-point weights with activations: panels of 16 rows, one chain of multiply-adds per row.
//!
//! A panel holds, column by column, the codes of its 16 rows; bf16 and 8-bit floats multiply pairs of columns where
//! the processor has `VDPBF16PS`. There 8-bit floats are widened by a table of bf16, in registers for few tokens and
//! once to memory for many. A row's products are added in the order of the columns, group by group, and every
//! group's sum is multiplied by its scale. So a token's bits do not depend on the other tokens, the threads or the
//! tile that it is in. They depend on the arithmetic: with `VDPBF16PS` activations are rounded to bf16, without it
//! they are f32. That choice follows from the level and the code alone ([`FloatPanels::in_bf16`]).

use std::cell::RefCell;
use std::ops::Range;

use super::dot::{Dot, MiniBits, Quad};
use super::float_activations::FloatActivations;
use super::level::PackedLevel;
use super::share::{panels_per_piece, split};
use super::{BLOCK, ROWS};
use crate::buffer::{Aligned, Buffer, Lines};
use crate::parallel::for_each;

/// Code of an element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FloatCode {
    /// f32.
    F32,
    /// f16.
    F16,
    /// bf16.
    Bf16,
    /// A float of at most 8 bits in a byte: a sign, at most 5 bits of exponent, and the rest mantissa.
    Mini {
        /// Bits of the code, with its sign.
        bits: u32,
        /// Bits of the mantissa.
        mantissa_bits: u32,
        /// Exponent bias.
        bias: i32,
    },
}

impl FloatCode {
    /// Bytes of an element.
    pub const fn bytes(self) -> usize {
        match self {
            FloatCode::F32 => 4,
            FloatCode::F16 | FloatCode::Bf16 => 2,
            FloatCode::Mini { .. } => 1,
        }
    }

    /// True if products round activations to bf16.
    fn in_bf16(self) -> bool {
        PackedLevel::best().has_bf16() && matches!(self, FloatCode::Bf16 | FloatCode::Mini { .. })
    }

    fn mini(self) -> MiniBits {
        let FloatCode::Mini { bits, mantissa_bits, .. } = self else {
            return MiniBits { magnitude: 0, shift: 0, sign: 0, sign_shift: 0 };
        };
        let sign = 1u8 << (bits - 1);
        MiniBits { magnitude: sign - 1, shift: 10 - mantissa_bits, sign, sign_shift: 16 - bits }
    }

    /// bf16 of every code.
    fn pair_table(self) -> PairTable {
        let mini = self.mini();
        let mut table = PairTable { low: [[0; 4 * ROWS]; 2], high: [[0; 4 * ROWS]; 2] };
        let halves = table.low.as_flattened_mut().iter_mut().zip(table.high.as_flattened_mut());
        for (code, (low, high)) in (0..).zip(halves) {
            let mut wide = [0.0];
            crate::generic::f16_to_f32(&[mini.half(code)], &mut wide);
            [*low, *high] = ((wide[0].to_bits() >> 16) as u16).to_le_bytes();
        }
        table
    }

    /// Factor that the codes' f16 bits lack.
    fn factor(self) -> f32 {
        match self {
            FloatCode::Mini { bias, .. } => 2f32.powi(15 - bias),
            _ => 1.0,
        }
    }
}

/// A weight `[rows, cols]` of floating-point codes, in panels. Rows and columns are padded with zeros.
#[derive(Clone, Debug)]
pub struct FloatPanels {
    code: FloatCode,
    rows: usize,
    cols: usize,
    /// Blocks of 32 columns.
    blocks: usize,
    bytes: Buffer,
    /// Blocks that share a scale.
    group: usize,
    /// `[panels, groups, 16]`, with the factor of the codes.
    scales: Vec<[f32; ROWS]>,
    table: Box<PairTable>,
}

/// bf16 of the codes of 8-bit floats without their highest bit, which is a sign: low bytes, and high bytes. Every such
/// value has at most 8 significant bits, so that bf16 holds it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PairTable {
    pub(crate) low: [Quad; 2],
    pub(crate) high: [Quad; 2],
}

/// One weight of [`FloatPanels::multiply`] and its output.
#[derive(Debug)]
pub struct FloatJob<'a> {
    /// The weight.
    pub weight: &'a FloatPanels,
    /// The tokens.
    pub x: &'a FloatActivations,
    /// Output, `[tokens, rows]`.
    pub out: &'a mut [f32],
    /// True to add to the output, false to overwrite it.
    pub accumulate: bool,
}

/// Panels of one product.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Strip<'a> {
    pub(super) code: FloatCode,
    pub(super) mini: MiniBits,
    pub(super) table: &'a PairTable,
    /// Bytes of the panels, `panel` bytes each.
    pub(super) bytes: &'a [u8],
    pub(super) panel: usize,
    /// `[panels, groups]`.
    pub(super) scales: &'a [[f32; ROWS]],
    pub(super) groups: usize,
    pub(super) blocks: usize,
    pub(super) group: usize,
}

impl<'a> Strip<'a> {
    /// The same weight as panels of bf16.
    fn expanded<'b>(&self, bytes: &'b [u8]) -> Strip<'b>
    where
        'a: 'b,
    {
        Strip { code: FloatCode::Bf16, bytes, panel: 2 * self.panel, ..*self }
    }

    /// Multiplies the panels with all tokens.
    fn run(&self, level: &PackedLevel, x: &FloatActivations, write: impl Fn(usize, usize, &[f32; ROWS])) {
        let count = self.bytes.len() / self.panel.max(1);
        let per_token = self.blocks * if x.in_bf16 { BLOCK / 2 } else { BLOCK };
        for tile in level.float_sizes(x.in_bf16).tiles(x.tokens) {
            let values = &x.values.get()[tile.start * per_token..tile.end * per_token];
            let functions = level.float_tile(tile.len(), x.in_bf16);
            let mut first = 0;
            while first < count {
                let several = count - first >= functions.panels;
                let some = if several { functions.panels } else { 1 };
                let part = Strip {
                    bytes: &self.bytes[first * self.panel..(first + some) * self.panel],
                    scales: &self.scales[first * self.groups..(first + some) * self.groups],
                    ..*self
                };
                let mut out = Aligned([[0.0; ROWS]; MOST]);
                let out = &mut out.0[..some * tile.len()];
                let product = if several { functions.several } else { functions.one };
                // SAFETY: the functions are those of `level`, whose features `PackedLevel::available` has checked.
                unsafe { product(&part, values, out) };
                for (i, out) in out.chunks_exact(tile.len()).enumerate() {
                    tile.clone().zip(out).for_each(|(t, sums)| write(first + i, t, sums));
                }
                first += some;
            }
        }
    }
}

thread_local! {
    /// Panels expanded to bf16, kept between calls.
    static EXPANDED: RefCell<Lines<u8>> = RefCell::default();
}

/// Signature of a product: the panels, a tile of activations, and the results `[panels, tokens]`.
pub(crate) type FloatProduct = unsafe fn(&Strip<'_>, &[u32], &mut [[f32; ROWS]]);

/// Functions of a level, for several panels and for one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FloatTile {
    pub(crate) tokens: usize,
    pub(crate) panels: usize,
    pub(crate) several: FloatProduct,
    pub(crate) one: FloatProduct,
}

/// Panels that a thread takes at a time for many tokens.
const MANY_PANELS: usize = 8;

/// Largest number of panels and of sums of one product.
const MOST: usize = 24;

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

    fn panel_bytes(&self) -> usize {
        self.blocks * BLOCK * ROWS * self.code.bytes()
    }

    fn groups(&self) -> usize {
        self.blocks.div_ceil(self.group)
    }

    /// Computes `out = x Wᵀ`, or adds it to `out`, for every job (at most 16) in one dispatch.
    ///
    /// # Panics
    /// If a weight has other columns or another arithmetic than the activations, or an output another shape.
    pub fn multiply<'a>(jobs: impl Iterator<Item = FloatJob<'a>>, threads: usize) {
        let level = PackedLevel::best();
        let targets = jobs.filter_map(|FloatJob { weight, x, out, accumulate }| {
            assert!(
                weight.cols == x.cols && weight.in_bf16() == x.in_bf16,
                "FloatPanels: weight has {} columns, activations {}, or another arithmetic",
                weight.cols,
                x.cols
            );
            assert_eq!(out.len(), x.tokens * weight.rows, "FloatPanels: output is not [tokens, rows]");
            if x.cols == 0 && !accumulate {
                out.fill(0.0);
            }
            (x.tokens > 0 && x.cols > 0).then_some(((weight, x), accumulate, out))
        });
        let pieces = |(w, x): (&FloatPanels, &FloatActivations)| match level
            .float_sizes(x.in_bf16)
            .expands(x.tokens)
        {
            true => MANY_PANELS,
            false => panels_per_piece(w.rows.div_ceil(ROWS), w.panel_bytes(), threads)
                .next_multiple_of(MANY_PANELS),
        };
        let count = |factors: (&FloatPanels, _)| factors.0.rows.div_ceil(ROWS).div_ceil(pieces(factors));
        split(targets, threads, count, |target, piece| {
            let ((weight, x), per_piece) = (target.factors, pieces(target.factors));
            let panels = piece * per_piece..((piece + 1) * per_piece).min(weight.rows.div_ceil(ROWS));
            weight.run(level, panels, x, |panel, t, sums| {
                if t >= x.tokens {
                    return;
                }
                let first = panel * ROWS;
                let sums = &sums[..ROWS.min(weight.rows - first)];
                // SAFETY: every panel belongs to one piece, and `split` hands out every piece once.
                unsafe { target.out.put_lanes(t * weight.rows + first, sums, target.accumulate) };
            });
        });
    }

    /// Multiplies some panels with all tokens.
    fn run(
        &self,
        level: &PackedLevel,
        panels: Range<usize>,
        x: &FloatActivations,
        write: impl Fn(usize, usize, &[f32; ROWS]),
    ) {
        let (size, groups) = (self.panel_bytes(), self.groups());
        let strip = Strip {
            code: self.code,
            mini: self.code.mini(),
            table: &self.table,
            bytes: &self.bytes.bytes()[panels.start * size..panels.end * size],
            panel: size,
            scales: &self.scales[panels.start * groups..panels.end * groups],
            groups,
            blocks: self.blocks,
            group: self.group,
        };
        let write = |panel: usize, t: usize, sums: &[f32; ROWS]| write(panels.start + panel, t, sums);
        #[cfg(target_arch = "x86_64")]
        if level.floats_by_tiles(x.in_bf16) {
            return super::float_tiles::multiply(level, &strip, x, write);
        }
        if !(x.in_bf16 && strip.code.bytes() == 1 && level.float_sizes(x.in_bf16).expands(x.tokens)) {
            return strip.run(level, x, write);
        }
        EXPANDED.with_borrow_mut(|expanded| {
            let codes = strip.bytes.as_chunks().0;
            let expanded = expanded.resize(2 * strip.bytes.len());
            level.expand_pairs(codes, strip.table, expanded.as_chunks_mut().0);
            strip.expanded(expanded).run(level, x, write);
        });
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

/// Place of column `c` of row `r` in four columns of 16 rows, as [`PairDot::wide_pairs`] reads them.
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

/// Columns of 16 rows, widened.
type Columns = [[f32; ROWS]; BLOCK];

/// Multiplies `P` panels with `T` tokens in f32.
#[inline(always)]
pub(crate) fn by_f32<D: Dot, const T: usize, const P: usize>(
    d: D,
    w: &Strip<'_>,
    x: &[u32],
    out: &mut [[f32; ROWS]],
) {
    let x = x.as_chunks::<T>().0.as_chunks::<BLOCK>().0;
    assert!(x.len() == w.blocks && out.len() == P * T, "FloatPanels: sizes differ");
    let mut sums = [[d.splat(0.0); T]; P];
    let mut wide: [Columns; P] = [[[0.0; ROWS]; BLOCK]; P];
    for (g, x) in x.chunks(w.group).enumerate() {
        let mut part = [[d.splat(0.0); T]; P];
        for (b, x) in x.iter().enumerate() {
            for (p, wide) in wide.iter_mut().enumerate() {
                widen(d, w, p, g * w.group + b, wide);
            }
            for (c, x) in x.iter().enumerate() {
                // Token by token: only one of them takes a register beside the sums.
                each!(T, TOKEN => {
                    let x = d.splat(f32::from_bits(x[TOKEN]));
                    each!(panels P, PANEL => {
                        let column = d.load_f32(&wide[PANEL][c]);
                        part[PANEL][TOKEN] = d.mul_add(column, x, part[PANEL][TOKEN]);
                    });
                });
            }
        }
        each!(panels P, PANEL => {
            let scale = d.load_f32(&w.scales[PANEL * w.groups + g]);
            each!(T, TOKEN => sums[PANEL][TOKEN] = d.mul_add(part[PANEL][TOKEN], scale, sums[PANEL][TOKEN]));
        });
    }
    each!(panels P, PANEL => each!(T, TOKEN => d.store_f32(sums[PANEL][TOKEN], &mut out[PANEL * T + TOKEN])));
}

/// Widens block `block` of panel `panel`. By loops: instructions of a level are not inlined into closures that pass
/// through an iterator.
#[inline(always)]
fn widen<D: Dot>(d: D, w: &Strip<'_>, panel: usize, block: usize, out: &mut Columns) {
    let bytes = &w.bytes[panel * w.panel..][block * BLOCK * ROWS * w.code.bytes()..];
    match w.code {
        FloatCode::F32 => {
            let columns = bytes.as_chunks::<{ 4 * ROWS }>().0;
            for (out, column) in out.iter_mut().zip(columns) {
                d.store_f32(d.wide_f32(column), out);
            }
        }
        FloatCode::F16 => {
            let columns = bytes.as_chunks::<{ 2 * ROWS }>().0;
            for (out, column) in out.iter_mut().zip(columns) {
                d.store_f32(d.wide_f16(column), out);
            }
        }
        FloatCode::Bf16 => {
            let columns = out.as_chunks_mut::<2>().0;
            for ([low, high], column) in columns.iter_mut().zip(bytes.as_chunks::<{ 4 * ROWS }>().0) {
                let [first, second] = d.wide_bf16_pairs(column);
                d.store_f32(first, low);
                d.store_f32(second, high);
            }
        }
        FloatCode::Mini { .. } => {
            let columns = bytes.as_chunks::<ROWS>().0;
            for (out, column) in out.iter_mut().zip(columns) {
                d.store_f32(d.wide_mini(column, w.mini), out);
            }
        }
    }
}

/// Multiplies pairs of bf16.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub(crate) trait PairDot: Dot {
    /// `sum + w[1] x[1] + w[0] x[0]` in every lane, by `VDPBF16PS`.
    fn dot_pairs(self, sum: Self::F, w: Self::B, x: u32) -> Self::F;
    /// Widens four columns of 16 rows to pairs of bf16: those of the first two columns, and those of the last two. The
    /// codes lie so that 16 bytes hold four rows, first their first two columns, then the others.
    fn wide_pairs(self, x: &Quad, table: &PairTable) -> [Self::B; 2];
}

/// Expands 8-bit floats to pairs of bf16.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
#[inline(always)]
pub(crate) fn expand_pairs<D: PairDot>(d: D, codes: &[Quad], table: &PairTable, out: &mut [Quad]) {
    for (codes, [first, second]) in codes.iter().zip(out.as_chunks_mut().0) {
        let wide = d.wide_pairs(codes, table);
        d.store(wide[0], first);
        d.store(wide[1], second);
    }
}

/// Multiplies `P` panels with `T` tokens in bf16.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
#[inline(always)]
pub(crate) fn by_bf16<D: PairDot, const T: usize, const P: usize>(
    d: D,
    w: &Strip<'_>,
    x: &[u32],
    out: &mut [[f32; ROWS]],
) {
    const PAIRS: usize = BLOCK / 2;
    let x = x.as_chunks::<T>().0.as_chunks::<PAIRS>().0;
    assert!(x.len() == w.blocks && out.len() == P * T, "FloatPanels: sizes differ");
    let panels: [&[Quad]; P] = std::array::from_fn(|p| w.bytes[p * w.panel..][..w.panel].as_chunks().0);
    let mut sums = [[d.splat(0.0); T]; P];
    for (g, x) in x.chunks(w.group).enumerate() {
        let mut part = [[d.splat(0.0); T]; P];
        let x = x.as_flattened();
        if w.code == FloatCode::Bf16 {
            let panels = panels.map(|panel| &panel[g * w.group * PAIRS..][..x.len()]);
            for (c, x) in x.iter().enumerate() {
                // Token by token: only one of them takes a register beside the sums.
                each!(T, TOKEN => {
                    each!(panels P, PANEL => {
                        let column = d.load(&panels[PANEL][c]);
                        part[PANEL][TOKEN] = d.dot_pairs(part[PANEL][TOKEN], column, x[TOKEN]);
                    });
                });
            }
        } else {
            let x = x.as_chunks::<2>().0;
            let panels = panels.map(|panel| &panel[g * w.group * PAIRS / 2..][..x.len()]);
            for (c, x) in x.iter().enumerate() {
                each!(panels P, PANEL => {
                    let [first, second] = d.wide_pairs(&panels[PANEL][c], w.table);
                    each!(T, TOKEN => {
                        part[PANEL][TOKEN] = d.dot_pairs(part[PANEL][TOKEN], first, x[0][TOKEN]);
                    });
                    each!(T, TOKEN => {
                        part[PANEL][TOKEN] = d.dot_pairs(part[PANEL][TOKEN], second, x[1][TOKEN]);
                    });
                });
            }
        }
        each!(panels P, PANEL => {
            let scale = d.load_f32(&w.scales[PANEL * w.groups + g]);
            each!(T, TOKEN => sums[PANEL][TOKEN] = d.mul_add(part[PANEL][TOKEN], scale, sums[PANEL][TOKEN]));
        });
    }
    each!(panels P, PANEL => each!(T, TOKEN => d.store_f32(sums[PANEL][TOKEN], &mut out[PANEL * T + TOKEN])));
}

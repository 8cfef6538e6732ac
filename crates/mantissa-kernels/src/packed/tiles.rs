//! Products of 8-bit codes on AMX tiles: `TDPBSSD` and `TDPBSUD` (Intel SDM, volume 1, chapter 18, and volume 2).
//!
//! The left operand of an instruction is 16 tokens, each a row of at most 64 bytes of consecutive columns; the right
//! one is a step of a panel, in the order of the instruction (four codes of every row of the weight). The sum is
//! a tile of 16 tokens × 16 rows of integers, which is stored and enters the f32 sums by the operations, and in the
//! order, of the other levels: the bits are the same.
//!
//! Four sums are computed at a time, since the result of an instruction is late for the next one: those of four units
//! of a tile and a panel, or, where units are long, of one unit of four. The tile unit works on four while the four
//! before are stored and added to the f32 sums; sums in tile registers so live from one instruction sequence to the
//! next, which the compiler never disturbs: it does not use those registers.
//!
//! On Sapphire Rapids an instruction takes 16 cycles for any number of columns, a store as many, and while the tile
//! unit works, f32 operations on 512 bits start once in a cycle instead of twice. So with one scale for 32 columns the
//! f32 part limits, not the tiles; 16 columns gain little.

use std::arch::asm;
use std::arch::x86_64::*;

use super::dot::Quad;
use super::product::Tile;
use super::{BLOCK, QUADS, ROWS};
use crate::amx::{Shape, Tiles};
use crate::buffer::Aligned;

/// Tokens of a tile of many.
pub(crate) const TOKENS: usize = 16;

/// Sums of a step.
const SUMS: usize = 4;

/// Columns of panels that stay in the first-level cache while tiles of tokens pass.
const CHUNK: usize = 512;

/// Longest unit of which four are computed at a time.
const SHORT: usize = 64;

/// Sums of 16 tokens × 16 rows.
type Integers = [[i32; ROWS]; TOKENS];

/// f32 sums of 16 tokens × 16 rows.
pub(crate) type Sums = [[f32; ROWS]; TOKENS];

/// Returns the quads of a token that lie together for products with units of `unit` columns: the quads of a step.
pub(crate) const fn quads_of_step(unit: usize) -> usize {
    if unit.is_multiple_of(2 * BLOCK) { 2 * QUADS } else { QUADS }
}

/// Returns the most tokens that are multiplied without tiles, if more are faster with them. (Measured on Sapphire
/// Rapids, 512 tokens: 0.85 of the speed of `VPDPBUSD` for units of 16 columns, 1.05 for 32, 1.8 for 128, 2.1 for 2048;
/// 16 tokens: 0.9 for 32 columns, 1.1 for 128.)
pub(crate) const fn direct_tokens(unit: usize) -> Option<usize> {
    match unit {
        0..BLOCK => None,
        BLOCK => Some(2 * TOKENS - 1),
        _ => Some(TOKENS / 2),
    }
}

/// Meaning of the codes of a product.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Signs {
    /// Subtracted from every level, so that it becomes a signed byte; 0 leaves unsigned bytes.
    pub(crate) shift: u8,
    /// True if units start with a term of the zero point, because levels less it are no bytes.
    pub(crate) starts: bool,
}

impl Signs {
    /// For levels up to `most`.
    pub(crate) fn new(zero: u8, most: u8) -> Self {
        let fits = zero <= 128 && i32::from(most) - i32::from(zero) <= 127;
        Signs { shift: if fits { zero } else { 0 }, starts: !fits }
    }
}

/// Subtracts the zero point from levels.
#[target_feature(enable = "avx512f,avx512bw")]
pub(crate) fn shift(levels: &mut [Quad], signs: Signs) {
    levels.as_flattened_mut().iter_mut().for_each(|level| *level = level.wrapping_sub(signs.shift));
}

/// Sizes that the products of a weight share.
#[derive(Clone, Copy, Debug)]
pub(crate) struct IntShape {
    /// Columns of a unit.
    pub(crate) unit: usize,
    pub(crate) units_per_group: usize,
    /// Quads of a panel, and of a token, with padding to whole steps.
    pub(crate) quads: usize,
    pub(crate) has_mins: bool,
    pub(crate) signs: Signs,
}

impl IntShape {
    /// Units of a token.
    fn units(&self) -> usize {
        (4 * self.quads).div_ceil(self.unit)
    }

    /// Bytes of a row of tokens in a step.
    fn row(&self) -> usize {
        4 * quads_of_step(self.unit)
    }

    /// Columns of an instruction.
    fn depth(&self) -> usize {
        self.unit.min(self.row())
    }
}

/// Configures the tiles of this thread for products of 8-bit codes until the value is dropped.
///
/// # Safety
/// The processor must have AMX-INT8, and the system must permit tiles.
pub(crate) unsafe fn configure_ints(shape: &IntShape) -> Tiles {
    let (a, b) = (Shape { rows: TOKENS, bytes: shape.depth() }, Shape { rows: shape.depth() / 4, bytes: 64 });
    // SAFETY: the caller's.
    unsafe { Tiles::shaped(&[Shape::SQUARE, Shape::SQUARE, Shape::SQUARE, Shape::SQUARE, a, a, b, b]) }
}

/// Widened scales and minima of a panel, `[groups]`.
pub(crate) type PanelScales<'a> = (&'a [[f32; ROWS]], &'a [[f32; ROWS]]);

/// Panels and tokens of a product.
pub(crate) struct IntBlock<'a> {
    /// Tiles of tokens.
    pub(crate) tokens: &'a [Tile<'a>],
    /// Expanded panels `[quads]`, with their scales and minima.
    pub(crate) panels: &'a [(&'a [Quad], PanelScales<'a>)],
}

/// Adds the products of a block to `out` `[tiles, panels]`.
///
/// # Safety
/// Tiles must be [configured](configure_ints) for `shape`, and the processor have AVX-512 F, BW, VL and DQ.
pub(crate) unsafe fn multiply_ints(shape: &IntShape, block: &IntBlock<'_>, out: &mut [Sums]) {
    // SAFETY: the caller's.
    unsafe {
        match (shape.has_mins, shape.signs.starts, shape.signs.shift > 0) {
            (false, false, true) => multiply::<false, false, true>(shape, block, out),
            (false, false, false) => multiply::<false, false, false>(shape, block, out),
            (false, true, _) => multiply::<false, true, false>(shape, block, out),
            (true, false, true) => multiply::<true, false, true>(shape, block, out),
            (true, false, false) => multiply::<true, false, false>(shape, block, out),
            (true, true, _) => multiply::<true, true, false>(shape, block, out),
        }
    }
}

/// [`multiply_ints`] for one kind of shape.
///
/// # Safety
/// As there.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn multiply<const MINS: bool, const STARTS: bool, const SIGNED: bool>(
    shape: &IntShape,
    block: &IntBlock<'_>,
    out: &mut [Sums],
) {
    let fits = |len: usize, lines: usize| assert!(len >= lines * shape.quads, "tiles: sizes differ");
    block.tokens.iter().for_each(|x| fits(x.codes.len(), TOKENS));
    block.panels.iter().for_each(|(quads, _)| fits(quads.len(), 1));
    // SAFETY: the caller's; all units are in the codes and the panels.
    unsafe {
        match shape.unit <= SHORT {
            true => short::<MINS, STARTS, SIGNED>(shape, block, out),
            false => long::<MINS, STARTS, SIGNED>(shape, block, out),
        }
    }
}

/// Consecutive units of a tile and a panel.
#[derive(Clone, Copy)]
struct Four {
    tile: usize,
    panel: usize,
    first: usize,
    count: usize,
}

/// Computes four units of a tile and a panel at a time, while the four before are added to the f32 sums.
///
/// # Safety
/// As [`multiply`], whose checks have passed.
#[inline(always)]
unsafe fn short<const MINS: bool, const STARTS: bool, const SIGNED: bool>(
    shape: &IntShape,
    block: &IntBlock<'_>,
    out: &mut [Sums],
) {
    let (units, unit, panels) = (shape.units(), shape.unit, block.panels.len());
    let mut stored = Aligned([[[0; ROWS]; TOKENS]; SUMS]);
    // Half a block: the left or the right half of a row.
    let place =
        |u: usize| if unit < BLOCK { u / 2 * BLOCK * TOKENS + u % 2 * unit } else { u * unit * TOKENS };
    let (a, b): ([_; SUMS], [_; SUMS]) =
        (std::array::from_fn(place), std::array::from_fn(|i| i * unit * ROWS));
    let per_chunk = CHUNK / unit;
    let fours = (0..units).step_by(per_chunk).flat_map(|chunk| {
        (0..block.tokens.len()).flat_map(move |tile| {
            (0..panels).flat_map(move |panel| {
                let firsts = (chunk..units.min(chunk + per_chunk)).step_by(SUMS);
                firsts.map(move |first| Four { tile, panel, first, count: SUMS.min(units - first) })
            })
        })
    });
    let mut before: Option<Four> = None;
    for four in fours.map(Some).chain([None]) {
        let stored = &mut stored.0;
        if let Some(Four { tile, panel, first, count }) = four {
            let codes = block.tokens[tile].codes.as_ptr().cast::<u8>().wrapping_add(place(first));
            let quads = block.panels[panel].0.as_ptr().cast::<u8>().wrapping_add(first * unit * ROWS);
            // Past the last unit it is computed again.
            let unit_of = |i: usize| if count < SUMS { i.min(count - 1) } else { i };
            let of = Operands {
                a: std::array::from_fn(|i| codes.wrapping_add(a[unit_of(i)])),
                b: std::array::from_fn(|i| quads.wrapping_add(b[unit_of(i)])),
                steps: 1,
                ..Operands::of(shape)
            };
            // SAFETY: the four places begin units, which have one step.
            unsafe { product::<SIGNED>(&of, stored) };
        } else {
            // SAFETY: tiles are configured.
            unsafe { store(stored) };
        }
        if let Some(Four { tile, panel, first, count }) = std::mem::replace(&mut before, four) {
            let (x, scales) = (&block.tokens[tile], block.panels[panel].1);
            let out = &mut out[tile * panels + panel];
            // SAFETY: the caller has promised AVX-512.
            unsafe { finish::<MINS, STARTS>(shape, x, scales, first, &stored[..count], out) };
        }
    }
}

/// Computes one unit of two tiles and two panels at a time, or of one tile and four panels.
///
/// # Safety
/// As [`multiply`], whose checks have passed.
#[inline(always)]
unsafe fn long<const MINS: bool, const STARTS: bool, const SIGNED: bool>(
    shape: &IntShape,
    block: &IntBlock<'_>,
    out: &mut [Sums],
) {
    let (units, unit) = (shape.units(), shape.unit);
    let (tiles, panels) = (block.tokens.len(), block.panels.len());
    let steps = unit / shape.depth();
    let last_steps = (4 * shape.quads - (units - 1) * unit) / shape.depth();
    let mut stored = Aligned([[[0; ROWS]; TOKENS]; SUMS]);
    for u in 0..units {
        for tile in (0..tiles).step_by(2) {
            let wide = if tile + 1 < tiles { SUMS / 2 } else { SUMS };
            for panel in (0..panels).step_by(wide) {
                // A panel past the last one is computed again.
                let place = |i: usize| (tile + i / wide, (panel + i % wide).min(panels - 1));
                let at = u * unit;
                let of = Operands {
                    a: std::array::from_fn(|i| {
                        block.tokens[place(i).0].codes.as_ptr().cast::<u8>().wrapping_add(at * TOKENS)
                    }),
                    b: std::array::from_fn(|i| {
                        block.panels[place(i).1].0.as_ptr().cast::<u8>().wrapping_add(at * ROWS)
                    }),
                    steps: if u + 1 == units { last_steps } else { steps },
                    ..Operands::of(shape)
                };
                // SAFETY: the places begin units of as many steps, or the last one; then tiles are configured.
                unsafe {
                    product::<SIGNED>(&of, &mut stored.0);
                    store(&mut stored.0);
                }
                for (i, integers) in stored.0.iter().enumerate().filter(|(i, _)| panel + i % wide < panels) {
                    let (tile, panel) = place(i);
                    let (x, scales) = (&block.tokens[tile], block.panels[panel].1);
                    let (integers, out) = (std::slice::from_ref(integers), &mut out[tile * panels + panel]);
                    // SAFETY: the caller has promised AVX-512.
                    unsafe { finish::<MINS, STARTS>(shape, x, scales, u, integers, out) };
                }
            }
        }
    }
}

/// Operands of four sums.
struct Operands {
    a: [*const u8; SUMS],
    b: [*const u8; SUMS],
    steps: usize,
    /// Bytes from row to row of the left operands.
    a_row: usize,
    /// Bytes from step to step.
    a_step: usize,
    b_step: usize,
}

impl Operands {
    /// Properties that all operands of a shape share.
    #[inline(always)]
    fn of(shape: &IntShape) -> Self {
        let (row, none) = (shape.row(), [std::ptr::null(); SUMS]);
        Operands {
            a: none,
            b: none,
            steps: 0,
            a_row: row,
            a_step: row * TOKENS,
            b_step: shape.depth() * ROWS,
        }
    }
}

/// Computes four sums, and stores the four before.
///
/// # Safety
/// Tiles must be configured, and the operands hold what the configuration and the steps say.
#[inline(always)]
unsafe fn product<const SIGNED: bool>(of: &Operands, stored: &mut [Integers; SUMS]) {
    // SAFETY: the caller's.
    unsafe {
        match SIGNED {
            true => signed(of, stored),
            false => mixed(of, stored),
        }
    }
}

/// Repeats a statement for all tokens, with constants: sums that are indexed in a loop stay in memory.
macro_rules! tokens {
    ($t:ident => $body:expr) => {
        tokens!(@ $t $body; 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15)
    };
    (@ $t:ident $body:expr; $($i:literal)*) => {
        $({
            const $t: usize = $i;
            $body;
        })*
    };
}

/// Adds the integer sums of units from `first` on of a tile and a panel to its f32 sums.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn finish<const MINS: bool, const STARTS: bool>(
    shape: &IntShape,
    x: &Tile<'_>,
    (scales, mins): PanelScales<'_>,
    first: usize,
    integers: &[Integers],
    out: &mut Sums,
) {
    let here = first * TOKENS..(first + integers.len()) * TOKENS;
    let x_scales = x.scales[here.clone()].as_chunks::<TOKENS>().0;
    let starts = x.starts[here.clone()].as_chunks::<TOKENS>().0;
    let products = x.products[here].as_chunks::<TOKENS>().0;
    let per_group = shape.units_per_group;
    // A division takes as long as the products of a unit.
    let (mut group, mut left) = match per_group {
        1 => (first, 1),
        _ => (first / per_group, per_group - first % per_group),
    };
    // SAFETY: all reads and writes are of the 16 values of an array.
    unsafe {
        let mut sums = [_mm512_setzero_ps(); TOKENS];
        tokens!(T => sums[T] = _mm512_loadu_ps(out[T].as_ptr()));
        for (((integers, x_scales), starts), products) in
            integers.iter().zip(x_scales).zip(starts).zip(products)
        {
            let scale = _mm512_loadu_ps(scales[group].as_ptr());
            tokens!(T => {
                let mut exact = _mm512_loadu_si512(integers[T].as_ptr().cast());
                if STARTS {
                    exact = _mm512_add_epi32(exact, _mm512_set1_epi32(starts[T]));
                }
                let scale = _mm512_mul_ps(scale, _mm512_set1_ps(x_scales[T]));
                sums[T] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(exact), scale, sums[T]);
            });
            if MINS {
                let min = _mm512_loadu_ps(mins[group].as_ptr());
                tokens!(T => sums[T] = _mm512_fmadd_ps(min, _mm512_set1_ps(products[T]), sums[T]));
            }
            left -= 1;
            if left == 0 {
                (group, left) = (group + 1, per_group);
            }
        }
        tokens!(T => _mm512_storeu_ps(out[T].as_mut_ptr(), sums[T]));
    }
}

/// Declares the computation of four sums, which stores the four before.
macro_rules! tile_loops {
    ($name:ident, $instruction:literal) => {
        /// # Safety
        /// Tiles must be configured, and the operands hold what the configuration and the steps say.
        #[inline(always)]
        unsafe fn $name<T>(of: &Operands, stored: &mut [[[T; ROWS]; TOKENS]; SUMS]) {
            let Operands { a: [a0, a1, a2, a3], b: [b0, b1, b2, b3], steps, a_row, .. } = *of;
            // SAFETY: reads the operands, which the caller promises, and writes four tiles of 1024 bytes.
            unsafe {
                asm!(
                    "tileloadd tmm4, [{a0} + {a_row}]",
                    "tileloadd tmm6, [{b0} + {c_row}]",
                    "tilestored [{c} + {c_row}], tmm0",
                    "tilezero tmm0",
                    concat!($instruction, " tmm0, tmm4, tmm6"),
                    "tileloadd tmm5, [{a1} + {a_row}]",
                    "tileloadd tmm7, [{b1} + {c_row}]",
                    "tilestored [{c} + {c_row} + 1024], tmm1",
                    "tilezero tmm1",
                    concat!($instruction, " tmm1, tmm5, tmm7"),
                    "tileloadd tmm4, [{a2} + {a_row}]",
                    "tileloadd tmm6, [{b2} + {c_row}]",
                    "tilestored [{c} + {c_row} + 2048], tmm2",
                    "tilezero tmm2",
                    concat!($instruction, " tmm2, tmm4, tmm6"),
                    "tileloadd tmm5, [{a3} + {a_row}]",
                    "tileloadd tmm7, [{b3} + {c_row}]",
                    "tilestored [{c} + {c_row} + 3072], tmm3",
                    "tilezero tmm3",
                    concat!($instruction, " tmm3, tmm5, tmm7"),
                    a0 = in(reg) a0,
                    a1 = in(reg) a1,
                    a2 = in(reg) a2,
                    a3 = in(reg) a3,
                    b0 = in(reg) b0,
                    b1 = in(reg) b1,
                    b2 = in(reg) b2,
                    b3 = in(reg) b3,
                    c = in(reg) stored.as_mut_ptr(),
                    a_row = in(reg) a_row,
                    c_row = in(reg) 64_usize,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
            }
            for step in 1..steps {
                let (a, b) = (step * of.a_step, step * of.b_step);
                // SAFETY: as above, at a later step.
                unsafe {
                asm!(
                    "tileloadd tmm4, [{a0} + {a_row}]",
                    "tileloadd tmm6, [{b0} + {c_row}]",
                    concat!($instruction, " tmm0, tmm4, tmm6"),
                    "tileloadd tmm5, [{a1} + {a_row}]",
                    "tileloadd tmm7, [{b1} + {c_row}]",
                    concat!($instruction, " tmm1, tmm5, tmm7"),
                    "tileloadd tmm4, [{a2} + {a_row}]",
                    "tileloadd tmm6, [{b2} + {c_row}]",
                    concat!($instruction, " tmm2, tmm4, tmm6"),
                    "tileloadd tmm5, [{a3} + {a_row}]",
                    "tileloadd tmm7, [{b3} + {c_row}]",
                    concat!($instruction, " tmm3, tmm5, tmm7"),
                    a0 = in(reg) a0.wrapping_add(a),
                    a1 = in(reg) a1.wrapping_add(a),
                    a2 = in(reg) a2.wrapping_add(a),
                    a3 = in(reg) a3.wrapping_add(a),
                    b0 = in(reg) b0.wrapping_add(b),
                    b1 = in(reg) b1.wrapping_add(b),
                    b2 = in(reg) b2.wrapping_add(b),
                    b3 = in(reg) b3.wrapping_add(b),
                    a_row = in(reg) a_row,
                    c_row = in(reg) 64_usize,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack, readonly),
                );
                }
            }
        }
    };
}
tile_loops!(signed, "tdpbssd");
tile_loops!(mixed, "tdpbsud");
tile_loops!(pairs, "tdpbf16ps");

/// Stores the four sums before.
///
/// # Safety
/// Tiles must be configured.
#[inline(always)]
unsafe fn store<T>(stored: &mut [[[T; ROWS]; TOKENS]; SUMS]) {
    // SAFETY: writes four tiles of 1024 bytes.
    unsafe {
        asm!(
            "tilestored [{c} + {c_row}], tmm0",
            "tilestored [{c} + {c_row} + 1024], tmm1",
            "tilestored [{c} + {c_row} + 2048], tmm2",
            "tilestored [{c} + {c_row} + 3072], tmm3",
            c = in(reg) stored.as_mut_ptr(),
            c_row = in(reg) 64_usize,
            options(nostack, preserves_flags),
        );
    }
}

/// Pairs of columns of a panel of bf16 `[blocks, 16]`, and the scales of its groups.
pub(crate) type FloatPanel<'a> = (&'a [Quad], &'a [[f32; ROWS]]);

/// Panels of bf16 and tokens of a product.
pub(crate) struct FloatBlock<'a> {
    /// Pairs of bf16 of two tiles of 16 tokens, or of one of `rows`: `[blocks, rows, 16]`.
    pub(crate) tokens: &'a [&'a [u32]],
    /// Tokens of a tile.
    pub(crate) rows: usize,
    pub(crate) panels: &'a [FloatPanel<'a>],
    /// Blocks of a panel, and of a group.
    pub(crate) blocks: usize,
    pub(crate) group: usize,
}

/// Configures the tiles of this thread for products of bf16 with tiles of `rows` tokens.
///
/// # Safety
/// The processor must have AMX-BF16, and the system must permit tiles.
pub(crate) unsafe fn configure_floats(rows: usize) -> Tiles {
    let (a, b) = (Shape { rows, bytes: 64 }, Shape::SQUARE);
    // SAFETY: the caller's.
    unsafe { Tiles::shaped(&[a, a, a, a, a, a, b, b]) }
}

/// Adds the products of a block to `out` `[tiles, panels]`: of two tiles and two panels at a time, or of one tile and
/// four panels. Every group is one sum on the tile unit: two chains along the even and the odd columns of each block,
/// from 0, added to each other and then to the group's sum (Intel SDM, `TDPBF16PS`; subnormals count as 0).
///
/// # Safety
/// Tiles must be [configured](configure_floats) for the rows, and the processor have AVX-512 F.
#[target_feature(enable = "avx512f")]
pub(crate) unsafe fn multiply_floats(block: &FloatBlock<'_>, out: &mut [Sums]) {
    let FloatBlock { tokens, rows, panels, blocks, group } = *block;
    let count = panels.len();
    tokens.iter().for_each(|x| assert!(x.len() >= blocks * rows * ROWS, "tiles: sizes differ"));
    panels.iter().for_each(|(quads, _)| assert!(quads.len() >= blocks * ROWS, "tiles: sizes differ"));
    let mut stored = Aligned([[[0f32; ROWS]; TOKENS]; SUMS]);
    let wide = if tokens.len() > 1 { SUMS / 2 } else { SUMS };
    for panel in (0..count).step_by(wide) {
        // A panel past the last one is computed again.
        let place = |i: usize| (i / wide, (panel + i % wide).min(count - 1));
        for (g, start) in (0..blocks).step_by(group).enumerate() {
            let (a_step, b_step) = (rows * 64, ROWS * 64);
            let of = Operands {
                a: std::array::from_fn(|i| {
                    tokens[place(i).0].as_ptr().cast::<u8>().wrapping_add(start * a_step)
                }),
                b: std::array::from_fn(|i| {
                    panels[place(i).1].0.as_ptr().cast::<u8>().wrapping_add(start * b_step)
                }),
                steps: group.min(blocks - start),
                a_row: 64,
                a_step,
                b_step,
            };
            // SAFETY: the blocks from `start` on are in the tokens and the panels, as asserted.
            unsafe {
                pairs(&of, &mut stored.0);
                store(&mut stored.0);
            }
            for (i, parts) in stored.0.iter().enumerate().filter(|(i, _)| panel + i % wide < count) {
                let (tile, panel) = place(i);
                let scale = &panels[panel].1[g];
                for (part, out) in parts.iter().zip(&mut out[tile * count + panel]).take(rows) {
                    // SAFETY: reads and writes the 16 values of arrays.
                    unsafe {
                        let scale = _mm512_loadu_ps(scale.as_ptr());
                        let sum = _mm512_loadu_ps(out.as_ptr());
                        let sum = _mm512_fmadd_ps(_mm512_loadu_ps(part.as_ptr()), scale, sum);
                        _mm512_storeu_ps(out.as_mut_ptr(), sum);
                    }
                }
            }
        }
    }
}

//! The product of one panel with some tokens, generic over the level, the width of a code, and the number of tokens.

use super::codes::quad;
use super::dot::{Dot, Quad};
use super::panel_format::{Panel, PanelFormat};
use super::scales::{ScaleCode, widen};
use super::{BLOCK, QUADS, ROWS};
use crate::simd::align_frame;

/// Bytes from what a product reads to what it asks for. (Sapphire Rapids, two threads: 4-bit weights 22 -> 31 GB/s of
/// 34, 8-bit ones 26 -> 30; from 2 KB to 16 KB it makes no difference. On Zen 4, whose own prefetcher does as well, it
/// costs a fifth.)
const AHEAD: usize = 4096;

/// Properties that all panels of a product share.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shared {
    /// Blocks of a chunk.
    blocks: usize,
    levels: [u8; 16],
    /// Blocks of a unit; 0 if a unit is half a block.
    blocks_per_unit: usize,
    units_per_group: usize,
    has_mins: bool,
    /// Bytes from what a product reads to what it asks for; 0 asks for nothing.
    ahead: usize,
}

impl Shared {
    /// For panels with chunks of `cols` columns, and activations in units of `unit` columns.
    pub(crate) fn new(format: &PanelFormat, cols: usize, unit: usize) -> Self {
        Shared {
            blocks: cols.div_ceil(BLOCK),
            levels: format.levels.unwrap_or([0; 16]),
            blocks_per_unit: unit / BLOCK,
            units_per_group: format.group / unit,
            has_mins: format.mins != ScaleCode::Absent,
            // Where the processor's own prefetcher does not run far enough ahead.
            ahead: if crate::isa::prefers_prefetch() { AHEAD } else { 0 },
        }
    }

    /// The same for the last of several tiles, which finds its panel in the cache: asks for the next panel, `bytes`
    /// further, so that the memory is not idle meanwhile.
    pub(crate) fn last_tile(self, bytes: usize) -> Self {
        Shared { ahead: if self.ahead > 0 { self.ahead } else { bytes }, ..self }
    }

    /// Units of some blocks.
    #[inline(always)]
    fn units(&self, blocks: usize) -> usize {
        match self.blocks_per_unit {
            0 => 2 * blocks,
            per_unit => blocks.div_ceil(per_unit),
        }
    }
}

/// A tile of tokens, for a product of exactly that many; the token is the innermost index of every part.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tile<'a> {
    /// Codes, four to an integer, `[blocks, 8, tokens]`.
    pub(crate) codes: &'a [i32],
    /// Scale of each unit, `[units, tokens]`.
    pub(crate) scales: &'a [f32],
    /// `-zero` times the sum of the codes of each unit.
    pub(crate) starts: &'a [i32],
    /// Scale times sum.
    pub(crate) products: &'a [f32],
}

/// Widened scales and minima, `[groups of a chunk]`.
#[derive(Debug)]
pub(crate) struct Scales<'a> {
    pub(crate) scales: &'a mut [[f32; ROWS]],
    pub(crate) mins: &'a mut [[f32; ROWS]],
}

/// Signature of a product of a panel with a tile of tokens: what all panels share, the panel, the tokens, memory for
/// scales of a chunk, and the results `[tokens]`.
pub(crate) type Product = unsafe fn(&Shared, &Panel<'_>, &Tile<'_>, &mut Scales<'_>, &mut [[f32; ROWS]]);

/// Signature of a product of a panel that is expanded to bytes `[blocks, 8]`, with the scales of all of its groups.
pub(crate) type WideProduct = unsafe fn(&Shared, &[Quad], &Scales<'_>, &Tile<'_>, &mut [[f32; ROWS]]);

/// Sums of a product of `T` tokens. Two integer sums for one token, whose additions would else wait for each other.
struct Sums<D: Dot, const T: usize> {
    even: [D::I; T],
    odd: D::I,
    float: [D::F; T],
}

impl<D: Dot, const T: usize> Sums<D, T> {
    #[inline(always)]
    fn new(d: D) -> Self {
        Sums { even: [d.splat_i(0); T], odd: d.splat_i(0), float: [d.splat(0.0); T] }
    }

    #[inline(always)]
    fn store(&self, d: D, out: &mut [[f32; ROWS]]) {
        each!(T, TOKEN => d.store_f32(self.float[TOKEN], &mut out[TOKEN]));
    }
}

/// Units of `T` tokens, as [`Tile`] has them.
#[derive(Clone, Copy)]
struct Units<'a, const T: usize> {
    scales: &'a [[f32; T]],
    starts: &'a [[i32; T]],
    products: &'a [[f32; T]],
}

/// Parts of one unit for all tokens.
#[derive(Clone, Copy)]
struct Unit<'a, const T: usize> {
    scales: &'a [f32; T],
    starts: &'a [i32; T],
    products: &'a [f32; T],
}

impl<'a, const T: usize> Units<'a, T> {
    #[inline(always)]
    fn of(x: &Tile<'a>) -> Self {
        Units {
            scales: x.scales.as_chunks().0,
            starts: x.starts.as_chunks().0,
            products: x.products.as_chunks().0,
        }
    }

    /// Takes the first `n` units off.
    #[inline(always)]
    fn take(&mut self, n: usize) -> Self {
        let n = n.min(self.scales.len()).min(self.starts.len()).min(self.products.len());
        let (scales, starts, products) =
            (self.scales.split_at(n), self.starts.split_at(n), self.products.split_at(n));
        *self = Units { scales: scales.1, starts: starts.1, products: products.1 };
        Units { scales: scales.0, starts: starts.0, products: products.0 }
    }

    /// Iterates over the two units of each block.
    #[inline(always)]
    fn pairs(self) -> impl Iterator<Item = [Unit<'a, T>; 2]> {
        let (scales, starts) = (self.scales.as_chunks::<2>().0, self.starts.as_chunks::<2>().0);
        let parts = scales.iter().zip(starts).zip(self.products.as_chunks::<2>().0);
        parts.map(|((scales, starts), products)| {
            [0, 1].map(|i| Unit { scales: &scales[i], starts: &starts[i], products: &products[i] })
        })
    }

    #[inline(always)]
    fn iter(self) -> impl Iterator<Item = Unit<'a, T>> {
        let parts = self.scales.iter().zip(self.starts).zip(self.products);
        parts.map(|((scales, starts), products)| Unit { scales, starts, products })
    }
}

/// Multiplies a panel of `BITS`-bit codes with `T` tokens, chunk by chunk.
#[inline(always)]
pub(crate) fn product<D: Dot, const BITS: usize, const TABLE: bool, const T: usize>(
    d: D,
    s: &Shared,
    w: &Panel<'_>,
    x: &Tile<'_>,
    memory: &mut Scales<'_>,
    out: &mut [[f32; ROWS]],
) {
    assert!(out.len() == T, "packed product: sizes differ");
    let codes = x.codes.as_chunks::<T>().0.as_chunks::<QUADS>().0;
    let mut units = Units::<T>::of(x);
    let per_chunk = s.units(s.blocks);
    align_frame();
    let mut sums = Sums::new(d);
    for (chunk, codes) in w.chunks().zip(codes.chunks(s.blocks.max(1))) {
        if s.ahead > 0 {
            d.prefetch(chunk.start().wrapping_add(s.ahead), chunk.bytes());
        }
        widen(d, &chunk.scales, &[], memory.scales);
        widen(d, &chunk.mins, memory.scales, memory.mins);
        let panel = chunk.codes.as_chunks::<BITS>().0;
        let scales = (&*memory.scales, &*memory.mins);
        add::<D, BITS, TABLE, false, T>(d, s, panel, scales, codes, units.take(per_chunk), &mut sums);
    }
    sums.store(d, out);
}

/// Multiplies an expanded panel with `T` tokens.
#[inline(always)]
pub(crate) fn wide_product<D: Dot, const T: usize>(
    d: D,
    s: &Shared,
    w: &[Quad],
    scales: &Scales<'_>,
    x: &Tile<'_>,
    out: &mut [[f32; ROWS]],
) {
    assert!(out.len() == T, "packed product: sizes differ");
    let codes = x.codes.as_chunks::<T>().0.as_chunks::<QUADS>().0;
    align_frame();
    let mut sums = Sums::new(d);
    let scales = (&*scales.scales, &*scales.mins);
    add::<D, QUADS, false, true, T>(d, s, w.as_chunks().0, scales, codes, Units::of(x), &mut sums);
    sums.store(d, out);
}

/// Adds the products of consecutive blocks. `EXPANDED`: their bytes come from [`expand`].
#[inline(always)]
fn add<D: Dot, const BITS: usize, const TABLE: bool, const EXPANDED: bool, const T: usize>(
    d: D,
    s: &Shared,
    w: &[[Quad; BITS]],
    (scales, mins): (&[[f32; ROWS]], &[[f32; ROWS]]),
    x: &[[[i32; T]; QUADS]],
    units: Units<'_, T>,
    sums: &mut Sums<D, T>,
) {
    assert!(w.len() == x.len(), "packed product: sizes differ");
    let mut units = units;
    let blocks = w.iter().zip(x);
    if s.blocks_per_unit == 0 && s.units_per_group == 1 {
        let scales = scales.as_chunks::<2>().0.iter().zip(mins.as_chunks::<2>().0);
        for ((units, (w, x)), (scales, mins)) in units.pairs().zip(blocks).zip(scales) {
            begin(d, units[0], sums);
            add_quads::<D, BITS, TABLE, EXPANDED, T, 0, { QUADS / 2 }>(d, s, x, w, sums);
            finish(d, s, (&scales[0], &mins[0]), units[0], sums);
            begin(d, units[1], sums);
            add_quads::<D, BITS, TABLE, EXPANDED, T, { QUADS / 2 }, QUADS>(d, s, x, w, sums);
            finish(d, s, (&scales[1], &mins[1]), units[1], sums);
        }
    } else if s.blocks_per_unit == 0 {
        // Both units of a block belong to one group.
        let mut blocks = blocks.zip(units.pairs());
        for scales in scales.iter().zip(mins) {
            for ((w, x), units) in blocks.by_ref().take(s.units_per_group / 2) {
                begin(d, units[0], sums);
                add_quads::<D, BITS, TABLE, EXPANDED, T, 0, { QUADS / 2 }>(d, s, x, w, sums);
                finish(d, s, scales, units[0], sums);
                begin(d, units[1], sums);
                add_quads::<D, BITS, TABLE, EXPANDED, T, { QUADS / 2 }, QUADS>(d, s, x, w, sums);
                finish(d, s, scales, units[1], sums);
            }
        }
    } else if s.blocks_per_unit == 1 && s.units_per_group == 1 {
        // The most common case without the loops of the others.
        for ((unit, (w, x)), scales) in units.iter().zip(blocks).zip(scales.iter().zip(mins)) {
            begin(d, unit, sums);
            add_quads::<D, BITS, TABLE, EXPANDED, T, 0, QUADS>(d, s, x, w, sums);
            finish(d, s, scales, unit, sums);
        }
    } else {
        let mut blocks = blocks;
        for scales in scales.iter().zip(mins) {
            for unit in units.take(s.units_per_group).iter() {
                begin(d, unit, sums);
                for (w, x) in blocks.by_ref().take(s.blocks_per_unit) {
                    add_quads::<D, BITS, TABLE, EXPANDED, T, 0, QUADS>(d, s, x, w, sums);
                }
                finish(d, s, scales, unit, sums);
            }
        }
    }
}

/// Starts a unit with `-zero · Σ q`.
#[inline(always)]
fn begin<D: Dot, const T: usize>(d: D, unit: Unit<'_, T>, sums: &mut Sums<D, T>) {
    each!(T, TOKEN => sums.even[TOKEN] = d.splat_i(unit.starts[TOKEN]));
    if T == 1 {
        sums.odd = d.splat_i(0);
    }
}

/// Adds the products of quads `FROM..TO` of a block.
#[inline(always)]
fn add_quads<
    D: Dot,
    const BITS: usize,
    const TABLE: bool,
    const EXPANDED: bool,
    const T: usize,
    const FROM: usize,
    const TO: usize,
>(
    d: D,
    s: &Shared,
    x: &[[i32; T]; QUADS],
    block: &[Quad; BITS],
    sums: &mut Sums<D, T>,
) {
    each!(quads FROM TO, Q => {
        let codes = if EXPANDED { d.load(&block[Q]) } else { factors::<D, BITS, TABLE>(d, block, &s.levels, Q) };
        if T == 1 && Q % 2 == 1 {
            sums.odd = d.dot(sums.odd, codes, x[Q][0]);
        } else {
            each!(T, TOKEN => sums.even[TOKEN] = d.dot(sums.even[TOKEN], codes, x[Q][TOKEN]));
        }
    });
}

/// Unpacks quad `q` of a block to the bytes that [`Dot::dot`] takes.
#[inline(always)]
fn factors<D: Dot, const BITS: usize, const TABLE: bool>(
    d: D,
    block: &[Quad; BITS],
    levels: &[u8; 16],
    q: usize,
) -> D::B {
    let codes = quad::<D, BITS>(d, block, q);
    let levels = if TABLE { d.look_up(codes, levels) } else { codes };
    if D::SIGNED && reaches_128(BITS, TABLE) { d.less_128(levels) } else { levels }
}

/// True if levels may be 128 or more.
const fn reaches_128(bits: usize, table: bool) -> bool {
    table || bits == 8
}

/// Level that stands for 0 in the bytes that [`Dot::dot`] takes.
pub(crate) fn zero<D: Dot>(format: &PanelFormat) -> i32 {
    let reaches_128 = reaches_128(format.bits as usize, format.levels.is_some());
    i32::from(format.zero) - if D::SIGNED && reaches_128 { 128 } else { 0 }
}

/// Adds a unit to the sums in f32.
#[inline(always)]
fn finish<D: Dot, const T: usize>(
    d: D,
    s: &Shared,
    (scales, mins): (&[f32; ROWS], &[f32; ROWS]),
    unit: Unit<'_, T>,
    sums: &mut Sums<D, T>,
) {
    let scales = d.load_f32(scales);
    each!(T, TOKEN => {
        let exact = if T == 1 { d.add_i(sums.even[TOKEN], sums.odd) } else { sums.even[TOKEN] };
        let scale = d.mul(scales, d.splat(unit.scales[TOKEN]));
        sums.float[TOKEN] = d.mul_add(d.to_f32(exact), scale, sums.float[TOKEN]);
    });
    if s.has_mins {
        let mins = d.load_f32(mins);
        each!(T, TOKEN => {
            sums.float[TOKEN] = d.mul_add(mins, d.splat(unit.products[TOKEN]), sums.float[TOKEN]);
        });
    }
}

/// Expands a panel of `BITS`-bit codes to bytes of levels, `[blocks, 8]`.
#[inline(always)]
pub(crate) fn expand<D: Dot, const BITS: usize, const TABLE: bool>(
    d: D,
    codes: &[Quad],
    levels: &[u8; 16],
    out: &mut [Quad],
) {
    for (block, out) in codes.as_chunks::<BITS>().0.iter().zip(out.as_chunks_mut::<QUADS>().0) {
        const FIRST: usize = 0;
        each!(quads FIRST QUADS, Q => {
            d.store(factors::<D, BITS, TABLE>(d, block, levels, Q), &mut out[Q]);
        });
    }
}

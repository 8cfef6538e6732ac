//! The product of one panel with some tokens, generic over the level, the width of a code, and the number of tokens.

use super::codes::quad;
use super::dot::{Dot, Quad};
use super::{QUADS, ROWS};

/// A panel with its scales widened.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wide<'a> {
    /// Codes, `[blocks, bits]`.
    pub(crate) codes: &'a [Quad],
    /// Scales, `[groups]`.
    pub(crate) scales: &'a [[f32; ROWS]],
    /// Minima, `[groups]`, or none.
    pub(crate) mins: &'a [[f32; ROWS]],
    pub(crate) levels: &'a [u8; 16],
    /// Blocks of a unit; 0 if a unit is half a block.
    pub(crate) blocks_per_unit: usize,
    pub(crate) units_per_group: usize,
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

/// Signature of a product: the panel, the tokens, and the results `[tokens]`.
pub(crate) type Product = unsafe fn(&Wide<'_>, &Tile<'_>, &mut [[f32; ROWS]]);

/// Sums of a product of `T` tokens. Two integer sums for one token, whose additions would else wait for each other.
struct Sums<D: Dot, const T: usize> {
    even: [D::I; T],
    odd: D::I,
    float: [D::F; T],
}

/// Parts of one unit for all tokens.
#[derive(Clone, Copy)]
struct Unit<'a, const T: usize> {
    scales: &'a [f32; T],
    starts: &'a [i32; T],
    products: &'a [f32; T],
    group: usize,
}

/// Multiplies a panel of `BITS`-bit codes with `T` tokens.
#[inline(always)]
pub(crate) fn product<D: Dot, const BITS: usize, const TABLE: bool, const T: usize>(
    d: D,
    w: &Wide<'_>,
    x: &Tile<'_>,
    out: &mut [[f32; ROWS]],
) {
    let (panel, codes) = (w.codes.as_chunks::<BITS>().0, x.codes.as_chunks::<T>().0.as_chunks::<QUADS>().0);
    assert!(panel.len() == codes.len() && out.len() == T, "packed product: sizes differ");
    let mut sums = Sums::<D, T> { even: [d.splat_i(0); T], odd: d.splat_i(0), float: [d.splat(0.0); T] };
    let (scales, starts) = (x.scales.as_chunks::<T>().0, x.starts.as_chunks::<T>().0);
    let parts = scales.iter().zip(starts).zip(x.products.as_chunks::<T>().0);
    let mut place = (0, w.units_per_group);
    let mut units = parts.map(|((scales, starts), products)| {
        if place.1 == 0 {
            place = (place.0 + 1, w.units_per_group);
        }
        place.1 -= 1;
        Unit { scales, starts, products, group: place.0 }
    });
    if w.blocks_per_unit == 0 {
        for (block, codes) in panel.iter().zip(codes) {
            let (Some(first), Some(second)) = (units.next(), units.next()) else { break };
            begin(d, first, &mut sums);
            add_quads::<D, BITS, TABLE, T, 0, { QUADS / 2 }>(d, w, codes, block, &mut sums);
            finish(d, w, first, &mut sums);
            begin(d, second, &mut sums);
            add_quads::<D, BITS, TABLE, T, { QUADS / 2 }, QUADS>(d, w, codes, block, &mut sums);
            finish(d, w, second, &mut sums);
        }
    } else {
        let blocks = panel.chunks(w.blocks_per_unit).zip(codes.chunks(w.blocks_per_unit));
        for ((panel, codes), unit) in blocks.zip(units) {
            begin(d, unit, &mut sums);
            for (block, codes) in panel.iter().zip(codes) {
                add_quads::<D, BITS, TABLE, T, 0, QUADS>(d, w, codes, block, &mut sums);
            }
            finish(d, w, unit, &mut sums);
        }
    }
    each!(T, TOKEN => d.store_f32(sums.float[TOKEN], &mut out[TOKEN]));
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
    const T: usize,
    const FROM: usize,
    const TO: usize,
>(
    d: D,
    w: &Wide<'_>,
    x: &[[i32; T]; QUADS],
    block: &[Quad; BITS],
    sums: &mut Sums<D, T>,
) {
    each!(quads FROM TO, Q => {
        let mut codes = quad::<D, BITS>(d, block, Q);
        if TABLE {
            codes = d.look_up(codes, w.levels);
        }
        if T == 1 && Q % 2 == 1 {
            sums.odd = d.dot(sums.odd, codes, x[Q][0]);
        } else {
            each!(T, TOKEN => sums.even[TOKEN] = d.dot(sums.even[TOKEN], codes, x[Q][TOKEN]));
        }
    });
}

/// Adds a unit to the sums in f32.
#[inline(always)]
fn finish<D: Dot, const T: usize>(d: D, w: &Wide<'_>, unit: Unit<'_, T>, sums: &mut Sums<D, T>) {
    let scales = d.load_f32(&w.scales[unit.group]);
    each!(T, TOKEN => {
        let exact = if T == 1 { d.add_i(sums.even[TOKEN], sums.odd) } else { sums.even[TOKEN] };
        let scale = d.mul(scales, d.splat(unit.scales[TOKEN]));
        sums.float[TOKEN] = d.mul_add(d.to_f32(exact), scale, sums.float[TOKEN]);
    });
    if !w.mins.is_empty() {
        let mins = d.load_f32(&w.mins[unit.group]);
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
            let mut codes = quad::<D, BITS>(d, block, Q);
            if TABLE {
                codes = d.look_up(codes, levels);
            }
            d.store(codes, &mut out[Q]);
        });
    }
}

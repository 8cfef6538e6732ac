//! Products `A Bᵀ` of signed 8-bit codes with i32 sums and f32 scales, blocked like `gemm_packed` but without blocks of
//! k: sums of integers are exact, so that an element is scaled once, or once for each unit of codes under one scale.
//!
//! Both operands are packed into panels of 32-bit steps along k: four codes where the processor multiplies bytes
//! (`VPDPBUSD`, whose left bytes are unsigned: B is stored plus 128, and the sum of a line of A times -128 is where its
//! sums start), else two codes widened to 16 bits (`VPMADDWD`).
//!
//! The arithmetic is the same at every level. With one unit, an element is `sum · (f a[i]) · b[j]` for the integer
//! `sum`, rounded to f32, and the factors `f` of both operands, `a[i]` and `b[j]` of their lines; with several,
//! `sum` is a chain of fused multiply-adds of the units' integers, each times `a[i, u] · b[j, u]`.

use std::cell::Cell;
use std::ops::Range;

use super::gemm_packed::first_values;
use super::padded;
use crate::simd::{LANES, Simd};
use crate::{MatMut, MatRef};

/// Most codes of a unit, so that sums fit i32: 2^16 · 2^14 = 2^30.
const LONGEST: usize = 1 << 16;

/// Bytes of packed A: about the second-level cache.
const BLOCK_BYTES: usize = 1 << 20;

/// Most rows of A that are packed at a time.
const MOST_ROWS: usize = 2048;

/// Steps that are transposed at a time.
const STAGED: usize = 256;

/// Lines that are transposed together.
const TRANSPOSED: usize = 8;

/// Operand of a product of codes: `[lines, k]` signed codes, which stand for `code · scale · factor · of line`.
#[derive(Clone, Copy, Debug)]
pub struct Codes<'a> {
    /// Codes `[lines, k]`.
    pub codes: MatRef<'a, i8>,
    /// Length of a unit of codes with a scale, and the scales `[lines, ceil(k / unit)]`. `None` for no such scales.
    pub scales: Option<(usize, &'a [f32])>,
    /// Factors of the lines.
    pub factors: Option<&'a [f32]>,
    /// Factor of all.
    pub factor: f32,
}

impl<'a> Codes<'a> {
    /// Codes that stand for themselves.
    pub fn new(codes: MatRef<'a, i8>) -> Self {
        Codes { codes, scales: None, factors: None, factor: 1.0 }
    }

    fn check(&self) {
        let lines = self.codes.rows();
        let units = |unit: usize| self.codes.cols().div_ceil(unit.max(1));
        let fits = self.scales.is_none_or(|(unit, scales)| unit > 0 && scales.len() == lines * units(unit));
        assert!(fits, "gemm_codes: scales do not fit the codes");
        let fits = self.factors.is_none_or(|factors| factors.len() == lines);
        assert!(fits, "gemm_codes: factors do not fit the lines");
    }
}

/// The integer multiply-add of a level.
pub(crate) trait CodeDot: Copy {
    /// Level of the f32 arithmetic.
    type Level: Simd;
    /// 16 i32 sums, or 16 steps.
    type Int: Copy;
    /// Codes of a step: 4 or 2.
    const CODES: usize;
    /// True if steps of B hold unsigned bytes, codes plus 128.
    const EXCESS: bool;

    fn level(self) -> Self::Level;
    fn splat(self, x: u32) -> Self::Int;
    fn load(self, x: &[u32; LANES]) -> Self::Int;
    /// Adds to every sum the products of the codes of its step of B and of `a`.
    fn dot(self, sum: Self::Int, b: Self::Int, a: Self::Int) -> Self::Int;
    fn to_f32(self, x: Self::Int) -> <Self::Level as Simd>::F32;
}

/// The definition, in the vectors of a level.
#[derive(Clone, Copy)]
struct Pairs<S>(S);

impl<S: Simd> CodeDot for Pairs<S> {
    type Level = S;
    type Int = [u32; LANES];
    const CODES: usize = 2;
    const EXCESS: bool = false;

    #[inline(always)]
    fn level(self) -> S {
        self.0
    }

    #[inline(always)]
    fn splat(self, x: u32) -> [u32; LANES] {
        [x; LANES]
    }

    #[inline(always)]
    fn load(self, x: &[u32; LANES]) -> [u32; LANES] {
        *x
    }

    #[inline(always)]
    fn dot(self, sum: [u32; LANES], b: [u32; LANES], a: [u32; LANES]) -> [u32; LANES] {
        let mut out = sum;
        for ((out, b), a) in out.iter_mut().zip(b).zip(a) {
            let low = i32::from(b as i16) * i32::from(a as i16);
            let high = i32::from((b >> 16) as i16) * i32::from((a >> 16) as i16);
            *out = out.wrapping_add(low.wrapping_add(high) as u32);
        }
        out
    }

    #[inline(always)]
    fn to_f32(self, x: [u32; LANES]) -> S::F32 {
        self.0.load(&x.map(|x| x as i32 as f32))
    }
}

#[inline(always)]
pub(crate) fn gemm_codes<S: Simd>(simd: S, a: Codes<'_>, b: Codes<'_>, c: MatMut<'_>, accumulate: bool) {
    multiply::<_, 4, 3, 1>(Pairs(simd), a, b, c, accumulate);
}

/// Packed operands, kept per thread.
#[derive(Default)]
struct Packed {
    a: Vec<u32>,
    b: Vec<u32>,
    starts: Vec<u32>,
    scales: [Vec<u32>; 2],
}

thread_local! {
    static PACKED: Cell<Packed> = Cell::default();
}

/// Units of k.
#[derive(Clone, Copy)]
struct Units {
    k: usize,
    /// Codes of a unit.
    unit: usize,
    /// Steps of a whole unit.
    steps: usize,
    /// Codes of a step.
    codes: usize,
}

impl Units {
    fn count(self) -> usize {
        self.k.div_ceil(self.unit)
    }

    /// Steps of all units.
    fn all(self) -> usize {
        self.last().1.end
    }

    /// Codes and steps of the last unit.
    fn last(self) -> (Range<usize>, Range<usize>) {
        self.at(self.count() - 1)
    }

    /// Codes and steps of unit `u`.
    #[inline(always)]
    fn at(self, u: usize) -> (Range<usize>, Range<usize>) {
        let codes = u * self.unit..self.k.min((u + 1) * self.unit);
        let steps = u * self.steps..u * self.steps + codes.len().div_ceil(self.codes);
        (codes, steps)
    }
}

/// The product with tiles of `V` vectors and `R` rows, or `Q` with several units.
#[inline(always)]
pub(crate) fn multiply<D: CodeDot, const R: usize, const Q: usize, const V: usize>(
    dot: D,
    a: Codes<'_>,
    b: Codes<'_>,
    mut c: MatMut<'_>,
    accumulate: bool,
) {
    let (m, n, k) = (a.codes.rows(), b.codes.rows(), a.codes.cols());
    assert_eq!(k, b.codes.cols(), "gemm_codes: the inner dimensions of A and B differ");
    assert_eq!((m, n), (c.rows(), c.cols()), "gemm_codes: C does not have the shape of the product");
    [&a, &b].iter().for_each(|operand| operand.check());
    if m == 0 || n == 0 || k == 0 {
        if !accumulate {
            (0..m).for_each(|row| c.row_mut(row).fill(0.0));
        }
        return;
    }
    let unit = match (a.scales, b.scales) {
        (Some((unit, _)), Some((other, _))) => {
            assert_eq!(unit, other, "gemm_codes: the units of A and B differ");
            unit
        }
        (Some((unit, _)), None) | (None, Some((unit, _))) => unit,
        _ => LONGEST,
    };
    assert!(unit <= LONGEST, "gemm_codes: units of {unit} codes");
    let units = Units { k, unit, steps: unit.min(k).div_ceil(D::CODES), codes: D::CODES };
    if a.scales.is_none() && b.scales.is_none() && units.count() == 1 {
        by_panels::<D, R, V, false>(dot, units, (a, b), &mut c, accumulate);
    } else {
        by_panels::<D, Q, V, true>(dot, units, (a, b), &mut c, accumulate);
    }
}

#[inline(always)]
fn by_panels<D: CodeDot, const R: usize, const V: usize, const SCALED: bool>(
    dot: D,
    units: Units,
    (a, b): (Codes<'_>, Codes<'_>),
    c: &mut MatMut<'_>,
    accumulate: bool,
) {
    let (m, n, steps, width) = (c.rows(), c.cols(), units.all(), V * LANES);
    let block = (BLOCK_BYTES / (4 * steps)).clamp(16 * R, MOST_ROWS).next_multiple_of(R);
    let mut buffers = PACKED.take();
    let packed_a = first_values(&mut buffers.a, m.min(block).next_multiple_of(R) * steps);
    let starts = first_values(&mut buffers.starts, m.min(block).next_multiple_of(R) * units.count());
    let packed_b = first_values(&mut buffers.b, width * steps + LANES);
    // Align the vectors of B to cache lines: a load across two of them costs two.
    let aligned = packed_b.as_ptr().align_offset(LANES * size_of::<u32>()).min(LANES);
    let packed_b = &mut packed_b[aligned..];
    let [scales_a, scales_b] = &mut buffers.scales;
    let scales_a = first_values(scales_a, if SCALED { R * units.count() } else { 0 });
    let scales_b = first_values(scales_b, if SCALED { width * units.count() } else { 0 });
    let factor = a.factor * b.factor;
    for row in (0..m).step_by(block) {
        let rows = row..m.min(row + block);
        for (first, packed) in rows.clone().step_by(R).zip(packed_a.chunks_exact_mut(R * steps)) {
            pack::<D>(dot, a.codes, first..rows.end.min(first + R), units, (R, 0), packed);
        }
        if D::EXCESS {
            for (first, starts) in rows.clone().step_by(R).zip(starts.chunks_exact_mut(R * units.count())) {
                sum_lines(a.codes, first..rows.end.min(first + R), units, R, starts);
            }
        }
        for col in (0..n).step_by(width) {
            let cols = col..n.min(col + width);
            pack::<D>(dot, b.codes, cols.clone(), units, (width, D::EXCESS as u8 * 0x80), packed_b);
            if SCALED {
                pack_scales(b, cols.clone(), units, width, scales_b);
            }
            let mut col_factors = [1.0; 64];
            if let Some(factors) = b.factors {
                col_factors[..cols.len()].copy_from_slice(&factors[cols.clone()]);
            }
            let panel = PanelOf {
                units,
                b: packed_b,
                scales: scales_b,
                factors: &col_factors,
                cols,
                add: accumulate,
            };
            for (i, first) in rows.clone().step_by(R).enumerate() {
                if SCALED {
                    pack_scales(a, first..rows.end.min(first + R), units, R, scales_a);
                }
                let mut row_factors = [factor; R];
                for (r, row_factor) in row_factors.iter_mut().enumerate().take(rows.end - first) {
                    *row_factor = factor * a.factors.map_or(1.0, |factors| factors[first + r]);
                }
                let left = Left {
                    a: &packed_a[i * R * steps..][..R * steps],
                    starts: &starts[i * R * units.count()..][..R * units.count()],
                    scales: scales_a,
                    factors: row_factors,
                    rows: first..rows.end.min(first + R),
                };
                // Skip vectors beyond the matrix.
                match panel.cols.len().div_ceil(LANES) {
                    1 if V > 1 => tile::<D, R, V, 1, SCALED>(dot, &panel, &left, c),
                    2 if V > 2 => tile::<D, R, V, 2, SCALED>(dot, &panel, &left, c),
                    _ => tile::<D, R, V, V, SCALED>(dot, &panel, &left, c),
                }
            }
        }
    }
    PACKED.set(buffers);
}

/// A packed panel of B and what is added to.
struct PanelOf<'a> {
    units: Units,
    b: &'a [u32],
    scales: &'a [u32],
    factors: &'a [f32; 64],
    cols: Range<usize>,
    add: bool,
}

/// Packed lines of A.
struct Left<'a, const R: usize> {
    a: &'a [u32],
    starts: &'a [u32],
    scales: &'a [u32],
    factors: [f32; R],
    rows: Range<usize>,
}

/// Computes a tile of C with the first `W` vectors of a panel.
#[inline(always)]
fn tile<D: CodeDot, const R: usize, const V: usize, const W: usize, const SCALED: bool>(
    dot: D,
    panel: &PanelOf<'_>,
    left: &Left<'_, R>,
    c: &mut MatMut<'_>,
) {
    let (simd, units) = (dot.level(), panel.units);
    for row in left.rows.clone() {
        c.row_mut(row)[panel.cols.clone()].chunks(LANES).for_each(|line| simd.prefetch(line));
    }
    let mut sums = [[simd.splat(0.0); W]; R];
    for u in 0..units.count() {
        let (_, steps) = units.at(u);
        let (a, b) = (&left.a[steps.start * R..steps.end * R], &panel.b[steps.start * V * LANES..]);
        let b = &b[..steps.len() * V * LANES];
        let starts = &left.starts[if D::EXCESS { u * R..(u + 1) * R } else { 0..0 }];
        let integers = integers::<D, R, V, W>(dot, starts, a, b);
        if !SCALED {
            for r in 0..R {
                for v in 0..W {
                    sums[r][v] = dot.to_f32(integers[r][v]);
                }
            }
            break;
        }
        let col_scales = &panel.scales[u * V * LANES..][..V * LANES].as_chunks::<LANES>().0;
        let row_scales = &left.scales[u * R..][..R];
        let mut scales = [simd.splat(0.0); W];
        for v in 0..W {
            scales[v] = simd.load(&col_scales[v].map(f32::from_bits));
        }
        for r in 0..R {
            let row_scale = simd.splat(f32::from_bits(row_scales[r]));
            for v in 0..W {
                sums[r][v] =
                    simd.mul_add(dot.to_f32(integers[r][v]), simd.mul(row_scale, scales[v]), sums[r][v]);
            }
        }
    }
    let col_factors = panel.factors.as_chunks::<LANES>().0;
    for (r, row) in left.rows.clone().enumerate() {
        let row_factor = simd.splat(left.factors[r]);
        let lines = c.row_mut(row)[panel.cols.clone()].chunks_mut(LANES);
        for ((line, &sum), col_factors) in lines.zip(&sums[r]).zip(col_factors) {
            let value = simd.mul(simd.mul(sum, row_factor), simd.load(col_factors));
            if let Ok(line) = <&mut [f32; LANES]>::try_from(&mut *line) {
                *line = simd.to_array(if panel.add { simd.add(simd.load(line), value) } else { value });
                continue;
            }
            let value = if panel.add { simd.add(simd.load(&padded(line, 0.0)), value) } else { value };
            line.copy_from_slice(&simd.to_array(value)[..line.len()]);
        }
    }
}

/// Sums of a tile over the steps of a unit.
#[inline(always)]
fn integers<D: CodeDot, const R: usize, const V: usize, const W: usize>(
    dot: D,
    starts: &[u32],
    a: &[u32],
    b: &[u32],
) -> [[D::Int; W]; R] {
    let mut sums = [[dot.splat(0); W]; R];
    for (sums, &start) in sums.iter_mut().zip(starts) {
        *sums = [dot.splat(start); W];
    }
    let b = b.as_chunks::<LANES>().0.as_chunks::<V>().0;
    for (a, b) in a.as_chunks::<R>().0.iter().zip(b) {
        let mut vectors = [dot.splat(0); W];
        for v in 0..W {
            vectors[v] = dot.load(&b[v]);
        }
        for r in 0..R {
            let a = dot.splat(a[r]);
            for v in 0..W {
                sums[r][v] = dot.dot(sums[r][v], vectors[v], a);
            }
        }
    }
    sums
}

/// Packs `lines` into a panel of `width` lines, step by step; lines beyond and codes after a unit's last are zeros.
/// `excess` is added to every code.
#[inline(always)]
fn pack<D: CodeDot>(
    dot: D,
    codes: MatRef<'_, i8>,
    lines: Range<usize>,
    units: Units,
    (width, excess): (usize, u8),
    out: &mut [u32],
) {
    let zero = if D::CODES == 4 { u32::from_ne_bytes([excess; 4]) } else { 0 };
    let mut staged = [[zero; STAGED]; TRANSPOSED];
    for offset in (0..width).step_by(TRANSPOSED) {
        let present = lines.end.saturating_sub(lines.start + offset).min(TRANSPOSED);
        staged[present..].iter_mut().for_each(|line| line.fill(zero));
        let count = TRANSPOSED.min(width - offset);
        for u in 0..units.count() {
            let (of_unit, steps) = units.at(u);
            for first in (0..steps.len()).step_by(STAGED) {
                let number = (steps.len() - first).min(STAGED);
                let from = of_unit.start + first * D::CODES;
                let span = from..of_unit.end.min(from + number * D::CODES);
                for (i, staged) in staged[..present].iter_mut().enumerate() {
                    stage::<D>(&codes.row(lines.start + offset + i)[span.clone()], excess, staged);
                }
                let rows = staged.each_ref().map(|row| row.as_chunks::<TRANSPOSED>().0);
                let to = &mut out[(steps.start + first) * width..][..number * width];
                for (i, steps) in to.chunks_mut(width * TRANSPOSED).enumerate() {
                    let columns = dot.level().transpose_8x8(rows.map(|row| &row[i]));
                    for (out, column) in steps.chunks_exact_mut(width).zip(&columns) {
                        match out[offset..].first_chunk_mut() {
                            Some(out) => *out = *column,
                            None => out[offset..].copy_from_slice(&column[..count]),
                        }
                    }
                }
            }
        }
    }
}

/// Writes the steps of codes of one line.
#[inline(always)]
fn stage<D: CodeDot>(codes: &[i8], excess: u8, out: &mut [u32; STAGED]) {
    let mut number = 0;
    if D::CODES == 4 {
        let (whole, rest) = codes.as_chunks::<4>();
        let flip = u32::from_ne_bytes([excess; 4]);
        for (out, &[a, b, c, d]) in out.iter_mut().zip(whole) {
            *out = u32::from_ne_bytes([a as u8, b as u8, c as u8, d as u8]) ^ flip;
        }
        number += whole.len();
        if !rest.is_empty() {
            let mut last = [0; 4];
            last.iter_mut().zip(rest).for_each(|(last, &code)| *last = code as u8);
            out[number] = u32::from_ne_bytes(last) ^ flip;
        }
    } else {
        let (whole, rest) = codes.as_chunks::<2>();
        let wide = |code: i8| u32::from(i16::from(code) as u16);
        for (out, &[a, b]) in out.iter_mut().zip(whole) {
            *out = wide(a) | wide(b) << 16;
        }
        number += whole.len();
        if let [last] = rest {
            out[number] = wide(*last);
        }
    }
}

/// -128 times the sums of the codes of each line and unit, `[units, width]`.
#[inline(always)]
fn sum_lines(codes: MatRef<'_, i8>, lines: Range<usize>, units: Units, width: usize, out: &mut [u32]) {
    for (r, line) in lines.enumerate() {
        let row = codes.row(line);
        for u in 0..units.count() {
            let sum = row[units.at(u).0].iter().fold(0i32, |sum, &code| sum.wrapping_add(i32::from(code)));
            out[u * width + r] = sum.wrapping_mul(-128) as u32;
        }
    }
}

/// Scales of `lines` as bits, `[units, width]`.
#[inline(always)]
fn pack_scales(of: Codes<'_>, lines: Range<usize>, units: Units, width: usize, out: &mut [u32]) {
    let count = units.count();
    match of.scales {
        Some((_, scales)) => {
            for (r, line) in lines.enumerate() {
                for (u, scale) in scales[line * count..][..count].iter().enumerate() {
                    out[u * width + r] = scale.to_bits();
                }
            }
        }
        None => out[..count * width].fill(1f32.to_bits()),
    }
}

//! Products of f32, bf16 or f16 operands into f32, blocked as in Goto and van de Geijn, "Anatomy of High-Performance
//! Matrix Multiplication" (2008): blocks of both operands are packed into panels that a tile of the output, held in
//! registers, reads from front to back.
//!
//! The order of the arithmetic is fixed and the same for every level, tile and block. k is split into blocks of
//! [`DEPTH`]. Within a block the sum starts at 0 and takes the products in order, each by one fused multiply-add; the
//! blocks' sums are added to C in order. Products of bf16 are added in the order of AMX's `TDPBF16PS`: for each
//! [`CHAINED`] elements of k two chains that start at 0, of the even and of the odd elements, then their sum to C.
//! Either way an element depends only on its own row, column and k.

use std::cell::Cell;

use super::convert::{from_bf16, from_f16};
use super::padded;
use crate::simd::{LANES, Simd};
use crate::{MatMut, MatRef};

/// Length of a block of k; even. A constant, not a cache size, because it affects the bits. A panel of B of 48
/// columns takes 48 KiB of bf16 pairs, 96 KiB widened; longer blocks mean fewer passes over C.
pub(crate) const DEPTH: usize = 512;

/// Elements of k in a pair of chains of bf16 products: the size of an AMX tile.
const CHAINED: usize = 32;

/// Rows of A in a block: 192 KiB of bf16 pairs, 384 KiB widened. A multiple of all tile heights.
const BLOCK_ROWS: usize = 192;

/// Columns of B in a block: 768 KiB of bf16 pairs, 1536 KiB widened. A multiple of all tile widths.
const BLOCK_COLS: usize = 768;

/// Lines that are transposed together.
const TRANSPOSED: usize = 8;

/// Packed blocks of the left and of the right operand.
#[derive(Default)]
struct PackedOperands {
    a: Vec<u32>,
    b: Vec<u32>,
}

thread_local! {
    /// Kept between products: they are many and small, and fresh memory would have to be cleared for each.
    static PACKED: Cell<PackedOperands> = const { Cell::new(PackedOperands { a: Vec::new(), b: Vec::new() }) };
}

/// Returns `len` values of unspecified content from `buffer`, growing it if it is too short.
#[inline(always)]
pub(super) fn first_values(buffer: &mut Vec<u32>, len: usize) -> &mut [u32] {
    if buffer.len() < len {
        buffer.resize(len, 0);
    }
    &mut buffer[..len]
}

/// An operand of a product over k, f32 or the bits of bf16 or f16. Its lines are the rows of C if it is the left
/// operand, the columns of C if it is the right one.
#[derive(Clone, Copy, Debug)]
pub enum Operand<'a, T> {
    /// `[lines, k]`: rows run along k.
    Rows(MatRef<'a, T>),
    /// `[k, lines]`: rows run across lines.
    Columns(MatRef<'a, T>),
}

impl<T> Operand<'_, T> {
    /// (lines, k).
    fn shape(&self) -> (usize, usize) {
        match self {
            Self::Rows(m) => (m.rows(), m.cols()),
            Self::Columns(m) => (m.cols(), m.rows()),
        }
    }
}

/// Panel layout of operands, and the step of the product that reads them.
///
/// A panel holds a few lines, padded with zeros, for one block of k: step by step, and within a step line by line. A
/// step is one 32-bit value per line.
pub(crate) trait Panels: Copy {
    /// Element type of the operands.
    type Element: Copy + Default;
    /// Level whose accumulators hold the sums.
    type Level: Simd;
    /// A step of 16 lines.
    type Vector: Copy;
    /// Steps per two elements along k.
    const STEPS: usize;
    /// True if sums are pairs of chains of [`CHAINED`] steps, added to C in order, instead of one chain per block.
    const PAIRED: bool;

    fn level(self) -> Self::Level;

    /// Writes the steps of one line with elements `row`. Leaves the rest of `out` unchanged, but pads an odd row with
    /// a zero.
    fn along_k(self, row: &[Self::Element], out: &mut [u32; DEPTH]);

    /// The steps of `G` lines for two elements along k; lines begin every `width` values.
    fn across<const G: usize>(
        self,
        low: &[Self::Element; G],
        high: &[Self::Element; G],
        width: usize,
        out: &mut [u32],
    );

    fn load(self, step: &[u32; LANES]) -> Self::Vector;
    fn splat(self, step: u32) -> Self::Vector;
    /// Adds the product of a step's elements to `sum`; of two elements, the odd one before the even one.
    fn add_product(
        self,
        a: Self::Vector,
        b: Self::Vector,
        sum: <Self::Level as Simd>::F32,
    ) -> <Self::Level as Simd>::F32;
}

#[inline(always)]
pub(crate) fn gemm_bf16<S: Simd>(
    simd: S,
    a: Operand<'_, u16>,
    b: Operand<'_, u16>,
    c: MatMut<'_>,
    accumulate: bool,
) {
    let panels = Widened::<S, Bf16> { simd, element: std::marker::PhantomData };
    // Two chains per element.
    if S::WIDE {
        product::<_, 4, 3>(panels, "gemm_bf16", a, b, c, accumulate);
    } else {
        product::<_, 3, 1>(panels, "gemm_bf16", a, b, c, accumulate);
    }
}

#[inline(always)]
pub(crate) fn gemm_f16<S: Simd>(
    simd: S,
    a: Operand<'_, u16>,
    b: Operand<'_, u16>,
    c: MatMut<'_>,
    accumulate: bool,
) {
    widened::<S, F16>(simd, "gemm_f16", a, b, c, accumulate);
}

#[inline(always)]
pub(crate) fn gemm_f32<S: Simd>(
    simd: S,
    a: Operand<'_, f32>,
    b: Operand<'_, f32>,
    c: MatMut<'_>,
    accumulate: bool,
) {
    widened::<S, F32>(simd, "gemm_f32", a, b, c, accumulate);
}

#[inline(always)]
fn widened<S: Simd, E: Widen>(
    simd: S,
    kernel: &str,
    a: Operand<'_, E::Bits>,
    b: Operand<'_, E::Bits>,
    c: MatMut<'_>,
    accumulate: bool,
) {
    let panels = Widened::<S, E> { simd, element: std::marker::PhantomData };
    if S::WIDE {
        product::<_, 8, 3>(panels, kernel, a, b, c, accumulate);
    } else {
        product::<_, 6, 1>(panels, kernel, a, b, c, accumulate);
    }
}

/// Float type, with its widening to f32.
trait Widen: Copy {
    /// Type as stored in operands.
    type Bits: Copy + Default;
    /// Same as [`Panels::PAIRED`].
    const PAIRED: bool;

    fn widen(stored: Self::Bits) -> f32;
}

#[derive(Clone, Copy)]
struct F32;

impl Widen for F32 {
    type Bits = f32;
    const PAIRED: bool = false;

    #[inline(always)]
    fn widen(x: f32) -> f32 {
        x
    }
}

#[derive(Clone, Copy)]
struct Bf16;

impl Widen for Bf16 {
    type Bits = u16;
    const PAIRED: bool = true;

    #[inline(always)]
    fn widen(h: u16) -> f32 {
        from_bf16(h)
    }
}

#[derive(Clone, Copy)]
struct F16;

impl Widen for F16 {
    type Bits = u16;
    const PAIRED: bool = false;

    #[inline(always)]
    fn widen(h: u16) -> f32 {
        from_f16(h)
    }
}

/// Panels of f32: a step is one element.
#[derive(Clone, Copy)]
struct Widened<S, E> {
    simd: S,
    element: std::marker::PhantomData<E>,
}

impl<S: Simd, E: Widen> Panels for Widened<S, E> {
    type Element = E::Bits;
    type Level = S;
    type Vector = S::F32;
    const STEPS: usize = 2;
    const PAIRED: bool = E::PAIRED;

    #[inline(always)]
    fn level(self) -> S {
        self.simd
    }

    #[inline(always)]
    fn along_k(self, row: &[E::Bits], out: &mut [u32; DEPTH]) {
        for (step, &x) in out.iter_mut().zip(row) {
            *step = E::widen(x).to_bits();
        }
        if !row.len().is_multiple_of(2) {
            out[row.len()] = 0;
        }
    }

    #[inline(always)]
    fn across<const G: usize>(self, low: &[E::Bits; G], high: &[E::Bits; G], width: usize, out: &mut [u32]) {
        let (first, second) = out.split_at_mut(width);
        for (out, step) in [(first, low), (second, high)] {
            for (out, &x) in out[..G].iter_mut().zip(step) {
                *out = E::widen(x).to_bits();
            }
        }
    }

    #[inline(always)]
    fn load(self, step: &[u32; LANES]) -> S::F32 {
        self.simd.load(&step.map(f32::from_bits))
    }

    #[inline(always)]
    fn splat(self, step: u32) -> S::F32 {
        self.simd.splat(f32::from_bits(step))
    }

    #[inline(always)]
    fn add_product(self, a: S::F32, b: S::F32, sum: S::F32) -> S::F32 {
        self.simd.mul_add(a, b, sum)
    }
}

/// Rows and columns of C and length of k, if there is anything to multiply. Handles a product with k = 0 itself.
///
/// Panics if the shapes do not agree.
#[inline(always)]
pub(crate) fn shape<T>(
    kernel: &str,
    a: Operand<'_, T>,
    b: Operand<'_, T>,
    c: &mut MatMut<'_>,
    accumulate: bool,
) -> Option<(usize, usize, usize)> {
    let ((m, k), (n, k_b)) = (a.shape(), b.shape());
    assert_eq!(k, k_b, "{kernel}: the inner dimensions of A and B differ");
    assert_eq!((m, n), (c.rows(), c.cols()), "{kernel}: C does not have the shape of the product");
    if k == 0 && !accumulate {
        (0..m).for_each(|r| c.row_mut(r).fill(0.0));
    }
    (m > 0 && n > 0 && k > 0).then_some((m, n, k))
}

/// The product with tiles of `R` rows and `V` vectors.
#[inline(always)]
pub(crate) fn product<P: Panels, const R: usize, const V: usize>(
    panels: P,
    kernel: &str,
    a: Operand<'_, P::Element>,
    b: Operand<'_, P::Element>,
    mut c: MatMut<'_>,
    accumulate: bool,
) {
    let Some((m, n, k)) = shape(kernel, a, b, &mut c, accumulate) else { return };
    let width = V * LANES;
    let steps = k.min(DEPTH).div_ceil(2) * P::STEPS;
    let mut buffers = PACKED.take();
    let packed_a = first_values(&mut buffers.a, m.min(BLOCK_ROWS).next_multiple_of(R) * steps);
    let packed_b = first_values(&mut buffers.b, n.min(BLOCK_COLS).next_multiple_of(width) * steps + LANES);
    // Align the vectors of B to cache lines: a load across two of them costs two.
    let aligned = packed_b.as_ptr().align_offset(LANES * size_of::<u32>()).min(LANES);
    let packed_b = &mut packed_b[aligned..];
    for col in (0..n).step_by(BLOCK_COLS) {
        let cols = col..n.min(col + BLOCK_COLS);
        for first in (0..k).step_by(DEPTH) {
            let depth = first..k.min(first + DEPTH);
            let steps = depth.len().div_ceil(2) * P::STEPS;
            pack::<P, LANES>(panels, b, cols.clone(), depth.clone(), (width, steps), packed_b);
            for row in (0..m).step_by(BLOCK_ROWS) {
                let rows = row..m.min(row + BLOCK_ROWS);
                pack::<P, R>(panels, a, rows.clone(), depth.clone(), (R, steps), packed_a);
                let packed = (&*packed_a, &*packed_b, steps);
                block::<P, R, V>(panels, packed, rows, cols.clone(), &mut c, accumulate || first > 0);
            }
        }
    }
    PACKED.set(buffers);
}

/// Packs `lines` of `operand` for a block of k into panels of (`width`, `steps`), in groups of `G` lines; `width` is
/// a multiple of `G`.
#[inline(always)]
fn pack<P: Panels, const G: usize>(
    panels: P,
    operand: Operand<'_, P::Element>,
    lines: std::ops::Range<usize>,
    depth: std::ops::Range<usize>,
    (width, steps): (usize, usize),
    packed: &mut [u32],
) {
    let packed = &mut packed[..lines.len().next_multiple_of(width) * steps];
    match operand {
        Operand::Rows(m) => {
            let mut staged = [[0_u32; DEPTH]; TRANSPOSED];
            for (panel, out) in packed.chunks_exact_mut(width * steps).enumerate() {
                let first = lines.start + panel * width;
                for offset in (0..width).step_by(TRANSPOSED) {
                    let end = lines.end.min(first + width);
                    let lines = first + offset..end.max(first + offset);
                    pack_transposed(panels, m, lines, depth.clone(), &mut staged, (offset, width), out);
                }
            }
        }
        Operand::Columns(m) => {
            let zeros = [P::Element::default(); BLOCK_COLS];
            for (p, k) in depth.clone().step_by(2).enumerate() {
                let low = &m.row(k)[lines.clone()];
                let high =
                    if k + 1 < depth.end { &m.row(k + 1)[lines.clone()] } else { &zeros[..lines.len()] };
                pack_across::<P, G>(panels, low, high, (p * P::STEPS, steps), width, packed);
            }
        }
    }
}

/// Packs up to 8 lines, from `lines.start` on, at `offset` of a panel; lines from `lines.end` on are zeros. The
/// previous content of `staged` does not matter.
#[inline(always)]
fn pack_transposed<P: Panels>(
    panels: P,
    m: MatRef<'_, P::Element>,
    lines: std::ops::Range<usize>,
    depth: std::ops::Range<usize>,
    staged: &mut [[u32; DEPTH]; TRANSPOSED],
    (offset, width): (usize, usize),
    out: &mut [u32],
) {
    let present = lines.len().min(TRANSPOSED);
    for (line, staged) in lines.zip(&mut *staged) {
        panels.along_k(&m.row(line)[depth.clone()], staged);
    }
    staged[present..].iter_mut().for_each(|staged| staged.fill(0));
    let staged = staged.each_ref().map(|row| row.as_chunks::<TRANSPOSED>().0);
    let count = TRANSPOSED.min(width - offset);
    for (i, steps) in out.chunks_mut(width * TRANSPOSED).enumerate() {
        let columns = panels.level().transpose_8x8(staged.map(|row| &row[i]));
        for (out, column) in steps.chunks_exact_mut(width).zip(&columns) {
            match out[offset..].first_chunk_mut() {
                Some(out) => *out = *column,
                None => out[offset..].copy_from_slice(&column[..count]),
            }
        }
    }
}

/// Packs two rows that run across the lines as the steps from `step` on of the panels, which have `steps` each.
#[inline(always)]
fn pack_across<P: Panels, const G: usize>(
    panels: P,
    low: &[P::Element],
    high: &[P::Element],
    (step, steps): (usize, usize),
    width: usize,
    packed: &mut [u32],
) {
    for (panel, out) in packed.chunks_exact_mut(width * steps).enumerate() {
        let out = &mut out[step * width..][..P::STEPS * width];
        for offset in (0..width).step_by(G) {
            let line = panel * width + offset;
            let (low, high) = (low.get(line..).unwrap_or_default(), high.get(line..).unwrap_or_default());
            let out = &mut out[offset..];
            match (low.first_chunk(), high.first_chunk()) {
                (Some(low), Some(high)) => panels.across::<G>(low, high, width, out),
                _ => panels.across::<G>(&filled_up(low), &filled_up(high), width, out),
            }
        }
    }
}

/// `rest`, padded with zeros.
#[inline(always)]
fn filled_up<T: Copy + Default, const G: usize>(rest: &[T]) -> [T; G] {
    let mut all = [T::default(); G];
    all[..rest.len()].copy_from_slice(rest);
    all
}

/// `C = A B`, or `C += A B` if `add`, for the packed (A, B, their steps) of one block.
#[inline(always)]
fn block<P: Panels, const R: usize, const V: usize>(
    panels: P,
    (a, b, steps): (&[u32], &[u32], usize),
    rows: std::ops::Range<usize>,
    cols: std::ops::Range<usize>,
    c: &mut MatMut<'_>,
    add: bool,
) {
    for (col, b) in cols.clone().step_by(V * LANES).zip(b.chunks_exact(V * LANES * steps)) {
        let width = (cols.end - col).min(V * LANES);
        for (row, a) in rows.clone().step_by(R).zip(a.chunks_exact(R * steps)) {
            let tile = (row..rows.end.min(row + R), col..col + width);
            // Skip vectors beyond the matrix: a matrix of 64 columns takes 48 + 16, not 96.
            match width.div_ceil(LANES) {
                1 if V > 1 => add_tile::<P, R, V, 1>(panels, a, b, tile, c, add),
                2 if V > 2 => add_tile::<P, R, V, 2>(panels, a, b, tile, c, add),
                _ => add_tile::<P, R, V, V>(panels, a, b, tile, c, add),
            }
        }
    }
}

/// Computes the tile of `rows` x `cols` of C, like [`block`], with the first `W` vectors of a panel of B.
#[inline(always)]
fn add_tile<P: Panels, const R: usize, const V: usize, const W: usize>(
    panels: P,
    a: &[u32],
    b: &[u32],
    (rows, cols): (std::ops::Range<usize>, std::ops::Range<usize>),
    c: &mut MatMut<'_>,
    add: bool,
) {
    let simd = panels.level();
    // Prefetch C while the sums are computed.
    for row in rows.clone() {
        c.row_mut(row)[cols.clone()].chunks(LANES).for_each(|line| simd.prefetch(line));
    }
    if P::PAIRED {
        return add_paired_tile::<P, R, V, W>(panels, a, b, (rows, cols), c, add);
    }
    let sums = tile_sums::<P, R, V, W>(panels, a, b);
    for (row, sums) in rows.zip(&sums) {
        let (whole, rest) = c.row_mut(row)[cols.clone()].as_chunks_mut::<LANES>();
        for (out, &sum) in whole.iter_mut().zip(sums) {
            *out = simd.to_array(if add { simd.add(simd.load(out), sum) } else { sum });
        }
        if !rest.is_empty() {
            let sum = simd.to_array(sums[whole.len()]);
            for (out, sum) in rest.iter_mut().zip(sum) {
                *out = if add { *out + sum } else { sum };
            }
        }
    }
}

#[inline(always)]
fn tile_sums<P: Panels, const R: usize, const V: usize, const W: usize>(
    panels: P,
    a: &[u32],
    b: &[u32],
) -> [[<P::Level as Simd>::F32; W]; R] {
    let mut sums = [[panels.level().splat(0.0); W]; R];
    let b = b.as_chunks::<LANES>().0.as_chunks::<V>().0;
    for (a, b) in a.as_chunks::<R>().0.iter().zip(b) {
        add_step(panels, a, b, &mut sums);
    }
    sums
}

/// Adds the products of one step of `R` lines of A and the first `W` vectors of B.
#[inline(always)]
fn add_step<P: Panels, const R: usize, const V: usize, const W: usize>(
    panels: P,
    a: &[u32; R],
    b: &[[u32; LANES]; V],
    sums: &mut [[<P::Level as Simd>::F32; W]; R],
) {
    let mut vectors = [panels.splat(0); W];
    for v in 0..W {
        vectors[v] = panels.load(&b[v]);
    }
    for r in 0..R {
        let a = panels.splat(a[r]);
        for v in 0..W {
            sums[r][v] = panels.add_product(a, vectors[v], sums[r][v]);
        }
    }
}

/// [`add_tile`] of pairs of chains: sums start at the old C, or at 0.
#[inline(always)]
fn add_paired_tile<P: Panels, const R: usize, const V: usize, const W: usize>(
    panels: P,
    a: &[u32],
    b: &[u32],
    (rows, cols): (std::ops::Range<usize>, std::ops::Range<usize>),
    c: &mut MatMut<'_>,
    add: bool,
) {
    let simd = panels.level();
    let mut sums = [[simd.splat(0.0); W]; R];
    let (a, b) = (a.as_chunks::<R>().0, b.as_chunks::<LANES>().0.as_chunks::<V>().0);
    if add {
        for (row, sums) in rows.clone().zip(&mut sums) {
            let lines = c.row_mut(row)[cols.clone()].chunks(LANES);
            lines.zip(sums).for_each(|(line, sum)| *sum = simd.load(&padded(line, 0.0)));
        }
    }
    for (a, b) in a.chunks(CHAINED).zip(b.chunks(CHAINED)) {
        let mut even = [[simd.splat(0.0); W]; R];
        let mut odd = even;
        // The number of steps is even: an odd k is padded with a zero.
        for (a, b) in a.as_chunks::<2>().0.iter().zip(b.as_chunks::<2>().0) {
            add_step(panels, &a[0], &b[0], &mut even);
            add_step(panels, &a[1], &b[1], &mut odd);
        }
        for r in 0..R {
            for v in 0..W {
                sums[r][v] = simd.add(sums[r][v], simd.add(even[r][v], odd[r][v]));
            }
        }
    }
    for (row, sums) in rows.zip(&sums) {
        for (line, &sum) in c.row_mut(row)[cols.clone()].chunks_mut(LANES).zip(sums) {
            line.copy_from_slice(&simd.to_array(sum)[..line.len()]);
        }
    }
}

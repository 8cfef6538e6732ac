//! Weights of floating-point codes, row by row, and their products with f32 activations.
//!
//! `y[r] = Σ_g scale[r, g] Σ_{c in g} code[r, c] · x[c]`, in 16 lanes along the columns (`c mod 16`) that a fixed tree
//! adds at the end. Operations and their order are the same at every level and for every number of tokens, so the
//! bits are too. Many tokens are multiplied by the GEMM of bf16, or of f32 where the processor has no bf16 product:
//! see [`FloatRows::multiply`].

use std::ops::Range;

use super::ROWS as LANES;
use super::dot::{Dot, MiniBits};
use super::level::PackedLevel;
use super::share::{Shared, split};
use crate::buffer::Buffer;
use crate::parallel::{for_each, for_each_range};
use crate::{MatMut, MatRef, kernels};

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

    fn mini(self) -> MiniBits {
        let FloatCode::Mini { bits, mantissa_bits, .. } = self else {
            return MiniBits { magnitude: 0, shift: 0, sign: 0, sign_shift: 0 };
        };
        let sign = 1u8 << (bits - 1);
        MiniBits { magnitude: sign - 1, shift: 10 - mantissa_bits, sign, sign_shift: 16 - bits }
    }

    /// Factor that the codes' f16 bits lack.
    fn factor(self) -> f32 {
        match self {
            FloatCode::Mini { bias, .. } => 2f32.powi(15 - bias),
            _ => 1.0,
        }
    }
}

/// A weight `[rows, cols]` of floating-point codes.
#[derive(Clone, Debug)]
pub struct FloatRows {
    code: FloatCode,
    rows: usize,
    cols: usize,
    /// Bytes of a row, padded with zeros to whole lanes.
    stride: usize,
    bytes: Buffer,
    /// Columns that share a scale, a multiple of 16.
    group: usize,
    /// `[rows, groups]`, with the factor of the codes.
    scales: Vec<f32>,
}

/// One weight of [`FloatRows::multiply`] and its output.
#[derive(Debug)]
pub struct RowsJob<'a> {
    /// The weight.
    pub weight: &'a FloatRows,
    /// Output, `[tokens, rows]`.
    pub out: &'a mut [f32],
    /// True to add to the output, false to overwrite it.
    pub accumulate: bool,
}

/// Signature of a product: four rows of codes, their scales, the group, the tokens `[T, cols]`, and the results `[4, T]`.
pub(crate) type RowsProduct = unsafe fn(&Four<'_>, &[f32], &mut [f32]);

/// Rows of a product.
pub(crate) const FOUR: usize = 4;

/// Tokens of one product, if there are as many.
pub(crate) const FEW: usize = 4;

/// Four rows of a weight; the last ones of a weight may be repeated.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Four<'a> {
    code: FloatCode,
    mini: MiniBits,
    /// Whole lanes of a row.
    lanes: usize,
    bytes: [&'a [u8]; FOUR],
    scales: [&'a [f32]; FOUR],
    /// Lanes of a group.
    group: usize,
}

/// Bytes of weights that a thread takes at a time.
const PIECE: usize = 96 << 10;

/// Rows that are widened at a time for many tokens.
const STRIP: usize = 192;

/// Tokens from which the GEMM is faster.
const MANY: usize = 16;

impl FloatRows {
    /// Makes a weight from the bytes of its rows (little-endian codes) and its scales `[rows, ceil(cols / group)]`.
    /// Returns `None` if memory does not hold it.
    ///
    /// # Panics
    /// If the group is neither a multiple of 16 nor the whole row, or a slice has another length.
    pub fn new(
        code: FloatCode,
        (rows, cols): (usize, usize),
        bytes: &[u8],
        group: usize,
        scales: Vec<f32>,
    ) -> Option<Self> {
        let padded = cols.next_multiple_of(LANES);
        let group = group.min(padded);
        assert!(group.is_multiple_of(LANES), "FloatRows: groups of {group} columns");
        assert_eq!(bytes.len(), rows * cols * code.bytes(), "FloatRows: bytes");
        assert_eq!(scales.len(), rows * cols.div_ceil(group.max(1)), "FloatRows: scales");
        let stride = padded * code.bytes();
        let mut own = Buffer::zeroed(stride.checked_mul(rows)?)?;
        let width = (cols * code.bytes()).max(1);
        let lines = own.bytes_mut().chunks_exact_mut(stride.max(1));
        lines.zip(bytes.chunks_exact(width)).for_each(|(to, from)| to[..from.len()].copy_from_slice(from));
        let factor = code.factor();
        let scales = scales.into_iter().map(|scale| scale * factor).collect();
        Some(FloatRows { code, rows, cols, stride, bytes: own, group, scales })
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
        self.bytes.bytes().len() + 4 * self.scales.len()
    }

    /// Computes `out = x Wᵀ`, or adds it to `out`, for every job; `x` `[tokens, cols]`. From 16 tokens on, both
    /// operands are rounded to bf16 where the processor multiplies bf16, except weights of f32. Bits do not depend on
    /// the number of threads.
    ///
    /// # Panics
    /// If a weight has other columns, or an output another shape.
    pub fn multiply<'a>(jobs: impl Iterator<Item = RowsJob<'a>>, x: &[f32], cols: usize, threads: usize) {
        let tokens = x.len().checked_div(cols).unwrap_or(0);
        let mut jobs = jobs.inspect(|RowsJob { weight, out, .. }| {
            assert_eq!(weight.cols, cols, "FloatRows: weight has other columns than the activations");
            assert!(
                cols == 0 || out.len() == tokens * weight.rows,
                "FloatRows: output is not [tokens, rows]"
            );
        });
        if cols == 0 {
            return jobs.filter(|job| !job.accumulate).for_each(|job| job.out.fill(0.0));
        }
        if tokens >= MANY {
            return jobs.for_each(|mut job| job.weight.gemm(x, tokens, &mut job, threads));
        }
        let mut padded = Vec::new();
        let x = match cols.is_multiple_of(LANES) {
            true => x,
            false => {
                let width = cols.next_multiple_of(LANES);
                padded.resize(tokens * width, 0.0);
                padded
                    .chunks_exact_mut(width)
                    .zip(x.chunks_exact(cols))
                    .for_each(|(to, from)| to[..cols].copy_from_slice(from));
                &padded
            }
        };
        let pieces = |w: &FloatRows| (PIECE / w.stride).max(FOUR) / FOUR * FOUR;
        let targets = jobs.by_ref().map(|job| (job.weight, job.accumulate, job.out));
        split(
            targets,
            threads,
            |w| w.rows.div_ceil(pieces(w)),
            |target, piece| {
                let (weight, per_piece) = (target.weight, pieces(target.weight));
                let rows = piece * per_piece..((piece + 1) * per_piece).min(weight.rows);
                weight.few(rows, x, |t, row, y| {
                    // SAFETY: every row belongs to one piece, and `split` hands out every piece once.
                    unsafe { target.out.put(t * weight.rows + row, y, target.accumulate) };
                });
            },
        );
    }

    /// Multiplies some rows with all tokens of `x` `[tokens, padded cols]`.
    fn few(&self, rows: Range<usize>, x: &[f32], put: impl Fn(usize, usize, f32)) {
        let level = PackedLevel::best();
        let width = self.stride / self.code.bytes();
        let groups = self.cols.div_ceil(self.group);
        for first in rows.clone().step_by(FOUR) {
            let row = |i: usize| (first + i).min(rows.end - 1);
            let four = Four {
                code: self.code,
                mini: self.code.mini(),
                lanes: width / LANES,
                bytes: std::array::from_fn(|i| &self.bytes.bytes()[row(i) * self.stride..][..self.stride]),
                scales: std::array::from_fn(|i| &self.scales[row(i) * groups..][..groups]),
                group: self.group / LANES,
            };
            let (mut t, tokens) = (0, x.len() / width);
            while t < tokens {
                let some = if tokens - t >= FEW { FEW } else { 1 };
                let mut out = [0.0; FOUR * FEW];
                level.rows(&four, &x[t * width..][..some * width], &mut out[..FOUR * some]);
                for i in 0..FOUR.min(rows.end - first) {
                    (0..some).for_each(|j| put(t + j, first + i, out[i * some + j]));
                }
                t += some;
            }
        }
    }

    /// Multiplies all rows with many tokens, strip by strip.
    fn gemm(&self, x: &[f32], tokens: usize, job: &mut RowsJob<'_>, threads: usize) {
        let kernels = kernels();
        let (out, accumulate) = (Shared::new(job.out), job.accumulate);
        let in_bf16 = kernels.bf16_dot() && self.code != FloatCode::F32;
        let mut halves = vec![0u16; if in_bf16 { x.len() } else { 0 }];
        let pieces = x.chunks(1 << 14).zip(halves.chunks_mut(1 << 14));
        for_each(threads, pieces, |(x, halves)| kernels.f32_to_bf16(x, halves));
        let strip = STRIP.min(self.rows.div_ceil(threads.max(1)).next_multiple_of(LANES));
        let strips = self.rows.div_ceil(strip.max(1));
        for_each_range(threads, strips, 1, |taken| {
            for i in taken {
                let rows = i * strip..((i + 1) * strip).min(self.rows);
                let mut wide = vec![0.0; rows.len() * self.cols];
                for (row, out) in rows.clone().zip(wide.chunks_exact_mut(self.cols)) {
                    self.row(row, out);
                }
                let mut product = vec![0.0; tokens * rows.len()];
                let c = MatMut::new(&mut product, tokens, rows.len());
                if in_bf16 {
                    let mut strip = vec![0u16; wide.len()];
                    kernels.f32_to_bf16(&wide, &mut strip);
                    let (a, b) =
                        (MatRef::new(&halves, tokens, self.cols), MatRef::new(&strip, rows.len(), self.cols));
                    kernels.gemm_bf16_nt(a, b, c, false);
                } else {
                    let (a, b) =
                        (MatRef::new(x, tokens, self.cols), MatRef::new(&wide, rows.len(), self.cols));
                    kernels.gemm_nt(a, b, c, false);
                }
                for (t, values) in product.chunks_exact(rows.len()).enumerate() {
                    for (row, y) in rows.clone().zip(values) {
                        // SAFETY: every row belongs to one strip, and every strip is taken once.
                        unsafe { out.put(t * self.rows + row, *y, accumulate) };
                    }
                }
            }
        });
    }

    /// Widens row `row` to f32.
    ///
    /// # Panics
    /// If `out` is not `[cols]`.
    pub fn row(&self, row: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.cols, "FloatRows::row: length");
        let (kernels, bytes) =
            (kernels(), &self.bytes.bytes()[row * self.stride..][..self.cols * self.code.bytes()]);
        match self.code {
            FloatCode::F32 => {
                let words = bytes.as_chunks::<4>().0;
                out.iter_mut().zip(words).for_each(|(out, word)| *out = f32::from_le_bytes(*word));
            }
            FloatCode::F16 => kernels.f16_le_to_f32(bytes, out),
            FloatCode::Bf16 => kernels.bf16_le_to_f32(bytes, out),
            FloatCode::Mini { .. } => {
                let mini = self.code.mini();
                let mut halves = [0u16; 256];
                for (bytes, out) in bytes.chunks(256).zip(out.chunks_mut(256)) {
                    halves.iter_mut().zip(bytes).for_each(|(half, byte)| *half = mini.half(*byte));
                    kernels.f16_to_f32(&halves[..out.len()], out);
                }
            }
        }
        let groups = self.cols.div_ceil(self.group);
        for (out, scale) in out.chunks_mut(self.group).zip(&self.scales[row * groups..][..groups]) {
            if *scale != 1.0 {
                out.iter_mut().for_each(|x| *x *= scale);
            }
        }
    }
}

/// Multiplies four rows with `T` tokens.
#[inline(always)]
pub(crate) fn rows<D: Dot, const T: usize>(d: D, w: &Four<'_>, x: &[f32], out: &mut [f32]) {
    match w.code {
        FloatCode::F32 => run::<D, T, { 4 * LANES }>(d, w, x, out, |_, bytes| d.wide_f32(bytes)),
        FloatCode::F16 => run::<D, T, { 2 * LANES }>(d, w, x, out, |_, bytes| d.wide_f16(bytes)),
        FloatCode::Bf16 => run::<D, T, { 2 * LANES }>(d, w, x, out, |_, bytes| d.wide_bf16(bytes)),
        FloatCode::Mini { .. } => run::<D, T, LANES>(d, w, x, out, |mini, bytes| d.wide_mini(bytes, mini)),
    }
}

/// Multiplies four rows of elements of which 16 take `N` bytes.
#[inline(always)]
fn run<D: Dot, const T: usize, const N: usize>(
    d: D,
    w: &Four<'_>,
    x: &[f32],
    out: &mut [f32],
    load: impl Fn(MiniBits, &[u8; N]) -> D::F,
) {
    let width = w.lanes * LANES;
    assert!(x.len() == T * width && out.len() == FOUR * T, "FloatRows: sizes differ");
    let codes: [&[[u8; N]]; FOUR] = w.bytes.map(|bytes| &bytes.as_chunks::<N>().0[..w.lanes]);
    let tokens: [&[[f32; LANES]]; T] =
        std::array::from_fn(|t| &x[t * width..][..width].as_chunks::<LANES>().0[..w.lanes]);
    let mut sums = [[d.splat(0.0); T]; FOUR];
    let mut group = 0;
    let mut start = 0;
    while start < w.lanes {
        let end = w.lanes.min(start + w.group);
        let mut part = [[d.splat(0.0); T]; FOUR];
        for c in start..end {
            each!(quads FOUR, R => {
                let values = load(w.mini, &codes[R][c]);
                each!(T, TOKEN => {
                    part[R][TOKEN] = d.mul_add(values, d.load_f32(&tokens[TOKEN][c]), part[R][TOKEN]);
                });
            });
        }
        each!(quads FOUR, R => {
            let scale = d.splat(w.scales[R][group]);
            each!(T, TOKEN => sums[R][TOKEN] = d.mul_add(part[R][TOKEN], scale, sums[R][TOKEN]));
        });
        (start, group) = (end, group + 1);
    }
    for r in 0..FOUR {
        for t in 0..T {
            let mut lanes = [0.0; LANES];
            d.store_f32(sums[r][t], &mut lanes);
            out[r * T + t] = tree(lanes);
        }
    }
}

/// Adds 16 lanes in a fixed tree.
#[inline(always)]
fn tree(lanes: [f32; LANES]) -> f32 {
    let eight: [f32; 8] = std::array::from_fn(|i| lanes[i] + lanes[i + 8]);
    let four: [f32; 4] = std::array::from_fn(|i| eight[i] + eight[i + 4]);
    (four[0] + four[2]) + (four[1] + four[3])
}

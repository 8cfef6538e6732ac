//! Attention of few queries over a paged, packed KV cache, one tile at a time: the keys and values of 64 tokens of one
//! key/value head are read once for all queries of its group, dequantized in registers.
//!
//! Floats are multiplied in f32. Integer codes are multiplied as integers: a query is rounded to two 8-bit digits for
//! 8-bit keys (an error of at most 2^-15 of its largest element) and to one for 4-bit keys (2^-8, a sixteenth of the
//! keys' own error); weights are rounded to 15 bits of the largest in the tile. The softmax is online, its sums f32.
//!
//! A query's result depends on its own values and on the tiles alone, not on the other queries, so it has the same
//! bits in any batch. Results have the same bits at every level.
//!
//! Levels: scalar, AVX2 (with F16C), AVX-512 with VNNI; AVX-512 without VNNI takes the AVX2 code. NEON, without and with
//! the dot product.

mod layout;
mod partial;
mod scores;
mod simd;
mod softmax;
#[cfg(test)]
mod tests;
mod values;

pub use layout::{TILE_TOKENS, TileFormat, TileRow};
pub use partial::combine_partials;

use crate::{Isa, Kernels};
use layout::padded;
use simd::{LANES, Portable, TileSimd};

/// Radix of the two digits of a query for 8-bit keys: both are within [-127, 127].
const RADIX: f32 = 254.0;

/// Keys or values of 64 tokens of a head.
#[derive(Clone, Copy, Debug)]
pub struct Tile<'a> {
    /// Storage.
    pub format: TileFormat,
    /// At least [`TileFormat::tile_bytes`] bytes.
    pub bytes: &'a [u8],
}

/// Tokens `from..to` of a tile, which a query sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Visible {
    /// First visible token.
    pub from: u8,
    /// One past the last, at most 64.
    pub to: u8,
}

/// Queries of one key/value head, prepared for keys of any format. Reused without allocation.
#[derive(Clone, Debug, Default)]
pub struct Queries {
    rows: usize,
    head_dim: usize,
    dims: usize,
    /// `[rows, dims]`, scaled.
    values: Vec<f32>,
    /// Digits for 8-bit keys, four dims per element: `(high * 254 + low) * scales`, with the sums of a row's digits.
    high: Vec<i32>,
    low: Vec<i32>,
    scales: Vec<f32>,
    high_sums: Vec<i32>,
    low_sums: Vec<i32>,
    /// The single digit for 4-bit keys.
    single: Vec<i32>,
    single_scales: Vec<f32>,
    single_sums: Vec<i32>,
}

/// Largest value of the two digits, whose high one does not round up to 128.
const TWO_DIGITS: f32 = 127.0 * RADIX + 126.0;

impl Queries {
    /// Prepares `rows`, each of `head_dim` values, times `scale`, for keys of `format`.
    pub fn prepare<'q>(
        &mut self,
        rows: impl ExactSizeIterator<Item = &'q [f32]>,
        head_dim: usize,
        scale: f32,
        format: TileFormat,
    ) {
        (self.rows, self.head_dim, self.dims) = (rows.len(), head_dim, padded(head_dim));
        self.values.clear();
        self.values.resize(self.rows * self.dims, 0.0);
        for (row, values) in rows.zip(self.values.chunks_exact_mut(self.dims.max(1))) {
            values.iter_mut().zip(row).for_each(|(value, x)| *value = x * scale);
        }
        match format {
            TileFormat::Int8 => self.two_digits(),
            TileFormat::Int4 => self.one_digit(),
            _ => {}
        }
    }

    /// Number of queries.
    pub fn rows(&self) -> usize {
        self.rows
    }

    fn two_digits(&mut self) {
        for digits in [&mut self.high, &mut self.low, &mut self.high_sums, &mut self.low_sums] {
            digits.clear();
        }
        self.scales.clear();
        for row in self.values.chunks_exact(self.dims) {
            let (inverse, scale) = step(row, TWO_DIGITS);
            let (mut high_sum, mut low_sum) = (0, 0);
            for block in row.as_chunks::<LANES>().0 {
                let whole = block.map(|x| round(x * inverse));
                let high = whole.map(|x| round(x * (1.0 / RADIX)));
                let mut low = [0.0; LANES];
                for i in 0..LANES {
                    low[i] = whole[i] - high[i] * RADIX;
                }
                push_quads(high, &mut self.high, &mut high_sum);
                push_quads(low, &mut self.low, &mut low_sum);
            }
            self.scales.push(scale);
            self.high_sums.push(high_sum);
            self.low_sums.push(low_sum);
        }
    }

    fn one_digit(&mut self) {
        self.single.clear();
        self.single_sums.clear();
        self.single_scales.clear();
        for row in self.values.chunks_exact(self.dims) {
            let (inverse, scale) = step(row, 127.0);
            let mut sum = 0;
            for block in row.as_chunks::<LANES>().0 {
                push_quads(block.map(|x| round(x * inverse)), &mut self.single, &mut sum);
            }
            self.single_scales.push(scale);
            self.single_sums.push(sum);
        }
    }
}

/// Inverse and value of the step that maps the largest magnitude of `row` to `largest`.
fn step(row: &[f32], largest: f32) -> (f32, f32) {
    let amax = row.iter().fold(0.0f32, |amax, x| amax.max(x.abs()));
    // A NaN or an infinity in the query shows in the result.
    let bad = row.iter().any(|x| !x.is_finite());
    let scale = if bad { f32::NAN } else { amax / largest };
    (if amax > 1e-30 && !bad { largest / amax } else { 0.0 }, scale)
}

/// 1.5·2^23: adding it to `|x| <= 2^22` leaves the nearest integer in the low mantissa bits.
const ROUND: f32 = 12_582_912.0;

/// Nearest integer, ties to even, of `|x| < 2^22`, without a call at levels that lack the instruction.
#[inline(always)]
fn round(x: f32) -> f32 {
    (x + ROUND) - ROUND
}

/// Appends digits, four to an i32, and adds them to `sum`.
#[inline(always)]
fn push_quads(digits: [f32; LANES], quads: &mut Vec<i32>, sum: &mut i32) {
    let digits = digits.map(|x| (x + ROUND).to_bits() as i8);
    let mut total = 0i16;
    digits.iter().for_each(|&x| total = total.wrapping_add(i16::from(x)));
    *sum += i32::from(total);
    quads.extend(digits.as_chunks::<4>().0.iter().map(|four| i32::from_le_bytes(four.map(|x| x as u8))));
}

/// Running softmax of some queries: their largest score, the sum of their weights and the weighted sum of values.
/// Reused without allocation.
#[derive(Clone, Debug, Default)]
pub struct Softmax {
    rows: usize,
    head_dim: usize,
    dims: usize,
    /// Scores and then weights of a tile, `[rows, 64]`.
    weights: Vec<f32>,
    /// Largest weight of the tile.
    top: Vec<f32>,
    max: Vec<f32>,
    sum: Vec<f32>,
    /// `[rows, dims]`.
    acc: Vec<f32>,
}

impl Softmax {
    /// Begins with no token seen, for the queries `q`.
    pub fn begin(&mut self, q: &Queries) {
        (self.rows, self.head_dim, self.dims) = (q.rows, q.head_dim, q.dims);
        let fills = [
            (&mut self.weights, TILE_TOKENS * q.rows, 0.0),
            (&mut self.top, q.rows, 0.0),
            (&mut self.max, q.rows, f32::NEG_INFINITY),
            (&mut self.sum, q.rows, 0.0),
            (&mut self.acc, q.rows * q.dims, 0.0),
        ];
        for (values, len, fill) in fills {
            values.clear();
            values.resize(len, fill);
        }
    }

    /// Floats of a query's partial result: its values, then the largest score and the sum of weights.
    pub const fn partial_len(head_dim: usize) -> usize {
        head_dim + 2
    }

    /// Writes the partial results of all queries, `[rows, partial_len]`, for [`combine_partials`].
    ///
    /// # Panics
    /// If `out` is shorter.
    pub fn write_partial(&self, out: &mut [f32]) {
        let len = Self::partial_len(self.head_dim);
        assert!(out.len() >= self.rows * len, "paged: partial results of {} rows do not fit", self.rows);
        let rows = out.chunks_exact_mut(len).zip(self.acc.chunks_exact(self.dims.max(1)));
        for ((out, acc), (max, sum)) in rows.zip(self.max.iter().zip(&self.sum)) {
            out[..self.head_dim].copy_from_slice(&acc[..self.head_dim]);
            out[self.head_dim..].copy_from_slice(&[*max, *sum]);
        }
    }
}

impl Kernels {
    /// Attends with `q` to the tokens of one tile of keys and of values, and adds them to `state`, begun for the same
    /// queries. `visible` states the tokens that each query sees; scores become `cap * tanh(score / cap)` under
    /// `softcap`. `next` are the keys and values of the tile that will be attended to next, which are prefetched; they
    /// may be empty.
    ///
    /// # Panics
    /// If a tile is shorter than its format needs, there are fewer `visible` than queries, or a range exceeds 64.
    pub fn attend_tile(
        &self,
        q: &Queries,
        keys: Tile<'_>,
        values: Tile<'_>,
        visible: &[Visible],
        softcap: Option<f32>,
        next: [&[u8]; 2],
        state: &mut Softmax,
    ) {
        for (tile, what) in [(keys, "keys"), (values, "values")] {
            let needed = tile.format.tile_bytes(q.head_dim);
            assert!(tile.bytes.len() >= needed, "paged: {what} of {} bytes, not {needed}", tile.bytes.len());
        }
        assert!(visible.len() >= q.rows, "paged: {} ranges for {} queries", visible.len(), q.rows);
        assert!(
            visible.iter().all(|range| usize::from(range.to) <= TILE_TOKENS),
            "paged: a range exceeds {TILE_TOKENS} tokens"
        );
        assert_eq!(
            (q.rows, q.dims),
            (state.rows, state.dims),
            "paged: the state was begun for other queries"
        );
        if q.rows == 0 || q.dims == 0 {
            return;
        }
        let args = Args { q, keys, values, visible: &visible[..q.rows], softcap, next };
        match self.isa() {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Amx if has_vnni() => {
                // SAFETY: a `Kernels` of this level exists only if the processor has AVX-512 F, BW, VL and DQ; VNNI and
                // F16C have just been detected.
                unsafe { attend_avx512(&args, state) }
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 | Isa::Avx512 | Isa::Amx if is_x86_feature_detected!("f16c") => {
                // SAFETY: a `Kernels` of these levels exists only if the processor has AVX2 and FMA; F16C has just been
                // detected.
                unsafe { attend_avx2(&args, state) }
            }
            #[cfg(target_arch = "aarch64")]
            Isa::Neon if std::arch::is_aarch64_feature_detected!("dotprod") => {
                // SAFETY: a `Kernels` of this level exists only if the processor has NEON; the dot product has just been
                // detected.
                unsafe { attend_neon_dotprod(&args, state) }
            }
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => {
                // SAFETY: a `Kernels` of this level exists only if the processor has NEON.
                unsafe { attend_neon(&args, state) }
            }
            _ => attend(Portable, &args, state),
        }
    }
}

/// Arguments of a tile.
struct Args<'a> {
    q: &'a Queries,
    keys: Tile<'a>,
    values: Tile<'a>,
    visible: &'a [Visible],
    softcap: Option<f32>,
    next: [&'a [u8]; 2],
}

#[inline(always)]
fn attend<S: TileSimd>(simd: S, args: &Args<'_>, state: &mut Softmax) {
    let Args { q, keys, values, visible, softcap, next } = args;
    // Codes of the next tile are prefetched as those of this one are read; what follows them, here.
    for (next, tile) in next.iter().zip([keys, values]) {
        simd.prefetch(next.get(tile.format.code_bytes(q.dims)..).unwrap_or(&[]));
    }
    let mut weights = std::mem::take(&mut state.weights);
    scores::scores(simd, q, *keys, next[0], &mut weights);
    state.weights = weights;
    softmax::weigh(simd, visible, *softcap, q.dims, state);
    values::sum(simd, *values, next[1], q.dims, visible, state);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn attend_avx2(args: &Args<'_>, state: &mut Softmax) {
    attend(simd::x86::Avx2::new(), args, state);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
fn attend_avx512(args: &Args<'_>, state: &mut Softmax) {
    attend(simd::x86::Avx512Vnni::new(), args, state);
}

#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon")]
fn attend_neon(args: &Args<'_>, state: &mut Softmax) {
    attend(simd::neon::Neon::new(), args, state);
}

#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon,dotprod")]
fn attend_neon_dotprod(args: &Args<'_>, state: &mut Softmax) {
    attend(simd::neon::NeonDotprod::new(), args, state);
}

#[cfg(target_arch = "x86_64")]
fn has_vnni() -> bool {
    is_x86_feature_detected!("avx512vnni") && is_x86_feature_detected!("f16c")
}

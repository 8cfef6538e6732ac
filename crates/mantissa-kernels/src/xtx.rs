//! `H += XᵀX`: second moments of a linear layer's inputs.

use std::ops::Range;

use crate::generic::XTX_PANEL as PANEL;
use crate::{Kernels, MatMut, MatRef, for_each};

/// Tokens whose products are summed in f32 before they are added to H.
const TOKENS: usize = 256;

/// Multiply-adds that amortize starting a thread.
const WORTH_A_THREAD: usize = 1 << 22;

impl Kernels {
    /// `H += XᵀX` for `x` `[t, k]` and the upper triangle of the row-major `h` `[k, k]`; values below the diagonal
    /// may be overwritten and are undefined.
    ///
    /// For every block of 256 tokens (the last may be shorter) and every element, the products are one f32 chain of
    /// fused multiply-adds in token order; its result is added to `h`. So the bits are the same on any number of
    /// threads, at every level, and for any calls that split `x` at multiples of 256 tokens.
    ///
    /// Only the `rows` of `h` change, which begin and end at multiples of 48 or at `k`.
    ///
    /// # Panics
    /// If `h` is not `[k, k]`, or `rows` are no such rows.
    pub fn accumulate_xtx(&self, x: MatRef<'_>, rows: Range<usize>, h: &mut [f32], threads: usize) {
        let (t, k) = (x.rows(), x.cols());
        assert!(k.checked_mul(k) == Some(h.len()), "accumulate_xtx: h is not [{k}, {k}]");
        require_bands(&rows, XTX_ROWS, k);
        if rows.is_empty() {
            return;
        }
        let mut packed = vec![0.0; t.min(TOKENS) * k.next_multiple_of(PANEL)];
        for first in (0..t).step_by(TOKENS) {
            let tokens = TOKENS.min(t - first);
            let packed = &mut packed[..tokens * k.next_multiple_of(PANEL)];
            pack(x, first, tokens, packed);
            let packed = &*packed;
            let threads = threads.min(tokens * rows.len() * k / 2 / WORTH_A_THREAD + 1);
            let (first, h) = (rows.start / XTX_ROWS, &mut h[rows.start * k..rows.end * k]);
            for_each(threads, h.chunks_mut(XTX_ROWS * k).enumerate(), |(band, h)| {
                self.xtx_band(packed, tokens, k, first + band, h);
            });
        }
    }
}

/// Rows of H that a thread takes at a time.
pub(crate) const XTX_ROWS: usize = PANEL;

/// The same for bf16.
pub(crate) const XTX_ROWS_BF16: usize = 512;

/// Requires `rows` of a `[k, k]` matrix to be whole bands of `band` rows.
fn require_bands(rows: &Range<usize>, band: usize, k: usize) {
    let whole = |row: usize| row.is_multiple_of(band) || row == k;
    assert!(
        rows.end <= k && whole(rows.start) && whole(rows.end),
        "rows {rows:?} are no bands of {band} of {k}"
    );
}

/// Largest square on the diagonal of H whose lower half is computed too.
const SQUARE: usize = 128;

impl Kernels {
    /// [`Self::accumulate_xtx`] of bf16 bits: products are added to `h` in the order of [`Self::gemm_bf16_tn`], 32
    /// tokens at a time. So the bits are the same on any number of threads, for any calls that split `x` at multiples
    /// of 32 tokens, and at every level where those of [`Self::gemm_bf16_tn`] are.
    ///
    /// Only the `rows` of `h` change, which begin and end at multiples of 512 or at `k`.
    ///
    /// # Panics
    /// If `h` is not `[k, k]`, or `rows` are no such rows.
    pub fn accumulate_xtx_bf16(&self, x: MatRef<'_, u16>, rows: Range<usize>, h: &mut [f32], threads: usize) {
        let (t, k) = (x.rows(), x.cols());
        assert!(k.checked_mul(k) == Some(h.len()), "accumulate_xtx_bf16: h is not [{k}, {k}]");
        require_bands(&rows, XTX_ROWS_BF16, k);
        if rows.is_empty() || t == 0 {
            return;
        }
        let threads = threads.min(t * rows.len() * k / 2 / WORTH_A_THREAD + 1);
        let (begin, h) = (rows.start, &mut h[rows.start * k..rows.end * k]);
        for_each(threads, h.chunks_mut(XTX_ROWS_BF16 * k).enumerate(), |(band, h)| {
            let (first, rows) = (begin + band * XTX_ROWS_BF16, h.len() / k);
            self.upper_triangle(x, first..first + rows, first, h);
            self.rectangle(x, first..first + rows, first + rows..k, first, h);
        });
    }

    /// Adds the square of `span` on the diagonal to `h`, which begins at row `first`.
    fn upper_triangle(&self, x: MatRef<'_, u16>, span: Range<usize>, first: usize, h: &mut [f32]) {
        if span.len() <= SQUARE {
            return self.rectangle(x, span.clone(), span, first, h);
        }
        let middle = span.start + (span.len() / 2).next_multiple_of(SQUARE);
        self.upper_triangle(x, span.start..middle, first, h);
        self.rectangle(x, span.start..middle, middle..span.end, first, h);
        self.upper_triangle(x, middle..span.end, first, h);
    }

    /// Adds `rows` x `cols` of `XᵀX` to `h`, which begins at row `first`.
    fn rectangle(
        &self,
        x: MatRef<'_, u16>,
        rows: Range<usize>,
        cols: Range<usize>,
        first: usize,
        h: &mut [f32],
    ) {
        let k = x.cols();
        if cols.is_empty() {
            return;
        }
        let out = &mut h[(rows.start - first) * k + cols.start..];
        let c = MatMut::with_stride(out, rows.len(), cols.len(), k);
        self.gemm_bf16_tn(x.columns(rows), x.columns(cols), c, true);
    }
}

/// Copies tokens into panels of 48 columns. The padding of the last panel is zero already.
fn pack(x: MatRef<'_>, first: usize, tokens: usize, packed: &mut [f32]) {
    for (p, panel) in packed.chunks_exact_mut(tokens * PANEL).enumerate() {
        let width = PANEL.min(x.cols() - p * PANEL);
        for (t, out) in panel.chunks_exact_mut(PANEL).enumerate() {
            out[..width].copy_from_slice(&x.row(first + t)[p * PANEL..][..width]);
            out[width..].fill(0.0);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::Isa;

    fn wave(n: usize) -> Vec<f32> {
        (0..n).map(|i| (i as f32 * 0.37).sin() * (1 + i % 7) as f32).collect()
    }

    /// The definition, element by element.
    fn naive(x: &[f32], k: usize, h: &mut [f32]) {
        for block in x.chunks(TOKENS * k) {
            for i in 0..k {
                for j in i..k {
                    let products = block.chunks_exact(k);
                    h[i * k + j] += products.fold(0.0_f32, |sum, x| x[i].mul_add(x[j], sum));
                }
            }
        }
    }

    #[test]
    fn bits_match_the_definition_at_every_level_and_thread_count() {
        for (t, k) in [(0, 3), (1, 1), (5, 47), (300, 48), (257, 100), (600, 145)] {
            let x = wave(t * k);
            let mut expected = vec![0.5; k * k];
            naive(&x, k, &mut expected);
            for isa in Isa::available() {
                for threads in [1, 2, 3] {
                    let mut h = vec![0.5; k * k];
                    let kernels = Kernels::new(isa).unwrap();
                    kernels.accumulate_xtx(MatRef::new(&x, t, k), 0..k, &mut h, threads);
                    for (e, expected) in expected.iter().enumerate().filter(|(e, _)| e % k >= e / k) {
                        assert_eq!(h[e].to_bits(), expected.to_bits(), "[{t}, {k}] {isa} element {e}");
                    }
                }
            }
        }
    }

    /// The order of the products is the documented one, and no bit depends on threads, level or splits.
    #[test]
    fn bf16_has_one_result_at_every_level_thread_count_and_cut() {
        for (t, k) in [(0, 3), (1, 1), (33, 47), (100, 145), (64, 700)] {
            let mut x = vec![0; t * k];
            crate::kernels().f32_to_bf16_factors(&wave(t * k), &mut x);
            let value = |t: usize, i: usize| f32::from_bits(u32::from(x[t * k + i]) << 16);
            let upper = |h: &[f32]| -> Vec<u32> {
                (0..k * k).filter(|e| e % k >= e / k).map(|e| h[e].to_bits()).collect()
            };
            let mut expected = vec![0.5_f32; k * k];
            for (e, sum) in expected.iter_mut().enumerate() {
                for first in (0..t).step_by(32) {
                    let mut chains = [0.0_f32; 2];
                    for t in first..t.min(first + 32) {
                        chains[t % 2] = value(t, e / k).mul_add(value(t, e % k), chains[t % 2]);
                    }
                    *sum += chains[0] + chains[1];
                }
            }
            for isa in Isa::available().filter(|isa| *isa != Isa::Scalar || k < 200) {
                let kernels = Kernels::new(isa).unwrap().in_common_order();
                for (threads, cut) in [(1, t), (3, t), (2, 32)] {
                    let mut h = vec![0.5; k * k];
                    for x in x.chunks((cut * k).max(1)) {
                        kernels.accumulate_xtx_bf16(MatRef::new(x, x.len() / k, k), 0..k, &mut h, threads);
                    }
                    assert!(upper(&h) == upper(&expected), "[{t}, {k}] {isa}, {threads} threads, {cut}");
                }
            }
        }
    }

    #[test]
    fn calls_split_at_whole_blocks_add_up() {
        let (t, k) = (700, 60);
        let x = wave(t * k);
        let (mut whole, mut parts) = (vec![0.0; k * k], vec![0.0; k * k]);
        crate::kernels().accumulate_xtx(MatRef::new(&x, t, k), 0..k, &mut whole, 1);
        for part in x.chunks(2 * TOKENS * k) {
            crate::kernels().accumulate_xtx(MatRef::new(part, part.len() / k, k), 0..k, &mut parts, 2);
        }
        assert_eq!(whole, parts);
    }

    #[test]
    fn bands_of_rows_add_up_to_the_whole() {
        let (t, k) = (300, 1100);
        let x = wave(t * k);
        let mut bits = vec![0; t * k];
        let kernels = crate::kernels().in_common_order();
        kernels.f32_to_bf16_factors(&x, &mut bits);
        let (mut whole, mut parts) = (vec![0.5; k * k], vec![0.5; k * k]);
        kernels.accumulate_xtx(MatRef::new(&x, t, k), 0..k, &mut whole, 2);
        for rows in [0..96, 96..96, 96..960, 960..k] {
            kernels.accumulate_xtx(MatRef::new(&x, t, k), rows, &mut parts, 3);
        }
        assert!(whole == parts);
        kernels.accumulate_xtx_bf16(MatRef::new(&bits, t, k), 0..k, &mut whole, 2);
        for rows in [512..1024, 0..512, 1024..k, k..k] {
            kernels.accumulate_xtx_bf16(MatRef::new(&bits, t, k), rows, &mut parts, 1);
        }
        assert!(whole == parts);
    }
}

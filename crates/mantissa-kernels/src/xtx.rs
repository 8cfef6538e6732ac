//! `H += XᵀX`: the second moments of a linear layer's inputs.

use crate::generic::XTX_PANEL as PANEL;
use crate::{Kernels, MatRef, for_each};

/// Tokens whose products are summed in f32 before they are added to H.
const TOKENS: usize = 256;

/// Multiply-adds that are worth a thread's start.
const WORTH_A_THREAD: usize = 1 << 22;

impl Kernels {
    /// `H += XᵀX` for `x` `[t, k]` and the upper triangle of the row-major `h` `[k, k]`; below the diagonal `h`
    /// may be written but means nothing.
    ///
    /// For every block of 256 tokens (the last may be shorter) and every element, the products are one f32
    /// chain of fused multiply-adds in the order of the tokens; the chain's end is added to `h`. So the bits
    /// are the same on any number of threads and at every level, and in any calls that cut `x` at multiples of
    /// 256 tokens.
    ///
    /// # Panics
    /// If `h` is not `[k, k]`.
    pub fn accumulate_xtx(&self, x: MatRef<'_>, h: &mut [f32], threads: usize) {
        let (t, k) = (x.rows(), x.cols());
        assert!(k.checked_mul(k) == Some(h.len()), "accumulate_xtx: h is not [{k}, {k}]");
        if k == 0 {
            return;
        }
        let mut packed = vec![0.0; t.min(TOKENS) * k.next_multiple_of(PANEL)];
        for first in (0..t).step_by(TOKENS) {
            let tokens = TOKENS.min(t - first);
            let packed = &mut packed[..tokens * k.next_multiple_of(PANEL)];
            pack(x, first, tokens, packed);
            let packed = &*packed;
            let threads = threads.min(tokens * k * k / 2 / WORTH_A_THREAD + 1);
            for_each(threads, h.chunks_mut(PANEL * k).enumerate(), |(band, h)| {
                self.xtx_band(packed, tokens, k, band, h);
            });
        }
    }
}

/// Copies tokens into panels of 48 columns. What fills up the last panel is zero already.
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
    fn the_bits_are_those_of_the_definition_at_every_level_and_thread_count() {
        for (t, k) in [(0, 3), (1, 1), (5, 47), (300, 48), (257, 100), (600, 145)] {
            let x = wave(t * k);
            let mut expected = vec![0.5; k * k];
            naive(&x, k, &mut expected);
            for isa in Isa::available() {
                for threads in [1, 2, 3] {
                    let mut h = vec![0.5; k * k];
                    let kernels = Kernels::new(isa).unwrap();
                    kernels.accumulate_xtx(MatRef::new(&x, t, k), &mut h, threads);
                    for (e, expected) in expected.iter().enumerate().filter(|(e, _)| e % k >= e / k) {
                        assert_eq!(h[e].to_bits(), expected.to_bits(), "[{t}, {k}] {isa} element {e}");
                    }
                }
            }
        }
    }

    #[test]
    fn calls_cut_at_whole_blocks_add_up() {
        let (t, k) = (700, 60);
        let x = wave(t * k);
        let (mut whole, mut parts) = (vec![0.0; k * k], vec![0.0; k * k]);
        crate::kernels().accumulate_xtx(MatRef::new(&x, t, k), &mut whole, 1);
        for part in x.chunks(2 * TOKENS * k) {
            crate::kernels().accumulate_xtx(MatRef::new(part, part.len() / k, k), &mut parts, 2);
        }
        assert_eq!(whole, parts);
    }
}

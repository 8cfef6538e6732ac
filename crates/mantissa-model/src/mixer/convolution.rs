//! Causal depthwise convolution: `y[t, c] = b[c] + Σ_j w[j, c] · x[t - kernel + 1 + j, c]`, over the tokens of each
//! sequence. Inputs before a sequence's first token are 0; its last `kernel - 1` inputs are kept for the next pass.

use mantissa_kernels::{for_each, kernels};

use super::States;
use crate::operators::{Operators, Sequences};
use mantissa_arch::kinds::VectorKind;

/// Rows of a task.
const ROWS: usize = 64;

/// Weights of a convolution.
pub(super) struct Convolution<'a> {
    /// `[kernel, channels]`.
    pub(super) weight: &'a [f32],
    /// `[channels]`.
    pub(super) bias: Option<&'a [f32]>,
    pub(super) channels: usize,
    /// Its index among the convolutions of a mixer, which have as many channels, and their number: their last inputs
    /// follow one another in a state.
    pub(super) part: (usize, usize),
}

impl<'a> Convolution<'a> {
    /// Returns the only convolution of a mixer.
    pub(super) fn of(operators: &'a dyn Operators, channels: usize) -> Self {
        let weight = operators.vector(VectorKind::Convolution).unwrap_or(&[]);
        let bias = operators.vector(VectorKind::ConvolutionBias);
        Convolution { weight, bias, channels, part: (0, 1) }
    }

    /// Inputs before a pass that its first outputs read.
    fn past(&self) -> usize {
        (self.weight.len() / self.channels).saturating_sub(1)
    }

    /// Runs [`run`](Self::run), and passes the results through SiLU.
    pub(super) fn run_silu(
        &self,
        seqs: &Sequences<'_>,
        states: Option<&mut States<'_>>,
        threads: usize,
        x: &[f32],
        out: &mut [f32],
    ) {
        self.run(seqs, states, threads, x, out);
        for_each(threads, out.chunks_mut(ROWS * self.channels), |x| kernels().silu_inplace(x));
    }

    /// Convolves the tokens `x` `[tokens, channels]` of all sequences into `out`, and keeps their last inputs.
    pub(super) fn run(
        &self,
        seqs: &Sequences<'_>,
        mut states: Option<&mut States<'_>>,
        threads: usize,
        x: &[f32],
        out: &mut [f32],
    ) {
        let (width, mut first) = (self.channels, 0);
        let tail_len = self.past() * width;
        for (i, &len) in seqs.lens.iter().enumerate() {
            let span = first * width..(first + len) * width;
            first += len;
            if len == 0 {
                continue;
            }
            let (x, out) = (&x[span.clone()], &mut out[span]);
            let mut tail = states.as_mut().map(|states| {
                let (index, count) = self.part;
                let at = (states.of[i] * count + index) * tail_len;
                &mut states.tails[at..at + tail_len]
            });
            if let Some(tail) = tail.as_mut().filter(|_| seqs.start(i) == 0) {
                tail.fill(0.0);
            }
            let past = tail.as_deref().unwrap_or(&[]);
            for_each(threads, out.chunks_mut(ROWS * width).enumerate(), |(piece, out)| {
                self.rows(piece * ROWS, past, x, out);
            });
            if let Some(tail) = tail {
                let kept = tail_len.min(x.len());
                tail.copy_within(kept.., 0);
                tail[tail_len - kept..].copy_from_slice(&x[x.len() - kept..]);
            }
        }
    }

    /// Computes the outputs from row `first` of a sequence on.
    fn rows(&self, first: usize, past: &[f32], x: &[f32], out: &mut [f32]) {
        let (width, before) = (self.channels, self.past());
        for (row, out) in (first..).zip(out.chunks_exact_mut(width)) {
            match self.bias {
                Some(bias) => out.copy_from_slice(bias),
                None => out.fill(0.0),
            }
            for (j, weight) in self.weight.chunks_exact(width).enumerate() {
                let input = match (row + j).checked_sub(before) {
                    Some(at) => &x[at * width..(at + 1) * width],
                    None if past.is_empty() => continue,
                    None => &past[(row + j) * width..(row + j + 1) * width],
                };
                kernels().mul_add(weight, input, out);
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn pieces_of_a_sequence_have_the_bits_of_the_whole() {
        let (width, kernel) = (3, 4);
        let value = |i: usize| (i as f32 * 0.37).sin();
        let weight: Vec<f32> = (0..kernel * width).map(value).collect();
        let bias: Vec<f32> = (0..width).map(|i| value(i + 50)).collect();
        let x: Vec<f32> = (0..200 * width).map(|i| value(i + 9)).collect();
        let convolution = Convolution { weight: &weight, bias: Some(&bias), channels: width, part: (0, 1) };
        let mut whole = vec![9.0; x.len()];
        convolution.run(&Sequences { lens: &[200], starts: &[], rows: 200 }, None, 2, &x, &mut whole);
        for (t, row) in whole.chunks_exact(width).enumerate() {
            for (c, y) in row.iter().enumerate() {
                let terms = (0..kernel).filter(|j| t + j + 1 >= kernel);
                let sum: f64 = terms
                    .map(|j| {
                        f64::from(weight[j * width + c]) * f64::from(x[(t + j + 1 - kernel) * width + c])
                    })
                    .sum();
                assert!((f64::from(*y) - sum - f64::from(bias[c])).abs() < 1e-6);
            }
        }
        for pieces in [&[1usize; 200][..], &[2, 1, 3, 130, 64], &[199, 1]] {
            // The slot holds the end of another sequence.
            let (mut tails, mut start, mut found) = (vec![7.0; 2 * 3 * width], 0, Vec::new());
            for &len in pieces {
                let mut states = States { tails: &mut tails, heads: &mut [], slots: 2, of: &[1] };
                let mut out = vec![9.0; len * width];
                let seqs = Sequences { lens: &[len], starts: &[start], rows: len };
                let x = &x[start * width..(start + len) * width];
                convolution.run(&seqs, Some(&mut states), 1, x, &mut out);
                found.extend(out);
                start += len;
            }
            assert!(found == whole && tails[..3 * width] == [7.0; 9], "{pieces:?}");
            assert_eq!(tails[3 * width..], x[197 * width..]);
        }
    }
}

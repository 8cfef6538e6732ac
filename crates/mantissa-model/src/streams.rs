//! Parallel streams of states: alternating updates (Baykal et al. 2023, "Alternating Updates for Efficient
//! Transformers", arXiv 2301.13310, sec. 3), as in Gemma 3n, with the low-rank path beside attention of LAuReL (Menghani
//! et al. 2024, "LAuReL: Learned Augmented Residual Layer", arXiv 2411.07501, sec. 2.2).
//!
//! The states of a token are `x_0 … x_{n-1}`, `[hidden]` each. A layer
//!
//! - predicts `p_i = x_i + Σ_j C_ij x_j`, with `C = reshape(P m(x_0))` `[n, n]` and `m(x) = tanh(R norm(x) / hidden)`,
//! - runs attention and MLP on `p_0`, which gives `y`; with `h = norm(p_0)`, the result of attention is added to
//!   `p_0 + h + norm(B A h)`, and the sum divided by `√2`,
//! - corrects `x_i ← p_i + (1 + (K m(y))_i) (y - p_0)`.
//!
//! Before the first layer `x_i = W_i e`, scaled to the mean square of the embedding `e = x_0`; after the last one the
//! states are the mean of `x_0` and all `U_i x_i`, scaled to the mean square of `x_0`.

use std::ops::Range;

use mantissa_kernels::kernels;

use crate::config::Streams;
use crate::flow::{Activations, LayerFlow, Operators};
use crate::graph::kinds::{NormKind, SideKind, VectorKind};

/// Least mean square that a stream is scaled from.
const LEAST: f32 = 1e-5;

/// Parallel streams of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StreamFlow {
    /// Number of streams.
    pub(crate) count: usize,
    /// Inner width of the low-rank path.
    pub(crate) laurel: usize,
    /// True if the states that gate the layer's own input have factors.
    pub(crate) scales: bool,
    /// True for the first layer, which makes the streams.
    pub(crate) first: bool,
    /// True for the last layer, which joins them.
    pub(crate) last: bool,
}

impl Streams {
    /// Scratch values per row.
    pub(crate) fn scratch(&self, hidden: usize) -> usize {
        (self.count * (self.count + 1)).max(self.laurel + 2 * hidden)
    }
}

impl LayerFlow {
    /// Predicts the streams of `rows` rows. The residual stream becomes the first of them, unless it has `advanced` inside
    /// the layer.
    pub(crate) fn predict(
        &self,
        operators: &mut impl Operators,
        rows: usize,
        advanced: bool,
        a: &mut Activations<'_>,
    ) {
        let Some(StreamFlow { count: n, first, .. }) = self.streams else { return };
        let (d, len, stride) = (self.hidden, rows * self.hidden, a.streams.len() / n);
        if !advanced {
            a.streams[..len].copy_from_slice(&a.residual[..len]);
        }
        if first {
            let (embedding, others) = a.streams.split_at_mut(stride);
            for (i, stream) in (1..).zip(others.chunks_exact_mut(stride)) {
                operators.side(SideKind::EnterStream(i), &embedding[..len], &mut stream[..len]);
                match_squares(d, &embedding[..len], &mut stream[..len]);
            }
        }
        let (weights, matrices) = a.extra.wide[..rows * n * (n + 1)].split_at_mut(rows * n);
        self.modalities(operators, &a.streams[..len], &mut a.normed[..len], weights);
        operators.side(SideKind::Prediction, weights, matrices);
        let mut x = [0.0; Streams::MOST];
        for (row, matrix) in matrices.chunks_exact(n * n).enumerate() {
            for at in row * d..(row + 1) * d {
                x.iter_mut().zip(a.streams.chunks_exact(stride)).for_each(|(x, stream)| *x = stream[at]);
                for (stream, matrix) in a.streams.chunks_exact_mut(stride).zip(matrix.chunks_exact(n)) {
                    stream[at] += matrix.iter().zip(&x).map(|(c, x)| c * x).sum::<f32>();
                }
            }
        }
        if !advanced {
            a.residual[..len].copy_from_slice(&a.streams[..len]);
        }
    }

    /// Computes `m(x)` of rows `x` `[rows, hidden]` into `out` `[rows, streams]`. `normed` is scratch.
    fn modalities(&self, operators: &mut impl Operators, x: &[f32], normed: &mut [f32], out: &mut [f32]) {
        operators.norm(NormKind::Modalities, x, normed);
        operators.side(SideKind::Modalities, normed, out);
        let hidden = self.hidden as f64;
        out.iter_mut().for_each(|x| *x = (f64::from(*x) / hidden).tanh() as f32);
    }

    /// Adds the low-rank path to the residual stream: `residual += h + norm(B A h)` with `h = norm(residual)`.
    pub(crate) fn add_laurel(&self, operators: &mut impl Operators, rows: usize, a: &mut Activations<'_>) {
        let Some(StreamFlow { laurel, .. }) = self.streams else { return };
        let len = rows * self.hidden;
        let (residual, h) = (&mut a.residual[..len], &mut a.normed[..len]);
        operators.norm(NormKind::Input, residual, h);
        let (inner, rest) = a.extra.wide.split_at_mut(rows * laurel);
        let (result, normed) = rest[..2 * len].split_at_mut(len);
        operators.side(SideKind::LaurelLeft, h, inner);
        operators.side(SideKind::LaurelRight, inner, result);
        operators.norm(NormKind::AfterLaurel, result, normed);
        kernels().axpy(1.0, h, residual);
        kernels().axpy(1.0, normed, residual);
    }

    /// Corrects the streams by what the layer made of the first, for some rows. The residual stream becomes the first of
    /// them, `normed` the states that gate the layer's own input.
    pub(crate) fn correct(
        &self,
        operators: &mut impl Operators,
        rows: Range<usize>,
        a: &mut Activations<'_>,
    ) {
        let Some(StreamFlow { count: n, scales, .. }) = self.streams else { return };
        let (d, stride) = (self.hidden, a.streams.len() / n);
        let (at, count) = (rows.start * d..rows.end * d, rows.len());
        let (weights, shares) = a.extra.wide[..2 * count * n].split_at_mut(count * n);
        self.modalities(operators, &a.residual[at.clone()], &mut a.normed[at.clone()], weights);
        operators.side(SideKind::Correction, weights, shares);
        for (row, shares) in rows.zip(shares.chunks_exact(n)) {
            for at in row * d..(row + 1) * d {
                let change = a.residual[at] - a.streams[at];
                for (stream, share) in a.streams.chunks_exact_mut(stride).zip(shares) {
                    stream[at] += change * (share + 1.0);
                }
            }
        }
        let states = &a.streams[at.clone()];
        a.residual[at.clone()].copy_from_slice(states);
        let normed = &mut a.normed[at];
        normed.copy_from_slice(states);
        if let Some(factors) = operators.vector(VectorKind::StreamScale).filter(|_| scales) {
            for row in normed.chunks_exact_mut(d) {
                row.iter_mut().zip(factors).for_each(|(x, factor)| *x *= factor);
            }
        }
    }

    /// Joins the streams after the last layer into the residual stream, for some rows.
    pub(crate) fn join_streams(
        &self,
        operators: &mut impl Operators,
        rows: Range<usize>,
        a: &mut Activations<'_>,
    ) {
        let Some(StreamFlow { count: n, last: true, .. }) = self.streams else { return };
        let (d, stride) = (self.hidden, a.streams.len() / n);
        let at = rows.start * d..rows.end * d;
        let (residual, joined) = (&mut a.residual[at.clone()], &mut a.extra.wide[..at.len()]);
        let (states, others) = a.streams.split_at(stride);
        for (i, stream) in (1..).zip(others.chunks_exact(stride)) {
            operators.side(SideKind::LeaveStream(i), &stream[at.clone()], joined);
            match_squares(d, &states[at.clone()], joined);
            kernels().axpy(1.0, joined, residual);
        }
        residual.iter_mut().for_each(|x| *x /= n as f32);
    }
}

/// Scales each row of `x` `[rows, width]` to the mean square of that row of `like`.
fn match_squares(width: usize, like: &[f32], x: &mut [f32]) {
    let mean = |x: &[f32]| kernels().dot(x, x) / width as f32;
    for (like, x) in like.chunks_exact(width).zip(x.chunks_exact_mut(width)) {
        let factor = (mean(like) / mean(x).max(LEAST)).sqrt();
        x.iter_mut().for_each(|x| *x *= factor);
    }
}

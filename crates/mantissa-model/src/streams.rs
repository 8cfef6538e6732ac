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

use mantissa_kernels::kernels;

use crate::config::Streams;
use crate::program::{Buffer, Op, View};
use mantissa_arch::kinds::{NormKind, SideKind, VectorKind};

/// Least mean square that a stream is scaled from.
const LEAST: f32 = 1e-5;

/// Parallel streams of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AltUp {
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

impl AltUp {
    /// Stream `index`, `[rows, hidden]`.
    pub(crate) fn stream(&self, index: usize, hidden: usize) -> View {
        View::stream(index, self.count, hidden)
    }

    /// Predicts the streams. The residual stream becomes the first of them, unless it has `advanced` inside the layer.
    pub(crate) fn predict(&self, hidden: usize, advanced: bool) -> Vec<Op> {
        let (n, mut ops) = (self.count, Vec::new());
        let (residual, embedding) = (View::new(Buffer::Residual, hidden), self.stream(0, hidden));
        if !advanced {
            ops.push(Op::Copy { x: residual, out: embedding });
        }
        if self.first {
            for (side, i) in (1..).map(SideKind::EnterStream).zip(1..n) {
                let out = self.stream(i, hidden);
                ops.push(Op::Side { side, x: embedding, out });
                ops.push(Op::MatchSquares { like: embedding, x: out });
            }
        }
        let [weights, matrices] = View::scratch([n, n * n]);
        modalities(embedding, View::new(Buffer::Normed, hidden), weights, &mut ops);
        ops.push(Op::Side { side: SideKind::Prediction, x: weights, out: matrices });
        ops.push(Op::MixStreams { matrices, first: embedding });
        if !advanced {
            ops.push(Op::Copy { x: embedding, out: residual });
        }
        ops
    }

    /// Adds the low-rank path to the residual stream: `residual += h + norm(B A h)` with `h = norm(residual)`.
    pub(crate) fn add_laurel(&self, hidden: usize, ops: &mut Vec<Op>) {
        let (residual, h) = (View::new(Buffer::Residual, hidden), View::new(Buffer::Normed, hidden));
        let [inner, result, normed] = View::scratch([self.laurel, hidden, hidden]);
        ops.extend([
            Op::Norm { norm: NormKind::Input, x: residual, out: h },
            Op::Side { side: SideKind::LaurelLeft, x: h, out: inner },
            Op::Side { side: SideKind::LaurelRight, x: inner, out: result },
            Op::Norm { norm: NormKind::AfterLaurel, x: result, out: normed },
            Op::Add { x: h, out: residual },
            Op::Add { x: normed, out: residual },
        ]);
    }

    /// Corrects the streams by what the layer made of the first. The residual stream becomes the first of them, the normed
    /// copy the states that gate the layer's own input. After the last layer the streams are joined.
    pub(crate) fn correct(&self, hidden: usize, ops: &mut Vec<Op>) {
        let (residual, normed) = (View::new(Buffer::Residual, hidden), View::new(Buffer::Normed, hidden));
        let first = self.stream(0, hidden);
        let weights = View::part(Buffer::Wide, self.count);
        let shares = weights.then(self.count);
        modalities(residual, normed, weights, ops);
        ops.extend([
            Op::Side { side: SideKind::Correction, x: weights, out: shares },
            Op::CorrectStreams { shares, first, changed: residual },
            Op::Copy { x: first, out: residual },
            Op::Copy { x: first, out: normed },
        ]);
        if self.scales {
            ops.push(Op::ScaleByVector { x: normed, vector: VectorKind::StreamScale });
        }
    }

    /// Joins the streams after the last layer into the residual stream.
    pub(crate) fn join(&self, hidden: usize, ops: &mut Vec<Op>) {
        if !self.last {
            return;
        }
        let (residual, like) = (View::new(Buffer::Residual, hidden), self.stream(0, hidden));
        let joined = View::part(Buffer::Wide, hidden);
        for (side, i) in (1..).map(SideKind::LeaveStream).zip(1..self.count) {
            ops.extend([
                Op::Side { side, x: self.stream(i, hidden), out: joined },
                Op::MatchSquares { like, x: joined },
                Op::Add { x: joined, out: residual },
            ]);
        }
        ops.push(Op::Divide { x: residual, by: self.count as f32 });
    }
}

/// Computes `m(x)` of rows `x` `[rows, hidden]` into `out` `[rows, streams]`. `normed` is scratch.
fn modalities(x: View, normed: View, out: View, ops: &mut Vec<Op>) {
    ops.extend([
        Op::Norm { norm: NormKind::Modalities, x, out: normed },
        Op::Side { side: SideKind::Modalities, x: normed, out },
        Op::Tanh { x: out, divisor: x.width as f64 },
    ]);
}

/// Adds its row of `matrices` `[rows, n, n]` times the streams to every stream, `[n, stride]` each, for rows from `begin` on.
pub(crate) fn mix_streams(matrices: &[f32], n: usize, (begin, hidden): (usize, usize), streams: &mut [f32]) {
    let stride = streams.len() / n;
    let mut x = [0.0; Streams::MOST];
    for (row, matrix) in (begin..).zip(matrices.chunks_exact(n * n)) {
        for at in row * hidden..(row + 1) * hidden {
            x.iter_mut().zip(streams.chunks_exact(stride)).for_each(|(x, stream)| *x = stream[at]);
            for (stream, matrix) in streams.chunks_exact_mut(stride).zip(matrix.chunks_exact(n)) {
                stream[at] += matrix.iter().zip(&x).map(|(c, x)| c * x).sum::<f32>();
            }
        }
    }
}

/// Adds to every stream its share, plus 1, of the change of the first to `changed` `[rows, hidden]`, for rows from `begin`
/// on.
pub(crate) fn correct_streams(
    shares: &[f32],
    n: usize,
    (begin, hidden): (usize, usize),
    changed: &[f32],
    streams: &mut [f32],
) {
    let stride = streams.len() / n;
    let rows = shares.chunks_exact(n).zip(changed.chunks_exact(hidden));
    for (row, (shares, changed)) in (begin..).zip(rows) {
        for (at, changed) in (row * hidden..).zip(changed) {
            let change = changed - streams[at];
            for (stream, share) in streams.chunks_exact_mut(stride).zip(shares) {
                stream[at] += change * (share + 1.0);
            }
        }
    }
}

/// Scales each row of `x` `[rows, width]` to the mean square of that row of `like`.
pub(crate) fn match_squares(width: usize, like: &[f32], x: &mut [f32]) {
    let mean = |x: &[f32]| kernels().dot(x, x) / width as f32;
    for (like, x) in like.chunks_exact(width).zip(x.chunks_exact_mut(width)) {
        let factor = (mean(like) / mean(x).max(LEAST)).sqrt();
        x.iter_mut().for_each(|x| *x *= factor);
    }
}

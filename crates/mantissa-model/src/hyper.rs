//! Parallel streams of states that each half of a layer joins and mixes: hyper-connections (Zhu et al. 2024,
//! "Hyper-Connections", arXiv 2409.19606) with doubly stochastic matrices (Xie et al. 2025, "mHC: Manifold-Constrained
//! Hyper-Connections", arXiv 2512.24880), as in DeepSeek-V4 (sec. 2.2).
//!
//! The states of a token are `x_1 … x_n`, `[hidden]` each, before the first layer all its embedding. A half of a layer
//! `F` computes `y = F(Σ_i a_i x_i)` and `x_k ← b_k y + Σ_j M_jk x_j`, with
//!
//! - `(u, v, w) = W m(x)`, of n, n and n² numbers, where `m` divides all streams, joined, by their root mean square,
//! - `a = sigmoid(s_1 u + c_u) + eps` and `b = 2 sigmoid(s_2 v + c_v)`,
//! - `M` the softmax of each row of `s_3 w + c_w`, plus eps, whose columns and then rows and columns in turns are divided by
//!   their sums plus eps (Sinkhorn and Knopp 1967).
//!
//! After the last layer the states are `Σ_i a_i x_i` with weights of their own.

use std::cell::RefCell;

use mantissa_kernels::{for_each, kernels};

use crate::config::{HyperStreams, Streams};
use crate::experts::sigmoid;
use crate::operators::Operators;
use mantissa_arch::kinds::{HyperPart, HyperSite, VectorKind};

/// Rows that a thread takes at a time.
const ROWS: usize = 16;
/// Most weights of a half of a layer.
const MOST: usize = Streams::MOST * (Streams::MOST + 2);

thread_local! {
    /// Streams of a token before they are mixed.
    static BEFORE: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// What joins and mixes the streams at a site.
#[derive(Clone, Copy)]
struct Site<'a> {
    weight: &'a [f32],
    base: &'a [f32],
    scale: &'a [f32],
}

impl<'a> Site<'a> {
    fn of(operators: &'a dyn Operators, site: HyperSite) -> Self {
        let part = |part| operators.vector(VectorKind::Hyper(site, part)).unwrap_or(&[]);
        Site { weight: part(HyperPart::Weight), base: part(HyperPart::Base), scale: part(HyperPart::Scale) }
    }
}

/// Streams of a layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Hyper {
    pub(crate) streams: HyperStreams,
    /// Epsilon of the norm of the joined streams.
    pub(crate) norm_eps: f32,
    /// True for the first layer, which makes the streams.
    pub(crate) first: bool,
    /// True for the last layer, which joins them.
    pub(crate) last: bool,
}

/// Rows of a pass.
pub(crate) struct HyperRows<'a> {
    /// Residual stream, `[rows, hidden]`.
    pub(crate) residual: &'a mut [f32],
    /// Streams, `[planned rows, streams, hidden]`, and the weights that spread and mix them.
    pub(crate) streams: &'a mut [f32],
    /// Width of a state.
    pub(crate) hidden: usize,
    /// Largest number of threads.
    pub(crate) threads: usize,
}

impl Hyper {
    /// Computes `s · W m(x) + c` of a token's streams `x` into `out`.
    fn weights(&self, site: Site<'_>, x: &[f32], out: &mut [f32]) {
        let n = self.streams.count;
        let factor = (kernels().dot(x, x) / x.len() as f32 + self.norm_eps).sqrt().recip();
        let rows = site.weight.chunks_exact(x.len()).zip(site.base).enumerate();
        for ((i, (row, base)), out) in rows.zip(out) {
            let scale = site.scale.get((i / n).min(2)).copied().unwrap_or(1.0);
            *out = kernels().dot(row, x) * factor * scale + base;
        }
    }

    /// Writes `Σ_i a_i x_i` to `out`, with `a` from the first of `weights`.
    fn join(&self, weights: &mut [f32], x: &[f32], out: &mut [f32]) {
        let weights = &mut weights[..self.streams.count];
        sigmoid(weights);
        out.fill(0.0);
        for (weight, x) in weights.iter().zip(x.chunks_exact(out.len())) {
            kernels().axpy(weight + self.streams.eps, x, out);
        }
    }

    /// Makes `b` and `M` `[n + n²]` of what [`weights`](Self::weights) has computed for them.
    fn spreading(&self, weights: &[f32], out: &mut [f32]) {
        let HyperStreams { count: n, iterations, eps } = self.streams;
        out.copy_from_slice(weights);
        let (spread, matrix) = out.split_at_mut(n);
        sigmoid(spread);
        spread.iter_mut().for_each(|x| *x *= 2.0);
        for row in matrix.chunks_exact_mut(n) {
            kernels().softmax(row);
            row.iter_mut().for_each(|x| *x += eps);
        }
        for turn in 0..iterations {
            if turn > 0 {
                for row in matrix.chunks_exact_mut(n) {
                    let sum = row.iter().sum::<f32>() + eps;
                    row.iter_mut().for_each(|x| *x /= sum);
                }
            }
            for column in 0..n {
                let sum = matrix.iter().skip(column).step_by(n).sum::<f32>() + eps;
                matrix.iter_mut().skip(column).step_by(n).for_each(|x| *x /= sum);
            }
        }
    }

    /// Mixes a token's streams `x` and adds `y` to each.
    fn mix(&self, weights: &[f32], y: &[f32], x: &mut [f32]) {
        let (n, d) = (self.streams.count, y.len());
        let (spread, matrix) = weights.split_at(n);
        BEFORE.with_borrow_mut(|before| {
            before.clear();
            before.extend_from_slice(x);
            for (k, (x, b)) in x.chunks_exact_mut(d).zip(spread).enumerate() {
                x.iter_mut().zip(y).for_each(|(x, y)| *x = b * y);
                for (before, row) in before.chunks_exact(d).zip(matrix.chunks_exact(n)) {
                    kernels().axpy(row[k], before, x);
                }
            }
        });
    }
}

impl Hyper {
    /// Joins the streams of the rows into the residual stream, for one half of the layer, and keeps the weights that
    /// [`run_mix`](Self::run_mix) reads.
    pub(crate) fn run_join(&self, operators: &dyn Operators, site: HyperSite, rows: HyperRows<'_>) {
        let HyperRows { residual, streams, hidden: d, threads } = rows;
        let (n, rows) = (self.streams.count, residual.len() / d);
        let (streams, weights) = self.split(d, streams);
        if self.first && site == HyperSite::Attention {
            for (x, states) in streams.chunks_exact_mut(n * d).zip(residual.chunks_exact(d)) {
                x.chunks_exact_mut(d).for_each(|x| x.copy_from_slice(states));
            }
        }
        let site = Site::of(operators, site);
        let pieces = streams[..rows * n * d].chunks(ROWS * n * d);
        let pieces = pieces.zip(weights.chunks_mut(ROWS * n * (n + 1))).zip(residual.chunks_mut(ROWS * d));
        for_each(threads, pieces, |((x, weights), out)| {
            let rows = x.chunks_exact(n * d).zip(weights.chunks_exact_mut(n * (n + 1)));
            for ((x, spreading), out) in rows.zip(out.chunks_exact_mut(d)) {
                let mut weights = [0.0; MOST];
                let weights = &mut weights[..self.streams.weights()];
                self.weights(site, x, weights);
                self.join(weights, x, out);
                self.spreading(&weights[n..], spreading);
            }
        });
    }

    /// Mixes the streams and adds the residual stream to each, after one half of the layer. After the last half of the last
    /// layer the residual stream is what joins the streams, after others the first of them.
    pub(crate) fn run_mix(&self, operators: &dyn Operators, site: HyperSite, rows: HyperRows<'_>) {
        let HyperRows { residual, streams, hidden: d, threads } = rows;
        let (n, rows) = (self.streams.count, residual.len() / d);
        let (streams, weights) = self.split(d, streams);
        let head = (self.last && site == HyperSite::Mlp).then(|| Site::of(operators, HyperSite::Head));
        let pieces = streams[..rows * n * d].chunks_mut(ROWS * n * d);
        let pieces = pieces.zip(weights.chunks(ROWS * n * (n + 1))).zip(residual.chunks_mut(ROWS * d));
        for_each(threads, pieces, |((x, weights), y)| {
            let rows = x.chunks_exact_mut(n * d).zip(weights.chunks_exact(n * (n + 1)));
            for ((x, weights), y) in rows.zip(y.chunks_exact_mut(d)) {
                self.mix(weights, y, x);
                match head {
                    Some(head) => {
                        let mut weights = [0.0; MOST];
                        self.weights(head, x, &mut weights[..n]);
                        self.join(&mut weights, x, y);
                    }
                    None => y.copy_from_slice(&x[..d]),
                }
            }
        });
    }

    /// Splits the buffer of the streams into them, `[rows, streams, hidden]`, and the weights that spread and mix them.
    fn split<'b>(&self, hidden: usize, buffer: &'b mut [f32]) -> (&'b mut [f32], &'b mut [f32]) {
        let rows = buffer.len() / self.streams.row(hidden);
        buffer.split_at_mut(rows * self.streams.count * hidden)
    }
}

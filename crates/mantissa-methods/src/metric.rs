//! What an error of a layer's output costs the model: the Fisher information of the output.
//!
//! To second order in δ, KL(model(x) ‖ model(x + δ)) is `½ δᵀ F δ` with `F = E[g gᵀ]`, g being the gradient of `-ln p(y)` at x for y
//! drawn from the model's own distribution. BRECQ (Li et al., ICLR 2021, arXiv:2102.05426, section 3.3) weighs a block's error by the
//! diagonal of `g gᵀ`; here it is the whole matrix, the mean over all tokens, so that one matrix `[hidden, hidden]` of each layer
//! is all that is kept.

use mantissa_kernels::{MatMut, MatRef, for_each, kernels, parts};

use crate::gptq::Hessian;

/// By what length errors of a layer's output are measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ErrorMetric {
    /// By what they cost the model, to second order: under the Fisher information of the output, [`Metric`].
    #[default]
    Fisher,
    /// By their squares, as published.
    Mse,
}

/// Metrics by name.
pub const ERROR_METRICS: [(&str, ErrorMetric); 2] =
    [("fisher", ErrorMetric::Fisher), ("mse", ErrorMetric::Mse)];

/// Share of the identity in a metric: what the calibration is indifferent to is not free.
const IDENTITY: f64 = 0.1;

/// Rows that a thread weighs at a time.
const ROWS: usize = 512;

/// The squared length by which errors of a layer's output are measured: `e M eᵀ`.
#[derive(Clone, Debug, PartialEq)]
pub struct Metric {
    hidden: usize,
    /// Symmetric, `[hidden, hidden]`; its diagonal has the mean 1.
    m: Vec<f32>,
}

impl Metric {
    /// Metric from the second moments of gradients, `[hidden, hidden]`: nine tenths of them, divided by the mean of their diagonal, and a
    /// tenth of the identity. `None` where they are all zero, or not finite.
    pub fn new(moments: &Hessian) -> Option<Self> {
        let hidden = moments.cols();
        let mut m = moments.to_dense();
        let mean = (0..hidden).map(|i| f64::from(m[i * hidden + i])).sum::<f64>() / hidden.max(1) as f64;
        if !(mean.is_finite() && mean > 0.0) || m.iter().any(|v| !v.is_finite()) {
            return None;
        }
        for (i, row) in m.chunks_exact_mut(hidden).enumerate() {
            row.iter_mut().for_each(|v| *v = (f64::from(*v) * (1.0 - IDENTITY) / mean) as f32);
            row[i] += IDENTITY as f32;
        }
        Some(Metric { hidden, m })
    }

    /// `errors M` for `errors` `[tokens, hidden]`.
    pub fn weigh(&self, errors: &[f32], out: &mut Vec<f32>, threads: usize) {
        weigh(&self.m, self.hidden, errors, out, threads);
    }
}

/// `errors M` for `errors` `[_, d]` and the symmetric `m` `[d, d]`.
pub fn weigh(m: &[f32], d: usize, errors: &[f32], out: &mut Vec<f32>, threads: usize) {
    out.resize(errors.len(), 0.0);
    let mut rest = &mut out[..];
    let pieces = parts(errors.len() / d.max(1), ROWS).map(|part| {
        let (own, others) = std::mem::take(&mut rest).split_at_mut(part.len() * d);
        rest = others;
        (part, own)
    });
    for_each(threads, pieces, |(part, out)| {
        let (rows, errors) = (part.len(), &errors[part.start * d..part.end * d]);
        let m = MatRef::new(m, d, d);
        kernels().gemm_nn(MatRef::new(errors, rows, d), m, MatMut::new(out, rows, d), false);
    });
}

//! Fisher information of a layer's output: the KL divergence of the model caused by an error of that output.
//!
//! To second order in δ, KL(model(x) ‖ model(x + δ)) is `½ δᵀ F δ` with `F = E[g gᵀ]`. Here g is the gradient of `-ln
//! p(y)` at x, for y drawn from the model's own distribution. BRECQ (Li et al., ICLR 2021, arXiv:2102.05426, section
//! 3.3) weights a block's error by the diagonal of `g gᵀ`. This module uses the whole matrix averaged over all
//! tokens, so one `[hidden, hidden]` matrix per layer is stored.

use mantissa_kernels::{MatMut, MatRef, for_each, kernels, parts};

use crate::gptq::Hessian;

/// Norm in which errors of a layer's output are measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ErrorMetric {
    /// Fisher information of the output ([`Metric`]): the effect on the model's KL, to second order.
    #[default]
    Fisher,
    /// Squared error, as published.
    Mse,
}

/// Metrics by name.
pub const ERROR_METRICS: [(&str, ErrorMetric); 2] =
    [("fisher", ErrorMetric::Fisher), ("mse", ErrorMetric::Mse)];

/// Share of the identity in a metric, so that directions without gradient in the calibration still count.
const IDENTITY: f64 = 0.1;

/// Rows that a thread multiplies at a time.
const ROWS: usize = 512;

/// Squared norm `e M eᵀ` in which errors of a layer's output are measured.
#[derive(Clone, Debug, PartialEq)]
pub struct Metric {
    hidden: usize,
    /// Symmetric, `[hidden, hidden]`; its diagonal has the mean 1.
    m: Vec<f32>,
}

impl Metric {
    /// Creates the metric from second moments of gradients `[hidden, hidden]`: 0.9 of the moments, normalized to a
    /// mean diagonal of 1, plus 0.1 of the identity. `None` if the moments are all zero or not finite.
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

    /// Writes `errors M` for `errors` `[tokens, hidden]`.
    pub fn weigh(&self, errors: &[f32], out: &mut Vec<f32>, threads: usize) {
        weigh(&self.m, self.hidden, errors, out, threads);
    }
}

/// Returns `errors M` for `errors` `[_, d]` and the symmetric `m` `[d, d]`.
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

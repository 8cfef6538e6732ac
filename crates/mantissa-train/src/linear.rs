//! A linear layer in training: its three products, at the precision that its policy says. No other code of this
//! crate multiplies by a weight.

use std::ops::Range;

use mantissa_kernels::{MatMut, MatRef, for_each, kernels};
use mantissa_model::flow::parts;
use mantissa_model::forward_f32;
use mantissa_num::{Code, Scheme};

use crate::error::TrainError;
use crate::policy::LinearPolicy;
use crate::rows::{rows, rows_mut};

/// Least rows of `X` or `dY` that a thread multiplies: a part of [`parts`] has more than half of it, and so more
/// than the 64 rows from which on a row's bits do not depend on how many there are.
const TOKENS: usize = 256;

/// Least rows of a weight gradient that a thread computes.
const FEATURES: usize = 96;

/// The operator of one linear layer. Its weight `[rows, cols]` = `[out, in]` and bias `[rows]` lie in an arena.
#[derive(Clone, Debug)]
pub struct LinearOp {
    weight: Range<usize>,
    bias: Option<Range<usize>>,
    rows: usize,
    cols: usize,
}

impl LinearOp {
    /// An operator for the weight and bias at these places of the arenas. `module` is its name in errors.
    ///
    /// # Errors
    /// [`TrainError::Policy`] for an operand that is not f32.
    ///
    /// # Panics
    /// If the places do not have the shape.
    pub fn new(
        module: &str,
        (rows, cols): (usize, usize),
        weight: Range<usize>,
        bias: Option<Range<usize>>,
        policy: &LinearPolicy,
    ) -> Result<Self, TrainError> {
        assert!(
            weight.len() == rows * cols && bias.as_ref().is_none_or(|bias| bias.len() == rows),
            "linear {module}: not the places of a weight [{rows}, {cols}]"
        );
        let f32 = Scheme::plain(Code::F32);
        let other = policy.operands().into_iter().find(|(_, scheme)| scheme.format != f32.format);
        match other {
            None => Ok(LinearOp { weight, bias, rows, cols }),
            Some((operand, scheme)) => Err(TrainError::Policy {
                module: module.into(),
                operand: operand.into(),
                found: scheme.to_string(),
            }),
        }
    }

    /// Input features.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Output features.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// `out = x Wᵀ + b`, or `out += x Wᵀ + b` if `accumulate`; `x` `[t, cols]`, `out` `[t, rows]`. The bits of the
    /// same layer in evaluation.
    ///
    /// # Panics
    /// If a slice does not have its shape.
    pub fn fprop(&self, params: &[f32], x: &[f32], out: &mut [f32], accumulate: bool, threads: usize) {
        let t = self.tokens(x, out);
        let (weight, bias) = (&params[self.weight.clone()], self.bias.clone().map(|bias| &params[bias]));
        let cut = token_parts(t, threads);
        for_each(threads, cut.clone().zip(rows_mut(out, self.rows, cut)), |(part, out)| {
            let x = rows(x, self.cols, part);
            forward_f32(weight, bias, (self.rows, self.cols), x, out, accumulate);
        });
    }

    /// `dx = dy W`, or `dx += dy W` if `accumulate`; `dy` `[t, rows]`, `dx` `[t, cols]`.
    ///
    /// # Panics
    /// If a slice does not have its shape.
    pub fn dgrad(&self, params: &[f32], dy: &[f32], dx: &mut [f32], accumulate: bool, threads: usize) {
        let t = self.tokens(dx, dy);
        let weight = MatRef::new(&params[self.weight.clone()], self.rows, self.cols);
        let cut = token_parts(t, threads);
        for_each(threads, cut.clone().zip(rows_mut(dx, self.cols, cut)), |(part, dx)| {
            let (n, dy) = (part.len(), rows(dy, self.rows, part));
            let dx = MatMut::new(dx, n, self.cols);
            kernels().gemm_nn(MatRef::new(dy, n, self.rows), weight, dx, accumulate);
        });
    }

    /// Adds `dyᵀ x` to the weight's gradient in `grads` and the sum of the rows of `dy` to the bias's; `dy`
    /// `[t, rows]`, `x` `[t, cols]`.
    ///
    /// # Panics
    /// If a slice does not have its shape.
    pub fn wgrad(&self, dy: &[f32], x: &[f32], grads: &mut [f32], threads: usize) {
        let t = self.tokens(x, dy);
        if t == 0 {
            return;
        }
        let x = MatRef::new(x, t, self.cols);
        let cut = parts(self.rows, self.rows.div_ceil(threads.max(1)).max(FEATURES));
        let pieces = cut.clone().zip(rows_mut(&mut grads[self.weight.clone()], self.cols, cut));
        for_each(threads, pieces, |(span, dw)| {
            let dy = MatRef::with_stride(&dy[span.start..], t, span.len(), self.rows);
            kernels().gemm_tn(dy, x, MatMut::new(dw, span.len(), self.cols), true);
        });
        if let Some(bias) = self.bias.clone() {
            let db = &mut grads[bias];
            dy.chunks_exact(self.rows).for_each(|dy| kernels().axpy(1.0, dy, db));
        }
    }

    /// Rows of `input` `[t, cols]` and `output` `[t, rows]`.
    fn tokens(&self, input: &[f32], output: &[f32]) -> usize {
        let t = input.len() / self.cols;
        assert!(
            input.len() == t * self.cols && output.len() == t * self.rows,
            "linear [{}, {}]: input {} and output {} are not rows of the same tokens",
            self.rows,
            self.cols,
            input.len(),
            output.len()
        );
        t
    }
}

fn token_parts(t: usize, threads: usize) -> impl Iterator<Item = Range<usize>> + Clone {
    parts(t, t.div_ceil(threads.max(1)).max(TOKENS))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use super::*;

    fn wave(n: usize, phase: f32) -> Vec<f32> {
        (0..n).map(|i| (i as f32 * 0.517 + phase).sin()).collect()
    }

    fn op(rows: usize, cols: usize) -> LinearOp {
        let (weight, bias) = (3..3 + rows * cols, Some(5 + rows * cols..5 + rows * cols + rows));
        LinearOp::new("m", (rows, cols), weight, bias, &LinearPolicy::f32()).unwrap()
    }

    /// The three products against their definitions in f64.
    #[test]
    fn products_match_their_definitions() {
        let (rows, cols, t) = (37, 21, 70);
        let op = op(rows, cols);
        let params = wave(10 + rows * cols + rows, 0.0);
        let (w, b) = (&params[3..3 + rows * cols], &params[5 + rows * cols..][..rows]);
        let (x, dy) = (wave(t * cols, 1.0), wave(t * rows, 2.0));
        let wide = f64::from;
        let close = |got: f32, exact: f64| assert!((wide(got) - exact).abs() < 1e-4, "{got} for {exact}");

        let mut out = vec![0.5; t * rows];
        op.fprop(&params, &x, &mut out, true, 1);
        for (i, got) in out.iter().enumerate() {
            let (s, r) = (i / rows, i % rows);
            let dot: f64 = (0..cols).map(|c| wide(x[s * cols + c]) * wide(w[r * cols + c])).sum();
            close(*got, dot + wide(b[r]) + 0.5);
        }
        let mut dx = vec![0.5; t * cols];
        op.dgrad(&params, &dy, &mut dx, true, 1);
        for (i, got) in dx.iter().enumerate() {
            let (s, c) = (i / cols, i % cols);
            close(*got, 0.5 + (0..rows).map(|r| wide(dy[s * rows + r]) * wide(w[r * cols + c])).sum::<f64>());
        }
        let mut grads = vec![0.25; params.len()];
        op.wgrad(&dy, &x, &mut grads, 1);
        for (i, got) in grads[3..3 + rows * cols].iter().enumerate() {
            let (r, c) = (i / cols, i % cols);
            close(*got, 0.25 + (0..t).map(|s| wide(dy[s * rows + r]) * wide(x[s * cols + c])).sum::<f64>());
        }
        for (r, got) in grads[5 + rows * cols..][..rows].iter().enumerate() {
            close(*got, 0.25 + (0..t).map(|s| wide(dy[s * rows + r])).sum::<f64>());
        }
        assert_eq!(grads[..3], [0.25; 3], "nothing else is touched");
    }

    #[test]
    fn thread_counts_change_no_bit() {
        for (rows, cols, t) in [(300, 700, 1000), (200, 96, 600), (8, 16, 300), (1000, 24, 70)] {
            let op = op(rows, cols);
            let params = wave(10 + rows * cols + rows, 0.0);
            let (x, dy) = (wave(t * cols, 1.0), wave(t * rows, 2.0));
            let run = |threads| {
                let (mut out, mut dx) = (vec![0.0; t * rows], vec![0.0; t * cols]);
                let mut grads = vec![0.0; params.len()];
                op.fprop(&params, &x, &mut out, false, threads);
                op.dgrad(&params, &dy, &mut dx, false, threads);
                op.wgrad(&dy, &x, &mut grads, threads);
                [out, dx, grads].concat().into_iter().map(f32::to_bits).collect::<Vec<_>>()
            };
            let one = run(1);
            for threads in [2, 3, 16] {
                assert!(run(threads) == one, "[{rows}, {cols}], {t} tokens, {threads} threads");
            }
        }
    }

    #[test]
    fn operands_that_cannot_be_had_are_named() {
        let mut policy = LinearPolicy::f32();
        policy.wgrad.left = "bf16".parse().unwrap();
        let error = LinearOp::new("model.q", (2, 3), 0..6, None, &policy).unwrap_err().to_string();
        assert!(error.contains("model.q") && error.contains("wgrad.left: found bf16"), "{error}");
    }
}

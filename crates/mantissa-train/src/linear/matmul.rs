//! Matmuls of a linear layer with the operand dtypes of its policy. No other code of this crate multiplies by a weight.

use std::cell::RefCell;
use std::ops::Range;

use mantissa_kernels::{MatMut, MatRef, for_each, kernels};
use mantissa_model::flow::parts;
use mantissa_model::forward_f32;

use super::LinearOp;
use crate::arena::Parameters;
use crate::form::{FormRef, product};
use crate::gradients::Gradients;
use crate::rows::rows_mut;
use crate::store::{Precision, StoreRef};

/// Minimum rows of `X` or `dY` per thread. A part of [`parts`] has more than half of that, hence more than 64
/// rows, from which on a row's result does not depend on the number of rows.
const TOKENS: usize = 256;

/// Minimum rows of a weight gradient per thread.
const FEATURES: usize = 96;

/// Thread-local buffers for operands that are rounded before a matmul.
#[derive(Default)]
struct Scratch {
    left: Vec<f32>,
    right: Vec<f32>,
    left_bits: Vec<u16>,
    right_bits: Vec<u16>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

impl LinearOp {
    /// Computes `out = x Wᵀ + b`, or `out += x Wᵀ + b` if `accumulate`, from the forms of `x` and W; the rows of
    /// `out` beyond the rows of `x` become 0.
    pub(crate) fn fprop_of(
        &self,
        params: &Parameters,
        [x, weight]: [FormRef<'_>; 2],
        out: &mut [f32],
        accumulate: bool,
        threads: usize,
    ) {
        let bias = self.bias.as_ref().map(|bias| params.f32(bias));
        let (out, padding) = out.split_at_mut(x.lines() * self.rows);
        if !accumulate {
            padding.fill(0.0);
        }
        let cut = token_parts(x.lines(), threads);
        for_each(threads, cut.clone().zip(rows_mut(out, self.rows, cut)), |(part, out)| {
            product(x.slice(part), weight, out, accumulate);
            if let Some(bias) = bias.as_deref() {
                out.chunks_exact_mut(self.rows).for_each(|out| kernels().axpy(1.0, bias, out));
            }
        });
    }

    /// Computes `dx = dy W`, or `dx += dy W` if `accumulate`, from the forms of `dy` and W.
    pub(crate) fn dgrad_of(
        &self,
        [dy, weight]: [FormRef<'_>; 2],
        dx: &mut [f32],
        accumulate: bool,
        threads: usize,
    ) {
        let cut = token_parts(dy.lines(), threads);
        for_each(threads, cut.clone().zip(rows_mut(dx, self.cols, cut)), |(part, dx)| {
            product(dy.slice(part), weight, dx, accumulate);
        });
    }

    /// Adds `dyᵀ x` to the weight gradient `dw` `[rows, cols]`, from the forms of both.
    pub(crate) fn wgrad_of(&self, [dy, x]: [FormRef<'_>; 2], dw: &mut [f32], threads: usize) {
        let cut = parts(self.rows, self.rows.div_ceil(threads.max(1)).max(FEATURES));
        for_each(threads, cut.clone().zip(rows_mut(dw, self.cols, cut)), |(span, dw)| {
            product(dy.slice(span), x, dw, true);
        });
    }

    /// Computes `out = x Wᵀ + b`, or `out += x Wᵀ + b` if `accumulate`; `x` `[t, cols]`, `out` `[t, rows]`.
    /// In f32 the result is bit-identical to evaluation.
    ///
    /// # Panics
    /// If a slice has the wrong shape.
    pub(crate) fn fprop(
        &self,
        params: &Parameters,
        x: StoreRef<'_>,
        out: &mut [f32],
        accumulate: bool,
        threads: usize,
    ) {
        self.fprop_with(params, params.get(self.weight.clone()), x, out, accumulate, threads);
    }

    /// Computes [`fprop`](Self::fprop) with `weight` in place of the stored one.
    ///
    /// # Panics
    /// If a slice has the wrong shape.
    pub(crate) fn fprop_with(
        &self,
        params: &Parameters,
        weight: StoreRef<'_>,
        x: StoreRef<'_>,
        out: &mut [f32],
        accumulate: bool,
        threads: usize,
    ) {
        let t = self.tokens(x.len(), out.len());
        let bias = self.bias.as_ref().map(|bias| params.f32(bias));
        let (left, right) = self.operands.fprop;
        let cut = token_parts(t, threads);
        for_each(threads, cut.clone().zip(rows_mut(out, self.rows, cut)), |(part, out)| {
            let x = x.slice(part.start * self.cols..part.end * self.cols);
            let (n, shape) = (part.len(), (self.rows, self.cols));
            multiply((x, left), (weight, right), |pair| {
                let (x, weight) = match pair {
                    Pair::F32(x, weight) => {
                        forward_f32(weight, bias.as_deref(), shape, x, out, accumulate);
                        return;
                    }
                    Pair::Bf16(x, weight) | Pair::F16(x, weight) => {
                        (MatRef::new(x, n, self.cols), MatRef::new(weight, self.rows, self.cols))
                    }
                };
                let to = MatMut::new(&mut *out, n, self.rows);
                match left {
                    Precision::F16 => kernels().gemm_f16_nt(x, weight, to, accumulate),
                    _ => kernels().gemm_bf16_nt(x, weight, to, accumulate),
                }
                if let Some(bias) = bias.as_deref() {
                    out.chunks_exact_mut(self.rows).for_each(|out| kernels().axpy(1.0, bias, out));
                }
            });
        });
    }

    /// Computes [`fprop`](Self::fprop) of a router or gate in f32, with the bits of evaluation also for one output: the
    /// summation order of so narrow a product would depend on the number of rows.
    ///
    /// # Panics
    /// As [`fprop`](Self::fprop).
    pub(crate) fn narrow(&self, params: &Parameters, x: &[f32], out: &mut [f32], threads: usize) {
        if self.rows > 1 || self.bias.is_some() {
            return self.fprop_f32(params, x, out, threads);
        }
        kernels().gemv(x, self.cols, &params.f32(&self.weight), out, false);
    }

    /// Computes [`fprop`](Self::fprop) for f32 values, into `out`.
    ///
    /// # Panics
    /// As [`fprop`](Self::fprop).
    pub(crate) fn fprop_f32(&self, params: &Parameters, x: &[f32], out: &mut [f32], threads: usize) {
        self.fprop(params, StoreRef::F32(x), out, false, threads);
    }

    /// Computes `dx = dy W`, or `dx += dy W` if `accumulate`; `dy` `[t, rows]`, `dx` `[t, cols]`.
    ///
    /// # Panics
    /// If a slice has the wrong shape.
    pub(crate) fn dgrad(
        &self,
        params: &Parameters,
        dy: StoreRef<'_>,
        dx: &mut [f32],
        accumulate: bool,
        threads: usize,
    ) {
        self.dgrad_with(params.get(self.weight.clone()), dy, dx, accumulate, threads);
    }

    /// Computes [`dgrad`](Self::dgrad) with `weight` in place of the stored one.
    ///
    /// # Panics
    /// If a slice has the wrong shape.
    pub(crate) fn dgrad_with(
        &self,
        weight: StoreRef<'_>,
        dy: StoreRef<'_>,
        dx: &mut [f32],
        accumulate: bool,
        threads: usize,
    ) {
        let t = self.tokens(dx.len(), dy.len());
        let (left, right) = self.operands.dgrad;
        let cut = token_parts(t, threads);
        for_each(threads, cut.clone().zip(rows_mut(dx, self.cols, cut)), |(part, dx)| {
            let (n, dy) = (part.len(), dy.slice(part.start * self.rows..part.end * self.rows));
            let (wide, high) = ((n, self.rows), (self.rows, self.cols));
            multiply((dy, left), (weight, right), |pair| {
                let dx = MatMut::new(dx, n, self.cols);
                match pair {
                    Pair::F32(dy, w) => kernels().gemm_nn(matrix(dy, wide), matrix(w, high), dx, accumulate),
                    Pair::Bf16(dy, w) => {
                        kernels().gemm_bf16_nn(matrix(dy, wide), matrix(w, high), dx, accumulate);
                    }
                    Pair::F16(dy, w) => {
                        kernels().gemm_f16_nn(matrix(dy, wide), matrix(w, high), dx, accumulate);
                    }
                }
            });
        });
    }

    /// Adds `dyᵀ x` to the weight gradient in `grads`; `dy` `[t, rows]`, `x` `[t, cols]`.
    ///
    /// # Panics
    /// If a slice has the wrong shape.
    pub(crate) fn wgrad(&self, dy: StoreRef<'_>, x: StoreRef<'_>, grads: &mut Gradients, threads: usize) {
        grads.add(self.weight.clone(), |dw| self.wgrad_into(dy, x, dw, threads));
    }

    /// Adds the column sums of `dy` `[t, rows]` to the bias gradient in `grads`.
    pub(crate) fn bias_grad(&self, dy: &[f32], grads: &mut Gradients) {
        if let Some(bias) = self.bias.clone() {
            grads.add(bias, |db| dy.chunks_exact(self.rows).for_each(|dy| kernels().axpy(1.0, dy, db)));
        }
    }

    /// Adds `sums` `[rows]` to the bias gradient in `grads`, if there is a bias.
    pub(crate) fn add_bias_grad(&self, sums: &[f32], grads: &mut Gradients) {
        if let Some(bias) = self.bias.clone() {
            grads.add(bias, |db| kernels().axpy(1.0, sums, db));
        }
    }

    /// Adds `dyᵀ x` to `dw` `[rows, cols]`.
    pub(crate) fn wgrad_into(&self, dy: StoreRef<'_>, x: StoreRef<'_>, dw: &mut [f32], threads: usize) {
        let t = self.tokens(x.len(), dy.len());
        if t == 0 {
            return;
        }
        let (left, right) = self.operands.wgrad;
        let shape = (t, self.cols);
        multiply((dy, left), (x, right), |pair| {
            let cut = parts(self.rows, self.rows.div_ceil(threads.max(1)).max(FEATURES));
            for_each(threads, cut.clone().zip(rows_mut(dw, self.cols, cut)), |(span, dw)| {
                let dw = MatMut::new(dw, span.len(), self.cols);
                match pair {
                    Pair::F32(dy, x) => {
                        kernels().gemm_tn(self.columns(dy, t, &span), matrix(x, shape), dw, true);
                    }
                    Pair::Bf16(dy, x) => {
                        kernels().gemm_bf16_tn(self.columns(dy, t, &span), matrix(x, shape), dw, true);
                    }
                    Pair::F16(dy, x) => {
                        kernels().gemm_f16_tn(self.columns(dy, t, &span), matrix(x, shape), dw, true);
                    }
                }
            });
        });
    }

    /// Returns the output features `span` of `dy` `[t, rows]`.
    fn columns<'a, T>(&self, dy: &'a [T], t: usize, span: &Range<usize>) -> MatRef<'a, T> {
        MatRef::with_stride(&dy[span.start..], t, span.len(), self.rows)
    }

    /// Returns the number of tokens of an input `[t, cols]` and output `[t, rows]` with these lengths.
    fn tokens(&self, input: usize, output: usize) -> usize {
        let t = input / self.cols;
        assert!(
            input == t * self.cols && output == t * self.rows,
            "linear [{}, {}]: input of {input} and output of {output} values differ in tokens",
            self.rows,
            self.cols,
        );
        t
    }
}

/// Operands of a matmul in the dtype of its kernel.
#[derive(Clone, Copy)]
enum Pair<'a> {
    F32(&'a [f32], &'a [f32]),
    Bf16(&'a [u16], &'a [u16]),
    F16(&'a [u16], &'a [u16]),
}

/// Rounds both operands to their dtypes and passes them to `product`. Two operands of the same 16-bit dtype
/// stay 16 bits, with f32 accumulation; others are widened to f32.
fn multiply<T>(
    (left, to_left): (StoreRef<'_>, Precision),
    (right, to_right): (StoreRef<'_>, Precision),
    product: impl FnOnce(Pair<'_>) -> T,
) -> T {
    // Taken out, not borrowed: `product` may multiply on this thread again.
    let mut scratch = SCRATCH.take();
    let Scratch { left: a, right: b, left_bits, right_bits } = &mut scratch;
    let result = match (to_left, to_right) {
        (Precision::Bf16, Precision::Bf16) => {
            product(Pair::Bf16(left.bits(to_left, left_bits), right.bits(to_right, right_bits)))
        }
        (Precision::F16, Precision::F16) => {
            product(Pair::F16(left.bits(to_left, left_bits), right.bits(to_right, right_bits)))
        }
        _ => product(Pair::F32(left.rounded(to_left, a), right.rounded(to_right, b))),
    };
    SCRATCH.set(scratch);
    result
}

fn matrix<T>(values: &[T], (rows, cols): (usize, usize)) -> MatRef<'_, T> {
    MatRef::new(values, rows, cols)
}

fn token_parts(t: usize, threads: usize) -> impl Iterator<Item = Range<usize>> + Clone {
    parts(t, t.div_ceil(threads.max(1)).max(TOKENS))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
mod tests {
    use super::*;
    use crate::policy::LinearPolicy;

    fn wave(n: usize, phase: f32) -> Vec<f32> {
        (0..n).map(|i| (i as f32 * 0.517 + phase).sin()).collect()
    }

    fn op(rows: usize, cols: usize) -> LinearOp {
        let (weight, bias) = (3..3 + rows * cols, Some(5 + rows * cols..5 + rows * cols + rows));
        LinearOp::new("m", (rows, cols), weight, bias, &LinearPolicy::f32()).unwrap()
    }

    /// Compares the three matmuls with their definitions in f64.
    #[test]
    fn products_match_their_definitions() {
        let (rows, cols, t) = (37, 21, 70);
        let op = op(rows, cols);
        let values = wave(10 + rows * cols + rows, 0.0);
        let params = Parameters::bare(values.clone());
        let (w, b) = (&values[3..3 + rows * cols], &values[5 + rows * cols..][..rows]);
        let (x, dy) = (wave(t * cols, 1.0), wave(t * rows, 2.0));
        let wide = f64::from;
        let close = |got: f32, exact: f64| assert!((wide(got) - exact).abs() < 1e-4, "{got} for {exact}");

        let mut out = vec![0.5; t * rows];
        op.fprop(&params, StoreRef::F32(&x), &mut out, true, 1);
        for (i, got) in out.iter().enumerate() {
            let (s, r) = (i / rows, i % rows);
            let dot: f64 = (0..cols).map(|c| wide(x[s * cols + c]) * wide(w[r * cols + c])).sum();
            close(*got, dot + wide(b[r]) + 0.5);
        }
        let mut dx = vec![0.5; t * cols];
        op.dgrad(&params, StoreRef::F32(&dy), &mut dx, true, 1);
        for (i, got) in dx.iter().enumerate() {
            let (s, c) = (i / cols, i % cols);
            close(*got, 0.5 + (0..rows).map(|r| wide(dy[s * rows + r]) * wide(w[r * cols + c])).sum::<f64>());
        }
        let mut grads = Gradients::bare(vec![0.25; values.len()]);
        op.wgrad(StoreRef::F32(&dy), StoreRef::F32(&x), &mut grads, 1);
        op.bias_grad(&dy, &mut grads);
        let grads = grads.to_f32();
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
            let values = wave(10 + rows * cols + rows, 0.0);
            let params = Parameters::bare(values.clone());
            let (x, dy) = (wave(t * cols, 1.0), wave(t * rows, 2.0));
            let run = |threads| {
                let (mut out, mut dx) = (vec![0.0; t * rows], vec![0.0; t * cols]);
                let mut grads = Gradients::bare(vec![0.0; values.len()]);
                op.fprop(&params, StoreRef::F32(&x), &mut out, false, threads);
                op.dgrad(&params, StoreRef::F32(&dy), &mut dx, false, threads);
                op.wgrad(StoreRef::F32(&dy), StoreRef::F32(&x), &mut grads, threads);
                [out, dx, grads.to_f32().to_vec()].concat().into_iter().map(f32::to_bits).collect::<Vec<_>>()
            };
            let one = run(1);
            for threads in [2, 3, 16] {
                assert!(run(threads) == one, "[{rows}, {cols}], {t} tokens, {threads} threads");
            }
        }
    }

    /// Rounded operands give the product of their rounded values.
    #[test]
    fn operands_are_rounded_as_the_policy_says() {
        let (rows, cols, t) = (40, 24, 90);
        let places = || (3..3 + rows * cols, None);
        let values = wave(10 + rows * cols + rows, 0.0);
        let (x, dy) = (wave(t * cols, 1.0), wave(t * rows, 2.0));
        let run = |op: &LinearOp, values: &[f32], x: &[f32], dy: &[f32]| {
            let params = Parameters::bare(values.to_vec());
            let (mut out, mut dx) = (vec![0.0; t * rows], vec![0.0; t * cols]);
            let mut grads = Gradients::bare(vec![0.0; values.len()]);
            op.fprop(&params, StoreRef::F32(x), &mut out, false, 2);
            op.dgrad(&params, StoreRef::F32(dy), &mut dx, false, 2);
            op.wgrad(StoreRef::F32(dy), StoreRef::F32(x), &mut grads, 2);
            [out, dx, grads.to_f32().to_vec()].concat()
        };
        let f32_op = LinearOp::new("m", (rows, cols), places().0, places().1, &LinearPolicy::f32()).unwrap();
        for precision in [Precision::Bf16, Precision::F16] {
            let rounded = |values: &[f32]| {
                let mut values = values.to_vec();
                crate::store::round(precision, &mut values);
                values
            };
            let policy = LinearPolicy::plain(precision);
            let op = LinearOp::new("m", (rows, cols), places().0, places().1, &policy).unwrap();
            let found = run(&op, &values, &x, &dy);
            let expected = run(&f32_op, &rounded(&values), &rounded(&x), &rounded(&dy));
            assert!(found.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 2e-5), "{precision:?}");
            assert_ne!(found, run(&f32_op, &values, &x, &dy));
        }
    }
}

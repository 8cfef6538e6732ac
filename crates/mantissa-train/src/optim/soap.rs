//! SOAP (Vyas et al. 2024, "SOAP: Improving and Stabilizing Shampoo using Adam", arXiv 2409.11321, alg. 3): Adam in the
//! eigenbasis of Shampoo's preconditioners. For a matrix `G[rows, cols]` of a linear layer:
//!
//! ```text
//! first step   L = (1 - β) G Gᵀ, R = (1 - β) Gᵀ G, Q_L and Q_R their eigenvectors; the weights do not change
//! G' = Q_Lᵀ G Q_R,  m ← β1 m + (1 - β1) G',  v ← β2 v + (1 - β2) G'²
//! p ← (p - lr √(1 - β2ˢ) / (1 - β1ˢ) · Q_L (m / (√v + ε)) Q_Rᵀ) (1 - lr wd),  s steps without the first
//! L ← β L + (1 - β) G Gᵀ,  R ← β R + (1 - β) Gᵀ G,  β = β2
//! every `frequency` steps: columns of Q by descending diagonal of Qᵀ L Q, then Q ← QR(L Q); m is rotated along
//! ```
//!
//! in the order of the authors' implementation. Sides longer than `block` are split evenly, and their preconditioner
//! keeps the blocks on its diagonal. Embeddings, head, norms and biases are updated by AdamW.

use std::ops::Range;
use std::sync::Arc;

use mantissa_kernels::{AdamDirection, AdamLength, MatMut, MatRef, for_each, kernels};
use mantissa_options::{Within, options};

use super::adamw::AdamWMethod;
use super::keys::{MomentKeys, NamedFormat, OptimizerKeys, OptimizerKind, Whole};
use super::matrix::{Product, ROWS, eigenvectors, orthogonal, product, shape_of_linear};
use super::method::{Layout, State, Step, UpdateRule, UpdateTarget};
use super::moment_format::MomentFormat;
use crate::error::TrainError;
use crate::param_table::ParamInfo;

/// Row of the registry.
pub(super) const KIND: OptimizerKind = OptimizerKind {
    name: "soap",
    about: "SOAP (Vyas et al. 2024): Adam in the eigenbasis of Shampoo for linear weights, AdamW for the others",
    keys: || Box::<Keys>::default(),
};

options! {
    /// Own keys.
    #[derive(Clone, Debug)]
    struct Keys {
        ..moments: MomentKeys, "Format of the moments.";
        /// decay of the first moment
        beta1: f64 = 0.95, Within(0.0, 0.999_999);
        /// decay of the second moment and of the preconditioners
        beta2: f64 = 0.95, Within(0.0, 0.999_999_9);
        /// term added to the root
        eps: f64 = 1e-8, Within(1e-30, 1.0);
        /// steps between two refreshes of the bases
        frequency: f64 = 10.0, Whole(1, 1_000_000);
        /// longest side of a preconditioner
        block: f64 = 128.0, Whole(8, 1024);
    }
}

impl OptimizerKeys for Keys {
    fn moments(&self) -> &NamedFormat {
        &self.moments.moments
    }

    fn build(&self) -> Arc<dyn UpdateRule> {
        let moments = self.moments().format;
        Arc::new(Soap {
            frequency: self.frequency as u64,
            block: self.block as usize,
            adamw: AdamWMethod { beta1: self.beta1, beta2: self.beta2, eps: self.eps, moments },
            moments,
        })
    }
}

/// SOAP with its hyperparameters.
#[derive(Clone, Copy, Debug)]
struct Soap {
    frequency: u64,
    block: usize,
    /// Betas and eps, and the method of the other tensors.
    adamw: AdamWMethod,
    moments: MomentFormat,
}

/// Blocks of one side of a matrix.
#[derive(Clone, Copy, Debug)]
struct Side {
    len: usize,
    block: usize,
}

impl Side {
    fn new(len: usize, most: usize) -> Self {
        Side { len, block: len.div_ceil(len.div_ceil(most).max(1)).max(1) }
    }

    /// Elements of the preconditioner.
    fn elements(self) -> usize {
        self.blocks().map(|block| block.len() * block.len()).sum()
    }

    fn blocks(self) -> impl Iterator<Item = Range<usize>> + Clone {
        (0..self.len).step_by(self.block).map(move |first| first..self.len.min(first + self.block))
    }

    /// Splits a preconditioner into its blocks.
    fn split(self, mut values: &[f32]) -> Vec<(Range<usize>, &[f32])> {
        let mut all = Vec::new();
        for block in self.blocks() {
            let (one, rest) = values.split_at(block.len() * block.len());
            all.push((block, one));
            values = rest;
        }
        all
    }

    fn split_mut(self, mut values: &mut [f32]) -> Vec<(Range<usize>, &mut [f32])> {
        let mut all = Vec::new();
        for block in self.blocks() {
            let (one, rest) = values.split_at_mut(block.len() * block.len());
            all.push((block, one));
            values = rest;
        }
        all
    }
}

impl UpdateRule for Soap {
    fn layout(&self, param: &ParamInfo) -> Layout {
        let Some((count, rows, cols)) = shape_of_linear(param) else { return self.adamw.layout(param) };
        let (left, right) = (Side::new(rows, self.block), Side::new(cols, self.block));
        let (left_len, right_len) = (count * left.elements(), count * right.elements());
        Layout {
            moments: vec![("m", false, self.moments), ("v", true, self.moments)],
            arrays: vec![
                ("left", left_len),
                ("right", right_len),
                ("q_left", left_len),
                ("q_right", right_len),
            ],
            scratch: 3 * param.range.len() + 2 * rows * cols,
        }
    }

    fn update(
        &self,
        target: &mut UpdateTarget<'_>,
        state: &mut State,
        scratch: &mut [f32],
        step: &Step,
    ) -> Result<(), TrainError> {
        let Some((_, rows, cols)) = shape_of_linear(target.param) else {
            return self.adamw.update(target, state, scratch, step);
        };
        let (n, threads) = (target.len(), target.threads);
        let (g, rest) = scratch.split_at_mut(n);
        let (m, rest) = rest.split_at_mut(n);
        let (v, work) = rest.split_at_mut(n);
        target.gradient(step.grad_scale as f32, g);
        let sides = [Side::new(rows, self.block), Side::new(cols, self.block)];
        let [(_, left), (_, right), (_, q_left), (_, q_right)] = &mut state.arrays[..] else { return Ok(()) };
        if step.t > 1 {
            state.moments[0].read_all(threads, m)?;
            state.moments[1].read_all(threads, v)?;
        }
        let of = |side: usize| sides[side].elements();
        let matrices =
            g.chunks_mut(rows * cols).zip(m.chunks_mut(rows * cols)).zip(v.chunks_mut(rows * cols));
        let factors = left.chunks_mut(of(0)).zip(right.chunks_mut(of(1)));
        let bases = q_left.chunks_mut(of(0)).zip(q_right.chunks_mut(of(1)));
        for ((((g, m), v), (left, right)), (q_left, q_right)) in matrices.zip(factors).zip(bases) {
            let mut matrix =
                Matrix { sides, factors: [left, right], bases: [q_left, q_right], threads, work: &mut *work };
            match step.t {
                1 => matrix.begin(g, self.adamw.beta2),
                _ => self.matrix_step(&mut matrix, g, m, v, step.t - 1),
            }
        }
        if step.t == 1 {
            return Ok(());
        }
        state.moments[0].write_all(threads, m)?;
        state.moments[1].write_all(threads, v)?;
        let s = (step.t - 1) as f64;
        let correction = (1.0 - self.adamw.beta2.powf(s)).sqrt() / (1.0 - self.adamw.beta1.powf(s));
        let decay = 1.0 - step.lr * step.weight_decay;
        target.apply(g, step.lr * correction * decay, decay)
    }
}

impl Soap {
    /// Updates the state of a matrix with its gradient `g`, which becomes the direction of the update.
    fn matrix_step(&self, matrix: &mut Matrix<'_>, g: &mut [f32], m: &mut [f32], v: &mut [f32], s: u64) {
        let AdamWMethod { beta1, beta2, eps, .. } = self.adamw;
        matrix.update_factors(g, beta2);
        matrix.project(g);
        // The corrections of both moments are in the learning rate.
        let rule = AdamDirection {
            beta1: beta1 as f32,
            one_minus_beta1: (1.0 - beta1) as f32,
            beta2: beta2 as f32,
            one_minus_beta2: (1.0 - beta2) as f32,
            square_first: true,
            length: AdamLength::Damped { factor: 1.0, eps: eps as f32 },
        };
        kernels().adam_direction(&rule, g, m, v);
        matrix.project_back(g);
        if s.is_multiple_of(self.frequency) {
            matrix.project_back(m);
            matrix.refresh(v);
            matrix.project(m);
        }
    }
}

/// Matrix with its preconditioners and their bases, rows and columns.
struct Matrix<'a> {
    sides: [Side; 2],
    factors: [&'a mut [f32]; 2],
    bases: [&'a mut [f32]; 2],
    threads: usize,
    /// Two matrices.
    work: &'a mut [f32],
}

impl Matrix<'_> {
    /// Makes preconditioners and bases of the first gradient.
    fn begin(&mut self, g: &[f32], beta: f64) {
        self.update_factors(g, beta);
        for ((side, factor), base) in self.sides.iter().zip(&self.factors).zip(&mut self.bases) {
            base.copy_from_slice(factor);
            for_each(self.threads, side.split_mut(base), |(block, base)| eigenvectors(base, block.len()));
        }
    }

    /// Updates the preconditioners with the gradient `g`.
    fn update_factors(&mut self, g: &[f32], beta: f64) {
        let (old, new) = (beta as f32, (1.0 - beta) as f32);
        let [rows, cols] = self.sides.map(|side| side.len);
        let lerp = |factor: &mut [f32], product: &[f32]| {
            factor.iter_mut().zip(product).for_each(|(f, p)| *f = old * *f + new * p);
        };
        let [left, right] = &mut self.factors;
        for_each(self.threads, self.sides[0].split_mut(left), |(block, factor)| {
            let (n, mut outer) = (block.len(), vec![0.0; factor.len()]);
            let part = MatRef::new(&g[block.start * cols..], n, cols);
            kernels().gemm_nt(part, part, MatMut::new(&mut outer, n, n), false);
            lerp(factor, &outer);
        });
        for_each(self.threads, self.sides[1].split_mut(right), |(block, factor)| {
            let (n, mut outer) = (block.len(), vec![0.0; factor.len()]);
            let part = MatRef::new(g, rows, cols).columns(block);
            kernels().gemm_tn(part, part, MatMut::new(&mut outer, n, n), false);
            lerp(factor, &outer);
        });
    }

    /// Replaces `x` by `Q_Lᵀ x Q_R`.
    fn project(&mut self, x: &mut [f32]) {
        self.rotate(x, Product::Tn, Product::Nn);
    }

    /// Replaces `x` by `Q_L x Q_Rᵀ`.
    fn project_back(&mut self, x: &mut [f32]) {
        self.rotate(x, Product::Nn, Product::Nt);
    }

    /// Multiplies blocks of rows by `left` products with their basis, blocks of columns by `right` products.
    fn rotate(&mut self, x: &mut [f32], left: Product, right: Product) {
        let [rows, cols] = self.sides;
        let turned = &mut self.work[..x.len()];
        for (block, base) in rows.split(self.bases[0]) {
            let (n, span) = (block.len(), block.start * cols.len..block.end * cols.len);
            product(self.threads, left, (n, cols.len, n), base, &x[span.clone()], &mut turned[span]);
        }
        let (turned, blocks) = (&*turned, cols.split(self.bases[1]));
        let parts = x.chunks_mut(ROWS * cols.len).zip(turned.chunks(ROWS * cols.len));
        for_each(self.threads, parts, |(x, turned)| {
            let rows = x.len() / cols.len;
            let turned = MatRef::new(turned, rows, cols.len);
            for (block, base) in &blocks {
                let (n, from) = (block.len(), turned.columns(block.clone()));
                let to = MatMut::with_stride(&mut x[block.start..], rows, n, cols.len);
                let base = MatRef::new(base, n, n);
                match right {
                    Product::Nt => kernels().gemm_nt(from, base, to, false),
                    _ => kernels().gemm_nn(from, base, to, false),
                }
            }
        });
    }

    /// Improves the bases by one power iteration; the second moments `v` follow the order of their columns.
    fn refresh(&mut self, v: &mut [f32]) {
        let [rows, cols] = self.sides.map(|side| side.len);
        let mut orders = [vec![0; rows], vec![0; cols]];
        for (((side, factor), base), order) in
            self.sides.iter().zip(&self.factors).zip(&mut self.bases).zip(&mut orders)
        {
            let blocks = side.split(factor).into_iter().zip(side.split_mut(base));
            let blocks = blocks.zip(order.chunks_mut(side.block));
            for_each(self.threads, blocks, |(((block, factor), (_, base)), order)| {
                power_step(factor, base, block.len(), order);
                order.iter_mut().for_each(|index| *index += block.start);
            });
        }
        let work = &mut self.work[..v.len()];
        work.copy_from_slice(v);
        let [by_row, by_col] = &orders;
        for (v, row) in v.chunks_mut(cols).zip(by_row) {
            let from = &work[row * cols..][..cols];
            v.iter_mut().zip(by_col).for_each(|(v, col)| *v = from[*col]);
        }
    }
}

/// Replaces the basis `q[n, n]` by the orthogonal factor of `factor · q`, whose columns are ordered by descending
/// estimate of their eigenvalue; `order` is that order.
fn power_step(factor: &[f32], q: &mut [f32], n: usize, order: &mut [usize]) {
    let mut next = vec![0.0; n * n];
    product(1, Product::Nn, (n, n, n), factor, q, &mut next);
    let mut estimates = vec![0.0f64; n];
    for (q, next) in q.chunks(n).zip(next.chunks(n)) {
        let terms = q.iter().zip(next).map(|(q, next)| f64::from(*q) * f64::from(*next));
        estimates.iter_mut().zip(terms).for_each(|(sum, term)| *sum += term);
    }
    order.iter_mut().enumerate().for_each(|(i, index)| *index = i);
    order.sort_by(|i, j| estimates[*j].total_cmp(&estimates[*i]));
    for (q, next) in q.chunks_mut(n).zip(next.chunks(n)) {
        q.iter_mut().zip(&*order).for_each(|(q, index)| *q = next[*index]);
    }
    orthogonal(q, n);
}

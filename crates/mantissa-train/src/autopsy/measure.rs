//! Distance of gradients from those in f32.
//!
//! Every tensor counts alike, whatever the size of its gradient, as in an optimizer that divides by it:
//! `⟨a, b⟩ = 1/T Σ_t ⟨a_t, b_t⟩ / (‖g_t‖² + n_t (0.01 rms(g))²)` over the T tensors with gradient g and n values; the
//! second term keeps tensors without a gradient of their own (biases of keys) from counting. The error is `‖e‖` of
//! `e = gradient - g`: the root mean square of the tensors' relative errors. With errors `e_S` of single operands,
//! whose sum is the error e of all in first order, the share of S is `⟨e_S, e⟩ / ⟨e, e⟩`.

use std::ops::Range;

use mantissa_kernels::map_reduce_fixed;

use crate::param_table::ParamTable;

/// Share of the model's root mean square gradient below which a tensor's own does not count.
const FLOOR: f64 = 0.01;

/// Elements summed at a time.
const PIECE: usize = 1 << 16;

/// Gradients in f32, and the error of all operands together.
pub(crate) struct Measure {
    reference: Vec<f32>,
    /// Gradients with all operands in the run's format; empty until known.
    all: Vec<f32>,
    /// Names, ranges and weights of the tensors.
    tensors: Vec<(String, Range<usize>, f64)>,
    threads: usize,
}

/// Effect of a set of operands on the gradients.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Effect {
    /// Root mean square of the tensors' relative errors; `None` if not finite.
    pub(crate) error: Option<f64>,
    /// Share of the error of all operands; `None` if either is not finite.
    pub(crate) share: Option<f64>,
}

impl Measure {
    pub(crate) fn new(table: &ParamTable, reference: &[f32], threads: usize) -> Self {
        let squares = |range: Range<usize>| squares_of(&reference[range], threads);
        let mean = squares(0..reference.len()) / reference.len().max(1) as f64;
        let tensors = table.iter().map(|param| {
            let floor = FLOOR * FLOOR * mean * param.range.len() as f64;
            let norm = squares(param.range.clone()) + floor;
            let weight = if norm > 0.0 { 1.0 / norm } else { 0.0 };
            (param.tensor.name.clone(), param.range.clone(), weight)
        });
        Measure { tensors: tensors.collect(), reference: reference.to_vec(), all: Vec::new(), threads }
    }

    /// Keeps the gradients with all operands in the run's format, to which shares refer.
    pub(crate) fn set_all(&mut self, gradients: &[f32]) {
        self.all = gradients.to_vec();
    }

    /// Euclidean norm of the gradients in f32.
    pub(crate) fn norm(&self) -> f64 {
        squares_of(&self.reference, self.threads).sqrt()
    }

    /// Compares gradients.
    pub(crate) fn effect(&self, gradients: &[f32]) -> Effect {
        let mean = |of: &dyn Fn(&Range<usize>) -> f64| {
            let all = self.tensors.iter().map(|(_, range, weight)| weight * of(range));
            all.sum::<f64>() / self.tensors.len().max(1) as f64
        };
        let square = mean(&|range| self.dot(gradients, gradients, range));
        let error = Some(square.sqrt()).filter(|error| error.is_finite());
        let share = if self.all.is_empty() {
            None
        } else {
            let both = mean(&|range| self.dot(gradients, &self.all, range));
            let whole = mean(&|range| self.dot(&self.all, &self.all, range));
            Some(both / whole).filter(|share| share.is_finite())
        };
        Effect { error, share }
    }

    /// Relative error of each tensor, the largest first; those that are not finite before all.
    pub(crate) fn tensors(&self, gradients: &[f32]) -> Vec<(String, Option<f64>)> {
        let of = |(name, range, weight): &(String, Range<usize>, f64)| {
            let error = (weight * self.dot(gradients, gradients, range)).sqrt();
            (name.clone(), Some(error).filter(|error| error.is_finite()))
        };
        let mut all: Vec<_> = self.tensors.iter().map(of).collect();
        let key = |error: &Option<f64>| error.unwrap_or(f64::INFINITY);
        all.sort_by(|a, b| key(&b.1).total_cmp(&key(&a.1)));
        all
    }

    /// Sum of the products of two errors in a tensor.
    fn dot(&self, a: &[f32], b: &[f32], range: &Range<usize>) -> f64 {
        let (a, b, g) = (&a[range.clone()], &b[range.clone()], &self.reference[range.clone()]);
        let part = |at: Range<usize>| {
            let values = a[at.clone()].iter().zip(&b[at.clone()]).zip(&g[at]);
            values
                .map(|((a, b), g)| (f64::from(*a) - f64::from(*g)) * (f64::from(*b) - f64::from(*g)))
                .sum::<f64>()
        };
        map_reduce_fixed(self.threads, a.len(), PIECE, part, 0.0, |a, b| a + b)
    }
}

/// Sum of squares, the same for every number of threads.
fn squares_of(x: &[f32], threads: usize) -> f64 {
    let part = |at: Range<usize>| x[at].iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>();
    map_reduce_fixed(threads, x.len(), PIECE, part, 0.0, |a, b| a + b)
}

//! Muon (Jordan et al. 2024, <https://kellerjordan.github.io/posts/muon>): momentum, orthogonalized. For a matrix
//! `[rows, cols]` of a linear layer:
//!
//! ```text
//! b ← β b + (1 - β) g,  u = β b + (1 - β) g with Nesterov momentum, else u = b
//! X = u / (‖u‖ + 10⁻⁷), five times: A = X Xᵀ, X ← a X + (b A + c A²) X   (Newton-Schulz)
//! p ← p (1 - lr wd) - lr scale X
//! ```
//!
//! with (a, b, c) = (3.4445, -4.7750, 2.0315). The published iteration runs in bf16; here it is f32. `scale` is
//! `rms`: 0.2 √max(rows, cols), the RMS of AdamW's updates (Liu et al. 2025, "Muon is Scalable for LLM Training", arXiv
//! 2502.16982, section 2.2), so that learning rate and decay of AdamW fit; `jordan`: √max(1, rows / cols); `spectral`: √(rows / cols) (Bernstein
//! 2025, "Deriving Muon"); or `none`. torch.optim.Muon calls the first three `match_rms_adamw`, `original` (its default)
//! and `spectral_unclamped`.
//! Embeddings, head, norms and biases are updated by AdamW.

use std::sync::Arc;

use mantissa_kernels::kernels;
use mantissa_options::{Flag, OneOf, Within, options};

use super::adamw::AdamWMethod;
use super::keys::{MomentKeys, NamedFormat, OptimizerKeys, OptimizerKind, Whole};
use super::matrix::{Product, product, shape_of_linear};
use super::method::{Layout, State, Step, UpdateRule, UpdateTarget};
use super::moment_format::MomentFormat;
use crate::error::TrainError;
use crate::param_table::ParamInfo;

/// Coefficients of the iteration.
const COEFFICIENTS: (f32, f32, f32) = (3.4445, -4.7750, 2.0315);

/// Row of the registry.
pub(super) const KIND: OptimizerKind = OptimizerKind {
    name: "muon",
    about: "Muon (Jordan et al. 2024): orthogonalized momentum for linear weights, AdamW for the others",
    keys: || Box::<Keys>::default(),
};

options! {
    /// Own keys.
    #[derive(Clone, Debug)]
    struct Keys {
        ..moments: MomentKeys, "Format of the moments.";
        /// decay of the momentum
        momentum: f64 = 0.95, Within(0.0, 0.999_999);
        /// Nesterov momentum
        nesterov: bool = true, Flag;
        /// Newton-Schulz iterations
        iterations: f64 = 5.0, Whole(1, 20);
        /// factor of an update, by the shape of the weight
        scale: Scale = Scale::Rms, OneOf(&SCALES);
        /// AdamW of other tensors: decay of the first moment
        beta1: f64 = 0.9, Within(0.0, 0.999_999);
        /// AdamW of other tensors: decay of the second moment
        beta2: f64 = 0.95, Within(0.0, 0.999_999_9);
        /// AdamW of other tensors: term added to the root
        eps: f64 = 1e-8, Within(1e-30, 1.0);
    }
}

impl OptimizerKeys for Keys {
    fn moments(&self) -> &NamedFormat {
        &self.moments.moments
    }

    fn build(&self) -> Arc<dyn UpdateRule> {
        let moments = self.moments().format;
        Arc::new(Muon {
            momentum: self.momentum,
            nesterov: self.nesterov,
            iterations: self.iterations as u32,
            scale: self.scale,
            moments,
            others: AdamWMethod { beta1: self.beta1, beta2: self.beta2, eps: self.eps, moments },
        })
    }
}

/// Factor of an orthogonalized update.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Scale {
    Rms,
    Jordan,
    Spectral,
    None,
}

/// Factors by name.
const SCALES: [(&str, Scale); 4] =
    [("rms", Scale::Rms), ("jordan", Scale::Jordan), ("spectral", Scale::Spectral), ("none", Scale::None)];

impl Scale {
    fn of(self, rows: usize, cols: usize) -> f64 {
        match self {
            Scale::Rms => 0.2 * (rows.max(cols) as f64).sqrt(),
            Scale::Jordan => (rows as f64 / cols as f64).max(1.0).sqrt(),
            Scale::Spectral => (rows as f64 / cols as f64).sqrt(),
            Scale::None => 1.0,
        }
    }
}

/// Muon with its hyperparameters.
#[derive(Clone, Copy, Debug)]
struct Muon {
    momentum: f64,
    nesterov: bool,
    iterations: u32,
    scale: Scale,
    moments: MomentFormat,
    others: AdamWMethod,
}

impl UpdateRule for Muon {
    fn layout(&self, param: &ParamInfo) -> Layout {
        let Some((_, rows, cols)) = shape_of_linear(param) else { return self.others.layout(param) };
        let (n, side) = (param.range.len(), rows.min(cols));
        // Update and momentum; then one matrix, and three of its short side.
        let scratch = 2 * n + rows * cols + 3 * side * side;
        Layout { moments: vec![("m", false, self.moments)], scratch, ..Layout::default() }
    }

    fn update(
        &self,
        target: &mut UpdateTarget<'_>,
        state: &mut State,
        scratch: &mut [f32],
        step: &Step,
    ) -> Result<(), TrainError> {
        let Some((_, rows, cols)) = shape_of_linear(target.param) else {
            return self.others.update(target, state, scratch, step);
        };
        let (n, threads) = (target.len(), target.threads);
        let (u, rest) = scratch.split_at_mut(n);
        let (b, rest) = rest.split_at_mut(n);
        target.gradient(step.grad_scale as f32, u);
        for moment in &mut state.moments {
            moment.read_all(threads, b)?;
            let (beta, other) = (self.momentum as f32, (1.0 - self.momentum) as f32);
            for (u, b) in u.iter_mut().zip(&mut *b) {
                *b = beta * *b + other * *u;
                *u = if self.nesterov { beta * *b + other * *u } else { *b };
            }
            moment.write_all(threads, b)?;
        }
        for u in u.chunks_mut(rows * cols) {
            orthogonalize(u, (rows, cols), self.iterations, rest, threads);
        }
        let decay = 1.0 - step.lr * step.weight_decay;
        target.apply(u, step.lr * self.scale.of(rows, cols), decay)
    }
}

/// Replaces `x`, `[rows, cols]`, by an approximation of `U Vᵀ` of its singular value decomposition `U S Vᵀ`.
/// `scratch` holds a matrix, and three of its short side.
fn orthogonalize(
    x: &mut [f32],
    (rows, cols): (usize, usize),
    iterations: u32,
    scratch: &mut [f32],
    threads: usize,
) {
    let side = rows.min(cols);
    let (next, rest) = scratch.split_at_mut(rows * cols);
    let (gram, rest) = rest.split_at_mut(side * side);
    let (square, rest) = rest.split_at_mut(side * side);
    let factor = &mut rest[..side * side];
    let inverse = (1.0 / (kernels().sum_squares_f64(x).sqrt() + 1e-7)) as f32;
    x.iter_mut().for_each(|x| *x *= inverse);
    let (a, b, c) = COEFFICIENTS;
    for _ in 0..iterations {
        match rows <= cols {
            true => product(threads, Product::Nt, (rows, rows, cols), x, x, gram),
            false => product(threads, Product::Tn, (cols, cols, rows), x, x, gram),
        }
        product(threads, Product::Nn, (side, side, side), gram, gram, square);
        let terms = factor.iter_mut().zip(&*gram).zip(&*square);
        terms.for_each(|((to, gram), square)| *to = b * gram + c * square);
        match rows <= cols {
            true => product(threads, Product::Nn, (rows, cols, rows), factor, x, next),
            false => product(threads, Product::Nn, (rows, cols, cols), x, factor, next),
        }
        x.iter_mut().zip(&*next).for_each(|(x, next)| *x = a * *x + next);
    }
}

//! Adafactor (Shazeer & Stern 2018, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", arXiv 1804.04235,
//! alg. 4 and 5), with the semantics of transformers' `Adafactor`. For a matrix `[rows, cols]`, with the gradient `g`,
//! step `t` and `β2ₜ = 1 - t^decay_rate`:
//!
//! ```text
//! r ← β2ₜ r + (1 - β2ₜ) mean over columns of (g² + eps1)     [rows]
//! c ← β2ₜ c + (1 - β2ₜ) mean over rows of (g² + eps1)        [cols]
//! u = g / √(r / mean(r)) / √c;  for vectors u = g / √v with v ← β2ₜ v + (1 - β2ₜ)(g² + eps1)
//! u ← α u / max(1, RMS(u) / clip_threshold),  α = ρ max(eps2, RMS(p)) or ρ without scale_parameter
//! m ← β1 m + (1 - β1) u,  u = m                              with a first moment (beta1 > 0)
//! p ← p (1 - α wd) - u
//! ```
//!
//! `ρ` is the learning rate, or with `relative_step` the learning rate times `min(10⁻², 1/√t)` (`10⁻⁶ t` instead of
//! `10⁻²` with `warmup_init`): the published schedule is `lr = 1` and a constant schedule.

use std::sync::Arc;

use mantissa_kernels::kernels;
use mantissa_options::{Flag, Within, options};

use super::keys::{Fault, MomentKeys, NamedFormat, OptimizerKeys, OptimizerKind};
use super::matrix::shape;
use super::method::{Layout, State, Step, UpdateRule, UpdateTarget};
use super::moment_format::MomentFormat;
use crate::error::TrainError;
use crate::param_table::ParamInfo;

/// Row of the registry.
pub(super) const KIND: OptimizerKind = OptimizerKind {
    name: "adafactor",
    about: "Adafactor (Shazeer & Stern 2018): second moments as a row and a column per matrix",
    keys: || Box::<Keys>::default(),
};

options! {
    /// Own keys.
    #[derive(Clone, Debug)]
    struct Keys {
        ..moments: MomentKeys, "Format of the moments.";
        /// decay of the first moment; 0: none is kept
        beta1: f64 = 0.0, Within(0.0, 0.999_999);
        /// exponent of the step in the decay of the second moment
        decay_rate: f64 = -0.8, Within(-10.0, -1e-6);
        /// largest RMS of an update
        clip_threshold: f64 = 1.0, Within(1e-6, 1e30);
        /// term added to squared gradients
        eps1: f64 = 1e-30, Within(0.0, 1.0);
        /// smallest RMS of a tensor that scales its update
        eps2: f64 = 1e-3, Within(0.0, 1.0);
        /// updates are multiplied by the RMS of the tensor
        scale_parameter: bool = true, Flag;
        /// lr multiplies min(0.01, 1/√t)
        relative_step: bool = false, Flag;
        /// with relative_step: 1e-6 t instead of 0.01
        warmup_init: bool = false, Flag;
    }
}

impl OptimizerKeys for Keys {
    fn fault(&self) -> Option<Fault> {
        let alone = self.warmup_init && !self.relative_step;
        alone.then(|| ("warmup_init", "true".to_owned(), "false without relative_step = true"))
    }

    fn moments(&self) -> &NamedFormat {
        &self.moments.moments
    }

    fn build(&self) -> Arc<dyn UpdateRule> {
        Arc::new(Adafactor {
            beta1: self.beta1,
            decay_rate: self.decay_rate,
            clip_threshold: self.clip_threshold,
            eps: (self.eps1, self.eps2),
            scale_parameter: self.scale_parameter,
            relative_step: self.relative_step,
            warmup_init: self.warmup_init,
            moments: self.moments().format,
        })
    }
}

/// Adafactor with its hyperparameters.
#[derive(Clone, Copy, Debug)]
struct Adafactor {
    beta1: f64,
    decay_rate: f64,
    clip_threshold: f64,
    eps: (f64, f64),
    scale_parameter: bool,
    relative_step: bool,
    warmup_init: bool,
    moments: MomentFormat,
}

impl UpdateRule for Adafactor {
    fn layout(&self, param: &ParamInfo) -> Layout {
        let n = param.range.len();
        let first = (self.beta1 > 0.0).then_some(("m", false, self.moments)).into_iter().collect();
        let arrays = match shape(param) {
            Some((count, rows, cols)) => vec![("v_row", count * rows), ("v_col", count * cols)],
            None => vec![("v", n)],
        };
        // The update and, with a first moment, the moment.
        let columns = shape(param).map_or(0, |(_, _, cols)| cols);
        Layout { moments: first, arrays, scratch: n + columns.max(if self.beta1 > 0.0 { n } else { 0 }) }
    }

    fn update(
        &self,
        target: &mut UpdateTarget<'_>,
        state: &mut State,
        scratch: &mut [f32],
        step: &Step,
    ) -> Result<(), TrainError> {
        let n = target.len();
        let (u, rest) = scratch.split_at_mut(n);
        target.gradient(step.grad_scale as f32, u);
        let beta2 = 1.0 - (step.t as f64).powf(self.decay_rate);
        let arrays = &mut state.arrays;
        match (shape(target.param), &mut arrays[..]) {
            (Some((_, rows, cols)), [(_, row), (_, col)]) => {
                let matrices = u.chunks_mut(rows * cols).zip(row.chunks_mut(rows)).zip(col.chunks_mut(cols));
                matrices.for_each(|((u, row), col)| self.factored(beta2, u, row, col, rest));
            }
            (_, [(_, v)]) => self.unfactored(beta2, u, v),
            _ => {}
        }
        let rms = (kernels().sum_squares_f64(u) / n as f64).sqrt();
        let rate = self.rate(target, step);
        let factor = (rate / (rms / self.clip_threshold).max(1.0)) as f32;
        let decay = 1.0 - rate * step.weight_decay;
        if let [moment] = &mut state.moments[..] {
            let m = &mut rest[..n];
            moment.read_all(target.threads, m)?;
            let (beta1, other) = (self.beta1 as f32, (1.0 - self.beta1) as f32);
            m.iter_mut().zip(&*u).for_each(|(m, u)| *m = beta1 * *m + other * (u * factor));
            moment.write_all(target.threads, m)?;
            return target.apply(m, 1.0, decay);
        }
        u.iter_mut().for_each(|u| *u *= factor);
        target.apply(u, 1.0, decay)
    }
}

impl Adafactor {
    /// Updates row and column means with the gradient `g` of a matrix, which becomes the update.
    fn factored(&self, beta2: f64, g: &mut [f32], row: &mut [f32], col: &mut [f32], sums: &mut [f32]) {
        let (rows, cols) = (row.len(), col.len());
        let sums = &mut sums[..cols];
        sums.fill(0.0);
        let mean = |old: f32, new: f64| (beta2 * f64::from(old) + (1.0 - beta2) * (new + self.eps.0)) as f32;
        for (g, row) in g.chunks(cols).zip(&mut *row) {
            *row = mean(*row, kernels().sum_squares_f64(g) / cols as f64);
            sums.iter_mut().zip(g).for_each(|(sum, g)| *sum += g * g);
        }
        col.iter_mut().zip(&*sums).for_each(|(col, sum)| *col = mean(*col, f64::from(*sum) / rows as f64));
        let row_mean = row.iter().map(|r| f64::from(*r)).sum::<f64>() / rows as f64;
        sums.iter_mut().zip(&*col).for_each(|(factor, col)| *factor = 1.0 / col.sqrt());
        for (g, row) in g.chunks_mut(cols).zip(&*row) {
            let factor = (1.0 / (f64::from(*row) / row_mean).sqrt()) as f32;
            g.iter_mut().zip(&*sums).for_each(|(g, col)| *g *= factor * col);
        }
    }

    /// Updates the mean squares with the gradient `g`, which becomes the update.
    fn unfactored(&self, beta2: f64, g: &mut [f32], v: &mut [f32]) {
        let (beta2, other, eps) = (beta2 as f32, (1.0 - beta2) as f32, self.eps.0 as f32);
        for (g, v) in g.iter_mut().zip(v) {
            *v = beta2 * *v + other * (*g * *g + eps);
            *g /= v.sqrt();
        }
    }

    /// Returns the rate of a tensor.
    fn rate(&self, target: &mut UpdateTarget<'_>, step: &Step) -> f64 {
        let t = step.t as f64;
        let least = if self.warmup_init { 1e-6 * t } else { 1e-2 };
        let relative = if self.relative_step { least.min(1.0 / t.sqrt()) } else { 1.0 };
        let rms = |target: &mut UpdateTarget<'_>| (target.weight_squares() / target.len() as f64).sqrt();
        let scale = if self.scale_parameter { rms(target).max(self.eps.1) } else { 1.0 };
        step.lr * relative * scale
    }
}

//! Optimizers: [`registry`] lists them. A [`OptimizerSpec`] is an optimizer with its hyperparameters, an [`Optimizer`] one
//! with the state of a model: moments in 32, 16, 8 or 4 bits, in memory or in a file; master weights, weight decay
//! and learning rates by group, and gradient clipping.

mod adafactor;
mod adamw;
mod decay;
pub(crate) mod keys;
mod lion;
mod map;
mod master;
mod matrix;
mod method;
mod moment_format;
mod moments;
mod muon;
mod page_buffer;
pub(crate) mod registry;
mod sgd;
mod soap;
#[cfg(test)]
mod tests;

use std::path::Path;
use std::sync::Arc;

use mantissa_kernels::map_reduce_fixed;
use mantissa_model::{LoadError, Role, zeros};

use crate::arena::Parameters;
use crate::array::{Array, ArrayMut};
use crate::error::TrainError;
use crate::gradients::Gradients;
use crate::health::WeightCounts;
use crate::model::TrainModel;
use crate::pages::Unpaged;
use crate::param_table::{ParamInfo, ParamTable};
use crate::policy::Policy;
use crate::profile::StepPart;
pub use adamw::{AdamW, AdamWOptions};
pub use decay::{DecayGroups, NoSuchTensor, RateScales};
pub use map::StateMap;
pub(crate) use master::{MasterCopy, join as joined};
use method::{State, Step, UpdateRule, UpdateTarget};
pub use moment_format::MomentFormat;
use moment_format::PIECE;
use page_buffer::PageBuffer;
pub use registry::{optimizers, uses as optimizer_uses};
pub use sgd::{Sgd, SgdOptions};

/// Optimizer with its hyperparameters, without a state.
#[derive(Debug)]
pub struct OptimizerSpec {
    pub(crate) method: Arc<dyn UpdateRule>,
    pub(crate) weight_decay: f64,
    /// True if norm weights and biases decay too.
    pub(crate) decay_vectors: bool,
    pub(crate) max_norm: Option<f64>,
    /// True if moments lie in a file.
    pub(crate) paged: bool,
}

impl OptimizerSpec {
    /// Bytes of the optimizer state in memory.
    pub fn bytes(&self, table: &ParamTable, policy: &Policy) -> u64 {
        let layouts = table.iter().map(|param| (self.method.layout(param), param.range.len()));
        let (mut bytes, mut scratch) = (MasterCopy::bytes(policy.master, table), 0);
        for (layout, n) in layouts {
            bytes += layout.bytes(n, self.paged).0;
            scratch = scratch.max(layout.scratch(n));
        }
        bytes + 4 * scratch as u64
    }

    /// Bytes of the moments in a file.
    pub fn paged_bytes(&self, table: &ParamTable) -> u64 {
        table.iter().map(|param| self.method.layout(param).bytes(param.range.len(), self.paged).1).sum()
    }

    /// Bytes of the buffers of `threads` threads that read and write moments in a file.
    pub fn page_buffers(&self, threads: usize) -> u64 {
        if self.paged { PageBuffer::BYTES * threads.max(1) as u64 } else { 0 }
    }
}

/// Optimizer of a run.
#[derive(Debug)]
pub struct Optimizer {
    method: Arc<dyn UpdateRule>,
    weight_decay: f64,
    max_norm: Option<f64>,
    /// State per parameter.
    states: Vec<State>,
    /// Weight decay flag per parameter.
    decays: Vec<bool>,
    /// Factor of the learning rate per parameter.
    rates: Vec<f64>,
    /// f32 buffer of an update, as long as the largest one.
    scratch: Vec<f32>,
    master: MasterCopy,
    pages: Option<Unpaged>,
    /// Number of steps done.
    steps: u64,
}

impl Optimizer {
    /// Allocates a fresh state of `recipe` for the f32 weights `params`, trained with `policy`. Matrices decay. A
    /// paged state needs [`open_pages`](Self::open_pages) before the first step.
    ///
    /// # Errors
    /// [`LoadError::Memory`].
    pub fn new(params: &Parameters, policy: &Policy, recipe: &OptimizerSpec) -> Result<Self, LoadError> {
        let table = params.table();
        let mut pages = recipe.paged.then(Unpaged::default);
        let (mut states, mut longest) = (Vec::new(), 0);
        for param in table.iter() {
            let (layout, n) = (recipe.method.layout(param), param.range.len());
            longest = longest.max(layout.scratch(n));
            states.push(State::new(&layout, n, pages.as_mut())?);
        }
        let memory = LoadError::Memory { what: "optimizer state", bytes: 4 * longest as u64 };
        Ok(Optimizer {
            method: Arc::clone(&recipe.method),
            weight_decay: recipe.weight_decay,
            max_norm: recipe.max_norm,
            rates: vec![1.0; states.len()],
            states,
            decays: decays_by_role(table, recipe.decay_vectors),
            scratch: zeros(longest).ok_or(memory)?,
            master: MasterCopy::new(policy.master, params)?,
            pages,
            steps: 0,
        })
    }

    /// Number of steps done.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Sets weight decay to the tensors that `groups` select of `table`.
    ///
    /// # Errors
    /// [`NoSuchTensor`] for an entry that matches no tensor.
    pub fn with_decay(mut self, groups: &DecayGroups, table: &ParamTable) -> Result<Self, NoSuchTensor> {
        self.decays = groups.select(table)?;
        Ok(self)
    }

    /// Multiplies the learning rate of the tensors that `scales` select of `table`.
    ///
    /// # Errors
    /// [`NoSuchTensor`] for an entry that matches no tensor.
    pub fn with_rates(mut self, scales: &RateScales, table: &ParamTable) -> Result<Self, NoSuchTensor> {
        self.rates = scales.select(table)?;
        Ok(self)
    }

    /// Bytes of the moments in a file.
    pub fn paged_bytes(&self) -> u64 {
        self.pages.as_ref().map_or(0, Unpaged::bytes)
    }

    /// True if the weights are all that keeps an update: there is no master copy, and rounding is to nearest.
    pub(crate) fn rounds_updates(&self) -> bool {
        self.master == MasterCopy::None
    }

    /// Factors of the learning rate of the parameters.
    pub(crate) fn rates(&self) -> &[f64] {
        &self.rates
    }

    /// Creates the file of a paged state in the folder `dir`, and removes its name; does nothing for other states.
    ///
    /// # Errors
    /// [`TrainError::Store`] if the file cannot be created, or the disk is too small.
    pub fn open_pages(&self, dir: &Path) -> Result<(), TrainError> {
        let Some(pages) = &self.pages else { return Ok(()) };
        pages.open(&dir.join("optimizer.pages"))
    }

    /// Updates `model`'s parameters from its gradients with learning rate `lr`; returns the gradient norm
    /// before clipping. `loss_scale` is divided out of the gradients.
    ///
    /// # Errors
    /// [`TrainError::NonFinite`] if the norm is not finite, [`TrainError::OtherModel`]; parameters and state
    /// are then unchanged. [`TrainError::Store`] if a paged state cannot be read or written; parameters and state
    /// must not be used afterwards.
    pub fn step(&mut self, model: &mut TrainModel, lr: f64, loss_scale: f64) -> Result<f64, TrainError> {
        self.counted_step(model, lr, loss_scale, None)
    }

    /// Steps like [`step`](Self::step), and counts underflow and saturation per parameter in `counts`.
    pub(crate) fn counted_step(
        &mut self,
        model: &mut TrainModel,
        lr: f64,
        loss_scale: f64,
        counts: Option<&[WeightCounts]>,
    ) -> Result<f64, TrainError> {
        let norm = finite_norm(model, self.states.len(), self.steps + 1, loss_scale)?;
        self.steps += 1;
        let grad_scale = self.max_norm.map_or(1.0, |max| clip_factor(norm, max)) / loss_scale;
        let (threads, t, grads) = (model.options.threads, self.steps, &model.grads);
        let (table, working) = model.params.split_mut();
        model.profile.time(StepPart::Optimizer, || {
            table.iter().zip(&mut self.states).enumerate().try_for_each(|(i, (param, state))| {
                let counts = counts.map(|counts| &counts[i]);
                let weight_decay = if self.decays[i] { self.weight_decay } else { 0.0 };
                let step = Step { t, lr: lr * self.rates[i], weight_decay, grad_scale };
                working.open(param, threads);
                let master = &mut self.master;
                let mut target =
                    UpdateTarget { param, threads, grads, working: &mut *working, master, counts, t };
                self.method.update(&mut target, state, &mut self.scratch, &step)?;
                self.master.settle(param, working, t, threads);
                Ok::<_, TrainError>(())
            })
        })?;
        Ok(norm)
    }

    /// Returns every array of the state with its name, in table order.
    pub fn arrays(&self, table: &ParamTable) -> Vec<(String, Array<'_>)> {
        let mut all = Vec::new();
        for (param, state) in table.iter().zip(&self.states) {
            let named = state.arrays().into_iter();
            all.extend(named.map(|(what, array)| (format!("{what}.{}", param.tensor.name), array)));
        }
        all.extend(self.master.array().map(|array| ("master".to_owned(), array)));
        all
    }

    /// Returns the same arrays for restoring a checkpoint; sets the number of steps done.
    pub fn restore(&mut self, table: &ParamTable, steps: u64) -> Vec<(String, ArrayMut<'_>)> {
        self.steps = steps;
        let mut all = Vec::new();
        for (param, state) in table.iter().zip(&mut self.states) {
            let named = state.arrays_mut().into_iter();
            all.extend(named.map(|(what, array)| (format!("{what}.{}", param.tensor.name), array)));
        }
        all.extend(self.master.array_mut().map(|array| ("master".to_owned(), array)));
        all
    }
}

/// Default weight decay flags: matrices, and vectors if `vectors`.
fn decays_by_role(table: &ParamTable, vectors: bool) -> Vec<bool> {
    let vector = |param: &ParamInfo| matches!(param.tensor.role, Role::Norm { .. } | Role::Bias { .. });
    table.iter().map(|param| vectors || !vector(param)).collect()
}

/// Returns the unscaled gradient norm before step `step`, for an optimizer state of `found` parameters; fails
/// if not finite.
fn finite_norm(model: &TrainModel, found: usize, step: u64, loss_scale: f64) -> Result<f64, TrainError> {
    let allowed = model.params.table().iter().count();
    if found != allowed {
        return Err(TrainError::OtherModel { found, allowed });
    }
    let norm =
        model.profile.time(StepPart::Optimizer, || norm(&model.grads, model.options.threads)) / loss_scale;
    if norm.is_finite() { Ok(norm) } else { Err(TrainError::NonFinite { step, norm }) }
}

/// Returns the global gradient norm, summed in f64 in fixed pieces.
fn norm(grads: &Gradients, threads: usize) -> f64 {
    let squares = |range| grads.sum_squares(range);
    map_reduce_fixed(threads, grads.len(), PIECE, squares, 0.0, |a, b| a + b).sqrt()
}

/// Returns the factor that scales gradients of `norm` to at most `max`, as in PyTorch's `clip_grad_norm_`.
pub fn clip_factor(norm: f64, max: f64) -> f64 {
    (max / (norm + 1e-6)).min(1.0)
}

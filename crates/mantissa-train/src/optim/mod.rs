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

use std::ops::Range;
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
use crate::param_table::{ParamInfo, ParamTable, within};
use crate::policy::{Master, Policy};
use crate::profile::StepPart;
use crate::shards::{PIECE, cut};
pub use adamw::{AdamW, AdamWOptions};
pub use decay::{DecayGroups, NoSuchTensor, RateScales};
pub use map::StateMap;
pub(crate) use master::{MasterCopy, join as joined};
pub(crate) use method::UpdateRule;
use method::{State, Step, UpdateTarget};
pub use moment_format::MomentFormat;
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
        let (mut bytes, mut scratch) = (MasterCopy::bytes(policy.master, table.len()), 0);
        for (layout, n) in layouts {
            bytes += layout.bytes(n, self.paged).0;
            scratch = scratch.max(layout.scratch(n));
        }
        bytes + 4 * scratch as u64
    }

    /// Cuts the parameters of `table` into the parts that `ranks` ranks update.
    pub fn shards(&self, table: &ParamTable, policy: &Policy, ranks: usize) -> Vec<Range<usize>> {
        cut(table, |param| is_elementwise(&*self.method, policy.master, param), ranks)
    }

    /// Bytes of the largest part of the optimizer state in memory that one of `ranks` ranks keeps.
    pub fn bytes_of_rank(&self, table: &ParamTable, policy: &Policy, ranks: usize) -> u64 {
        let shards = self.shards(table, policy, ranks);
        let of = |shard: &Range<usize>| {
            let params =
                table.iter().map(|param| (self.method.layout(param), within(&param.range, shard).len()));
            let (mut bytes, mut scratch) = (MasterCopy::bytes(policy.master, shard.len()), 0);
            for (layout, n) in params.filter(|(_, n)| *n > 0) {
                bytes += layout.bytes(n, self.paged).0;
                scratch = scratch.max(layout.scratch(n));
            }
            bytes + 4 * scratch as u64
        };
        shards.iter().map(of).max().unwrap_or(0)
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
    /// Kind of the master copy.
    kind: Master,
    pages: Option<Unpaged>,
    /// Part of the parameters that it updates; `None` for all.
    shard: Option<Range<usize>>,
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
        Self::allocate(params, policy, recipe, None)
    }

    /// Allocates the part of a fresh state that rank `rank` of `ranks` keeps, for the same weights on every rank.
    ///
    /// # Errors
    /// [`LoadError::Memory`].
    pub fn for_rank(
        params: &Parameters,
        policy: &Policy,
        recipe: &OptimizerSpec,
        (rank, ranks): (usize, usize),
    ) -> Result<Self, LoadError> {
        let shard = recipe.shards(params.table(), policy, ranks).swap_remove(rank);
        Self::allocate(params, policy, recipe, Some(shard))
    }

    fn allocate(
        params: &Parameters,
        policy: &Policy,
        recipe: &OptimizerSpec,
        shard: Option<Range<usize>>,
    ) -> Result<Self, LoadError> {
        let table = params.table();
        let mut pages = recipe.paged.then(Unpaged::default);
        let (mut states, mut longest) = (Vec::new(), 0);
        for param in table.iter() {
            let held =
                shard.as_ref().map_or_else(|| param.range.clone(), |shard| within(&param.range, shard));
            if held.is_empty() && shard.is_some() {
                states.push(State::default());
                continue;
            }
            let (layout, n) = (recipe.method.layout(param), held.len());
            longest = longest.max(layout.scratch(n));
            states.push(State::new(&layout, n, pages.as_mut())?);
        }
        let memory = LoadError::Memory { what: "optimizer state", bytes: 4 * longest as u64 };
        let kept = shard.clone().unwrap_or(0..table.len());
        Ok(Optimizer {
            method: Arc::clone(&recipe.method),
            weight_decay: recipe.weight_decay,
            max_norm: recipe.max_norm,
            rates: vec![1.0; states.len()],
            states,
            decays: decays_by_role(table, recipe.decay_vectors),
            scratch: zeros(longest).ok_or(memory)?,
            master: MasterCopy::new(policy.master, params, kept)?,
            kind: policy.master,
            pages,
            shard,
            steps: 0,
        })
    }

    /// Returns the parts of the parameters of `table` that each of `ranks` ranks reduces and, with ZeRO, updates.
    pub(crate) fn shards(&self, table: &ParamTable, ranks: usize) -> Vec<Range<usize>> {
        cut(table, |param| is_elementwise(&*self.method, self.kind, param), ranks)
    }

    /// Returns the f32 master weights of `range`, which it keeps; `None` without such a copy.
    pub(crate) fn master(&self, range: &Range<usize>) -> Option<&[f32]> {
        self.master.f32(range)
    }

    /// Returns the part of the parameters that it updates; `None` for all.
    pub(crate) fn shard(&self) -> Option<&Range<usize>> {
        self.shard.as_ref()
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

    /// Creates the file of a paged state of rank `rank` in the folder `dir`, and removes its name; does nothing for other states.
    ///
    /// # Errors
    /// [`TrainError::Store`] if the file cannot be created, or the disk is too small.
    pub fn open_pages(&self, dir: &Path, rank: usize) -> Result<(), TrainError> {
        let Some(pages) = &self.pages else { return Ok(()) };
        let of_rank = if rank == 0 { String::new() } else { format!(".{rank}") };
        pages.open(&dir.join(format!("optimizer{of_rank}.pages")))
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
        let norm = model.profile.time(StepPart::Optimizer, || norm(&model.grads, model.options.threads));
        self.step_with_norm(model, lr, loss_scale, (norm / loss_scale, counts))
    }

    /// Steps like [`counted_step`](Self::counted_step) with the norm of the gradients of all ranks: updates the
    /// [kept](Self::for_rank) part of the parameters from its gradients.
    pub(crate) fn step_with_norm(
        &mut self,
        model: &mut TrainModel,
        lr: f64,
        loss_scale: f64,
        (norm, counts): (f64, Option<&[WeightCounts]>),
    ) -> Result<f64, TrainError> {
        let (found, allowed) = (self.states.len(), model.params.table().iter().count());
        if found != allowed {
            return Err(TrainError::OtherModel { found, allowed });
        }
        if !norm.is_finite() {
            return Err(TrainError::NonFinite { step: self.steps + 1, norm });
        }
        self.steps += 1;
        let grad_scale = self.max_norm.map_or(1.0, |max| clip_factor(norm, max)) / loss_scale;
        let (threads, t, grads) = (model.options.threads, self.steps, &model.grads);
        let (table, working) = model.params.split_mut();
        let shard = self.shard.as_ref();
        model.profile.time(StepPart::Optimizer, || {
            table.iter().zip(&mut self.states).enumerate().try_for_each(|(i, (param, state))| {
                let held =
                    shard.map(|shard| ParamInfo { range: within(&param.range, shard), ..param.clone() });
                let param = held.as_ref().unwrap_or(param);
                if held.is_some() && param.range.is_empty() {
                    return Ok(());
                }
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

    /// Returns the arrays of the state that it keeps of each parameter, in table order, then those of the master weights.
    pub(crate) fn parts(&self) -> Vec<Vec<(String, Array<'_>)>> {
        let master = self.master.array().map(|array| ("master".to_owned(), array));
        self.states.iter().map(State::arrays).chain([master.into_iter().collect()]).collect()
    }

    /// Returns the same arrays for restoring a checkpoint; sets the number of steps done.
    pub(crate) fn parts_mut(&mut self, steps: u64) -> Vec<Vec<(String, ArrayMut<'_>)>> {
        self.steps = steps;
        let master = self.master.array_mut().map(|array| ("master".to_owned(), array));
        self.states.iter_mut().map(State::arrays_mut).chain([master.into_iter().collect()]).collect()
    }

    /// Returns every array of the state with its name, in table order.
    pub fn arrays(&self, table: &ParamTable) -> Vec<(String, Array<'_>)> {
        named(self.parts(), table).collect()
    }

    /// Returns the same arrays for restoring a checkpoint; sets the number of steps done.
    pub fn restore(&mut self, table: &ParamTable, steps: u64) -> Vec<(String, ArrayMut<'_>)> {
        named(self.parts_mut(steps), table).collect()
    }
}

/// Adds the names of the parameters of `table` to those of the parts of their states.
fn named<T>(parts: Vec<Vec<(String, T)>>, table: &ParamTable) -> impl Iterator<Item = (String, T)> {
    let tensors = table.iter().map(|param| Some(&param.tensor.name)).chain([None]);
    parts.into_iter().zip(tensors).flat_map(|(arrays, tensor)| {
        let name =
            move |what: String| tensor.map_or_else(|| what.clone(), |tensor| format!("{what}.{tensor}"));
        arrays.into_iter().map(move |(what, array)| (name(what), array))
    })
}

/// True if parts of a parameter can be updated apart by `method`: INT8 matrices are rounded as a whole.
fn is_elementwise(method: &dyn UpdateRule, master: Master, param: &ParamInfo) -> bool {
    method.is_elementwise(param) && !matches!(master, Master::Int8 { .. })
}

/// Default weight decay flags: matrices, and vectors if `vectors`.
fn decays_by_role(table: &ParamTable, vectors: bool) -> Vec<bool> {
    let vector = |param: &ParamInfo| matches!(param.tensor.role, Role::Norm { .. } | Role::Bias { .. });
    table.iter().map(|param| vectors || !vector(param)).collect()
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

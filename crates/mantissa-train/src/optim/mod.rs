//! Optimizers: AdamW with moments in f32, bf16 or 8 bits, and SGD with momentum; master weights, weight decay
//! groups, and gradient clipping.

mod decay;
mod map;
mod master;
mod moments;
mod sgd;

use std::cell::RefCell;

use mantissa_kernels::{AdamWStep, for_each, kernels, map_reduce_fixed};
use mantissa_model::{LoadError, Role};

use crate::arena::{ParamInfo, ParamTable, Parameters};
use crate::blockwise::{BLOCK, BlockwiseRule, BlockwiseStep};
use crate::error::TrainError;
use crate::gradients::Gradients;
use crate::health::WeightCounts;
use crate::model::TrainModel;
use crate::policy::Policy;
use crate::profile::Part;
use crate::store::StoreRef;
pub(crate) use decay::matches;
pub use decay::{DecayGroups, NoSuchTensor};
pub use map::StateMap;
pub(crate) use master::{MasterCopy, join as joined};
use master::{MasterMut, WorkingMut, read, write};
pub use moments::{Array, ArrayMut, MomentFormat};
use moments::{Moments, MomentsMut};
pub use sgd::{Sgd, SgdOptions};

/// Elements per thread task; sums are taken over pieces of this size, in order.
const PIECE: usize = 1 << 16;

/// Hyperparameters of AdamW.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWOptions {
    /// Decay rate of the first moment.
    pub beta1: f64,
    /// Decay rate of the second moment.
    pub beta2: f64,
    /// Term added to the square root of the bias-corrected second moment.
    pub eps: f64,
    /// Decoupled weight decay, multiplied by the learning rate each step.
    pub weight_decay: f64,
    /// True if norm weights and biases decay too, as in PyTorch's default parameter group.
    pub decay_vectors: bool,
    /// Maximum global gradient norm; larger gradients are scaled down to it.
    pub max_norm: Option<f64>,
    /// Storage format of the moments.
    pub moments: MomentFormat,
}

impl Default for AdamWOptions {
    /// Uses PyTorch's betas, eps and weight decay; vectors do not decay, no clipping.
    fn default() -> Self {
        AdamWOptions {
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 1e-2,
            decay_vectors: false,
            max_norm: None,
            moments: MomentFormat::F32,
        }
    }
}

/// AdamW (Loshchilov & Hutter 2019, alg. 2) with PyTorch's order of operations (see [`AdamWStep`]), or
/// bitsandbytes' for 8-bit moments (see [`crate::blockwise`]).
#[derive(Clone, Debug)]
pub struct AdamW {
    options: AdamWOptions,
    /// Moments per parameter.
    moments: Vec<Moments>,
    /// Weight decay flag per parameter.
    decays: Vec<bool>,
    /// f32 buffer for moments that are decoded a whole parameter at a time.
    decoded: Moments,
    master: MasterCopy,
    /// Number of steps done.
    steps: u64,
}

/// Elements of a parameter that one thread updates at a time.
struct Piece<'a> {
    /// Arena index of the first element.
    first: usize,
    working: WorkingMut<'a>,
    master: MasterMut<'a>,
    moments: MomentsMut<'a>,
    grads: StoreRef<'a>,
}

/// Constants of one step, for parameters with or without weight decay.
#[derive(Clone, Copy)]
struct Factors {
    step: AdamWStep,
    eight: BlockwiseStep,
}

impl AdamW {
    /// Allocates a fresh state for the f32 weights `params`, trained with `policy`.
    ///
    /// # Errors
    /// [`LoadError::Memory`].
    pub fn new(params: &Parameters, policy: &Policy, options: AdamWOptions) -> Result<Self, LoadError> {
        let table = params.table();
        let moments = |param: &ParamInfo| Moments::new(options.moments, param.range.len(), true);
        Ok(AdamW {
            options,
            moments: table.iter().map(moments).collect::<Result<_, _>>()?,
            decays: decays_by_role(table, options.decay_vectors),
            decoded: Moments::new(MomentFormat::F32, options.moments.decoded(table), true)?,
            master: MasterCopy::new(policy.master, params)?,
            steps: 0,
        })
    }

    /// Bytes of the optimizer state.
    pub fn bytes(table: &ParamTable, policy: &Policy, moments: MomentFormat) -> u64 {
        moments.table_bytes(table, true) + MasterCopy::bytes(policy.master, table)
    }

    /// Number of steps done.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Updates `model`'s parameters from its gradients with learning rate `lr`; returns the gradient norm
    /// before clipping. `loss_scale` is divided out of the gradients.
    ///
    /// # Errors
    /// [`TrainError::NonFinite`] if the norm is not finite, [`TrainError::OtherModel`]; parameters and state
    /// are then unchanged.
    pub fn step(&mut self, model: &mut TrainModel, lr: f64, loss_scale: f64) -> Result<f64, TrainError> {
        self.counted_step(model, lr, loss_scale, None)
    }

    /// Steps like [`step`](Self::step), and counts underflow and saturation per parameter in `counts`.
    fn counted_step(
        &mut self,
        model: &mut TrainModel,
        lr: f64,
        loss_scale: f64,
        counts: Option<&[WeightCounts]>,
    ) -> Result<f64, TrainError> {
        let norm = finite_norm(model, self.moments.len(), self.steps + 1, loss_scale)?;
        let threads = model.options.threads;
        self.steps += 1;
        let factor = self.options.max_norm.map_or(1.0, |max| clip_factor(norm, max)) / loss_scale;
        let decayed = self.factors(lr, self.options.weight_decay, factor);
        let plain = self.factors(lr, 0.0, factor);
        // 8-bit maps are decoded a whole parameter at a time; other formats are updated in place.
        let steps = self.steps;
        let (table, working) = model.params.split_mut();
        model.profile.time(Part::Optimizer, || {
            for (i, (param, moments)) in table.iter().zip(&mut self.moments).enumerate() {
                let factors = if self.decays[i] { &decayed } else { &plain };
                let counts = counts.map(|counts| &counts[i]);
                let whole = moments.decode(&mut self.decoded);
                let current = if whole { &mut self.decoded } else { &mut *moments };
                let range = param.range.clone();
                let firsts = range.clone().step_by(PIECE);
                let pieces = firsts
                    .zip(working.pieces(range.clone(), PIECE))
                    .zip(self.master.pieces(range.clone(), PIECE))
                    .zip(current.pieces(PIECE));
                let pieces = pieces.map(|(((first, working), master), moments)| {
                    let grads = model.grads.get(first..range.end.min(first + PIECE));
                    Piece { first, working, master, moments, grads }
                });
                for_each(threads, pieces, |piece| piece.update(factors, steps, counts));
                if whole {
                    moments.encode(&self.decoded);
                }
                self.master.settle(param, working, steps, threads);
            }
        });
        Ok(norm)
    }

    /// Returns every array of the state with its name, in table order.
    pub fn arrays(&self, table: &ParamTable) -> Vec<(String, Array<'_>)> {
        let mut all = Vec::new();
        for (param, moments) in table.iter().zip(&self.moments) {
            let named = moments.arrays().into_iter();
            all.extend(named.map(|(what, array)| (format!("{what}.{}", param.tensor.name), array)));
        }
        all.extend(self.master.array().map(|array| ("master".to_owned(), array)));
        all
    }

    /// Returns the same arrays for restoring a checkpoint; sets the number of steps done.
    pub fn restore(&mut self, table: &ParamTable, steps: u64) -> Vec<(String, ArrayMut<'_>)> {
        self.steps = steps;
        let mut all = Vec::new();
        for (param, moments) in table.iter().zip(&mut self.moments) {
            let named = moments.arrays_mut().into_iter();
            all.extend(named.map(|(what, array)| (format!("{what}.{}", param.tensor.name), array)));
        }
        all.extend(self.master.array_mut().map(|array| ("master".to_owned(), array)));
        all
    }

    /// Computes the constants of step `self.steps` in f64, as PyTorch does.
    fn factors(&self, lr: f64, weight_decay: f64, grad_scale: f64) -> Factors {
        let AdamWOptions { beta1, beta2, eps, moments, .. } = self.options;
        let t = self.steps as f64;
        let step = AdamWStep {
            grad_scale: grad_scale as f32,
            decay: (1.0 - lr * weight_decay) as f32,
            one_minus_beta1: (1.0 - beta1) as f32,
            beta2: beta2 as f32,
            one_minus_beta2: (1.0 - beta2) as f32,
            sqrt_correction2: (1.0 - beta2.powf(t)).sqrt() as f32,
            eps: eps as f32,
            step_size: (lr / (1.0 - beta1.powf(t))) as f32,
        };
        let rule = match moments {
            MomentFormat::Blockwise8(rule) => rule,
            _ => BlockwiseRule::default(),
        };
        let eight = BlockwiseStep::new(rule, (beta1, beta2, eps), lr, weight_decay, self.steps, grad_scale);
        Factors { step, eight }
    }
}

impl Piece<'_> {
    fn update(self, factors: &Factors, steps: u64, counts: Option<&WeightCounts>) {
        let Piece { first, mut working, mut master, mut moments, grads } = self;
        if let (WorkingMut::F32(p), MasterMut::None, MomentsMut::F32 { m, v }, StoreRef::F32(g), None) =
            (&mut working, &master, &mut moments, grads, counts)
        {
            kernels().adamw(&factors.step, p, g, m, v);
            // Everything in f32 and nothing to count: the kernel updates the piece directly.
            return;
        }
        let mut g = [0.0; BLOCK];
        by_blocks(&mut working, &mut master, grads.len(), (first as u64, steps), counts, |block, p| {
            let at = block * BLOCK;
            let g = &mut g[..p.len()];
            grads.slice(at..at + p.len()).widen(g);
            // Only one of the two closures is called, but both borrow the weights.
            let shared = RefCell::new(p);
            moments.block(
                block,
                |m, v| kernels().adamw(&factors.step, &mut shared.borrow_mut(), g, m, v),
                |m, v| factors.eight.block(&mut shared.borrow_mut(), g, m, v),
            );
        });
    }
}

/// Passes the weights of a piece to `update` as f32, block by block, and stores the results. `place` is the
/// arena index of the first weight and the number of the update.
fn by_blocks(
    working: &mut WorkingMut<'_>,
    master: &mut MasterMut<'_>,
    len: usize,
    place: (u64, u64),
    counts: Option<&WeightCounts>,
    mut update: impl FnMut(usize, &mut [f32]),
) {
    let (mut p, mut before, mut after) = ([0.0; BLOCK], [0.0; BLOCK], [0.0; BLOCK]);
    let (mut exact, mut updates, mut weights) = ([0.0; BLOCK], 0.0, 0.0);
    for block in 0..len.div_ceil(BLOCK) {
        let at = block * BLOCK;
        let p = &mut p[..BLOCK.min(len - at)];
        let (before, after) = (&mut before[..p.len()], &mut after[..p.len()]);
        read(working, master, at, p);
        if counts.is_some() {
            read(working, &MasterMut::None, at, before);
            exact[..p.len()].copy_from_slice(p);
        }
        update(block, p);
        write(working, master, at, p, place);
        if let Some(counts) = counts {
            read(working, &MasterMut::None, at, after);
            counts.add(p, before, after);
            for (new, old) in p.iter().zip(&exact) {
                let (step, old) = (f64::from(*new) - f64::from(*old), f64::from(*old));
                updates += step * step;
                weights += old * old;
            }
        }
    }
    if let Some(counts) = counts {
        counts.add_squares(place.0, updates, weights);
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
    let norm = model.profile.time(Part::Optimizer, || norm(&model.grads, model.options.threads)) / loss_scale;
    if norm.is_finite() { Ok(norm) } else { Err(TrainError::NonFinite { step, norm }) }
}

/// Optimizer of a run.
#[derive(Clone, Debug)]
pub enum Optimizer {
    /// AdamW.
    AdamW(AdamW),
    /// SGD.
    Sgd(Sgd),
}

impl From<AdamW> for Optimizer {
    fn from(optimizer: AdamW) -> Self {
        Optimizer::AdamW(optimizer)
    }
}

impl From<Sgd> for Optimizer {
    fn from(optimizer: Sgd) -> Self {
        Optimizer::Sgd(optimizer)
    }
}

impl Optimizer {
    /// Number of steps done.
    pub fn steps(&self) -> u64 {
        match self {
            Optimizer::AdamW(adamw) => adamw.steps(),
            Optimizer::Sgd(sgd) => sgd.steps(),
        }
    }

    /// Sets weight decay to the tensors that `groups` select of `table`.
    ///
    /// # Errors
    /// [`NoSuchTensor`] for an entry that matches no tensor.
    pub fn with_decay(mut self, groups: &DecayGroups, table: &ParamTable) -> Result<Self, NoSuchTensor> {
        let decays = groups.select(table)?;
        match &mut self {
            Optimizer::AdamW(adamw) => adamw.decays = decays,
            Optimizer::Sgd(sgd) => sgd.set_decays(decays),
        }
        Ok(self)
    }

    /// Updates `model`'s parameters from its gradients with learning rate `lr`; returns the gradient norm
    /// before clipping. `loss_scale` is divided out of the gradients. `counts`, one per parameter, count
    /// underflow and saturation of the weights.
    ///
    /// # Errors
    /// [`TrainError::NonFinite`] if the norm is not finite, [`TrainError::OtherModel`]; parameters and state
    /// are then unchanged.
    pub(crate) fn step(
        &mut self,
        model: &mut TrainModel,
        lr: f64,
        loss_scale: f64,
        counts: Option<&[WeightCounts]>,
    ) -> Result<f64, TrainError> {
        match self {
            Optimizer::AdamW(adamw) => adamw.counted_step(model, lr, loss_scale, counts),
            Optimizer::Sgd(sgd) => sgd.step(model, lr, loss_scale, counts),
        }
    }

    /// Returns every array of the state with its name, in table order.
    pub(crate) fn arrays(&self, table: &ParamTable) -> Vec<(String, Array<'_>)> {
        match self {
            Optimizer::AdamW(adamw) => adamw.arrays(table),
            Optimizer::Sgd(sgd) => sgd.arrays(table),
        }
    }

    /// Returns the same arrays for restoring a checkpoint; sets the number of steps done.
    pub(crate) fn restore(&mut self, table: &ParamTable, steps: u64) -> Vec<(String, ArrayMut<'_>)> {
        match self {
            Optimizer::AdamW(adamw) => adamw.restore(table, steps),
            Optimizer::Sgd(sgd) => sgd.restore(table, steps),
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_norm_has_the_same_bits_at_every_thread_count() {
        let config = serde_json::json!({
            "model_type": "llama", "hidden_size": 96, "intermediate_size": 288, "num_hidden_layers": 1,
            "num_attention_heads": 2, "vocab_size": 1000, "max_position_embeddings": 8, "rms_norm_eps": 1e-5
        });
        let Ok(config) = mantissa_model::ModelConfig::from_json(&config, "config") else { return };
        let table = ParamTable::new(&config);
        let values: Vec<f32> = (0..table.len()).map(|i| (i as f32 * 0.37).sin()).collect();
        let Ok(mut arena) = Gradients::new(&table, crate::Precision::F32) else { return };
        arena.add(0..table.len(), |to| to.copy_from_slice(&values));
        let (grads, norm) = (&values, |_: &Vec<f32>, threads| norm(&arena, threads));
        let one = norm(grads, 1);
        let exact: f64 = grads.iter().map(|&g| f64::from(g) * f64::from(g)).sum();
        assert!((one - exact.sqrt()).abs() < 1e-9);
        assert!([2, 3, 7].iter().all(|&threads| norm(grads, threads).to_bits() == one.to_bits()));
    }

    #[test]
    fn clipping_only_scales_down() {
        assert_eq!(clip_factor(0.5, 1.0), 1.0);
        assert!((clip_factor(4.0, 1.0) - 0.25).abs() < 1e-6);
        assert_eq!(clip_factor(0.0, 1.0), 1.0);
    }
}

//! Stochastic gradient descent with momentum.

use mantissa_kernels::for_each;
use mantissa_model::{LoadError, zeros};

use super::{Array, ArrayMut, BLOCK, MasterCopy, PIECE, by_blocks, clip_factor, decays_by_role, finite_norm};
use crate::arena::{ParamTable, Parameters};
use crate::error::TrainError;
use crate::health::WeightCounts;
use crate::model::TrainModel;
use crate::policy::Policy;
use crate::profile::Part;

/// Hyperparameters of SGD.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SgdOptions {
    /// Momentum factor; 0 keeps no buffer.
    pub momentum: f64,
    /// True for Nesterov momentum (Sutskever et al. 2013, in PyTorch's form).
    pub nesterov: bool,
    /// Weight decay: this times the weight is added to the gradient.
    pub weight_decay: f64,
    /// Maximum global gradient norm; larger gradients are scaled down to it.
    pub max_norm: Option<f64>,
}

/// SGD with PyTorch's formula (`torch.optim.SGD`, no dampening): `g += weight_decay · p`; `b = momentum · b +
/// g`; `p -= lr · (g + momentum · b)` with Nesterov momentum, else `p -= lr · b`. The state is f32.
#[derive(Clone, Debug)]
pub struct Sgd {
    options: SgdOptions,
    /// Momentum buffers per parameter; empty without momentum.
    buffers: Vec<Vec<f32>>,
    decays: Vec<bool>,
    master: MasterCopy,
    /// Number of steps done.
    steps: u64,
}

/// Constants of one step.
#[derive(Clone, Copy, Debug)]
struct Factors {
    lr: f32,
    momentum: f32,
    nesterov: bool,
    weight_decay: f32,
    grad_scale: f32,
}

impl Sgd {
    /// Allocates a fresh state for the f32 weights `params`, trained with `policy`. Matrices decay.
    ///
    /// # Errors
    /// [`LoadError::Memory`].
    pub fn new(params: &Parameters, policy: &Policy, options: SgdOptions) -> Result<Self, LoadError> {
        let table = params.table();
        let bytes = Self::bytes(table, policy, options.momentum);
        let memory = || LoadError::Memory { what: "optimizer state", bytes };
        let kept = |n: usize| if options.momentum == 0.0 { 0 } else { n };
        let buffers = table.iter().map(|param| zeros(kept(param.range.len())).ok_or_else(memory));
        Ok(Sgd {
            options,
            buffers: buffers.collect::<Result<_, _>>()?,
            decays: decays_by_role(table, false),
            master: MasterCopy::new(policy.master, params)?,
            steps: 0,
        })
    }

    /// Bytes of the optimizer state.
    pub fn bytes(table: &ParamTable, policy: &Policy, momentum: f64) -> u64 {
        let buffers: u64 = table.iter().map(|param| 4 * param.range.len() as u64).sum();
        MasterCopy::bytes(policy.master, table) + if momentum == 0.0 { 0 } else { buffers }
    }

    /// Sets the weight decay flag per parameter, in table order.
    pub(super) fn set_decays(&mut self, decays: Vec<bool>) {
        self.decays = decays;
    }

    /// Number of steps done.
    pub(super) fn steps(&self) -> u64 {
        self.steps
    }

    /// Steps as [`Optimizer::step`](super::Optimizer::step).
    pub(super) fn step(
        &mut self,
        model: &mut TrainModel,
        lr: f64,
        loss_scale: f64,
        counts: Option<&[WeightCounts]>,
    ) -> Result<f64, TrainError> {
        let norm = finite_norm(model, self.buffers.len(), self.steps + 1, loss_scale)?;
        self.steps += 1;
        let SgdOptions { momentum, nesterov, weight_decay, max_norm } = self.options;
        let grad_scale = (max_norm.map_or(1.0, |max| clip_factor(norm, max)) / loss_scale) as f32;
        let (lr, momentum) = (lr as f32, momentum as f32);
        let (threads, steps, kept) = (model.options.threads, self.steps, momentum != 0.0);
        let (table, working) = model.params.split_mut();
        model.profile.time(Part::Optimizer, || {
            for (i, (param, buffer)) in table.iter().zip(&mut self.buffers).enumerate() {
                let weight_decay = if self.decays[i] { weight_decay as f32 } else { 0.0 };
                let factors = Factors { lr, momentum, nesterov, weight_decay, grad_scale };
                let range = param.range.clone();
                let mut buffers = buffer.chunks_mut(PIECE);
                let pieces = range.clone().step_by(PIECE).zip(working.pieces(range.clone(), PIECE));
                let pieces =
                    pieces.zip(self.master.pieces(range.clone(), PIECE)).map(|((first, working), master)| {
                        (
                            first,
                            working,
                            master,
                            if kept { buffers.next().unwrap_or_default() } else { &mut [] },
                        )
                    });
                let (grads, counts) = (&model.grads, counts.map(|counts| &counts[i]));
                for_each(threads, pieces, |(first, mut working, mut master, buffer)| {
                    let grads = grads.get(first..range.end.min(first + PIECE));
                    let mut g = [0.0; BLOCK];
                    by_blocks(
                        &mut working,
                        &mut master,
                        grads.len(),
                        (first as u64, steps),
                        counts,
                        |block, p| {
                            let at = block * BLOCK..block * BLOCK + p.len();
                            let g = &mut g[..p.len()];
                            grads.slice(at.clone()).widen(g);
                            factors.update(p, g, if kept { &mut buffer[at] } else { &mut [] });
                        },
                    );
                });
            }
        });
        Ok(norm)
    }

    /// Returns every array of the state with its name.
    pub(super) fn arrays(&self, table: &ParamTable) -> Vec<(String, Array<'_>)> {
        let buffers = table.iter().zip(&self.buffers).filter(|(_, buffer)| !buffer.is_empty());
        let named = buffers.map(|(param, b)| (format!("m.{}", param.tensor.name), Array::F32(b)));
        named.chain(self.master.array().map(|array| ("master".to_owned(), array))).collect()
    }

    /// Returns the same arrays for restoring a checkpoint; sets the number of steps done.
    pub(super) fn restore(&mut self, table: &ParamTable, steps: u64) -> Vec<(String, ArrayMut<'_>)> {
        self.steps = steps;
        let buffers = table.iter().zip(&mut self.buffers).filter(|(_, buffer)| !buffer.is_empty());
        let named = buffers.map(|(param, b)| (format!("m.{}", param.tensor.name), ArrayMut::F32(b)));
        named.chain(self.master.array_mut().map(|array| ("master".to_owned(), array))).collect()
    }
}

impl Factors {
    /// Updates the weights `p` with the gradients `g`, which are overwritten; `buffer` is empty without
    /// momentum.
    fn update(&self, p: &mut [f32], g: &mut [f32], buffer: &mut [f32]) {
        for (g, p) in g.iter_mut().zip(&*p) {
            *g = *g * self.grad_scale + self.weight_decay * p;
        }
        for (g, b) in g.iter_mut().zip(buffer) {
            *b = self.momentum * *b + *g;
            *g = if self.nesterov { *g + self.momentum * *b } else { *b };
        }
        p.iter_mut().zip(g).for_each(|(p, g)| *p -= self.lr * *g);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::path::Path;

    use mantissa_store::SafeTensors;

    use super::*;

    /// Compares six steps on 600 values with torch 2.15 (`tests/data/make_sgd.py`), in f32.
    #[test]
    fn steps_match_pytorch() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/train/sgd.safetensors");
        let file = SafeTensors::open(&path).unwrap();
        let read = |name: &str| file.read_f32(file.get(name).unwrap()).unwrap();
        let (start, grads) = (read("p0"), read("grads"));
        let n = start.len();
        for (name, lr, momentum, nesterov, weight_decay) in [
            ("plain", 0.1, 0.0, false, 0.0),
            ("momentum", 0.05, 0.9, false, 0.01),
            ("nesterov", 0.02, 0.95, true, 0.1),
        ] {
            let factors = Factors { lr, momentum, nesterov, weight_decay, grad_scale: 1.0 };
            let expected = read(&format!("sgd_{name}.params"));
            let (mut p, mut buffer) = (start.clone(), vec![0.0; if momentum == 0.0 { 0 } else { n }]);
            for (grads, expected) in grads.chunks(n).zip(expected.chunks(n)) {
                factors.update(&mut p, &mut grads.to_vec(), &mut buffer);
                // PyTorch fuses multiply-adds on some processors: one unit in the last place of the addend.
                let close = |a: &f32, b: &f32| (a - b).abs() <= 4e-7 * (a.abs() + 1.0).max(b.abs());
                assert!(p.iter().zip(expected).all(|(a, b)| close(a, b)), "{name}");
            }
            assert_ne!(p, start);
            if momentum != 0.0 {
                let expected = read(&format!("sgd_{name}.buffer"));
                // A sum that cancels keeps the absolute errors of its terms.
                let terms =
                    |i: usize| grads.iter().skip(i).step_by(n).map(|g| g.abs()).sum::<f32>() + start[i].abs();
                let mut pairs = buffer.iter().zip(&expected).enumerate();
                assert!(pairs.all(|(i, (a, b))| (a - b).abs() <= 4e-7 * terms(i)), "{name}");
            }
        }
    }
}

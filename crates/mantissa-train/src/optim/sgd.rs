//! Stochastic gradient descent with momentum, in the form of PyTorch (`torch.optim.SGD`, no dampening), for any tensor:
//!
//! ```text
//! g ← g + wd · p,  b ← momentum · b + g
//! p ← p - lr (g + momentum · b)     with Nesterov momentum (Sutskever et al. 2013)
//! p ← p - lr b                      without
//! ```

use std::sync::Arc;

use mantissa_model::LoadError;
use mantissa_options::{Flag, Note, Within, options};

use super::keys::{Fault, MomentKeys, NamedFormat, Only, OptimizerKeys, OptimizerKind};
use super::method::{Layout, State, Step, UpdateRule, UpdateTarget};
use super::moment_format::MomentFormat;
use super::{Optimizer, OptimizerSpec};
use crate::arena::Parameters;
use crate::error::TrainError;
use crate::param_table::{ParamInfo, ParamTable};
use crate::policy::Policy;

/// Row of the registry.
pub(super) const KIND: OptimizerKind = OptimizerKind {
    name: "sgd",
    about: "SGD with momentum, weight decay added to the gradient",
    keys: || Box::<Keys>::default(),
};

options! {
    /// Own keys.
    #[derive(Clone, Debug)]
    struct Keys {
        ..moments: MomentKeys, "Format of the moments.";
        /// key of other optimizers
        beta1: f64 = 0.9, Only(0.9), Note::RETIRED;
        /// key of other optimizers
        beta2: f64 = 0.95, Only(0.95), Note::RETIRED;
        /// key of other optimizers
        eps: f64 = 1e-8, Only(1e-8), Note::RETIRED;
        /// factor of the buffer; 0 keeps none
        momentum: f64 = 0.9, Within(0.0, 0.999_999);
        /// Nesterov momentum
        nesterov: bool = false, Flag;
    }
}

impl OptimizerKeys for Keys {
    fn fault(&self) -> Option<Fault> {
        let still = self.nesterov && self.momentum == 0.0;
        still.then(|| ("momentum", "0".to_owned(), "above 0 with nesterov = true"))
    }

    fn moments(&self) -> &NamedFormat {
        &self.moments.moments
    }

    fn build(&self) -> Arc<dyn UpdateRule> {
        let (momentum, nesterov) = (self.momentum, self.nesterov);
        Arc::new(SgdMethod { momentum, nesterov, moments: self.moments().format })
    }
}

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

/// Constructor of SGD optimizers.
#[derive(Clone, Copy, Debug)]
pub struct Sgd;

impl Sgd {
    /// Allocates a fresh f32 state for the f32 weights `params`, trained with `policy`. Matrices decay.
    ///
    /// # Errors
    /// [`LoadError::Memory`].
    #[expect(clippy::new_ret_no_self, reason = "every optimizer is an `Optimizer`")]
    pub fn new(params: &Parameters, policy: &Policy, options: SgdOptions) -> Result<Optimizer, LoadError> {
        Optimizer::new(params, policy, &Self::recipe(options))
    }

    /// Bytes of the optimizer state.
    pub fn bytes(table: &ParamTable, policy: &Policy, momentum: f64) -> u64 {
        let options = SgdOptions { momentum, nesterov: false, weight_decay: 0.0, max_norm: None };
        Self::recipe(options).bytes(table, policy)
    }

    fn recipe(options: SgdOptions) -> OptimizerSpec {
        let SgdOptions { momentum, nesterov, weight_decay, max_norm } = options;
        let method = Arc::new(SgdMethod { momentum, nesterov, moments: MomentFormat::F32 });
        OptimizerSpec { method, weight_decay, decay_vectors: false, max_norm, paged: false }
    }
}

/// SGD with its hyperparameters.
#[derive(Clone, Copy, Debug)]
struct SgdMethod {
    momentum: f64,
    nesterov: bool,
    moments: MomentFormat,
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

impl UpdateRule for SgdMethod {
    fn layout(&self, _: &ParamInfo) -> Layout {
        let kept = (self.momentum != 0.0).then_some(("m", false, self.moments));
        Layout { moments: kept.into_iter().collect(), ..Layout::default() }
    }

    fn is_elementwise(&self, param: &ParamInfo) -> bool {
        !self.moments.is_whole(param.range.len())
    }

    fn update(
        &self,
        target: &mut UpdateTarget<'_>,
        state: &mut State,
        scratch: &mut [f32],
        step: &Step,
    ) -> Result<(), TrainError> {
        let factors = Factors {
            lr: step.lr as f32,
            momentum: self.momentum as f32,
            nesterov: self.nesterov,
            weight_decay: step.weight_decay as f32,
            grad_scale: step.grad_scale as f32,
        };
        target.each_piece(&mut state.moments, scratch, |piece| {
            piece.blocks(|_, p, g, [buffer]| factors.update(p, g, buffer));
        })
    }
}

impl Factors {
    /// Updates the weights `p` with the gradients `g`; `buffer` is empty without momentum.
    fn update(&self, p: &mut [f32], g: &[f32], buffer: &mut [f32]) {
        let scaled = |g: &f32, p: &f32| *g * self.grad_scale + self.weight_decay * *p;
        if buffer.is_empty() {
            p.iter_mut().zip(g).for_each(|(p, g)| *p -= self.lr * scaled(g, p));
            return;
        }
        for ((p, g), b) in p.iter_mut().zip(g).zip(buffer) {
            let g = scaled(g, p);
            *b = self.momentum * *b + g;
            *p -= self.lr * if self.nesterov { g + self.momentum * *b } else { *b };
        }
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
                factors.update(&mut p, grads, &mut buffer);
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

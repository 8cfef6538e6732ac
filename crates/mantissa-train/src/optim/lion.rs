//! Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", arXiv 2302.06675, alg. 2), for any tensor:
//!
//! ```text
//! p ← p (1 - lr wd) - lr sign(β1 m + (1 - β1) g),  m ← β2 m + (1 - β2) g
//! ```

use std::sync::Arc;

use mantissa_options::{Within, options};

use super::keys::{MomentKeys, NamedFormat, OptimizerKeys, OptimizerKind};
use super::method::{Layout, State, Step, UpdateRule, UpdateTarget};
use super::moment_format::MomentFormat;
use crate::error::TrainError;
use crate::param_table::ParamInfo;

/// Row of the registry.
pub(super) const KIND: OptimizerKind = OptimizerKind {
    name: "lion",
    about: "Lion (Chen et al. 2023): the sign of a mean of gradients; lr a third to a tenth of AdamW's",
    keys: || Box::<Keys>::default(),
};

options! {
    /// Own keys.
    #[derive(Clone, Debug)]
    struct Keys {
        ..moments: MomentKeys, "Format of the moments.";
        /// share of the mean in the direction of an update
        beta1: f64 = 0.9, Within(0.0, 0.999_999);
        /// decay of the mean
        beta2: f64 = 0.99, Within(0.0, 0.999_999_9);
    }
}

impl OptimizerKeys for Keys {
    fn moments(&self) -> &NamedFormat {
        &self.moments.moments
    }

    fn build(&self) -> Arc<dyn UpdateRule> {
        Arc::new(Lion { beta1: self.beta1, beta2: self.beta2, moments: self.moments().format })
    }
}

/// Lion with its hyperparameters.
#[derive(Clone, Copy, Debug)]
struct Lion {
    beta1: f64,
    beta2: f64,
    moments: MomentFormat,
}

/// Constants of one step.
#[derive(Clone, Copy, Debug)]
struct Factors {
    lr: f32,
    decay: f32,
    beta1: f32,
    one_minus_beta1: f32,
    beta2: f32,
    one_minus_beta2: f32,
    grad_scale: f32,
}

impl UpdateRule for Lion {
    fn layout(&self, _: &ParamInfo) -> Layout {
        Layout { moments: vec![("m", false, self.moments)], ..Layout::default() }
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
        let factors = self.factors(step);
        target.each_piece(&mut state.moments, scratch, |piece| {
            piece.blocks(|_, p, g, [m]| factors.update(p, g, m));
        })
    }
}

impl Lion {
    fn factors(&self, step: &Step) -> Factors {
        Factors {
            lr: step.lr as f32,
            decay: (1.0 - step.lr * step.weight_decay) as f32,
            beta1: self.beta1 as f32,
            one_minus_beta1: (1.0 - self.beta1) as f32,
            beta2: self.beta2 as f32,
            one_minus_beta2: (1.0 - self.beta2) as f32,
            grad_scale: step.grad_scale as f32,
        }
    }
}

impl Factors {
    fn update(&self, p: &mut [f32], g: &[f32], m: &mut [f32]) {
        for ((p, g), m) in p.iter_mut().zip(g).zip(m) {
            let g = g * self.grad_scale;
            let direction = self.beta1 * *m + self.one_minus_beta1 * g;
            // Unlike `signum`, 0 for 0.
            let sign = f32::from(i8::from(direction > 0.0) - i8::from(direction < 0.0));
            *p = *p * self.decay - self.lr * sign;
            *m = self.beta2 * *m + self.one_minus_beta2 * g;
        }
    }
}

//! Precision policies of training, as data: storage of weights, master copy and gradients, and the operand
//! dtypes of every matmul.
//!
//! A linear layer has three matmuls: `fprop` `Y = X Wᵀ`, `dgrad` `dX = dY W` and `wgrad` `dW = dYᵀ X`. A
//! policy sets the dtype of both operands of each. Only the linear layer of this crate reads it.

mod cache;
mod fast_path;
mod fault;
mod keys;
mod learned;
mod named;
mod operands;
mod print;
mod registry;
mod table;

use std::borrow::Cow;
use std::collections::BTreeMap;

use mantissa_model::KvPolicy;

use crate::error::TrainError;
use crate::scaling::ScalingOptions;
use crate::store::Precision;

pub(crate) use fast_path::{Factors, accumulates, common_unit, fast_path, int_range};
pub use fault::TableFault;
pub use keys::PolicyTable;
pub use named::recipes;
pub(crate) use operands::{Gemm, Side};
pub use operands::{GemmPolicy, LinearPolicy, OperandPolicy, OperandSource, Rotation, ScaleChoice, Signs};

/// Storage of the weight bits that the working copy does not hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Master {
    /// No master copy: updates are rounded into the working copy.
    #[default]
    None,
    /// No master copy, stochastic rounding (Gupta et al. 2015, arXiv 1502.02551): updates below half a unit
    /// in the last place take effect on average.
    Stochastic {
        /// Seed of the random bits, which depend only on seed, step and place.
        seed: u64,
    },
    /// No master copy, weights of the decoder's linear layers on a grid of INT8 codes under a scale per row, amax / 127;
    /// each update is rounded to it stochastically (torchao's INT8 quantized training). Initial weights are rounded to
    /// nearest. Codes and scales are what is stored; other weights stay as they are.
    Int8 {
        /// Seed of the random bits, which depend only on seed, step and place.
        seed: u64,
    },
    /// f32 master copy.
    F32,
    /// Low 16 bits of the f32 value next to a bf16 working copy (Megatron-LM's `store_param_remainders`). The
    /// working copy is the value rounded to nearest, halves up.
    Remainder,
}

/// Precision policy of a training run.
#[derive(Clone, Debug, PartialEq)]
pub struct Policy {
    /// Name, such as `bf16`.
    pub name: Cow<'static, str>,
    /// Storage precision of the weights read by the forward.
    pub weights: Precision,
    /// Master copy.
    pub master: Master,
    /// Storage precision of gradients; a batch accumulates them in f32 and rounds once.
    pub gradients: Precision,
    /// Precision of the residual stream and its gradient; only f32 is supported.
    pub residual: Precision,
    /// Precision of norms before their result is rounded for the matmuls; only f32 is supported.
    pub norms: Precision,
    /// Operands of the decoder's linear layers.
    pub linear: LinearPolicy,
    /// Operands of the head; only plain float dtypes are supported.
    pub head: LinearPolicy,
    /// Decoder layers whose linear layers keep a plain dtype.
    pub keep: Keep,
    /// Operands of single decoder layers, by index, in place of `linear` and `keep`. Tables have no key for them.
    pub exceptions: BTreeMap<usize, LinearPolicy>,
    /// Quantization of keys and values before attention, straight-through; `None` keeps them in f32.
    pub kv: Option<KvPolicy>,
    /// Loss scaling, if any.
    pub scaling: Option<ScalingOptions>,
    /// Seed of stochastically rounded operands and of random signs.
    pub seed: u64,
}

impl Policy {
    fn mixed(name: &'static str, precision: Precision, master: Master, gradients: Precision) -> Self {
        let name = Cow::Borrowed(name);
        let keep = Keep { first: 0.0, last: 0.0, precision };
        let linear = LinearPolicy::plain(precision);
        let (weights, head) = (precision, linear.clone());
        let (residual, norms) = (Precision::F32, Precision::F32);
        Policy {
            name,
            weights,
            master,
            gradients,
            residual,
            norms,
            linear,
            head,
            keep,
            exceptions: BTreeMap::new(),
            kv: None,
            scaling: None,
            seed: 0,
        }
    }

    /// # Errors
    /// [`TrainError::PolicyField`] for what is f32 in every policy so far.
    pub(crate) fn check(&self) -> Result<(), TrainError> {
        for (field, found) in [("residual", self.residual), ("norms", self.norms)] {
            if found != Precision::F32 {
                return Err(TrainError::PolicyField { field, found: found.scheme().to_string() });
            }
        }
        match self.head.is_plain() {
            true => Ok(()),
            false => Err(TrainError::PolicyField { field: "head", found: "a quantized operand".to_owned() }),
        }
    }

    /// Operands of the linear layers of decoder layer `layer` of `layers`.
    pub(crate) fn linear_of(&self, layer: usize, layers: usize) -> Cow<'_, LinearPolicy> {
        match self.exceptions.get(&layer) {
            Some(exception) => Cow::Borrowed(exception),
            None if self.keep.holds(layer, layers) => Cow::Owned(LinearPolicy::plain(self.keep.precision)),
            None => Cow::Borrowed(&self.linear),
        }
    }

    /// Different policies of quantized decoder layers; empty if all operands are plain float dtypes.
    pub(crate) fn quantized_layers(&self) -> Vec<&LinearPolicy> {
        let all = std::iter::once(&self.linear).chain(self.exceptions.values());
        all.filter(|policy| !policy.is_plain()).collect()
    }

    /// Uses f32 throughout.
    pub fn fp32() -> Self {
        Self::mixed("fp32", Precision::F32, Master::None, Precision::F32)
    }

    /// f16 weights and operands, f32 master copy and gradients, PyTorch's dynamic loss scaling (Micikevicius
    /// et al. 2018, arXiv 1710.03740).
    pub fn fp16() -> Self {
        let scaling = Some(ScalingOptions::PYTORCH);
        Policy { scaling, ..Self::mixed("fp16", Precision::F16, Master::F32, Precision::F32) }
    }

    /// bf16 weights and operands, f32 master copy and gradients (Kalamkar et al. 2019, arXiv 1905.12322).
    pub fn bf16() -> Self {
        Self::mixed("bf16", Precision::Bf16, Master::F32, Precision::F32)
    }

    /// [`bf16`](Self::bf16) with a 16-bit remainder as master copy: saves 2 bytes per parameter.
    pub fn bf16_remainder() -> Self {
        Self::mixed("bf16-remainder", Precision::Bf16, Master::Remainder, Precision::F32)
    }

    /// bf16 weights, operands and gradients; updates rounded to nearest.
    pub fn bf16_pure() -> Self {
        Self::mixed("bf16-pure", Precision::Bf16, Master::None, Precision::Bf16)
    }

    /// [`bf16_pure`](Self::bf16_pure) with stochastically rounded updates.
    pub fn bf16_pure_stochastic(seed: u64) -> Self {
        let master = Master::Stochastic { seed };
        Self::mixed("bf16-pure-sr", Precision::Bf16, master, Precision::Bf16)
    }

    /// Precision in which initial weights are read before master and working copy are made: f32 if there is a
    /// master copy.
    pub fn initial_weights(&self) -> Precision {
        match self.master {
            Master::None | Master::Stochastic { .. } | Master::Int8 { .. } => self.weights,
            Master::F32 | Master::Remainder => Precision::F32,
        }
    }
}

/// Decoder layers at the ends of the model whose linear layers are not quantized.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Keep {
    /// Share of the layers, from the first; rounded to whole layers.
    pub first: f64,
    /// Share of the layers, up to the last.
    pub last: f64,
    /// Dtype of their operands.
    pub precision: Precision,
}

impl Keep {
    /// True if layer `layer` of `layers` is kept.
    pub fn holds(&self, layer: usize, layers: usize) -> bool {
        let count = |share: f64| (share * layers as f64).round() as usize;
        layer < count(self.first) || layer + count(self.last) >= layers
    }
}

impl Default for Policy {
    fn default() -> Self {
        Self::fp32()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_share_operands_that_they_want_alike() {
        let mut policy = LinearPolicy::plain(Precision::Bf16);
        assert!(policy.shares_all(Precision::Bf16) && !policy.shares_all(Precision::F32));
        policy.wgrad.right = OperandPolicy::plain(Precision::F32);
        let shared = (policy.shared_input(), policy.shared_gradient());
        assert_eq!(shared, (Precision::F32, Precision::Bf16));
        assert!(!policy.shares_all(Precision::Bf16));
        assert!(LinearPolicy::f32().shares_all(Precision::F32));
    }

    #[test]
    fn fields_that_must_be_f32_are_named() {
        let policy = Policy { norms: Precision::Bf16, ..Policy::bf16() };
        let message = policy.check().map_err(|error| error.to_string());
        assert!(message.is_err_and(|m| m.contains("policy.norms: expected f32, got bf16")));
        assert!(Policy::names().all(|name| Policy::by_name(name, 1).is_some_and(|p| p.check().is_ok())));
    }
}

//! Precision of training, as data: how weights, their master copy and gradients are stored, and how the operands of every
//! product of a linear layer are.
//!
//! A linear layer has three products: `fprop` `Y = X Wᵀ`, `dgrad` `dX = dY W` and `wgrad` `dW = dYᵀ X`. For each, a
//! policy names how its two operands are stored when they are multiplied. The linear layer of training is the only reader.

use mantissa_num::Scheme;

use crate::error::TrainError;
use crate::scaling::ScalingOptions;
use crate::store::Precision;

/// How the operands of one product are stored.
#[derive(Clone, Debug, PartialEq)]
pub struct GemmPolicy {
    /// `X` of fprop, `dY` of dgrad and wgrad.
    pub left: Scheme,
    /// `W` of fprop and dgrad, `X` of wgrad.
    pub right: Scheme,
}

/// How the operands of a linear layer's products are stored.
#[derive(Clone, Debug, PartialEq)]
pub struct LinearPolicy {
    /// `Y = X Wᵀ`.
    pub fprop: GemmPolicy,
    /// `dX = dY W`.
    pub dgrad: GemmPolicy,
    /// `dW = dYᵀ X`.
    pub wgrad: GemmPolicy,
}

impl LinearPolicy {
    /// All operands f32.
    pub fn f32() -> Self {
        Self::plain(Precision::F32)
    }

    /// All operands plain values of one format.
    pub fn plain(precision: Precision) -> Self {
        let product = || GemmPolicy { left: precision.scheme(), right: precision.scheme() };
        LinearPolicy { fprop: product(), dgrad: product(), wgrad: product() }
    }

    /// What `X` is rounded to once for fprop and wgrad; f32 where the two want it different, and each rounds for itself.
    pub(crate) fn shared_input(&self) -> Precision {
        shared(&self.fprop.left, &self.wgrad.right)
    }

    /// What `dY` is rounded to once for dgrad and wgrad, as [`shared_input`](Self::shared_input).
    pub(crate) fn shared_gradient(&self) -> Precision {
        shared(&self.dgrad.left, &self.wgrad.left)
    }

    /// Whether no product rounds for itself or widens: all operands are those that are rounded once, and weights are
    /// multiplied as they are stored.
    pub(crate) fn shares_all(&self, weights: Precision) -> bool {
        let (x, dy) = (self.shared_input(), self.shared_gradient());
        let stored = [x, weights, dy, weights, dy, x];
        let as_stored =
            |((_, scheme), stored): ((_, &Scheme), _)| Precision::of(&scheme.format) == Some(stored);
        x == weights && dy == weights && self.operands().into_iter().zip(stored).all(as_stored)
    }

    /// Every operand with its name.
    pub(crate) fn operands(&self) -> [(&'static str, &Scheme); 6] {
        [
            ("fprop.left", &self.fprop.left),
            ("fprop.right", &self.fprop.right),
            ("dgrad.left", &self.dgrad.left),
            ("dgrad.right", &self.dgrad.right),
            ("wgrad.left", &self.wgrad.left),
            ("wgrad.right", &self.wgrad.right),
        ]
    }
}

/// The precision of both schemes, if that is one.
fn shared(a: &Scheme, b: &Scheme) -> Precision {
    let of = |scheme: &Scheme| Precision::of(&scheme.format);
    of(a).filter(|precision| of(b) == Some(*precision)).unwrap_or_default()
}

/// Where the bits of a weight are that its working copy does not hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Master {
    /// Nowhere: the working copy is all there is, and an update is rounded into it.
    #[default]
    None,
    /// Nowhere, and an update is rounded stochastically: up with the probability of the part cut off (Gupta et al. 2015,
    /// arXiv 1502.02551), so that updates below half a unit in the last place count on average.
    Stochastic {
        /// Of the random bits, which are a function of it, the step and the place alone.
        seed: u64,
    },
    /// In a copy in f32.
    F32,
    /// In the 16 bits that, with the bf16 working copy before them, make the f32 value (Megatron-LM's
    /// `store_param_remainders`): the working copy is the value rounded to nearest, halves up.
    Remainder,
}

/// Precision of a training run.
#[derive(Clone, Debug, PartialEq)]
pub struct Policy {
    /// Name, such as `bf16`.
    pub name: &'static str,
    /// How the weights that a forward reads are stored.
    pub weights: Precision,
    /// What of them is kept besides.
    pub master: Master,
    /// How gradients are stored; those of a batch are summed in f32 and rounded once.
    pub gradients: Precision,
    /// How the residual stream and its gradient are stored; f32 is what can be had.
    pub residual: Precision,
    /// In what norms read, compute and hand on, before their result is rounded for the products that read it; f32 is what
    /// can be had.
    pub norms: Precision,
    /// Operands of the decoder's linear layers.
    pub linear: LinearPolicy,
    /// Operands of the head.
    pub head: LinearPolicy,
    /// How the loss is scaled, where it is.
    pub scaling: Option<ScalingOptions>,
}

impl Policy {
    fn mixed(name: &'static str, precision: Precision, master: Master, gradients: Precision) -> Self {
        let linear = LinearPolicy::plain(precision);
        let (weights, head) = (precision, linear.clone());
        let (residual, norms) = (Precision::F32, Precision::F32);
        Policy { name, weights, master, gradients, residual, norms, linear, head, scaling: None }
    }

    /// # Errors
    /// [`TrainError::PolicyField`] for what is f32 in every policy so far.
    pub(crate) fn check(&self) -> Result<(), TrainError> {
        for (field, found) in [("residual", self.residual), ("norms", self.norms)] {
            if found != Precision::F32 {
                return Err(TrainError::PolicyField { field, found: found.scheme().to_string() });
            }
        }
        Ok(())
    }

    /// f32 throughout.
    pub fn fp32() -> Self {
        Self::mixed("fp32", Precision::F32, Master::None, Precision::F32)
    }

    /// f16 weights and operands with an f32 master copy, f32 gradients and PyTorch's dynamic loss scaling (Micikevicius et al.
    /// 2018, arXiv 1710.03740).
    pub fn fp16() -> Self {
        let scaling = Some(ScalingOptions::PYTORCH);
        Policy { scaling, ..Self::mixed("fp16", Precision::F16, Master::F32, Precision::F32) }
    }

    /// bf16 weights and operands with an f32 master copy and f32 gradients (Kalamkar et al. 2019, arXiv 1905.12322).
    pub fn bf16() -> Self {
        Self::mixed("bf16", Precision::Bf16, Master::F32, Precision::F32)
    }

    /// [`bf16`](Self::bf16) whose master copy is the 16 bits that the weights do not hold: 2 bytes of each parameter less.
    pub fn bf16_remainder() -> Self {
        Self::mixed("bf16-remainder", Precision::Bf16, Master::Remainder, Precision::F32)
    }

    /// bf16 weights, operands and gradients, updates rounded to nearest.
    pub fn bf16_pure() -> Self {
        Self::mixed("bf16-pure", Precision::Bf16, Master::None, Precision::Bf16)
    }

    /// [`bf16_pure`](Self::bf16_pure) with updates rounded stochastically.
    pub fn bf16_pure_stochastic(seed: u64) -> Self {
        let master = Master::Stochastic { seed };
        Self::mixed("bf16-pure-sr", Precision::Bf16, master, Precision::Bf16)
    }

    /// How weights that nothing has been trained on are held until master copy and working copy are made of them: in f32, unless
    /// there is no master copy.
    pub fn initial_weights(&self) -> Precision {
        match self.master {
            Master::None | Master::Stochastic { .. } => self.weights,
            Master::F32 | Master::Remainder => Precision::F32,
        }
    }

    /// The policy of a name; `seed` is that of stochastic rounding.
    pub fn by_name(name: &str, seed: u64) -> Option<Self> {
        let all = [
            Self::fp32(),
            Self::fp16(),
            Self::bf16(),
            Self::bf16_remainder(),
            Self::bf16_pure(),
            Self::bf16_pure_stochastic(seed),
        ];
        all.into_iter().find(|policy| policy.name == name)
    }

    /// Names that [`by_name`](Self::by_name) knows.
    pub const NAMES: [&'static str; 6] =
        ["fp32", "fp16", "bf16", "bf16-remainder", "bf16-pure", "bf16-pure-sr"];
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
    fn every_name_is_a_policy() {
        for name in Policy::NAMES {
            assert!(Policy::by_name(name, 1).is_some_and(|policy| policy.name == name), "{name}");
        }
        assert_eq!(Policy::by_name("fp64", 1), None);
    }

    #[test]
    fn products_share_operands_that_they_want_alike() {
        let mut policy = LinearPolicy::plain(Precision::Bf16);
        assert!(policy.shares_all(Precision::Bf16) && !policy.shares_all(Precision::F32));
        policy.wgrad.right = Precision::F32.scheme();
        let shared = (policy.shared_input(), policy.shared_gradient());
        assert_eq!(shared, (Precision::F32, Precision::Bf16));
        assert!(!policy.shares_all(Precision::Bf16));
        assert!(LinearPolicy::f32().shares_all(Precision::F32));
    }

    #[test]
    fn what_must_be_f32_is_named() {
        let policy = Policy { norms: Precision::Bf16, ..Policy::bf16() };
        let message = policy.check().map_err(|error| error.to_string());
        assert!(message.is_err_and(|m| m.contains("policy.norms: found bf16, allowed f32")));
        assert!(Policy::NAMES.iter().all(|name| Policy::by_name(name, 1).is_some_and(|p| p.check().is_ok())));
    }
}

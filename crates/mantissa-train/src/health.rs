//! Looking at the numbers of a step: how much of each tensor its format loses, and which tensor is the first that is not
//! finite. A step that nobody looks at pays one comparison for each operator.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use mantissa_model::LinearKind;
use mantissa_model::graph::NormKind;
use mantissa_num::Scheme;
use serde::Serialize;

use crate::policy::{LinearPolicy, Policy};
use crate::store::Precision;

/// An operator of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operator {
    Embedding,
    Norm(usize, NormKind),
    Linear(usize, LinearKind),
    /// Rotation and causal attention.
    Attention(usize),
    /// The product of SiLU and up.
    Gate(usize),
    FinalNorm,
    Head,
    Loss,
}

impl fmt::Display for Operator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Operator::Embedding => f.write_str("model.embed_tokens"),
            Operator::Norm(layer, NormKind::Post) => {
                write!(f, "model.layers.{layer}.post_attention_layernorm")
            }
            Operator::Norm(layer, _) => write!(f, "model.layers.{layer}.input_layernorm"),
            Operator::Linear(layer, kind) => write!(f, "model.layers.{layer}.{}", kind.name()),
            Operator::Attention(layer) => write!(f, "model.layers.{layer}.self_attn"),
            Operator::Gate(layer) => write!(f, "model.layers.{layer}.mlp"),
            Operator::FinalNorm => f.write_str("model.norm"),
            Operator::Head => f.write_str("lm_head"),
            Operator::Loss => f.write_str("loss"),
        }
    }
}

/// An operand of a linear layer's products.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum OperandKind {
    /// What the layer reads.
    X,
    /// Its weight.
    W,
    /// Gradient of what it gives.
    Dy,
}

impl OperandKind {
    /// The products that read it, with its name in each, and how it is stored in them.
    fn products(self, policy: &LinearPolicy) -> [(&'static str, &Scheme); 2] {
        match self {
            OperandKind::X => [("fprop x", &policy.fprop.left), ("wgrad x", &policy.wgrad.right)],
            OperandKind::W => [("fprop w", &policy.fprop.right), ("dgrad w", &policy.dgrad.right)],
            OperandKind::Dy => [("dgrad dy", &policy.dgrad.left), ("wgrad dy", &policy.wgrad.left)],
        }
    }
}

/// What rounding to a format takes from values.
#[derive(Clone, Copy, Debug)]
struct Limits {
    /// Values up to here become 0.
    tiny: f32,
    /// Finite values from here on become infinite, or the largest number.
    huge: f32,
}

impl Limits {
    fn of(precision: Precision) -> Self {
        match precision {
            // Nothing that is stored as f32 is rounded.
            Precision::F32 => Limits { tiny: 0.0, huge: f32::INFINITY },
            // Half of the smallest number, 2⁻¹³³, goes to the even 0; half a step (2¹¹⁹) above the largest, 2¹²⁸ - 2¹²⁰.
            Precision::Bf16 => Limits { tiny: f32::from_bits(1 << 15), huge: f32::from_bits(0x7f7f_8000) },
            // Half of 2⁻²⁴; half a step (16) above 65504.
            Precision::F16 => Limits { tiny: 2.980_232_2e-8, huge: 65_520.0 },
        }
    }
}

/// Sums over the values of a tensor.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sums {
    amax: f32,
    underflowed: u64,
    saturated: u64,
    count: u64,
}

impl Sums {
    fn add(&mut self, values: &[f32], limits: Limits) {
        let (mut amax, mut under, mut over) = (0f32, 0, 0);
        for value in values {
            let size = value.abs();
            // A NaN stays out of the largest, as infinity does not.
            amax = amax.max(size);
            under += u64::from(size <= limits.tiny && size > 0.0);
            over += u64::from(size >= limits.huge && size < f32::INFINITY);
        }
        self.amax = self.amax.max(amax);
        self.underflowed += under;
        self.saturated += over;
        self.count += values.len() as u64;
    }
}

/// What becomes of the weights of a parameter in an update; filled by several threads.
#[derive(Debug, Default)]
pub(crate) struct WeightCounts {
    /// Bits of the largest size, which are in the order of the sizes.
    amax: AtomicU32,
    underflowed: AtomicU64,
    saturated: AtomicU64,
    changed: AtomicU64,
}

impl WeightCounts {
    /// Of some weights: in f32, and the working copy before and after the update.
    pub(crate) fn add(&self, exact: &[f32], before: &[f32], after: &[f32]) {
        let (mut amax, mut under, mut over, mut changed) = (0f32, 0, 0, 0);
        for ((exact, before), after) in exact.iter().zip(before).zip(after) {
            amax = amax.max(exact.abs());
            under += u64::from(*exact != 0.0 && *after == 0.0);
            over += u64::from(exact.is_finite() && after.is_infinite());
            changed += u64::from(before.to_bits() != after.to_bits());
        }
        self.amax.fetch_max(amax.to_bits(), Ordering::Relaxed);
        self.underflowed.fetch_add(under, Ordering::Relaxed);
        self.saturated.fetch_add(over, Ordering::Relaxed);
        self.changed.fetch_add(changed, Ordering::Relaxed);
    }

    /// What was counted of the parameter `tensor` of `n` weights; `grad_amax` is the largest of its gradients.
    pub(crate) fn health(&self, tensor: &str, n: usize, grad_amax: f32) -> WeightHealth {
        let share = |count: &AtomicU64| count.load(Ordering::Relaxed) as f64 / n.max(1) as f64;
        WeightHealth {
            tensor: tensor.to_owned(),
            amax: finite(f32::from_bits(self.amax.load(Ordering::Relaxed))),
            grad_amax: finite(grad_amax),
            underflowed: share(&self.underflowed),
            saturated: share(&self.saturated),
            changed: share(&self.changed),
        }
    }
}

/// JSON has no infinity.
fn finite(value: f32) -> Option<f32> {
    Some(value).filter(|value| value.is_finite())
}

/// The health of a parameter in one update.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WeightHealth {
    /// Its name.
    pub tensor: String,
    /// The largest size of its weights, before they are rounded into the working copy; `None` where it is infinite.
    pub amax: Option<f32>,
    /// The largest size of its gradients, loss scale taken out, before clipping.
    pub grad_amax: Option<f32>,
    /// Share of weights that are 0 in the working copy alone.
    pub underflowed: f64,
    /// Share of weights that are finite, but not in the working copy.
    pub saturated: f64,
    /// Share of weights whose working copy the update changed. Where there is no master copy, the others did not learn.
    pub changed: f64,
}

/// The health of an operand of a linear layer in one step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OperandHealth {
    /// The linear layer.
    pub linear: String,
    /// Product and operand: `fprop x`, `fprop w`, `dgrad dy`; where it is stored otherwise in the second product that reads it,
    /// `wgrad x`, `dgrad w`, `wgrad dy` too.
    pub operand: &'static str,
    /// The format in which it is multiplied.
    pub format: String,
    /// The largest size, before rounding; gradients are scaled as the loss is. `None` where it is infinite.
    pub amax: Option<f32>,
    /// Share of all values that are not 0 and that rounding to the format makes 0.
    pub underflowed: f64,
    /// Share of finite values beyond the largest number of the format.
    pub saturated: f64,
}

/// What a step looked like.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepHealth {
    /// Number of the step, from 1.
    pub step: u64,
    /// Parameters, in the order of the forward pass; none where the update was left out.
    pub weights: Vec<WeightHealth>,
    /// Operands of the linear layers, in the order of the forward pass.
    pub operands: Vec<OperandHealth>,
}

/// Who looks at a step.
#[derive(Debug, Default)]
pub(crate) enum Watch {
    /// Nobody.
    #[default]
    Off,
    /// Counts what formats lose.
    Health(Mutex<Operands>),
    /// Searches for the first tensor that is not finite; to be run on one thread, where operators have an order.
    Finite(Mutex<Option<String>>),
}

/// By layer (the head's follows the last), linear and operand; [`OperandKind::products`] each.
type Operands = BTreeMap<(usize, usize, OperandKind), [Sums; 2]>;

/// Layer of the head.
const HEAD: usize = usize::MAX;

impl Watch {
    /// One that counts.
    pub(crate) fn health() -> Self {
        Watch::Health(Mutex::default())
    }

    /// One that searches.
    pub(crate) fn finite() -> Self {
        Watch::Finite(Mutex::default())
    }

    /// Whether there is nothing to do.
    pub(crate) fn is_off(&self) -> bool {
        matches!(self, Watch::Off)
    }

    /// What a search has found: operator and product.
    pub(crate) fn found(&self) -> Option<String> {
        match self {
            Watch::Finite(found) => lock(found).clone(),
            _ => None,
        }
    }

    /// Looks at an operand of a linear layer before its products round it.
    pub(crate) fn operand(&self, at: Operator, operand: OperandKind, policy: &Policy, values: &[f32]) {
        if self.is_off() {
            return;
        }
        let (key, linear) = match at {
            Operator::Linear(layer, kind) => ((layer, kind.index(), operand), &policy.linear),
            _ => ((HEAD, 0, operand), &policy.head),
        };
        let formats = operand.products(linear).map(|(name, scheme)| (name, Precision::of(&scheme.format)));
        match self {
            Watch::Off => {}
            Watch::Health(operands) => {
                let mut operands = lock(operands);
                let sums = operands.entry(key).or_default();
                for (i, (sums, (_, precision))) in sums.iter_mut().zip(&formats).enumerate() {
                    if i == 0 || formats[0].1 != *precision {
                        sums.add(values, Limits::of(precision.unwrap_or_default()));
                    }
                }
            }
            Watch::Finite(found) => {
                for (name, precision) in formats {
                    let precision = precision.unwrap_or_default();
                    let huge = Limits::of(precision).huge;
                    if values.iter().any(|value| !value.is_finite()) {
                        note(found, || format!("{at}: {name}"));
                    } else if values.iter().any(|value| value.abs() >= huge) {
                        note(found, || format!("{at}: {name}, rounded to {}", precision.scheme()));
                    }
                }
            }
        }
    }

    /// Looks at what an operator gave; `what` names it: `fprop y`, `dgrad dx`, `wgrad dw`, `output`, `gradient`.
    pub(crate) fn result(&self, at: Operator, what: &'static str, values: &[f32]) {
        if let Watch::Finite(found) = self
            && values.iter().any(|value| !value.is_finite())
        {
            note(found, || format!("{at}: {what}"));
        }
    }

    /// What was counted under `policy`.
    pub(crate) fn operands(&self, policy: &Policy) -> Vec<OperandHealth> {
        let Watch::Health(operands) = self else { return Vec::new() };
        let mut all = Vec::new();
        for (&(layer, kind, operand), sums) in &*lock(operands) {
            let (at, linear) = match LinearKind::PLAIN.get(kind) {
                Some(&kind) if layer != HEAD => (Operator::Linear(layer, kind), &policy.linear),
                _ => (Operator::Head, &policy.head),
            };
            let products = operand.products(linear).into_iter().zip(sums);
            all.extend(products.filter(|(_, sums)| sums.count > 0).map(|((name, scheme), sums)| {
                let share = |count: u64| count as f64 / sums.count as f64;
                OperandHealth {
                    linear: at.to_string(),
                    operand: name,
                    format: scheme.to_string(),
                    amax: finite(sums.amax),
                    underflowed: share(sums.underflowed),
                    saturated: share(sums.saturated),
                }
            }));
        }
        all
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Keeps the first.
fn note(found: &Mutex<Option<String>>, name: impl FnOnce() -> String) {
    lock(found).get_or_insert_with(name);
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::store::round;

    /// What is counted is what rounding does.
    #[test]
    fn limits_are_those_of_rounding() {
        for precision in [Precision::F32, Precision::Bf16, Precision::F16] {
            let Limits { tiny, huge } = Limits::of(precision);
            let next = |value: f32, by: i32| f32::from_bits(value.to_bits().wrapping_add_signed(by));
            let mut values = vec![tiny, next(tiny, 1), huge, next(huge, -1), 1.0];
            let exact = values.clone();
            round(precision, &mut values);
            for (rounded, exact) in values.iter().zip(&exact) {
                let zero = *exact <= tiny;
                let infinite = *exact >= huge;
                assert_eq!(
                    (*rounded == 0.0, rounded.is_infinite()),
                    (zero, infinite),
                    "{precision:?} {exact:e}"
                );
            }
        }
        let mut sums = Sums::default();
        sums.add(&[0.0, 1e-9, -2e-8, 7e4, -1.0, f32::INFINITY], Limits::of(Precision::F16));
        assert_eq!((sums.underflowed, sums.saturated, sums.count), (2, 1, 6));
        assert_eq!(finite(sums.amax), None);
    }

    #[test]
    fn a_search_keeps_the_first_and_names_rounding() {
        let policy = Policy::fp16();
        let watch = Watch::finite();
        let down = Operator::Linear(3, LinearKind::Down);
        watch.operand(down, OperandKind::X, &policy, &[1.0, 65_000.0]);
        assert_eq!(watch.found(), None);
        watch.operand(down, OperandKind::X, &policy, &[1.0, -7e4]);
        watch.result(Operator::Loss, "output", &[f32::NAN]);
        assert_eq!(watch.found().unwrap(), "model.layers.3.mlp.down_proj: fprop x, rounded to f16");
        let watch = Watch::finite();
        watch.operand(down, OperandKind::X, &Policy::bf16(), &[1.0, -7e4]);
        watch.result(Operator::Head, "dgrad dx", &[f32::NAN]);
        assert_eq!(watch.found().unwrap(), "lm_head: dgrad dx");
    }

    #[test]
    fn operands_are_counted_once_for_each_format() {
        let mut policy = Policy::fp16();
        let watch = Watch::health();
        let at = Operator::Linear(0, LinearKind::Q);
        let values = [1e-9, 1.0, 0.0, 8e4];
        watch.operand(at, OperandKind::Dy, &policy, &values);
        watch.operand(at, OperandKind::Dy, &policy, &values[..2]);
        let all = watch.operands(&policy);
        assert_eq!((all.len(), all[0].operand, all[0].format.as_str()), (1, "dgrad dy", "f16"));
        assert_eq!((all[0].underflowed, all[0].saturated, all[0].amax), (2.0 / 6.0, 1.0 / 6.0, Some(8e4)));
        policy.linear.wgrad.left = Precision::Bf16.scheme();
        let watch = Watch::health();
        watch.operand(at, OperandKind::Dy, &policy, &values);
        let all = watch.operands(&policy);
        assert_eq!((all.len(), all[1].operand, all[1].underflowed), (2, "wgrad dy", 0.0));
    }
}

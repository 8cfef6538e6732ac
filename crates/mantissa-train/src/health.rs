//! Numerics telemetry of a training step: the share of each tensor that its format underflows or saturates,
//! and the first non-finite tensor. When off, it costs one comparison per operator.

mod gemms;
mod lost;
mod updates;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use mantissa_model::graph::NormKind;
use mantissa_model::{LinearKind, ModelConfig, Names};
use serde::Serialize;

use crate::policy::{Gemm, Side};
use crate::policy::{LinearPolicy, OperandPolicy, Policy};
use crate::store::Precision;
pub(crate) use gemms::Compared;
pub use gemms::{GemmHealth, GemmState};
pub(crate) use lost::LostSignals;
pub use lost::{LOST_DB, LOST_SHARE, LostOperand};
use lost::{of_side, side_of};
pub(crate) use updates::WeightCounts;

/// Operator of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operator {
    Embedding,
    Norm(usize, NormKind),
    Linear(usize, LinearKind),
    /// RoPE and causal attention.
    Attention(usize),
    /// Product of SiLU(gate) and up.
    Gate(usize),
    FinalNorm,
    Head,
    Loss,
}

impl Operator {
    /// Returns the name of the module in the checkpoint of this model; of other operators, as in Llama.
    pub(crate) fn module(self, config: &ModelConfig) -> String {
        match self {
            Operator::Linear(layer, kind) => config.linear(layer, kind).module,
            Operator::Head => config.head_module().to_owned(),
            Operator::Embedding => config.embedding_module(),
            _ => self.to_string(),
        }
    }

    /// Layer (the head sorts last) and linear layer, for telemetry.
    fn place(self) -> (usize, LinearKind) {
        match self {
            Operator::Linear(layer, kind) => (layer, kind),
            _ => (HEAD, LinearKind::Head),
        }
    }
}

impl fmt::Display for Operator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Operator::Embedding => f.write_str("model.embed_tokens"),
            Operator::Norm(layer, NormKind::Post) => {
                write!(f, "model.layers.{layer}.post_attention_layernorm")
            }
            Operator::Norm(layer, _) => write!(f, "model.layers.{layer}.input_layernorm"),
            Operator::Linear(layer, kind) => write!(f, "model.layers.{layer}.{}", Names::LLAMA.linear(*kind)),
            Operator::Attention(layer) => write!(f, "model.layers.{layer}.self_attn"),
            Operator::Gate(layer) => write!(f, "model.layers.{layer}.mlp"),
            Operator::FinalNorm => f.write_str("model.norm"),
            Operator::Head => f.write_str("lm_head"),
            Operator::Loss => f.write_str("loss"),
        }
    }
}

/// Operand of a linear layer's products.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum OperandKind {
    /// Input of the layer.
    X,
    /// Weight of the layer.
    W,
    /// Gradient of the layer's output.
    Dy,
}

impl OperandKind {
    /// Returns the two products that read the operand, with its name and its scheme in each.
    fn products(self, policy: &LinearPolicy) -> [(&'static str, &OperandPolicy); 2] {
        match self {
            OperandKind::X => [("fprop x", &policy.fprop.left), ("wgrad x", &policy.wgrad.right)],
            OperandKind::W => [("fprop w", &policy.fprop.right), ("dgrad w", &policy.dgrad.right)],
            OperandKind::Dy => [("dgrad dy", &policy.dgrad.left), ("wgrad dy", &policy.wgrad.left)],
        }
    }
}

/// Range limits of a rounding.
#[derive(Clone, Copy, Debug)]
struct Limits {
    /// Values up to this magnitude round to 0.
    tiny: f32,
    /// Finite values from this magnitude on become infinity or the largest number.
    huge: f32,
}

impl Limits {
    fn of(precision: Precision) -> Self {
        match precision {
            // Storing as f32 rounds nothing.
            Precision::F32 => Limits { tiny: 0.0, huge: f32::INFINITY },
            // Half of the smallest number, 2⁻¹³³, rounds to the even 0; half a step (2¹¹⁹) above the largest,
            // 2¹²⁸ - 2¹²⁰.
            Precision::Bf16 => Limits { tiny: f32::from_bits(1 << 15), huge: f32::from_bits(0x7f7f_8000) },
            // Half of 2⁻²⁴; half a step (16) above 65504.
            Precision::F16 => Limits { tiny: 2.980_232_2e-8, huge: 65_520.0 },
        }
    }
}

/// True if every value rounds to 0; ends at the first that does not.
pub(crate) fn vanishes(precision: Precision, values: &[f32]) -> bool {
    let Limits { tiny, .. } = Limits::of(precision);
    values.iter().all(|value| value.abs() <= tiny)
}

/// Counts over the values of a tensor.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sums {
    amax: f32,
    underflowed: u64,
    saturated: u64,
    count: u64,
    nonzero: u64,
    /// Sums of the squared values and of the squared rounding errors; of quantized operands only.
    signal: f64,
    noise: f64,
}

impl Sums {
    /// Counts saturated values alone.
    pub(crate) fn saturated(saturated: u64) -> Self {
        Sums { saturated, ..Sums::default() }
    }

    /// Counts over values `exact` that were rounded to `rounded`, except saturation.
    pub(crate) fn of_rounding(exact: &[f32], rounded: &[f32]) -> Self {
        let mut sums = Sums { count: exact.len() as u64, ..Sums::default() };
        for (x, q) in exact.iter().zip(rounded) {
            let error = f64::from(x - q);
            sums.amax = sums.amax.max(x.abs());
            sums.underflowed += u64::from(*x != 0.0 && *q == 0.0);
            sums.nonzero += u64::from(*x != 0.0);
            sums.signal += f64::from(*x) * f64::from(*x);
            sums.noise += error * error;
        }
        sums
    }

    /// Adds the counts of other values.
    pub(crate) fn join(&mut self, other: &Sums) {
        self.amax = self.amax.max(other.amax);
        self.underflowed += other.underflowed;
        self.saturated += other.saturated;
        self.count += other.count;
        self.nonzero += other.nonzero;
        self.signal += other.signal;
        self.noise += other.noise;
    }

    /// Signal-to-quantization-noise ratio in dB, if rounding had an error.
    fn sqnr(&self) -> Option<f64> {
        Some(10.0 * (self.signal / self.noise).log10()).filter(|db| db.is_finite())
    }

    /// True if rounding left next to nothing of the values.
    fn is_lost(&self) -> bool {
        if self.signal > 0.0 {
            return self.sqnr().is_some_and(|db| db <= LOST_DB);
        }
        // Of plain dtypes there are counts only.
        self.nonzero > 0 && self.underflowed as f64 >= LOST_SHARE * self.nonzero as f64
    }

    fn add(&mut self, values: &[f32], limits: Limits) {
        let (mut amax, mut under, mut over) = (0f32, 0, 0);
        for value in values {
            let size = value.abs();
            // `max` ignores NaN; infinity does not enter the largest value either way.
            amax = amax.max(size);
            self.nonzero += u64::from(size > 0.0);
            under += u64::from(size <= limits.tiny && size > 0.0);
            over += u64::from(size >= limits.huge && size < f32::INFINITY);
        }
        self.amax = self.amax.max(amax);
        self.underflowed += under;
        self.saturated += over;
        self.count += values.len() as u64;
    }
}

/// Returns `None` for infinity, which JSON cannot represent.
fn finite(value: f32) -> Option<f32> {
    Some(value).filter(|value| value.is_finite())
}

/// Health of a parameter in one update.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WeightHealth {
    /// Name of the parameter.
    pub tensor: String,
    /// Largest weight magnitude before rounding into the working copy; `None` if infinite.
    pub amax: Option<f32>,
    /// Largest gradient magnitude, unscaled and before clipping.
    pub grad_amax: Option<f32>,
    /// Euclidean norm of the gradient, unscaled and before clipping.
    pub grad_norm: Option<f64>,
    /// Norm of the update over the norm of the weights before it, both in f32; `None` for weights of 0.
    pub update_ratio: Option<f64>,
    /// Share of non-zero weights that are 0 in the working copy.
    pub underflowed: f64,
    /// Share of finite weights that are not finite in the working copy.
    pub saturated: f64,
    /// Share of weights whose working copy the update changed. Without a master copy, the others learned
    /// nothing.
    pub changed: f64,
}

/// Health of a linear layer's operand in one step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OperandHealth {
    /// Module name of the linear layer.
    pub linear: String,
    /// Product and operand: `fprop x`, `fprop w`, `dgrad dy`; also `wgrad x`, `dgrad w`, `wgrad dy` if the
    /// second product uses another format.
    pub operand: &'static str,
    /// Matmul operand dtype.
    pub format: String,
    /// Largest magnitude before rounding; gradients include the loss scale. `None` if infinite.
    pub amax: Option<f32>,
    /// Share of all values that are non-zero and round to 0.
    pub underflowed: f64,
    /// Share of finite values beyond the largest number of the format.
    pub saturated: f64,
    /// Signal-to-quantization-noise ratio in dB; `None` for plain dtypes and exact rounding.
    pub sqnr_db: Option<f64>,
    /// True if rounding left next to nothing of it ([`LOST_DB`], [`LOST_SHARE`]).
    #[serde(skip)]
    pub lost: bool,
}

/// Routing of the tokens of a step in one layer with experts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ExpertHealth {
    /// Layer index.
    pub layer: usize,
    /// Tokens that chose each expert.
    pub tokens: Vec<u64>,
}

/// Health of a step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepHealth {
    /// Step number, from 1.
    pub step: u64,
    /// Parameters in forward order; empty if the update was skipped.
    pub weights: Vec<WeightHealth>,
    /// Operands of the linear layers in forward order.
    pub operands: Vec<OperandHealth>,
    /// Layers with experts, in forward order.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub experts: Vec<ExpertHealth>,
    /// Results of the matmuls that have rounded operands, in forward order.
    pub gemms: Vec<GemmHealth>,
}

/// Observer of a step's tensors.
#[derive(Debug, Default)]
pub(crate) enum Watch {
    /// No observation.
    #[default]
    Off,
    /// Counts underflow and saturation of operands, and errors of results.
    Health(Mutex<Seen>),
    /// Finds the first non-finite tensor. Needs one thread, so that operators run in order.
    Finite(Mutex<Option<(Operator, String)>>),
}

/// Telemetry of a step so far.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// Counts by layer (the head sorts last), linear layer and operand, for the products in
    /// [`OperandKind::products`].
    operands: BTreeMap<(usize, LinearKind, OperandKind), [Sums; 2]>,
    /// Errors of results by place and matmul.
    results: BTreeMap<((usize, LinearKind), Gemm), Compared>,
}

/// Layer, linear layer, matmul and side of a quantized operand.
pub(crate) type OperandPlace = (usize, LinearKind, Gemm, Side);

/// Layer index of the head.
const HEAD: usize = usize::MAX;

impl Watch {
    /// Starts counting underflow and saturation.
    pub(crate) fn health() -> Self {
        Watch::Health(Mutex::default())
    }

    /// Starts a search for the first non-finite tensor.
    pub(crate) fn finite() -> Self {
        Watch::Finite(Mutex::default())
    }

    /// True if nothing is observed.
    pub(crate) fn is_off(&self) -> bool {
        matches!(self, Watch::Off)
    }

    /// Returns the result of a search: operator and product.
    pub(crate) fn found(&self, config: &ModelConfig) -> Option<String> {
        match self {
            Watch::Finite(found) => {
                lock(found).as_ref().map(|(at, what)| format!("{}: {what}", at.module(config)))
            }
            _ => None,
        }
    }

    /// Observes an operand before the products round it.
    pub(crate) fn operand(&self, at: Operator, operand: OperandKind, policy: &LinearPolicy, values: &[f32]) {
        if self.is_off() {
            return;
        }
        let (layer, linear) = at.place();
        let key = (layer, linear, operand);
        let formats = operand.products(policy).map(|(name, operand)| (name, operand.precision()));
        match self {
            Watch::Off => {}
            // Quantized operands are counted where they are made.
            Watch::Health(_) if !policy.is_plain() => {}
            Watch::Health(seen) => {
                let Seen { operands, .. } = &mut *lock(seen);
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
                        note(found, at, || name.to_owned());
                    } else if values.iter().any(|value| value.abs() >= huge) {
                        note(found, at, || format!("{name}, rounded to {}", precision.scheme()));
                    }
                }
            }
        }
    }

    /// Observes the rounding of a quantized operand. An input counts for the linear layer `kind`, the first of those
    /// that read it.
    pub(crate) fn rounding(&self, (layer, kind, gemm, side): OperandPlace, sums: &Sums) {
        if let Watch::Health(seen) = self {
            let (operand, product) = of_side(gemm, side);
            lock(seen).operands.entry((layer, kind, operand)).or_default()[product].join(sums);
        }
    }

    /// Observes an operator's result; `what` names it: `fprop y`, `dgrad dx`, `wgrad dw`, `output`,
    /// `gradient`.
    pub(crate) fn result(&self, at: Operator, what: &'static str, values: &[f32]) {
        if let Watch::Finite(found) = self
            && values.iter().any(|value| !value.is_finite())
        {
            note(found, at, || what.to_owned());
        }
    }

    /// Adds the errors of some rows of a matmul's result.
    pub(crate) fn compared(&self, at: Operator, gemm: Gemm, found: &Compared) {
        if let Watch::Health(seen) = self {
            lock(seen).results.entry((at.place(), gemm)).or_default().join(found);
        }
    }

    /// Returns the errors of the matmuls' results, in forward order.
    pub(crate) fn gemms(&self, config: &ModelConfig) -> Vec<GemmHealth> {
        let Watch::Health(seen) = self else { return Vec::new() };
        let health = |(&(place, gemm), sums): (&((usize, LinearKind), Gemm), &Compared)| {
            sums.health(operator(place).module(config), gemm)
        };
        lock(seen).results.iter().map(health).collect()
    }

    /// Passes the operands that lost their signal on to `to`.
    pub(crate) fn tell_lost(&self, to: &LostSignals) {
        let Watch::Health(seen) = self else { return };
        for (&(layer, kind, operand), sums) in &lock(seen).operands {
            for (product, sums) in sums.iter().enumerate().filter(|(_, sums)| sums.is_lost()) {
                let (gemm, side) = side_of(operand, product);
                to.note_measured((layer, kind, gemm, side), sums.sqnr());
            }
        }
    }

    /// Returns the operand counts under `policy` in a model.
    pub(crate) fn operands(&self, policy: &Policy, config: &ModelConfig) -> Vec<OperandHealth> {
        let Watch::Health(seen) = self else { return Vec::new() };
        let mut all = Vec::new();
        for (&(layer, kind, operand), sums) in &lock(seen).operands {
            let at = operator((layer, kind));
            let linear = match at {
                Operator::Linear(layer, _) => policy.linear_of(layer, config.num_hidden_layers),
                _ => std::borrow::Cow::Borrowed(&policy.head),
            };
            let products = operand.products(&linear).into_iter().zip(sums);
            all.extend(products.filter(|(_, sums)| sums.count > 0).map(|((name, operand), sums)| {
                let share = |count: u64| count as f64 / sums.count as f64;
                OperandHealth {
                    linear: at.module(config),
                    operand: name,
                    format: operand.scheme.to_string(),
                    amax: finite(sums.amax),
                    underflowed: share(sums.underflowed),
                    saturated: share(sums.saturated),
                    sqnr_db: sums.sqnr(),
                    lost: sums.is_lost(),
                }
            }));
        }
        all
    }
}

/// Returns the operator at a [place](Operator::place).
fn operator((layer, kind): (usize, LinearKind)) -> Operator {
    if layer == HEAD { Operator::Head } else { Operator::Linear(layer, kind) }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Stores `name` unless one is already stored.
fn note(found: &Mutex<Option<(Operator, String)>>, at: Operator, what: impl FnOnce() -> String) {
    lock(found).get_or_insert_with(|| (at, what()));
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(crate) mod tests {
    use super::*;
    use crate::store::round;

    /// Compares the counted limits with the rounding itself.
    #[test]
    fn limits_match_rounding() {
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

    /// Llama of four layers.
    pub(crate) fn config() -> ModelConfig {
        let config = serde_json::json!({
            "model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 4,
            "num_attention_heads": 1, "vocab_size": 8, "max_position_embeddings": 8, "rms_norm_eps": 1e-5,
            "tie_word_embeddings": false
        });
        ModelConfig::from_json(&config, "config").unwrap()
    }

    #[test]
    fn modules_are_named_as_in_the_checkpoint() {
        let config = serde_json::json!({
            "model_type": "gpt_neox", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2,
            "num_attention_heads": 1, "vocab_size": 8, "max_position_embeddings": 8, "layer_norm_eps": 1e-5,
            "rotary_pct": 0.5
        });
        let config = ModelConfig::from_json(&config, "config").unwrap();
        let qkv = Operator::Linear(1, LinearKind::Qkv).module(&config);
        assert_eq!(qkv, "gpt_neox.layers.1.attention.query_key_value");
        assert_eq!(Operator::Head.module(&config), "embed_out");
    }

    #[test]
    fn a_search_keeps_the_first_and_names_rounding() {
        let policy = Policy::fp16();
        let watch = Watch::finite();
        let down = Operator::Linear(3, LinearKind::Down);
        watch.operand(down, OperandKind::X, &policy.linear, &[1.0, 65_000.0]);
        assert_eq!(watch.found(&config()), None);
        watch.operand(down, OperandKind::X, &policy.linear, &[1.0, -7e4]);
        watch.result(Operator::Loss, "output", &[f32::NAN]);
        assert_eq!(watch.found(&config()).unwrap(), "model.layers.3.mlp.down_proj: fprop x, rounded to f16");
        let watch = Watch::finite();
        watch.operand(down, OperandKind::X, &Policy::bf16().linear, &[1.0, -7e4]);
        watch.result(Operator::Head, "dgrad dx", &[f32::NAN]);
        assert_eq!(watch.found(&config()).unwrap(), "lm_head: dgrad dx");
    }

    #[test]
    fn operands_are_counted_once_for_each_format() {
        let mut policy = Policy::fp16();
        let watch = Watch::health();
        let at = Operator::Linear(0, LinearKind::Q);
        let values = [1e-9, 1.0, 0.0, 8e4];
        watch.operand(at, OperandKind::Dy, &policy.linear, &values);
        watch.operand(at, OperandKind::Dy, &policy.linear, &values[..2]);
        let all = watch.operands(&policy, &config());
        assert_eq!((all.len(), all[0].operand, all[0].format.as_str()), (1, "dgrad dy", "f16"));
        assert_eq!((all[0].underflowed, all[0].saturated, all[0].amax), (2.0 / 6.0, 1.0 / 6.0, Some(8e4)));
        policy.linear.wgrad.left = OperandPolicy::plain(Precision::Bf16);
        let watch = Watch::health();
        watch.operand(at, OperandKind::Dy, &policy.linear, &values);
        let all = watch.operands(&policy, &config());
        assert_eq!((all.len(), all[1].operand, all[1].underflowed), (2, "wgrad dy", 0.0));
    }
}

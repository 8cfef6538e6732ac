//! Sizes of the model, the load and the memory of the device.

use super::super::value::{Args, Compute, Fault, Subject, Value};
use crate::memory::{Inference, capacity, concurrency, head_bytes, inference, linear_bytes, longest_context};
use crate::precision::KVS;
use crate::recommend::SMALL_MODEL;
use crate::shape::{CacheLayers, Matrices, ModelPart, ModelShape, Role};

/// Values about sizes.
pub(super) const VALUES: &[(&str, Compute)] = &[
    ("model", |s, _| Ok(Value::text(&s.deployment.shape.name))),
    ("device", |s, _| Ok(Value::text(&*s.deployment.device.title))),
    ("memory", |s, _| number(s.memory())),
    ("context", |s, _| number(s.deployment.load.context as f64)),
    ("batch", |s, _| number(s.deployment.load.batch as f64)),
    ("depth", |s, _| number(s.deployment.load.depth() as f64)),
    ("prompt", |s, _| number(s.deployment.load.prefill as f64)),
    ("layers", |s, _| number(s.deployment.shape.layers as f64)),
    ("hidden", |s, _| number(s.deployment.shape.hidden as f64)),
    ("vocab", |s, _| number(s.deployment.shape.vocab as f64)),
    ("widest", |s, _| number(widest(s.deployment.shape))),
    ("parameters", |s, _| number(s.deployment.shape.parameters() as f64)),
    ("active", |s, _| number(s.deployment.shape.active_parameters() as f64)),
    ("linear_weights", |s, _| number(s.deployment.shape.linear_weights() as f64)),
    ("embedding", |s, _| number(s.deployment.shape.embedding as f64)),
    ("head", |s, _| number(s.deployment.shape.head() as f64)),
    ("others", |s, _| number(s.deployment.shape.others as f64)),
    // Bytes of what no precision quantizes, in bf16.
    ("unquantized", |s, _| {
        let shape = s.deployment.shape;
        number(2.0 * (shape.parameters() - shape.linear_weights()) as f64)
    }),
    ("tied", |s, _| Ok(Value::Flag(s.deployment.shape.tied))),
    // One latent holds keys and values.
    ("latent", |s, _| Ok(Value::Flag(s.deployment.shape.caches.iter().any(|c| c.values == 0)))),
    ("mixture", |s, _| Ok(Value::Flag(s.deployment.shape.is_mixture()))),
    ("small", |s, _| Ok(Value::Flag(s.deployment.shape.parameters() < SMALL_MODEL))),
    // Share of a part of the layers (attention, mlp, experts, mixer) in all linear weights, and in those of a token.
    ("part_share", |s, a| number(part_share(s.deployment.shape, a, |m| m.count)?)),
    ("part_active", |s, a| number(part_share(s.deployment.shape, a, |m| m.active)?)),
    ("part_share_of", |_, a| {
        let shape = ModelShape::named(a.text(1)?).map_err(|_| a.fault(1, "a model"))?;
        number(part_share(&shape, a, |m| m.count)?)
    }),
    // Inputs of a down projection, and the largest power of two that divides them.
    ("down_width", |s, _| number(down_width(s.deployment.shape) as f64)),
    ("down_run", |s, _| {
        let width = down_width(s.deployment.shape);
        number(if width == 0 { 0.0 } else { f64::from(width.trailing_zeros()).exp2() })
    }),
    ("heads", |s, _| number(s.deployment.shape.heads as f64)),
    ("kv_heads", |s, _| number(s.deployment.shape.kv_heads as f64)),
    ("expert_share", |s, _| Ok(Value::number(expert_share(s.deployment.shape)))),
    ("cache_formula", |s, _| Ok(Value::text(cache_formula(s.deployment.shape)))),
    ("linear_bytes", |s, a| number(linear_bytes(s.deployment.shape, &a.precision(0)?))),
    ("head_bytes", |s, a| number(head_bytes(s.deployment.shape, &a.precision(0)?))),
    // Bytes of weights, KV cache and activations of the load in a precision.
    ("weights", |s, a| number(bytes(s, a)?.weights())),
    ("cache", |s, a| number(bytes(s, a)?.kv)),
    ("activations", |s, a| number(bytes(s, a)?.activations)),
    ("total", |s, a| number(bytes(s, a)?.total())),
    ("kv_token", |s, a| number(a.kv(0)?.bytes_per_token(s.deployment.shape))),
    ("kv_sequence", |s, a| number(a.kv(0)?.bytes_of_sequence(s.deployment.shape, a.count(1)?))),
    ("kv_sequence_of", |_, a| {
        let shape = ModelShape::named(a.text(0)?).map_err(|_| a.fault(0, "a model"))?;
        number(KVS[0].bytes_of_sequence(&shape, a.count(1)?))
    }),
    ("fitting", |s, a| number(fitting(s, a)? as f64)),
    ("capacity", |s, a| {
        let longest = longest_context(
            s.deployment.shape,
            &a.precision(0)?,
            &a.kv(1)?,
            s.deployment.load.longest(s.deployment.shape),
            s.memory(),
            s.deployment.load.split(),
        );
        Ok(Value::text(capacity(fitting(s, a)?, s.deployment.load.context, longest)))
    }),
];

fn number(number: f64) -> Result<Value, Fault> {
    Ok(Value::Number(number))
}

/// Inputs of the widest linear layer.
fn widest(shape: &ModelShape) -> f64 {
    shape.matrices.iter().map(|m| m.cols as u64).max().unwrap_or(shape.hidden) as f64
}

/// Inputs of the down projections that most weights belong to.
fn down_width(shape: &ModelShape) -> u64 {
    let down = shape.matrices.iter().filter(|m| m.role == Role::Down);
    down.max_by_key(|m| m.weights()).map_or(0, |m| m.cols as u64)
}

/// Parts of a layer by name.
const PARTS: [(&str, ModelPart); 4] = [
    ("attention", ModelPart::Attention),
    ("mlp", ModelPart::Mlp),
    ("experts", ModelPart::Experts),
    ("mixer", ModelPart::Mixer),
];

/// Share of the part that the first argument names in so many matrices of each kind.
fn part_share(shape: &ModelShape, args: &Args<'_>, count: fn(&Matrices) -> u64) -> Result<f64, Fault> {
    let name = args.text(0)?;
    let (_, part) =
        *PARTS.iter().find(|(known, _)| *known == name).ok_or_else(|| args.fault(0, "a part of a layer"))?;
    let weights = |m: &Matrices| count(m) * (m.rows * m.cols) as u64;
    let own: u64 = shape.matrices.iter().filter(|m| m.part == part).map(weights).sum();
    let all: u64 = shape.matrices.iter().map(weights).sum();
    Ok(own as f64 / all.max(1) as f64)
}

/// Share of the tokens that a routed expert sees; `None` without experts.
fn expert_share(shape: &ModelShape) -> Option<f64> {
    let routed = |m: &&Matrices| m.part == ModelPart::Experts && m.active < m.count;
    shape.matrices.iter().find(routed).map(|m| m.active as f64 / m.count as f64)
}

/// Says how the bytes of a token's keys and values come about.
fn cache_formula(shape: &ModelShape) -> String {
    let of = |c: &CacheLayers| {
        let values = if c.values == 0 { "one latent of" } else { "2 ×" };
        format!("{} layers × {values} {} elements × 2 bytes", c.layers, c.keys)
    };
    shape.caches.iter().map(of).collect::<Vec<_>>().join(" + ")
}

/// Bytes of the load in a precision (argument 0) with a KV scheme (argument 1).
fn bytes(subject: &Subject<'_>, args: &Args<'_>) -> Result<Inference, Fault> {
    let (shape, load) = (subject.deployment.shape, subject.deployment.load);
    Ok(inference(shape, &args.precision(0)?, &args.kv(1)?, load.context, load.batch, load.split()))
}

/// Sequences of the load's context that fit in a precision (argument 0) with a KV scheme (argument 1).
fn fitting(subject: &Subject<'_>, args: &Args<'_>) -> Result<u64, Fault> {
    let (shape, load) = (subject.deployment.shape, subject.deployment.load);
    let (precision, kv) = (args.precision(0)?, args.kv(1)?);
    Ok(concurrency(shape, &precision, &kv, load.context, subject.memory(), load.split()))
}

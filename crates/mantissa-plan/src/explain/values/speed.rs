//! Predicted speeds, and what the device multiplies.

use mantissa_num::parse_weight;

use super::super::value::{Args, Compute, Fault, Subject, Value};
use crate::hardware::{Device, Execution, Unit};
use crate::parallel::{Parallel, Split};
use crate::precision::KVS;
use crate::recommend::rate;
use crate::roofline::{Bound, Setup, Speed, chunks_of, decode_intensity, speculation};

/// Units by name.
const UNITS: [Unit; 9] =
    [Unit::F32, Unit::Tf32, Unit::F16, Unit::Bf16, Unit::Fp8, Unit::Fp6, Unit::Fp4, Unit::Int8, Unit::Int4];

/// Values about speed.
pub(super) const VALUES: &[(&str, Compute)] = &[
    // Choice for the load.
    ("plan_choice", |s, _| Ok(Value::words(s.plan().recommendation.precision))),
    ("plan_kv", |s, _| Ok(Value::words(s.plan().recommendation.kv))),
    ("plan_decode", |s, a| {
        let name = a.precision(0)?.name;
        let row = s.plan().rows.iter().find(|row| row.precision.name == name);
        Ok(Value::number(row.map(|row| row.decode.tokens_per_s[1])))
    }),
    // Rates of the device, and of one that is named.
    ("rate", |s, a| Ok(Value::number(s.deployment.device.rate(unit(a, 0)?)))),
    ("rate_on", |_, a| Ok(Value::number(a.device(0)?.rate(unit(a, 1)?)))),
    ("ridge_on", |_, a| Ok(Value::number(a.device(0)?.ridge(unit(a, 1)?)))),
    ("rates", |s, _| Ok(Value::text(rates(s.deployment.device)))),
    ("link", |s, _| Ok(Value::Number(s.deployment.device.link))),
    ("intensity", |_, a| Ok(Value::Number(decode_intensity(a.number(0)?)))),
    // What multiplies a precision, and a scheme of weights with one of inputs.
    ("unit", |s, a| Ok(Value::text(of_precision(s, a)?.unit.name()))),
    ("fallback", |s, a| Ok(Value::words(of_precision(s, a)?.fallback))),
    ("ridge", |s, a| {
        let unit = of_precision(s, a)?.unit;
        Ok(Value::Number(s.deployment.device.ridge(unit).unwrap_or(0.0)))
    }),
    ("scheme_unit", |s, a| Ok(Value::text(of_scheme(s, a)?.unit.name()))),
    ("scheme_fallback", |s, a| Ok(Value::words(of_scheme(s, a)?.fallback))),
    // Decoding in a precision with so many sequences and tokens in each, with a KV scheme.
    ("decode_rate", |s, a| Ok(Value::Number(decode(s, a)?.tokens_per_s[1]))),
    ("step_bytes", |s, a| Ok(Value::Number(decode(s, a)?.bytes))),
    ("decode_bound", |s, a| Ok(Value::text(decode(s, a)?.bound.words()))),
    ("speed", |s, a| Ok(Value::text(interval(&decode(s, a)?)))),
    ("cache_reads", |s, a| {
        let (precision, kv) = (a.precision(0)?, a.kv(3)?);
        let one = s.setup(&precision, &kv).cache_reads(a.number(2)? as u64);
        Ok(Value::Number(a.number(1)? * one))
    }),
    // A prompt in a precision of so many tokens, with a KV scheme: tokens/s, chunks, bytes read, those of earlier chunks among
    // them.
    ("prompt_rate", |s, a| Ok(Value::Number(prefill(s, a)?.tokens_per_s[1]))),
    ("prompt_chunks", |_, a| Ok(Value::Number(chunks_of(a.count(0)?)))),
    ("prompt_bytes", |s, a| Ok(Value::Number(prefill(s, a)?.bytes))),
    ("prompt_bound", |s, a| Ok(Value::text(prefill(s, a)?.bound.words()))),
    ("prompt_computes", |s, a| Ok(Value::Flag(prefill(s, a)?.bound == Bound::Compute))),
    ("prompt_cache_reads", |s, a| {
        let (precision, kv) = (a.precision(0)?, a.kv(2)?);
        Ok(Value::Number(s.setup(&precision, &kv).prompt_cache_reads(a.count(1)?)))
    }),
    ("crossover", |s, a| {
        let (precision, other) = (a.precision(0)?, a.precision(1)?);
        let batch = s.setup(&precision, &KVS[0]).crossover(&other, s.deployment.load.depth(), a.number(2)?);
        Ok(Value::number(batch.map(|batch| batch as f64)))
    }),
    ("verify_cost", |s, a| Ok(Value::Number(verify_cost(s, a, 1)?))),
    ("speculation", |s, a| {
        let gain = speculation(a.number(2)?, a.count(1)? as u32, 0.05);
        Ok(Value::Number(gain / verify_cost(s, a, 1)?))
    }),
    // Decoding of one sequence in BF16 on so many devices, which exchange values of so many bits.
    ("shared_speed", |s, a| Ok(Value::text(interval(&shared(s, a, |setup| one(s, &setup))?)))),
    ("waits_for_links", |s, a| Ok(Value::Flag(shared(s, a, |setup| one(s, &setup))?.bound == Bound::Link))),
    ("exchange_seconds", |s, a| {
        Ok(Value::Number(shared(s, a, |setup| setup.exchange_seconds(2048.0, 1.0))?))
    }),
];

/// Returns the unit that an argument names.
fn unit(args: &Args<'_>, index: usize) -> Result<Unit, Fault> {
    let name = args.text(index)?;
    UNITS.into_iter().find(|unit| unit.name() == name).ok_or_else(|| args.fault(index, "a unit"))
}

/// Lists the rates of a device.
fn rates(device: &Device) -> String {
    let of = |(unit, rate): &(Unit, f64)| format!("{unit} at {:.1} T/s", rate / 1e12);
    device.rates.iter().map(of).collect::<Vec<_>>().join(", ")
}

/// Formats the middle of a predicted rate with its interval.
fn interval(speed: &Speed) -> String {
    let [low, middle, high] = speed.tokens_per_s.map(rate);
    format!("{middle} tok/s (predicted {low}–{high})")
}

/// Says how the device multiplies a precision.
fn of_precision(subject: &Subject<'_>, args: &Args<'_>) -> Result<Execution, Fault> {
    let precision = args.precision(0)?;
    Ok(subject.deployment.device.execute(&precision.weight_format(), precision.input_format().as_ref()))
}

/// Says how the device multiplies weights of a scheme with inputs of a scheme; unquantized inputs if it is left out.
fn of_scheme(subject: &Subject<'_>, args: &Args<'_>) -> Result<Execution, Fault> {
    let format = |index: usize| {
        let parsed = parse_weight(args.text(index)?).map_err(|_| args.fault(index, "a scheme"))?;
        Ok(parsed.format)
    };
    let inputs = if args.list.len() > 1 { Some(format(1)?) } else { None };
    Ok(subject.deployment.device.execute(&format(0)?, inputs.as_ref()))
}

/// Predicts decoding: precision, sequences, tokens of each, KV scheme.
fn decode(subject: &Subject<'_>, args: &Args<'_>) -> Result<Speed, Fault> {
    let (precision, kv) = (args.precision(0)?, args.kv(3)?);
    Ok(subject.setup(&precision, &kv).decode(args.count(1)?, args.number(2)? as u64))
}

/// Predicts a prompt: precision, tokens, KV scheme.
fn prefill(subject: &Subject<'_>, args: &Args<'_>) -> Result<Speed, Fault> {
    let (precision, kv) = (args.precision(0)?, args.kv(2)?);
    Ok(subject.setup(&precision, &kv).prefill(args.count(1)?))
}

/// Predicts the time of a step that verifies drafted tokens (argument `index`) over that of a plain one.
fn verify_cost(subject: &Subject<'_>, args: &Args<'_>, index: usize) -> Result<f64, Fault> {
    let (precision, kv) = (args.precision(0)?, KVS[0]);
    let setup = subject.setup(&precision, &kv);
    let (tokens, depth) = (args.count(index)? + 1, subject.deployment.load.depth());
    let one = 1.0 / setup.decode(1, depth).tokens_per_s[1];
    Ok(tokens as f64 / setup.verify(1, tokens, depth).tokens_per_s[1] / one)
}

/// Evaluates BF16 on so many devices that exchange values of so many bits.
fn shared<T>(subject: &Subject<'_>, args: &Args<'_>, of: impl Fn(Setup<'_>) -> T) -> Result<T, Fault> {
    let (precision, kv) = (args.precision(0)?, KVS[0]);
    let split = Split { devices: args.count(1)?, by: Parallel::Tensor };
    Ok(of(Setup { split, reduce_bits: args.number(2)?, ..subject.setup(&precision, &kv) }))
}

/// Predicts decoding of one sequence.
fn one(subject: &Subject<'_>, setup: &Setup<'_>) -> Speed {
    setup.decode(1, subject.deployment.load.depth())
}

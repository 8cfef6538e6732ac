//! Number formats and functions of numbers.

use mantissa_num::Scheme;
use mantissa_num::codebook::Book;
use mantissa_num::minifloat::{self, MiniFloat};

use super::super::measures::{
    MEASURED_ON, accumulator_bias, accumulator_error, compensation_error, immovable_from, positive_sqnr,
    rotated_sqnr, smallest_level, sqnr, update_limits,
};
use super::super::number::{Anatomy, anatomy};
use super::super::value::{Args, Compute, Fault, Value};
use crate::precision::format_of;

/// Floats by name.
const FLOATS: [(&str, MiniFloat); 5] = [
    ("e2m1", minifloat::E2M1),
    ("e4m3", minifloat::E4M3),
    ("e5m2", minifloat::E5M2),
    ("f16", minifloat::F16),
    ("bf16", minifloat::BF16),
];

/// Values about numbers.
pub(super) const VALUES: &[(&str, Compute)] = &[
    ("max", |_, a| number(a.number(0)?.max(a.number(1)?))),
    ("min", |_, a| number(a.number(0)?.min(a.number(1)?))),
    ("sqrt", |_, a| number(a.number(0)?.sqrt())),
    ("power", |_, a| number(a.number(0)?.powf(a.number(1)?))),
    // Signal to noise of made-up numbers in dB: scheme, and σ of one outlier in each row.
    ("db", |_, a| Ok(Value::number(sqnr(a.text(0)?, outlier(a)?)))),
    // The same with rotated rows, and of numbers without negative ones.
    ("db_rotated", |_, a| Ok(Value::number(rotated_sqnr(a.text(0)?, outlier(a)?)))),
    ("db_positive", |_, a| Ok(Value::number(positive_sqnr(a.text(0)?)))),
    // A number under a scheme in a row of a largest magnitude: what is stored, its error, and the scale.
    ("stored", |_, a| number(shown(a)?.value)),
    ("stored_error", |_, a| number(error(a)?)),
    ("stored_scale", |_, a| Ok(Value::number(shown(a)?.scale))),
    // Smallest positive level of a scheme over its largest.
    ("smallest_level", |_, a| Ok(Value::number(smallest_level(&scheme(a, 0)?)))),
    ("measured_on", |_, _| Ok(Value::text(MEASURED_ON))),
    ("bits", |_, a| number(format_of(a.text(0)?).bits_per_weight(4096, 4096))),
    ("bits_f32_scales", |_, a| {
        let weight = mantissa_num::parse_weight(a.text(0)?).map_err(|_| a.fault(0, "a scheme"))?;
        number(weight.format.bits_per_weight(8192, 8192))
    }),
    // Errors of a sum of so many FP8 products in Hopper's accumulator.
    ("summed_error", |_, a| number(accumulator_error(products(a)?)[0])),
    ("promoted_error", |_, a| number(accumulator_error(products(a)?)[1])),
    ("summed_bias", |_, a| number(accumulator_bias(products(a)?))),
    ("promotion", |_, _| number(mantissa_num::accumulate::HOPPER_PROMOTION as f64)),
    // GPTQ's update by the factor of the inverse Hessian, and by that of the Hessian.
    ("compensation_error", |_, _| number(compensation_error()[0])),
    ("wrong_compensation_error", |_, _| number(compensation_error()[1])),
    // Fields of a float.
    ("exponent_bits", |_, a| number(f64::from(float(a)?.exponent_bits))),
    ("mantissa_bits", |_, a| number(f64::from(float(a)?.mantissa_bits))),
    ("largest", |_, a| number(f64::from(float(a)?.max()))),
    ("smallest_normal", |_, a| number(f64::from(float(a)?.min_normal()))),
    ("smallest", |_, a| number(f64::from(float(a)?.min_subnormal()))),
    ("powers", |_, a| {
        let float = float(a)?;
        number((f64::from(float.max()) / f64::from(float.min_subnormal())).log2())
    }),
    ("distinct", |_, a| number(distinct(float(a)?))),
    // Relative changes below which a float keeps no update, and above which it keeps all.
    ("dropped", |_, a| number(update_limits(float(a)?)[0])),
    ("kept", |_, a| number(update_limits(float(a)?)[1])),
    ("immovable", |_, a| number(immovable_from(float(a)?, a.number(1)?))),
    ("nf4_below", |_, _| number(nf4().filter(|x| *x < 0.0).count() as f64)),
    ("nf4_above", |_, _| number(nf4().filter(|x| *x > 0.0).count() as f64)),
    ("nf4_second", |_, _| number(nf4().filter(|x| *x < 0.99).fold(0.0, f64::max))),
];

fn number(number: f64) -> Result<Value, Fault> {
    Ok(Value::Number(number))
}

/// Outlier of made-up rows, if the second argument has one.
fn outlier(args: &Args<'_>) -> Result<Option<f32>, Fault> {
    if args.list.len() > 1 { Ok(Some(args.number(1)? as f32)) } else { Ok(None) }
}

/// Returns the scheme that an argument names.
fn scheme(args: &Args<'_>, index: usize) -> Result<Scheme, Fault> {
    args.text(index)?.parse().map_err(|_| args.fault(index, "a scheme"))
}

/// Returns the anatomy of a number (argument 0) under a scheme (1) in a row of a largest magnitude (2).
fn shown(args: &Args<'_>) -> Result<Anatomy, Fault> {
    let amax = args.number(2)? as f32;
    anatomy(args.number(0)?, &scheme(args, 1)?, amax, amax)
        .map_err(|_| args.fault(1, "a scheme with codes of elements"))
}

/// Error of such a number; that of f32 arithmetic is none of the code's.
fn error(args: &Args<'_>) -> Result<f64, Fault> {
    let (found, amax) = (shown(args)?.error, args.number(2)?);
    Ok(if found.abs() < 1e-6 * amax { 0.0 } else { found })
}

/// Levels of NF4.
fn nf4() -> impl Iterator<Item = f64> {
    (0..16).map(|code| f64::from(Book::Nf4.level(code)))
}

/// Returns the float that the first argument names.
fn float(args: &Args<'_>) -> Result<MiniFloat, Fault> {
    let name = args.text(0)?;
    let found = FLOATS.into_iter().find(|(known, _)| *known == name);
    found.map(|(_, float)| float).ok_or_else(|| args.fault(0, "a float"))
}

/// Products of a sum that is emulated: so many, but no more than take a moment.
fn products(args: &Args<'_>) -> Result<usize, Fault> {
    Ok((args.count(0)? as usize).clamp(64, 1 << 15))
}

/// Distinct values of a float.
fn distinct(float: MiniFloat) -> f64 {
    let mut values: Vec<f32> =
        (0..1 << float.bits()).map(|code| float.decode(code)).filter(|x| x.is_finite()).collect();
    values.sort_by(f32::total_cmp);
    values.dedup_by(|a, b| a == b);
    values.len() as f64
}

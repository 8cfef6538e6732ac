//! Checks all 2^32 floats through three elements against an independent formula.
//!
//! `cargo test --release -p mantissa-num -- --ignored exhaustive` (a few minutes).

use mantissa_num::Rounding;
use mantissa_num::minifloat::{BF16, E4M3, E5M2, MiniFloat, Overflow};

/// Nearest value of a format with `mantissa` bits, smallest binade `2^least` and largest value `max`, ties to even,
/// before overflow. In f64 the division by a power of two and the rounding are exact.
fn nearest(x: f32, mantissa: i32, least: i32) -> f64 {
    let x = f64::from(x);
    let exponent = ((x.to_bits() >> 52) & 0x7ff) as i32 - 1023;
    let quantum = 2f64.powi(exponent.max(least) - mantissa);
    (x / quantum).round_ties_even() * quantum
}

/// Calls `check` with every f32 that is not NaN, on all cores.
fn for_every_float(check: impl Fn(f32) + Sync) {
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get() as u64);
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (start, end) = ((thread << 32) / threads, ((thread + 1) << 32) / threads);
            let check = &check;
            scope.spawn(move || {
                (start..end).map(|bits| f32::from_bits(bits as u32)).filter(|x| !x.is_nan()).for_each(check);
            });
        }
    });
}

/// Checks that `decode(encode(x))` is the nearest value with the sign of `x`; beyond `max` it is `max` or,
/// unsaturated, `special`.
fn check_element(format: MiniFloat, mantissa: i32, least: i32, max: f64, special: f64) {
    let values: Vec<f32> = (0..1u32 << format.bits()).map(|code| format.decode(code)).collect();
    for_every_float(|x| {
        let expected = if x.is_infinite() { f64::from(x) } else { nearest(x, mantissa, least) };
        let value =
            |overflow| f64::from(values[format.encode(x, overflow, Rounding::NearestEven, 0) as usize]);
        let (saturated, unsaturated) = (value(Overflow::Saturate), value(Overflow::Special));
        let (clamped, past) = match expected.abs() > max {
            true => (max.copysign(expected), special.copysign(expected)),
            false => (expected, expected),
        };
        assert!(saturated.to_bits() == clamped.to_bits(), "{} {x:e}: {saturated:e}", format.name);
        let equal = unsaturated.to_bits() == past.to_bits() || (unsaturated.is_nan() && past.is_nan());
        assert!(equal, "{} {x:e}: {unsaturated:e}", format.name);
    });
}

#[test]
#[ignore = "minutes"]
fn exhaustive_e4m3() {
    check_element(E4M3, 3, -6, 448.0, f64::NAN);
}

#[test]
#[ignore = "minutes"]
fn exhaustive_e5m2() {
    check_element(E5M2, 2, -14, 57344.0, f64::INFINITY);
}

#[test]
#[ignore = "minutes"]
fn exhaustive_bf16() {
    for_every_float(|x| {
        let bits = x.to_bits();
        let expected = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        assert_eq!(BF16.encode(x, Overflow::Special, Rounding::NearestEven, 0), expected, "{x:e}");
    });
}

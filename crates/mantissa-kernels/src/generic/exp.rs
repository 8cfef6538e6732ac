//! e^x that vectorizes and is the same on every platform.
//!
//! Range reduction after Cody & Waite, "Software Manual for the Elementary Functions" (1980), ch. 6: x = n·ln 2 + r
//! with |r| <= ln 2 / 2, where ln 2 is split into a high part of 9 significant bits (so that n·high is exact) and the
//! rest. Then e^r = 1 + r + r²·P(r). P has degree 4, with coefficients fitted by Lawson's iteration for the minimax
//! relative error on |r| <= 0.3467 (0.07 units of 2^-24 after rounding them to f32). Finally e^x = 2^n·e^r, with 2^n
//! applied in two factors, so that subnormal results are rounded once.

use super::{ROUND_MAGIC, round_even_i32};

const LN2_HIGH: f32 = 0.693_359_375; // 355/512
const LN2_LOW: f32 = -2.121_944_4e-4; // ln 2 - 355/512
/// P, constant term first.
const P: [f32; 5] = [0.499_999_94, 0.166_665_21, 0.041_668_39, 0.008_368_735, 0.001_381_455_9];
/// Beyond these e^x is 0 or infinite in f32; they also limit n to [-151, 129], where both factors of 2^n are normal.
const LOWEST: f32 = -104.0;
const HIGHEST: f32 = 89.0;

/// e^x within 1 ulp (measured over every f32); NaN for NaN.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    let x = super::clamp(x, LOWEST, HIGHEST);
    let scaled = x * std::f32::consts::LOG2_E;
    let n = (scaled + ROUND_MAGIC) - ROUND_MAGIC;
    let r = (x - n * LN2_HIGH) - n * LN2_LOW;
    let p = (((P[4] * r + P[3]) * r + P[2]) * r + P[1]) * r + P[0];
    let e_r = (p * (r * r) + r) + 1.0;
    let n = round_even_i32(scaled);
    let half = n >> 1;
    e_r * pow2(half) * pow2(n.wrapping_sub(half))
}

/// 2^n for n in [-126, 127].
#[inline(always)]
fn pow2(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

#[inline(always)]
pub(crate) fn exp_inplace(x: &mut [f32]) {
    for v in x {
        *v = exp(*v);
    }
}

/// 1.5·2^52, the f64 counterpart of [`ROUND_MAGIC`].
const ROUND_MAGIC_F64: f64 = 6_755_399_441_055_744.0;
const LN2_HIGH_F64: f64 = 0.693_147_180_369_123_816_490; // the top 32 bits of ln 2
const LN2_LOW_F64: f64 = 1.908_214_929_270_587_700_02e-10; // ln 2 minus the above
/// 1/k! for k = 13 down to 2; the first omitted term is below 0.3467^14/14! = 4.1e-18.
const INVERSE_FACTORIALS: [f64; 12] = [
    1.0 / 6_227_020_800.0,
    1.0 / 479_001_600.0,
    1.0 / 39_916_800.0,
    1.0 / 3_628_800.0,
    1.0 / 362_880.0,
    1.0 / 40_320.0,
    1.0 / 5_040.0,
    1.0 / 720.0,
    1.0 / 120.0,
    1.0 / 24.0,
    1.0 / 6.0,
    0.5,
];

/// e^x in f64 for x <= 0, relative error below 4e-16; anything under -700 counts as -700 (1e-304, negligible in a sum
/// that contains 1).
#[inline(always)]
pub(crate) fn exp_f64_nonpositive(x: f64) -> f64 {
    exp_f64_bounded(if x < -700.0 { -700.0 } else { x })
}

/// e^x in f64 for x in [-700, 700], relative error below 4e-16.
#[inline(always)]
fn exp_f64_bounded(x: f64) -> f64 {
    let shifted = x * std::f64::consts::LOG2_E + ROUND_MAGIC_F64;
    let n = shifted - ROUND_MAGIC_F64;
    let r = (x - n * LN2_HIGH_F64) - n * LN2_LOW_F64;
    let mut p = INVERSE_FACTORIALS[0];
    for c in &INVERSE_FACTORIALS[1..] {
        p = p * r + c;
    }
    let e_r = (p * (r * r) + r) + 1.0;
    // The low bits of `shifted` hold n; the shift drops everything else, and adding 1023 gives an exponent field.
    e_r * f64::from_bits(shifted.to_bits().wrapping_add(1023) << 52)
}

/// `x[i]^exponent` for `x[i] >= 0`, computed as e^(exponent · ln x) in f64 and rounded once. The error before
/// rounding is below 2^-40 of the result for every f32 `x` and `|exponent| <= 8`. NaN for NaN and below 0.
///
/// The C library's version differs between platforms and is not vectorized.
#[inline(always)]
pub(crate) fn pow_inplace(x: &mut [f32], exponent: f32) {
    let (zero, infinity) = match exponent {
        0.0 => (1.0, 1.0),
        _ if exponent > 0.0 => (0.0, f32::INFINITY),
        _ => (f32::INFINITY, 0.0),
    };
    for v in x {
        let power = exp_f64_of_f32(f64::from(exponent) * ln_of_f32(*v)) as f32;
        let power = if *v == 0.0 { zero } else { power };
        let power = if *v == f32::INFINITY { infinity } else { power };
        *v = if *v >= 0.0 { power } else { f32::NAN };
    }
}

/// ln x of a finite f32 `x > 0`, absolute error below 1e-13: x = 2^k·m with m in [1/√2, √2), s = (m - 1)/(m + 1),
/// ln m = 2(s + s³/3 + s⁵/5 + …), without a branch.
#[inline(always)]
fn ln_of_f32(x: f32) -> f64 {
    /// 2^52, whose last bit is 1: adds an integer below it, given as the low bits of the representation.
    const UNIT: f64 = 4_503_599_627_370_496.0;
    /// Makes the exponent positive for every f32, the smallest of which is 2^-149.
    const BIAS: u64 = 1024;
    let bits = f64::from(x).to_bits();
    let offset = bits.wrapping_sub(std::f64::consts::FRAC_1_SQRT_2.to_bits()).wrapping_add(BIAS << 52);
    let biased = offset >> 52;
    let k = f64::from_bits(biased | UNIT.to_bits()) - (UNIT + BIAS as f64);
    let m = f64::from_bits(bits.wrapping_sub(biased.wrapping_sub(BIAS) << 52));
    let s = (m - 1.0) / (m + 1.0);
    let s2 = s * s;
    // |s| <= 0.1716, so the first omitted term (s^19 / 19) is below 2e-16.
    let mut sum = 1.0 / 17.0;
    for odd in [15.0, 13.0, 11.0, 9.0, 7.0, 5.0, 3.0, 1.0] {
        sum = sum * s2 + 1.0 / odd;
    }
    k * std::f64::consts::LN_2 + 2.0 * s * sum
}

/// e^x in f64 for an e^x that is then rounded to f32; beyond the range of f32, e^x of a bound that rounds to 0 or
/// infinity.
#[inline(always)]
fn exp_f64_of_f32(x: f64) -> f64 {
    let x = if x < -110.0 { -110.0 } else { x };
    let x = if x > 90.0 { 90.0 } else { x };
    exp_f64_bounded(x)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn powers_match_the_library_in_f64() {
        let mut differ = 0;
        let mut all = 0;
        for exponent in [2.4f32, 0.05, 0.5, 1.0, -0.3, 0.95, -1.7, 3.0, 0.0] {
            let values: Vec<f32> = (0..0x7f80_0000_u32).step_by(40_009).map(f32::from_bits).collect();
            let mut powers = values.clone();
            pow_inplace(&mut powers, exponent);
            for (x, power) in values.iter().zip(powers) {
                let exact = f64::from(*x).powf(f64::from(exponent)) as f32;
                all += 1;
                differ += usize::from(power != exact);
                let gap = i64::from(power.to_bits()) - i64::from(exact.to_bits());
                assert!(gap.abs() <= 1, "{x:e}^{exponent} is {power:e}, not {exact:e}");
            }
        }
        assert!(differ * 10_000 <= all, "{differ} of {all} are rounded the other way");
    }

    #[test]
    fn powers_of_special_values() {
        let mut x = [0.0, f32::INFINITY, -1.0, f32::NAN, 1.0];
        pow_inplace(&mut x, 2.4);
        assert_eq!((x[0], x[1], x[4]), (0.0, f32::INFINITY, 1.0));
        assert!(x[2].is_nan() && x[3].is_nan());
        let mut x = [0.0, f32::INFINITY, -0.0];
        pow_inplace(&mut x, -0.3);
        assert_eq!(x, [f32::INFINITY, 0.0, f32::INFINITY]);
        let mut x = [f32::MAX, f32::from_bits(1)];
        pow_inplace(&mut x, 2.0);
        assert_eq!(x, [f32::INFINITY, 0.0]);
    }

    /// Distance from the exact value in units of the last place of the nearest f32.
    fn error_ulp(x: f32) -> f64 {
        let exact = f64::from(x).exp();
        let got = f64::from(exp(x));
        let rounded = exact as f32;
        if rounded.is_infinite() || got.is_infinite() {
            let limit = f64::from(f32::MAX) * (1.0 + f64::from(f32::EPSILON));
            return if got == f64::from(rounded) || (exact - limit).abs() < 1e-6 * limit {
                0.0
            } else {
                f64::INFINITY
            };
        }
        let ulp = f64::from(f32::from_bits(rounded.to_bits() + 1)) - f64::from(rounded);
        (got - exact).abs() / if ulp.is_finite() { ulp } else { 2.0_f64.powi(104) }
    }

    fn worst(step: usize) -> (f64, f32) {
        let finite =
            |sign: u32| (0..0x7f80_0000_u32).step_by(step).map(move |bits| f32::from_bits(bits | sign));
        let errors = finite(0).chain(finite(1 << 31)).map(|x| (error_ulp(x), x));
        errors.fold((0.0, 0.0), |a, b| if b.0 > a.0 { b } else { a })
    }

    #[test]
    fn within_two_ulp_on_a_grid() {
        let (error, x) = worst(3001);
        assert!(error <= 2.0, "exp({x:e}) is {error} ulp off");
    }

    #[test]
    #[ignore = "walks every f32 (minutes)"]
    fn within_two_ulp_everywhere() {
        let (error, x) = worst(1);
        println!("worst: {error} ulp at {x:e}");
        assert!(error <= 1.0, "exp({x:e}) is {error} ulp off");
    }

    #[test]
    fn special_values() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-0.0), 1.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp(f32::NEG_INFINITY).to_bits(), 0);
        assert_eq!(exp(88.722_84), f32::INFINITY);
        assert!(exp(88.722_83).is_finite());
        assert_eq!(exp(-103.98).to_bits(), 0);
        assert_eq!(exp(-103.97).to_bits(), 1);
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn f64_matches_the_library() {
        for i in 0..700_000 {
            let x = -f64::from(i) * 1e-3;
            let exact = x.exp();
            assert!((exp_f64_nonpositive(x) - exact).abs() <= 5e-16 * exact, "x = {x}");
        }
        assert_eq!(exp_f64_nonpositive(0.0), 1.0);
        assert!(exp_f64_nonpositive(f64::NEG_INFINITY) < 1e-303);
        assert!(exp_f64_nonpositive(f64::NAN).is_nan());
    }
}

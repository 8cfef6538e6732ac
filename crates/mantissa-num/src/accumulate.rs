//! Accumulators of matrix units: sums of products of 8-bit floats.
//!
//! Hopper's tensor cores keep about 14 bits of the sum. The 32 products of one step and the previous sum are aligned
//! to their greatest exponent and truncated below the 14th bit, toward zero; the sum is kept with as many bits
//! (DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", arXiv 2412.19437, sec. 3.3.2 and 3.5.2). As a format of the
//! sum, that is 8 exponent bits and 13 mantissa bits after the leading one (Zhang et al. 2024, "SageAttention2",
//! arXiv 2411.10958, sec. 3.4). DeepSeek's remedy is promotion: every 128 products the sum is added to an f32 sum and
//! restarts at 0.
//!
//! This models published descriptions and was not compared with the hardware. Where they are ambiguous, a product is
//! aligned at the sum of its factors' exponents, before its mantissa in [1, 4) is normalized.

use std::fmt;
use std::str::FromStr;

/// Products that Hopper's tensor cores add in one step: `k` of `wgmma.m64nNk32` with 8-bit operands.
pub const HOPPER_STEP: usize = 32;

/// Bits kept after the leading one.
pub const HOPPER_FRACTION_BITS: u32 = 13;

/// DeepSeek-V3's interval of promotion, four steps.
pub const HOPPER_PROMOTION: usize = 128;

/// An accumulator of products of floats of at most 8 bits. Parses from and prints to `f32`, `hopper`, `hopper-128`,
/// `14-bit`, `14-bit-128`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Accumulator {
    /// Every sum rounded to f32.
    #[default]
    F32,
    /// Hopper's 14 bits.
    Hopper {
        /// Products after which the sum is added to an f32 sum, a multiple of [`HOPPER_STEP`]; `None` for never.
        promote: Option<usize>,
    },
    /// A sum of fewer bits without loss in the products: after every [`HOPPER_STEP`] of them, added exactly (in f64),
    /// the sum is truncated toward zero. The least that any unit with so many bits loses.
    Bits {
        /// Bits of the sum, 2 to 24, with the leading one.
        bits: u32,
        /// As that of `Hopper`.
        promote: Option<usize>,
    },
}

impl fmt::Display for Accumulator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Accumulator::F32 => f.write_str("f32"),
            Accumulator::Hopper { promote: None } => f.write_str("hopper"),
            Accumulator::Hopper { promote: Some(interval) } => write!(f, "hopper-{interval}"),
            Accumulator::Bits { bits, promote: None } => write!(f, "{bits}-bit"),
            Accumulator::Bits { bits, promote: Some(interval) } => write!(f, "{bits}-bit-{interval}"),
        }
    }
}

/// The text is not the name of an accumulator.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "accumulator: expected f32, hopper, hopper-128 or another multiple of 32, 14-bit or 14-bit-128, got \"{0}\""
)]
pub struct AccumulatorError(String);

impl FromStr for Accumulator {
    type Err = AccumulatorError;

    fn from_str(text: &str) -> Result<Self, AccumulatorError> {
        let interval = |n: &usize| *n > 0 && n.is_multiple_of(HOPPER_STEP) && *n <= 1 << 20;
        match text {
            "f32" => return Ok(Accumulator::F32),
            "hopper" => return Ok(Accumulator::Hopper { promote: None }),
            _ => {}
        }
        let fault = || AccumulatorError(text.into());
        let interval = |text: &str| text.parse().ok().filter(interval).ok_or_else(fault);
        if let Some(promote) = text.strip_prefix("hopper-") {
            return Ok(Accumulator::Hopper { promote: Some(interval(promote)?) });
        }
        let (bits, rest) = text.split_once("-bit").ok_or_else(fault)?;
        let bits = bits.parse().ok().filter(|bits| (2..=24).contains(bits)).ok_or_else(fault)?;
        let promote = match rest {
            "" => None,
            _ => Some(interval(rest.strip_prefix('-').ok_or_else(fault)?)?),
        };
        Ok(Accumulator::Bits { bits, promote })
    }
}

impl Accumulator {
    /// Dot product `Σ a_i b_i` in the given order, for floats of at most 8 bits (any whose products are exact in
    /// f32). NaN or infinite if one of them is.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn dot(self, a: &[f32], b: &[f32]) -> f32 {
        assert_eq!(a.len(), b.len(), "dot: factors of different lengths");
        match self {
            Accumulator::F32 => a.iter().zip(b).fold(0.0, |sum, (a, b)| sum + a * b),
            Accumulator::Hopper { promote } => {
                let interval = promote.unwrap_or(a.len()).max(1);
                let chains = a.chunks(interval).zip(b.chunks(interval));
                chains.fold(0.0, |sum, (a, b)| sum + hopper_chain(a, b))
            }
            Accumulator::Bits { bits, promote } => {
                let interval = promote.unwrap_or(a.len()).max(1);
                let chains = a.chunks(interval).zip(b.chunks(interval));
                chains.fold(0.0, |sum, (a, b)| sum + truncated_chain(a, b, bits))
            }
        }
    }
}

/// Sum of products that stay in the tensor core's accumulator.
fn hopper_chain(a: &[f32], b: &[f32]) -> f32 {
    let (a, a_rest) = a.as_chunks::<HOPPER_STEP>();
    let (b, b_rest) = b.as_chunks::<HOPPER_STEP>();
    let sum = a.iter().zip(b).fold(0.0, |sum, (a, b)| hopper_step(sum, a, b));
    if a_rest.is_empty() {
        return sum;
    }
    let padded = |rest: &[f32]| {
        let mut step = [0.0; HOPPER_STEP];
        step[..rest.len()].copy_from_slice(rest);
        step
    };
    hopper_step(sum, &padded(a_rest), &padded(b_rest))
}

/// Sum of products that is truncated to `bits` bits after every step.
fn truncated_chain(a: &[f32], b: &[f32], bits: u32) -> f32 {
    let steps = a.chunks(HOPPER_STEP).zip(b.chunks(HOPPER_STEP));
    let sum = steps.fold(0f64, |sum, (a, b)| {
        let products = a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b));
        let sum = sum + products.sum::<f64>();
        // Cuts the fraction; infinity and NaN have none that this would change to something finite.
        if sum.is_finite() { f64::from_bits(sum.to_bits() >> (53 - bits) << (53 - bits)) } else { sum }
    });
    sum as f32
}

/// Adds 32 products to `sum` in one step.
fn hopper_step(sum: f32, a: &[f32; HOPPER_STEP], b: &[f32; HOPPER_STEP]) -> f32 {
    // The greatest power of two among the terms, and the greatest factor. Both are compared as bits, which order like
    // magnitudes and compare faster. A product of zero has exponent bits 0.
    let (mut top, mut greatest) = (power(sum).to_bits() as i32, sum.to_bits() & MAGNITUDE);
    for (a, b) in a.iter().zip(b) {
        top = top.max((power(*a) * power(*b)).to_bits() as i32);
        greatest = greatest.max(a.to_bits() & MAGNITUDE).max(b.to_bits() & MAGNITUDE);
    }
    let top = f32::from_bits(top as u32);
    if top == 0.0 && f32::from_bits(greatest).is_finite() {
        return sum;
    }
    if !f32::from_bits(greatest).is_finite() || !(LEAST..=GREATEST).contains(&top) {
        // A term is infinite, NaN, or beyond the range of 8-bit floats.
        return a.iter().zip(b).fold(sum, |sum, (a, b)| sum + a * b);
    }
    let unit = top * UNIT;
    let per_unit = 1.0 / unit;
    // Conversion to an integer truncates toward zero. Terms are below 2^15, so the sum of 33 fits.
    let whole = |x: f32| (x * per_unit) as i32;
    let total = a.iter().zip(b).fold(whole(sum), |total, (a, b)| total + whole(a * b));
    let excess = (32 - total.unsigned_abs().leading_zeros()).saturating_sub(HOPPER_FRACTION_BITS + 1);
    let kept = (total.unsigned_abs() >> excess << excess) as f32 * unit;
    if total < 0 { -kept } else { kept }
}

/// Last bit kept beside a term of 1.
const UNIT: f32 = 1.0 / (1 << HOPPER_FRACTION_BITS) as f32;

/// Between these powers nothing overflows, and the last bit is never subnormal.
const LEAST: f32 = 1e-30;
const GREATEST: f32 = 1e30;

/// All bits except the sign.
const MAGNITUDE: u32 = 0x7fff_ffff;

/// Power of two at or below a magnitude; 0 for zero and f32 subnormals.
fn power(x: f32) -> f32 {
    f32::from_bits(x.to_bits() & 0x7f80_0000)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const HOPPER: Accumulator = Accumulator::Hopper { promote: None };
    const PROMOTED: Accumulator = Accumulator::Hopper { promote: Some(HOPPER_PROMOTION) };

    /// The sum of equal terms stalls when a term is below the last bit kept: at 2^14 with 14 bits.
    #[test]
    fn a_sum_of_ones_stalls_where_its_bits_are_full() {
        for (k, sum) in [(1, 1.0), (100, 100.0), (16_384, 16_384.0), (65_536, 16_384.0)] {
            assert_eq!(HOPPER.dot(&vec![1.0; k], &vec![1.0; k]), sum, "{k}");
            assert_eq!(PROMOTED.dot(&vec![1.0; k], &vec![1.0; k]), k as f32, "{k}");
            assert_eq!(Accumulator::F32.dot(&vec![1.0; k], &vec![1.0; k]), k as f32, "{k}");
        }
        assert_eq!(HOPPER.dot(&[-1.0; 40_000], &[1.0; 40_000]), -16_384.0);
    }

    /// Next to a term of 2^e, anything below 2^(e - 13) is truncated toward zero, for both signs.
    #[test]
    fn terms_are_cut_off_below_the_greatest_of_their_step() {
        let mut b = [0.0; 32];
        b[0] = 256.0;
        for (small, left) in
            [(2f32.powi(-5), 2f32.powi(-5)), (2f32.powi(-6), 0.0), (1.75 * 2f32.powi(-5), 2f32.powi(-5))]
        {
            for sign in [1.0, -1.0] {
                b[7] = sign * small;
                assert_eq!(HOPPER.dot(&[1.0; 32], &b), 256.0 + sign * left, "{small}");
            }
        }
        // Cancellation leaves the truncated remainder.
        (b[1], b[7]) = (-256.0, 2f32.powi(-6));
        assert_eq!(HOPPER.dot(&[1.0; 32], &b), 0.0);
        assert_eq!(HOPPER.dot(&[1.0; 32], &[2f32.powi(-6); 32]), 0.5);
    }

    #[test]
    fn short_sums_are_exact_and_non_finite_values_propagate() {
        let a: Vec<f32> = (0..96).map(|i| ((i * 7) % 15) as f32 - 7.0).collect();
        let b: Vec<f32> = (0..96).map(|i| ((i * 5) % 13) as f32 - 6.0).collect();
        let exact: f32 = a.iter().zip(&b).map(|(a, b)| a * b).sum();
        for accumulator in [Accumulator::F32, HOPPER, PROMOTED] {
            assert_eq!(accumulator.dot(&a, &b), exact, "{accumulator}");
            assert_eq!(accumulator.dot(&[], &[]), 0.0);
            assert!(accumulator.dot(&[1.0, f32::NAN], &[1.0, 1.0]).is_nan());
            assert_eq!(accumulator.dot(&[1.0, f32::INFINITY], &[1.0, 1.0]), f32::INFINITY);
            assert!(accumulator.dot(&[1.0, f32::INFINITY], &[1.0, 0.0]).is_nan());
        }
    }

    /// Factors of one sign, K = 4096: each product loses on average half of the last bit of the long sum.
    #[test]
    fn long_products_of_one_sign_lose_percents_without_promotion() {
        let random = |seed, i| f64::from(crate::round::random_u32(seed, i)) / f64::from(u32::MAX);
        let e4m3 = |x: f64| {
            let float = crate::minifloat::E4M3;
            float.decode(float.encode_saturating(x as f32))
        };
        let a: Vec<f32> = (0..4096).map(|i| e4m3(448.0 * random(1, i))).collect();
        let b: Vec<f32> = (0..4096).map(|i| e4m3(448.0 * random(2, i))).collect();
        let exact: f64 = a.iter().zip(&b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
        let lost = |accumulator: Accumulator| 1.0 - f64::from(accumulator.dot(&a, &b)) / exact;
        let found = [HOPPER, PROMOTED, Accumulator::F32].map(lost);
        assert!((0.02..0.1).contains(&found[0]), "{found:?}");
        assert!((0.0005..0.005).contains(&found[1]) && found[2].abs() < 1e-5, "{found:?}");
    }

    #[test]
    fn names_round_trip_as_text() {
        for text in ["f32", "hopper", "hopper-128", "hopper-32", "14-bit", "8-bit-128"] {
            assert_eq!(text.parse::<Accumulator>().unwrap().to_string(), text);
        }
        for text in [
            "",
            "1-bit",
            "25-bit",
            "14-bit-100",
            "14-bitx",
            "hopper-0",
            "hopper-100",
            "hopper-",
            "f16",
            "hopper-99999999",
        ] {
            assert!(text.parse::<Accumulator>().unwrap_err().to_string().contains("expected"), "{text}");
        }
    }

    /// Experiment E12: without promotion a 14-bit sum loses in proportion to K; promoted every 128 products it loses
    /// the same at every K. Published: .00074, .00293, .01162 at K = 1024, 4096, 16384; promoted .00011.
    #[test]
    fn promotion_makes_the_error_independent_of_length() {
        let error = |accumulator: Accumulator, k: usize| {
            let of_seed = |seed: u64| {
                let value = |i: usize| {
                    // The magnitude of a sum of four uniform numbers is near the magnitude of a normal one.
                    let uniform = |j: usize| {
                        f64::from(crate::round::random_u32(seed, (4 * i + j) as u64)) / 4_294_967_296.0 - 0.5
                    };
                    let float = crate::minifloat::E4M3;
                    float.decode(
                        float.encode_saturating(((0..4).map(uniform).sum::<f64>() * 1.732).abs() as f32),
                    )
                };
                let (a, b): (Vec<f32>, Vec<f32>) =
                    ((0..k).map(value).collect(), (k..2 * k).map(value).collect());
                let exact: f64 = a.iter().zip(&b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                (f64::from(accumulator.dot(&a, &b)) / exact - 1.0).abs()
            };
            (1..=3).map(of_seed).sum::<f64>() / 3.0
        };
        let at = |name: &str| [1024, 4096, 16384].map(|k| error(name.parse().unwrap(), k));
        let (free, promoted, hopper) = (at("14-bit"), at("14-bit-128"), at("hopper-128"));
        for (found, published) in free.iter().zip([0.00074, 0.00293, 0.01162]) {
            assert!((found / published - 1.0).abs() < 0.2, "{free:?}");
        }
        assert!(promoted.iter().all(|found| (found / 1.1e-4 - 1.0).abs() < 0.3), "{promoted:?}");
        // Products that are aligned to the greatest and truncated too lose more, but not more with length.
        assert!(hopper.iter().all(|found| (3e-4..9e-4).contains(found)), "{hopper:?}");
    }
}

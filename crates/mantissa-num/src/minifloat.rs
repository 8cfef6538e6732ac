//! Floating-point elements of 16 bits and fewer, and TF32: code ↔ value.
//!
//! Sources: IEEE 754-2019 (f16), OCP 8-bit Floating Point Specification v1.0 (E4M3, E5M2), OCP Microscaling Formats
//! v1.0 section 5.3 (E3M2, E2M3, E2M1), and the `ml_dtypes` README for the `fnuz` variants.
//!
//! A code is sign | exponent | mantissa, low-aligned in a `u32`. With bias `B`, `m` mantissa bits and exponent field `E`:
//! `value = (-1)^s · 2^(E-B) · (1 + M/2^m)` for `E > 0`, and `(-1)^s · 2^(1-B) · M/2^m` for `E = 0`.

use crate::round::Rounding;

/// Meaning of the codes with the largest exponent field.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Special {
    /// All-ones exponent: mantissa 0 is infinity, the rest NaN (f16, bf16, E5M2).
    Ieee,
    /// Only `S.1…1.1…1` is NaN, no infinity (E4M3, "fn").
    NanOnly,
    /// Every code is a finite number (FP6, FP4).
    Finite,
    /// NaN is the code of negative zero, no infinity (the AMD "fnuz" variants).
    Fnuz,
}

/// Result of encoding a value beyond the largest finite one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Overflow {
    /// The largest finite value of the same sign, for infinities too.
    Saturate,
    /// Infinity if the format has one, else NaN, else the largest finite value.
    Special,
}

/// A sign-exponent-mantissa element format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MiniFloat {
    /// Name in the Scheme grammar.
    pub name: &'static str,
    /// Width of the exponent field.
    pub exponent_bits: u32,
    /// Width of the mantissa field.
    pub mantissa_bits: u32,
    /// Exponent bias.
    pub bias: i32,
    /// Use of the top codes.
    pub special: Special,
}

const fn float(name: &'static str, e: u32, m: u32, bias: i32, special: Special) -> MiniFloat {
    MiniFloat { name, exponent_bits: e, mantissa_bits: m, bias, special }
}

/// IEEE 754 binary16.
pub const F16: MiniFloat = float("f16", 5, 10, 15, Special::Ieee);
/// TensorFloat-32, the 19 high bits of an f32: 8 exponent and 10 mantissa bits. Stored in 32 bits: see
/// [`Code::Tf32`](crate::Code::Tf32).
pub const TF32: MiniFloat = float("tf32", 8, 10, 127, Special::Ieee);
/// bfloat16: the upper half of an f32.
pub const BF16: MiniFloat = float("bf16", 8, 7, 127, Special::Ieee);
/// OCP FP8 E4M3 (`float8_e4m3fn`): largest finite 448 = 1.75 · 2^8.
pub const E4M3: MiniFloat = float("fp8-e4m3", 4, 3, 7, Special::NanOnly);
/// OCP FP8 E5M2: largest finite 57344 = 1.75 · 2^15.
pub const E5M2: MiniFloat = float("fp8-e5m2", 5, 2, 15, Special::Ieee);
/// FP8 E4M3 with bias 8 and a single NaN at 0x80: largest finite 240.
pub const E4M3_FNUZ: MiniFloat = float("fp8-e4m3fnuz", 4, 3, 8, Special::Fnuz);
/// FP8 E5M2 with bias 16 and a single NaN at 0x80: largest finite 57344.
pub const E5M2_FNUZ: MiniFloat = float("fp8-e5m2fnuz", 5, 2, 16, Special::Fnuz);
/// OCP FP6 E2M3: largest 7.5.
pub const E2M3: MiniFloat = float("fp6-e2m3", 2, 3, 1, Special::Finite);
/// OCP FP6 E3M2: largest 28.
pub const E3M2: MiniFloat = float("fp6-e3m2", 3, 2, 3, Special::Finite);
/// OCP FP4 E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and negatives.
pub const E2M1: MiniFloat = float("fp4-e2m1", 2, 1, 1, Special::Finite);

/// Every minifloat of at most 16 bits.
pub const ALL: [MiniFloat; 9] = [F16, BF16, E4M3, E5M2, E4M3_FNUZ, E5M2_FNUZ, E2M3, E3M2, E2M1];

impl MiniFloat {
    /// Bits of a code.
    pub const fn bits(&self) -> u32 {
        1 + self.exponent_bits + self.mantissa_bits
    }

    /// The value of `code` (its low [`bits`](Self::bits) bits). Exact: every format here embeds in f32.
    pub fn decode(&self, code: u32) -> f32 {
        let m = self.mantissa_bits;
        let magnitude = code & self.magnitude_mask();
        let negative = code & self.sign_mask() != 0;
        if negative && magnitude == 0 && self.special == Special::Fnuz {
            return f32::NAN;
        }
        if magnitude > self.max_code() {
            let infinite = self.special == Special::Ieee && magnitude == self.max_code() + 1;
            let value = if infinite { f32::INFINITY } else { f32::NAN };
            return if negative { -value } else { value };
        }
        let field = magnitude >> m;
        let fraction = magnitude & ((1 << m) - 1);
        // Significand as an integer of units 2^(exponent - m).
        let (significand, exponent) = if field == 0 {
            (fraction, 1 - self.bias)
        } else {
            (fraction | 1 << m, field as i32 - self.bias)
        };
        let value = (f64::from(significand) * pow2(exponent - m as i32)) as f32;
        if negative { -value } else { value }
    }

    /// Code of `x`. NaN becomes the NaN code (sign kept if there are two), or code 0 in a format without NaN. `index`
    /// is the element's position in its tensor: the counter of stochastic rounding.
    pub fn encode(&self, x: f32, overflow: Overflow, rounding: Rounding, index: u64) -> u32 {
        let bits = x.to_bits();
        let sign = if bits >> 31 == 1 { self.sign_mask() } else { 0 };
        if x.is_nan() {
            return self.nan_code(sign).unwrap_or(0);
        }
        let magnitude = if x.is_infinite() {
            self.max_code() + 1
        } else {
            self.round_magnitude(bits & 0x7fff_ffff, rounding, index)
        };
        if magnitude > self.max_code() {
            return match (overflow, self.special) {
                (Overflow::Saturate, _) | (_, Special::Finite) => sign | self.max_code(),
                (Overflow::Special, Special::Ieee) => sign | (self.max_code() + 1),
                (Overflow::Special, _) => self.nan_code(sign).unwrap_or(sign | self.max_code()),
            };
        }
        if magnitude == 0 && self.special == Special::Fnuz {
            return 0;
        }
        sign | magnitude
    }

    /// [`encode`](Self::encode) with saturation and nearest-even rounding, as for scaled elements.
    pub fn encode_saturating(&self, x: f32) -> u32 {
        self.encode(x, Overflow::Saturate, Rounding::NearestEven, 0)
    }

    /// Code of the largest finite value.
    pub const fn max_code(&self) -> u32 {
        match self.special {
            Special::Ieee => (((1 << self.exponent_bits) - 1) << self.mantissa_bits) - 1,
            Special::NanOnly => self.magnitude_mask() - 1,
            Special::Finite | Special::Fnuz => self.magnitude_mask(),
        }
    }

    /// Largest finite value.
    pub fn max(&self) -> f32 {
        self.decode(self.max_code())
    }

    /// Smallest positive normal value, `2^(1-B)`.
    pub fn min_normal(&self) -> f32 {
        self.decode(1 << self.mantissa_bits)
    }

    /// Smallest positive value, `2^(1-B-m)`.
    pub fn min_subnormal(&self) -> f32 {
        self.decode(1)
    }

    /// `floor(log2(max))`: the `emax_elem` of OCP Microscaling v1.0 section 6.3.
    pub const fn max_exponent(&self) -> i32 {
        (self.max_code() >> self.mantissa_bits) as i32 - self.bias
    }

    /// True if some code decodes to NaN.
    pub const fn has_nan(&self) -> bool {
        !matches!(self.special, Special::Finite)
    }

    const fn magnitude_mask(&self) -> u32 {
        (1 << (self.exponent_bits + self.mantissa_bits)) - 1
    }

    const fn sign_mask(&self) -> u32 {
        1 << (self.exponent_bits + self.mantissa_bits)
    }

    const fn nan_code(&self, sign: u32) -> Option<u32> {
        match self.special {
            // The quiet bit, as in hardware and ml_dtypes.
            Special::Ieee => Some(sign | (self.max_code() + 1) | 1 << (self.mantissa_bits - 1)),
            Special::NanOnly => Some(sign | self.magnitude_mask()),
            Special::Fnuz => Some(self.sign_mask()),
            Special::Finite => None,
        }
    }

    /// Rounds a finite f32 magnitude to a code magnitude, which may exceed [`max_code`](Self::max_code).
    fn round_magnitude(&self, bits: u32, rounding: Rounding, index: u64) -> u32 {
        let m = self.mantissa_bits as i32;
        let field = (bits >> 23) as i32;
        let fraction = bits & 0x007f_ffff;
        if field == 0 && fraction == 0 {
            return 0;
        }
        // |x| = significand · 2^(exponent - 23), significand in [2^23, 2^24) also for f32 subnormals.
        let (significand, exponent) = if field == 0 {
            let shift = fraction.leading_zeros() - 8;
            (fraction << shift, -126 - shift as i32)
        } else {
            (fraction | 0x0080_0000, field - 127)
        };
        let min_exponent = 1 - self.bias;
        let binade = exponent.max(min_exponent);
        // The quantum is 2^(binade - m); shifting right by `drop` bits divides by it.
        let drop = (binade - m) - (exponent - 23);
        let units = rounding.shift_right(u64::from(significand), drop as u32, index) as u32;
        ((binade - min_exponent) as u32 * (1 << self.mantissa_bits)) + units
    }
}

/// `2^e` for `-1022 <= e <= 1023`.
pub(crate) fn pow2(e: i32) -> f64 {
    f64::from_bits(((e + 1023) as u64) << 52)
}

/// Rounds to the nearest f16, ties to even. Values that are normal in f16, as most scales are, need only integer
/// operations.
#[inline]
pub fn f16_bits(x: f32) -> u16 {
    const DROPPED: u32 = 23 - 10;
    const REBIAS: u32 = (127 - 15) << 23;
    let (bits, magnitude) = (x.to_bits(), x.abs());
    if (1.0 / 16384.0..=65504.0).contains(&magnitude) {
        let magnitude = magnitude.to_bits() - REBIAS;
        let odd = magnitude >> DROPPED & 1;
        let rounded = (magnitude + (1 << (DROPPED - 1)) - 1 + odd) >> DROPPED;
        return (bits >> 16 & 0x8000 | rounded) as u16;
    }
    F16.encode(x, Overflow::Special, Rounding::NearestEven, 0) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Test values as (format, code, value): limits, neighbours of the subnormal range, specials.
    const TABLE: &[(MiniFloat, u32, f32)] = &[
        (E4M3, 0b0_1111_110, 448.0),
        (E4M3, 0b0_0001_000, 0.015625),
        (E4M3, 0b0_0000_001, 0.001953125),
        (E5M2, 0b0_11110_11, 57344.0),
        (E5M2, 0b0_11111_00, f32::INFINITY),
        (E5M2, 0b1_00000_01, -1.52587890625e-5),
        (E4M3_FNUZ, 0b0_1111_111, 240.0),
        (E5M2_FNUZ, 0b0_11111_11, 57344.0),
        (E2M3, 0b0_11_111, 7.5),
        (E3M2, 0b0_111_11, 28.0),
        (E2M1, 0b1_11_1, -6.0),
        (E2M1, 0b0_00_1, 0.5),
        (F16, 0x7bff, 65504.0),
        (F16, 0x0001, 5.9604645e-8),
        (BF16, 0x3f80, 1.0),
    ];

    #[test]
    fn table_decodes_and_encodes() {
        for &(format, code, value) in TABLE {
            assert_eq!(format.decode(code), value, "{} {code:#x}", format.name);
            assert_eq!(
                format.encode(value, Overflow::Special, Rounding::NearestEven, 0),
                code,
                "{}",
                format.name
            );
        }
    }

    #[test]
    fn every_code_round_trips() {
        for format in ALL {
            for code in 0..1u32 << format.bits() {
                let value = format.decode(code);
                if value.is_nan() {
                    assert!(
                        format
                            .decode(format.encode(value, Overflow::Special, Rounding::NearestEven, 0))
                            .is_nan()
                    );
                } else {
                    let back = format.encode(value, Overflow::Special, Rounding::NearestEven, 0);
                    assert_eq!(back, code, "{} {code:#x} {value}", format.name);
                }
            }
        }
    }

    #[test]
    fn half_crate_agrees_on_sixteen_bit_rounding() {
        let mut state = 1u32;
        for _ in 0..200_000 {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let x = f32::from_bits(state);
            if x.is_nan() {
                continue;
            }
            let bf16 = BF16.encode(x, Overflow::Special, Rounding::NearestEven, 0);
            // Independent formula: add half an ulp plus the tie bit, then truncate.
            let bits = x.to_bits();
            assert_eq!(bf16, bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16);
        }
    }

    #[test]
    fn stochastic_rounding_is_unbiased_and_exact_on_representable_values() {
        let rounding = Rounding::Stochastic { seed: 7 };
        let x = 1.0 + 0.3 * 0.125; // 30 % of the way from 1.0 to 1.125 in E4M3
        let n = 20_000u64;
        let up =
            (0..n).filter(|&i| E4M3.decode(E4M3.encode(x, Overflow::Saturate, rounding, i)) > 1.0).count();
        let p = up as f64 / n as f64;
        // Five standard errors of a binomial share.
        assert!((p - 0.3).abs() < 5.0 * (0.3 * 0.7 / n as f64).sqrt(), "{p}");
        assert!((0..1000).all(|i| E4M3.encode(1.125, Overflow::Saturate, rounding, i) == 0b0_0111_001));
    }

    #[test]
    fn f16_scales_match_the_reference() {
        let reference = |x| F16.encode(x, Overflow::Special, Rounding::NearestEven, 0) as u16;
        for code in 0..=0x7c00u16 {
            let (x, next) = (F16.decode(code.into()), F16.decode((code + 1).min(0x7bff).into()));
            let tie = x + (next - x) / 2.0;
            for x in [x, x.next_up(), x.next_down(), tie, tie.next_up(), tie.next_down()] {
                assert_eq!(f16_bits(x), reference(x), "{x:e}");
                assert_eq!(f16_bits(-x), reference(-x), "-{x:e}");
            }
        }
    }
}

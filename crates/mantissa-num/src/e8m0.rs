//! E8M0: an 8-bit power of two, the shared scale of OCP Microscaling v1.0 (section 5.4.1).
//!
//! Code `c` in 0..=254 is `2^(c-127)`; 255 is NaN. There is no zero and no sign.

/// Code of NaN.
pub const NAN: u8 = 255;
/// Exponent bias.
pub const BIAS: i32 = 127;

/// `2^(code-127)`, NaN for 255. Code 0 is the f32 subnormal 2^-127.
pub fn decode(code: u8) -> f32 {
    match code {
        NAN => f32::NAN,
        0 => f32::from_bits(1 << 22),
        c => f32::from_bits(u32::from(c) << 23),
    }
}

/// Code of `2^exponent`, clamped to E8M0's range.
pub fn from_exponent(exponent: i32) -> u8 {
    (exponent + BIAS).clamp(0, 254) as u8
}

/// `floor(log2|x|)` as a code; 0 gives code 0, a non-finite value NaN.
pub fn floor_of_abs(x: f32) -> u8 {
    if !x.is_finite() {
        return NAN;
    }
    floor_log2(x).map_or(0, from_exponent)
}

/// `ceil(log2|x|)` as a code; 0 gives code 0, a non-finite value NaN.
pub fn ceil_of_abs(x: f32) -> u8 {
    if !x.is_finite() {
        return NAN;
    }
    ceil_log2(x).map_or(0, from_exponent)
}

/// Nearest code by `ml_dtypes`' rounding: ties away from zero (1.5 → 2), beyond 2^127 → NaN; 0, negative, infinite
/// and NaN inputs give NaN.
pub fn nearest(x: f32) -> u8 {
    if !(x.is_finite() && x > 0.0) {
        return NAN;
    }
    let bits = x.to_bits();
    let (exponent, fraction) = (bits >> 23, bits & 0x007f_ffff);
    // 2^-127 is in the middle of the subnormals; everything below rounds to it.
    let up = if exponent == 0 { fraction > 0x0040_0000 } else { fraction >= 0x0040_0000 };
    (exponent + u32::from(up)).min(255) as u8
}

/// Exact `floor(log2|x|)` of a finite non-zero x, also for subnormals.
pub fn floor_log2(x: f32) -> Option<i32> {
    let bits = x.to_bits() & 0x7fff_ffff;
    let (field, fraction) = ((bits >> 23) as i32, bits & 0x007f_ffff);
    match (field, fraction) {
        (0, 0) => None,
        (0, f) => Some(-118 - f.leading_zeros() as i32),
        (e, _) => Some(e - 127),
    }
}

/// Exact `ceil(log2|x|)` of a finite non-zero x.
pub fn ceil_log2(x: f32) -> Option<i32> {
    let floor = floor_log2(x)?;
    let exact = f64::from(x.abs()) == crate::minifloat::pow2(floor);
    Some(if exact { floor } else { floor + 1 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logarithms_are_exact_at_the_edges() {
        assert_eq!(floor_log2(f32::from_bits(1)), Some(-149));
        assert_eq!(floor_log2(f32::from_bits(0x007f_ffff)), Some(-127));
        assert_eq!(floor_log2(f32::MIN_POSITIVE), Some(-126));
        assert_eq!(ceil_log2(f32::from_bits(0x3f80_0001)), Some(1));
        assert_eq!(ceil_log2(-4.0), Some(2));
        assert_eq!(floor_log2(0.0), None);
    }

    #[test]
    fn codes_decode_to_powers_of_two() {
        assert_eq!(decode(127), 1.0);
        assert_eq!(f64::from(decode(0)), 2f64.powi(-127));
        assert!((0..=254).all(|c| floor_of_abs(decode(c)) == c && ceil_of_abs(decode(c)) == c));
        assert!(decode(NAN).is_nan());
    }
}

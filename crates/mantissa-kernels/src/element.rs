//! Rounds values in place to the elements of a format at a given scale: simulated quantization of activations.

/// Element to which a scaled value is rounded.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Element {
    /// Integers.
    Int {
        /// Smallest.
        low: f32,
        /// Largest.
        high: f32,
    },
    /// Floats of at most 8 bits, saturating.
    Float {
        /// Mantissa bits after the leading one.
        mantissa_bits: u32,
        /// Smallest normal magnitude.
        min_normal: f32,
        /// Largest magnitude.
        max: f32,
    },
}

impl Element {
    /// The nearest element, ties to even.
    #[inline]
    pub fn round(self, x: f32) -> f32 {
        match self {
            Element::Int { low, high } => round_int(x, low, high),
            Element::Float { mantissa_bits, min_normal, max } => {
                round_float(x, min_normal.to_bits(), (23 - mantissa_bits) << 23, max)
            }
        }
    }

    /// Replaces each value `v` by `scale` times the element nearest to `v / scale`.
    pub fn round_scaled(self, x: &mut [f32], scale: f32) {
        match self {
            Element::Int { low, high } => {
                x.iter_mut().for_each(|x| *x = round_int(*x / scale, low, high) * scale);
            }
            Element::Float { mantissa_bits, min_normal, max } => {
                let (least, shift) = (min_normal.to_bits(), (23 - mantissa_bits) << 23);
                x.iter_mut().for_each(|x| *x = round_float(*x / scale, least, shift, max) * scale);
            }
        }
    }

    /// The greatest element.
    pub fn max(self) -> f32 {
        match self {
            Element::Int { high, .. } => high,
            Element::Float { max, .. } => max,
        }
    }
}

/// The nearest integer, ties to even, between `low` and `high`.
#[inline]
fn round_int(x: f32, low: f32, high: f32) -> f32 {
    // Adding and taking away 1.5·2^23 rounds to an integer anything below 2^22.
    const ROUND: f32 = 12_582_912.0;
    (x.clamp(low, high) + ROUND) - ROUND
}

/// Nearest element, ties to even. `least` is the bit pattern of the smallest normal element, `shift` the difference
/// of f32's and the element's mantissa widths, at the position of f32's exponent.
#[inline]
fn round_float(x: f32, least: u32, shift: u32, max: f32) -> f32 {
    let magnitude = x.abs().min(max);
    // Power of two whose f32 ulp equals the spacing of elements around `magnitude`: adding and subtracting it rounds
    // to an element.
    let step = f32::from_bits((magnitude.to_bits() & 0x7f80_0000).max(least) + shift);
    ((magnitude + step) - step).copysign(x)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_go_to_the_nearest_element_and_ties_to_the_even_one() {
        let int8 = Element::Int { low: -128.0, high: 127.0 };
        let e4m3 = Element::Float { mantissa_bits: 3, min_normal: 2f32.powi(-6), max: 448.0 };
        for (x, int, float) in [
            (0.5, 0.0, 0.5),
            (1.5, 2.0, 1.5),
            (17.0, 17.0, 16.0),
            (-300.0, -128.0, -288.0),
            (1e9, 127.0, 448.0),
        ] {
            assert_eq!((int8.round(x), e4m3.round(x)), (int, float), "{x}");
        }
        assert_eq!(e4m3.round(2f32.powi(-10)), 0.0, "half of the smallest subnormal");
        let mut x = [0.3, -1.0, 500.0];
        int8.round_scaled(&mut x, 0.5);
        assert_eq!(x, [0.5, -1.0, 63.5]);
        assert_eq!((int8.max(), e4m3.max()), (127.0, 448.0));
    }
}

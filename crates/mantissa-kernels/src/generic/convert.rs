//! bf16 and f16 from and to f32, in integer arithmetic: round to nearest, ties to even; a NaN keeps its sign
//! and the top bits of its payload and becomes quiet, as in the `half` crate and the processors' own
//! instructions.

#[inline(always)]
pub(crate) fn bf16_to_f32(bits: &[u16], out: &mut [f32]) {
    widen("bf16_to_f32", bits, out, from_bf16);
}

#[inline(always)]
pub(crate) fn f16_to_f32(bits: &[u16], out: &mut [f32]) {
    widen("f16_to_f32", bits, out, from_f16);
}

#[inline(always)]
pub(crate) fn bf16_le_to_f32(bytes: &[u8], out: &mut [f32]) {
    widen_le("bf16_le_to_f32", bytes, out, from_bf16);
}

#[inline(always)]
pub(crate) fn f16_le_to_f32(bytes: &[u8], out: &mut [f32]) {
    widen_le("f16_le_to_f32", bytes, out, from_f16);
}

#[inline(always)]
pub(crate) fn f32_to_bf16(x: &[f32], bits: &mut [u16]) {
    narrow("f32_to_bf16", x, bits, to_bf16);
}

#[inline(always)]
pub(crate) fn f32_to_bf16_factors(x: &[f32], bits: &mut [u16]) {
    // 2^-50: factors that are multiples of 2^-57 have products and sums that are multiples of 2^-114.
    let narrowed = |x: f32| if x.abs() < 8.881_784_2e-16 { 0 } else { to_bf16(x) };
    narrow("f32_to_bf16_factors", x, bits, narrowed);
}

#[inline(always)]
pub(crate) fn f32_to_f16(x: &[f32], bits: &mut [u16]) {
    narrow("f32_to_f16", x, bits, to_f16);
}

#[inline(always)]
pub(crate) fn f32_to_bf16_le(x: &[f32], bytes: &mut [u8]) {
    narrow_le("f32_to_bf16_le", x, bytes, to_bf16);
}

#[inline(always)]
pub(crate) fn f32_to_f16_le(x: &[f32], bytes: &mut [u8]) {
    narrow_le("f32_to_f16_le", x, bytes, to_f16);
}

#[inline(always)]
fn widen(kernel: &str, bits: &[u16], out: &mut [f32], convert: impl Fn(u16) -> f32) {
    assert_eq!(bits.len(), out.len(), "{kernel}: lengths differ");
    for (out, &h) in out.iter_mut().zip(bits) {
        *out = convert(h);
    }
}

#[inline(always)]
fn widen_le(kernel: &str, bytes: &[u8], out: &mut [f32], convert: impl Fn(u16) -> f32) {
    let (pairs, odd) = bytes.as_chunks::<2>();
    assert!(
        pairs.len() == out.len() && odd.is_empty(),
        "{kernel}: {} bytes for {} values",
        bytes.len(),
        out.len()
    );
    for (out, &pair) in out.iter_mut().zip(pairs) {
        *out = convert(u16::from_le_bytes(pair));
    }
}

#[inline(always)]
fn narrow(kernel: &str, x: &[f32], bits: &mut [u16], convert: impl Fn(f32) -> u16) {
    assert_eq!(x.len(), bits.len(), "{kernel}: lengths differ");
    for (h, &x) in bits.iter_mut().zip(x) {
        *h = convert(x);
    }
}

#[inline(always)]
fn narrow_le(kernel: &str, x: &[f32], bytes: &mut [u8], convert: impl Fn(f32) -> u16) {
    let len = bytes.len();
    let (pairs, odd) = bytes.as_chunks_mut::<2>();
    assert!(pairs.len() == x.len() && odd.is_empty(), "{kernel}: {len} bytes for {} values", x.len());
    for (pair, &x) in pairs.iter_mut().zip(x) {
        *pair = convert(x).to_le_bytes();
    }
}

#[inline(always)]
pub(super) fn from_bf16(h: u16) -> f32 {
    let bits = u32::from(h) << 16;
    let is_nan = bits & 0x7fff_ffff > 0x7f80_0000;
    f32::from_bits(if is_nan { bits | 0x0040_0000 } else { bits })
}

#[inline(always)]
fn to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    // Half of the dropped part, minus one if the kept part is even: the carry implements round-to-nearest-even and
    // overflows into infinity correctly.
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
    let is_nan = bits & 0x7fff_ffff > 0x7f80_0000;
    ((if is_nan { bits | 0x0040_0000 } else { rounded }) >> 16) as u16
}

/// f32 exponent field minus f16 exponent field of the same value.
const F16_REBIAS: u32 = (127 - 15) << 23;
/// 2^-14, the least normal f16.
const F16_MIN_NORMAL: u32 = (127 - 14) << 23;

#[inline(always)]
pub(super) fn from_f16(h: u16) -> f32 {
    let magnitude = u32::from(h & 0x7fff) << 13;
    let sign = u32::from(h & 0x8000) << 16;
    // Subnormal: 2^-14·(1 + m/1024) - 2^-14, exact, and without slow f32 subnormals.
    let subnormal = f32::from_bits(F16_MIN_NORMAL | magnitude) - f32::from_bits(F16_MIN_NORMAL);
    let special = magnitude | 0x7f80_0000 | if magnitude > 0x7c00 << 13 { 0x0040_0000 } else { 0 };
    let mut bits = magnitude.wrapping_add(F16_REBIAS);
    bits = if magnitude >= 0x7c00 << 13 { special } else { bits };
    bits = if magnitude < 0x0400 << 13 { subnormal.to_bits() } else { bits };
    f32::from_bits(sign | bits)
}

#[inline(always)]
fn to_f16(x: f32) -> u16 {
    let magnitude = x.to_bits() & 0x7fff_ffff;
    let sign = (x.to_bits() >> 16) & 0x8000;
    // Normal: as in `to_bf16`, with the exponent shifted; values from 65520 up carry into infinity.
    let normal = magnitude.wrapping_sub(F16_REBIAS).wrapping_add(0xfff + ((magnitude >> 13) & 1)) >> 13;
    // Subnormal: at 0.5 an f32 step is 2^-24, the f16 subnormal step, so this addition rounds.
    let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5_f32.to_bits());
    let nan = 0x7e00 | ((magnitude >> 13) & 0x3ff);
    let mut bits = if magnitude < F16_MIN_NORMAL { subnormal } else { normal };
    bits = if magnitude >= 0x4780_0000 { 0x7c00 } else { bits }; // 2^16 and above
    bits = if magnitude > 0x7f80_0000 { nan } else { bits };
    (sign | bits) as u16
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    #[test]
    fn every_half_widens_as_in_the_half_crate() {
        for h in 0..=u16::MAX {
            assert_eq!(from_f16(h).to_bits(), f16::from_bits(h).to_f32().to_bits(), "f16 {h:#06x}");
            assert_eq!(from_bf16(h).to_bits(), bf16::from_bits(h).to_f32().to_bits(), "bf16 {h:#06x}");
        }
    }

    fn narrowing_agrees(bits: u32) {
        let x = f32::from_bits(bits);
        assert_eq!(to_f16(x), f16::from_f32_const(x).to_bits(), "f16 of {bits:#010x}");
        assert_eq!(to_bf16(x), bf16::from_f32_const(x).to_bits(), "bf16 of {bits:#010x}");
    }

    #[test]
    fn narrowing_agrees_with_the_half_crate() {
        (0..=u32::MAX).step_by(1021).for_each(narrowing_agrees);
        // Neighbourhood of every value of either type: exact, just off, halfway, just off halfway.
        for h in 0..=u16::MAX {
            for base in [from_f16(h).to_bits(), from_bf16(h).to_bits()] {
                for offset in [0, 1, 0xfff, 0x1000, 0x1001, 0x7fff, 0x8000, 0x8001] {
                    narrowing_agrees(base.wrapping_add(offset));
                }
            }
        }
    }

    #[test]
    #[ignore = "walks every f32 (minutes)"]
    fn narrowing_agrees_everywhere() {
        (0..=u32::MAX).for_each(narrowing_agrees);
    }

    #[test]
    fn bytes_are_little_endian() {
        let mut out = [0.0; 2];
        bf16_le_to_f32(&[0x80, 0x3f, 0x00, 0xc0], &mut out);
        assert_eq!(out, [1.0, -2.0]);
        let mut bytes = [0; 4];
        f32_to_f16_le(&out, &mut bytes);
        assert_eq!(bytes, [0x00, 0x3c, 0x00, 0xc0]);
    }
}

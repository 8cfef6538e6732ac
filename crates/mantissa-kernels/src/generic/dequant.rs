//! Codes back to f32: `lut[code] * scale` for any format of at most 8 bits, `(code - zero) * scale` for
//! affine integers.
//!
//! One call covers one row: `out.len()` elements in groups of `group` (the last may be shorter), one scale
//! per group. Four-bit codes are packed two per byte, the first in the low nibble. Each result is one f32
//! multiplication.

/// A 16-entry table by nibble; the hand-written x86 versions keep it in registers.
#[inline(always)]
pub(crate) fn dequant_lut4(codes: &[u8], lut: &[f32; 16], scales: &[f32], group: usize, out: &mut [f32]) {
    check4("dequant_lut4", codes, scales, group, out);
    each_nibble(codes, group, out, |code, g| lut[usize::from(code & 15)] * scales[g]);
}

#[inline(always)]
pub(crate) fn dequant_lut8(codes: &[u8], lut: &[f32; 256], scales: &[f32], group: usize, out: &mut [f32]) {
    check8("dequant_lut8", codes, scales, group, out);
    for ((codes, out), &scale) in codes.chunks(group).zip(out.chunks_mut(group)).zip(scales) {
        for (out, &code) in out.iter_mut().zip(codes) {
            *out = lut[usize::from(code)] * scale;
        }
    }
}

#[inline(always)]
pub(crate) fn dequant_int4_zero(codes: &[u8], zeros: &[f32], scales: &[f32], group: usize, out: &mut [f32]) {
    check4("dequant_int4_zero", codes, scales, group, out);
    assert_eq!(zeros.len(), scales.len(), "dequant_int4_zero: zeros and scales differ in length");
    each_nibble(codes, group, out, |code, g| (f32::from(code) - zeros[g]) * scales[g]);
}

#[inline(always)]
pub(crate) fn dequant_int8_zero(codes: &[u8], zeros: &[f32], scales: &[f32], group: usize, out: &mut [f32]) {
    check8("dequant_int8_zero", codes, scales, group, out);
    assert_eq!(zeros.len(), scales.len(), "dequant_int8_zero: zeros and scales differ in length");
    let groups = codes.chunks(group).zip(out.chunks_mut(group));
    for ((codes, out), (&zero, &scale)) in groups.zip(zeros.iter().zip(scales)) {
        for (out, &code) in out.iter_mut().zip(codes) {
            *out = (f32::from(code) - zero) * scale;
        }
    }
}

#[inline(always)]
pub(crate) fn dequant_i8_zero(codes: &[u8], zeros: &[f32], scales: &[f32], group: usize, out: &mut [f32]) {
    check8("dequant_i8_zero", codes, scales, group, out);
    assert_eq!(zeros.len(), scales.len(), "dequant_i8_zero: zeros and scales differ in length");
    let groups = codes.chunks(group).zip(out.chunks_mut(group));
    for ((codes, out), (&zero, &scale)) in groups.zip(zeros.iter().zip(scales)) {
        for (out, &code) in out.iter_mut().zip(codes) {
            *out = (f32::from(code as i8) - zero) * scale;
        }
    }
}

/// `out[i] = decode(nibble i, i / group)`.
#[inline(always)]
fn each_nibble(codes: &[u8], group: usize, out: &mut [f32], decode: impl Fn(u8, usize) -> f32) {
    if !group.is_multiple_of(2) {
        // A group may begin inside a byte.
        for (i, out) in out.iter_mut().enumerate() {
            *out = decode(codes[i / 2] >> (4 * (i % 2)) & 15, i / group);
        }
        return;
    }
    for (g, (codes, out)) in codes.chunks(group / 2).zip(out.chunks_mut(group)).enumerate() {
        let (pairs, last) = out.as_chunks_mut::<2>();
        for (pair, &byte) in pairs.iter_mut().zip(codes) {
            *pair = [decode(byte & 15, g), decode(byte >> 4, g)];
        }
        if let ([out], Some(&byte)) = (last, codes.last()) {
            *out = decode(byte & 15, g);
        }
    }
}

#[inline(always)]
pub(crate) fn check4(kernel: &str, codes: &[u8], scales: &[f32], group: usize, out: &[f32]) {
    check_groups(kernel, scales, group, out);
    assert_eq!(codes.len(), out.len().div_ceil(2), "{kernel}: {} bytes for {} codes", codes.len(), out.len());
}

#[inline(always)]
fn check8(kernel: &str, codes: &[u8], scales: &[f32], group: usize, out: &[f32]) {
    check_groups(kernel, scales, group, out);
    assert_eq!(codes.len(), out.len(), "{kernel}: codes and out differ in length");
}

#[inline(always)]
fn check_groups(kernel: &str, scales: &[f32], group: usize, out: &[f32]) {
    assert!(group > 0, "{kernel}: group size 0");
    let groups = out.len().div_ceil(group);
    assert_eq!(scales.len(), groups, "{kernel}: {} scales for {groups} groups", scales.len());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_odd_even_and_ragged() {
        let codes: Vec<u8> = (0..13_u8).map(|i| i.wrapping_mul(37)).collect();
        let lut = std::array::from_fn(|i| i as f32 - 7.5);
        for len in [25_usize, 26] {
            for group in [1, 2, 3, 4, 5, 16, 32] {
                let scales: Vec<f32> = (1..=len.div_ceil(group)).map(|g| g as f32 * 0.25).collect();
                let zeros: Vec<f32> = (1..=scales.len()).map(|g| g as f32).collect();
                let mut by_table = vec![0.0; len];
                let mut by_zero = vec![0.0; len];
                dequant_lut4(&codes, &lut, &scales, group, &mut by_table);
                dequant_int4_zero(&codes, &zeros, &scales, group, &mut by_zero);
                for i in 0..len {
                    let code = codes[i / 2] >> (4 * (i % 2)) & 15;
                    let g = i / group;
                    assert_eq!(by_table[i], lut[usize::from(code)] * scales[g]);
                    assert_eq!(by_zero[i], (f32::from(code) - zeros[g]) * scales[g]);
                }
            }
        }
    }

    #[test]
    fn bytes_in_ragged_groups() {
        let codes: Vec<u8> = (0..=255).collect();
        let lut = std::array::from_fn(|i| (i as f32).sqrt());
        let scales: Vec<f32> = (0..256_usize.div_ceil(48)).map(|g| g as f32 + 0.5).collect();
        let zeros = vec![128.0; scales.len()];
        let mut out = vec![0.0; 256];
        dequant_lut8(&codes, &lut, &scales, 48, &mut out);
        assert!((0..256).all(|i| out[i] == lut[i] * scales[i / 48]));
        dequant_int8_zero(&codes, &zeros, &scales, 48, &mut out);
        assert!((0..256).all(|i| out[i] == (i as f32 - 128.0) * scales[i / 48]));
    }

    #[test]
    #[should_panic(expected = "dequant_lut4: 2 scales for 3 groups")]
    fn missing_scales_are_refused() {
        dequant_lut4(&[0; 40], &[0.0; 16], &[1.0; 2], 32, &mut [0.0; 80]);
    }
}

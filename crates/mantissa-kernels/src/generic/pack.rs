//! Integer codes to and from a little-endian bit stream: code `i` occupies bits `[i·b, (i+1)·b)`, as in
//! compressed-tensors, GPTQ and MLX rows.

#[inline(always)]
pub(crate) fn pack_codes_le(codes: &[i8], offset: u8, bits: u32, out: &mut [u8]) {
    check("pack_codes_le", codes.len(), bits, out.len());
    let too_large = match bits {
        2 => pack::<2>(codes, offset, out),
        3 => pack::<3>(codes, offset, out),
        4 => pack::<4>(codes, offset, out),
        5 => pack::<5>(codes, offset, out),
        6 => pack::<6>(codes, offset, out),
        7 => pack::<7>(codes, offset, out),
        8 => pack::<8>(codes, offset, out),
        _ => pack::<1>(codes, offset, out),
    };
    assert!(!too_large, "pack_codes_le: a code does not fit {bits} bits after adding the offset");
}

#[inline(always)]
pub(crate) fn unpack_codes_le(packed: &[u8], bits: u32, codes: &mut [u8]) {
    check("unpack_codes_le", codes.len(), bits, packed.len());
    match bits {
        2 => unpack::<2>(packed, codes),
        3 => unpack::<3>(packed, codes),
        4 => unpack::<4>(packed, codes),
        5 => unpack::<5>(packed, codes),
        6 => unpack::<6>(packed, codes),
        7 => unpack::<7>(packed, codes),
        8 => unpack::<8>(packed, codes),
        _ => unpack::<1>(packed, codes),
    }
}

/// Reads or writes eight codes of `B` bits as `B` bytes, the unit of streams. Returns true if a code needed more than
/// `B` bits.
#[inline(always)]
fn pack<const B: usize>(codes: &[i8], offset: u8, out: &mut [u8]) -> bool {
    let used = (codes.len() * B).div_ceil(8);
    let (out, padding) = out.split_at_mut(used);
    padding.fill(0);
    let mut all = 0;
    let (units, rest) = codes.as_chunks::<8>();
    for (unit, out) in units.iter().zip(out.as_chunks_mut::<B>().0) {
        let (bytes, seen) = pack_unit::<B>(unit, offset);
        *out = bytes;
        all |= seen;
    }
    if !rest.is_empty() {
        // An unused slot holds the code that packs to zero.
        let mut unit = [offset.wrapping_neg() as i8; 8];
        unit[..rest.len()].copy_from_slice(rest);
        let (bytes, seen) = pack_unit::<B>(&unit, offset);
        let tail = &mut out[units.len() * B..];
        tail.copy_from_slice(&bytes[..tail.len()]);
        all |= seen;
    }
    u32::from(all) >> B != 0
}

/// The bytes of eight codes, and the union of their bits.
#[inline(always)]
fn pack_unit<const B: usize>(codes: &[i8; 8], offset: u8) -> ([u8; B], u8) {
    let mut stream = 0_u64;
    let mut seen = 0;
    for (i, &code) in codes.iter().enumerate() {
        let code = (code as u8).wrapping_add(offset);
        stream |= u64::from(code) << (i * B);
        seen |= code;
    }
    let bytes = stream.to_le_bytes();
    (std::array::from_fn(|i| bytes[i]), seen)
}

#[inline(always)]
fn unpack<const B: usize>(packed: &[u8], codes: &mut [u8]) {
    let (units, rest) = codes.as_chunks_mut::<8>();
    for (unit, bytes) in units.iter_mut().zip(packed.as_chunks::<B>().0) {
        *unit = unpack_unit::<B>(bytes);
    }
    if !rest.is_empty() {
        let tail = &packed[units.len() * B..][..(rest.len() * B).div_ceil(8)];
        let mut bytes = [0; B];
        bytes[..tail.len()].copy_from_slice(tail);
        rest.copy_from_slice(&unpack_unit::<B>(&bytes)[..rest.len()]);
    }
}

#[inline(always)]
fn unpack_unit<const B: usize>(bytes: &[u8; B]) -> [u8; 8] {
    let mut stream = 0_u64;
    for (i, &byte) in bytes.iter().enumerate() {
        stream |= u64::from(byte) << (8 * i);
    }
    let mask = (1_u64 << B) - 1;
    std::array::from_fn(|i| (stream >> (i * B) & mask) as u8)
}

#[inline(always)]
fn check(kernel: &str, codes: usize, bits: u32, bytes: usize) {
    assert!((1..=8).contains(&bits), "{kernel}: {bits} bits");
    let needed = codes.checked_mul(bits as usize).map(|total| total.div_ceil(8));
    assert!(
        needed.is_some_and(|needed| needed <= bytes),
        "{kernel}: {bytes} bytes for {codes} codes of {bits} bits"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bit by bit.
    fn naive(codes: &[u8], bits: usize, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        for (i, code) in codes.iter().enumerate() {
            for b in 0..bits {
                let at = i * bits + b;
                out[at / 8] |= (code >> b & 1) << (at % 8);
            }
        }
        out
    }

    #[test]
    fn streams_match_bit_by_bit() {
        for bits in 1..=8_usize {
            for len in 0..70 {
                let raw: Vec<u8> = (0..len).map(|i| (i * 89 + 13) as u8 & (255 >> (8 - bits))).collect();
                for padding in [0, 3] {
                    let bytes = (len * bits).div_ceil(8) + padding;
                    let expected = naive(&raw, bits, bytes);
                    for offset in [0, 1_u8.wrapping_shl(bits as u32 - 1)] {
                        let codes: Vec<i8> = raw.iter().map(|c| c.wrapping_sub(offset) as i8).collect();
                        let mut out = vec![0xaa; bytes];
                        pack_codes_le(&codes, offset, bits as u32, &mut out);
                        assert_eq!(out, expected, "bits {bits} len {len} offset {offset}");
                    }
                    let mut back = vec![0xaa; len];
                    unpack_codes_le(&expected, bits as u32, &mut back);
                    assert_eq!(back, raw);
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "does not fit 4 bits")]
    fn a_code_out_of_range_is_refused() {
        pack_codes_le(&[0, 8, 0], 8, 4, &mut [0; 2]);
    }

    #[test]
    #[should_panic(expected = "3 bytes for 9 codes of 3 bits")]
    fn a_short_stream_is_refused() {
        unpack_codes_le(&[0; 3], 3, &mut [0; 9]);
    }
}

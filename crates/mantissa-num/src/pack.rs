//! Packing orders, as data: how codes of fewer than 8 bits share bytes in each on-disk convention.

/// Which end of a unit the first code takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum First {
    /// Code `i` occupies bits `[i·b, (i+1)·b)` of the little-endian byte stream.
    Low,
    /// The first code of a byte sits in its highest bits (bitsandbytes).
    High,
}

/// A packing of a `[rows, cols]` array of codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Packing {
    /// Bits of a code, 1 to 8.
    pub bits: u32,
    /// Each packed line is padded with zero bits to a multiple of this many bytes.
    pub unit_bytes: usize,
    /// Order within the stream.
    pub first: First,
    /// Whether signed codes are stored plus `2^(bits-1)` (offset binary) instead of two's complement.
    pub offset_binary: bool,
    /// Whether the whole array is one line; otherwise each row is a line.
    pub flat: bool,
}

impl Packing {
    /// compressed-tensors `pack-quantized`: rows of offset-binary codes as int32 words. Its zero points are packed the
    /// same way along the other axis: transpose first.
    pub const fn compressed_tensors_int(bits: u32) -> Self {
        Packing { bits, unit_bytes: 4, first: First::Low, offset_binary: true, flat: false }
    }

    /// Rows of raw codes, low bits first, padded to bytes: FP4 pairs of compressed-tensors, ModelOpt and MX, and the
    /// native container.
    pub const fn rows(bits: u32) -> Self {
        Packing { bits, unit_bytes: 1, first: First::Low, offset_binary: false, flat: false }
    }

    /// bitsandbytes 4-bit: the flattened tensor, first element in the high nibble.
    pub const fn bitsandbytes() -> Self {
        Packing { bits: 4, unit_bytes: 1, first: First::High, offset_binary: false, flat: true }
    }

    /// Bytes of one packed line of `n` codes.
    pub const fn line_bytes(&self, n: usize) -> usize {
        (n * self.bits as usize).div_ceil(8 * self.unit_bytes) * self.unit_bytes
    }

    /// Bytes of a packed `[rows, cols]` array.
    pub const fn total_bytes(&self, rows: usize, cols: usize) -> usize {
        if self.flat { self.line_bytes(rows * cols) } else { rows * self.line_bytes(cols) }
    }

    /// Packs `codes` (`[rows, cols]`, one per byte, signed codes in two's complement).
    pub fn pack(&self, codes: &[u8], cols: usize) -> Vec<u8> {
        let line = if self.flat { codes.len() } else { cols };
        if line == 0 {
            return Vec::new();
        }
        let mut out = vec![0; codes.len() / line * self.line_bytes(line)];
        for (codes, out) in codes.chunks_exact(line).zip(out.chunks_exact_mut(self.line_bytes(line))) {
            self.pack_line(codes, out);
        }
        out
    }

    /// Unpacks a `[rows, cols]` array into one code per byte. `signed` codes are sign-extended.
    /// `packed` must hold [`total_bytes`](Self::total_bytes); `None` where it does not.
    pub fn unpack(&self, packed: &[u8], rows: usize, cols: usize, signed: bool) -> Option<Vec<u8>> {
        if packed.len() != self.total_bytes(rows, cols) {
            return None;
        }
        let (lines, line) = if self.flat { (1, rows * cols) } else { (rows, cols) };
        let mut out = vec![0; rows * cols];
        if line > 0 && lines > 0 {
            for (packed, out) in packed.chunks_exact(self.line_bytes(line)).zip(out.chunks_exact_mut(line)) {
                self.unpack_line(packed, out, signed);
            }
        }
        Some(out)
    }

    /// Packs a `[rows, cols]` array along its rows' axis (dim 0): each column is a line, and the units of all lines lie
    /// `[units, cols]`, so that a unit holds codes of consecutive rows (GPTQ's `qweight`, compressed-tensors' zero points).
    pub fn pack_dim0(&self, codes: &[u8], rows: usize, cols: usize) -> Vec<u8> {
        let lines = self.pack(&transpose(codes, rows, cols), rows);
        self.transpose_units(&lines, cols, self.line_bytes(rows) / self.unit_bytes)
    }

    /// The inverse of [`pack_dim0`](Self::pack_dim0), as [`unpack`](Self::unpack).
    pub fn unpack_dim0(&self, packed: &[u8], rows: usize, cols: usize, signed: bool) -> Option<Vec<u8>> {
        if packed.len() != self.total_bytes(cols, rows) {
            return None;
        }
        let lines = self.transpose_units(packed, self.line_bytes(rows) / self.unit_bytes, cols);
        Some(transpose(&self.unpack(&lines, cols, rows, signed)?, cols, rows))
    }

    fn transpose_units(&self, bytes: &[u8], rows: usize, cols: usize) -> Vec<u8> {
        let unit = |r: usize, c: usize| &bytes[(r * cols + c) * self.unit_bytes..][..self.unit_bytes];
        (0..cols).flat_map(|c| (0..rows).flat_map(move |r| unit(r, c).iter().copied())).collect()
    }

    fn mask(&self) -> u32 {
        (1 << self.bits) - 1
    }

    fn bias(&self) -> u32 {
        if self.offset_binary { 1 << (self.bits - 1) } else { 0 }
    }

    fn pack_line(&self, codes: &[u8], out: &mut [u8]) {
        for (i, &code) in codes.iter().enumerate() {
            let field = (u32::from(code) + self.bias()) & self.mask();
            let (byte, shift) = self.place(i);
            let wide = field << shift;
            out[byte] |= wide as u8;
            if wide > 0xff {
                out[byte + 1] |= (wide >> 8) as u8;
            }
        }
    }

    fn unpack_line(&self, packed: &[u8], out: &mut [u8], signed: bool) {
        for (i, out) in out.iter_mut().enumerate() {
            let (byte, shift) = self.place(i);
            let high = packed.get(byte + 1).copied().unwrap_or(0);
            let field = (u32::from(u16::from_le_bytes([packed[byte], high])) >> shift) & self.mask();
            let code = field.wrapping_sub(self.bias()) & self.mask();
            *out = if signed { sign_extend(code as u8, self.bits) } else { code as u8 };
        }
    }

    /// Byte and shift of code `i` within its line.
    fn place(&self, i: usize) -> (usize, u32) {
        let bit = i * self.bits as usize;
        let shift = (bit % 8) as u32;
        match self.first {
            First::Low => (bit / 8, shift),
            First::High => (bit / 8, 8 - self.bits - shift),
        }
    }
}

/// A code of `bits` bits in two's complement, extended to 8.
pub fn sign_extend(code: u8, bits: u32) -> u8 {
    let unused = 8 - bits;
    (((code << unused) as i8) >> unused) as u8
}

/// Transposes a `[rows, cols]` array to `[cols, rows]`.
pub fn transpose<T: Copy>(values: &[T], rows: usize, cols: usize) -> Vec<T> {
    (0..cols).flat_map(|c| (0..rows).map(move |r| values[r * cols + c])).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn three_bit_codes_straddle_words_as_a_bit_stream() {
        let packing = Packing::compressed_tensors_int(3);
        // Offset binary of 0,1,2,…: code 10 takes bits 30..33 and crosses the first word.
        let codes: Vec<u8> = (0..32u8).map(|i| sign_extend((i + 4) % 8, 3)).collect();
        let packed = packing.pack(&codes, 32);
        let stream: u128 = (0..32).map(|i| u128::from(i as u8 % 8) << (3 * i)).sum::<u128>();
        assert_eq!(packed, stream.to_le_bytes()[..12]);
    }

    #[test]
    fn nibble_orders() {
        assert_eq!(Packing::rows(4).pack(&[1, 2, 3], 3), [0x21, 0x03]);
        assert_eq!(Packing::bitsandbytes().pack(&[1, 2, 3, 4, 5, 6], 3), [0x12, 0x34, 0x56]);
        assert_eq!(Packing::compressed_tensors_int(4).pack(&[0xf8, 7], 2), [0xf0, 0, 0, 0]);
    }

    proptest! {
        #[test]
        fn packing_round_trips(bits in 1u32..=8, rows in 0usize..5, cols in 0usize..40, offset in any::<bool>(), seed in any::<u64>()) {
            let packing = Packing { bits, unit_bytes: 4, first: First::Low, offset_binary: offset, flat: rows % 2 == 0 };
            let codes: Vec<u8> = (0..rows * cols)
                .map(|i| sign_extend(crate::round::random_u32(seed, i as u64) as u8 & ((1u32 << bits) - 1) as u8, bits))
                .collect();
            let packed = packing.pack(&codes, cols);
            prop_assert_eq!(packed.len(), packing.total_bytes(rows, cols));
            prop_assert_eq!(packing.unpack(&packed, rows, cols, true).unwrap(), &codes[..]);
            if !packing.flat {
                let packed = packing.pack_dim0(&codes, rows, cols);
                prop_assert_eq!(packing.unpack_dim0(&packed, rows, cols, true).unwrap(), codes);
            }
        }
    }
}

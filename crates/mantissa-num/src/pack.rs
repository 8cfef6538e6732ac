//! Packing orders, as data: layout of codes with fewer than 8 bits in each on-disk format.

/// End of a unit at which the first code is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum First {
    /// Code `i` occupies bits `[i·b, (i+1)·b)` of the little-endian byte stream.
    Low,
    /// The first code of a byte is in its highest bits (bitsandbytes).
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
    /// True if signed codes are stored plus `2^(bits-1)` (offset binary) instead of two's complement.
    pub offset_binary: bool,
    /// True if the whole array is one line; otherwise each row is a line.
    pub flat: bool,
}

impl Packing {
    /// compressed-tensors `pack-quantized`: rows of offset-binary codes as int32 words. Its zero points are packed the
    /// same way along the other axis: transpose first.
    pub const fn compressed_tensors_int(bits: u32) -> Self {
        Packing { bits, unit_bytes: 4, first: First::Low, offset_binary: true, flat: false }
    }

    /// GPTQ's `qweight` (lines along K) and, with zero points as codes, `qzeros` (along N). Codes are stored plus
    /// `2^(bits-1)`, which gives the unsigned numbers of the published code. AWQ packs the same way along N, in the
    /// order of [`AWQ_NIBBLES`].
    pub const fn gptq(bits: u32) -> Self {
        Self::compressed_tensors_int(bits)
    }

    /// Rows of raw codes, low bits first, padded to bytes: FP4 pairs of compressed-tensors, ModelOpt and MX, and the
    /// native format.
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

    /// Unpacks a `[rows, cols]` array into one code per byte. `signed` codes are sign-extended. `packed` must hold
    /// [`total_bytes`](Self::total_bytes), else `None`.
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

    /// Packs a `[rows, cols]` array along dim 0: each column is a line, and the units of all lines are stored
    /// `[units, cols]`. So a unit holds codes of consecutive rows (GPTQ's `qweight`, compressed-tensors' zero
    /// points).
    pub fn pack_dim0(&self, codes: &[u8], rows: usize, cols: usize) -> Vec<u8> {
        let lines = self.pack(&transpose(codes, rows, cols), rows);
        self.transpose_units(&lines, cols, self.line_bytes(rows) / self.unit_bytes)
    }

    /// Inverse of [`pack_dim0`](Self::pack_dim0), like [`unpack`](Self::unpack).
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

    /// Sets the bits of `fields` from `shift` on to the codes of one line.
    fn unpack_add(&self, line: &[u8], shift: u32, fields: &mut [u8]) {
        let mut plane = vec![0; fields.len()];
        self.unpack_line(line, &mut plane, false);
        fields.iter_mut().zip(plane).for_each(|(field, bits)| *field |= bits << shift);
    }

    fn mask(&self) -> u32 {
        (1 << self.bits) - 1
    }

    fn bias(&self) -> u32 {
        if self.offset_binary { 1 << (self.bits - 1) } else { 0 }
    }

    /// Packs one line into `out`, which must be zero.
    fn pack_line(&self, codes: &[u8], out: &mut [u8]) {
        match (self.first, self.bits) {
            (_, 4) => self.pack_nibbles(codes, out),
            (First::Low, 8) => {
                let bias = self.bias() as u8;
                out.iter_mut().zip(codes).for_each(|(out, code)| *out = code ^ bias);
            }
            (First::Low, bits) => {
                let bias = self.bias() as u8;
                for (codes, out) in codes.chunks(8).zip(out.chunks_mut(bits as usize)) {
                    let stream = codes.iter().rev().fold(0, |stream: u64, &code| {
                        // Adding half the range modulo the range flips the top bit.
                        stream << bits | u64::from((code ^ bias) & self.mask() as u8)
                    });
                    let n = out.len();
                    out.copy_from_slice(&stream.to_le_bytes()[..n]);
                }
            }
            (First::High, _) => self.pack_one_by_one(codes, out),
        }
    }

    /// Eight nibbles at a time, moved together within a word.
    fn pack_nibbles(&self, codes: &[u8], out: &mut [u8]) {
        let bias = self.bias() as u8;
        let (units, rest) = codes.as_chunks::<8>();
        let (out_units, out_rest) = out.split_at_mut(units.len() * 4);
        for (codes, out) in units.iter().zip(out_units.as_chunks_mut::<4>().0) {
            let fields = (u64::from_le_bytes(*codes) ^ u64::from_le_bytes([bias; 8])) & 0x0f0f_0f0f_0f0f_0f0f;
            let pairs = (fields | fields >> 4) & 0x00ff_00ff_00ff_00ff;
            let fours = (pairs | pairs >> 8) & 0x0000_ffff_0000_ffff;
            *out = self.swap_nibbles((fours | fours >> 16) as u32).to_le_bytes();
        }
        self.pack_one_by_one(rest, out_rest);
    }

    fn pack_one_by_one(&self, codes: &[u8], out: &mut [u8]) {
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
        if self.first == First::High && self.bits != 4 {
            return self.unpack_one_by_one(packed, out, signed);
        }
        let (bits, mask, bias) = (self.bits as usize, self.mask() as u8, self.bias() as u8);
        // A field with its sign in the top bit is extended by flipping that bit and subtracting it.
        let top = if signed { 1 << (self.bits - 1) } else { 0 };
        let finish = |field: u8| ((field & mask ^ bias) ^ top).wrapping_sub(top);
        if bits == 8 {
            return out.iter_mut().zip(packed).for_each(|(out, &field)| *out = finish(field));
        }
        let (units, rest) = out.as_chunks_mut::<8>();
        let (packed_units, packed_rest) = packed.split_at(units.len() * bits);
        if bits == 4 {
            for (out, packed) in units.iter_mut().zip(packed_units.as_chunks::<4>().0) {
                let packed = self.swap_nibbles(u32::from_le_bytes(*packed));
                *out = spread_nibbles(packed).to_le_bytes().map(finish);
            }
            return self.unpack_one_by_one(packed_rest, rest, signed);
        }
        for (out, packed) in units.iter_mut().zip(packed_units.chunks_exact(bits)) {
            let stream = little_endian(packed);
            for (i, out) in out.iter_mut().enumerate() {
                *out = finish((stream >> (i * bits)) as u8);
            }
        }
        self.unpack_one_by_one(packed_rest, rest, signed);
    }

    /// Converts between this packing's nibble order and low first.
    fn swap_nibbles(&self, packed: u32) -> u32 {
        match self.first {
            First::Low => packed,
            First::High => (packed & 0x0f0f_0f0f) << 4 | packed >> 4 & 0x0f0f_0f0f,
        }
    }

    fn unpack_one_by_one(&self, packed: &[u8], out: &mut [u8], signed: bool) {
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

/// Packing in which distant lines of an array share a unit: with `n` lines of units, field `f` of the unit in line
/// `u` is the code of line `f · n + u`. Fields beyond the last line are padding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Strided {
    /// Bits of a code, 1 to 8.
    pub bits: u32,
    /// Bytes of a unit, 1 to 4, little-endian.
    pub unit_bytes: usize,
    /// Codes of a unit.
    pub fields: usize,
    /// True if field 0 is the lowest; otherwise field `fields - 1` is.
    pub first: First,
}

impl Strided {
    /// HQQ's packing with this name (`hqq/core/bitpack.py`): bytes, or ten 3-bit codes in 30 of 32 bits.
    pub fn hqq(name: &str) -> Option<Self> {
        let (bits, unit_bytes, fields) = match name {
            "8bit_u8" => (8, 1, 1),
            "4bit_u8" => (4, 1, 2),
            "3bit_32" => (3, 4, 10),
            "2bit_u8" => (2, 1, 4),
            "1bit_u8" => (1, 1, 8),
            _ => return None,
        };
        Some(Strided { bits, unit_bytes, fields, first: First::High })
    }

    /// quanto's bytes of 2 or 4 bits (`optimum/quanto/tensor/packed.py`).
    pub const fn quanto(bits: u32) -> Self {
        Strided { bits, unit_bytes: 1, fields: 8 / bits as usize, first: First::Low }
    }

    /// Number of unit lines for `lines` lines of codes.
    pub const fn unit_lines(&self, lines: usize) -> usize {
        lines.div_ceil(self.fields)
    }

    /// Unsigned codes `[lines, cols]`; `None` unless `packed` holds `[unit_lines, cols]` units.
    pub fn unpack(&self, packed: &[u8], lines: usize, cols: usize) -> Option<Vec<u8>> {
        let count = self.unit_lines(lines).checked_mul(cols)?;
        if packed.len() != count.checked_mul(self.unit_bytes)? {
            return None;
        }
        let mask = (1u64 << self.bits) - 1;
        let units: Vec<u64> = packed.chunks_exact(self.unit_bytes).map(little_endian).collect();
        let mut codes = Vec::with_capacity(self.fields * count);
        for field in 0..self.fields {
            let place = if self.first == First::Low { field } else { self.fields - 1 - field };
            codes.extend(units.iter().map(|unit| (unit >> (place as u32 * self.bits) & mask) as u8));
        }
        codes.truncate(lines * cols);
        Some(codes)
    }
}

/// AWQ's GEMM order: index of the code in each nibble of a word, among eight adjacent codes, lowest nibble first
/// (AutoAWQ, `utils/packing_utils.py`).
pub const AWQ_NIBBLES: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];

/// `out[i] = values[order[i]]` within each run of `order.len()` values; `values` must hold whole runs.
pub fn gather_runs(values: &[u8], order: &[usize]) -> Vec<u8> {
    values.chunks_exact(order.len()).flat_map(|run| order.iter().map(|&from| run[from])).collect()
}

/// The inverse of [`gather_runs`].
pub fn scatter_runs(values: &[u8], order: &[usize]) -> Vec<u8> {
    let mut out = vec![0; values.len()];
    for (run, out) in values.chunks_exact(order.len()).zip(out.chunks_exact_mut(order.len())) {
        order.iter().zip(run).for_each(|(&to, &value)| out[to] = value);
    }
    out
}

/// Codes of a block of GPTQ's planar layout.
pub const PLANAR_BLOCK: usize = 32;

/// Widths of the bit planes of GPTQ's planar layout (`gptq_p`), lowest bits first; `None` for other than 2 to 8 bits.
pub const fn planes(bits: u32) -> Option<&'static [u32]> {
    match bits {
        2 => Some(&[2]),
        3 => Some(&[2, 1]),
        4 => Some(&[4]),
        5 => Some(&[4, 1]),
        6 => Some(&[4, 2]),
        7 => Some(&[4, 2, 1]),
        8 => Some(&[8]),
        _ => None,
    }
}

/// Unpacks one block of GPTQ's planar layout, `bits` little-endian words, to the fields of its 32 codes. Each plane
/// is a bit stream of its own, lowest bits first. `None` for other widths or another length of `block`.
pub fn planar_block(block: &[u8], bits: u32) -> Option<[u8; PLANAR_BLOCK]> {
    let planes = planes(bits).filter(|_| block.len() == bits as usize * 4)?;
    let (mut fields, mut start, mut shift) = ([0; PLANAR_BLOCK], 0, 0);
    for &width in planes {
        let packing = Packing::rows(width);
        let bytes = packing.line_bytes(PLANAR_BLOCK);
        packing.unpack_add(&block[start..start + bytes], shift, &mut fields);
        (start, shift) = (start + bytes, shift + width);
    }
    Some(fields)
}

/// Spreads eight nibbles, lowest first, over the low halves of eight bytes.
fn spread_nibbles(packed: u32) -> u64 {
    let fours = (u64::from(packed) | u64::from(packed) << 16) & 0x0000_ffff_0000_ffff;
    let pairs = (fours | fours << 8) & 0x00ff_00ff_00ff_00ff;
    (pairs | pairs << 4) & 0x0f0f_0f0f_0f0f_0f0f
}

/// Up to eight bytes as a number.
fn little_endian(bytes: &[u8]) -> u64 {
    let mut word = [0; 8];
    word[..bytes.len()].copy_from_slice(bytes);
    u64::from_le_bytes(word)
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

    #[test]
    fn awq_words_hold_even_columns_below_odd_ones() {
        let codes: Vec<u8> = (0..16).collect();
        let gathered = gather_runs(&codes, &AWQ_NIBBLES);
        assert_eq!(gathered[..8], [0, 2, 4, 6, 1, 3, 5, 7]);
        assert_eq!(Packing::rows(4).pack(&gathered, 16)[..4], [0x20, 0x64, 0x31, 0x75]);
        assert_eq!(scatter_runs(&gathered, &AWQ_NIBBLES), codes);
    }

    #[test]
    fn planes_lie_one_after_another() {
        let fields: [u8; 32] = std::array::from_fn(|i| (i * 37 % 128) as u8);
        for bits in 2..=8 {
            let fields = fields.map(|f| f & ((1u16 << bits) - 1) as u8);
            // From the description: word `i` of a plane of width w holds codes from 32/w · i on, w bits each.
            let mut words = Vec::new();
            let mut shift = 0;
            for &width in planes(bits).unwrap() {
                for run in fields.chunks(32 / width as usize) {
                    let word = run.iter().enumerate().fold(0u32, |word, (j, &f)| {
                        word | (u32::from(f) >> shift & ((1 << width) - 1)) << (width * j as u32)
                    });
                    words.extend(word.to_le_bytes());
                }
                shift += width;
            }
            assert_eq!(planar_block(&words, bits), Some(fields), "{bits}");
            assert_eq!(planar_block(&words[1..], bits), None);
        }
        assert_eq!(planar_block(&[0; 36], 9), None);
    }

    proptest! {
        #[test]
        fn packing_round_trips(bits in 1u32..=8, rows in 0usize..5, cols in 0usize..40, offset in any::<bool>(), high in any::<bool>(), seed in any::<u64>()) {
            // Codes that straddle bytes cannot be ordered with the first in the high bits.
            let first = if high && 8 % bits == 0 { First::High } else { First::Low };
            let packing = Packing { bits, unit_bytes: 4, first, offset_binary: offset, flat: rows % 2 == 0 };
            let codes: Vec<u8> = (0..rows * cols)
                .map(|i| sign_extend(crate::round::random_u32(seed, i as u64) as u8 & ((1u32 << bits) - 1) as u8, bits))
                .collect();
            let packed = packing.pack(&codes, cols);
            prop_assert_eq!(packed.len(), packing.total_bytes(rows, cols));
            prop_assert_eq!(packing.unpack(&packed, rows, cols, true).unwrap(), &codes[..]);
            if !packing.flat {
                let packed = packing.pack_dim0(&codes, rows, cols);
                prop_assert_eq!(packing.unpack_dim0(&packed, rows, cols, true).unwrap(), &codes[..]);
            }
            // Compares the fast loops with the definition, one code at a time.
            let line = if packing.flat { rows * cols } else { cols };
            for (codes, packed) in codes.chunks_exact(line.max(1)).zip(packed.chunks_exact(packing.line_bytes(line).max(1))) {
                let mut slow = vec![0; packed.len()];
                packing.pack_one_by_one(codes, &mut slow);
                prop_assert_eq!(&slow, packed);
                for signed in [false, true] {
                    let (mut fast, mut slow) = (vec![0; line], vec![0; line]);
                    packing.unpack_line(packed, &mut fast, signed);
                    packing.unpack_one_by_one(packed, &mut slow, signed);
                    prop_assert_eq!(fast, slow);
                }
            }
        }
    }
}

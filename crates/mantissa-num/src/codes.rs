//! Lists of stored codes.

/// A list of codes, each in the smallest unit that holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Codes {
    /// Codes of at most 8 bits.
    U8(Vec<u8>),
    /// Codes of 9 to 16 bits.
    U16(Vec<u16>),
    /// Codes of 17 to 32 bits.
    U32(Vec<u32>),
    /// Bit patterns of f64. [`get`](Codes::get) and [`push`](Codes::push) use the f32 pattern of the same value,
    /// rounded to nearest even if a file holds more digits.
    U64(Vec<u64>),
    /// Whole codec blocks, row by row, or trellis tiles: bytes instead of element codes.
    Packed(Vec<u8>),
}

impl Codes {
    /// An empty list for codes of `unit_bytes` 1, 2, 4 or 8.
    pub fn with_capacity(unit_bytes: usize, n: usize) -> Self {
        match unit_bytes {
            1 => Codes::U8(Vec::with_capacity(n)),
            2 => Codes::U16(Vec::with_capacity(n)),
            8 => Codes::U64(Vec::with_capacity(n)),
            _ => Codes::U32(Vec::with_capacity(n)),
        }
    }

    /// Number of codes, or of bytes for packed data.
    pub fn len(&self) -> usize {
        match self {
            Codes::U8(v) | Codes::Packed(v) => v.len(),
            Codes::U16(v) => v.len(),
            Codes::U32(v) => v.len(),
            Codes::U64(v) => v.len(),
        }
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Code `i`.
    pub fn get(&self, i: usize) -> u32 {
        match self {
            Codes::U8(v) | Codes::Packed(v) => v[i].into(),
            Codes::U16(v) => v[i].into(),
            Codes::U32(v) => v[i],
            Codes::U64(v) => (f64::from_bits(v[i]) as f32).to_bits(),
        }
    }

    /// Appends a code, truncated to the unit.
    pub fn push(&mut self, code: u32) {
        match self {
            Codes::U8(v) | Codes::Packed(v) => v.push(code as u8),
            Codes::U16(v) => v.push(code as u16),
            Codes::U32(v) => v.push(code),
            Codes::U64(v) => v.push(f64::from(f32::from_bits(code)).to_bits()),
        }
    }

    /// Little-endian bytes, one unit per code.
    pub fn to_le_bytes(&self) -> Vec<u8> {
        match self {
            Codes::U8(v) | Codes::Packed(v) => v.clone(),
            Codes::U16(v) => v.iter().flat_map(|c| c.to_le_bytes()).collect(),
            Codes::U32(v) => v.iter().flat_map(|c| c.to_le_bytes()).collect(),
            Codes::U64(v) => v.iter().flat_map(|c| c.to_le_bytes()).collect(),
        }
    }

    /// The inverse of [`to_le_bytes`](Self::to_le_bytes); a trailing partial unit is dropped.
    pub fn from_le_bytes(unit_bytes: usize, bytes: &[u8]) -> Self {
        match unit_bytes {
            1 => Codes::U8(bytes.to_vec()),
            2 => Codes::U16(bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect()),
            8 => {
                let word = |b: &[u8]| u64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]]);
                Codes::U64(bytes.chunks_exact(8).map(word).collect())
            }
            _ => Codes::U32(
                bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
            ),
        }
    }
}

//! Element types of the safetensors format, as its reference implementation (0.8) names and orders them.

use std::fmt;

/// Data type of a tensor's elements.
///
/// Variants are in the order of the reference implementation, by ascending alignment. Its writer lays tensors out by
/// descending [`Ord`], so the order determines the bytes of [`crate::SafetensorsWriter`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Dtype {
    /// One byte, 0 or 1.
    Bool,
    /// OCP FP4 E2M1, two to a byte.
    F4,
    /// OCP FP6 E2M3, four to three bytes.
    F6E2M3,
    /// OCP FP6 E3M2, four to three bytes.
    F6E3M2,
    /// Unsigned 8-bit integer, and the format of packed codes.
    U8,
    /// Signed 8-bit integer.
    I8,
    /// OCP FP8 E5M2.
    F8E5M2,
    /// OCP FP8 E4M3 (no infinities: `fn`).
    F8E4M3,
    /// OCP E8M0: a power-of-two scale.
    F8E8M0,
    /// FP8 E4M3 with one zero and one NaN (bias 8).
    F8E4M3Fnuz,
    /// FP8 E5M2 with one zero and one NaN (bias 16).
    F8E5M2Fnuz,
    /// Signed 16-bit integer.
    I16,
    /// Unsigned 16-bit integer.
    U16,
    /// IEEE binary16.
    F16,
    /// bfloat16.
    BF16,
    /// Signed 32-bit integer.
    I32,
    /// Unsigned 32-bit integer.
    U32,
    /// IEEE binary32.
    F32,
    /// Complex number of two binary32.
    C64,
    /// IEEE binary64.
    F64,
    /// Signed 64-bit integer.
    I64,
    /// Unsigned 64-bit integer.
    U64,
}

impl Dtype {
    /// Every dtype, in ascending order.
    pub const ALL: [Self; 22] = [
        Self::Bool,
        Self::F4,
        Self::F6E2M3,
        Self::F6E3M2,
        Self::U8,
        Self::I8,
        Self::F8E5M2,
        Self::F8E4M3,
        Self::F8E8M0,
        Self::F8E4M3Fnuz,
        Self::F8E5M2Fnuz,
        Self::I16,
        Self::U16,
        Self::F16,
        Self::BF16,
        Self::I32,
        Self::U32,
        Self::F32,
        Self::C64,
        Self::F64,
        Self::I64,
        Self::U64,
    ];

    /// Dtype with this name in a safetensors header, for example `F8_E4M3`. Case matters.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.name() == name)
    }

    /// Name in a safetensors header.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bool => "BOOL",
            Self::F4 => "F4",
            Self::F6E2M3 => "F6_E2M3",
            Self::F6E3M2 => "F6_E3M2",
            Self::U8 => "U8",
            Self::I8 => "I8",
            Self::F8E5M2 => "F8_E5M2",
            Self::F8E4M3 => "F8_E4M3",
            Self::F8E8M0 => "F8_E8M0",
            Self::F8E4M3Fnuz => "F8_E4M3FNUZ",
            Self::F8E5M2Fnuz => "F8_E5M2FNUZ",
            Self::I16 => "I16",
            Self::U16 => "U16",
            Self::F16 => "F16",
            Self::BF16 => "BF16",
            Self::I32 => "I32",
            Self::U32 => "U32",
            Self::F32 => "F32",
            Self::C64 => "C64",
            Self::F64 => "F64",
            Self::I64 => "I64",
            Self::U64 => "U64",
        }
    }

    /// Bits of one element: 4, 6, 8, 16, 32 or 64.
    pub const fn bits(self) -> u64 {
        match self {
            Self::F4 => 4,
            Self::F6E2M3 | Self::F6E3M2 => 6,
            Self::Bool
            | Self::U8
            | Self::I8
            | Self::F8E5M2
            | Self::F8E4M3
            | Self::F8E8M0
            | Self::F8E4M3Fnuz
            | Self::F8E5M2Fnuz => 8,
            Self::I16 | Self::U16 | Self::F16 | Self::BF16 => 16,
            Self::I32 | Self::U32 | Self::F32 => 32,
            Self::C64 | Self::F64 | Self::I64 | Self::U64 => 64,
        }
    }

    /// All names, for error messages.
    pub(crate) fn known() -> String {
        Self::ALL.map(Self::name).join(" ")
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Reason why a dtype and a shape give no byte length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SizeFault {
    /// A dimension, the element count or the bit count does not fit.
    Overflow,
    /// A sub-byte dtype ends within a byte; holds the number of bits.
    PartialByte(u64),
}

/// Bytes of a tensor of this dtype and shape; rank 0 is one element.
///
/// The product of the non-zero dimensions must fit as well, so that readers of an accepted shape can multiply any
/// subset of dimensions without overflow.
///
/// # Errors
/// [`SizeFault`] if the size overflows 63 bits or ends within a byte.
pub fn byte_len(dtype: Dtype, shape: &[usize]) -> Result<u64, SizeFault> {
    let mut nonzero: u64 = 1;
    for &dim in shape {
        let dim = u64::try_from(dim).map_err(|_| SizeFault::Overflow)?;
        nonzero = nonzero.checked_mul(dim.max(1)).ok_or(SizeFault::Overflow)?;
    }
    let bits = nonzero.checked_mul(dtype.bits()).ok_or(SizeFault::Overflow)?;
    if i64::try_from(bits).is_err() {
        return Err(SizeFault::Overflow);
    }
    if shape.contains(&0) {
        return Ok(0);
    }
    if bits % 8 == 0 { Ok(bits / 8) } else { Err(SizeFault::PartialByte(bits)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_order_is_by_size() {
        for dtype in Dtype::ALL {
            assert_eq!(Dtype::parse(dtype.name()), Some(dtype));
        }
        assert!(Dtype::ALL.windows(2).all(|w| w[0] < w[1]));
        assert_eq!(Dtype::parse("f32"), None);
        assert_eq!(Dtype::parse(""), None);
    }

    #[test]
    fn byte_len_is_checked() {
        assert_eq!(byte_len(Dtype::F32, &[]), Ok(4));
        assert_eq!(byte_len(Dtype::F32, &[2, 0]), Ok(0));
        assert_eq!(byte_len(Dtype::F4, &[3, 2]), Ok(3));
        assert_eq!(byte_len(Dtype::F4, &[3]), Err(SizeFault::PartialByte(12)));
        assert_eq!(byte_len(Dtype::F6E3M2, &[4]), Ok(3));
        assert_eq!(byte_len(Dtype::U8, &[usize::MAX]), Err(SizeFault::Overflow));
        // The zero does not hide an overflow among the other dimensions.
        assert_eq!(byte_len(Dtype::U8, &[0, 1 << 40, 1 << 40]), Err(SizeFault::Overflow));
    }
}

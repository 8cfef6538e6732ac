//! Codes of floating-point elements.

use super::ROWS;
use super::dot::{MiniBits, Quad};

/// Code of an element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FloatCode {
    /// f32.
    F32,
    /// f16.
    F16,
    /// bf16.
    Bf16,
    /// A float of at most 8 bits in a byte: a sign, at most 5 bits of exponent, and the rest mantissa.
    Mini {
        /// Bits of the code, with its sign.
        bits: u32,
        /// Bits of the mantissa.
        mantissa_bits: u32,
        /// Exponent bias.
        bias: i32,
    },
}

impl FloatCode {
    /// Bytes of an element.
    pub const fn bytes(self) -> usize {
        match self {
            FloatCode::F32 => 4,
            FloatCode::F16 | FloatCode::Bf16 => 2,
            FloatCode::Mini { .. } => 1,
        }
    }

    pub(super) fn mini(self) -> MiniBits {
        let FloatCode::Mini { bits, mantissa_bits, .. } = self else {
            return MiniBits { magnitude: 0, shift: 0, sign: 0, sign_shift: 0 };
        };
        let sign = 1u8 << (bits - 1);
        MiniBits { magnitude: sign - 1, shift: 10 - mantissa_bits, sign, sign_shift: 16 - bits }
    }

    /// bf16 of every code.
    pub(super) fn pair_table(self) -> PairTable {
        let mini = self.mini();
        let mut table = PairTable { low: [[0; 4 * ROWS]; 2], high: [[0; 4 * ROWS]; 2] };
        let halves = table.low.as_flattened_mut().iter_mut().zip(table.high.as_flattened_mut());
        for (code, (low, high)) in (0..).zip(halves) {
            let mut wide = [0.0];
            crate::generic::f16_to_f32(&[mini.half(code)], &mut wide);
            [*low, *high] = ((wide[0].to_bits() >> 16) as u16).to_le_bytes();
        }
        table
    }

    /// Factor that the codes' f16 bits lack.
    pub(super) fn factor(self) -> f32 {
        match self {
            FloatCode::Mini { bias, .. } => 2f32.powi(15 - bias),
            _ => 1.0,
        }
    }
}

/// bf16 of the codes of 8-bit floats without their highest bit, which is a sign: low bytes, and high bytes. Every such
/// value has at most 8 significant bits, so that bf16 holds it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PairTable {
    pub(crate) low: [Quad; 2],
    pub(crate) high: [Quad; 2],
}

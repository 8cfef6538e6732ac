//! Storage of the values of a form: the least memory from which their matmul gives the scheme's exact values.

use mantissa_num::Accumulator;

use crate::policy::{GemmPolicy, common_unit};
use crate::store::Precision;

/// Storage of a form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Storage {
    /// Values, in bf16 and f16 without the factors of lines and tensor.
    Float(Precision),
    /// 8-bit codes of integers, with a scale for each unit of a line or only its factor.
    Codes {
        /// Values under one scale.
        unit: Option<usize>,
    },
    /// Elements of 8-bit floats in f32 before scaling, for an emulated accumulator.
    Elements {
        /// Values under one scale.
        unit: Option<usize>,
    },
}

impl Default for Storage {
    fn default() -> Self {
        Storage::Float(Precision::F32)
    }
}

impl Storage {
    /// Chooses the storage of both operands of a matmul.
    pub(crate) fn of(gemm: &GemmPolicy) -> Self {
        let both = [&gemm.left, &gemm.right];
        let all = |precision| both.iter().all(|operand| operand.precision() == Some(precision));
        if let Some(unit) = common_unit(both, true) {
            return Storage::Codes { unit };
        }
        if gemm.accumulator != Accumulator::F32
            && let Some(unit) = common_unit(both, false)
        {
            return Storage::Elements { unit };
        }
        match () {
            () if both.iter().all(|operand| operand.fits_bf16()) => Storage::Float(Precision::Bf16),
            () if all(Precision::F16) && gemm.rotation.is_none() => Storage::Float(Precision::F16),
            () => Storage::Float(Precision::F32),
        }
    }

    /// Values under one scale.
    pub(crate) fn unit(self) -> Option<usize> {
        match self {
            Storage::Codes { unit } | Storage::Elements { unit } => unit,
            Storage::Float(_) => None,
        }
    }

    /// Scales of a line of `k` values.
    pub(crate) fn units(self, k: usize) -> usize {
        self.unit().map_or(0, |unit| k.div_ceil(unit))
    }

    /// Most scales of `values` values in at most `lines` lines.
    pub(crate) fn scales(self, values: usize, lines: usize) -> usize {
        self.unit().map_or(0, |unit| (values / unit).saturating_add(lines))
    }

    /// Bytes of a value.
    pub(crate) fn bytes(self) -> u64 {
        match self {
            Storage::Float(precision) => precision.bytes(),
            Storage::Codes { .. } => 1,
            Storage::Elements { .. } => 4,
        }
    }

    pub(crate) fn has_codes(self) -> bool {
        matches!(self, Storage::Codes { .. })
    }

    pub(crate) fn has_bits(self) -> bool {
        matches!(self, Storage::Float(Precision::Bf16 | Precision::F16))
    }

    pub(crate) fn has_values(self) -> bool {
        matches!(self, Storage::Float(Precision::F32) | Storage::Elements { .. })
    }

    /// True if lines always have a factor, which is NaN for a line without codes.
    pub(crate) fn keeps_factors(self) -> bool {
        self.has_codes()
    }
}

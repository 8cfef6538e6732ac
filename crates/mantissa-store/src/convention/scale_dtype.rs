//! Dtypes in which formats store scales.

use mantissa_num::{Code, minifloat};

use crate::Dtype;

/// Scale code for a dtype; U8 scales are E8M0 by convention.
pub(super) fn scale_code(dtype: Dtype) -> Option<Code> {
    match dtype {
        Dtype::F32 => Some(Code::F32),
        Dtype::BF16 => Some(Code::Float(minifloat::BF16)),
        Dtype::F16 => Some(Code::Float(minifloat::F16)),
        Dtype::F8E4M3 => Some(Code::Float(minifloat::E4M3)),
        Dtype::U8 | Dtype::F8E8M0 => Some(Code::E8m0),
        _ => None,
    }
}

/// Dtype for a scale code.
pub(super) fn scale_dtype(code: Code) -> Option<Dtype> {
    match code {
        Code::F32 => Some(Dtype::F32),
        Code::Float(f) if f == minifloat::BF16 => Some(Dtype::BF16),
        Code::Float(f) if f == minifloat::F16 => Some(Dtype::F16),
        Code::Float(f) if f == minifloat::E4M3 => Some(Dtype::F8E4M3),
        Code::E8m0 => Some(Dtype::U8),
        _ => None,
    }
}

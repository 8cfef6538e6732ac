//! Borrowed arrays of a run's state, as checkpoints hold them.

use crate::pages::Paged;

/// Array of weights or of an optimizer state.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Array<'a> {
    /// f32 values.
    F32(&'a [f32]),
    /// bf16 bits.
    Bf16(&'a [u16]),
    /// f16 bits.
    F16(&'a [u16]),
    /// Low halves of f32 values.
    U16(&'a [u16]),
    /// 8-bit codes.
    U8(&'a [u8]),
    /// INT8 codes of weights.
    I8(&'a [i8]),
    /// Values or codes in a file.
    Paged(Paged<'a>),
}

/// Array of weights or of an optimizer state, for restoring.
#[derive(Debug, PartialEq)]
pub enum ArrayMut<'a> {
    /// f32 values.
    F32(&'a mut [f32]),
    /// bf16 bits.
    Bf16(&'a mut [u16]),
    /// f16 bits.
    F16(&'a mut [u16]),
    /// Low halves of f32 values.
    U16(&'a mut [u16]),
    /// 8-bit codes.
    U8(&'a mut [u8]),
    /// INT8 codes of weights.
    I8(&'a mut [i8]),
    /// Values or codes in a file.
    Paged(Paged<'a>),
}

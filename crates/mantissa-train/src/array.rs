//! Borrowed arrays of a run's state, as checkpoints hold them.

use mantissa_store::Dtype;

use crate::error::TrainError;
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

impl Array<'_> {
    /// Returns the little-endian bytes.
    ///
    /// # Errors
    /// [`TrainError::Store`] if a file cannot be read.
    pub(crate) fn le_bytes(&self) -> Result<Vec<u8>, TrainError> {
        Ok(match self {
            Array::F32(values) => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
            Array::Bf16(bits) | Array::F16(bits) | Array::U16(bits) => {
                bits.iter().flat_map(|bits| bits.to_le_bytes()).collect()
            }
            Array::U8(codes) => codes.to_vec(),
            Array::I8(codes) => codes.iter().map(|code| code.cast_unsigned()).collect(),
            Array::Paged(paged) => {
                let mut bytes = vec![0; self.bytes()];
                paged.read(0, &mut bytes)?;
                bytes
            }
        })
    }

    /// Number of bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.len() * self.dtype().bits() as usize / 8
    }

    pub(crate) fn dtype(&self) -> Dtype {
        match self {
            Array::F32(_) => Dtype::F32,
            Array::Bf16(_) => Dtype::BF16,
            Array::F16(_) => Dtype::F16,
            Array::U16(_) => Dtype::U16,
            Array::U8(_) => Dtype::U8,
            Array::I8(_) => Dtype::I8,
            Array::Paged(paged) => paged.dtype(),
        }
    }

    /// Number of elements.
    pub(crate) fn len(&self) -> usize {
        match self {
            Array::F32(x) => x.len(),
            Array::Bf16(x) | Array::F16(x) | Array::U16(x) => x.len(),
            Array::U8(x) => x.len(),
            Array::I8(x) => x.len(),
            Array::Paged(paged) => paged.len(),
        }
    }
}

impl ArrayMut<'_> {
    /// Fills the array with little-endian bytes from the beginning of `rest`; `None` if there are too few.
    pub(crate) fn read_le_bytes(&mut self, rest: &mut &[u8]) -> Option<Result<(), TrainError>> {
        let bytes = self.len() * self.dtype().bits() as usize / 8;
        let (taken, left) = rest.split_at_checked(bytes)?;
        *rest = left;
        Some(self.fill(0, taken))
    }

    /// Copies whole elements into the array from byte offset `at` on.
    ///
    /// # Errors
    /// [`TrainError::Store`] if a file cannot be written.
    pub(crate) fn fill(&mut self, at: usize, bytes: &[u8]) -> Result<(), TrainError> {
        match self {
            ArrayMut::F32(x) => {
                let to = x[at / 4..].iter_mut();
                to.zip(bytes.as_chunks::<4>().0).for_each(|(x, b)| *x = f32::from_le_bytes(*b));
            }
            ArrayMut::Bf16(x) | ArrayMut::F16(x) | ArrayMut::U16(x) => {
                let to = x[at / 2..].iter_mut();
                to.zip(bytes.as_chunks::<2>().0).for_each(|(x, b)| *x = u16::from_le_bytes(*b));
            }
            ArrayMut::U8(x) => x[at..at + bytes.len()].copy_from_slice(bytes),
            ArrayMut::I8(x) => x[at..].iter_mut().zip(bytes).for_each(|(x, b)| *x = b.cast_signed()),
            ArrayMut::Paged(paged) => return paged.write(at as u64, bytes),
        }
        Ok(())
    }

    pub(crate) fn dtype(&self) -> Dtype {
        match self {
            ArrayMut::F32(_) => Dtype::F32,
            ArrayMut::Bf16(_) => Dtype::BF16,
            ArrayMut::F16(_) => Dtype::F16,
            ArrayMut::U16(_) => Dtype::U16,
            ArrayMut::U8(_) => Dtype::U8,
            ArrayMut::I8(_) => Dtype::I8,
            ArrayMut::Paged(paged) => paged.dtype(),
        }
    }

    /// Number of elements.
    pub(crate) fn len(&self) -> usize {
        match self {
            ArrayMut::F32(x) => x.len(),
            ArrayMut::Bf16(x) | ArrayMut::F16(x) | ArrayMut::U16(x) => x.len(),
            ArrayMut::U8(x) => x.len(),
            ArrayMut::I8(x) => x.len(),
            ArrayMut::Paged(paged) => paged.len(),
        }
    }
}

//! Storage of values in f32, bf16 or f16, and views of stored values.

mod int8;

use std::borrow::Cow;
use std::ops::Range;

use mantissa_kernels::{kernels, release};
use mantissa_model::zeros;
use mantissa_num::{Code, Format, Scheme, minifloat};

pub(crate) use int8::Int8Ref;

/// Float format of 32 or 16 bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Precision {
    /// IEEE binary32.
    #[default]
    F32,
    /// bfloat16.
    Bf16,
    /// IEEE binary16.
    F16,
}

impl Precision {
    /// Returns the scheme of plain values in this format.
    pub fn scheme(self) -> Scheme {
        Scheme::plain(match self {
            Precision::F32 => Code::F32,
            Precision::Bf16 => Code::Float(minifloat::BF16),
            Precision::F16 => Code::Float(minifloat::F16),
        })
    }

    /// Returns the float format of a scheme of plain values, if it is one of these.
    pub fn of(format: &Format) -> Option<Self> {
        [Precision::F32, Precision::Bf16, Precision::F16].into_iter().find(|p| p.scheme().format == *format)
    }

    /// Bytes per value.
    pub const fn bytes(self) -> u64 {
        match self {
            Precision::F32 => 4,
            Precision::Bf16 | Precision::F16 => 2,
        }
    }
}

/// Values of an arena.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Store {
    F32(Vec<f32>),
    Bf16(Vec<u16>),
    F16(Vec<u16>),
}

/// Borrowed values of an arena.
#[derive(Clone, Copy, Debug)]
pub(crate) enum StoreRef<'a> {
    F32(&'a [f32]),
    Bf16(&'a [u16]),
    F16(&'a [u16]),
    Int8(Int8Ref<'a>),
}

impl Store {
    /// Allocates `n` zeros; `None` if memory is missing.
    pub(crate) fn zeros(precision: Precision, n: usize) -> Option<Self> {
        Some(match precision {
            Precision::F32 => Store::F32(zeros(n)?),
            Precision::Bf16 => Store::Bf16(zeros(n)?),
            Precision::F16 => Store::F16(zeros(n)?),
        })
    }

    pub(crate) fn precision(&self) -> Precision {
        match self {
            Store::F32(_) => Precision::F32,
            Store::Bf16(_) => Precision::Bf16,
            Store::F16(_) => Precision::F16,
        }
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Store::F32(values) => values.len(),
            Store::Bf16(bits) | Store::F16(bits) => bits.len(),
        }
    }

    /// Reads `n` values from their little-endian bytes; `None` if there are not as many.
    pub(crate) fn from_le_bytes(precision: Precision, n: usize, bytes: &[u8]) -> Option<Self> {
        let whole = (bytes.len() as u64 == precision.bytes().checked_mul(n as u64)?).then_some(bytes)?;
        let bits = || whole.as_chunks::<2>().0.iter().map(|b| u16::from_le_bytes(*b)).collect();
        Some(match precision {
            Precision::F32 => {
                Store::F32(whole.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect())
            }
            Precision::Bf16 => Store::Bf16(bits()),
            Precision::F16 => Store::F16(bits()),
        })
    }

    /// Sets all values to 0.
    pub(crate) fn zero(&mut self) {
        match self {
            Store::F32(values) => values.fill(0.0),
            Store::Bf16(bits) | Store::F16(bits) => bits.fill(0),
        }
    }

    /// Sets the values at `range` to 0 and gives their memory back.
    pub(crate) fn release(&mut self, range: Range<usize>) {
        match self {
            Store::F32(values) => release(&mut values[range]),
            Store::Bf16(bits) | Store::F16(bits) => release(&mut bits[range]),
        }
    }

    /// Adds the values of `other`, which has as many; sums of 16 bits are rounded to nearest.
    pub(crate) fn add(&mut self, other: &Self) {
        if let (Store::F32(to), Store::F32(from)) = (&mut *self, other) {
            to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
            return;
        }
        let (mut own, mut more) = ([0.0; PIECE], [0.0; PIECE]);
        for first in (0..self.len()).step_by(PIECE) {
            let range = first..self.len().min(first + PIECE);
            let (own, more) = (&mut own[..range.len()], &mut more[..range.len()]);
            self.get(range.clone()).widen(own);
            other.get(range).widen(more);
            own.iter_mut().zip(more).for_each(|(own, more)| *own += *more);
            self.set(first, own);
        }
    }

    /// Copies the values at `range` of `other`, of the same precision, to offset `first`.
    pub(crate) fn copy_from(&mut self, first: usize, other: &Self, range: Range<usize>) {
        let to = first..first + range.len();
        match (self, other) {
            (Store::F32(own), Store::F32(other)) => own[to].copy_from_slice(&other[range]),
            (Store::Bf16(own), Store::Bf16(other)) | (Store::F16(own), Store::F16(other)) => {
                own[to].copy_from_slice(&other[range]);
            }
            (own, other) => own.set(first, &other.get(range).widened()),
        }
    }

    pub(crate) fn get(&self, range: Range<usize>) -> StoreRef<'_> {
        match self {
            Store::F32(values) => StoreRef::F32(&values[range]),
            Store::Bf16(bits) => StoreRef::Bf16(&bits[range]),
            Store::F16(bits) => StoreRef::F16(&bits[range]),
        }
    }

    /// Stores `values` from offset `first` on, rounded to nearest.
    pub(crate) fn set(&mut self, first: usize, values: &[f32]) {
        let range = first..first + values.len();
        match self {
            Store::F32(to) => to[range].copy_from_slice(values),
            Store::Bf16(to) => kernels().f32_to_bf16(values, &mut to[range]),
            Store::F16(to) => kernels().f32_to_f16(values, &mut to[range]),
        }
    }
}

impl<'a> StoreRef<'a> {
    /// Returns the values as f32, exactly; copies values that are not f32.
    pub(crate) fn widened(self) -> Cow<'a, [f32]> {
        match self {
            StoreRef::F32(values) => Cow::Borrowed(values),
            _ => {
                let mut values = vec![0.0; self.len()];
                self.widen(&mut values);
                Cow::Owned(values)
            }
        }
    }

    /// True if every value is 0; ends at the first that is not.
    pub(crate) fn is_zero(self) -> bool {
        match self {
            StoreRef::F32(values) => values.iter().all(|value| *value == 0.0),
            // But for the sign.
            StoreRef::Bf16(bits) | StoreRef::F16(bits) => bits.iter().all(|bits| bits & 0x7fff == 0),
            StoreRef::Int8(_) => self.widened().iter().all(|value| *value == 0.0),
        }
    }

    pub(crate) fn len(self) -> usize {
        match self {
            StoreRef::F32(values) => values.len(),
            StoreRef::Bf16(bits) | StoreRef::F16(bits) => bits.len(),
            StoreRef::Int8(values) => values.len(),
        }
    }

    /// Returns the little-endian bytes of the values in their float dtype, INT8 as f32.
    pub(crate) fn float_bytes(self) -> Vec<u8> {
        match self {
            StoreRef::Bf16(bits) | StoreRef::F16(bits) => bits.iter().flat_map(|v| v.to_le_bytes()).collect(),
            StoreRef::F32(_) | StoreRef::Int8(_) => {
                self.widened().iter().flat_map(|v| v.to_le_bytes()).collect()
            }
        }
    }

    /// Returns a range of the values.
    pub(crate) fn slice(self, range: Range<usize>) -> StoreRef<'a> {
        match self {
            StoreRef::F32(values) => StoreRef::F32(&values[range]),
            StoreRef::Bf16(bits) => StoreRef::Bf16(&bits[range]),
            StoreRef::F16(bits) => StoreRef::F16(&bits[range]),
            StoreRef::Int8(values) => StoreRef::Int8(values.slice(range)),
        }
    }

    /// Writes the values as f32, exactly. Panics if `out` has another length.
    pub(crate) fn widen(self, out: &mut [f32]) {
        match self {
            StoreRef::F32(values) => out.copy_from_slice(values),
            StoreRef::Bf16(bits) => kernels().bf16_to_f32(bits, out),
            StoreRef::F16(bits) => kernels().f16_to_f32(bits, out),
            StoreRef::Int8(values) => values.widen(out),
        }
    }

    /// Returns the values rounded to `precision`, as f32; uses `scratch` if rounding or widening is needed.
    pub(crate) fn rounded(self, precision: Precision, scratch: &'a mut Vec<f32>) -> &'a [f32] {
        let exact = match self {
            StoreRef::F32(values) if precision == Precision::F32 => return values,
            StoreRef::Bf16(_) => precision != Precision::F16,
            StoreRef::F16(_) => precision != Precision::Bf16,
            StoreRef::F32(_) => false,
            StoreRef::Int8(_) => precision == Precision::F32,
        };
        scratch.resize(self.len(), 0.0);
        self.widen(scratch);
        if !exact {
            round(precision, scratch);
        }
        scratch
    }

    /// Returns the bits in `precision`, a 16-bit format; uses `scratch` if rounding is needed.
    pub(crate) fn bits(self, precision: Precision, scratch: &'a mut Vec<u16>) -> &'a [u16] {
        match (self, precision) {
            (StoreRef::Bf16(bits), Precision::Bf16) | (StoreRef::F16(bits), Precision::F16) => return bits,
            _ => scratch.resize(self.len(), 0),
        }
        let mut wide = [0.0; PIECE];
        for (i, scratch) in scratch.chunks_mut(PIECE).enumerate() {
            let values = match self {
                StoreRef::F32(values) => &values[i * PIECE..][..scratch.len()],
                _ => {
                    let wide = &mut wide[..scratch.len()];
                    self.slice(i * PIECE..i * PIECE + scratch.len()).widen(wide);
                    wide
                }
            };
            match precision {
                Precision::F16 => kernels().f32_to_f16(values, scratch),
                _ => kernels().f32_to_bf16(values, scratch),
            }
        }
        scratch
    }
}

/// Values that are converted at a time.
const PIECE: usize = 1024;

/// Rounds every value to nearest in `precision`.
pub(crate) fn round(precision: Precision, values: &mut [f32]) {
    let mut bits = [0u16; PIECE];
    for values in values.chunks_mut(PIECE) {
        let bits = &mut bits[..values.len()];
        match precision {
            Precision::F32 => return,
            Precision::Bf16 => {
                kernels().f32_to_bf16(values, bits);
                kernels().bf16_to_f32(bits, values);
            }
            Precision::F16 => {
                kernels().f32_to_f16(values, bits);
                kernels().f16_to_f32(bits, values);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schemes_and_precisions_name_each_other() {
        for precision in [Precision::F32, Precision::Bf16, Precision::F16] {
            assert_eq!(Precision::of(&precision.scheme().format), Some(precision));
        }
        assert_eq!(Precision::of(&Scheme::plain(Code::Float(minifloat::E4M3)).format), None);
    }

    #[test]
    fn values_are_rounded_once() {
        let values = [1.0, 1.003_906_3, -70_000.0, 1e-9, 0.333_333_34];
        for (precision, expected) in [
            (Precision::Bf16, [1.0, 1.0, -70_144.0, 9.968_062e-10, 0.333_984_38]),
            (Precision::F16, [1.0, 1.003_906_3, f32::NEG_INFINITY, 0.0, 0.333_251_95]),
        ] {
            let Some(mut store) = Store::zeros(precision, 7) else { return };
            store.set(1, &values);
            let found = store.get(1..6).widened();
            assert!(found.iter().zip(expected).all(|(a, b)| a == &b || (a - b).abs() < 1e-15), "{found:?}");
            let (mut direct, mut scratch) = (Vec::new(), Vec::new());
            assert_eq!(StoreRef::F32(&values).rounded(precision, &mut direct), &found[..]);
            assert_eq!(store.get(1..6).rounded(precision, &mut scratch), &found[..]);
            let (mut direct, mut scratch) = (Vec::new(), Vec::new());
            let bits = StoreRef::F32(&values).bits(precision, &mut direct);
            assert_eq!(store.get(1..6).bits(precision, &mut scratch), bits);
        }
    }
}

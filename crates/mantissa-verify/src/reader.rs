//! Reads the tensors of one linear layer.

use crate::elements::float_value;
use crate::tensors::{Fault, Tensor, Tensors};

/// The tensors of one linear layer.
pub(crate) struct Reader<'a, T: ?Sized> {
    pub(crate) tensors: &'a T,
    pub(crate) module: &'a str,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
}

impl<'a, T: Tensors + ?Sized> Reader<'a, T> {
    pub(crate) fn name(&self, suffix: &str) -> String {
        format!("{}.{suffix}", self.module)
    }

    pub(crate) fn tensor(&self, suffix: &str) -> Option<Tensor<'a>> {
        self.tensors.tensor(&self.name(suffix))
    }

    pub(crate) fn has(&self, suffix: &str) -> bool {
        self.tensor(suffix).is_some()
    }

    pub(crate) fn dtype(&self, suffix: &str) -> Option<&'a str> {
        self.tensor(suffix).map(|tensor| tensor.dtype)
    }

    /// Number of elements of a tensor; 0 if it is missing.
    pub(crate) fn count(&self, suffix: &str) -> usize {
        self.tensor(suffix).map_or(0, |tensor| tensor.count())
    }

    pub(crate) fn bytes(&self, suffix: &str) -> Result<Vec<u8>, T::Error> {
        let tensor = self.tensor(suffix).ok_or_else(|| self.missing(suffix))?;
        let mut bytes = vec![0; usize::try_from(tensor.bytes).unwrap_or(usize::MAX)];
        self.tensors.read(&self.name(suffix), 0, &mut bytes)?;
        Ok(bytes)
    }

    /// Little-endian 32-bit words.
    pub(crate) fn words(&self, suffix: &str) -> Result<Vec<u32>, T::Error> {
        Ok(self.bytes(suffix)?.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect())
    }

    /// A tensor of floats as f32.
    pub(crate) fn floats(&self, suffix: &str) -> Result<Vec<f32>, T::Error> {
        let bytes = self.bytes(suffix)?;
        let pairs = || bytes.as_chunks::<2>().0.iter().map(|b| u16::from_le_bytes(*b));
        Ok(match self.dtype(suffix) {
            Some("F32") => bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            Some("F64") => bytes.as_chunks::<8>().0.iter().map(|b| f64::from_le_bytes(*b) as f32).collect(),
            Some("F16") => pairs().map(|code| float_value(code.into(), 5, 10, 15)).collect(),
            Some("BF16") => pairs().map(|code| f32::from_bits(u32::from(code) << 16)).collect(),
            other => {
                let got = other.unwrap_or("nothing").to_owned();
                return Err(self.wrong(suffix, "F64, F32, F16 or BF16", &got));
            }
        })
    }

    pub(crate) fn scalar(&self, suffix: &str) -> Result<f32, T::Error> {
        self.floats(suffix)?.first().copied().ok_or_else(|| self.short(suffix))
    }

    pub(crate) fn missing(&self, suffix: &str) -> T::Error {
        self.tensors.error(Fault::Missing { tensor: self.name(suffix) })
    }

    pub(crate) fn wrong(&self, suffix: &str, expected: &str, got: &str) -> T::Error {
        let (expected, got) = (expected.to_owned(), got.to_owned());
        self.tensors.error(Fault::Wrong { tensor: self.name(suffix), expected, got })
    }

    pub(crate) fn short(&self, suffix: &str) -> T::Error {
        self.wrong(suffix, "the bytes that the shape needs", "too few bytes")
    }
}

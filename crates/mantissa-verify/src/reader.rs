//! Reads the tensors of one linear layer in any checkpoint format.

use crate::elements::{float_value, float_values};
use crate::tensors::{Fault, Tensor, Tensors};
use crate::weight::Weight;

/// Reads the weight of linear layer `module` (`[rows, cols]`), to be decoded row by row.
///
/// # Errors
/// A missing tensor, or one with too few bytes; the errors of [`Tensors::read`].
pub fn open<T: Tensors + ?Sized>(
    tensors: &T,
    module: &str,
    rows: usize,
    cols: usize,
) -> Result<Weight, T::Error> {
    let reader = Reader { tensors, module, rows, cols };
    match tensors.convention() {
        "modelopt" => reader.modelopt(),
        "bitsandbytes" => reader.bitsandbytes(),
        "fp8" => reader.fp8_blocks(),
        "mlx" => reader.mlx(),
        "onnx" => reader.onnx(),
        "hqq" => reader.hqq(),
        "quanto" => reader.quanto(),
        // Other formats are told apart by the names of their tensors; some layers may be dense.
        _ if reader.has("weight.packed") => reader.native(),
        _ if reader.has("qweight") => reader.gptq(),
        _ if reader.has("q_weight") => reader.exl2(),
        _ => reader.compressed_tensors(),
    }
}

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

    /// Weight of `bits`-bit codes with these values, in rows padded to units of `unit` bits.
    pub(crate) fn stored(&self, bytes: Vec<u8>, bits: usize, unit: usize, values: Vec<f32>) -> Weight {
        Weight::new(self.cols, bytes, bits, unit, values)
    }

    /// An unquantized weight.
    pub(crate) fn dense(&self) -> Result<Weight, T::Error> {
        let (bits, values) = match self.dtype("weight") {
            None => return Err(self.missing("weight")),
            Some("F32") => (32, Vec::new()),
            Some("F64") => (64, Vec::new()),
            Some("F16") => (16, float_values(5, 10, 15)),
            Some("BF16") => (16, float_values(8, 7, 127)),
            Some(other) => return Err(self.wrong("weight", "F64, F32, F16 or BF16", other)),
        };
        let bytes = self.bytes("weight")?;
        match bytes.len() / (bits / 8) < self.rows * self.cols {
            true => Err(self.short("weight")),
            false => Ok(self.stored(bytes, bits, bits, values)),
        }
    }
}

//! Readers of tensor values, one panel at a time. A weight on disk is widened in the cache of the thread that uses it.
//! It is never in memory as f32 as a whole.

use std::ops::Range;

use mantissa_kernels::kernels;
use mantissa_model::{LinearInfo, StoredAs};
use mantissa_num::TensorError;
use mantissa_num::pack::transpose;
use mantissa_store::convention::{ModelFiles, Weight};
use mantissa_store::{Dtype, FiniteScan};

pub(crate) use mantissa_methods::source::{PANEL, Tail};
pub use mantissa_methods::source::{Scratch, WeightReader, amax};

use crate::error::QuantError;
use crate::fold::Folded;

/// Refuses a tensor with non-finite values and counts them over the whole tensor. This includes schemes with a code for
/// NaN or infinity, because such a weight is damaged.
///
/// # Errors
/// [`mantissa_store::Error::NonFinite`]; the tensor cannot be read.
pub(crate) fn require_finite(files: &ModelFiles, name: &str) -> Result<(), mantissa_store::Error> {
    let Some((file, meta)) = files.checkpoint().locate(name) else { return Ok(()) };
    let mut numbers = FiniteScan::new(meta.dtype);
    let mut bytes = vec![0; PANEL * 8];
    let mut at = 0;
    while at < meta.len {
        let n = usize::try_from(meta.len - at).unwrap_or(usize::MAX).min(bytes.len());
        file.read_range(meta, at, &mut bytes[..n])?;
        numbers.update(&bytes[..n]);
        at += n as u64;
    }
    numbers.finish(file.path(), name)
}

/// A dense tensor of a model.
pub(crate) struct DenseTensor<'a>(Values<'a>);

enum Values<'a> {
    /// Values of a tensor, from element `first` on.
    File {
        files: &'a ModelFiles,
        name: String,
        dtype: Dtype,
        first: usize,
    },
    Memory(Vec<f32>),
}

/// Error of reading or quantizing a [`DenseTensor`].
#[derive(Debug)]
pub(crate) enum DenseError {
    Store(mantissa_store::Error),
    Tensor(TensorError),
}

impl DenseError {
    /// Adds the name `tensor`; its values are stored in `files` under `stored`.
    pub(crate) fn of(self, files: &ModelFiles, stored: &str, tensor: &str) -> QuantError {
        match self {
            // A panel counts only its own elements; the message is about the whole tensor.
            DenseError::Store(error @ mantissa_store::Error::NonFinite { .. }) => {
                require_finite(files, stored).err().unwrap_or(error).into()
            }
            DenseError::Store(error) => error.into(),
            DenseError::Tensor(error) => {
                QuantError::Tensor { path: files.dir().to_owned(), tensor: tensor.to_owned(), error }
            }
        }
    }
}

impl From<TensorError> for DenseError {
    fn from(error: TensorError) -> Self {
        DenseError::Tensor(error)
    }
}

impl<'a> DenseTensor<'a> {
    /// Opens the tensor `name` of this shape.
    ///
    /// # Errors
    /// Errors of [`ModelFiles::tensor_f32`].
    pub(crate) fn open(
        files: &'a ModelFiles,
        name: &str,
        shape: &[usize],
    ) -> Result<Self, mantissa_store::Error> {
        match Self::part(files, name, shape, 0) {
            Some(tensor) => Ok(tensor),
            // Rare dtypes and all errors.
            None => Ok(DenseTensor(Values::Memory(files.tensor_f32(name, shape)?))),
        }
    }

    /// Opens the elements from `first` on of the tensor `name` of this shape; `None` if it is missing or has another
    /// shape or a rare dtype.
    fn part(files: &'a ModelFiles, name: &str, shape: &[usize], first: usize) -> Option<Self> {
        let meta = files.checkpoint().get(name).filter(|meta| meta.shape == shape)?;
        match meta.dtype {
            dtype @ (Dtype::BF16 | Dtype::F16 | Dtype::F32) => {
                Some(DenseTensor(Values::File { files, name: name.to_owned(), dtype, first }))
            }
            _ => None,
        }
    }

    /// Opens the weight `[rows, cols]` of a linear layer. A weight stored in another order, or changed, is loaded into
    /// memory.
    ///
    /// # Errors
    /// Errors of [`ModelFiles::tensor_f32`] and [`ModelFiles::expert`].
    pub(crate) fn of_linear(source: &Folded<'a>, info: &LinearInfo) -> Result<Self, mantissa_store::Error> {
        let (rows, cols, files) = (info.rows, info.cols, source.files());
        let (name, shape) = info.tensor_in(files);
        if source.changes(&name) {
            let values = source.tensor(&name, &shape)?;
            let by_columns = info.stored == StoredAs::Columns;
            let values = if by_columns { transpose(&values, cols, rows) } else { values };
            return Ok(DenseTensor(Values::Memory(values)));
        }
        let values = match &info.stored {
            StoredAs::Rows => return Self::open(files, source.stored_name(&name), &shape),
            StoredAs::Columns => transpose(&files.tensor_f32(&name, &shape)?, cols, rows),
            StoredAs::Stacked(_) if info.is_by_rows(files) => return Self::open(files, &name, &shape),
            StoredAs::Stacked(stack) => {
                let part = stack.first(rows, cols);
                match part.and_then(|first| Self::part(files, &name, &shape, first)) {
                    Some(tensor) => return Ok(tensor),
                    None => widened(files.expert(stack, rows, cols)?),
                }
            }
        };
        Ok(DenseTensor(Values::Memory(values)))
    }
}

impl From<Vec<f32>> for DenseTensor<'_> {
    fn from(values: Vec<f32>) -> Self {
        DenseTensor(Values::Memory(values))
    }
}

/// Converts a dense weight to f32.
fn widened(weight: Weight) -> Vec<f32> {
    let out = |bits: &[u16]| vec![0.0; bits.len()];
    match weight {
        Weight::F32(values) => values,
        Weight::Bf16(bits) => {
            let mut values = out(&bits);
            kernels().bf16_to_f32(&bits, &mut values);
            values
        }
        Weight::F16(bits) => {
            let mut values = out(&bits);
            kernels().f16_to_f32(&bits, &mut values);
            values
        }
        // Unreachable: quantized sources are refused before.
        Weight::Quantized(q) => q.dequantize().unwrap_or_default(),
    }
}

impl WeightReader for DenseTensor<'_> {
    type Error = DenseError;

    fn elements<'a>(
        &'a self,
        range: Range<usize>,
        scratch: &'a mut Scratch,
    ) -> Result<&'a [f32], DenseError> {
        let (files, name, dtype, first) = match &self.0 {
            Values::Memory(values) => return Ok(&values[range]),
            Values::File { files, name, dtype, first } => (files, name, *dtype, *first),
        };
        let size = if dtype == Dtype::F32 { 4 } else { 2 };
        let Scratch { bytes, values } = scratch;
        bytes.resize(range.len() * size, 0);
        let start = ((first + range.start) * size) as u64;
        files.checkpoint().read_range(name, start, bytes).map_err(DenseError::Store)?;
        let mut numbers = FiniteScan::new(dtype);
        numbers.update(bytes);
        numbers.finish(files.dir(), name).map_err(DenseError::Store)?;
        values.resize(range.len(), 0.0);
        widen(dtype, bytes, values);
        Ok(values)
    }
}

/// Converts stored values of `dtype`, a float of 16 or 32 bits, to f32.
fn widen(dtype: Dtype, bytes: &[u8], values: &mut [f32]) {
    match dtype {
        Dtype::BF16 => kernels().bf16_le_to_f32(bytes, values),
        Dtype::F16 => kernels().f16_le_to_f32(bytes, values),
        _ => {
            let bytes = bytes.as_chunks::<4>().0;
            values.iter_mut().zip(bytes).for_each(|(v, b)| *v = f32::from_le_bytes(*b));
        }
    }
}

//! Where a tensor's values come from, a panel at a time: a weight on disk is widened in the cache of the thread that uses it
//! and never stands in memory as f32.

use std::ops::Range;

use mantissa_kernels::{for_each_with, kernels};
use mantissa_model::{LinearInfo, StoredAs};
use mantissa_num::TensorError;
use mantissa_num::pack::transpose;
use mantissa_store::convention::{ModelFiles, Weight};
use mantissa_store::{Dtype, FiniteScan};

use crate::error::QuantError;
use crate::fold::Folded;

/// Elements of a panel: enough to pay for a dispatch, little enough to stay in a core's cache and, at two bytes each, below what
/// an allocator takes from the system anew every time.
pub(crate) const PANEL: usize = 1 << 15;

/// What a thread reads and widens a panel in; used again, it costs neither zeros nor pages.
#[derive(Debug, Default)]
pub struct Scratch {
    bytes: Vec<u8>,
    values: Vec<f32>,
}

/// A flattened tensor that can be read in pieces, by several threads at once.
pub trait Source: Sync {
    /// Why it could not be read, or its values not be quantized.
    type Error: From<TensorError> + Send;

    /// Elements `range`; `scratch` holds them where they have to be brought into memory first.
    ///
    /// # Errors
    /// As the implementation says.
    fn elements<'a>(
        &'a self,
        range: Range<usize>,
        scratch: &'a mut Scratch,
    ) -> Result<&'a [f32], Self::Error>;
}

impl Source for [f32] {
    type Error = TensorError;

    fn elements<'a>(&'a self, range: Range<usize>, _: &'a mut Scratch) -> Result<&'a [f32], TensorError> {
        Ok(&self[range])
    }
}

/// A source from its element `first` on.
pub(crate) struct Tail<'a, S: ?Sized> {
    pub(crate) source: &'a S,
    pub(crate) first: usize,
}

impl<S: Source + ?Sized> Source for Tail<'_, S> {
    type Error = S::Error;

    fn elements<'a>(&'a self, range: Range<usize>, scratch: &'a mut Scratch) -> Result<&'a [f32], S::Error> {
        self.source.elements(self.first + range.start..self.first + range.end, scratch)
    }
}

/// The greatest magnitude among the `len` elements of `source`; NaN if one is NaN.
///
/// # Errors
/// As [`Source::elements`].
pub fn amax<S: Source + ?Sized>(source: &S, len: usize, threads: usize) -> Result<f32, S::Error> {
    // Positive floats, infinity and NaN are ordered as their bits are.
    let parts = map_panels(source, len, threads, |x| kernels().amax(x).to_bits())?;
    Ok(f32::from_bits(parts.into_iter().max().unwrap_or(0)))
}

/// The least and the greatest of the `len` elements of `source`; `None` if one is not finite.
///
/// # Errors
/// As [`Source::elements`].
pub(crate) fn min_max<S: Source + ?Sized>(
    source: &S,
    len: usize,
    threads: usize,
) -> Result<Option<(f32, f32)>, S::Error> {
    let parts = map_panels(source, len, threads, |x| kernels().min_max(x))?;
    let finite = parts.iter().all(|(low, high)| low.is_finite() && high.is_finite());
    let start = (f32::INFINITY, f32::NEG_INFINITY);
    Ok(finite.then(|| parts.iter().fold(start, |all, part| (all.0.min(part.0), all.1.max(part.1)))))
}

/// `f` of every panel, in order.
fn map_panels<S: Source + ?Sized, T: Send>(
    source: &S,
    len: usize,
    threads: usize,
    f: impl Fn(&[f32]) -> T + Sync,
) -> Result<Vec<T>, S::Error> {
    let mut parts: Vec<Option<Result<T, S::Error>>> = (0..len.div_ceil(PANEL)).map(|_| None).collect();
    for_each_with(threads, Scratch::default, parts.iter_mut().enumerate(), |scratch, (i, part)| {
        let range = i * PANEL..len.min((i + 1) * PANEL);
        *part = Some(source.elements(range, scratch).map(&f));
    });
    parts.into_iter().flatten().collect()
}

/// Refuses a tensor of a model that holds values which are no numbers, with their count in the whole of it. Schemes that
/// have a code for NaN or infinity are no exception: such a weight is damage.
///
/// # Errors
/// [`mantissa_store::Error::NonFinite`], and where it cannot be read.
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
    File { files: &'a ModelFiles, name: String, dtype: Dtype },
    Memory(Vec<f32>),
}

/// Why a [`DenseTensor`] could not be quantized.
#[derive(Debug)]
pub(crate) enum DenseError {
    Store(mantissa_store::Error),
    Tensor(TensorError),
}

impl DenseError {
    /// As the error of `tensor`, whose values are those that `files` hold under the name `stored`.
    pub(crate) fn of(self, files: &ModelFiles, stored: &str, tensor: &str) -> QuantError {
        match self {
            // A panel knows of its own elements; the message is about the whole tensor.
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
    /// The tensor `name`, which must have this shape.
    ///
    /// # Errors
    /// As [`ModelFiles::tensor_f32`].
    pub(crate) fn open(
        files: &'a ModelFiles,
        name: &str,
        shape: &[usize],
    ) -> Result<Self, mantissa_store::Error> {
        let meta = files.checkpoint().get(name).filter(|meta| meta.shape == shape);
        match meta.map(|meta| meta.dtype) {
            Some(dtype @ (Dtype::BF16 | Dtype::F16 | Dtype::F32)) => {
                Ok(DenseTensor(Values::File { files, name: name.to_owned(), dtype }))
            }
            // Rare dtypes, and every fault.
            _ => Ok(DenseTensor(Values::Memory(files.tensor_f32(name, shape)?))),
        }
    }

    /// The weight `[rows, cols]` of a linear layer of a dense model. One that is stored in another order is brought into memory.
    ///
    /// # Errors
    /// As [`ModelFiles::tensor_f32`] and [`ModelFiles::expert`].
    pub(crate) fn of_linear(source: &Folded<'a>, info: &LinearInfo) -> Result<Self, mantissa_store::Error> {
        let (rows, cols, files) = (info.rows, info.cols, source.files());
        let (name, shape) = info.dense_tensor();
        if source.changes(&name) {
            let values = source.tensor(&name, &shape)?;
            let by_columns = info.stored == StoredAs::Columns;
            let values = if by_columns { transpose(&values, cols, rows) } else { values };
            return Ok(DenseTensor(Values::Memory(values)));
        }
        let values = match &info.stored {
            StoredAs::Rows => return Self::open(files, &name, &shape),
            StoredAs::Columns => transpose(&files.tensor_f32(&name, &shape)?, cols, rows),
            StoredAs::Stacked(stack) => widened(files.expert(stack, rows, cols)?),
        };
        Ok(DenseTensor(Values::Memory(values)))
    }
}

impl From<Vec<f32>> for DenseTensor<'_> {
    fn from(values: Vec<f32>) -> Self {
        DenseTensor(Values::Memory(values))
    }
}

/// The values of a dense weight.
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
        // A source that is quantized is refused before.
        Weight::Quantized(q) => q.dequantize().unwrap_or_default(),
    }
}

impl Source for DenseTensor<'_> {
    type Error = DenseError;

    fn elements<'a>(
        &'a self,
        range: Range<usize>,
        scratch: &'a mut Scratch,
    ) -> Result<&'a [f32], DenseError> {
        let (files, name, dtype) = match &self.0 {
            Values::Memory(values) => return Ok(&values[range]),
            Values::File { files, name, dtype } => (files, name, *dtype),
        };
        let size = if dtype == Dtype::F32 { 4 } else { 2 };
        let Scratch { bytes, values } = scratch;
        bytes.resize(range.len() * size, 0);
        let start = (range.start * size) as u64;
        files.checkpoint().read_range(name, start, bytes).map_err(DenseError::Store)?;
        let mut numbers = FiniteScan::new(dtype);
        numbers.update(bytes);
        numbers.finish(files.dir(), name).map_err(DenseError::Store)?;
        values.resize(range.len(), 0.0);
        match dtype {
            Dtype::BF16 => kernels().bf16_le_to_f32(bytes, values),
            Dtype::F16 => kernels().f16_le_to_f32(bytes, values),
            _ => {
                let bytes = bytes.as_chunks::<4>().0;
                values.iter_mut().zip(bytes).for_each(|(v, b)| *v = f32::from_le_bytes(*b));
            }
        }
        Ok(values)
    }
}

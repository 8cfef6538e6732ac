//! Tensors that are read in another order, or with other values, than the file stores them.

use std::sync::Arc;

use crate::dtype::Dtype;
use crate::error::Result;
use crate::reader::reserve;
use crate::safetensors::{SafeTensors, TensorMeta};

/// Value that is read for a stored one.
type ValueOf = fn(f32) -> f32;

/// Difference between the stored bytes of a tensor and the bytes that are read. Both have the same length.
#[derive(Clone, Debug)]
pub(crate) enum View {
    /// Row `i` is stored as row `rows[i]`.
    Rows(Arc<[u32]>),
    /// A matrix `[rows, cols]`, stored as `[cols, rows]`.
    Transposed { rows: usize, cols: usize },
    /// F32 values, each a function of the stored one, of rows as in [`View::Rows`].
    Values { rows: Option<Arc<[u32]>>, value: ValueOf },
}

/// Tensor of a checkpoint that is a range of another tensor's bytes.
#[derive(Clone, Debug)]
pub(crate) struct Viewed {
    /// Tensor in the file.
    pub(crate) stored: String,
    /// Name, shape and place.
    pub(crate) meta: TensorMeta,
    /// Difference between stored and read bytes, if there is one.
    pub(crate) view: Option<View>,
}

impl View {
    /// Reads the whole tensor.
    ///
    /// # Errors
    /// As [`SafeTensors::read`].
    pub(crate) fn read(&self, file: &SafeTensors, meta: &TensorMeta) -> Result<Vec<u8>> {
        let mut bytes = reserve(file.path(), &meta.name, meta.len, meta.len)?;
        bytes.resize(usize::try_from(meta.len).unwrap_or(0), 0);
        self.read_range(file, meta, 0, &mut bytes)?;
        Ok(bytes)
    }

    /// Reads `count` elements of a float tensor as f32, from element `first` on.
    ///
    /// # Errors
    /// As [`SafeTensors::read_elements_f32`].
    pub(crate) fn read_elements_f32(
        &self,
        file: &SafeTensors,
        meta: &TensorMeta,
        first: u64,
        count: u64,
    ) -> Result<Vec<f32>> {
        let size = size_of_element(meta.dtype) as u64;
        let len = count.saturating_mul(size);
        file.require_range(meta, first.saturating_mul(size), len)?;
        let mut bytes = reserve(file.path(), &meta.name, len, len)?;
        bytes.resize(usize::try_from(len).unwrap_or(0), 0);
        self.read_range(file, meta, first * size, &mut bytes)?;
        file.widened(meta, &bytes)
    }

    /// Fills `buf` with the tensor's bytes from `byte_offset` on.
    ///
    /// # Errors
    /// As [`SafeTensors::read_range`].
    pub(crate) fn read_range(
        &self,
        file: &SafeTensors,
        meta: &TensorMeta,
        byte_offset: u64,
        buf: &mut [u8],
    ) -> Result<()> {
        file.require_range(meta, byte_offset, buf.len() as u64)?;
        match self {
            View::Rows(rows) => read_rows(rows, file, meta, byte_offset, buf),
            View::Transposed { rows, cols } => {
                let size = size_of_element(meta.dtype);
                let all = transposed(&file.read(meta)?, (*rows, *cols), size);
                let start = usize::try_from(byte_offset).unwrap_or(usize::MAX);
                buf.copy_from_slice(&all[start..][..buf.len()]);
                Ok(())
            }
            View::Values { rows, value } => {
                read_values((rows.as_deref(), *value), file, meta, byte_offset, buf)
            }
        }
    }
}

/// Bytes of an element of a float dtype.
fn size_of_element(dtype: Dtype) -> usize {
    (dtype.bits() / 8) as usize
}

/// Reads rows one by one from their places.
fn read_rows(
    rows: &[u32],
    file: &SafeTensors,
    meta: &TensorMeta,
    byte_offset: u64,
    buf: &mut [u8],
) -> Result<()> {
    let row = (meta.len / rows.len().max(1) as u64).max(1);
    let (mut at, mut rest) = (byte_offset, buf);
    while !rest.is_empty() {
        let (number, within) = (at / row, at % row);
        let n = usize::try_from(row - within).unwrap_or(usize::MAX).min(rest.len());
        let (piece, after) = rest.split_at_mut(n);
        let stored = rows.get(usize::try_from(number).unwrap_or(usize::MAX)).copied().unwrap_or_default();
        file.read_range(meta, u64::from(stored) * row + within, piece)?;
        at += n as u64;
        rest = after;
    }
    Ok(())
}

/// Transposes a matrix stored as `[cols, rows]`, with elements of `size` bytes, to `[rows, cols]`.
fn transposed(stored: &[u8], (rows, cols): (usize, usize), size: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(stored.len());
    for row in 0..rows {
        (0..cols).for_each(|col| out.extend_from_slice(&stored[(col * rows + row) * size..][..size]));
    }
    out
}

/// Reads F32 values, and replaces each by its function.
fn read_values(
    (rows, value): (Option<&[u32]>, ValueOf),
    file: &SafeTensors,
    meta: &TensorMeta,
    byte_offset: u64,
    buf: &mut [u8],
) -> Result<()> {
    let skipped = byte_offset % 4;
    let len = (skipped + buf.len() as u64).next_multiple_of(4);
    let mut words = vec![0; usize::try_from(len).unwrap_or(usize::MAX)];
    match rows {
        Some(rows) => read_rows(rows, file, meta, byte_offset - skipped, &mut words)?,
        None => file.read_range(meta, byte_offset - skipped, &mut words)?,
    }
    for word in words.as_chunks_mut::<4>().0 {
        *word = value(f32::from_le_bytes(*word)).to_le_bytes();
    }
    let start = skipped as usize;
    buf.copy_from_slice(&words[start..][..buf.len()]);
    Ok(())
}

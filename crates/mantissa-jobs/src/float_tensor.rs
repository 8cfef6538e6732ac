//! Float tensors of a safetensors file, read in panels as f32.

use std::ops::Range;
use std::path::Path;

use mantissa_num::minifloat::{self, MiniFloat};
use mantissa_store::{Dtype, SafeTensors, TensorMeta};

use crate::error::Result;

/// Tensor of floating-point numbers of at least 8 bits.
#[derive(Clone, Copy)]
pub struct FloatTensor<'a> {
    file: &'a SafeTensors,
    meta: &'a TensorMeta,
    small: Option<MiniFloat>,
    /// Product of all axes but the last; 1 for ranks 0 and 1.
    pub rows: usize,
    /// The last axis; 1 for a scalar.
    pub cols: usize,
}

impl<'a> FloatTensor<'a> {
    /// Opens the tensor `meta` of `file`; `None` if its dtype is no float.
    pub fn new(file: &'a SafeTensors, meta: &'a TensorMeta) -> Option<Self> {
        let small = match meta.dtype {
            Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::BF16 => None,
            Dtype::F8E4M3 => Some(minifloat::E4M3),
            Dtype::F8E5M2 => Some(minifloat::E5M2),
            Dtype::F8E4M3Fnuz => Some(minifloat::E4M3_FNUZ),
            Dtype::F8E5M2Fnuz => Some(minifloat::E5M2_FNUZ),
            _ => return None,
        };
        let (rows, cols) = match meta.shape.split_last() {
            None => (1, 1),
            // Cannot overflow: the checked header's non-zero dimensions multiply within 63 bits.
            Some((&last, leading)) => (leading.iter().product(), last),
        };
        Some(FloatTensor { file, meta, small, rows, cols })
    }

    /// Returns name, dtype and shape.
    pub fn meta(&self) -> &'a TensorMeta {
        self.meta
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &'a Path {
        self.file.path()
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.rows * self.cols
    }

    /// Bytes per element in the file.
    pub fn unit(&self) -> u64 {
        self.meta.dtype.bits() / 8
    }

    /// Reads the elements of `range` of the flattened tensor as f32.
    ///
    /// # Errors
    /// The range is outside the tensor or cannot be read.
    pub fn read(&self, range: Range<usize>) -> Result<Vec<f32>> {
        let unit = self.unit();
        let (first, len) = (range.start as u64 * unit, range.len() as u64 * unit);
        if let Some(small) = self.small {
            let mut bytes = vec![0; range.len()];
            self.file.read_range(self.meta, first, &mut bytes)?;
            let values: Vec<f32> = (0..=u8::MAX).map(|code| small.decode(code.into())).collect();
            return Ok(bytes.into_iter().map(|code| values[usize::from(code)]).collect());
        }
        let TensorMeta { name, dtype, offset, .. } = self.meta;
        let part = TensorMeta {
            name: name.clone(),
            dtype: *dtype,
            shape: vec![range.len()],
            offset: offset + first,
            len,
        };
        Ok(self.file.read_f32(&part)?)
    }

    /// Reads the elements of `range` of an F64 tensor unconverted; `None` for another dtype.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn read_f64(&self, range: Range<usize>) -> Result<Option<Vec<f64>>> {
        if self.meta.dtype != Dtype::F64 {
            return Ok(None);
        }
        let mut bytes = vec![0; range.len() * size_of::<f64>()];
        self.file.read_range(self.meta, (range.start * size_of::<f64>()) as u64, &mut bytes)?;
        Ok(Some(bytes.as_chunks().0.iter().map(|b| f64::from_le_bytes(*b)).collect()))
    }
}

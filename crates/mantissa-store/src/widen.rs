//! Float tensors as f32, converted panel by panel.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::reader::reserve;
use crate::safetensors::{SafeTensors, TensorMeta};

/// Elements per panel: half a megabyte at most, so the peak is the result itself.
const PANEL: u64 = 1 << 16;

impl SafeTensors {
    /// The tensor as f32: F32 as it is, F16 and BF16 widened exactly, F64 rounded to nearest even.
    ///
    /// # Errors
    /// [`Error::NotFloat`] for any other dtype, else as [`SafeTensors::read`].
    pub fn read_f32(&self, meta: &TensorMeta) -> Result<Vec<f32>> {
        self.require_inside(meta)?;
        self.read_elements_f32(meta, 0, meta.len / (meta.dtype.bits() / 8).max(1))
    }

    /// `count` elements of the tensor as f32, from element `first` on.
    ///
    /// # Errors
    /// As [`read_f32`](Self::read_f32), and [`Error::Range`] beyond the tensor.
    pub fn read_elements_f32(&self, meta: &TensorMeta, first: u64, count: u64) -> Result<Vec<f32>> {
        let widen = self.widener(meta)?;
        let size = meta.dtype.bits() / 8;
        self.require_range(meta, first.saturating_mul(size), count.saturating_mul(size))?;
        let mut values = reserve(self.path(), &meta.name, count, count.saturating_mul(4))?;
        let mut panel = vec![0; usize::try_from(PANEL.min(count) * size).unwrap_or(0)];
        for start in (0..count).step_by(PANEL as usize) {
            let n = usize::try_from(PANEL.min(count - start) * size).unwrap_or(0);
            self.read_range(meta, (first + start) * size, &mut panel[..n])?;
            widen(&panel[..n], &mut values);
        }
        Ok(values)
    }

    /// Widens bytes of the tensor.
    ///
    /// # Errors
    /// [`Error::NotFloat`], [`Error::Memory`].
    pub(crate) fn widened(&self, meta: &TensorMeta, bytes: &[u8]) -> Result<Vec<f32>> {
        let widen = self.widener(meta)?;
        let count = bytes.len() as u64 / (meta.dtype.bits() / 8).max(1);
        let mut values = reserve(self.path(), &meta.name, count, count.saturating_mul(4))?;
        widen(bytes, &mut values);
        Ok(values)
    }

    fn widener(&self, meta: &TensorMeta) -> Result<Widen> {
        widener(meta.dtype).ok_or_else(|| Error::NotFloat {
            path: self.path().to_owned(),
            tensor: meta.name.clone(),
            dtype: meta.dtype,
        })
    }
}

/// Appends little-endian elements to a vector of f32.
type Widen = fn(&[u8], &mut Vec<f32>);

fn widener(dtype: Dtype) -> Option<Widen> {
    match dtype {
        Dtype::F32 => Some(|bytes, out| out.extend(elements(bytes).map(f32::from_le_bytes))),
        Dtype::F64 => Some(|bytes, out| out.extend(elements(bytes).map(|b| f64::from_le_bytes(b) as f32))),
        Dtype::F16 => Some(|bytes, out| {
            let halves: Vec<f16> = elements(bytes).map(f16::from_le_bytes).collect();
            append(&halves, out);
        }),
        Dtype::BF16 => Some(|bytes, out| {
            let halves: Vec<bf16> = elements(bytes).map(bf16::from_le_bytes).collect();
            append(&halves, out);
        }),
        _ => None,
    }
}

/// Converts a slice at a time, which lets `half` use the CPU's conversion instructions.
fn append<H>(halves: &[H], out: &mut Vec<f32>)
where
    [H]: HalfFloatSliceExt,
{
    let start = out.len();
    out.resize(start + halves.len(), 0.0);
    halves.convert_to_f32_slice(&mut out[start..]);
}

fn elements<const N: usize>(bytes: &[u8]) -> impl Iterator<Item = [u8; N]> + '_ {
    bytes.as_chunks::<N>().0.iter().copied()
}

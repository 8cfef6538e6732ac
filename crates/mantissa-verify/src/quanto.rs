//! quanto weights: bytes, or nibbles and bit pairs with distant lines.

use crate::elements::{float_values, signed_bytes};
use crate::reader::Reader;
use crate::tensors::Tensors;
use crate::weight::Weight;

impl<T: Tensors + ?Sized> Reader<'_, T> {
    /// Reads a weight of quanto; the dtype and name of its codes determine the kind.
    pub(crate) fn quanto(&self) -> Result<Weight, T::Error> {
        if self.has("weight") {
            return self.dense();
        }
        let scales = self.floats("weight._scale")?;
        if self.has("weight._data") {
            let values = match self.dtype("weight._data") {
                Some("F8_E4M3") => float_values(4, 3, 7),
                Some("F8_E4M3FNUZ") => float_values(4, 3, 8),
                Some("F8_E5M2") => float_values(5, 2, 15),
                _ => signed_bytes(),
            };
            let bytes = self.bytes("weight._data")?;
            if bytes.len() != self.rows * self.cols || scales.len() != self.rows {
                return Err(self.short("weight._data"));
            }
            let stored = self.stored(bytes, 8, 8, values);
            return Ok(Weight { scales: Some(self.lines(scales, self.cols)), ..stored });
        }
        let name = "weight._data._data";
        let cols = self.rows * self.cols / scales.len().max(1);
        let bytes = self.tensor(name).map_or(0, |tensor| tensor.bytes) as usize;
        // Two or four codes per byte.
        let bits = if bytes * 3 > self.rows * self.cols { 4 } else { 2 };
        let array = self.strided(name, (bits, 1, 8 / bits), false, cols)?;
        if matches!(self.dtype("weight._shift"), Some("I8" | "U8")) {
            let zeros = self.bytes("weight._shift")?.into_iter().map(f32::from).collect();
            return Ok(Weight { zeros, ..self.in_groups(array, scales, Vec::new()) });
        }
        let shift = self.floats("weight._shift")?;
        if shift.len() != scales.len() {
            return Err(self.short("weight._shift"));
        }
        Ok(self.in_groups(array, scales, shift.into_iter().map(|shift| -shift).collect()))
    }
}

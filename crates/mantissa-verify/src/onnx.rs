//! Weights of ONNX initializers.

use crate::elements::{float_values, signed_bytes};
use crate::reader::Reader;
use crate::scales::Scales;
use crate::tensors::Tensors;
use crate::weight::Weight;

impl<T: Tensors + ?Sized> Reader<'_, T> {
    /// Reads `(code - zero point) · scale`; the number of scales determines the blocks.
    pub(crate) fn onnx(&self) -> Result<Weight, T::Error> {
        if !self.has("weight_quantized") {
            return self.dense();
        }
        let dtype = self.dtype("weight_quantized");
        let total = self.rows * self.cols;
        let codes = self.bytes("weight_quantized")?;
        let nibble = dtype == Some("U8");
        if codes.len() != if nibble { total.div_ceil(2) } else { total } {
            return Err(self.short("weight_quantized"));
        }
        let signed = |bytes: Vec<u8>, count: usize| -> Vec<u8> {
            let code = |i: usize| match nibble {
                true => (bytes[i / 2] << (4 * (1 - i % 2)) & 0xf0) as i8 >> 4,
                false => bytes[i] as i8,
            };
            (0..count).map(|i| code(i) as u8).collect()
        };
        let values = match dtype {
            Some("F8_E4M3") => float_values(4, 3, 7),
            Some("F8_E4M3FNUZ") => float_values(4, 3, 8),
            Some("F8_E5M2") => float_values(5, 2, 15),
            Some("F8_E5M2FNUZ") => float_values(5, 2, 16),
            _ => signed_bytes(),
        };
        let scales = self.floats("weight_scale")?;
        let count = scales.len();
        if count == 0 || !total.is_multiple_of(count) {
            return Err(self.short("weight_scale"));
        }
        let zeros = match self.has("weight_zero_point") {
            true => {
                let bytes = self.bytes("weight_zero_point")?;
                if bytes.len() != if nibble { count.div_ceil(2) } else { count } {
                    return Err(self.short("weight_zero_point"));
                }
                signed(bytes, count).into_iter().map(|zero| f32::from(zero as i8)).collect()
            }
            false => Vec::new(),
        };
        let (down, across) = if count == 1 { (1, 1) } else { (self.rows, count / self.rows.max(1)) };
        let side = (self.rows / down.max(1), self.cols / across.max(1));
        let scales = Scales { values: scales, down, across: across.max(1), side, flat: None };
        Ok(Weight { scales: Some(scales), zeros, ..self.stored(signed(codes, total), 8, 8, values) })
    }
}

//! Weights of ONNX initializers.

use mantissa_store::Dtype;

use super::{Reader, Result, Scales, Stored, float_values};

impl Reader<'_> {
    /// `(code - zero point) · scale`; the number of scales shows the blocks.
    pub(super) fn onnx(&self) -> Result<Stored> {
        if !self.has("weight_quantized") {
            return self.dense();
        }
        let dtype = self.files.checkpoint().get(&self.name("weight_quantized")).map(|meta| meta.dtype);
        let total = self.rows * self.cols;
        let codes = self.bytes("weight_quantized")?;
        let nibble = dtype == Some(Dtype::U8);
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
            Some(Dtype::F8E4M3) => float_values(4, 3, 7),
            Some(Dtype::F8E4M3Fnuz) => float_values(4, 3, 8),
            Some(Dtype::F8E5M2) => float_values(5, 2, 15),
            Some(Dtype::F8E5M2Fnuz) => float_values(5, 2, 16),
            _ => (0..=255u8).map(|code| f32::from(code as i8)).collect(),
        };
        let scales = self.files.checkpoint().read_f32(&self.name("weight_scale"))?;
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
        Ok(Stored { scales: Some(scales), zeros, ..self.stored(signed(codes, total), 8, 8, values) })
    }
}

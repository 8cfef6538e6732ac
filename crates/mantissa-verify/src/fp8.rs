//! Weights of DeepSeek's FP8 blocks, and bytes of FP8 codes.

use serde_json::Value;

use crate::elements::float_values;
use crate::reader::Reader;
use crate::scales::Scales;
use crate::tensors::Tensors;
use crate::weight::Weight;

impl<T: Tensors + ?Sized> Reader<'_, T> {
    /// True if the weight holds codes.
    pub(crate) fn has_codes(&self) -> bool {
        matches!(self.dtype("weight"), Some("U8" | "I8" | "F8_E4M3"))
    }

    /// Bytes of the codes; their number must match `bits` bits per element.
    pub(crate) fn codes(&self, bits: usize) -> Result<Vec<u8>, T::Error> {
        let bytes = self.bytes("weight")?;
        let enough = bytes.len() * 8 >= self.rows * self.cols * bits;
        if enough { Ok(bytes) } else { Err(self.short("weight")) }
    }

    /// One FP8 code per byte.
    pub(crate) fn fp8(&self, scales: Scales) -> Result<Weight, T::Error> {
        let stored = self.stored(self.codes(8)?, 8, 8, float_values(4, 3, 7));
        Ok(Weight { scales: Some(scales), ..stored })
    }

    /// Reads a weight of DeepSeek's format.
    pub(crate) fn fp8_blocks(&self) -> Result<Weight, T::Error> {
        if !self.has_codes() {
            return self.dense();
        }
        let quantization = self.tensors.config().and_then(|config| config.get("quantization_config"));
        if self.dtype("weight") != Some("F8_E4M3") {
            // DeepSeek-V4's experts: two FP4 codes a byte, a scale per 32 columns.
            let stored = self.stored(self.codes(4)?, 4, 8, float_values(2, 1, 1));
            return Ok(Weight { scales: Some(self.scales_of("weight_scale_inv", (1, 32))?), ..stored });
        }
        let sides = quantization.and_then(|q| q.get("weight_block_size")).and_then(Value::as_array);
        if let Some([rows, cols]) = sides.map(Vec::as_slice) {
            let side = |v: &Value| v.as_u64().unwrap_or(0) as usize;
            return self.fp8(self.scales_of("weight_scale_inv", (side(rows), side(cols)))?);
        }
        let single = self.count("weight_scale") == 1;
        self.fp8(self.scales_of("weight_scale", (if single { self.rows } else { 1 }, self.cols))?)
    }
}

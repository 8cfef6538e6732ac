//! Weights of bitsandbytes: LLM.int8() rows, and NF4 or FP4 with double quantization.

use serde_json::Value;

use crate::elements::signed_bytes;
use crate::reader::Reader;
use crate::scales::Scales;
use crate::tensors::Tensors;
use crate::weight::Weight;

impl<T: Tensors + ?Sized> Reader<'_, T> {
    /// Reads a weight of bitsandbytes, using the levels in the file.
    pub(crate) fn bitsandbytes(&self) -> Result<Weight, T::Error> {
        match self.dtype("weight") {
            Some("I8") => {
                let scales = self.scales_of("SCB", (1, self.cols))?.map(|amax| amax / 127.0);
                let values = signed_bytes();
                Ok(Weight { scales: Some(scales), ..self.stored(self.codes(8)?, 8, 8, values) })
            }
            Some("U8") => self.book_of_4_bits(),
            _ => self.dense(),
        }
    }

    fn book_of_4_bits(&self) -> Result<Weight, T::Error> {
        let state = self.state()?;
        let number = |key: &str| state.get(key).and_then(Value::as_u64).unwrap_or(0) as usize;
        let map = self.floats("weight.quant_map")?;
        let scales = match number("nested_blocksize") {
            0 => self.floats("weight.absmax")?,
            block => {
                let mean = state.get("nested_offset").and_then(Value::as_f64).unwrap_or(0.0) as f32;
                let (nested, amax) =
                    (self.floats("weight.nested_quant_map")?, self.floats("weight.nested_absmax")?);
                let codes = self.bytes("weight.absmax")?;
                if nested.len() != 256 || amax.len() < codes.len().div_ceil(block) {
                    return Err(self.short("weight.nested_absmax"));
                }
                let scale = |(i, code): (usize, u8)| nested[usize::from(code)] * amax[i / block] + mean;
                codes.into_iter().enumerate().map(scale).collect()
            }
        };
        let block = number("blocksize");
        if map.len() != 16 || scales.len() < (self.rows * self.cols).div_ceil(block.max(1)) {
            return Err(self.short("weight.absmax"));
        }
        let flat = Some((block, self.cols));
        let scales = Scales { down: 1, across: scales.len(), values: scales, side: (1, 1), flat };
        let stored = self.stored(self.codes(4)?, 4, 4, map);
        Ok(Weight { high_first: true, scales: Some(scales), ..stored })
    }

    /// JSON of a 4-bit weight.
    fn state(&self) -> Result<Value, T::Error> {
        let names = ["nf4", "fp4"].map(|name| format!("weight.quant_state.bitsandbytes__{name}"));
        let name = names.iter().find(|name| self.has(name)).unwrap_or(&names[0]);
        let bytes = self.bytes(name)?;
        serde_json::from_slice(&bytes).map_err(|error| self.wrong(name, "a JSON object", &error.to_string()))
    }
}

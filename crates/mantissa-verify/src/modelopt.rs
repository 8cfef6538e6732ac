//! Weights of ModelOpt: FP8, NVFP4, MXFP8 and pairs of int4 rows.

use crate::elements::float_values;
use crate::reader::Reader;
use crate::tensors::Tensors;
use crate::weight::Weight;

/// Elements of a block of NVFP4.
pub(crate) const NVFP4_BLOCK: usize = 16;

impl<T: Tensors + ?Sized> Reader<'_, T> {
    /// Reads a weight of ModelOpt; its tensors determine the algorithm.
    pub(crate) fn modelopt(&self) -> Result<Weight, T::Error> {
        if !self.has_codes() {
            return self.dense();
        }
        let count = self.count("weight_scale");
        let whole = (self.rows, self.cols);
        if self.has("weight_scale_2") {
            let global = self.scalar("weight_scale_2")?;
            let scales = self.scales_of("weight_scale", (1, NVFP4_BLOCK))?.map(|scale| scale * global);
            let stored = self.stored(self.codes(4)?, 4, 8, float_values(2, 1, 1));
            return Ok(Weight { scales: Some(scales), ..stored });
        }
        if self.dtype("weight") == Some("F8_E4M3") {
            let side = match self.dtype("weight_scale") {
                Some("U8" | "F8_E8M0") => (1, 32),
                _ if count == 1 => whole,
                _ => (1, self.cols),
            };
            return self.fp8(self.scales_of("weight_scale", side)?);
        }
        // Rows 2r and 2r + 1 share the bytes of line r, the first in the low nibble.
        let bytes = self.codes(4)?;
        let code = |row: usize, col: usize| bytes[row / 2 * self.cols + col] >> (4 * (row % 2)) & 15;
        let nibbles = (0..self.rows).flat_map(|row| (0..self.cols).map(move |col| (row, col)));
        let codes = nibbles.map(|(row, col)| code(row, col)).collect();
        let values = (0..16i8).map(|code| f32::from(if code < 8 { code } else { code - 16 })).collect();
        let group = self.cols * self.rows / count.max(1);
        let scales = self.scales_of("weight_scale", (1, group))?;
        Ok(Weight { scales: Some(scales), ..self.stored(codes, 8, 8, values) })
    }
}

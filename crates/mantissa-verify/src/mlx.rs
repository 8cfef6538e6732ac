//! Weights of MLX: affine codes and microscaling formats.

use crate::elements::float_values;
use crate::modelopt::NVFP4_BLOCK;
use crate::reader::Reader;
use crate::tensors::Tensors;
use crate::weight::Weight;

impl<T: Tensors + ?Sized> Reader<'_, T> {
    /// Reads a weight of MLX; its tensors determine the mode.
    pub(crate) fn mlx(&self) -> Result<Weight, T::Error> {
        if self.dtype("weight") != Some("U32") {
            return self.dense();
        }
        let bytes = self.bytes("weight")?;
        let bits = bytes.len() * 8 / (self.rows * self.cols).max(1);
        let group = |suffix: &str| {
            let count = self.count(suffix);
            (1, self.rows * self.cols / count.max(1))
        };
        let side = group("scales");
        let values = match (self.has("biases"), bits) {
            (true, 1..=8) => (0..1u16 << bits).map(f32::from).collect(),
            (false, 4) => float_values(2, 1, 1),
            (false, 8) => float_values(4, 3, 7),
            _ => return Err(self.short("weight")),
        };
        let mut scales = self.scales_of("scales", side)?;
        if !self.has("biases") && side.1 == NVFP4_BLOCK {
            let table = float_values(4, 3, 7);
            scales.values = self.bytes("scales")?.into_iter().map(|code| table[usize::from(code)]).collect();
        }
        let biases = if self.has("biases") { self.scales_of("biases", side)?.values } else { Vec::new() };
        Ok(Weight { scales: Some(scales), biases, ..self.stored(bytes, bits, 32, values) })
    }
}

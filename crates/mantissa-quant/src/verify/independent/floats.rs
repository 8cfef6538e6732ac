//! ModelOpt's, bitsandbytes' and DeepSeek's weights.

use mantissa_store::{Dtype, Error};
use serde_json::Value;

use super::{Reader, Result, Scales, Stored, float_values, power_of_two};

/// Elements of a block of NVFP4.
const NVFP4_BLOCK: usize = 16;

impl Reader<'_> {
    fn dtype(&self, suffix: &str) -> Option<Dtype> {
        self.files.checkpoint().get(&self.name(suffix)).map(|meta| meta.dtype)
    }

    /// Whether the weight holds codes.
    fn has_codes(&self) -> bool {
        matches!(self.dtype("weight"), Some(Dtype::U8 | Dtype::I8 | Dtype::F8E4M3))
    }

    /// Scales whose blocks have `side` rows and columns, whatever axes the list has.
    fn scales_of(&self, suffix: &str, side: (usize, usize)) -> Result<Scales> {
        let bytes = || self.bytes(suffix);
        let values: Vec<f32> = match self.dtype(suffix) {
            Some(Dtype::U8 | Dtype::F8E8M0) => bytes()?.into_iter().map(power_of_two).collect(),
            Some(Dtype::F8E4M3) => {
                let values = float_values(4, 3, 7);
                bytes()?.into_iter().map(|code| values[usize::from(code)]).collect()
            }
            _ => self.files.checkpoint().read_f32(&self.name(suffix))?,
        };
        let count = |n: usize, side: usize| n.div_ceil(side.max(1));
        let (down, across) = (count(self.rows, side.0), count(self.cols, side.1));
        match values.len() == down * across && !values.is_empty() {
            true => Ok(Scales { values, down, across, side, flat: None }),
            false => Err(self.short(suffix)),
        }
    }

    /// The bytes of the codes, of which there must be `bits` bits to an element.
    fn codes(&self, bits: usize) -> Result<Vec<u8>> {
        let bytes = self.bytes("weight")?;
        let enough = bytes.len() * 8 >= self.rows * self.cols * bits;
        if enough { Ok(bytes) } else { Err(self.short("weight")) }
    }

    /// One FP8 code to the byte.
    fn fp8(&self, scales: Scales) -> Result<Stored> {
        let stored = self.stored(self.codes(8)?, 8, 8, float_values(4, 3, 7));
        Ok(Stored { scales: Some(scales), ..stored })
    }

    /// A weight of ModelOpt; which algorithm, its tensors show.
    pub(super) fn modelopt(&self) -> Result<Stored> {
        if !self.has_codes() {
            return self.dense();
        }
        let count = self.files.checkpoint().get(&self.name("weight_scale")).map_or(0, |m| m.numel() as usize);
        let whole = (self.rows, self.cols);
        if self.has("weight_scale_2") {
            let global = self.scalar("weight_scale_2")?;
            let scales = self.scales_of("weight_scale", (1, NVFP4_BLOCK))?.map(|scale| scale * global);
            let stored = self.stored(self.codes(4)?, 4, 8, float_values(2, 1, 1));
            return Ok(Stored { scales: Some(scales), ..stored });
        }
        if self.dtype("weight") == Some(Dtype::F8E4M3) {
            let side = match self.dtype("weight_scale") {
                Some(Dtype::U8 | Dtype::F8E8M0) => (1, 32),
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
        Ok(Stored { scales: Some(scales), ..self.stored(codes, 8, 8, values) })
    }

    /// A weight of DeepSeek's convention.
    pub(super) fn fp8_blocks(&self) -> Result<Stored> {
        if !self.has_codes() {
            return self.dense();
        }
        let quantization = self.files.config().and_then(|config| config.get("quantization_config"));
        let sides = quantization.and_then(|q| q.get("weight_block_size")).and_then(Value::as_array);
        if let Some([rows, cols]) = sides.map(Vec::as_slice) {
            let side = |v: &Value| v.as_u64().unwrap_or(0) as usize;
            return self.fp8(self.scales_of("weight_scale_inv", (side(rows), side(cols)))?);
        }
        let single = self.files.checkpoint().get(&self.name("weight_scale")).is_some_and(|m| m.numel() == 1);
        self.fp8(self.scales_of("weight_scale", (if single { self.rows } else { 1 }, self.cols))?)
    }

    /// A weight of bitsandbytes, by the levels that the file holds.
    pub(super) fn bitsandbytes(&self) -> Result<Stored> {
        match self.dtype("weight") {
            Some(Dtype::I8) => {
                let scales = self.scales_of("SCB", (1, self.cols))?.map(|amax| amax / 127.0);
                let values = (0..=255u8).map(|code| f32::from(code as i8)).collect();
                Ok(Stored { scales: Some(scales), ..self.stored(self.codes(8)?, 8, 8, values) })
            }
            Some(Dtype::U8) => self.book_of_4_bits(),
            _ => self.dense(),
        }
    }

    fn book_of_4_bits(&self) -> Result<Stored> {
        let state = self.state()?;
        let number = |key: &str| state.get(key).and_then(Value::as_u64).unwrap_or(0) as usize;
        let levels = |suffix: &str| self.files.checkpoint().read_f32(&self.name(suffix));
        let map = levels("weight.quant_map")?;
        let scales = match number("nested_blocksize") {
            0 => levels("weight.absmax")?,
            block => {
                let mean = state.get("nested_offset").and_then(Value::as_f64).unwrap_or(0.0) as f32;
                let (nested, amax) = (levels("weight.nested_quant_map")?, levels("weight.nested_absmax")?);
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
        Ok(Stored { high_first: true, scales: Some(scales), ..stored })
    }

    /// The JSON beside a weight of 4 bits.
    fn state(&self) -> Result<Value> {
        let names = ["nf4", "fp4"].map(|name| format!("weight.quant_state.bitsandbytes__{name}"));
        let name = names.iter().find(|name| self.has(name)).unwrap_or(&names[0]);
        let bytes = self.bytes(name)?;
        serde_json::from_slice(&bytes)
            .map_err(|e| Error::field(self.files.dir(), self.name(name), e.to_string(), "a JSON object", ""))
    }

    /// A weight of MLX. Which mode, its tensors show.
    pub(super) fn mlx(&self) -> Result<Stored> {
        if self.dtype("weight") != Some(Dtype::U32) {
            return self.dense();
        }
        let bytes = self.bytes("weight")?;
        let bits = bytes.len() * 8 / (self.rows * self.cols).max(1);
        let group = |suffix: &str| {
            let count = self.files.checkpoint().get(&self.name(suffix)).map_or(0, |m| m.numel() as usize);
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
        Ok(Stored { scales: Some(scales), biases, ..self.stored(bytes, bits, 32, values) })
    }

    /// The group of each column, where compressed-tensors has them in another order than their own.
    pub(super) fn column_groups(&self) -> Result<Vec<usize>> {
        if !self.has("weight_g_idx") {
            return Ok(Vec::new());
        }
        let bytes = self.bytes("weight_g_idx")?;
        let groups: Vec<i32> = bytes.as_chunks::<4>().0.iter().map(|b| i32::from_le_bytes(*b)).collect();
        match groups.len() == self.cols {
            _ if groups.contains(&-1) => Ok(Vec::new()),
            true => Ok(groups.into_iter().map(|group| group as usize).collect()),
            false => Err(self.short("weight_g_idx")),
        }
    }

    /// Codes of lines of `n`, of which only whole ones stand in a word, one to the byte.
    pub(super) fn padded_words(&self, bytes: &[u8], bits: usize, n: usize) -> Vec<u8> {
        let per_word = 32 / bits;
        let line = n.div_ceil(per_word);
        let word = |i: usize| bytes[4 * i..4 * i + 4].iter().rev().fold(0u32, |w, &b| w << 8 | u32::from(b));
        let lines = bytes.len() / 4 / line.max(1);
        let places = (0..lines).flat_map(|l| (0..n).map(move |i| (l, i)));
        let code = |(l, i): (usize, usize)| word(l * line + i / per_word) >> (i % per_word * bits);
        places.map(|place| (code(place) & ((1 << bits) - 1)) as u8).collect()
    }
}

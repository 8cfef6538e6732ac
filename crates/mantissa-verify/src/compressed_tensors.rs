//! Weights of compressed-tensors: packed integers, FP4, FP6, and one code per byte.

use serde_json::Value;

use crate::elements::{field, float_values, int_values, signed_bytes};
use crate::reader::Reader;
use crate::scales::Scales;
use crate::tensors::Tensors;
use crate::weight::Weight;

impl<T: Tensors + ?Sized> Reader<'_, T> {
    /// Kind of weight, from the names of its tensors.
    pub(crate) fn compressed_tensors(&self) -> Result<Weight, T::Error> {
        if self.has("weight_global_scale") {
            self.packed_floats(Some(self.scalar("weight_global_scale")?))
        } else if self.has("weight_packed") && !self.has("weight_shape") {
            self.packed_floats(None)
        } else if self.has("weight_packed") {
            self.pack_quantized()
        } else if self.has("weight_scale") {
            self.one_byte_codes()
        } else {
            self.dense()
        }
    }

    /// The `weights` arguments of the compressed-tensors group with this module, else of the first group.
    pub(crate) fn group_weights(&self) -> Option<&Value> {
        let groups = self.tensors.config()?.get("quantization_config")?.get("config_groups")?.as_object()?;
        let quoted = format!("\"{}\"", self.module);
        let names = |group: &&Value| group.get("targets").is_some_and(|t| t.to_string().contains(&quoted));
        groups.values().find(names).or_else(|| groups.values().next())?.get("weights")
    }

    /// FP4 (E2M1), or FP6 (E2M3) where the config says so: codes from the low bit on.
    fn packed_floats(&self, global: Option<f32>) -> Result<Weight, T::Error> {
        let packed = self.bytes("weight_packed")?;
        let scales = self.scales("weight_scale")?;
        let six = self.group_weights().and_then(|args| args.get("num_bits")?.as_u64()) == Some(6);
        let (bits, values) = if six { (6, float_values(2, 3, 1)) } else { (4, float_values(2, 1, 1)) };
        let stride = (self.cols * bits).div_ceil(8);
        if packed.len() < self.rows * stride {
            return Err(self.short("weight_packed"));
        }
        let scales = scales.map(|scale| global.map_or(scale, |g| scale / g));
        Ok(Weight { scales: Some(scales), ..self.stored(packed, bits, 8, values) })
    }

    fn one_byte_codes(&self) -> Result<Weight, T::Error> {
        let integer = self.dtype("weight") == Some("I8");
        let codes = self.bytes("weight")?;
        let scales = self.scales("weight_scale")?;
        if codes.len() < self.rows * self.cols {
            return Err(self.short("weight"));
        }
        let zeros = if self.has("weight_zero_point") { self.bytes("weight_zero_point")? } else { Vec::new() };
        let values = if integer { signed_bytes() } else { float_values(4, 3, 7) };
        let zeros = zeros.iter().map(|&z| f32::from(z as i8)).collect();
        Ok(Weight { scales: Some(scales), zeros, ..self.stored(codes, 8, 8, values) })
    }

    fn pack_quantized(&self) -> Result<Weight, T::Error> {
        let packed = self.bytes("weight_packed")?;
        let scales = self.scales("weight_scale")?;
        let words = packed.len() / 4 / self.rows.max(1);
        let bits = self.group_weights().and_then(|w| w.get("num_bits")).and_then(Value::as_u64).unwrap_or(8)
            as usize;
        if !(1..=8).contains(&bits) || words * 32 < self.cols * bits {
            return Err(self.short("weight_packed"));
        }
        let zeros = self.packed_zeros(bits, &scales)?.unwrap_or_default();
        let groups = self.column_groups()?;
        let stored = match words == (self.cols * bits).div_ceil(32) {
            true => Weight { row_bits: words * 32, ..self.stored(packed, bits, 32, int_values(bits)) },
            false => {
                let codes = self.padded_words(&packed, bits, self.cols);
                self.stored(codes, 8, 8, int_values(bits))
            }
        };
        Ok(Weight { scales: Some(scales), zeros, groups, ..stored })
    }

    /// Zero points of `pack-quantized`: word `w` of line `l` holds rows from `32 w / bits` of group column `l`.
    fn packed_zeros(&self, bits: usize, scales: &Scales) -> Result<Option<Vec<f32>>, T::Error> {
        if !self.has("weight_zero_point") {
            return Ok(None);
        }
        let bytes = self.bytes("weight_zero_point")?;
        let per_line = bytes.len() / 4 / scales.across.max(1);
        let (dense, offset) = ((scales.down * bits).div_ceil(32), f32::from(1u8 << (bits - 1)));
        if bytes.len() < dense * scales.across * 4 {
            return Err(self.short("weight_zero_point"));
        }
        let line = |line: usize| -> Vec<f32> {
            let words = (0..per_line).map(|w| 4 * (w * scales.across + line));
            let bytes: Vec<u8> = words.flat_map(|at| bytes[at..at + 4].iter().copied()).collect();
            let codes: Vec<u8> = match per_line == dense {
                true => (0..scales.down).map(|row| field(&bytes, row * bits, bits)).collect(),
                false => self.padded_words(&bytes, bits, scales.down),
            };
            codes.into_iter().map(|code| f32::from(code) - offset).collect()
        };
        let lines: Vec<Vec<f32>> = (0..scales.across).map(line).collect();
        Ok(Some((0..scales.down).flat_map(|row| lines.iter().map(move |line| line[row])).collect()))
    }

    /// Group of each column, if compressed-tensors reorders the columns.
    fn column_groups(&self) -> Result<Vec<usize>, T::Error> {
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

    /// Codes of lines of `n`, one per byte; a word holds only whole codes.
    fn padded_words(&self, bytes: &[u8], bits: usize, n: usize) -> Vec<u8> {
        let per_word = 32 / bits;
        let line = n.div_ceil(per_word);
        let word = |i: usize| bytes[4 * i..4 * i + 4].iter().rev().fold(0u32, |w, &b| w << 8 | u32::from(b));
        let lines = bytes.len() / 4 / line.max(1);
        let places = (0..lines).flat_map(|l| (0..n).map(move |i| (l, i)));
        let code = |(l, i): (usize, usize)| word(l * line + i / per_word) >> (i % per_word * bits);
        places.map(|place| (code(place) & ((1 << bits) - 1)) as u8).collect()
    }
}

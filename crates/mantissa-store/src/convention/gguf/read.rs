//! Tensors of a GGUF model in Hugging Face order.

use mantissa_num::{CodecId, Codes, Format, Quantized, Rule, Scheme, minifloat};

use super::{Model, to_hf_order};
use crate::convention::{ModelFiles, Weight};
use crate::error::{Error, Result};
use crate::gguf::{GgufTensor, Storage};
use crate::{Dtype, TensorMeta};

impl Model {
    /// A tensor of any type as f32.
    pub(in crate::convention) fn tensor_f32(
        &self,
        files: &ModelFiles,
        name: &str,
        shape: &[usize],
    ) -> Result<Vec<f32>> {
        let tensor = self.expect(files, name, shape)?;
        let values = match tensor.ty.storage {
            Storage::Plain(_) => files.checkpoint.read_f32(&tensor.name)?,
            _ => self.blocks(files, tensor, shape)?.dequantize().map_err(|e| {
                files.fault(&tensor.name, e.to_string(), "whole blocks", "the file is corrupt")
            })?,
        };
        let row = shape.iter().skip(1).product();
        Ok(match self.order.heads(name) {
            Some(heads) => to_hf_order(&values, row, heads),
            None => values,
        })
    }

    /// The weight of linear layer `module` as it is stored, `[rows, cols]`.
    pub(in crate::convention) fn weight(
        &self,
        files: &ModelFiles,
        module: &str,
        rows: usize,
        cols: usize,
    ) -> Result<Weight> {
        let name = format!("{module}.weight");
        let tensor = self.expect(files, &name, &[rows, cols])?;
        let heads = self.order.heads(&name);
        let words = || -> Result<Vec<u16>> {
            let bytes = files.checkpoint.read(&tensor.name)?;
            let words: Vec<u16> = bytes.as_chunks().0.iter().map(|b| u16::from_le_bytes(*b)).collect();
            Ok(match heads {
                Some(heads) => to_hf_order(&words, cols, heads),
                None => words,
            })
        };
        match tensor.ty.storage {
            Storage::Plain(Dtype::BF16) => words().map(Weight::Bf16),
            Storage::Plain(Dtype::F16) => words().map(Weight::F16),
            Storage::Plain(_) => self.tensor_f32(files, &name, &[rows, cols]).map(Weight::F32),
            _ => {
                let mut q = self.blocks(files, tensor, &[rows, cols])?;
                if let (Some(heads), Codes::Packed(bytes)) = (heads, &q.codes) {
                    let row = bytes.len() / rows.max(1);
                    q.codes = Codes::Packed(to_hf_order(bytes, row, heads));
                }
                self.scaled(files, tensor, q).map(Weight::Quantized)
            }
        }
    }

    /// The blocks of a tensor, in the order of the file.
    fn blocks(&self, files: &ModelFiles, tensor: &GgufTensor, shape: &[usize]) -> Result<Quantized> {
        let Storage::Blocks(codec) = tensor.ty.storage else {
            let allowed = "a type that is decoded here; convert it with llama.cpp";
            return Err(files.fault(&tensor.name, format!("type {}", tensor.ty.name), allowed, ""));
        };
        let cols = shape.last().copied().unwrap_or(1);
        let rows = shape.iter().rev().skip(1).product();
        let codes = Codes::Packed(files.checkpoint.read(&tensor.name)?);
        Ok(Quantized { codes, ..Quantized::empty(Format::Codec(codec), rows, cols) })
    }

    /// NVFP4 may have a factor for the whole tensor beside it; its blocks are then the two-level format.
    fn scaled(&self, files: &ModelFiles, tensor: &GgufTensor, q: Quantized) -> Result<Quantized> {
        let beside = tensor.name.strip_suffix(".weight").map(|module| format!("{module}.scale"));
        let Some(scale) = beside.and_then(|name| self.header.get(&name)) else { return Ok(q) };
        if q.format != Format::Codec(CodecId::Nvfp4) {
            return Err(files.fault(&scale.name, "a scale", "none beside this type", ""));
        }
        if scale.numel() != 1 {
            return Err(files.fault(&scale.name, format!("shape {:?}", scale.shape), "one value", ""));
        }
        let factor = files.checkpoint.read_f32(&scale.name)?[0];
        if !factor.is_finite() {
            return Err(files.fault(&scale.name, factor.to_string(), "a finite factor", ""));
        }
        Ok(two_level_nvfp4(&q, factor))
    }

    fn expect(&self, files: &ModelFiles, name: &str, shape: &[usize]) -> Result<&GgufTensor> {
        let found = self.tensor(name).ok_or_else(|| Error::NoTensor {
            path: files.dir().to_owned(),
            tensor: super::stored_name(name).unwrap_or_else(|| name.to_owned()),
        })?;
        let meta = TensorMeta { shape: found.shape.clone(), ..found.as_stored() };
        files.expect_shape(&meta, shape)?;
        Ok(found)
    }
}

/// Codes one by one and scale bytes, with a multiplier for the tensor. In blocks a scale's sign bit is ignored and 0x7f
/// stands for 0.
fn two_level_nvfp4(q: &Quantized, factor: f32) -> Quantized {
    const SCALES: usize = 4;
    const NIBBLES: usize = 8;
    let codec = CodecId::Nvfp4.codec();
    let format = Scheme::nvfp4(Rule::Torchao).format;
    let mut out = Quantized { outer: Some(factor), ..Quantized::empty(format, q.rows, q.cols) };
    let Codes::Packed(bytes) = &q.codes else { return out };
    for block in bytes.chunks_exact(codec.bytes) {
        let (scales, nibbles) = block.split_at(SCALES);
        for (scale, nibbles) in scales.iter().zip(nibbles.chunks_exact(NIBBLES)) {
            let scale = scale & 0x7f;
            out.scales.push(if u32::from(scale) == minifloat::E4M3.max_code() + 1 {
                0
            } else {
                scale.into()
            });
            nibbles.iter().for_each(|byte| out.codes.push((byte & 15).into()));
            nibbles.iter().for_each(|byte| out.codes.push((byte >> 4).into()));
        }
    }
    out
}

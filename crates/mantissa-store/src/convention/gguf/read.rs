//! Reads tensors of a GGUF model in Hugging Face order.

use mantissa_num::stored::{Map, Transforms};
use mantissa_num::{Blocks, CodecId, Codes, Format, Quantized, Scheme, Sense, minifloat};

use super::{Joined, Model, Stored};
use crate::convention::weight::StoredLinear;
use crate::convention::{ModelFiles, Weight};
use crate::error::{Error, Result};
use crate::gguf::{GgufTensor, Storage};
use crate::{Dtype, TensorMeta};

/// Tensor, or one expert's part of it.
#[derive(Clone, Copy)]
pub(super) struct Found<'a> {
    pub(super) tensor: &'a GgufTensor,
    /// Index of the part, and number of parts.
    pub(super) part: (usize, usize),
}

impl Found<'_> {
    /// Bytes of the part.
    fn read(&self, files: &ModelFiles) -> Result<Vec<u8>> {
        let (which, of) = self.part;
        if of == 1 {
            return files.checkpoint().read(&self.tensor.name);
        }
        let len = self.tensor.len / of as u64;
        let mut bytes = vec![0; usize::try_from(len).unwrap_or(usize::MAX)];
        files.checkpoint().read_range(&self.tensor.name, which as u64 * len, &mut bytes)?;
        Ok(bytes)
    }

    /// Reads the `count` numbers of the part, for plain types.
    fn read_f32(&self, files: &ModelFiles, count: usize) -> Result<Vec<f32>> {
        match self.part {
            (_, 1) => files.checkpoint().read_f32(&self.tensor.name),
            (which, _) => files.checkpoint().read_elements_f32(&self.tensor.name, which * count, count),
        }
    }
}

impl Model {
    /// Reads a tensor of any type as f32.
    pub(super) fn values_f32(&self, files: &ModelFiles, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        if let Some(joined) = self.joined(name) {
            let values = |part: &str| self.part(files, part, |found, shape| self.values(files, found, shape));
            return self.joined_values(files, &joined, shape, values);
        }
        let found = self.expect(files, name, shape)?;
        let mut values = self.values(files, found, shape)?;
        if let Some(factor) = self.factor(files, found)? {
            values.iter_mut().for_each(|value| *value *= factor);
        }
        let stored = self.stored_as(name);
        values.iter_mut().for_each(|value| *value = stored.to_hf(*value));
        let row = shape.iter().skip(1).product();
        Ok(match (self.order.of(name), self.order.columns(name)) {
            (Some(rows), _) => rows.to_hf(&values, row),
            (None, Some(columns)) => columns.columns_to_hf(&values, row),
            (None, None) => values,
        })
    }

    /// Checks that a tensor with this Hugging Face name and shape exists, whole or in parts. Reads only headers.
    ///
    /// # Errors
    /// As `tensor_f32`, as far as headers show.
    pub(super) fn check(&self, files: &ModelFiles, name: &str, shape: &[usize]) -> Result<()> {
        // If any part is found, all parts exist; how they combine depends on the architecture.
        if self.joined(name).is_some() { Ok(()) } else { self.expect(files, name, shape).map(|_| ()) }
    }

    /// Values of a tensor or of its part, in file order.
    fn values(&self, files: &ModelFiles, found: Found<'_>, shape: &[usize]) -> Result<Vec<f32>> {
        let tensor = found.tensor;
        Ok(match tensor.ty.storage {
            Storage::Plain(_) => found.read_f32(files, shape.iter().product())?,
            _ => self.blocks(files, found, shape)?.dequantize().map_err(|e| {
                files.fault(&tensor.name, e.to_string(), "whole blocks", "the file is corrupt")
            })?,
        })
    }

    /// Reads a whole tensor with this GGUF name using `read`.
    fn part<T>(
        &self,
        files: &ModelFiles,
        name: &str,
        read: impl Fn(Found<'_>, &[usize]) -> Result<Vec<T>>,
    ) -> Result<(Vec<usize>, Vec<T>)> {
        let missing = || Error::NoTensor { path: files.dir().to_owned(), tensor: name.to_owned() };
        let tensor = self.header.get(name).ok_or_else(missing)?;
        Ok((tensor.shape.clone(), read(Found { tensor, part: (0, 1) }, &tensor.shape)?))
    }

    /// Combines the parts returned by `read` to the tensor of `shape`.
    fn joined_values<T: Copy>(
        &self,
        files: &ModelFiles,
        joined: &Joined,
        shape: &[usize],
        read: impl Fn(&str) -> Result<(Vec<usize>, Vec<T>)>,
    ) -> Result<Vec<T>> {
        let parts = joined.names().iter().map(|part| read(part)).collect::<Result<Vec<_>>>()?;
        let borrowed: Vec<_> = parts.iter().map(|(shape, values)| (&shape[..], &values[..])).collect();
        let values = match *shape {
            [rows, cols] => joined.join(&borrowed, rows, cols),
            _ => None,
        };
        values.ok_or_else(|| {
            let shapes: Vec<_> = parts.iter().map(|(shape, _)| shape).collect();
            let allowed = format!("parts of a tensor {shape:?}");
            files.fault(&joined.names().join(", "), format!("shapes {shapes:?}"), allowed, "")
        })
    }

    /// Form in which the file has the values of the tensor with this Hugging Face name.
    pub(super) fn stored_as(&self, name: &str) -> Stored {
        self.architecture.map_or(Stored::Same, |architecture| architecture.stored_as(name))
    }

    /// Weight whose parts are whole rows of blocks of one type; `None` for other parts.
    fn rows_of_blocks(
        &self,
        files: &ModelFiles,
        joined: &Joined,
        rows: usize,
        cols: usize,
    ) -> Result<Option<Quantized>> {
        let parts: Vec<_> = joined.names().iter().filter_map(|name| self.header.get(name)).collect();
        let (Some(first), Some(orders)) = (parts.first(), joined.rows(rows)) else { return Ok(None) };
        let (Storage::Blocks(codec), Some(row)) = (first.ty.storage, first.ty.row_bytes(cols)) else {
            return Ok(None);
        };
        let beside = |tensor| self.beside(Found { tensor, part: (0, 1) }).is_some();
        if parts.iter().any(|&tensor| tensor.ty != first.ty || beside(tensor)) {
            return Ok(None);
        }
        let mut bytes = vec![0; rows * row];
        for (tensor, order) in parts.into_iter().zip(orders) {
            let meta = TensorMeta { shape: tensor.shape.clone(), ..tensor.as_stored() };
            files.expect_shape(&meta, &[order.len(), cols])?;
            let part = files.checkpoint().read(&tensor.name)?;
            for (row_of_part, at) in part.chunks_exact(row).zip(order) {
                bytes[at * row..][..row].copy_from_slice(row_of_part);
            }
        }
        let codes = Codes::Packed(bytes);
        Ok(Some(Quantized { codes, ..Quantized::empty(Format::Codec(codec), rows, cols) }))
    }

    /// Weight of a layer that GGUF stores in parts: 16-bit if all parts are, blocks if parts are rows of them, else widened.
    fn joined_weight(&self, files: &ModelFiles, joined: &Joined, rows: usize, cols: usize) -> Result<Weight> {
        if let Some(q) = self.rows_of_blocks(files, joined, rows, cols)? {
            return Ok(Weight::Quantized(q));
        }
        let all = |dtype| {
            let stored = joined.names().iter().filter_map(|part| self.header.get(part));
            stored.into_iter().all(|tensor| tensor.ty.storage == Storage::Plain(dtype))
        };
        let words = |part: &str| {
            let read = |found: Found<'_>, _: &[usize]| {
                let bytes = found.read(files)?;
                Ok(bytes.as_chunks().0.iter().map(|b| u16::from_le_bytes(*b)).collect())
            };
            self.part::<u16>(files, part, read)
        };
        if all(Dtype::BF16) {
            return self.joined_values(files, joined, &[rows, cols], words).map(Weight::Bf16);
        }
        if all(Dtype::F16) {
            return self.joined_values(files, joined, &[rows, cols], words).map(Weight::F16);
        }
        let values = |part: &str| self.part(files, part, |found, shape| self.values(files, found, shape));
        self.joined_values(files, joined, &[rows, cols], values).map(Weight::F32)
    }

    /// Linear layer `module`, `[rows, cols]`. If its columns are in another order, whole blocks are moved; blocks that hold
    /// columns of several heads stay, and the input is moved instead.
    pub(super) fn linear_parts(
        &self,
        files: &ModelFiles,
        module: &str,
        rows: usize,
        cols: usize,
    ) -> Result<StoredLinear> {
        let name = format!("{module}.weight");
        let weight = self.weight(files, module, rows, cols)?;
        let block = self.tensor(&name).map_or(1, |tensor| tensor.ty.block().0);
        let before = match self.order.columns(&name).filter(|columns| !columns.moves_whole(cols, block)) {
            Some(columns) => vec![Map::Perm(columns.places(cols))],
            None => Vec::new(),
        };
        Ok((weight, Transforms { before, ..Transforms::default() }).into())
    }

    /// Weight of linear layer `module` as stored, `[rows, cols]`. Columns that move are in their order, unless blocks hold
    /// columns of several heads.
    fn weight(&self, files: &ModelFiles, module: &str, rows: usize, cols: usize) -> Result<Weight> {
        let name = format!("{module}.weight");
        if let Some(joined) = self.joined(&name) {
            return self.joined_weight(files, &joined, rows, cols);
        }
        let found = self.expect(files, &name, &[rows, cols])?;
        let (moved, columns) = (self.order.of(&name), self.order.columns(&name));
        let words = || -> Result<Vec<u16>> {
            let bytes = found.read(files)?;
            let words: Vec<u16> = bytes.as_chunks().0.iter().map(|b| u16::from_le_bytes(*b)).collect();
            Ok(match (moved, columns) {
                (Some(rows), _) => rows.to_hf(&words, cols),
                (None, Some(columns)) => columns.columns_to_hf(&words, cols),
                (None, None) => words,
            })
        };
        match found.tensor.ty.storage {
            Storage::Plain(Dtype::BF16) if self.beside(found).is_none() => words().map(Weight::Bf16),
            Storage::Plain(Dtype::F16) if self.beside(found).is_none() => words().map(Weight::F16),
            Storage::Plain(_) => self.values_f32(files, &name, &[rows, cols]).map(Weight::F32),
            _ => {
                let mut q = self.blocks(files, found, &[rows, cols])?;
                if let (Some(moved), Codes::Packed(bytes)) = (moved, &q.codes) {
                    let row = bytes.len() / rows.max(1);
                    q.codes = Codes::Packed(moved.to_hf(bytes, row));
                }
                let (block, size) = found.tensor.ty.block();
                let whole = columns.filter(|columns| columns.moves_whole(cols, block));
                if let (Some(columns), Codes::Packed(bytes)) = (whole, &q.codes) {
                    let row = (bytes.len() / rows.max(1)).max(1);
                    let moved = bytes.chunks(row).flat_map(|row| columns.to_hf(row, size));
                    q.codes = Codes::Packed(moved.collect());
                }
                self.scaled(files, found, q)
            }
        }
    }

    /// Blocks of a tensor, in file order.
    fn blocks(&self, files: &ModelFiles, found: Found<'_>, shape: &[usize]) -> Result<Quantized> {
        let tensor = found.tensor;
        let Storage::Blocks(codec) = tensor.ty.storage else {
            let allowed = "a type that is decoded here; convert it with llama.cpp";
            return Err(files.fault(&tensor.name, format!("type {}", tensor.ty.name), allowed, ""));
        };
        let cols = shape.last().copied().unwrap_or(1);
        let rows = shape.iter().rev().skip(1).product();
        let codes = Codes::Packed(found.read(files)?);
        Ok(Quantized { codes, ..Quantized::empty(Format::Codec(codec), rows, cols) })
    }

    /// Block-quantized weight with its optional factor: with it NVFP4 has two levels, and ternary types (BitNet's
    /// TQ1_0 and TQ2_0) are read as the ternary format.
    fn scaled(&self, files: &ModelFiles, found: Found<'_>, q: Quantized) -> Result<Weight> {
        let Some(factor) = self.factor(files, found)? else { return Ok(Weight::Quantized(q)) };
        if q.format == Format::Codec(CodecId::Nvfp4) {
            return Ok(Weight::Quantized(two_level_nvfp4(&q, factor)));
        }
        let mut values = q.dequantize().map_err(|e| {
            files.fault(&found.tensor.name, e.to_string(), "whole blocks", "the file is corrupt")
        })?;
        if let Some(ternary) = ternary(&values, q.rows, q.cols, factor) {
            return Ok(Weight::Quantized(ternary));
        }
        values.iter_mut().for_each(|value| *value *= factor);
        Ok(Weight::F32(values))
    }

    /// Tensor of factors for a weight, one per matrix.
    pub(super) fn beside(&self, found: Found<'_>) -> Option<&GgufTensor> {
        let name = found.tensor.name.strip_suffix(".weight").map(|module| format!("{module}.scale"));
        let own = |name: &String| self.architecture.is_some_and(|found| found.is_own_scale(name));
        name.filter(|name| !own(name)).and_then(|name| self.header.get(&name))
    }

    /// Factor of a weight: optional for NVFP4 and for every type in BitNet.
    fn factor(&self, files: &ModelFiles, found: Found<'_>) -> Result<Option<f32>> {
        let (which, of) = found.part;
        let Some(scale) = self.beside(found) else { return Ok(None) };
        let two_level = found.tensor.ty.storage == Storage::Blocks(CodecId::Nvfp4);
        if !two_level && !self.architecture.is_some_and(|architecture| architecture.weight_factors) {
            return Err(files.fault(&scale.name, "a scale", "none beside this type", ""));
        }
        if scale.numel() != of as u64 {
            let allowed = format!("{of} values, one for each matrix");
            return Err(files.fault(&scale.name, format!("shape {:?}", scale.shape), allowed, ""));
        }
        let factor = files.checkpoint().read_f32(&scale.name)?[which];
        if !factor.is_finite() {
            return Err(files.fault(&scale.name, factor.to_string(), "a finite factor", ""));
        }
        Ok(Some(factor))
    }

    pub(super) fn expect(&self, files: &ModelFiles, name: &str, shape: &[usize]) -> Result<Found<'_>> {
        let place = self.place(name);
        let missing = || Error::NoTensor {
            path: files.dir().to_owned(),
            tensor: place.as_ref().map_or_else(|| name.to_owned(), |place| place.tensor.clone()),
        };
        let tensor = self.tensor(name).ok_or_else(missing)?;
        let meta = TensorMeta { shape: tensor.shape.clone(), ..tensor.as_stored() };
        let expert_place = place.as_ref().and_then(|place| Some((place.expert?, place.matrix())));
        let Some((expert, (matrix, halves))) = expert_place else {
            let stored = self
                .architecture
                .map_or_else(|| shape.to_vec(), |row| row.stored_shape(name, shape, self.groups));
            // ggml drops outer dimensions of 1; llama.cpp's converter adds one to a convolution `[channels, 1, taps]`.
            let inner = |shape: &[usize]| {
                let outer = shape.iter().take(shape.len().saturating_sub(1)).take_while(|&&n| n == 1).count();
                shape[outer..].to_vec()
            };
            let found = if stored.len() > 2 { inner(&tensor.shape) } else { tensor.shape.clone() };
            if found != stored && found != inner(&stored) {
                files.expect_shape(&meta, &stored)?;
            }
            return Ok(Found { tensor, part: (0, 1) });
        };
        let experts = tensor.shape.first().copied().unwrap_or(0);
        let mut stacked = [&[experts.max(expert + 1)][..], shape].concat();
        stacked[1] *= halves;
        files.expect_shape(&meta, &stacked)?;
        Ok(Found { tensor, part: (matrix, experts * halves) })
    }
}

/// Values that are all -1, 0 or 1, as codes with one factor; `None` for other values.
fn ternary(values: &[f32], rows: usize, cols: usize, factor: f32) -> Option<Quantized> {
    let trits = values.iter().all(|value| [-1.0, 0.0, 1.0].contains(value));
    trits.then(|| {
        let format = Scheme::ternary(Blocks::Tensor).format;
        let codes = Codes::U8(values.iter().map(|&value| value as i8 as u8).collect());
        Quantized {
            codes,
            scales: Codes::U32(vec![factor.to_bits()]).into(),
            ..Quantized::empty(format, rows, cols)
        }
    })
}

/// Unpacks codes and scale bytes, with a multiplier for the tensor. In blocks a scale's sign bit is ignored and 0x7f
/// means 0.
fn two_level_nvfp4(q: &Quantized, factor: f32) -> Quantized {
    const SCALES: usize = 4;
    const NIBBLES: usize = 8;
    let codec = CodecId::Nvfp4.codec();
    let format = Scheme::nvfp4(Some(Sense::Multiplier)).format;
    let mut out = Quantized::empty(format, q.rows, q.cols);
    out.set_outer(Some(factor));
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

//! Tensors of a module → codes, scales and the order of columns.

use mantissa_num::format::{Affine, Format, Offset};
use mantissa_num::pack::transpose;
use mantissa_num::stored::{Map, Transforms, by_group};
use mantissa_num::{Blocks, Code, Codes, Quantized, ScaleLevel, ScaleTree};

use super::config::{Config, Layer, Layout, ZeroVersion};
use super::version::{lines, transpose_words};
use crate::convention::scale_dtype::scale_code;
use crate::convention::sound::{self, Names};
use crate::convention::{ModelFiles, Weight};
use crate::{Dtype, Result};

impl Config {
    /// Weight of `module`, `[rows, cols]`, with its columns sorted by group if `g_idx` reorders them. The tensors
    /// determine if the layer is quantized.
    ///
    /// # Errors
    /// A tensor of the module is missing, or its dtype or shape differs from its settings.
    pub(super) fn weight(
        &self,
        files: &ModelFiles,
        module: &str,
        rows: usize,
        cols: usize,
    ) -> Result<(Weight, Transforms)> {
        let name = |suffix: &str| format!("{module}.{suffix}");
        let coded = ["qweight", "qzeros", "scales"].iter().any(|part| files.has(&name(part)));
        if files.has(&name("weight")) || !coded {
            return Ok((files.dense(module, rows, cols)?, Transforms::default()));
        }
        let layer = self.layer_of_codes(module);
        let (codes_name, zeros_name, scales_name) = (name("qweight"), name("qzeros"), name("scales"));
        let blocks = layer.blocks(cols);
        let groups = blocks.count(1, cols);
        let (code, scales) = read_scales(files, &scales_name, groups, rows)?;
        let mut codes = self.codes(files, &codes_name, layer, rows, cols)?;
        let zeros = self.zeros(files, &zeros_name, layer, groups, rows)?;
        let order = read_order(files, &name("g_idx"), blocks, cols)?;
        let mut transforms = Transforms::default();
        if let Some(order) = order {
            codes = codes
                .chunks_exact(cols.max(1))
                .flat_map(|row| order.iter().map(|&from| row[from as usize]))
                .collect();
            transforms.before.push(Map::Perm(order));
        }
        let q = group_int((layer.bits, blocks), (rows, cols), codes, (code, scales), zeros);
        sound::check(files, Names { codes: &codes_name, scales: &scales_name, zeros: &zeros_name }, &q)?;
        Ok((Weight::Quantized(q), transforms))
    }

    /// Codes `[rows, cols]`, signed.
    fn codes(
        &self,
        files: &ModelFiles,
        name: &str,
        layer: Layer,
        rows: usize,
        cols: usize,
    ) -> Result<Vec<u8>> {
        let words = self.words(files, name, layer, cols)?;
        let bytes = files.read_exact(name, &[Dtype::I32], &[words, rows])?;
        let fields = lines(self.layout, &transpose_words(&bytes, words, rows), layer.bits, words);
        let fields = fields.ok_or_else(|| self.unpackable(files, name, layer, cols))?;
        // The middle code means 0: adding half the range modulo the range flips the top bit.
        Ok(fields.into_iter().map(|field| centred(field, layer.bits) as u8).collect())
    }

    /// Zero points `[rows, groups]`, signed.
    fn zeros(
        &self,
        files: &ModelFiles,
        name: &str,
        layer: Layer,
        groups: usize,
        rows: usize,
    ) -> Result<Vec<i32>> {
        let words = self.words(files, name, layer, rows)?;
        let mut bytes = files.read_exact(name, &[Dtype::I32], &[groups, words])?;
        // Converters between versions add one to each field of a whole word, so a zero point of 0 borrows from its
        // neighbour and the inverse restores it. Fields that straddle words are converted one by one.
        let whole = self.version == ZeroVersion::V1 && 32u32.is_multiple_of(layer.bits);
        if whole {
            let ones = (0..32).step_by(layer.bits as usize).fold(0u32, |ones, shift| ones | 1 << shift);
            bytes.as_chunks_mut::<4>().0.iter_mut().for_each(|word| {
                *word = u32::from_le_bytes(*word).wrapping_add(ones).to_le_bytes();
            });
        }
        let fields = lines(self.layout, &bytes, layer.bits, words);
        let fields = fields.ok_or_else(|| self.unpackable(files, name, layer, rows))?;
        let step = u8::from(self.version == ZeroVersion::V1 && !whole);
        let zeros: Vec<i32> =
            fields.into_iter().map(|field| centred(field.wrapping_add(step), layer.bits)).collect();
        Ok(transpose(&zeros, groups, rows))
    }

    /// Words of a line of `n` codes; the codes must fill them.
    fn words(&self, files: &ModelFiles, name: &str, layer: Layer, n: usize) -> Result<usize> {
        let fits = match self.layout {
            Layout::Stream => (n * layer.bits as usize).is_multiple_of(32),
            Layout::Planar => n.is_multiple_of(32),
        };
        if fits { Ok(n * layer.bits as usize / 32) } else { Err(self.unpackable(files, name, layer, n)) }
    }

    fn unpackable(&self, files: &ModelFiles, name: &str, layer: Layer, n: usize) -> crate::Error {
        let found = format!("{n} codes of {} bits to a line", layer.bits);
        files.fault(
            name,
            found,
            "lines that fill 32-bit words",
            "config.json and the weights must belong together",
        )
    }
}

/// Converts a field to signed: minus `2^(bits-1)`.
pub(crate) fn centred(field: u8, bits: u32) -> i32 {
    let mask = ((1u16 << bits) - 1) as u8;
    i32::from(field & mask) - (1 << (bits - 1))
}

/// Integer codes in groups. Zero points that all equal the middle of the range are dropped.
pub(crate) fn group_int(
    (bits, blocks): (u32, Blocks),
    (rows, cols): (usize, usize),
    codes: Vec<u8>,
    (code, scales): (Code, Codes),
    zeros: Vec<i32>,
) -> Quantized {
    let symmetric = zeros.iter().all(|&z| z == 0);
    let offset = if symmetric { Offset::None } else { Offset::Zero };
    let scale = Some(ScaleTree::leaf(code));
    let format = Format::Affine(Affine { code: Code::Int(bits), blocks, scale, offset });
    let zeros = if symmetric { Vec::new() } else { zeros };
    Quantized {
        codes: Codes::U8(codes),
        scales: ScaleLevel::from(scales).with_zeros(zeros),
        ..Quantized::empty(format, rows, cols)
    }
}

/// Scales stored `[groups, rows]`, in the order of `[rows, groups]`.
pub(crate) fn read_scales(
    files: &ModelFiles,
    name: &str,
    groups: usize,
    rows: usize,
) -> Result<(Code, Codes)> {
    let bytes = files.read_exact(name, &[Dtype::F16, Dtype::BF16, Dtype::F32], &[groups, rows])?;
    let code = scale_code(files.meta(name)?.dtype).unwrap_or(Code::F32);
    let scales = match Codes::from_le_bytes(code.unit_bytes(), &bytes) {
        Codes::U16(scales) => Codes::U16(transpose(&scales, groups, rows)),
        Codes::U32(scales) => Codes::U32(transpose(&scales, groups, rows)),
        other => other,
    };
    Ok((code, scales))
}

/// Columns sorted by group, if `g_idx` exists and reorders them.
pub(crate) fn read_order(
    files: &ModelFiles,
    name: &str,
    blocks: Blocks,
    cols: usize,
) -> Result<Option<Vec<u32>>> {
    if !files.has(name) {
        return Ok(None);
    }
    let bytes = files.read_exact(name, &[Dtype::I32], &[cols])?;
    let (groups, size) = (blocks.count(1, cols), blocks.len(1, cols).max(1));
    let mut g_idx = Vec::with_capacity(cols);
    for (column, word) in bytes.as_chunks::<4>().0.iter().enumerate() {
        let group = i32::from_le_bytes(*word);
        let fits = u32::try_from(group).ok().filter(|&group| (group as usize) < groups);
        g_idx.push(fits.ok_or_else(|| {
            files.fault(name, format!("group {group} of column {column}"), format!("0 to {}", groups - 1), "")
        })?);
    }
    let order = by_group(&g_idx);
    let sorted = order.as_ref().map_or(&g_idx, |(_, sorted)| sorted);
    if let Some(at) = sorted.iter().enumerate().position(|(i, &group)| group as usize != i / size) {
        let found =
            format!("groups of other sizes than {size}, the first after {} columns", at / size * size);
        return Err(files.fault(name, found, format!("{size} columns to a group"), ""));
    }
    Ok(order.map(|(order, _)| order))
}

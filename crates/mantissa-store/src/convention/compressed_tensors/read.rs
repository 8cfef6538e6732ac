//! Tensors of a module → codes and scales.

use mantissa_num::format::{Affine, Format};
use mantissa_num::pack::{Packing, transpose};
use mantissa_num::stored::{Map, Transforms};
use mantissa_num::{Code, Codes, Quantized, ScaleLevel, Scheme};

use super::config::{Args, Config};
use super::transform;
use crate::convention::gptq::read_order;
use crate::convention::sound::{self, Names};
use crate::convention::weight::StoredLinear;
use crate::convention::{ActivationQuant, KvQuant, ModelFiles, Weight};
use crate::{Dtype, Error, Result};

impl Config {
    /// Weight of `module`, the quantization of its input, and the order of its columns. The tensors determine if the
    /// layer is quantized.
    ///
    /// # Errors
    /// A tensor of the module is missing, or its dtype or shape differs from its group's config.
    pub(super) fn layer(
        &self,
        files: &ModelFiles,
        module: &str,
        rows: usize,
        cols: usize,
    ) -> Result<StoredLinear> {
        let mut transforms = Transforms::default();
        let coded = self.has_codes(files, module);
        let group = match coded {
            true => Some(self.group_of_codes(module).ok_or_else(|| self.untargeted(files, module))?),
            false => self.group(module).filter(|group| group.weights.is_none()),
        };
        let input = group.and_then(|group| group.input.as_ref());
        let input = input.map(|args| self.input(files, module, args)).transpose()?;
        let weight = match group.and_then(|group| group.weights.as_ref()) {
            None => files.dense(module, rows, cols)?,
            Some(args) => {
                let (q, order) = self.weight(files, module, args, rows, cols)?;
                transforms.before.extend(order.map(Map::Perm));
                Weight::Quantized(q)
            }
        };
        transform::apply(&self.rotations, files, module, (rows, cols), &mut transforms)?;
        Ok(StoredLinear { weight, input, transforms })
    }

    /// True if `module` has codes: packed, or a weight that is no float, or one whose scales belong to a group.
    fn has_codes(&self, files: &ModelFiles, module: &str) -> bool {
        let has = |suffix: &str| files.has(&format!("{module}.{suffix}"));
        let codes = has("weight") && !files.is_dense(&format!("{module}.weight"));
        let scaled = || self.group(module).is_some_and(|group| group.weights.is_some());
        has("weight_packed") || codes || (has("weight_scale") && scaled())
    }

    fn untargeted(&self, files: &ModelFiles, module: &str) -> Error {
        let found = format!("codes that no group of {} targets", self.path.display());
        let hint = "fix: add its name to the targets of its group in config_groups";
        files.fault(module, found, "a group with weights", hint)
    }

    /// Scales of the KV cache of the attention `module`: one, or one per head of `kv_heads`.
    ///
    /// # Errors
    /// A scale is present with another dtype or shape, or is not finite.
    pub(super) fn cache(&self, files: &ModelFiles, module: &str, kv_heads: usize) -> Result<Option<KvQuant>> {
        let Some(scheme) = self.kv_scheme() else { return Ok(None) };
        let scale = |suffix: &str| files.read_cache_scale(&format!("{module}.{suffix}"), kv_heads);
        Ok(Some(KvQuant { scheme, k_scale: scale("k_scale")?, v_scale: scale("v_scale")? }))
    }

    fn weight(
        &self,
        files: &ModelFiles,
        module: &str,
        args: &Args,
        rows: usize,
        cols: usize,
    ) -> Result<(Quantized, Option<Vec<u32>>)> {
        let scale_name = format!("{module}.weight_scale");
        // The layout of blocks does not depend on the scale's dtype, which only the tensor has.
        let grid = args.weight_scheme(&self.path, Code::F32)?.format.blocks().grid(rows, cols);
        let (scale_code, scales) = files.read_scales(&scale_name, &grid)?;
        let scheme = args.weight_scheme(&self.path, scale_code)?;
        let outer = if scheme.has_outer_scale() {
            Some(files.read_scalar(&format!("{module}.weight_global_scale"))?)
        } else {
            None
        };
        let (codes_name, mut codes) = read_codes(files, module, &scheme, rows, cols)?;
        let order = self.order(files, module, args, &scheme, cols)?;
        if let Some(order) = &order {
            codes = codes
                .chunks_exact(cols.max(1))
                .flat_map(|row| order.iter().map(|&from| row[from as usize]))
                .collect();
        }
        let zero_name = format!("{module}.weight_zero_point");
        let zeros = match scheme.format.has_zero() {
            true => read_zeros(files, &zero_name, &scheme, rows, cols)?,
            false => {
                refuse_zeros(files, &zero_name, &scheme, rows, cols)?;
                Vec::new()
            }
        };
        let empty = Quantized::empty(scheme.format, rows, cols);
        let q = Quantized {
            codes: Codes::U8(codes),
            scales: ScaleLevel::from(scales).with_zeros(zeros).with_outer(outer),
            ..empty
        };
        sound::check(files, Names { codes: &codes_name, scales: &scale_name, zeros: &zero_name }, &q)?;
        Ok((q, order))
    }

    /// Columns sorted by group, if `weight_g_idx` has another order. A list that contains −1 was never filled and
    /// counts as absent, as in the package itself.
    fn order(
        &self,
        files: &ModelFiles,
        module: &str,
        args: &Args,
        scheme: &Scheme,
        cols: usize,
    ) -> Result<Option<Vec<u32>>> {
        let name = format!("{module}.weight_g_idx");
        if !files.has(&name) {
            return Ok(None);
        }
        let bytes = files.read_exact(&name, &[Dtype::I32], &[cols])?;
        if bytes.as_chunks::<4>().0.iter().any(|b| i32::from_le_bytes(*b) == -1) {
            return Ok(None);
        }
        let order = read_order(files, &name, scheme.format.blocks(), cols)?;
        if order.is_some() && !args.ordered_by_group() {
            let path = self.path.display();
            let hint = "other readers ignore the order without it, and would see another weight";
            let allowed = format!("\"actorder\": \"group\" in {path}, or columns in their own order");
            return Err(files.fault(&name, "groups in another order", allowed, hint));
        }
        Ok(order)
    }

    fn input(&self, files: &ModelFiles, module: &str, args: &Args) -> Result<ActivationQuant> {
        let scheme = args.input_scheme(&self.path)?;
        let outer = if scheme.has_outer_scale() {
            Some(files.read_scalar(&format!("{module}.input_global_scale"))?)
        } else if scheme.source == mantissa_num::Source::Static {
            Some(files.read_scalar(&format!("{module}.input_scale"))?)
        } else {
            None
        };
        let fixed = outer.is_some() && scheme.format.has_zero();
        let zero = format!("{module}.input_zero_point");
        let zero = if fixed { files.read_zero_point(&zero)? } else { 0 };
        Ok(ActivationQuant { zero, ..ActivationQuant::new(scheme, outer) })
    }
}

fn element(scheme: &Scheme) -> Code {
    match &scheme.format {
        Format::Affine(Affine { code, .. }) => *code,
        _ => Code::Int(8),
    }
}

/// Codes, one per byte, from `weight_packed` or `weight`, and the name of that tensor.
fn read_codes(
    files: &ModelFiles,
    module: &str,
    scheme: &Scheme,
    rows: usize,
    cols: usize,
) -> Result<(String, Vec<u8>)> {
    let packed = format!("{module}.weight_packed");
    let element = element(scheme);
    if !files.has(&packed) {
        let dtype = if matches!(element, Code::Int(_)) { Dtype::I8 } else { Dtype::F8E4M3 };
        let name = format!("{module}.weight");
        let codes = files.read_exact(&name, &[dtype], &[rows, cols])?;
        refuse_wide(files, &name, element, &codes)?;
        return Ok((name, codes));
    }
    let Code::Int(bits) = element else {
        let packing = Packing::rows(element.bits());
        let bytes = files.read_exact(&packed, &[Dtype::U8], &[rows, packing.line_bytes(cols)])?;
        let codes = unpack(files, &packed, packing, &bytes, rows, cols, false)?;
        return Ok((packed, codes));
    };
    if files.has(&format!("{module}.weight_shape")) {
        let shape = files.read_exact(&format!("{module}.weight_shape"), &[Dtype::I64, Dtype::I32], &[2])?;
        check_shape(files, module, &shape, rows, cols)?;
    }
    let packing = Packing::compressed_tensors_int(bits);
    let words = packing.line_bytes(cols) / 4;
    let found = files.meta(&packed)?.shape.get(1).copied();
    if found == Some(padded_words(bits, cols)) && found != Some(words) {
        let bytes = files.read_exact(&packed, &[Dtype::I32], &[rows, padded_words(bits, cols)])?;
        return Ok((packed, unpack_padded(packing, &bytes, cols)));
    }
    let bytes = files.read_exact(&packed, &[Dtype::I32], &[rows, words])?;
    let codes = unpack(files, &packed, packing, &bytes, rows, cols, true)?;
    Ok((packed, codes))
}

/// Words per line of `n` codes before compressed-tensors 0.15: whole codes per word, remaining bits unused. For 2, 4
/// and 8 bits this equals the dense layout.
fn padded_words(bits: u32, n: usize) -> usize {
    n.div_ceil((32 / bits) as usize)
}

/// Lines of `n` codes each from words that hold whole codes.
fn unpack_padded(packing: Packing, bytes: &[u8], n: usize) -> Vec<u8> {
    let (per_word, line) = ((32 / packing.bits) as usize, 4 * padded_words(packing.bits, n));
    let mut codes = Vec::with_capacity(bytes.len() / line.max(1) * n);
    for line in bytes.chunks_exact(line.max(1)) {
        let words = line.len() / 4;
        // Each word is a line of the dense packing.
        codes.extend(packing.unpack(line, words, per_word, true).unwrap_or_default().into_iter().take(n));
    }
    codes
}

/// Refuses int8 codes outside the configured bits, which other readers would truncate when they pack them.
fn refuse_wide(files: &ModelFiles, name: &str, element: Code, codes: &[u8]) -> Result<()> {
    let Code::Int(bits @ ..8) = element else { return Ok(()) };
    let allowed = -(1i8 << (bits - 1))..1i8 << (bits - 1);
    let Some(at) = codes.iter().position(|&code| !allowed.contains(&(code as i8))) else { return Ok(()) };
    let range = format!("{} to {} in {bits} bits", allowed.start, allowed.end - 1);
    Err(files.fault(name, format!("code {} at element {at}", codes[at] as i8), range, ""))
}

/// Refuses nonzero zero points of a symmetric weight: other readers subtract them and would decode another weight.
fn refuse_zeros(files: &ModelFiles, name: &str, scheme: &Scheme, rows: usize, cols: usize) -> Result<()> {
    if !files.has(name) {
        return Ok(());
    }
    let zeros = read_zeros(files, name, scheme, rows, cols)?;
    let Some(at) = zeros.iter().position(|&z| z != 0) else { return Ok(()) };
    let found = format!("{} at element {at} of a symmetric weight", zeros[at]);
    Err(files.fault(name, found, "no zero point, or 0", "set \"symmetric\": false if they are meant"))
}

fn check_shape(files: &ModelFiles, module: &str, bytes: &[u8], rows: usize, cols: usize) -> Result<()> {
    let half = bytes.len() / 2;
    let read = |b: &[u8]| b.iter().rev().fold(0u64, |n, &byte| n << 8 | u64::from(byte));
    let found = [read(&bytes[..half]), read(&bytes[half..])];
    if found == [rows as u64, cols as u64] {
        return Ok(());
    }
    Err(files.fault(&format!("{module}.weight_shape"), format!("{found:?}"), format!("[{rows}, {cols}]"), ""))
}

/// Zero points: packed down the rows as int32 words (`[ceil(rows·b/32), groups]`), or one byte each (int8; FP8 beside
/// FP8 codes, which are symmetric, so only 0 is accepted).
fn read_zeros(files: &ModelFiles, name: &str, scheme: &Scheme, rows: usize, cols: usize) -> Result<Vec<i32>> {
    let grid = scheme.format.blocks().grid(rows, cols);
    let blocks: usize = grid.iter().product();
    let meta = files.meta(name)?;
    let signed = |codes: Vec<u8>| codes.into_iter().map(|c| i32::from(c as i8)).collect();
    if meta.dtype == Dtype::I8 || (meta.dtype == Dtype::F8E4M3 && !scheme.format.has_zero()) {
        files.expect_grid(meta, &grid)?;
        return Ok(signed(files.read_exact(name, &[meta.dtype], &meta.shape)?));
    }
    let packing = Packing::compressed_tensors_int(scheme.format.code_bits());
    let (lines, per_line) = (blocks / grid[0].max(1), grid[0]);
    let (dense, padded) = (packing.line_bytes(per_line) / 4, padded_words(packing.bits, per_line));
    let is_padded = padded != dense && meta.shape.first() == Some(&padded);
    let words = if is_padded { padded } else { dense };
    let bytes = files.read_exact(name, &[Dtype::I32], &[words, lines])?;
    let by_line: Vec<u8> = (0..lines)
        .flat_map(|l| (0..words).flat_map(move |w| 4 * (w * lines + l)..4 * (w * lines + l) + 4))
        .map(|i| bytes[i])
        .collect();
    let zeros = match is_padded {
        true => unpack_padded(packing, &by_line, per_line),
        false => unpack(files, name, packing, &by_line, lines, per_line, true)?,
    };
    Ok(signed(transpose(&zeros, lines, per_line)))
}

fn unpack(
    files: &ModelFiles,
    name: &str,
    packing: Packing,
    bytes: &[u8],
    rows: usize,
    cols: usize,
    signed: bool,
) -> Result<Vec<u8>> {
    packing.unpack(bytes, rows, cols, signed).ok_or_else(|| {
        files.fault(
            name,
            format!("{} bytes", bytes.len()),
            format!("{}", packing.total_bytes(rows, cols)),
            "",
        )
    })
}

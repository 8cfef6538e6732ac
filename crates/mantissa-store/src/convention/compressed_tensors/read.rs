//! Tensors of a module → codes and scales.

use mantissa_num::format::{Affine, Format};
use mantissa_num::pack::{Packing, transpose};
use mantissa_num::{Code, Codes, Quantized, Scheme};

use super::config::{Args, Config};
use crate::convention::sound::{self, Names};
use crate::convention::{ActivationQuant, ModelFiles, Weight};
use crate::{Dtype, Result};

impl Config {
    /// The weight of `module` and the quantization of its input.
    ///
    /// # Errors
    /// A tensor of the module is missing or has another dtype or shape than its group says.
    pub fn linear(
        &self,
        files: &ModelFiles,
        module: &str,
        rows: usize,
        cols: usize,
    ) -> Result<(Weight, Option<ActivationQuant>)> {
        let Some(group) = self.group(module) else { return Ok((files.dense(module, rows, cols)?, None)) };
        let weight = match &group.weights {
            None => files.dense(module, rows, cols)?,
            Some(args) => Weight::Quantized(self.weight(files, module, args, rows, cols)?),
        };
        let input = group.input.as_ref().map(|args| self.input(files, module, args)).transpose()?;
        Ok((weight, input))
    }

    fn weight(
        &self,
        files: &ModelFiles,
        module: &str,
        args: &Args,
        rows: usize,
        cols: usize,
    ) -> Result<Quantized> {
        let scale_name = format!("{module}.weight_scale");
        // The layout of blocks does not depend on the scale's dtype, which only the tensor knows.
        let grid = args.weight_scheme(&self.path, Code::F32)?.format.blocks().grid(rows, cols);
        let (scale_code, scales) = files.read_scales(&scale_name, &grid)?;
        let scheme = args.weight_scheme(&self.path, scale_code)?;
        let outer = if scheme.has_outer_scale() {
            Some(files.read_scalar(&format!("{module}.weight_global_scale"))?)
        } else {
            None
        };
        refuse_order(files, module, &grid, cols)?;
        let (codes_name, codes) = read_codes(files, module, &scheme, rows, cols)?;
        let zero_name = format!("{module}.weight_zero_point");
        let zeros = match scheme.format.has_zero() {
            true => read_zeros(files, &zero_name, &scheme, rows, cols)?,
            false => {
                refuse_zeros(files, &zero_name, &scheme, rows, cols)?;
                Vec::new()
            }
        };
        let empty = Quantized::empty(scheme.format, rows, cols);
        let q = Quantized { codes: Codes::U8(codes), scales, outer, zeros, ..empty };
        sound::check(files, Names { codes: &codes_name, scales: &scale_name, zeros: &zero_name }, &q)?;
        Ok(q)
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
        Ok(ActivationQuant { scheme, outer })
    }
}

fn element(scheme: &Scheme) -> Code {
    match &scheme.format {
        Format::Affine(Affine { code, .. }) => *code,
        _ => Code::Int(8),
    }
}

/// Codes, one per byte, whichever of `weight_packed` and `weight` the module has, and the name of that tensor.
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
        return Ok((name, codes));
    }
    let Code::Int(bits) = element else {
        let bytes = files.read_exact(&packed, &[Dtype::U8], &[rows, cols.div_ceil(2)])?;
        let codes = unpack(files, &packed, Packing::rows(4), &bytes, rows, cols, false)?;
        return Ok((packed, codes));
    };
    if files.has(&format!("{module}.weight_shape")) {
        let shape = files.read_exact(&format!("{module}.weight_shape"), &[Dtype::I64, Dtype::I32], &[2])?;
        check_shape(files, module, &shape, rows, cols)?;
    }
    let packing = Packing::compressed_tensors_int(bits);
    let words = packing.line_bytes(cols) / 4;
    let meta = files.meta(&packed)?;
    if meta.shape == [rows, cols.div_ceil(32 / bits as usize)] && meta.shape != [rows, words] {
        let hint =
            "written before dense packing (compressed-tensors 0.15); pack it again with a newer version";
        return Err(files.fault(&packed, format!("{} words a row", meta.shape[1]), format!("{words}"), hint));
    }
    let bytes = files.read_exact(&packed, &[Dtype::I32], &[rows, words])?;
    let codes = unpack(files, &packed, packing, &bytes, rows, cols, true)?;
    Ok((packed, codes))
}

/// Refuses columns that stand in another order than the weight's own (`weight_g_idx`, the group of each column). A list
/// that holds −1 was never filled, and counts as absent, as in the package itself.
fn refuse_order(files: &ModelFiles, module: &str, grid: &[usize], cols: usize) -> Result<()> {
    let name = format!("{module}.weight_g_idx");
    if !files.has(&name) {
        return Ok(());
    }
    let bytes = files.read_exact(&name, &[Dtype::I32], &[cols])?;
    let groups = bytes.as_chunks::<4>().0.iter().map(|b| i32::from_le_bytes(*b));
    let size = cols.div_ceil(grid.last().copied().unwrap_or(1).max(1)).max(1);
    let in_order = groups.clone().enumerate().all(|(i, group)| usize::try_from(group) == Ok(i / size));
    if in_order || groups.clone().any(|group| group == -1) {
        return Ok(());
    }
    let hint = "columns permuted by activation order are not read yet";
    Err(files.fault(&name, "groups in another order", "columns in their own order", hint))
}

/// Refuses zero points beside a symmetric weight, unless all are 0: other readers subtract them, and would see another
/// weight.
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

/// Zero points: packed down the rows as int32 words (`[ceil(rows·b/32), groups]`), or one byte each (int8, or FP8 beside
/// FP8 codes, which are symmetric: only 0 is taken).
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
    let words = packing.line_bytes(per_line) / 4;
    let bytes = files.read_exact(name, &[Dtype::I32], &[words, lines])?;
    let by_line: Vec<u8> = (0..lines)
        .flat_map(|l| (0..words).flat_map(move |w| 4 * (w * lines + l)..4 * (w * lines + l) + 4))
        .map(|i| bytes[i])
        .collect();
    let zeros = unpack(files, name, packing, &by_line, lines, per_line, true)?;
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

//! HQQ (Half-Quadratic Quantization, Badri and Shaji 2023), read only: `quant_method: "hqq"`, as transformers saves
//! it.
//!
//! For a module with weight `[N, K]` and groups of `g`: with `axis` 1 the weight is reshaped to `[N·K/g, g]`, one
//! group per row; with `axis` 0 to `[g, N·K/g]`, one group per column. `W_q` holds the unsigned codes of that array,
//! with distant rows sharing a unit ([`Strided`]). `scale` and `zero` `[N·K/g, 1]` or `[1, N·K/g]` are floats: `w =
//! (code - zero) · scale`. Python attributes are stored as tensors, too: `nbits`, `axis`, `group_size`, `shape` and,
//! as text, `packing`.
//!
//! Groups within one row are kept, with `-zero · scale` as each group's bias. [`Blocks`] cannot represent others, so
//! they are decoded. Source: hqq 0.2.8, `core/quantize.py`, `core/bitpack.py`, `core/utils.py`
//! (`encode_safetensor_type`).

use mantissa_num::format::{Affine, Format, Offset};
use mantissa_num::pack::Strided;
use mantissa_num::{Blocks, Code, Codes, Quantized, ScaleLevel, ScaleTree};

use super::gptq::centred;
use super::sound::{self, Names};
use super::{CheckpointFolder, Convention, ModelFiles, Opened, StoredLinear, Weight};
use crate::{Dtype, Result};

/// `quant_method` of this format.
pub const QUANT_METHOD: &str = "hqq";

/// Longest text of a name.
const MAX_TEXT: usize = 64;

/// Array to which a weight is reshaped.
struct Layout {
    packing: Strided,
    /// Lines and columns of the array.
    lines: usize,
    cols: usize,
    /// True if a group is a line of the array, false if it is a column.
    by_line: bool,
}

/// Weight of `module`, `[rows, cols]`. A module without `W_q` is dense.
///
/// # Errors
/// A tensor of the module is missing, has another dtype or shape, or contradicts another; or scales are quantized
/// themselves.
fn weight(files: &ModelFiles, module: &str, rows: usize, cols: usize) -> Result<Weight> {
    let name = |suffix: &str| format!("{module}.{suffix}");
    let codes_name = name("W_q");
    if !files.has(&codes_name) {
        return files.dense(module, rows, cols);
    }
    let Layout { packing, lines, cols: width, by_line } = layout(files, module, rows, cols)?;
    let dtypes: &[Dtype] =
        if packing.unit_bytes == 4 { &[Dtype::I32, Dtype::U32] } else { &[Dtype::U8, Dtype::I8] };
    let bytes = files.read_exact(&codes_name, dtypes, &[packing.unit_lines(lines), width])?;
    let codes = packing.unpack(&bytes, lines, width);
    let codes = codes.ok_or_else(|| files.fault(&codes_name, "a wrong length", "whole lines", ""))?;

    let grid = if by_line { [lines, 1] } else { [1, width] };
    let scale_name = name("scale");
    files.expect_dtype(files.meta(&scale_name)?, &[Dtype::F32, Dtype::F16, Dtype::BF16])?;
    let (code, scales) = files.read_scales(&scale_name, &grid)?;
    let zero_name = name("zero");
    let zeros = files.tensor_f32(&zero_name, &grid)?;

    let group = width;
    if !by_line || !cols.is_multiple_of(group) {
        let scale = |i| code.decode(scales.get(i));
        let group_of = |i: usize| if by_line { i / width } else { i % width };
        let decode = |(i, &q): (usize, &u8)| (f32::from(q) - zeros[group_of(i)]) * scale(group_of(i));
        let values: Vec<f32> = codes.iter().enumerate().map(decode).collect();
        crate::finite::require_finite(&values, files.path_of(&scale_name), &scale_name)?;
        return Ok(Weight::F32(values));
    }
    let blocks = if group == cols { Blocks::Row } else { Blocks::Group(group as u32) };
    let affine = Affine {
        code: Code::Int(packing.bits),
        blocks,
        scale: Some(ScaleTree::leaf(code)),
        offset: Offset::Bias,
    };
    let codes = codes.into_iter().map(|q| centred(q, packing.bits) as u8).collect();
    let biases = zeros.iter().enumerate().map(|(i, zero)| -zero * code.decode(scales.get(i))).collect();
    let empty = Quantized::empty(Format::Affine(affine), rows, cols);
    let q =
        Quantized { codes: Codes::U8(codes), scales: ScaleLevel::from(scales).with_biases(biases), ..empty };
    sound::check(files, Names { codes: &codes_name, scales: &scale_name, zeros: &zero_name }, &q)?;
    Ok(Weight::Quantized(q))
}

/// Reads the layout of a module's codes from its small tensors.
fn layout(files: &ModelFiles, module: &str, rows: usize, cols: usize) -> Result<Layout> {
    let name = |suffix: &str| format!("{module}.{suffix}");
    for flag in ["quant_scale", "quant_zero", "view_as_float"].map(name) {
        if files.has(&flag) && number(files, &flag)? != 0 {
            let hint = "quantized scales and zero points are not supported; quantize without the option";
            return Err(files.fault(&flag, "true", "false", hint));
        }
    }
    let shape_name = name("shape");
    let shape = files.read_exact(&shape_name, &[Dtype::I64], &[2])?;
    let shape: Vec<i64> = shape.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b)).collect();
    if shape != [rows as i64, cols as i64] {
        let hint = "config.json and the weights must belong together";
        return Err(files.fault(&shape_name, format!("{shape:?}"), format!("[{rows}, {cols}]"), hint));
    }
    let packing_name = name("packing");
    let text = text(files, &packing_name)?;
    let packing = Strided::hqq(&text).ok_or_else(|| {
        files.fault(&packing_name, format!("{text:?}"), "8bit_u8, 4bit_u8, 3bit_32, 2bit_u8, 1bit_u8", "")
    })?;
    let bits_name = name("nbits");
    let bits = number(files, &bits_name)?;
    if bits != i64::from(packing.bits) {
        return Err(files.fault(
            &bits_name,
            bits.to_string(),
            format!("{}, as {text} has", packing.bits),
            "",
        ));
    }
    let axis_name = name("axis");
    let by_line = match number(files, &axis_name)? {
        0 => false,
        1 => true,
        other => return Err(files.fault(&axis_name, other.to_string(), "0 or 1", "")),
    };
    let group_name = name("group_size");
    let total = rows * cols;
    // Without groups there is one scale per row (axis 1) or column, and newer versions store its length.
    let group = match files.has(&group_name) {
        true => number(files, &group_name)?,
        false => (if by_line { cols } else { rows }) as i64,
    };
    let whole = usize::try_from(group).ok().filter(|&g| g > 0 && total.is_multiple_of(g));
    let whole = whole.filter(|&g| u32::try_from(g).is_ok());
    let group = whole.ok_or_else(|| {
        files.fault(&group_name, group.to_string(), format!("a divisor of {rows} · {cols}"), "")
    })?;
    let (lines, width) = if by_line { (total / group, group) } else { (group, total / group) };
    Ok(Layout { packing, lines, cols: width, by_line })
}

/// Integer stored as a tensor of one value.
fn number(files: &ModelFiles, name: &str) -> Result<i64> {
    let meta = files.meta(name)?;
    if meta.shape.iter().product::<usize>() != 1 {
        return Err(files.fault(name, format!("shape {:?}", meta.shape), "one value", ""));
    }
    files.expect_dtype(meta, &[Dtype::I32, Dtype::I64, Dtype::U8])?;
    let bytes = files.checkpoint().read(name)?;
    let mut word = [0; 8];
    word[..bytes.len()].copy_from_slice(&bytes);
    Ok(if bytes.len() == 4 { i64::from(i64::from_le_bytes(word) as i32) } else { i64::from_le_bytes(word) })
}

/// Text stored as one byte per character.
fn text(files: &ModelFiles, name: &str) -> Result<String> {
    let meta = files.meta(name)?;
    files.expect_dtype(meta, &[Dtype::U8])?;
    if meta.shape.len() != 1 || meta.shape[0] > MAX_TEXT {
        return Err(files.fault(
            name,
            format!("shape {:?}", meta.shape),
            format!("at most {MAX_TEXT} characters"),
            "",
        ));
    }
    Ok(files.checkpoint().read(name)?.into_iter().map(char::from).collect())
}

/// HQQ, as transformers saves it.
#[derive(Debug)]
pub(super) struct Hqq;

impl Convention for Hqq {
    fn name(&self) -> &'static str {
        QUANT_METHOD
    }

    fn quant_methods(&self) -> &'static [&'static str] {
        &[QUANT_METHOD]
    }

    fn open(&self, folder: &CheckpointFolder<'_>) -> Result<Option<Box<dyn Opened>>> {
        folder.open_as(QUANT_METHOD, |_, _| Ok(Hqq))
    }
}

impl Opened for Hqq {
    fn name(&self) -> &'static str {
        QUANT_METHOD
    }

    fn code_tensors(&self) -> &'static [(&'static str, &'static [&'static str])] {
        &[("W_q", &["scale", "zero", "shape", "packing"])]
    }

    fn linear(&self, files: &ModelFiles, module: &str, rows: usize, cols: usize) -> Result<StoredLinear> {
        Ok(weight(files, module, rows, cols)?.into())
    }
}

//! gpt-oss (`quant_method: "mxfp4"`): the experts of a layer stacked, in MXFP4; everything else is dense.
//!
//! A projection `n` of `E` experts, each `[N, K]`: `n_blocks` U8 `[E, N, K/32, 16]`, the first of two codes in the low nibble, and
//! `n_scales` U8 `[E, N, K/32]`, E8M0. `w = fp4 · 2^(scale - 127)`. Gate and up are one projection whose even rows are the gate's.
//!
//! Source: gpt_oss, `torch/weights.py`; transformers 5, `integrations/mxfp4.py`.

use mantissa_num::pack::Packing;
use mantissa_num::{Code, Codes, Quantized, Scheme, minifloat};

use super::sound::{self, Names};
use super::{ModelFiles, Stack};
use crate::{Dtype, Result, TensorSpec};

/// `quant_method` of this convention.
pub const QUANT_METHOD: &str = "mxfp4";

/// Elements that share a scale, and bytes of their codes.
const BLOCK: usize = 32;

/// The weight `[rows, cols]` of one expert. Where gate and up are one projection, it is every other row of that.
///
/// # Errors
/// A tensor is missing or has another dtype or shape, columns that 32 does not divide included.
pub fn expert(files: &ModelFiles, stack: &Stack, rows: usize, cols: usize) -> Result<Quantized> {
    let (codes_name, scales_name) = (format!("{}_blocks", stack.tensor), format!("{}_scales", stack.tensor));
    if !cols.is_multiple_of(BLOCK) {
        let allowed = format!("columns in groups of {BLOCK}");
        return Err(files.fault(&codes_name, format!("{cols} columns"), allowed, ""));
    }
    let (groups, all) = (cols / BLOCK, stack.turns * rows);
    let part = |name: &str, dtypes: &[Dtype], block: &[usize]| -> Result<Vec<u8>> {
        let meta = files.meta(name)?;
        files.expect_dtype(meta, dtypes)?;
        files.expect_shape(meta, &[&[stack.experts, all, groups], block].concat())?;
        let row = groups * block.first().copied().unwrap_or(1);
        let mut bytes = vec![0; all * row];
        files.checkpoint().read_range(name, (stack.expert * all * row) as u64, &mut bytes)?;
        let rows = bytes.chunks_exact(row.max(1)).skip(stack.turn).step_by(stack.turns.max(1));
        Ok(rows.flatten().copied().collect())
    };
    let blocks = part(&codes_name, &[Dtype::U8], &[BLOCK / 2])?;
    let scales = part(&scales_name, &[Dtype::U8, Dtype::F8E8M0], &[])?;
    let codes = Packing::rows(4).unpack(&blocks, rows, cols, false);
    let codes = codes.ok_or_else(|| files.fault(&codes_name, "a wrong length", "two codes to a byte", ""))?;
    let empty = Quantized::empty(Scheme::mx(Code::Float(minifloat::E2M1)).format, rows, cols);
    let q = Quantized { codes: Codes::U8(codes), scales: Codes::U8(scales), ..empty };
    sound::check(files, Names { codes: &codes_name, scales: &scales_name, zeros: &scales_name }, &q)?;
    Ok(q)
}

/// The tensors of projection `name` for its experts, all of one shape and in MXFP4; `None` where one is not.
pub fn tensors(name: &str, experts: &[Quantized]) -> Option<[(TensorSpec, Vec<u8>); 2]> {
    let format = Scheme::mx(Code::Float(minifloat::E2M1)).format;
    let (rows, cols) = experts.first().map(|q| (q.rows, q.cols))?;
    let groups = cols / BLOCK;
    let (mut blocks, mut scales) = (Vec::new(), Vec::new());
    for q in experts {
        let Codes::U8(codes) = &q.codes else { return None };
        if q.format != format || (q.rows, q.cols) != (rows, cols) || !cols.is_multiple_of(BLOCK) {
            return None;
        }
        blocks.extend(Packing::rows(4).pack(codes, cols));
        scales.extend(q.scales.to_le_bytes());
    }
    let spec =
        |suffix: &str, shape: Vec<usize>| TensorSpec::new(format!("{name}_{suffix}"), Dtype::U8, shape);
    Some([
        (spec("blocks", vec![experts.len(), rows, groups, BLOCK / 2]), blocks),
        (spec("scales", vec![experts.len(), rows, groups]), scales),
    ])
}

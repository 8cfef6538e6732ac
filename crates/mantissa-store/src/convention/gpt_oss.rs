//! gpt-oss (`quant_method: "mxfp4"`): the experts of a layer stacked, in MXFP4; everything else is dense.
//!
//! A projection `n` of `E` experts, each `[N, K]`: `n_blocks` U8 `[E, N, K/32, 16]`, the first of two codes in the low nibble, and
//! `n_scales` U8 `[E, N, K/32]`, E8M0. `w = fp4 · 2^(scale - 127)`. Gate and up are one projection whose even rows are the gate's.
//!
//! Source: gpt_oss, `torch/weights.py`; transformers 5, `integrations/mxfp4.py`.

use mantissa_num::pack::Packing;
use mantissa_num::{Code, Codes, Quantized, Scheme, minifloat};

use super::ModelFiles;
use super::sound::{self, Names};
use crate::{Dtype, Result, TensorSpec};

/// `quant_method` of this convention.
pub const QUANT_METHOD: &str = "mxfp4";

/// Elements that share a scale, and bytes of their codes.
const BLOCK: usize = 32;

/// The experts of projection `name` (`model.layers.0.mlp.experts.down_proj`), each `[rows, cols]`.
///
/// # Errors
/// A tensor is missing or has another dtype or shape, columns that 32 does not divide included.
pub fn experts(
    files: &ModelFiles,
    name: &str,
    experts: usize,
    rows: usize,
    cols: usize,
) -> Result<Vec<Quantized>> {
    let (blocks_name, scales_name) = (format!("{name}_blocks"), format!("{name}_scales"));
    if !cols.is_multiple_of(BLOCK) {
        let allowed = format!("columns in groups of {BLOCK}");
        return Err(files.fault(&blocks_name, format!("{cols} columns"), allowed, ""));
    }
    let groups = cols / BLOCK;
    let blocks = files.read_exact(&blocks_name, &[Dtype::U8], &[experts, rows, groups, BLOCK / 2])?;
    let scales = files.read_exact(&scales_name, &[Dtype::U8, Dtype::F8E8M0], &[experts, rows, groups])?;
    let format = Scheme::mx(Code::Float(minifloat::E2M1)).format;
    let each = blocks.chunks_exact((rows * cols / 2).max(1)).zip(scales.chunks_exact((rows * groups).max(1)));
    each.map(|(blocks, scales)| {
        let codes = Packing::rows(4).unpack(blocks, rows, cols, false);
        let codes =
            codes.ok_or_else(|| files.fault(&blocks_name, "a wrong length", "two codes to a byte", ""))?;
        let empty = Quantized::empty(format.clone(), rows, cols);
        let q = Quantized { codes: Codes::U8(codes), scales: Codes::U8(scales.to_vec()), ..empty };
        sound::check(files, Names { codes: &blocks_name, scales: &scales_name, zeros: &scales_name }, &q)?;
        Ok(q)
    })
    .collect()
}

/// Gate and up of a joint projection: its even and its odd rows.
pub fn halves(joint: &Quantized) -> [Quantized; 2] {
    let groups = joint.format.blocks().count(1, joint.cols);
    [0, 1].map(|first| {
        let rows = (first..joint.rows).step_by(2);
        let pick = |codes: &Codes, width: usize| match codes {
            Codes::U8(codes) => Codes::U8(
                rows.clone().flat_map(|r| codes[r * width..(r + 1) * width].iter().copied()).collect(),
            ),
            other => other.clone(),
        };
        let (codes, scales) = (pick(&joint.codes, joint.cols), pick(&joint.scales, groups));
        Quantized { codes, scales, ..Quantized::empty(joint.format.clone(), rows.len(), joint.cols) }
    })
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

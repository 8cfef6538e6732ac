//! gpt-oss (`quant_method: "mxfp4"`): a layer's experts stacked in MXFP4; everything else is dense.
//!
//! For projection `n` of `E` experts, each `[N, K]`: `n_blocks` U8 `[E, N, K/32, 16]`, the first of two codes in the
//! low nibble, and `n_scales` U8 `[E, N, K/32]`, E8M0. `w = fp4 · 2^(scale - 127)`. Gate and up are one projection
//! with the gate in its even rows.
//!
//! Source: gpt_oss, `torch/weights.py`; transformers 5, `integrations/mxfp4.py`.

use mantissa_num::pack::Packing;
use mantissa_num::{Code, Codes, Quantized, Scheme, minifloat};
use serde_json::{Value, json};

use super::sound::{self, Names};
use super::{
    CheckpointFolder, Container, Convention, Experts, Facts, LayerKind, LinearPlan, ModelFiles, ModelPlan,
    NamedBytes, NotStorable, Opened, ShapeSource, SideTensors, Stack, Storable, StoredLinear,
};
use crate::{Dtype, Result, TensorSpec};

/// `quant_method` of this format.
pub const QUANT_METHOD: &str = "mxfp4";

/// Elements that share a scale, and bytes of their codes.
const BLOCK: usize = 32;

/// Weight `[rows, cols]` of one expert. If gate and up are one projection, it is every other row of it.
///
/// # Errors
/// A tensor is missing or has another dtype or shape, or 32 does not divide the columns.
pub fn expert(files: &ModelFiles, stack: &Stack, rows: usize, cols: usize) -> Result<Quantized> {
    let [codes_name, scales_name] = names(&stack.tensor);
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
    let q = Quantized { codes: Codes::U8(codes), scales: Codes::U8(scales).into(), ..empty };
    sound::check(files, Names { codes: &codes_name, scales: &scales_name, zeros: &scales_name }, &q)?;
    Ok(q)
}

/// Names of the tensors of projection `name`: codes and scales.
pub fn names(name: &str) -> [String; 2] {
    [format!("{name}_blocks"), format!("{name}_scales")]
}

/// Tensors of projection `name`, `[rows, cols]` for each of `experts`.
pub fn stacked_specs(name: &str, experts: usize, rows: usize, cols: usize) -> [TensorSpec; 2] {
    let [blocks, scales] = names(name);
    let groups = cols / BLOCK;
    [
        TensorSpec::new(blocks, Dtype::U8, vec![experts, rows, groups, BLOCK / 2]),
        TensorSpec::new(scales, Dtype::U8, vec![experts, rows, groups]),
    ]
}

/// Tensors of one layer's part of a stack, codes and scales, as if it were stored alone.
///
/// # Errors
/// [`NotStorable`] for another scheme than MXFP4, if 32 does not divide the columns, or if inputs are quantized.
pub fn specs(plan: &LinearPlan<'_>) -> Storable<Vec<TensorSpec>> {
    let refuse = |why: String| Err(NotStorable { scheme: plan.scheme.to_string(), why });
    if plan.scheme.format != Scheme::mx(Code::Float(minifloat::E2M1)).format {
        return refuse("mxfp4 holds MXFP4 weights only".to_owned());
    }
    if plan.input.is_some() {
        return refuse("it has no quantization of inputs".to_owned());
    }
    if !plan.cols.is_multiple_of(BLOCK) {
        return refuse(format!("{}: rows of {} are not multiples of {BLOCK}", plan.module, plan.cols));
    }
    Ok(stacked_specs(plan.module, 1, plan.rows, plan.cols).into())
}

/// Bytes of the tensors declared by [`specs`].
///
/// # Errors
/// As [`specs`].
pub fn part(plan: &LinearPlan<'_>, q: &Quantized) -> Storable<NamedBytes> {
    specs(plan)?;
    let tensors = tensors(plan.module, std::slice::from_ref(q)).ok_or_else(|| NotStorable {
        scheme: plan.scheme.to_string(),
        why: format!("{}: codes of another scheme", plan.module),
    })?;
    Ok(tensors.into_iter().map(|(spec, bytes)| (spec.name, bytes)).collect())
}

/// Stacked tensors of projection `name` for its experts; `None` unless all have one shape and MXFP4.
pub fn tensors(name: &str, experts: &[Quantized]) -> Option<[(TensorSpec, Vec<u8>); 2]> {
    let format = Scheme::mx(Code::Float(minifloat::E2M1)).format;
    let (rows, cols) = experts.first().map(|q| (q.rows, q.cols))?;
    let (mut blocks, mut scales) = (Vec::new(), Vec::new());
    for q in experts {
        let Codes::U8(codes) = &q.codes else { return None };
        if q.format != format || (q.rows, q.cols) != (rows, cols) || !cols.is_multiple_of(BLOCK) {
            return None;
        }
        blocks.extend(Packing::rows(4).pack(codes, cols));
        scales.extend(q.scales.to_le_bytes());
    }
    let [block_meta, scale_meta] = stacked_specs(name, experts.len(), rows, cols);
    Some([(block_meta, blocks), (scale_meta, scales)])
}

/// Experts stacked in MXFP4 as gpt-oss publishes them, read by transformers and vLLM.
#[derive(Debug)]
pub(super) struct GptOss;

/// Handle of the format.
pub const CONTAINER: Container = Container::new(&GptOss);

impl Convention for GptOss {
    fn name(&self) -> &'static str {
        QUANT_METHOD
    }

    fn quant_methods(&self) -> &'static [&'static str] {
        &[QUANT_METHOD]
    }

    fn open(&self, folder: &CheckpointFolder<'_>) -> Result<Option<Box<dyn Opened>>> {
        folder.open_as(QUANT_METHOD, |_, _| Ok(GptOss))
    }

    fn writes(&self) -> Option<Facts> {
        Some(Facts { folded_transforms: true, experts: Experts::Stacked, conv1d: true, ..Facts::default() })
    }

    fn layer_specs(&self, plan: &LinearPlan<'_>) -> Storable<Vec<TensorSpec>> {
        specs(plan)
    }

    fn layer_tensors(
        &self,
        plan: &LinearPlan<'_>,
        q: &Quantized,
        _: SideTensors<'_>,
    ) -> Storable<NamedBytes> {
        part(plan, q)
    }

    fn quantization_config(&self, _model: &ModelPlan<'_>) -> Storable<Value> {
        // Same exclusions as the published models.
        Ok(json!({
            "quant_method": QUANT_METHOD,
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
        }))
    }

    fn keeps_dense(&self, layer: LayerKind) -> Option<&'static str> {
        (!layer.expert).then_some("the format quantizes experts only")
    }
}

impl Opened for GptOss {
    fn name(&self) -> &'static str {
        QUANT_METHOD
    }

    fn shapes(&self) -> ShapeSource {
        ShapeSource::Stacked
    }

    fn expert_tensors(&self, tensor: &str) -> Option<[String; 2]> {
        Some(names(tensor))
    }

    fn expert(&self, files: &ModelFiles, stack: &Stack, rows: usize, cols: usize) -> Result<Quantized> {
        expert(files, stack, rows, cols)
    }

    /// Reads an unquantized layer other than the experts.
    fn linear(&self, files: &ModelFiles, module: &str, rows: usize, cols: usize) -> Result<StoredLinear> {
        Ok(files.dense(module, rows, cols)?.into())
    }
}

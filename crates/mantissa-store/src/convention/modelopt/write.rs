//! Codes and scales → tensors of a module, and the configurations that describe them.

use mantissa_num::format::{Affine, Format, Offset, Sense};
use mantissa_num::pack::Packing;
use mantissa_num::stored::Map;
use mantissa_num::{Blocks, Code, Codes, Quantized, Rule, Scheme, minifloat};
use serde_json::{Value, json};

use super::config::{Algo, QUANT_METHOD};
use super::read::{fixed, mxfp8_input, per_token};
use crate::convention::scale_dtype::scale_dtype;
use crate::convention::{
    ActivationQuant, LinearPlan, LinearWeight, ModuleGroup, NamedBytes, NotStorable, Storable, StoredTensors,
    Weight, cache,
};
use crate::{Dtype, TensorSpec};

/// Version of the format, which loaders check.
const VERSION: &str = "0.47.0";

/// Scheme as this format stores it: NVFP4's global scale is a factor.
pub fn as_stored(scheme: Scheme) -> Scheme {
    match scheme.encoder.rule {
        Rule::Ct if scheme.has_outer_scale() => scheme.clone().with_variant("torchao").unwrap_or(scheme),
        _ => scheme,
    }
}

/// Algorithm for weights in `scheme` and inputs in `input`.
///
/// # Errors
/// [`NotStorable`] with the reason why this format cannot hold them.
fn algo(scheme: &Scheme, input: Option<&Scheme>) -> Storable<Algo> {
    let no = |why: &str| Err(NotStorable { scheme: scheme.to_string(), why: why.to_owned() });
    let Format::Affine(Affine { code, blocks, scale: Some(scale), offset: Offset::None }) = &scheme.format
    else {
        return no("modelopt holds fp8-e4m3, int4 in groups, nvfp4 and mxfp8-e4m3, without zero points");
    };
    let e4m3 = *code == Code::Float(minifloat::E4M3);
    let plain = scale.outer.is_none() && scale.code != Code::E8m0;
    match (code, blocks) {
        (Code::Float(_), Blocks::Tensor) if e4m3 && plain => match input {
            Some(input) if *input == fixed() => Ok(Algo::Fp8),
            _ => no(
                "modelopt's FP8 has a calibrated scale of the inputs: add +fp8-e4m3-tensor@static, or use fp8-e4m3-channel+fp8-e4m3-token",
            ),
        },
        (Code::Float(_), Blocks::Row) if e4m3 && plain => match input {
            Some(input) if *input == per_token() => Ok(Algo::Fp8PerChannel),
            _ => no("modelopt quantizes the inputs as well: add +fp8-e4m3-token"),
        },
        (Code::Float(_), Blocks::Group(32)) if e4m3 && scale.code == Code::E8m0 => match input {
            Some(input) if *input == mxfp8_input() => Ok(Algo::Mxfp8),
            _ => no("modelopt quantizes the inputs as well: add +mxfp8-e4m3:rceil"),
        },
        (Code::Int(4), Blocks::Group(_)) if plain && input.is_none() => Ok(Algo::Int4Awq),
        (Code::Float(f), Blocks::Group(16))
            if *f == minifloat::E2M1 && scale.code == Code::Float(minifloat::E4M3) =>
        {
            match (scale.tensor_wide().map(|outer| outer.sense), input) {
                (Some(Sense::Multiplier | Sense::Divisor), None) => Ok(Algo::Nvfp4WeightOnly),
                (Some(Sense::Multiplier | Sense::Divisor), Some(input))
                    if *input == Scheme::nvfp4(Some(Sense::Divisor)) =>
                {
                    Ok(Algo::Nvfp4)
                }
                (Some(Sense::Multiplier | Sense::Divisor), _) => {
                    no("modelopt's NVFP4 has inputs in nvfp4, or none")
                }
                _ => no("modelopt stores the tensor's scale as amax/2688; use nvfp4:torchao"),
            }
        }
        _ => no("modelopt holds fp8-e4m3, int4 in groups, nvfp4 and mxfp8-e4m3"),
    }
}

/// Tensors of a quantized linear layer.
///
/// # Errors
/// [`NotStorable`] if the format cannot hold the scheme, or not on this shape.
pub fn specs(plan: &LinearPlan<'_>) -> Storable<Vec<TensorSpec>> {
    let mut all = weight_specs(plan, algo(plan.scheme, plan.input)?)?;
    if plan.stores_input_scale() {
        all.push(TensorSpec::new(format!("{}.input_scale", plan.module), Dtype::F32, Vec::new()));
    }
    Ok(all)
}

fn weight_specs(plan: &LinearPlan<'_>, algo: Algo) -> Storable<Vec<TensorSpec>> {
    let LinearPlan { module, scheme, rows, cols, .. } = *plan;
    let no = |why: String| Err(NotStorable { scheme: scheme.to_string(), why });
    if let Blocks::Group(group) = scheme.format.blocks()
        && !cols.is_multiple_of(group as usize)
    {
        return no(format!("{module}: {cols} columns are not a multiple of {group}"));
    }
    if algo == Algo::Int4Awq && !rows.is_multiple_of(2) {
        return no(format!("{module}: {rows} rows do not make pairs"));
    }
    let spec =
        |suffix: &str, dtype, shape: Vec<usize>| TensorSpec::new(format!("{module}.{suffix}"), dtype, shape);
    let grid = match algo {
        Algo::Fp8 => Vec::new(),
        Algo::Fp8PerChannel => vec![rows],
        _ => scheme.format.blocks().grid(rows, cols),
    };
    let scale = scheme.format.scale().and_then(|s| scale_dtype(s.code)).unwrap_or(Dtype::F32);
    let mut all = vec![match algo {
        Algo::Int4Awq => spec("weight", Dtype::U8, vec![rows / 2, cols]),
        Algo::Nvfp4 | Algo::Nvfp4WeightOnly => spec("weight", Dtype::U8, vec![rows, cols / 2]),
        _ => spec("weight", Dtype::F8E4M3, vec![rows, cols]),
    }];
    all.push(spec("weight_scale", scale, grid));
    if scheme.has_outer_scale() {
        all.push(spec("weight_scale_2", Dtype::F32, Vec::new()));
    }
    Ok(all)
}

/// Bytes of the tensors declared by [`specs`], by name.
///
/// # Errors
/// As [`specs`]; also if the input needs a stored scale that the plan lacks.
pub fn tensors(plan: &LinearPlan<'_>, q: &Quantized) -> Storable<NamedBytes> {
    let mut all = weight_tensors(plan, q)?;
    if plan.stores_input_scale() {
        // compressed-tensors' global scale is the reciprocal.
        let bytes = plan.input_scale_bytes(QUANT_METHOD, plan.input.is_some_and(Scheme::has_outer_scale))?;
        all.push((format!("{}.input_scale", plan.module), bytes));
    }
    Ok(all)
}

fn weight_tensors(plan: &LinearPlan<'_>, q: &Quantized) -> Storable<NamedBytes> {
    let algo = algo(plan.scheme, plan.input)?;
    let name = |suffix: &str| format!("{}.{suffix}", plan.module);
    let Codes::U8(codes) = &q.codes else { return Ok(Vec::new()) };
    let packed = match algo {
        Algo::Int4Awq => Packing::rows(4).pack_dim0(codes, q.rows, q.cols),
        Algo::Nvfp4 | Algo::Nvfp4WeightOnly => Packing::rows(4).pack(codes, q.cols),
        _ => codes.clone(),
    };
    let mut all = vec![(name("weight"), packed), (name("weight_scale"), q.scales.to_le_bytes())];
    if let Some(outer) = q.outer() {
        let divisor =
            q.format.scale().and_then(|s| s.tensor_wide()).is_some_and(|s| s.sense == Sense::Divisor);
        let factor = if divisor { 1.0 / outer } else { outer };
        all.push((name("weight_scale_2"), factor.to_le_bytes().to_vec()));
    }
    Ok(all)
}

/// Tensors of a layer as it was read, with the scale and the multiplier of its inputs.
///
/// # Errors
/// [`NotStorable`] if the format cannot hold all parts.
pub fn store(module: &str, layer: &LinearWeight) -> Storable<StoredTensors> {
    let Weight::Quantized(q) = &layer.weight else { return Ok(Vec::new()) };
    let scheme = Scheme::new(q.format.clone(), Rule::Amax);
    let no = |why: &str| Err(NotStorable { scheme: scheme.to_string(), why: format!("{module}: {why}") });
    let input = layer.input.as_ref();
    if input.is_some_and(|input| input.keep_above.is_some()) {
        return no("modelopt cannot keep input columns unquantized");
    }
    let plan = LinearPlan {
        input_scale: input.and_then(ActivationQuant::stored),
        ..LinearPlan::new(module, &scheme, input.map(|input| &input.scheme), (layer.rows, layer.cols))
    };
    let bytes = tensors(&plan, q)?.into_iter().map(|(_, bytes)| bytes);
    let mut all: Vec<_> = specs(&plan)?.into_iter().zip(bytes).collect();
    let mut push = |suffix: &str, shape: Vec<usize>, values: &[f32]| {
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        all.push((TensorSpec::new(format!("{module}.{suffix}"), Dtype::F32, shape), bytes));
    };
    match (
        layer.transforms.before.as_slice(),
        layer.transforms.after.is_empty() && layer.transforms.extras.is_empty(),
    ) {
        ([], true) => {}
        ([Map::Diag(scale)], true) => push("pre_quant_scale", vec![layer.cols], scale),
        _ => return no("modelopt stores no side tensors except input multipliers"),
    }
    Ok(all)
}

/// `quantization_config` for groups of modules, each with its scheme and its input's scheme, and the unquantized
/// modules `kept`.
///
/// # Errors
/// As [`specs`].
pub fn quantization_config(groups: &[ModuleGroup], kept: &[String]) -> Storable<Value> {
    let mut config = quantization(groups)?;
    config["quant_method"] = json!(QUANT_METHOD);
    config["ignore"] = json!(kept);
    config["producer"] = json!({"name": "modelopt", "version": VERSION});
    Ok(config)
}

/// Content of [`FILE_NAME`](super::FILE_NAME) for the same modules, with the KV-cache scheme.
///
/// # Errors
/// As [`specs`].
pub fn hf_quant_config(groups: &[ModuleGroup], kept: &[String], kv: Option<&Scheme>) -> Storable<Value> {
    let mut quantization = quantization(groups)?;
    quantization["kv_cache_quant_algo"] = json!(kv.map(cache::modelopt_algo));
    quantization["exclude_modules"] = json!(kept);
    // Loaders recognise the format by this name.
    Ok(json!({"producer": {"name": "modelopt", "version": VERSION}, "quantization": quantization}))
}

fn quantization(groups: &[ModuleGroup]) -> Storable<Value> {
    let mut all = Vec::new();
    for (scheme, input, modules) in groups {
        let algo = algo(scheme, input.as_ref())?;
        let mut keys = json!({"quant_algo": algo.name()});
        if let Blocks::Group(group) = scheme.format.blocks() {
            keys["group_size"] = json!(group);
        }
        if algo == Algo::Int4Awq {
            keys["has_zero_point"] = json!(false);
            keys["pre_quant_scale"] = json!(false);
        }
        all.push((keys, modules));
    }
    Ok(match all.as_slice() {
        [(keys, _)] => keys.clone(),
        _ => {
            let layers =
                all.iter().flat_map(|(keys, modules)| modules.iter().map(|m| (m.clone(), keys.clone())));
            let layers: serde_json::Map<String, Value> = layers.collect();
            json!({"quant_algo": "MIXED_PRECISION", "quantized_layers": layers})
        }
    })
}

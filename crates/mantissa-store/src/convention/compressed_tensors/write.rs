//! Codes and scales → tensors of a module, and the `quantization_config` that describes them.

use mantissa_num::format::{Affine, Format, Offset, ScaleTree, Sense};
use mantissa_num::pack::{Packing, transpose};
use mantissa_num::{Blocks, Code, Codes, Quantized, Rule, Scheme, Source, minifloat};
use serde_json::{Value, json};

use super::config::PackFormat;
use crate::convention::scale_dtype::scale_dtype;
use crate::convention::{LinearPlan, ModuleGroup, NamedBytes, NotStorable, Storable};
use crate::{Dtype, TensorSpec};

/// Packing that holds `scheme` for weights and `input` for activations.
///
/// # Errors
/// [`NotStorable`] with the reason why this format cannot hold them.
pub fn pack_format(scheme: &Scheme, input: Option<&Scheme>) -> Storable<PackFormat> {
    let no = |why: &str| Err(NotStorable { scheme: scheme.to_string(), why: why.to_owned() });
    let Format::Affine(Affine { code, blocks, scale: Some(scale), .. }) = &scheme.format else {
        return no("compressed-tensors holds neither plain casts nor code books");
    };
    if let Some(input) = input {
        input_args(input).ok_or_else(|| NotStorable {
            scheme: input.to_string(),
            why: "compressed-tensors takes activations as int8 or fp8-e4m3 per token, fp8-e4m3 in groups, or with one scale that \
                  calibration finds (fp8-e4m3-tensor@static, int8-tensor@static, int8-tensor-asym@static), nvfp4, mxfp4 or mxfp8-e4m3 with rule :ct"
                .to_owned(),
        })?;
    }
    if scheme.format.has_bias() {
        return no("compressed-tensors has integer zero points; use -asym without a rule");
    }
    match (code, scale.code, &scale.outer) {
        (Code::Int(8), _, _) if input.is_some() => Ok(PackFormat::IntQuantized),
        (Code::Int(_), _, _) if !matches!(blocks, Blocks::Tile { .. }) => Ok(PackFormat::PackQuantized),
        (Code::Float(f), Code::E8m0, _) if *f == minifloat::E2M1 => Ok(PackFormat::Mxfp4Pack),
        (Code::Float(f), Code::E8m0, _) if *f == minifloat::E2M3 => Ok(PackFormat::Mxfp6Pack),
        (Code::Float(f), Code::E8m0, _) if *f == minifloat::E4M3 => Ok(PackFormat::Mxfp8),
        (Code::Float(f), _, Some((_, outer))) if *f == minifloat::E2M1 => match outer.sense {
            Sense::Divisor => Ok(PackFormat::Nvfp4Pack),
            _ => no("the global scale must be stored as 2688/amax; use nvfp4:ct"),
        },
        (Code::Float(f), _, None) if *f == minifloat::E4M3 && scale.code != Code::E8m0 => {
            Ok(PackFormat::FloatQuantized)
        }
        _ => no("compressed-tensors holds int2..int8, fp8-e4m3, nvfp4, mxfp4, mxfp6-e2m3 and mxfp8-e4m3"),
    }
}

/// Tensors of a quantized linear layer.
///
/// # Errors
/// [`NotStorable`] if the format cannot hold the scheme, or not in this shape.
pub fn specs(plan: &LinearPlan<'_>) -> Storable<Vec<TensorSpec>> {
    let LinearPlan { module, scheme, input, rows, cols, .. } = *plan;
    let format = pack_format(scheme, input)?;
    let blocks = scheme.format.blocks();
    if let Blocks::Group(group) | Blocks::Tile { cols: group, .. } = blocks
        && !cols.is_multiple_of(group as usize)
    {
        let why = format!("{module}: {cols} columns are not a multiple of {group}");
        return Err(NotStorable { scheme: scheme.to_string(), why });
    }
    let spec = |suffix: &str, dtype, shape: Vec<usize>| TensorSpec {
        name: format!("{module}.{suffix}"),
        dtype,
        shape,
    };
    let bits = scheme.format.code_bits();
    let mut all = Vec::new();
    match format {
        PackFormat::PackQuantized => {
            let words = Packing::compressed_tensors_int(bits).line_bytes(cols) / 4;
            all.push(spec("weight_packed", Dtype::I32, vec![rows, words]));
            all.push(spec("weight_shape", Dtype::I64, vec![2]));
        }
        PackFormat::IntQuantized => all.push(spec("weight", Dtype::I8, vec![rows, cols])),
        PackFormat::FloatQuantized | PackFormat::Mxfp8 => {
            all.push(spec("weight", Dtype::F8E4M3, vec![rows, cols]));
        }
        PackFormat::Nvfp4Pack | PackFormat::Mxfp4Pack => {
            all.push(spec("weight_packed", Dtype::U8, vec![rows, cols.div_ceil(2)]));
        }
        PackFormat::Mxfp6Pack => {
            all.push(spec("weight_packed", Dtype::U8, vec![rows, Packing::rows(bits).line_bytes(cols)]));
        }
    }
    let grid = blocks.grid(rows, cols);
    let scale = scheme.format.scale().and_then(|s| scale_dtype(s.code)).unwrap_or(Dtype::F32);
    all.push(spec("weight_scale", scale, grid.clone()));
    if scheme.format.has_zero() {
        all.push(match format {
            PackFormat::PackQuantized => {
                let words = Packing::compressed_tensors_int(bits).line_bytes(grid[0]) / 4;
                spec("weight_zero_point", Dtype::I32, vec![words, grid[1..].iter().product()])
            }
            _ => spec("weight_zero_point", Dtype::I8, grid),
        });
    }
    if format == PackFormat::Nvfp4Pack {
        all.push(spec("weight_global_scale", Dtype::F32, vec![1]));
    }
    if plan.by_group {
        refuse_groups(plan, format)?;
        all.push(spec("weight_g_idx", Dtype::I32, vec![cols]));
    }
    if plan.stores_input_scale() {
        all.push(spec(input_scale_name(plan), Dtype::F32, vec![1]));
    }
    if plan.stores_input_zero() {
        all.push(spec("input_zero_point", Dtype::I8, vec![1]));
    }
    Ok(all)
}

/// Name of the stored input scale; for NVFP4 it is the global scale.
fn input_scale_name(plan: &LinearPlan<'_>) -> &'static str {
    if plan.input.is_some_and(Scheme::has_outer_scale) { "input_global_scale" } else { "input_scale" }
}

/// Refuses a group per column (`g_idx`) for anything but packed integers in groups.
fn refuse_groups(plan: &LinearPlan<'_>, format: PackFormat) -> Storable<()> {
    if format == PackFormat::PackQuantized && matches!(plan.scheme.format.blocks(), Blocks::Group(_)) {
        return Ok(());
    }
    let why = format!("{}: compressed-tensors has weight_g_idx of packed integers in groups", plan.module);
    Err(NotStorable { scheme: plan.scheme.to_string(), why })
}

/// Bytes of the tensors declared by [`specs`], by name. `g_idx` is the group of each column if groups are not
/// adjacent columns.
///
/// # Errors
/// As [`specs`]; also if the input needs a stored scale that the plan lacks.
pub fn tensors(plan: &LinearPlan<'_>, q: &Quantized, g_idx: Option<&[u32]>) -> Storable<NamedBytes> {
    let format = pack_format(plan.scheme, plan.input)?;
    let mut all = weight_tensors(plan.module, format, q);
    if plan.by_group {
        refuse_groups(plan, format)?;
        let size = q.format.blocks().len(1, q.cols).max(1);
        let own = |column: usize| (column / size) as u32;
        let group = |column| g_idx.and_then(|g_idx| g_idx.get(column).copied()).unwrap_or(own(column));
        let bytes = (0..q.cols).flat_map(|column| group(column).to_le_bytes()).collect();
        all.push((format!("{}.weight_g_idx", plan.module), bytes));
    }
    if plan.stores_input_scale() {
        let bytes = plan.input_scale_bytes("compressed-tensors", false)?;
        all.push((format!("{}.{}", plan.module, input_scale_name(plan)), bytes));
    }
    if plan.stores_input_zero() {
        all.push((format!("{}.input_zero_point", plan.module), vec![plan.input_zero_byte()]));
    }
    Ok(all)
}

/// Tensors of the weight alone.
fn weight_tensors(module: &str, format: PackFormat, q: &Quantized) -> Vec<(String, Vec<u8>)> {
    let name = |suffix: &str| format!("{module}.{suffix}");
    let Codes::U8(codes) = &q.codes else { return Vec::new() };
    let bits = q.format.code_bits();
    let packing = Packing::compressed_tensors_int(bits);
    let mut all = Vec::new();
    match format {
        PackFormat::PackQuantized => {
            all.push((name("weight_packed"), packing.pack(codes, q.cols)));
            let shape = [q.rows as i64, q.cols as i64];
            all.push((name("weight_shape"), shape.iter().flat_map(|n| n.to_le_bytes()).collect()));
        }
        PackFormat::Nvfp4Pack | PackFormat::Mxfp4Pack | PackFormat::Mxfp6Pack => {
            all.push((name("weight_packed"), Packing::rows(bits).pack(codes, q.cols)));
        }
        _ => all.push((name("weight"), codes.clone())),
    }
    all.push((name("weight_scale"), q.scales.to_le_bytes()));
    if !q.zeros().is_empty() {
        let zeros: Vec<u8> = q.zeros().iter().map(|&z| z as i8 as u8).collect();
        let bytes = if format == PackFormat::PackQuantized { pack_zeros(&zeros, packing, q) } else { zeros };
        all.push((name("weight_zero_point"), bytes));
    }
    if let Some(outer) = q.outer() {
        all.push((name("weight_global_scale"), outer.to_le_bytes().to_vec()));
    }
    all
}

/// Zero points run down the rows: each column of groups is one packed line, and lines are adjacent.
fn pack_zeros(zeros: &[u8], packing: Packing, q: &Quantized) -> Vec<u8> {
    let grid = q.format.blocks().grid(q.rows, q.cols);
    let (down, across) = (grid[0], zeros.len() / grid[0].max(1));
    let lines = packing.pack(&transpose(zeros, down, across), down);
    let words = packing.line_bytes(down) / 4;
    (0..words)
        .flat_map(|w| (0..across).map(move |l| 4 * (l * words + w)))
        .flat_map(|at| lines[at..at + 4].iter().copied())
        .collect()
}

/// `quantization_config` for groups of modules, each with its scheme and its input's scheme. `by_group` is true if
/// `weight_g_idx` is stored.
///
/// # Errors
/// As [`pack_format`].
pub fn quantization_config(groups: &[ModuleGroup], ignore: &[String], by_group: bool) -> Storable<Value> {
    let mut config_groups = serde_json::Map::new();
    let mut formats = Vec::new();
    for (i, (scheme, input, modules)) in groups.iter().enumerate() {
        let format = pack_format(scheme, input.as_ref())?.name();
        formats.push(format);
        // A single scheme is written for the class of the layers, the form that every loader accepts.
        let targets = if groups.len() == 1 { vec!["Linear".to_owned()] } else { modules.clone() };
        let mut weights = args(scheme, Value::Bool(false));
        if by_group && matches!(scheme.format.blocks(), Blocks::Group(_)) {
            weights["actorder"] = json!("group");
        }
        let group = json!({
            "targets": targets,
            "weights": weights,
            "input_activations": input.as_ref().and_then(input_args),
            "output_activations": null,
            "format": format,
        });
        config_groups.insert(format!("group_{i}"), group);
    }
    let first = formats.first().copied().unwrap_or("dense");
    let format = if formats.iter().all(|f| *f == first) { first } else { "mixed-precision" };
    Ok(json!({
        "config_groups": config_groups,
        "format": format,
        "global_compression_ratio": null,
        "ignore": ignore,
        "kv_cache_scheme": null,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": if formats.contains(&PackFormat::Mxfp6Pack.name()) { "0.20.0" } else { "0.18.0" },
    }))
}

/// `QuantizationArgs` of an input, if a server computes that scheme: always by the compressed-tensors rule.
fn input_args(scheme: &Scheme) -> Option<Value> {
    let Format::Affine(Affine { code, blocks, scale: Some(scale), offset }) = &scheme.format else {
        return None;
    };
    let dynamic = scheme.source == Source::Dynamic;
    if *offset != Offset::None {
        let fixed = *blocks == Blocks::Tensor && !dynamic && scale.code == Code::F32;
        let known = *offset == Offset::Zero && *code == Code::Int(8) && scheme.encoder.rule == Rule::Ct;
        return (known && fixed).then(|| args(scheme, Value::Bool(false)));
    }
    let nvfp4 = Scheme::nvfp4(Some(Sense::Divisor));
    if scheme.format == nvfp4.format && scheme.encoder.rule == Rule::Ct {
        // Block scales are computed at run time, below the one stored scale.
        return Some(args(scheme, json!("local")));
    }
    if *blocks == Blocks::Tensor && !dynamic && scale.code == Code::F32 {
        let known = match code {
            Code::Int(8) => scheme.encoder.rule == Rule::Full,
            Code::Float(f) => *f == minifloat::E4M3,
            _ => false,
        };
        return known.then(|| args(scheme, Value::Bool(false)));
    }
    let per_token = *blocks == Blocks::Row && scale.code == Code::F32;
    let known = match code {
        Code::Int(8) => per_token && scheme.encoder.rule == Rule::Full,
        Code::Float(f) if *f == minifloat::E4M3 && per_token => true,
        // DeepSeek's: one scale per token and tile width of columns.
        Code::Float(f)
            if *f == minifloat::E4M3 && matches!(blocks, Blocks::Group(_)) && scale.code == Code::F32 =>
        {
            true
        }
        Code::Float(f) if scale.code == Code::E8m0 => {
            [minifloat::E4M3, minifloat::E2M1].contains(f) && scheme.encoder.rule == Rule::Ct
        }
        _ => false,
    };
    (known && dynamic).then(|| {
        let mut args = args(scheme, Value::Bool(true));
        if per_token {
            args["strategy"] = json!("token");
        }
        args
    })
}

fn args(scheme: &Scheme, dynamic: Value) -> Value {
    let Format::Affine(Affine { code, blocks, scale, offset }) = &scheme.format else { return Value::Null };
    let (strategy, group_size, block_structure) = match blocks {
        Blocks::Tensor => ("tensor", Value::Null, Value::Null),
        Blocks::Group(g) if scheme.has_outer_scale() => ("tensor_group", json!(g), Value::Null),
        Blocks::Group(g) => ("group", json!(g), Value::Null),
        Blocks::Tile { rows, cols } => ("block", Value::Null, json!([rows, cols])),
        _ => ("channel", Value::Null, Value::Null),
    };
    let scale_dtype = match scale {
        Some(ScaleTree { code: Code::E8m0, .. }) => json!("torch.uint8"),
        Some(ScaleTree { outer: Some(_), .. }) => json!("torch.float8_e4m3fn"),
        _ => Value::Null,
    };
    json!({
        "num_bits": code.bits(),
        "type": if matches!(code, Code::Int(_)) { "int" } else { "float" },
        "symmetric": *offset == Offset::None,
        "strategy": strategy,
        "group_size": group_size,
        "block_structure": block_structure,
        "dynamic": dynamic,
        "actorder": null,
        "scale_dtype": scale_dtype,
        "zp_dtype": if *offset == Offset::Zero { json!("torch.int8") } else { Value::Null },
        "observer": null,
        "observer_kwargs": {},
    })
}

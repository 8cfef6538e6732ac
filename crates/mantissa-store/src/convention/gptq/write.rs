//! Codes and scales → tensors of a module, and the `quantization_config` that describes them.

use mantissa_num::format::{Affine, Format, Offset};
use mantissa_num::pack::{Packing, transpose};
use mantissa_num::{Blocks, Code, Codes, Quantized, Scheme, minifloat};
use serde_json::{Map, Value, json};

use crate::convention::{LinearPlan, ModuleGroup, NamedBytes, NotStorable, Storable};
use crate::{Dtype, TensorSpec};

/// File that repeats `quantization_config` for loaders that do not read `config.json`.
pub const FILE_NAME: &str = "quantize_config.json";

/// Settings of the method in `quantization_config`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Settings {
    /// True if some `g_idx` reorders its columns (act-order).
    pub desc_act: bool,
    /// Damping of the Hessian, if the method was GPTQ.
    pub damp: Option<f64>,
    /// True if the head is quantized.
    pub lm_head: bool,
}

/// Bits and columns of a group (`None` for a whole row) of a scheme: integers in groups with one level of scales.
///
/// # Errors
/// [`NotStorable`] for any other scheme, for quantized inputs, and for groups that do not divide a row, which the
/// kernels for these formats require.
pub(crate) fn int_groups(
    container: &str,
    plan: &LinearPlan<'_>,
    widths: &[u32],
) -> Storable<(u32, Option<u32>)> {
    let no = |why: String| Err(NotStorable { scheme: plan.scheme.to_string(), why });
    let list = || widths.iter().map(|bits| format!("int{bits}")).collect::<Vec<_>>().join(", ");
    if plan.input.is_some() {
        return no(format!("{container} cannot store quantized activations"));
    }
    let Format::Affine(Affine {
        code: Code::Int(bits),
        blocks,
        scale: Some(scale),
        offset: Offset::None | Offset::Zero,
    }) = &plan.scheme.format
    else {
        return no(format!("{container} holds {} in groups or by channel", list()));
    };
    let f16 = scale.code == Code::F32 || scale.code == Code::Float(minifloat::F16);
    if !widths.contains(bits) || !f16 || scale.outer.is_some() {
        return no(format!("{container} holds {} with f16 scales", list()));
    }
    match blocks {
        Blocks::Row => Ok((*bits, None)),
        Blocks::Group(group) if plan.cols.is_multiple_of(*group as usize) => Ok((*bits, Some(*group))),
        Blocks::Group(group) => {
            no(format!("{}: {} columns are not a multiple of {group}", plan.module, plan.cols))
        }
        _ => no(format!("{container} holds {} in groups or by channel", list())),
    }
}

/// Tensors of a quantized linear layer.
///
/// # Errors
/// [`NotStorable`] if the format cannot hold the scheme, or not on this shape.
pub fn specs(plan: &LinearPlan<'_>) -> Storable<Vec<TensorSpec>> {
    let (bits, _) = int_groups("gptq", plan, &[2, 3, 4, 8])?;
    let LinearPlan { module, scheme, rows, cols, .. } = *plan;
    for (what, n) in [("columns", cols), ("rows", rows)] {
        if !(n * bits as usize).is_multiple_of(32) {
            let why = format!("{module}: {n} {what} of {bits} bits do not fill 32-bit words");
            return Err(NotStorable { scheme: scheme.to_string(), why });
        }
    }
    let words = |n: usize| n * bits as usize / 32;
    let groups = scheme.format.blocks().count(1, cols);
    let spec = |suffix: &str, dtype, shape| TensorSpec::new(format!("{module}.{suffix}"), dtype, shape);
    Ok(vec![
        spec("qweight", Dtype::I32, vec![words(cols), rows]),
        spec("qzeros", Dtype::I32, vec![groups, words(rows)]),
        spec("scales", Dtype::F16, vec![groups, rows]),
        spec("g_idx", Dtype::I32, vec![cols]),
    ])
}

/// Bytes of the tensors declared by [`specs`], by name. `g_idx` is the group of each column if groups are not
/// adjacent columns; `v2` stores zero points unchanged.
///
/// # Errors
/// [`NotStorable`] if scales are not f16.
pub fn tensors(
    plan: &LinearPlan<'_>,
    q: &Quantized,
    g_idx: Option<&[u32]>,
    v2: bool,
) -> Storable<NamedBytes> {
    let name = |suffix: &str| format!("{}.{suffix}", plan.module);
    let (Codes::U8(codes), Codes::U16(scales)) = (&q.codes, &q.scales.codes) else {
        let why = "gptq and awq store scales in f16".to_owned();
        return Err(NotStorable { scheme: plan.scheme.to_string(), why });
    };
    let packing = Packing::gptq(q.format.code_bits());
    let (groups, size) = (q.format.blocks().count(1, q.cols), q.format.blocks().len(1, q.cols).max(1));
    // In v1 a zero point of 0 would not fit its field; v1 is only written if none is 0.
    let lowered = i32::from(!v2);
    let zeros: Vec<u8> = match q.zeros().is_empty() {
        true => vec![(-lowered) as u8; groups * q.rows],
        false => transpose(q.zeros(), q.rows, groups).iter().map(|z| (z - lowered) as u8).collect(),
    };
    let g_idx: Vec<u8> = match g_idx {
        Some(g_idx) => g_idx.iter().flat_map(|group| group.to_le_bytes()).collect(),
        None => (0..q.cols).flat_map(|column| ((column / size) as u32).to_le_bytes()).collect(),
    };
    Ok(vec![
        (name("qweight"), packing.pack_dim0(&transpose(codes, q.rows, q.cols), q.cols, q.rows)),
        (name("qzeros"), packing.pack(&zeros, q.rows)),
        (name("scales"), Codes::U16(transpose(scales, q.rows, groups)).to_le_bytes()),
        (name("g_idx"), g_idx),
    ])
}

/// `quantization_config` for groups of modules, each with its scheme: the first scheme as the default, and `dynamic`
/// for the others and for the unquantized modules `kept`. Symmetric models are written as v1, which every reader
/// accepts; a zero point of 0 needs v2.
///
/// # Errors
/// [`NotStorable`] if only some schemes have zero points, because one version applies to all tensors.
pub fn quantization_config(groups: &[ModuleGroup], kept: &[String], settings: Settings) -> Storable<Value> {
    let v2 = groups.first().is_some_and(|(scheme, ..)| scheme.format.has_zero());
    if let Some((scheme, ..)) = groups.iter().find(|(scheme, ..)| scheme.format.has_zero() != v2) {
        let why = "gptq stores the zero points of a model in one version: make all layers -asym, or none"
            .to_owned();
        return Err(NotStorable { scheme: scheme.to_string(), why });
    }
    let checkpoint_format = if v2 { "gptq_v2" } else { "gptq" };
    let mut config = json!({
        "quant_method": "gptq",
        "lm_head": settings.lm_head,
        "checkpoint_format": checkpoint_format,
        "pack_dtype": "int32",
        "desc_act": settings.desc_act,
        "true_sequential": true,
        "meta": {"quantizer": [concat!("mantissa:", env!("CARGO_PKG_VERSION"))]},
    });
    let mut dynamic = Map::new();
    for (i, (scheme, _, modules)) in groups.iter().enumerate() {
        let layer = layer(scheme);
        if i == 0 {
            layer.into_iter().for_each(|(key, value)| config[key] = value);
            continue;
        }
        let layer: Map<String, Value> = layer.into_iter().map(|(k, v)| (k.to_owned(), v)).collect();
        dynamic.extend(modules.iter().map(|module| (pattern("+:", module), Value::Object(layer.clone()))));
    }
    dynamic.extend(kept.iter().map(|module| (pattern("-:", module), json!({}))));
    if !dynamic.is_empty() {
        config["dynamic"] = Value::Object(dynamic);
    }
    if let Some(damp) = settings.damp {
        config["damp_percent"] = json!(damp);
    }
    Ok(config)
}

fn layer(scheme: &Scheme) -> [(&'static str, Value); 3] {
    let group = match scheme.format.blocks() {
        Blocks::Group(group) => json!(group),
        _ => json!(-1),
    };
    [
        ("bits", json!(scheme.format.code_bits())),
        ("group_size", group),
        ("sym", json!(!scheme.format.has_zero())),
    ]
}

fn pattern(prefix: &str, module: &str) -> String {
    format!("{prefix}{}$", regex::escape(module))
}

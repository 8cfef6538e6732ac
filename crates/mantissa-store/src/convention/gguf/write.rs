//! Linear layers in GGUF, and the metadata of a model.

use crate::convention::{LinearPlan, NamedBytes, NotStorable, Storable};
use crate::gguf::{GgmlType, Storage, Value};
use crate::{Dtype, TensorSpec};
use mantissa_arch::gguf::Architecture;
use mantissa_arch::gguf::place;
use mantissa_num::{
    Affine, Blocks, Code, CodecId, Codes, Format, Offset, Quantized, Rounding, ScaleTree, Scheme, Sense,
    minifloat,
};

/// GGUF type that holds `format` without loss, if any.
pub fn block_type(format: &Format) -> Option<GgmlType> {
    match format {
        Format::Codec(id) => GgmlType::of_codec(*id),
        Format::Affine(Affine { code: Code::F32, scale: None, .. }) => Some(GgmlType::F32),
        Format::Affine(Affine { code: Code::Float(minifloat::F16), scale: None, .. }) => Some(GgmlType::F16),
        Format::Affine(Affine { code: Code::Float(minifloat::BF16), scale: None, .. }) => {
            Some(GgmlType::BF16)
        }
        Format::Affine(Affine {
            code: Code::Float(minifloat::E2M1),
            blocks: Blocks::Group(32),
            scale: Some(ScaleTree { code: Code::E8m0, outer: None, .. }),
            offset: Offset::None,
        }) => Some(GgmlType::MXFP4),
        Format::Affine(Affine {
            code: Code::Float(minifloat::E2M1),
            blocks: Blocks::Group(16),
            scale: Some(scale),
            offset: Offset::None,
        }) if scale.code == Code::Float(minifloat::E4M3) => Some(GgmlType::NVFP4),
        format if is_ternary(format) => Some(GgmlType::TQ2_0),
        _ => None,
    }
}

/// True if a factor is stored beside a tensor of `format`: for NVFP4 with a global scale, and for ternary weights.
pub fn has_factor(format: &Format) -> bool {
    is_ternary(format) || format.scale().is_some_and(|scale| scale.outer.is_some())
}

/// Ternary codes with one scale.
fn is_ternary(format: &Format) -> bool {
    *format == Scheme::ternary(Blocks::Tensor).format
}

/// Tensors of a linear layer: its weight, and its factor if it has one.
///
/// # Errors
/// [`NotStorable`] if GGUF has no type for the scheme, its blocks do not divide a row, or the input is quantized.
pub fn specs(plan: &LinearPlan<'_>) -> Storable<Vec<TensorSpec>> {
    let ty = stored_type(plan)?;
    let name = stored(plan, "weight")?;
    let (dtype, cols) = match ty.storage {
        Storage::Plain(dtype) => (dtype, plan.cols),
        _ => (Dtype::U8, ty.row_bytes(plan.cols).unwrap_or(0)),
    };
    let mut specs = vec![TensorSpec::new(name, dtype, [plan.rows, cols])];
    if has_factor(&plan.scheme.format) {
        specs.push(TensorSpec::new(stored(plan, "scale")?, Dtype::F32, [1]));
    }
    Ok(specs)
}

/// Bytes of the tensors declared by [`specs`], rows in the order of `q`.
///
/// # Errors
/// As [`specs`].
pub fn tensors(plan: &LinearPlan<'_>, q: &Quantized) -> Storable<NamedBytes> {
    let ty = stored_type(plan)?;
    let bytes = match (ty, &q.codes) {
        (_, Codes::Packed(bytes)) => bytes.clone(),
        (GgmlType::MXFP4, Codes::U8(codes)) => blocks(codes, &q.scales.codes, 32, 1),
        (GgmlType::NVFP4, Codes::U8(codes)) => blocks(codes, &q.scales.codes, 16, 4),
        (GgmlType::TQ2_0, Codes::U8(codes)) => trits(codes),
        (_, codes) => codes.to_le_bytes(),
    };
    let mut all = vec![(stored(plan, "weight")?, bytes)];
    let factor = match (&q.format, q.outer()) {
        (format, Some(outer)) => Some(factor(format, outer)),
        (format, None) if is_ternary(format) && q.scales.len() == 1 => Some(f32::from_bits(q.scales.get(0))),
        _ => None,
    };
    if let Some(factor) = factor {
        all.push((stored(plan, "scale")?, factor.to_le_bytes().to_vec()));
    }
    Ok(all)
}

/// TQ2_0 blocks with scale 1, or 0 if all codes are 0.
fn trits(codes: &[u8]) -> Vec<u8> {
    let codec = CodecId::Tq2_0.codec();
    let values: Vec<f32> = codes.iter().map(|&code| f32::from(code as i8)).collect();
    let mut blocks = vec![0; codes.len() / codec.elements * codec.bytes];
    codec.encode(&values, None, &mut blocks);
    blocks
}

fn stored_type(plan: &LinearPlan<'_>) -> Storable<GgmlType> {
    let refuse = |why: String| NotStorable { scheme: plan.scheme.to_string(), why };
    if plan.input.is_some() {
        return Err(refuse("GGUF has no quantization of inputs".to_owned()));
    }
    let Some(ty) = block_type(&plan.scheme.format) else {
        return Err(refuse("GGUF has no type for it".to_owned()));
    };
    if plan.scheme.encoder.rounding != Rounding::NearestEven && plan.scheme.format.codec().is_some() {
        return Err(refuse("blocks are rounded to nearest only".to_owned()));
    }
    let block = ty.block().0;
    if !plan.cols.is_multiple_of(block) {
        return Err(refuse(format!("{}: rows of {} are not multiples of {block}", plan.module, plan.cols)));
    }
    Ok(ty)
}

fn stored(plan: &LinearPlan<'_>, part: &str) -> Storable<String> {
    // A module without a name asks only about the scheme.
    let name = if plan.module.is_empty() {
        Some(String::new())
    } else {
        place(&format!("{}.weight", plan.module)).map(|place| place.tensor)
    };
    let why = || format!("{}: GGUF has no name for it", plan.module);
    let name = name.ok_or_else(|| NotStorable { scheme: plan.scheme.to_string(), why: why() })?;
    Ok(format!("{}.{part}", name.trim_end_matches(".weight")))
}

/// Blocks of `scales` scale bytes and half-split nibbles of `group` elements each.
fn blocks(codes: &[u8], stored: &Codes, group: usize, scales: usize) -> Vec<u8> {
    let half = group / 2;
    let mut out = Vec::with_capacity(codes.len() / 2 + stored.len());
    for (block, codes) in codes.chunks_exact(group * scales).enumerate() {
        out.extend((0..scales).map(|i| stored.get(block * scales + i) as u8));
        for codes in codes.chunks_exact(group) {
            out.extend((0..half).map(|j| codes[j] & 15 | codes[j + half] << 4));
        }
    }
    out
}

/// Global scale as the factor that GGUF stores.
fn factor(format: &Format, outer: f32) -> f32 {
    match format.scale().and_then(ScaleTree::tensor_wide).map(|tree| tree.sense) {
        Some(Sense::Divisor) => 1.0 / outer,
        Some(Sense::Amax { full_scale }) => outer / full_scale as f32,
        _ => outer,
    }
}

/// Metadata that describes the model, without tokenizer, rope scaling and keys of single architectures. `file_type`
/// is llama.cpp's number for its mixture of types; `quantized` is true if any weight is block-quantized.
pub fn metadata(
    architecture: &Architecture,
    name: Option<&str>,
    sizes: &Sizes,
    file_type: Option<u32>,
    quantized: bool,
) -> Vec<(String, Value)> {
    let a = architecture.name;
    let u32_of = |n: usize| Value::U32(u32::try_from(n).unwrap_or(u32::MAX));
    let mut all = vec![("general.architecture".to_owned(), Value::String(a.to_owned()))];
    all.push(("general.type".to_owned(), Value::String("model".to_owned())));
    all.extend(name.map(|name| ("general.name".to_owned(), Value::String(name.to_owned()))));
    all.extend(file_type.map(|number| ("general.file_type".to_owned(), Value::U32(number))));
    if quantized {
        all.push(("general.quantization_version".to_owned(), Value::U32(2)));
    }
    let rotated = sizes.rotated > 0;
    for (key, value) in [
        ("block_count", u32_of(sizes.layers)),
        ("context_length", u32_of(sizes.context)),
        ("embedding_length", u32_of(sizes.hidden)),
        ("feed_forward_length", u32_of(sizes.ffn)),
        ("attention.head_count", u32_of(sizes.heads)),
        ("attention.head_count_kv", u32_of(sizes.kv_heads)),
        (architecture.epsilon_key(), Value::F32(sizes.eps)),
        ("attention.key_length", u32_of(sizes.head_dim)),
        ("attention.value_length", u32_of(sizes.value_dim)),
        ("rope.dimension_count", u32_of(sizes.rotated)),
        ("rope.freq_base", Value::F32(sizes.rope_theta)),
        ("vocab_size", u32_of(sizes.vocab)),
    ] {
        let is_head_key =
            sizes.heads == 0 && ["head_count_kv", "length"].iter().any(|end| key.ends_with(end));
        if (rotated || !key.starts_with("rope.")) && !(is_head_key && key.starts_with("attention.")) {
            all.push((format!("{a}.{key}"), value));
        }
    }
    all
}

/// The sizes that [`metadata`] states.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs)] // As the keys of the format.
pub struct Sizes {
    pub layers: usize,
    pub context: usize,
    pub hidden: usize,
    pub ffn: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub value_dim: usize,
    pub rotated: usize,
    pub vocab: usize,
    pub eps: f32,
    pub rope_theta: f32,
}

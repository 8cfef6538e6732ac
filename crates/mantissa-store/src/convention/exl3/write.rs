//! Trellis codes → tensors of a module, and the two configurations that describe them.

use std::collections::BTreeMap;

use mantissa_num::trellis::{TILE, Trellis, TrellisBook};
use mantissa_num::{Format, Quantized, Scheme};
use serde_json::{Map, Value, json};

use super::{QUANT_METHOD, ROTATED};
use crate::convention::{LinearPlan, NamedBytes, NotStorable, Storable};
use crate::{Dtype, TensorSpec};

/// Version of the format that is written.
const VERSION: &str = "0.0.6";

/// File beside `config.json` that lists the stored tensors of each module.
pub const FILE_NAME: &str = "quantization_config.json";

/// Trellis of a layer, if this format holds it.
fn layout(plan: &LinearPlan<'_>) -> Storable<Trellis> {
    let LinearPlan { module, scheme, rows, cols, .. } = *plan;
    let no = |why: String| Err(NotStorable { scheme: scheme.to_string(), why });
    let Format::Trellis(trellis) = scheme.format else {
        return no("exl3 holds trellis1 to trellis8".to_owned());
    };
    if plan.input.is_some() {
        return no("exl3 cannot store quantized activations".to_owned());
    }
    if !trellis.channels {
        return no("exl3 stores a scale of each input and output: -channel".to_owned());
    }
    if trellis.whole_bits().is_none() && trellis.book != TrellisBook::Mul1 {
        return no("exl3 has codes of half bits with mul1 alone".to_owned());
    }
    if !rows.is_multiple_of(ROTATED) || !cols.is_multiple_of(ROTATED) {
        return no(format!("{module}: [{rows}, {cols}] are not multiples of {ROTATED}"));
    }
    Ok(trellis)
}

/// Name of the scalar tensor that selects the code book; `None` if its absence does.
fn marker(book: TrellisBook) -> Option<&'static str> {
    (book != TrellisBook::ThreeInst).then(|| book.name())
}

/// Tensors of a quantized linear layer.
///
/// # Errors
/// [`NotStorable`] if the format cannot hold the scheme, or not on this shape.
pub fn specs(plan: &LinearPlan<'_>) -> Storable<Vec<TensorSpec>> {
    let trellis = layout(plan)?;
    let (rows, cols) = (plan.rows, plan.cols);
    let spec =
        |suffix: &str, dtype, shape| TensorSpec::new(format!("{}.{suffix}", plan.module), dtype, shape);
    let tiles = vec![cols / TILE, rows / TILE, trellis.half_bits() * TILE / 2];
    let mut all = vec![
        spec("suh", Dtype::F16, vec![cols]),
        spec("svh", Dtype::F16, vec![rows]),
        spec("trellis", Dtype::I16, tiles),
    ];
    all.extend(marker(trellis.book).map(|name| spec(name, Dtype::I32, Vec::new())));
    Ok(all)
}

/// Bytes of the tensors declared by [`specs`], by name.
///
/// # Errors
/// As [`specs`].
pub fn tensors(plan: &LinearPlan<'_>, q: &Quantized) -> Storable<NamedBytes> {
    let trellis = layout(plan)?;
    let mut inputs = q.scales.to_le_bytes();
    let outputs = inputs.split_off((2 * q.cols).min(inputs.len()));
    let multiplier = trellis.book.multiplier().to_le_bytes().to_vec();
    let bytes = [inputs, outputs, q.codes.to_le_bytes(), multiplier];
    Ok(specs(plan)?.into_iter().map(|spec| spec.name).zip(bytes).collect())
}

/// `quantization_config` for layers of `bits` bits per code on average and the first layer's code book.
pub fn quantization_config(bits: f64, first: &Scheme) -> Value {
    let book = first.format.trellis().map_or("", |trellis| trellis.book.name());
    json!({
        "quant_method": QUANT_METHOD,
        "version": VERSION,
        "bits": bits,
        "head_bits": 16,
        "out_scales": "always",
        "codebook": book,
    })
}

/// Content of [`FILE_NAME`]: `config`, the `quantization_config`, and the tensors of each module. `specs` are all
/// tensors of the model.
pub fn tensor_storage(config: &Value, specs: &[TensorSpec]) -> Value {
    let mut modules: BTreeMap<&str, Vec<&TensorSpec>> = BTreeMap::new();
    for spec in specs {
        let (module, _) = spec.name.rsplit_once('.').unwrap_or((&spec.name, ""));
        modules.entry(module).or_default().push(spec);
    }
    let mut storage = Map::new();
    for (module, specs) in modules {
        let stored: Map<String, Value> = specs.iter().map(|spec| (spec.name.clone(), stored(spec))).collect();
        let mut fields = json!({ "stored_tensors": stored });
        let suffix = |suffix: &str| specs.iter().find(|spec| spec.name.strip_prefix(module) == Some(suffix));
        if let Some(width) = suffix(".trellis").and_then(|spec| spec.shape.last()) {
            fields["quant_format"] = json!(QUANT_METHOD);
            fields["bits_per_weight"] = match width.is_multiple_of(TILE) {
                true => json!(width / TILE),
                false => json!(*width as f64 / TILE as f64),
            };
            for (book, name) in TrellisBook::NAMES {
                if marker(book).is_some_and(|marker| suffix(&format!(".{marker}")).is_some()) {
                    fields[format!("{name}_multiplier")] = json!(book.multiplier());
                }
            }
        }
        storage.insert(module.to_owned(), fields);
    }
    let mut content = config.clone();
    content["tensor_storage"] = Value::Object(storage);
    content
}

/// A tensor as PyTorch describes it.
fn stored(spec: &TensorSpec) -> Value {
    let dtype = match spec.dtype {
        Dtype::F16 => "torch.float16",
        Dtype::BF16 => "torch.bfloat16",
        Dtype::I16 => "torch.int16",
        Dtype::I32 => "torch.int32",
        _ => "torch.float32",
    };
    let bytes = spec.shape.iter().map(|&n| n as u64).product::<u64>() * spec.dtype.bits() / 8;
    json!({ "shape": spec.shape, "n_bytes": bytes, "dtype": dtype })
}

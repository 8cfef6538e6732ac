//! Models that are not dense safetensors as sources: unquantized GGUF files, and quantized models, dequantized.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use mantissa_model::{LinearInfo, LinearKind, ModelConfig, Role, StoredAs, TensorInfo, load_config};
use mantissa_num::pack::transpose;
use mantissa_store::convention::gguf::DenseTensor;
use mantissa_store::convention::{ComputedTensor, ModelFiles, Weight};
use mantissa_store::{Dtype, TensorMeta};
use serde_json::Value;

use crate::error::{QuantError, Result};
use crate::gguf::linear_of;
use crate::unused;
use crate::values::{values_of, weight_of};

/// Presents an unquantized GGUF model as a dense checkpoint, which jobs read like a folder: the same tensor names, the
/// same order of rows. Other models are returned unchanged.
///
/// Tensors that the file has in parts, or with columns in another order, are put together when they are read, in F32.
///
/// # Errors
/// A tensor is missing or has another shape.
pub fn dense_source(files: ModelFiles) -> Result<ModelFiles> {
    let Some(model) = files.gguf().filter(|_| !files.is_quantized()) else { return Ok(files) };
    let config = load_config(&files)?;
    let (whole, apart): (Vec<_>, Vec<_>) =
        config.tensors().into_iter().partition(|info| model.is_whole(&info.name));
    let whole: Vec<DenseTensor> = whole
        .into_iter()
        .map(|info| {
            let transposed =
                linear_of(&config, &info).is_some_and(|linear| linear.stored == StoredAs::Columns);
            DenseTensor { name: info.name, shape: info.shape, transposed }
        })
        .collect();
    if apart.is_empty() {
        return Ok(files.into_dense(&whole)?);
    }
    for info in &apart {
        match fused_layer(info) {
            Some(_) => experts_of(&config, info).try_for_each(|linear| {
                files.check_tensor(&format!("{}.weight", linear.module), &[linear.rows, linear.cols])
            })?,
            None => files.check_tensor(&info.name, &info.shape)?,
        }
    }
    let again = ModelFiles::open(files.dir())?.into_dense(&whole)?;
    let (files, linears) = (Arc::new(files), linears_by_tensor(&config));
    let mut computed = Vec::new();
    for info in apart {
        computed.extend(put_together(&files, &config, &linears, info));
    }
    let (fields, notes) = (again.config().cloned().unwrap_or_default(), again.notes());
    Ok(again.with_computed(|_| true, computed, fields, notes))
}

/// Tensors in F32 that hold the values of `info`: one, or one for each expert.
fn put_together(
    files: &Arc<ModelFiles>,
    config: &ModelConfig,
    linears: &BTreeMap<String, LinearInfo>,
    info: TensorInfo,
) -> Vec<ComputedTensor> {
    match linears.get(&info.name) {
        // Experts that are fused become dense one by one.
        None if fused_layer(&info).is_some() => {
            experts_of(config, &info).map(|linear| dequantized(files, &linear)).collect()
        }
        Some(linear) => vec![decoded(files, linear.clone(), info)],
        None => match side_linear(config, &info) {
            Some(linear) if files.gguf().is_none() => vec![decoded(files, linear, info)],
            _ => vec![read(files, info)],
        },
    }
}

/// Presents any model as a dense checkpoint: an unquantized GGUF file as [`dense_source`] does, a quantized model with
/// its weights dequantized to F32 one by one as they are read. Unquantized tensors keep their bytes. Dense models are
/// returned unchanged.
///
/// The quantization of inputs and of the KV cache is not part of the weights and is left out; a note says so.
///
/// # Errors
/// As [`dense_source`].
pub fn dequantized_source(files: ModelFiles) -> Result<ModelFiles> {
    if !files.is_quantized() {
        return dense_source(files);
    }
    let config = load_config(&files)?;
    let mut notes = dequantized_notes(&files);
    let presented = without_quantization(files.config());
    let again = ModelFiles::open(files.dir())?;
    let files = Arc::new(files);
    let stored =
        |name: &str| files.gguf().is_none() && files.checkpoint().get(name).is_some() && files.is_dense(name);
    let linears = linears_by_tensor(&config);
    let (mut kept, mut computed) = (BTreeSet::new(), Vec::new());
    for info in config.tensors() {
        if stored(&info.name) && !is_apart(&files, &config, &info) {
            kept.insert(info.name);
        } else {
            computed.extend(put_together(&files, &config, &linears, info));
        }
    }
    if files.gguf().is_none() {
        notes.extend(other_parts(&files, &config, &mut kept, &mut computed));
    }
    Ok(again.with_computed(|name| kept.contains(name), computed, presented, notes))
}

/// Presents a folder with a quantized embedding or head as [`dequantized_source`] does: a conversion that rounds the layers again
/// decodes both. Other models are returned unchanged.
///
/// # Errors
/// As [`dequantized_source`].
pub fn decoded_tables_source(files: ModelFiles) -> Result<ModelFiles> {
    if files.gguf().is_some() || !files.is_quantized() {
        return Ok(files);
    }
    let config = load_config(&files)?;
    let stored = |module: &str| !files.is_dense(&format!("{module}.weight"));
    for table in config.tables().into_iter().filter(|table| stored(&table.module)) {
        if matches!(weight_of(&files, &table)?.weight, Weight::Quantized(_)) {
            return dequantized_source(files);
        }
    }
    Ok(files)
}

/// Adds the tensors that the text model does not use: those in floats or integers as they are, quantized weights with
/// one code per element dequantized. Returns a note on other quantized weights, which are left out.
fn other_parts(
    files: &Arc<ModelFiles>,
    config: &ModelConfig,
    kept: &mut BTreeSet<String>,
    computed: &mut Vec<ComputedTensor>,
) -> Option<String> {
    let parts: Vec<&TensorMeta> = unused::tensors(files, config).collect();
    let suffixes: Vec<&str> = files.code_suffixes().collect();
    let coded = |meta: &&TensorMeta| {
        let (module, suffix) = meta.name.rsplit_once('.')?;
        let codes = suffixes.contains(&suffix) || (suffix == "weight" && is_codes(meta));
        codes.then(|| module.to_owned())
    };
    let modules: BTreeSet<String> = parts.iter().filter_map(coded).collect();
    let owner = |name: &str| {
        let dots = name.match_indices('.').map(|(at, _)| at);
        let module = dots.into_iter().find(|at| modules.contains(&name[..*at]))?;
        Some(name[..module].to_owned()).filter(|_| name[module..] != *".bias")
    };
    let mut left = BTreeSet::new();
    for meta in &parts {
        let Some(module) = owner(&meta.name) else {
            kept.insert(meta.name.clone());
            continue;
        };
        match *meta.shape.as_slice() {
            [rows, cols] if meta.name == format!("{module}.weight") && is_codes(meta) => {
                let (rows, cols) = files.coded_shape(&module).unwrap_or((rows, cols));
                let (layer, kind, bias) = (config.num_hidden_layers, LinearKind::Head, false);
                let linear = LinearInfo { module, layer, kind, rows, cols, bias, stored: StoredAs::Rows };
                computed.push(dequantized(files, &linear));
            }
            _ if files.checkpoint().get(&format!("{module}.weight")).is_none() => drop(left.insert(module)),
            _ => {}
        }
    }
    let first = left.first()?;
    Some(format!(
        "{} quantized modules that the text model does not use are left out (first: {first}): nothing states their shapes",
        left.len()
    ))
}

/// True if a tensor holds codes of at least one per byte: no floats of 16 bits or more.
fn is_codes(meta: &TensorMeta) -> bool {
    meta.shape.len() == 2 && matches!(meta.dtype, Dtype::F8E4M3 | Dtype::F8E5M2 | Dtype::I8 | Dtype::U8)
}

/// Small projection as a linear layer, for sources that quantize it.
fn side_linear(config: &ModelConfig, info: &TensorInfo) -> Option<LinearInfo> {
    let (Role::Side { layer, kind }, [rows, cols]) = (&info.role, info.shape.as_slice()) else { return None };
    let module = config.side_module(*layer, *kind);
    let (layer, kind, stored) = (*layer, LinearKind::Head, StoredAs::Rows);
    Some(LinearInfo { module, layer, kind, rows: *rows, cols: *cols, bias: false, stored })
}

/// Linear layers, embedding and head by the names of their weights.
fn linears_by_tensor(config: &ModelConfig) -> BTreeMap<String, LinearInfo> {
    let all = config.decoder_linears().chain(config.tables());
    all.map(|info| (format!("{}.weight", info.module), info)).collect()
}

/// Bytes of the tensors of a dequantized source that are held at once: two that were read, and one in F32 and in bytes
/// while it is dequantized. 0 for other sources.
pub(crate) fn dequantizing_bytes(source: &ModelFiles) -> u64 {
    let largest = || source.checkpoint().tensors().map(|meta| meta.len).max().unwrap_or(0);
    source.dequantized_from().map_or(0, |_| largest().saturating_mul(4))
}

/// Weight that is dequantized when it is read.
fn decoded(files: &Arc<ModelFiles>, linear: LinearInfo, info: TensorInfo) -> ComputedTensor {
    let files = Arc::clone(files);
    let values = move || {
        let decode = || values_of(&linear, weight_of(&files, &linear)?);
        let ordered = |values: Vec<f32>| match linear.stored {
            // A dense checkpoint has the columns first.
            StoredAs::Columns => transpose(&values, linear.rows, linear.cols),
            _ => values,
        };
        decode().map(ordered).map_err(|error| match error {
            QuantError::Store(error) => error,
            other => mantissa_store::Error::field(
                files.dir(),
                &linear.module,
                other.to_string(),
                "a weight that can be dequantized",
                "",
            ),
        })
    };
    ComputedTensor { name: info.name, shape: info.shape, values: Box::new(values) }
}

/// Layer of a tensor that holds the weights of all its experts.
fn fused_layer(info: &TensorInfo) -> Option<usize> {
    match info.role {
        Role::Stacked { layer } if !info.name.ends_with("_bias") => Some(layer),
        _ => None,
    }
}

/// Experts whose weights dense checkpoints store in the tensor `info`.
fn experts_of(config: &ModelConfig, info: &TensorInfo) -> impl Iterator<Item = LinearInfo> {
    let linears = fused_layer(info).map(|layer| config.layer_linears(layer)).unwrap_or_default();
    linears.into_iter().filter(|linear| linear.dense_tensor().0 == info.name)
}

/// True if some experts of the fused tensor `info` have tensors of their own in the files.
fn is_apart(files: &ModelFiles, config: &ModelConfig, info: &TensorInfo) -> bool {
    experts_of(config, info).any(|linear| linear.is_by_rows(files))
}

/// Weight that is dequantized into a tensor `[rows, cols]` of its own when it is read.
fn dequantized(files: &Arc<ModelFiles>, linear: &LinearInfo) -> ComputedTensor {
    let (layer, kind) = (linear.layer, linear.kind);
    let (name, shape) = (format!("{}.weight", linear.module), vec![linear.rows, linear.cols]);
    decoded(files, linear.clone(), TensorInfo { name, shape, role: Role::Linear { layer, kind } })
}

/// Unquantized tensor that the format stores under another name or in another order.
fn read(files: &Arc<ModelFiles>, info: TensorInfo) -> ComputedTensor {
    let files = Arc::clone(files);
    let (name, shape) = (info.name.clone(), info.shape.clone());
    let values = move || files.tensor_f32(&name, &shape);
    ComputedTensor { name: info.name, shape: info.shape, values: Box::new(values) }
}

fn dequantized_notes(files: &ModelFiles) -> Vec<String> {
    let mut notes = files.notes();
    notes.push(format!(
        "the source is quantized ({}): its dequantized weights are the reference, without its quantization of inputs and KV cache; they are f32, and so are scales that have the dtype of the weights",
        files.convention_name()
    ));
    notes
}

/// Configuration without the descriptions of a quantization.
fn without_quantization(config: Option<&Value>) -> Value {
    let mut config = config.cloned().unwrap_or_default();
    if let Value::Object(fields) = &mut config {
        fields.remove("quantization_config");
        fields.remove("quantization");
    }
    config
}

//! Inventory of logical tensors: a quantized weight with its codes, scales and zero points is one entry.
//!
//! Names and `config.json` decide which tensors belong together. Schemes are determined by reading one weight
//! of each kind, so that a large model is not read whole.

use std::collections::{BTreeMap, HashMap, HashSet};

use mantissa_model::{ModelConfig, StoredAs};
use mantissa_num::pack::Packing;
use mantissa_num::{Format, Scheme};
use mantissa_store::Shown;
use mantissa_store::convention::compressed_tensors::{Args, Config};
use mantissa_store::convention::{ModelFiles, ShapeSource, Weight, gguf, gpt_oss, gptq, native};
use mantissa_store::gguf::GgufTensor;
use mantissa_store::{Checkpoint, Dtype, TensorMeta};
use serde::Serialize;

use super::experts::Experts;
use super::model::Model;
use crate::error::Result;

/// Logical tensor: a stored tensor, or a quantized weight with its side tensors.
#[derive(Serialize)]
pub struct Entry {
    /// Tensor name; for a quantized weight, the name of the dense weight.
    pub name: String,
    /// Dtype of the tensor or of the codes.
    pub dtype: &'static str,
    /// Logical shape.
    pub shape: Vec<usize>,
    /// Bytes of all stored tensors of the entry.
    pub bytes: u64,
    /// Number of logical weights.
    pub parameters: u64,
    /// Scheme of a quantized weight.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scheme: Option<String>,
    /// Scheme of the layer's input, if the checkpoint has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub input_scheme: Option<String>,
    /// Layer to read, if quantized.
    #[serde(skip)]
    pub quantized: Option<Quantized>,
    /// Experts to read one at a time, if stacked.
    #[serde(skip)]
    pub experts: Option<Experts>,
}

/// Quantized linear layer.
#[derive(Clone)]
pub struct Quantized {
    /// Module name.
    pub module: String,
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
}

/// All entries in file order.
pub struct Inventory {
    /// The entries.
    pub entries: Vec<Entry>,
}

/// Suffixes of a quantized module's tensors in compressed-tensors, after `MODULE.weight`.
const CT_PARTS: [&str; 7] = ["", "_packed", "_scale", "_zero_point", "_global_scale", "_shape", "_g_idx"];

/// Suffixes of compressed-tensors' activation and cache scales, which are not weights.
const CT_RUN_TIME: [&str; 7] = [
    ".input_scale",
    ".input_zero_point",
    ".input_global_scale",
    ".output_scale",
    ".k_scale",
    ".v_scale",
    ".q_scale",
];

impl Inventory {
    /// Reads headers, and one weight of each kind of quantized layer.
    ///
    /// # Errors
    /// A quantized weight is malformed.
    pub fn read(model: &Model, config: Option<&ModelConfig>, warnings: &mut Vec<String>) -> Result<Self> {
        if let Model::Known(files) = model
            && let Some(gguf) = files.gguf()
        {
            let own = |name: &str| gguf.architecture().is_some_and(|found| found.is_own_scale(name));
            // Keys and values that no layer reads are not parameters of the model.
            let unread = config.map(ModelConfig::unread).unwrap_or_default();
            let unread: HashSet<String> =
                unread.iter().filter_map(|(name, _)| Some(gguf.place(name)?.tensor)).collect();
            let entry = |tensor: &GgufTensor| {
                let entry = of_gguf(tensor, own(&tensor.name));
                let parameters = if unread.contains(&tensor.name) { 0 } else { entry.parameters };
                Entry { parameters, ..entry }
            };
            return Ok(Inventory { entries: gguf.tensors().iter().map(entry).collect() });
        }
        let checkpoint = model.checkpoint();
        let quantized = match model {
            Model::Raw(_) => HashMap::new(),
            Model::Known(files) => quantized_weights(files, config, warnings)?,
        };
        let run_time = matches!(model, Model::Known(files) if files.as_convention::<Config>().is_some());
        let parts: HashSet<String> = quantized
            .iter()
            .flat_map(|(codes, weight)| weight.parts.iter().filter(move |p| *p != codes))
            .cloned()
            .collect();
        let mut entries = Vec::new();
        for meta in checkpoint.tensors() {
            if let Some(weight) = quantized.get(&meta.name) {
                entries.push(weight.entry(checkpoint, meta));
            } else if !parts.contains(&meta.name) {
                let counts = !(run_time && CT_RUN_TIME.iter().any(|end| meta.name.ends_with(end)));
                entries.push(stored(meta, counts));
            }
        }
        Ok(Inventory { entries })
    }
}

/// Finds the quantized weights, by the names of their codes.
fn quantized_weights(
    files: &ModelFiles,
    config: Option<&ModelConfig>,
    warnings: &mut Vec<String>,
) -> Result<HashMap<String, Found>> {
    let config = config.filter(|_| files.is_quantized());
    match (files.shapes(), config) {
        (ShapeSource::Recorded, _) => compressed(files, warnings),
        (ShapeSource::Metadata, _) => native_weights(files),
        (ShapeSource::Codes, _) => coded_weights(files),
        (ShapeSource::Words, _) => word_weights(files),
        (ShapeSource::Stacked, Some(config)) => Ok(stacked_weights(files, config, warnings)),
        (ShapeSource::Architecture, Some(config)) => Ok(by_architecture(files, config, warnings)),
        (_, None) => Ok(HashMap::new()),
    }
}

/// Makes the entry of a GGUF tensor under its GGUF name. Scale factors and RoPE factors (`rope_freqs`,
/// `rope_factors_long`) are not counted as weights: other formats keep them in the config. `own` is true for vectors of the
/// model that have the name of a factor.
fn of_gguf(tensor: &GgufTensor, own: bool) -> Entry {
    let hf_name = gguf::hf_name(&tensor.name);
    let beside = !own && [".scale", ".input_scale"].iter().any(|end| tensor.name.ends_with(end));
    let factor = beside || ["rope_freqs.", "rope_factors_"].iter().any(|of| tensor.name.starts_with(of));
    let module = hf_name.as_deref().and_then(|name| name.strip_suffix(".weight"));
    let codec = tensor.ty.codec();
    let quantized = match (module, &tensor.shape[..], codec) {
        (Some(module), &[rows, cols], Some(_)) => Some(Quantized { module: module.into(), rows, cols }),
        _ => None,
    };
    Entry {
        name: tensor.name.clone(),
        dtype: tensor.ty.name,
        shape: tensor.shape.clone(),
        bytes: tensor.len,
        parameters: if factor { 0 } else { tensor.numel() },
        scheme: codec.map(|codec| codec.name.to_owned()),
        input_scheme: None,
        quantized,
        experts: Experts::of_gguf(tensor),
    }
}

fn stored(meta: &TensorMeta, counts: bool) -> Entry {
    Entry {
        name: meta.name.clone(),
        dtype: meta.dtype.name(),
        shape: meta.shape.clone(),
        bytes: meta.len,
        parameters: if counts { meta.numel() } else { 0 },
        scheme: None,
        input_scheme: None,
        quantized: None,
        experts: None,
    }
}

/// Scheme of a weight and of the layer's input.
type Schemes = (String, Option<String>);

/// Quantized weight, keyed by the name of its codes.
struct Found {
    name: String,
    shape: Vec<usize>,
    /// Layer to read; `None` for stacked `experts`.
    layer: Option<Quantized>,
    experts: Option<Experts>,
    scheme: String,
    input_scheme: Option<String>,
    parts: Vec<String>,
}

impl Found {
    fn of(layer: Quantized, name: String, (scheme, input_scheme): Schemes, parts: Vec<String>) -> Self {
        let shape = vec![layer.rows, layer.cols];
        Found { name, shape, layer: Some(layer), experts: None, scheme, input_scheme, parts }
    }

    fn entry(&self, checkpoint: &Checkpoint, codes: &TensorMeta) -> Entry {
        Entry {
            name: self.name.clone(),
            dtype: codes.dtype.name(),
            shape: self.shape.clone(),
            bytes: self.parts.iter().filter_map(|part| checkpoint.get(part)).map(|meta| meta.len).sum(),
            parameters: self.shape.iter().fold(1, |n: u64, &size| n.saturating_mul(size as u64)),
            scheme: Some(self.scheme.clone()),
            input_scheme: self.input_scheme.clone(),
            quantized: self.layer.clone(),
            experts: self.experts.clone(),
        }
    }
}

fn native_weights(files: &ModelFiles) -> Result<HashMap<String, Found>> {
    let checkpoint = files.checkpoint();
    let mut all = HashMap::new();
    for meta in checkpoint.tensors() {
        let Some((n, module)) =
            meta.name.strip_suffix(".packed").and_then(|n| Some((n, n.strip_suffix(".weight")?)))
        else {
            continue;
        };
        let Some((scheme, rows, cols)) = native_metadata(checkpoint, &meta.name, n) else { continue };
        let scales = native::scale_specs(n, &scheme.format, rows, cols).into_iter().map(|spec| spec.name);
        let outliers = native::OUTLIER_PARTS.map(|part| format!("{n}.{part}"));
        let outliers = outliers.into_iter().filter(|name| checkpoint.get(name).is_some());
        let parts = scales.chain([format!("{n}.packed")]).chain(outliers).collect();
        let scheme = scheme.to_string();
        let layer = Quantized { module: module.into(), rows, cols };
        all.insert(meta.name.clone(), Found::of(layer, n.into(), (scheme, None), parts));
    }
    Ok(all)
}

/// Returns scheme and shape of weight `n` from the file's metadata, if the size of its codes confirms them.
fn native_metadata(checkpoint: &Checkpoint, packed: &str, n: &str) -> Option<(Scheme, usize, usize)> {
    let (file, meta) = checkpoint.locate(packed)?;
    let (text, shape) = file.metadata().get(n)?.split_once(' ')?;
    let (rows, cols) = shape.strip_prefix('[')?.strip_suffix(']')?.split_once(", ")?;
    let (rows, cols): (usize, usize) = (rows.parse().ok()?, cols.parse().ok()?);
    let scheme: Scheme = text.parse().ok()?;
    // Rejects shapes that would overflow later arithmetic.
    rows.checked_mul(cols).filter(|&n| n < 1 << 48)?;
    let expected = native::packed_bytes(&scheme.format, rows, cols);
    (meta.len == expected as u64).then_some((scheme, rows, cols))
}

/// Finds weights whose codes are in a tensor `weight`, which gives their shape.
fn coded_weights(files: &ModelFiles) -> Result<HashMap<String, Found>> {
    let mut by_module: HashMap<&str, Vec<&TensorMeta>> = HashMap::new();
    for meta in files.checkpoint().tensors() {
        // Matches `m.weight`, `m.weight_scale`, `m.SCB`, and bitsandbytes' `m.weight.absmax`.
        let module = meta.name.split_once(".weight.").or_else(|| meta.name.rsplit_once('.'));
        by_module.entry(module.map_or(meta.name.as_str(), |(module, _)| module)).or_default().push(meta);
    }
    let mut kinds = Vec::new();
    let mut all = HashMap::new();
    for (module, tensors) in by_module {
        let Some((rows, cols)) = files.coded_shape(module) else { continue };
        let layer = Quantized { module: module.into(), rows, cols };
        all.extend(of_module(files, layer, &tensors, &mut kinds)?);
    }
    Ok(all)
}

/// Dtypes with relative sizes, and the scheme that they imply.
type TensorKind = (Vec<(Dtype, u64)>, Schemes);

/// Finds the weight of `layer` among its `tensors`; `None` if it is dense. Reads nothing if the dtypes match
/// one of the known `kinds`.
fn of_module(
    files: &ModelFiles,
    layer: Quantized,
    tensors: &[&TensorMeta],
    kinds: &mut Vec<TensorKind>,
) -> Result<Option<(String, Found)>> {
    let (module, rows, cols) = (&layer.module, layer.rows, layer.cols);
    let name = format!("{module}.weight");
    let tensors: Vec<_> = tensors.iter().filter(|meta| !meta.name.ends_with(".bias")).collect();
    let named = tensors.iter().find(|meta| meta.name == name);
    let Some(codes) = named.or_else(|| tensors.iter().max_by_key(|meta| meta.len)) else { return Ok(None) };
    // Dtypes, and the number of weights per tensor element.
    let elements = (rows as u64).saturating_mul(cols as u64);
    let mut kind: Vec<_> = tensors.iter().map(|m| (m.dtype, elements / m.numel().max(1))).collect();
    kind.sort();
    let known = kinds.iter().find(|(known, _)| *known == kind).map(|(_, schemes)| schemes.clone());
    let schemes = match known {
        Some(schemes) => schemes,
        None => {
            let linear = files.linear(module, rows, cols, false)?;
            let Weight::Quantized(q) = linear.weight else { return Ok(None) };
            let schemes = (text(&q.format), linear.input.map(|input| input.scheme.to_string()));
            kinds.push((kind, schemes.clone()));
            schemes
        }
    };
    let parts = tensors.iter().map(|meta| meta.name.clone()).collect();
    Ok(Some((codes.name.clone(), Found::of(layer, name, schemes, parts))))
}

/// Finds weights whose shapes only the architecture knows: linear layers, embedding and head. An unreadable
/// weight is a warning and shown as stored.
fn by_architecture(
    files: &ModelFiles,
    config: &ModelConfig,
    warnings: &mut Vec<String>,
) -> HashMap<String, Found> {
    let table = |module: String| (module, (config.vocab_size, config.hidden_size));
    let tables = [table(config.embedding_module()), table(config.head_module().to_owned())];
    let linears = config.decoder_linears().map(|info| (info.module, (info.rows, info.cols)));
    let shapes: HashMap<String, (usize, usize)> = linears.chain(tables).collect();
    let mut by_module: BTreeMap<&str, Vec<&TensorMeta>> = BTreeMap::new();
    for meta in files.checkpoint().tensors() {
        let ends = meta.name.match_indices('.').map(|(at, _)| &meta.name[..at]);
        if let Some(module) = ends.rev().find(|module| shapes.contains_key(*module)) {
            by_module.entry(module).or_default().push(meta);
        }
    }
    let mut kinds = Vec::new();
    let mut all = HashMap::new();
    for (module, tensors) in by_module {
        if files.is_dense(&format!("{module}.weight")) {
            continue;
        }
        let (rows, cols) = shapes[module];
        match of_module(files, Quantized { module: module.into(), rows, cols }, &tensors, &mut kinds) {
            Ok(found) => all.extend(found),
            Err(error) => {
                warnings.push(format!("{error}; tensors are shown as stored"));
                break;
            }
        }
    }
    all
}

/// Finds stacked MXFP4 experts; each projection is one weight `[experts, in, out]` as in a dense checkpoint.
fn stacked_weights(
    files: &ModelFiles,
    config: &ModelConfig,
    warnings: &mut Vec<String>,
) -> HashMap<String, Found> {
    let mut all: HashMap<String, Found> = HashMap::new();
    let mut scheme = None;
    for info in config.decoder_linears() {
        let StoredAs::Stacked(stack) = &info.stored else { continue };
        let parts = gpt_oss::names(&stack.tensor);
        let [codes, _] = &parts;
        let (name, shape) = info.dense_tensor();
        // A byte holds two codes.
        let fits = |meta: &TensorMeta| 2 * meta.numel() == shape.iter().product::<usize>() as u64;
        if let Some(experts) = all.get_mut(codes).and_then(|found| found.experts.as_mut()) {
            experts.push(stack);
            continue;
        }
        if !files.checkpoint().get(codes).is_some_and(fits) {
            continue;
        }
        // One expert is read to find the scheme.
        if scheme.is_none() {
            match files.expert(stack, info.rows, info.cols) {
                Ok(Weight::Quantized(q)) => scheme = Some(text(&q.format)),
                Ok(_) => break,
                Err(error) => {
                    warnings.push(format!("{error}; tensors are shown as stored"));
                    break;
                }
            }
        }
        let scheme = scheme.clone().unwrap_or_default();
        let experts = Some(Experts::stacked(stack, info.rows, info.cols));
        let parts = parts.to_vec();
        let found = Found { name, shape, layer: None, experts, scheme, input_scheme: None, parts };
        all.insert(codes.clone(), found);
    }
    all
}

/// Suffixes of a GPTQ or AWQ module's tensors.
const WORD_PARTS: [&str; 4] = ["qweight", "qzeros", "scales", "g_idx"];

/// Finds GPTQ and AWQ weights, reading one per bit width and group size.
fn word_weights(files: &ModelFiles) -> Result<HashMap<String, Found>> {
    let checkpoint = files.checkpoint();
    let mut kinds: Vec<((gptq::Layer, bool), String)> = Vec::new();
    let mut all = HashMap::new();
    for codes in checkpoint.tensors() {
        let Some(module) = codes.name.strip_suffix(".qweight") else { continue };
        let Some((layer, rows, cols)) = word_shape(files, module, codes) else { continue };
        let quantized = Quantized { module: module.into(), rows, cols };
        let kind = (layer, layer.group.is_none_or(|group| group as usize >= cols));
        let known = kinds.iter().find(|(known, _)| *known == kind).map(|(_, scheme)| scheme.clone());
        let scheme = match known {
            Some(scheme) => scheme,
            None => match files.linear(module, rows, cols, false)?.weight {
                Weight::Quantized(q) => {
                    kinds.push((kind, text(&q.format)));
                    text(&q.format)
                }
                _ => continue,
            },
        };
        let parts = WORD_PARTS.map(|part| format!("{module}.{part}")).into();
        let name = format!("{module}.weight");
        all.insert(codes.name.clone(), Found::of(quantized, name, (scheme, None), parts));
    }
    Ok(all)
}

/// Returns settings, rows and columns of a weight with these codes; `None` if nothing bounds them.
fn word_shape(files: &ModelFiles, module: &str, codes: &TensorMeta) -> Option<(gptq::Layer, usize, usize)> {
    let &[down, across] = codes.shape.as_slice() else { return None };
    if codes.len == 0 || codes.dtype != Dtype::I32 {
        return None;
    }
    match (files.awq(), files.gptq()) {
        (Some(config), _) => Some((config.layer(), across.checked_mul(8)?, down)),
        (_, config) => {
            let layer = config?.layer_of_codes(module);
            Some((layer, across, down.checked_mul(32)? / layer.bits as usize))
        }
    }
}

fn compressed(files: &ModelFiles, warnings: &mut Vec<String>) -> Result<HashMap<String, Found>> {
    let checkpoint = files.checkpoint();
    let Some(value) = files.config().and_then(|config| config.get("quantization_config")) else {
        return Ok(HashMap::new());
    };
    let config = Config::parse(&files.dir().join("config.json"), value)?;
    let mut kinds = Kinds(Vec::new());
    let mut all = HashMap::new();
    for codes in checkpoint.tensors() {
        let Some(module) = quantized_module(checkpoint, &codes.name) else { continue };
        let Some(group) = config.group_of_codes(module) else { continue };
        let Some((rows, cols)) = logical_shape(checkpoint, module, codes)? else {
            warnings.push(format!(
                "tensor \"{}\": expected a matching weight_shape, got none; shown as stored",
                Shown(&codes.name)
            ));
            continue;
        };
        let layer = Quantized { module: module.into(), rows, cols };
        let scales = checkpoint.get(&format!("{module}.weight_scale")).map(|meta| meta.dtype);
        let schemes = kinds.schemes(files, &layer, codes, scales, (&group.weights, &group.input))?;
        let name = format!("{module}.weight");
        let parts = CT_PARTS.map(|part| format!("{name}{part}")).into();
        all.insert(codes.name.clone(), Found::of(layer, name, schemes, parts));
    }
    Ok(all)
}

/// Returns the module whose codes tensor `name` holds.
fn quantized_module<'a>(checkpoint: &Checkpoint, name: &'a str) -> Option<&'a str> {
    name.strip_suffix(".weight_packed").or_else(|| {
        let module = name.strip_suffix(".weight")?;
        checkpoint.get(&format!("{module}.weight_scale")).map(|_| module)
    })
}

/// Returns rows and columns of the weight with these codes; `None` if they are not recorded.
fn logical_shape(
    checkpoint: &Checkpoint,
    module: &str,
    codes: &TensorMeta,
) -> Result<Option<(usize, usize)>> {
    let [rows, cols] = codes.shape[..] else { return Ok(None) };
    if codes.len == 0 {
        // No other value in the file bounds such a shape.
        return Ok(None);
    }
    if codes.name.ends_with(".weight") {
        return Ok(Some((rows, cols)));
    }
    if codes.dtype == Dtype::U8 {
        return Ok(cols.checked_mul(2).map(|cols| (rows, cols)));
    }
    let name = format!("{module}.weight_shape");
    match checkpoint.get(&name) {
        Some(meta) if meta.dtype == Dtype::I64 && meta.shape == [2] => {
            let bytes = checkpoint.read(&name)?;
            let mut sizes = bytes.as_chunks::<8>().0.iter().map(|b| usize::try_from(i64::from_le_bytes(*b)));
            match (sizes.next(), sizes.next()) {
                // Less than one bit per weight is not a valid packing.
                (Some(Ok(r)), Some(Ok(c))) if r == rows && c / 32 <= cols => Ok(Some((r, c))),
                _ => Ok(None),
            }
        }
        _ => Ok(None),
    }
}

/// Kinds of weights: group arguments and scale dtypes decide the scheme, so one weight per kind is read.
struct Kinds(Vec<Kind>);

struct Kind {
    arguments: (Option<Args>, Option<Args>),
    dtypes: (Dtype, Option<Dtype>),
    format: Format,
    input_scheme: Option<String>,
}

impl Kinds {
    fn schemes(
        &mut self,
        files: &ModelFiles,
        layer: &Quantized,
        codes: &TensorMeta,
        scales: Option<Dtype>,
        (weights, input): (&Option<Args>, &Option<Args>),
    ) -> Result<Schemes> {
        let dtypes = (codes.dtype, scales);
        let known = self.0.iter().find(|kind| {
            (&kind.arguments.0, &kind.arguments.1, kind.dtypes) == (weights, input, dtypes)
                && kind.fits(layer, codes)
        });
        if let Some(kind) = known {
            return Ok((text(&kind.format), kind.input_scheme.clone()));
        }
        let linear = files.linear(&layer.module, layer.rows, layer.cols, false)?;
        let input_scheme = linear.input.map(|input| input.scheme.to_string());
        let Weight::Quantized(q) = linear.weight else {
            return Ok((codes.dtype.name().into(), input_scheme));
        };
        let scheme = text(&q.format);
        let arguments = (weights.clone(), input.clone());
        self.0.push(Kind { arguments, dtypes, format: q.format, input_scheme: input_scheme.clone() });
        Ok((scheme, input_scheme))
    }
}

impl Kind {
    /// True if the codes have the size of this format; otherwise the weight is read, and the error says what
    /// is wrong.
    fn fits(&self, layer: &Quantized, codes: &TensorMeta) -> bool {
        let bits = self.format.code_bits();
        let words = Packing::compressed_tensors_int(bits).line_bytes(layer.cols) / 4;
        codes.dtype != Dtype::I32 || codes.shape == [layer.rows, words]
    }
}

/// Returns the scheme text of a format: with the default rule, or with the first rule that gives this format.
fn text(format: &Format) -> String {
    Scheme::writing(format.clone()).to_string()
}

/// Returns the bits of storage per parameter.
pub fn bits(bytes: u64, parameters: u64) -> Option<f64> {
    (parameters > 0).then(|| 8.0 * bytes as f64 / parameters as f64)
}

//! mantissa's own format, for everything that no public format holds.
//!
//! Tensors of a weight `n` (`model.layers.0.mlp.up_proj.weight`):
//! - `n.packed` U8: codes as laid out by [`packing`], codec blocks, or trellis tiles.
//! - `n.scale`, in the shape of the blocks: U8 for 8-bit scale codes, F16 or BF16 for those codes, else F32.
//! - `n.zero` I32 (I8 under 16-bit scales), or `n.bias` F32 or F16 for the minima of `:minmax`, in the same shape.
//! - `n.global` F32 `[1]`.
//! - Double quantization: `n.scale` holds codes, `n.nested_scale` F32 their amaxes, `n.nested_offset` F32 `[1]` their
//!   mean.
//! - Outliers: `n.outlier_counts`, `n.outlier_columns` and `n.outlier_values`, row by row.
//!
//! `module.input_scale` F32 `[1]` is the static or global scale of a quantized input, `module.input_zero_point` I8 `[1]` the
//! zero point beside a static one. The file's metadata holds,
//! under the key `n`, the scheme's text and the shape: `int4-g32 [352, 128]`.
//!
//! `config.json` has `quantization_config.quant_method = "mantissa"` and lists by module the activation schemes and
//! the order of Sylvester's matrix (over its square root) that multiplies each run of an input before it is
//! quantized. It also names the KV-cache scheme (`kv_cache`) or the policy of a cache with stored levels
//! ([`levels`]). Static cache scales are `k_scale` and `v_scale` of each attention module.

mod format;
mod outliers;
mod trellis;

use std::collections::BTreeMap;

use mantissa_num::format::{Affine, Format, Offset};
use mantissa_num::minifloat::{BF16, F16, f16_bits};
use mantissa_num::pack::Packing;
use mantissa_num::stored::{Extra, Map, Transforms};
use mantissa_num::{
    Code, Codes, Hadamard, Quantized, Rule, ScaleLevel, Scheme, Source, code_unit, parse_activation,
};
use serde_json::{Value, json};

use super::sound::{self, Names};
use super::{
    ActivationQuant, KvQuant, LinearPlan, LinearWeight, ModelFiles, NamedBytes, NotStorable, Storable,
    StoredLinear, StoredTensors, Weight, cache, levels,
};
use crate::{Checkpoint, Dtype, Error, Result, TensorSpec};

pub use format::CONTAINER;
pub(super) use format::Native;
pub use outliers::{OUTLIER_PARTS, outlier_bits};

/// Name on the command line and in reports.
pub const NAME: &str = "native";

/// `quant_method` of the format.
pub const QUANT_METHOD: &str = "mantissa";

/// Parsed `quantization_config`: activation schemes and rotations of inputs, by module.
#[derive(Clone, Debug)]
pub struct Config {
    inputs: BTreeMap<String, Scheme>,
    rotations: BTreeMap<String, Hadamard>,
    kv: Option<Scheme>,
    /// Policy of the cache, if its levels are stored.
    levels: Option<String>,
}

/// Key under which rotations of inputs are listed.
const ROTATIONS: &str = "input_rotations";

/// Packing of the codes of a format: integers as in compressed-tensors, 4-bit code books as in bitsandbytes, other
/// codes from the low bits up. `None` for codes wider than a byte, which take a unit each, and for codecs.
pub fn packing(format: &Format) -> Option<Packing> {
    match format {
        Format::Table(table) if table.book.bits() == 4 => Some(Packing::bitsandbytes()),
        Format::Table(table) => Some(Packing::rows(table.book.bits())),
        Format::Affine(Affine { code: Code::Int(bits), .. }) => Some(Packing::compressed_tensors_int(*bits)),
        Format::Affine(Affine { code, .. }) if code.bits() <= 8 => Some(Packing::rows(code.bits())),
        _ => None,
    }
}

/// The packed bytes of a tensor's codes.
pub fn pack_codes(q: &Quantized) -> Vec<u8> {
    match (packing(&q.format), &q.codes) {
        (Some(packing), Codes::U8(codes)) => packing.pack(codes, q.cols),
        (_, codes) => codes.to_le_bytes(),
    }
}

/// Bytes of `n.packed` of a `[rows, cols]` tensor.
pub fn packed_bytes(format: &Format, rows: usize, cols: usize) -> usize {
    if format.codec().is_some() {
        return usize::try_from(format.total_bits(rows, cols) / 8).unwrap_or(usize::MAX);
    }
    if let Some(trellis) = format.trellis() {
        return trellis.code_bytes(rows, cols);
    }
    packing(format).map_or(rows * cols * code_unit(format), |p| p.total_bytes(rows, cols))
}

/// Tensors of a quantized weight named `n`, other than `n.packed`: scale, zero point or bias, global scale, nested scales.
pub fn scale_specs(n: &str, format: &Format, rows: usize, cols: usize) -> Vec<TensorSpec> {
    if let Some(trellis) = format.trellis() {
        return trellis::scale_specs(n, &trellis, rows, cols);
    }
    let grid = format.blocks().grid(rows, cols);
    let spec = |suffix: &str, dtype, shape| TensorSpec { name: format!("{n}.{suffix}"), dtype, shape };
    let mut all = Vec::new();
    if let Some(scale) = format.scale() {
        let dtype = scale_dtype(scale.code);
        all.push(spec("scale", dtype, grid.clone()));
        if scale.tensor_wide().is_some() {
            all.push(spec("global", Dtype::F32, vec![1]));
        }
        if let Some((blocks, _)) = scale.nested() {
            let scales = grid.iter().product();
            all.push(spec("nested_scale", Dtype::F32, vec![blocks.count(1, scales)]));
            all.push(spec("nested_offset", Dtype::F32, vec![1]));
        }
    }
    if format.has_zero() {
        all.push(spec("zero", zero_dtype(format), grid.clone()));
    }
    if format.has_bias() {
        all.push(spec("bias", bias_dtype(format), grid));
    }
    all
}

/// Dtype of stored scales of this code.
fn scale_dtype(code: Code) -> Dtype {
    match code {
        Code::Float(F16) => Dtype::F16,
        Code::Float(BF16) => Dtype::BF16,
        code if code.bits() == 8 => Dtype::U8,
        _ => Dtype::F32,
    }
}

/// Dtype of stored zero points of `format`.
fn zero_dtype(format: &Format) -> Dtype {
    let short = format.scale().is_some_and(|scale| scale_dtype(scale.code).bits() == 16);
    if short { Dtype::I8 } else { Dtype::I32 }
}

/// Dtype of stored biases of `format`.
fn bias_dtype(format: &Format) -> Dtype {
    match format {
        Format::Affine(Affine { offset: Offset::HalfBias, .. }) => Dtype::F16,
        _ => Dtype::F32,
    }
}

/// Bytes of the tensors that [`scale_specs`] declares.
pub fn scale_tensors(n: &str, q: &Quantized) -> Vec<(String, Vec<u8>)> {
    if let Some(trellis) = q.format.trellis() {
        return trellis::scale_tensors(n, &trellis, q);
    }
    let mut all = Vec::new();
    if let Some(scale) = q.format.scale() {
        let bytes = match scale_dtype(scale.code) {
            Dtype::F32 => {
                (0..q.scales.len()).flat_map(|i| scale.code.decode(q.scales.get(i)).to_le_bytes()).collect()
            }
            _ => q.scales.to_le_bytes(),
        };
        all.push((format!("{n}.scale"), bytes));
    }
    if let Some(outer) = q.outer() {
        all.push((format!("{n}.global"), outer.to_le_bytes().to_vec()));
    }
    if let Some(nested) = q.nested() {
        all.push((format!("{n}.nested_scale"), floats(&nested.factors())));
        all.push((format!("{n}.nested_offset"), floats(&[nested.mean])));
    }
    if q.format.has_zero() {
        let zeros = match zero_dtype(&q.format) {
            Dtype::I8 => q.zeros().iter().map(|&z| z as i8 as u8).collect(),
            _ => q.zeros().iter().flat_map(|z| z.to_le_bytes()).collect(),
        };
        all.push((format!("{n}.zero"), zeros));
    }
    if q.format.has_bias() {
        let bytes = match bias_dtype(&q.format) {
            Dtype::F16 => q.biases().iter().flat_map(|bias| f16_bits(*bias).to_le_bytes()).collect(),
            _ => floats(q.biases()),
        };
        all.push((format!("{n}.bias"), bytes));
    }
    all
}

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

/// All tensors of a quantized linear layer.
///
/// # Errors
/// [`NotStorable`] if the blocks of a codec do not divide a row, or tiles of a trellis the weight.
pub fn specs(plan: &LinearPlan<'_>) -> Storable<Vec<TensorSpec>> {
    let n = format!("{}.weight", plan.module);
    if let Some(codec) = plan.scheme.format.codec() {
        let (cols, block) = (plan.cols, codec.elements);
        let refuse = |why| Err(NotStorable { scheme: plan.scheme.to_string(), why });
        if !cols.is_multiple_of(block) {
            return refuse(format!("{}: rows of {cols} are not multiples of {block}", plan.module));
        }
    }
    if plan.scheme.format.trellis().is_some() {
        trellis::check(plan)?;
    }
    let bytes = packed_bytes(&plan.scheme.format, plan.rows, plan.cols);
    let mut all = vec![TensorSpec { name: format!("{n}.packed"), dtype: Dtype::U8, shape: vec![bytes] }];
    all.extend(scale_specs(&n, &plan.scheme.format, plan.rows, plan.cols));
    if plan.outliers > 0 {
        all.extend(outliers::specs(&n, (plan.rows, plan.cols), plan.outliers));
    }
    if plan.stores_input_scale() {
        all.push(TensorSpec { name: input_scale(plan.module), dtype: Dtype::F32, shape: vec![1] });
    }
    if plan.stores_input_zero() {
        all.push(TensorSpec { name: input_zero(plan.module), dtype: Dtype::I8, shape: vec![1] });
    }
    Ok(all)
}

/// Name of the stored scale of a module's input.
fn input_scale(module: &str) -> String {
    format!("{module}.input_scale")
}

/// Name of the stored zero point of a module's input.
fn input_zero(module: &str) -> String {
    format!("{module}.input_zero_point")
}

/// Tensors of a layer with outliers, as it was read.
///
/// # Errors
/// [`NotStorable`] if it has side tensors other than outliers.
fn store(module: &str, layer: &LinearWeight, q: &Quantized) -> Storable<StoredTensors> {
    let scheme = Scheme::new(q.format.clone(), Rule::Amax);
    let [extra @ Extra::Sparse { index, .. }] = layer.transforms.extras.as_slice() else {
        let why = format!("{module}: native stores outliers, but no other side tensors");
        return Err(NotStorable::new(&scheme, why));
    };
    let input = layer.input.as_ref().map(|input| &input.scheme);
    let plan = LinearPlan {
        input_scale: layer.input.as_ref().and_then(ActivationQuant::stored),
        outliers: index.len(),
        ..LinearPlan::new(module, &scheme, input, (layer.rows, layer.cols))
    };
    let bytes = all_tensors(&plan, q, Some(extra))?;
    Ok(specs(&plan)?.into_iter().zip(bytes.into_iter().map(|(_, bytes)| bytes)).collect())
}

/// Bytes of the tensors declared by [`specs`].
///
/// # Errors
/// [`NotStorable`] if the input needs a stored scale that the plan lacks, or the number of outliers differs from the
/// plan.
fn all_tensors(plan: &LinearPlan<'_>, q: &Quantized, outliers: Option<&Extra>) -> Storable<NamedBytes> {
    let n = format!("{}.weight", plan.module);
    let mut all = vec![(format!("{n}.packed"), pack_codes(q))];
    all.extend(scale_tensors(&n, q));
    all.extend(outliers.map_or_else(|| Ok(Vec::new()), |outliers| outliers::tensors(plan, outliers))?);
    if plan.stores_input_scale() {
        all.push((input_scale(plan.module), plan.input_scale_bytes("native", false)?));
    }
    if plan.stores_input_zero() {
        all.push((input_zero(plan.module), vec![plan.input_zero_byte()]));
    }
    Ok(all)
}

/// Metadata entry of a quantized weight: its name, and its scheme and shape.
pub fn metadata(plan: &LinearPlan<'_>) -> (String, String) {
    (format!("{}.weight", plan.module), format!("{} [{}, {}]", plan.scheme, plan.rows, plan.cols))
}

/// `quantization_config` of this format.
pub fn quantization_config(inputs: &BTreeMap<String, Scheme>) -> Value {
    let inputs: serde_json::Map<_, _> =
        inputs.iter().map(|(m, s)| (m.clone(), json!(s.to_string()))).collect();
    json!({ "quant_method": QUANT_METHOD, "format": "native", "input_activations": inputs })
}

/// Records in `config` that the inputs of `modules` are rotated in runs of `order` values before they are quantized.
fn rotate_inputs<'a>(config: &mut Value, modules: impl IntoIterator<Item = (&'a str, usize)>) {
    let all: serde_json::Map<_, _> =
        modules.into_iter().map(|(module, order)| (module.to_owned(), json!(order))).collect();
    config[ROTATIONS] = Value::Object(all);
}

/// Adds the KV-cache policy whose levels are stored beside the weights to `config`, a `quantization_config`.
pub fn declare_levels(config: &mut Value, policy: &str) {
    config[levels::KEY] = json!(policy);
}

impl Config {
    /// Reads the activation schemes and rotations.
    ///
    /// # Errors
    /// [`Error::Field`] for an invalid scheme, or an order that is not a power of two.
    pub fn parse(checkpoint: &Checkpoint) -> Result<Self> {
        let path = checkpoint.dir().join("config.json");
        let quantization = checkpoint.config().and_then(|c| c.get("quantization_config"));
        let list = |key: &str| quantization.and_then(|q| q.get(key)).and_then(Value::as_object);
        let listed = list("input_activations");
        let mut inputs = BTreeMap::new();
        for (module, text) in listed.into_iter().flatten() {
            let field = format!("quantization_config.input_activations.{module}");
            let text = text.as_str().unwrap_or_default();
            let scheme = parse_activation(text)
                .map_err(|e| Error::field(&path, field, format!("\"{text}\""), "a scheme", e.to_string()))?;
            inputs.insert(module.clone(), scheme);
        }
        let mut rotations = BTreeMap::new();
        for (module, order) in list(ROTATIONS).into_iter().flatten() {
            let size = order.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| n.is_power_of_two());
            let rotation = size.and_then(Hadamard::new).ok_or_else(|| {
                let field = format!("quantization_config.{ROTATIONS}.{module}");
                Error::field(&path, field, order.to_string(), "a power of two", "")
            })?;
            rotations.insert(module.clone(), rotation);
        }
        let kv = match quantization.and_then(|q| q.get(cache::NATIVE_KEY)).filter(|kv| !kv.is_null()) {
            None => None,
            Some(text) => {
                let field = format!("quantization_config.{}", cache::NATIVE_KEY);
                let fault = |hint: String| Error::field(&path, field, text.to_string(), "a scheme", hint);
                let scheme = parse_activation(text.as_str().unwrap_or_default());
                Some(scheme.map_err(|error| fault(error.to_string()))?)
            }
        };
        let levels = match quantization.and_then(|q| q.get(levels::KEY)).filter(|policy| !policy.is_null()) {
            None => None,
            Some(Value::String(policy)) => Some(policy.clone()),
            Some(other) => {
                let field = format!("quantization_config.{}", levels::KEY);
                return Err(Error::field(&path, field, other.to_string(), "a policy as text", ""));
            }
        };
        levels::alone(&path, kv.is_some(), levels.is_some())?;
        Ok(Config { inputs, rotations, kv, levels })
    }

    /// Quantization of the KV cache of the attention `module`.
    ///
    /// # Errors
    /// A scale is missing, has another shape, or is not greater than 0.
    fn cache(&self, files: &ModelFiles, module: &str, kv_heads: usize) -> Result<Option<KvQuant>> {
        let Some(scheme) = &self.kv else { return Ok(None) };
        if scheme.source == Source::Dynamic {
            return Ok(Some(KvQuant { scheme: scheme.clone(), k_scale: Vec::new(), v_scale: Vec::new() }));
        }
        let scale = |suffix: &str| {
            let name = format!("{module}.{suffix}");
            files.meta(&name)?;
            files.read_cache_scale(&name, kv_heads)
        };
        let scheme = cache::of_one_block(scheme);
        Ok(Some(KvQuant { scheme, k_scale: scale("k_scale")?, v_scale: scale("v_scale")? }))
    }

    /// Weight of `module`, the quantization of its input and its rotation.
    ///
    /// # Errors
    /// A tensor is missing or its shape differs from the scheme; or a rotation's order does not divide the input.
    fn layer(&self, files: &ModelFiles, module: &str, rows: usize, cols: usize) -> Result<StoredLinear> {
        let rotation = self.rotations.get(module).cloned().map(Map::Hadamard);
        if let Some(Err(error)) = rotation.as_ref().map(|map| map.check(cols)) {
            return Err(files.fault(
                module,
                error.found,
                error.allowed,
                "config.json and the weights differ",
            ));
        }
        let n = format!("{module}.weight");
        let transforms = Transforms { before: rotation.into_iter().collect(), ..Transforms::default() };
        let name = input_scale(module);
        let outer = if files.has(&name) {
            let bytes = files.read_exact(&name, &[Dtype::F32], &[1])?;
            bytes.as_chunks::<4>().0.first().map(|word| f32::from_le_bytes(*word))
        } else {
            None
        };
        let input = self.inputs.get(module).map(|scheme| ActivationQuant::new(scheme.clone(), outer));
        let input = match input {
            Some(input) if outer.is_some() && input.scheme.format.has_zero() => {
                Some(ActivationQuant { zero: files.read_zero_point(&input_zero(module))?, ..input })
            }
            input => input,
        };
        let packed = format!("{n}.packed");
        if !files.has(&packed) {
            return Ok(StoredLinear { weight: files.dense(module, rows, cols)?, input, transforms });
        }
        let format = stored_format(files, &n, rows, cols)?;
        let bytes = files.read_exact(&packed, &[Dtype::U8], &[packed_bytes(&format, rows, cols)])?;
        let signed = matches!(&format, Format::Affine(Affine { code: Code::Int(_) | Code::Ternary, .. }));
        let codes = match packing(&format) {
            Some(packing) => packing.unpack(&bytes, rows, cols, signed).map(Codes::U8),
            None if format.codec().is_some() || format.trellis().is_some() => Some(Codes::Packed(bytes)),
            None => Some(Codes::from_le_bytes(code_unit(&format), &bytes)),
        };
        let codes = codes.ok_or_else(|| files.fault(&packed, "a wrong length", "the packed codes", ""))?;
        let mut q = Quantized { codes, ..Quantized::empty(format, rows, cols) };
        if let Some(trellis) = q.format.trellis() {
            q.scales.codes = trellis::read_scales(files, &n, &trellis, (rows, cols))?;
            return Ok(StoredLinear { input, ..files.unfolded(&packed, &q)? });
        }
        read_scales(files, &n, &mut q)?;
        let (scales, zeros) = (format!("{n}.scale"), format!("{n}.zero"));
        sound::check(files, Names { codes: &packed, scales: &scales, zeros: &zeros }, &q)?;
        let extras = outliers::read(files, &n, (rows, cols))?.into_iter().collect::<Vec<_>>();
        if !extras.is_empty() && !transforms.before.is_empty() {
            let hint = "outliers use the unrotated input, the codes the rotated one";
            return Err(files.fault(module, "outliers and a rotation of the input", "one of the two", hint));
        }
        Ok(StoredLinear {
            weight: Weight::Quantized(q),
            input,
            transforms: Transforms { extras, ..transforms },
        })
    }
}

/// Checks that the tensors of a quantized `module` exist in the shapes of its scheme. Reads only headers.
///
/// # Errors
/// As `Config::linear`, as far as headers show.
fn check(files: &ModelFiles, module: &str, rows: usize, cols: usize) -> Result<()> {
    let n = format!("{module}.weight");
    let format = stored_format(files, &n, rows, cols)?;
    files.expect_shape(files.meta(&format!("{n}.packed"))?, &[packed_bytes(&format, rows, cols)])?;
    if format.trellis().is_some() {
        return Ok(());
    }
    scale_specs(&n, &format, rows, cols)
        .iter()
        .try_for_each(|spec| files.expect_shape(files.meta(&spec.name)?, &spec.shape))
}

/// Format of a stored weight `n`: the scheme of the metadata, with scales and biases in their stored dtypes.
fn stored_format(files: &ModelFiles, n: &str, rows: usize, cols: usize) -> Result<Format> {
    let format = stored_scheme(files, n, rows, cols)?.format;
    let dtype = |part: &str| files.checkpoint().get(&format!("{n}.{part}")).map(|meta| meta.dtype);
    if format.scale().is_none_or(|scale| scale.code != Code::F32) {
        return Ok(format);
    }
    Ok(match (dtype("scale"), dtype("bias")) {
        (Some(Dtype::F16), Some(Dtype::F16)) => format.with_half_scales(),
        (Some(Dtype::F16), _) => format.with_scale_code(Code::Float(F16)),
        (Some(Dtype::BF16), _) => format.with_scale_code(Code::Float(BF16)),
        _ => format,
    })
}

fn stored_scheme(files: &ModelFiles, n: &str, rows: usize, cols: usize) -> Result<Scheme> {
    let file = files.checkpoint().locate(&format!("{n}.packed")).map(|(file, _)| file);
    let text = file.and_then(|f| f.metadata().get(n)).map_or("", String::as_str);
    let (scheme, shape) = text.split_once(' ').unwrap_or((text, ""));
    if shape != format!("[{rows}, {cols}]") {
        return Err(files.fault(
            n,
            format!("metadata \"{text}\""),
            format!("a scheme and [{rows}, {cols}]"),
            "",
        ));
    }
    scheme.parse().map_err(|e: mantissa_num::ParseError| {
        files.fault(n, format!("metadata \"{text}\""), "a scheme", e.to_string())
    })
}

fn read_scales(files: &ModelFiles, n: &str, q: &mut Quantized) -> Result<()> {
    let (mut factors, mut mean) = (Vec::new(), 0.0);
    for spec in scale_specs(n, &q.format, q.rows, q.cols) {
        let bytes = files.read_exact(&spec.name, &[spec.dtype], &spec.shape)?;
        let words = || bytes.as_chunks::<4>().0.iter().copied();
        match spec.name.rsplit('.').next() {
            Some("scale") => {
                q.scales.codes = Codes::from_le_bytes((spec.dtype.bits() / 8) as usize, &bytes);
            }
            Some("global") => q.set_outer(words().next().map(f32::from_le_bytes)),
            Some("bias") if spec.dtype == Dtype::F16 => {
                let halves = bytes.as_chunks::<2>().0.iter();
                q.scales.extend_biases(halves.map(|b| F16.decode(u16::from_le_bytes(*b).into())));
            }
            Some("bias") => q.scales.extend_biases(words().map(f32::from_le_bytes)),
            Some("nested_scale") => factors = words().map(f32::from_le_bytes).collect(),
            Some("nested_offset") => mean = words().next().map_or(0.0, f32::from_le_bytes),
            _ if spec.dtype == Dtype::I8 => {
                q.scales.extend_zeros(bytes.iter().map(|&z| i32::from(z as i8)));
            }
            _ => q.scales.extend_zeros(words().map(i32::from_le_bytes)),
        }
    }
    if q.format.scale().is_some_and(|scale| scale.nested().is_some()) {
        q.scales.outer = Some(Box::new(ScaleLevel::residual(&factors, mean)));
    }
    Ok(())
}

//! ONNX, write only: weights as initializers, each with a DequantizeLinear node (opset 21, which has 4-bit integers
//! and blocks).
//!
//! `model.onnx` is a graph without inputs. Every output is a dequantized weight `[N, K]` in float, named like its
//! tensor in the model (`model.layers.0.mlp.up_proj.weight`). The data are external: they are in the safetensors
//! files beside it, which also hold the rest of the model. For a module with weight `[N, K]`:
//!
//! ```text
//! scheme                             weight_quantized                              weight_scale  weight_zero_point
//! int4                               INT4, two per byte, the first in the low      FLOAT         INT4, packed alike
//!                                    bits, row after row
//! int8                               INT8 [N, K]                                   FLOAT         INT8
//! fp8-e4m3, fp8-e5m2 (and fnuz)      that type [N, K]                              FLOAT         none
//! ```
//!
//! One scale: `[]`; a scale per row: `[N]`, `axis` 0; groups along a row: `[N, K/g]`, `axis` 1, `block_size` g.
//! Symmetric weights have no zero point. `config.json` has the scheme and shape of each layer, from which mantissa
//! reads the same tensors; it does not read the graph.
//!
//! Source: ONNX 1.23, `onnx/onnx.proto`, `docs/Operators.md` (DequantizeLinear), `docs/ExternalData.md`.

use std::collections::BTreeMap;
use std::path::Path;

use mantissa_num::format::{Affine, Format, Offset};
use mantissa_num::minifloat::{E4M3, E4M3_FNUZ, E5M2, E5M2_FNUZ};
use mantissa_num::pack::{First, Packing};
use mantissa_num::{Blocks, Code, Codes, Quantized, ScaleLevel, Scheme};
use serde_json::{Map, Value, json};

use super::sound::{self, Names};
use super::{
    CheckpointFolder, Container, Convention, Experts, Facts, LinearPlan, ModelFiles, ModelPlan, NamedBytes,
    NotStorable, Opened, PlannedLayer, SideTensors, Storable, StoredLinear, Weight,
};
use crate::protobuf::Message;
use crate::{Dtype, Error, Result, TensorSpec};

/// `quant_method` of this format.
pub const QUANT_METHOD: &str = "onnx";

/// File of the graph.
pub const FILE_NAME: &str = "model.onnx";

/// Version of the operators.
const OPSET: u64 = 21;

/// Version of the file format, the first that has this [`OPSET`].
const IR_VERSION: u64 = 10;

/// Bytes of 4-bit integers.
const NIBBLES: Packing =
    Packing { bits: 4, unit_bytes: 1, first: First::Low, offset_binary: false, flat: true };

/// A quantized layer.
#[derive(Clone, Debug)]
struct Layer {
    scheme: Scheme,
    rows: usize,
    cols: usize,
}

/// Parsed `quantization_config`.
#[derive(Clone, Debug)]
pub struct Config {
    layers: BTreeMap<String, Layer>,
}

impl Config {
    /// Parses the value of `quantization_config` in the config at `path`.
    ///
    /// # Errors
    /// [`Error::Field`] names the layer and key, its value and the accepted values.
    pub fn parse(path: &Path, value: &Value) -> Result<Self> {
        let fault = |key: String, found: Option<&Value>, allowed: &str| {
            let found = found.map_or("nothing".to_owned(), Value::to_string);
            Error::field(path, format!("quantization_config.{key}"), found, allowed, "")
        };
        let listed = value.get("layers");
        let entries =
            listed.and_then(Value::as_object).ok_or_else(|| fault("layers".into(), listed, "an object"))?;
        let mut layers = BTreeMap::new();
        for (module, entry) in entries {
            let scheme = entry.get("scheme");
            let parsed: Option<Scheme> = scheme.and_then(Value::as_str).and_then(|text| text.parse().ok());
            let parsed = parsed.filter(|scheme| element(scheme).is_ok());
            let key = format!("layers.{module}.scheme");
            let scheme =
                parsed.ok_or_else(|| fault(key, scheme, "int4, int8 or FP8, in groups or by row"))?;
            let shape = entry.get("shape");
            let side =
                |i: usize| shape.and_then(|s| s.get(i)?.as_u64()).and_then(|n| usize::try_from(n).ok());
            let key = format!("layers.{module}.shape");
            let Some((rows, cols)) = side(0).zip(side(1)) else {
                return Err(fault(key, shape, "[rows, columns]"));
            };
            layers.insert(module.clone(), Layer { scheme, rows, cols });
        }
        Ok(Config { layers })
    }

    /// Weight of `module`, `[rows, cols]`. A module that the config does not list is dense.
    ///
    /// # Errors
    /// A tensor of the module is missing, or its dtype or shape differs from its scheme.
    fn weight(&self, files: &ModelFiles, module: &str, rows: usize, cols: usize) -> Result<Weight> {
        let Some(layer) = self.layers.get(module) else { return files.dense(module, rows, cols) };
        let [codes_name, scales_name, zeros_name] = names(module);
        if (layer.rows, layer.cols) != (rows, cols) {
            let found = format!("shape [{}, {}] in config.json", layer.rows, layer.cols);
            return Err(files.fault(&codes_name, found, format!("[{rows}, {cols}]"), ""));
        }
        let format = &layer.scheme.format;
        let specs = layer_specs(module, &layer.scheme, rows, cols);
        let read = |spec: &TensorSpec| files.read_exact(&spec.name, &[spec.dtype], &spec.shape);
        let [codes_spec, scales_spec, rest @ ..] = specs.as_slice() else {
            return files.dense(module, rows, cols);
        };
        let nibbles = |name: &str, bytes: Vec<u8>, count: usize| match format.code_bits() {
            4 => NIBBLES
                .unpack(&bytes, 1, count, true)
                .ok_or_else(|| files.fault(name, "a wrong length", "two codes to a byte", "")),
            _ => Ok(bytes),
        };
        let codes = nibbles(&codes_name, read(codes_spec)?, rows * cols)?;
        let scales = Codes::from_le_bytes(4, &read(scales_spec)?);
        let zeros = match rest.first() {
            Some(spec) => nibbles(&zeros_name, read(spec)?, format.blocks().count(rows, cols))?,
            None => Vec::new(),
        };
        let zeros = zeros.into_iter().map(|zero| i32::from(zero as i8)).collect();
        let empty = Quantized::empty(format.clone(), rows, cols);
        let q = Quantized {
            codes: Codes::U8(codes),
            scales: ScaleLevel::from(scales).with_zeros(zeros),
            ..empty
        };
        sound::check(files, Names { codes: &codes_name, scales: &scales_name, zeros: &zeros_name }, &q)?;
        Ok(Weight::Quantized(q))
    }
}

fn names(module: &str) -> [String; 3] {
    ["weight_quantized", "weight_scale", "weight_zero_point"].map(|suffix| format!("{module}.{suffix}"))
}

/// Element type of a scheme: its dtype in safetensors and its number in `TensorProto.DataType`.
///
/// # Errors
/// Reason why a DequantizeLinear node cannot compute the scheme.
fn element(scheme: &Scheme) -> Storable<(Dtype, u64)> {
    let no = |why: &str| Err(NotStorable { scheme: scheme.to_string(), why: why.to_owned() });
    let Format::Affine(Affine { code, blocks, scale: Some(scale), offset: Offset::None | Offset::Zero }) =
        &scheme.format
    else {
        return no("onnx holds int4, int8 and FP8 with one level of scales");
    };
    if scale.outer.is_some() || scale.code != Code::F32 {
        return no("onnx is written with one level of f32 scales");
    }
    if !matches!(blocks, Blocks::Tensor | Blocks::Row | Blocks::Group(_)) {
        return no("DequantizeLinear has blocks along one axis: groups, channels or the whole tensor");
    }
    match code {
        Code::Int(4) => Ok((Dtype::U8, 22)),
        Code::Int(8) => Ok((Dtype::I8, 3)),
        Code::Float(float) if *float == E4M3 => Ok((Dtype::F8E4M3, 17)),
        Code::Float(float) if *float == E4M3_FNUZ => Ok((Dtype::F8E4M3Fnuz, 18)),
        Code::Float(float) if *float == E5M2 => Ok((Dtype::F8E5M2, 19)),
        Code::Float(float) if *float == E5M2_FNUZ => Ok((Dtype::F8E5M2Fnuz, 20)),
        _ => no("onnx holds int4, int8, fp8-e4m3, fp8-e5m2 and their fnuz variants"),
    }
}

/// Shape of scales and zero points in the graph.
fn scale_shape(scheme: &Scheme, rows: usize, cols: usize) -> Vec<usize> {
    match scheme.format.blocks() {
        Blocks::Tensor => Vec::new(),
        Blocks::Row => vec![rows],
        blocks => blocks.grid(rows, cols),
    }
}

fn layer_specs(module: &str, scheme: &Scheme, rows: usize, cols: usize) -> Vec<TensorSpec> {
    let [codes, scales, zeros] = names(module);
    let dtype = element(scheme).map_or(Dtype::U8, |(dtype, _)| dtype);
    let packed = |shape: Vec<usize>| match dtype {
        Dtype::U8 => vec![shape.iter().product::<usize>().div_ceil(2)],
        _ => shape,
    };
    let grid = scale_shape(scheme, rows, cols);
    let mut all = vec![
        TensorSpec::new(codes, dtype, packed(vec![rows, cols])),
        TensorSpec::new(scales, Dtype::F32, grid.clone()),
    ];
    if scheme.format.has_zero() {
        all.push(TensorSpec::new(zeros, dtype, packed(grid)));
    }
    all
}

/// Tensors of a quantized linear layer.
///
/// # Errors
/// [`NotStorable`] if the format cannot hold the scheme, or not on this shape.
pub fn specs(plan: &LinearPlan<'_>) -> Storable<Vec<TensorSpec>> {
    let LinearPlan { module, scheme, rows, cols, .. } = *plan;
    let no = |why: String| Err(NotStorable { scheme: scheme.to_string(), why });
    element(scheme)?;
    if plan.input.is_some() {
        return no("onnx stores only weights; remove the activation scheme".to_owned());
    }
    if let Blocks::Group(group) = scheme.format.blocks()
        && !cols.is_multiple_of(group as usize)
    {
        return no(format!("{module}: {cols} columns are not a multiple of {group}"));
    }
    Ok(layer_specs(module, scheme, rows, cols))
}

/// Bytes of the tensors declared by [`specs`], by name.
///
/// # Errors
/// As [`specs`].
pub fn tensors(plan: &LinearPlan<'_>, q: &Quantized) -> Storable<NamedBytes> {
    element(plan.scheme)?;
    let [codes_name, scales_name, zeros_name] = names(plan.module);
    let Codes::U8(codes) = &q.codes else { return Ok(Vec::new()) };
    let packed = |codes: &[u8]| match q.format.code_bits() {
        4 => NIBBLES.pack(codes, codes.len()),
        _ => codes.to_vec(),
    };
    let mut all = vec![(codes_name, packed(codes)), (scales_name, q.scales.to_le_bytes())];
    if !q.zeros().is_empty() {
        let zeros: Vec<u8> = q.zeros().iter().map(|&zero| zero as i8 as u8).collect();
        all.push((zeros_name, packed(&zeros)));
    }
    Ok(all)
}

/// `quantization_config`: scheme and shape of each layer.
fn quantization_config(model: &ModelPlan<'_>) -> Value {
    let entry = |layer: &PlannedLayer<'_>| {
        let entry = json!({"scheme": layer.scheme.to_string(), "shape": [layer.rows, layer.cols]});
        (layer.module.to_owned(), entry)
    };
    let layers: Map<String, Value> = model.layers.iter().map(entry).collect();
    json!({"quant_method": QUANT_METHOD, "file": FILE_NAME, "layers": layers})
}

/// Bytes of [`FILE_NAME`] for a model in this format; `None` for any other.
///
/// # Errors
/// A tensor of a layer is missing.
pub fn graph(files: &ModelFiles) -> Result<Option<Vec<u8>>> {
    let Some(config) = files.as_convention::<Config>() else { return Ok(None) };
    let mut graph = Message::default();
    for (module, layer) in &config.layers {
        graph.message(1, node(module, layer));
    }
    graph.text(2, "weights");
    for (module, layer) in &config.layers {
        for tensor in initializers(files, module, layer)? {
            graph.message(5, tensor);
        }
    }
    for (module, layer) in &config.layers {
        graph.message(12, output(module, layer));
    }
    let mut opset = Message::default();
    opset.text(1, "");
    opset.number(2, OPSET);
    let mut model = Message::default();
    model.number(1, IR_VERSION);
    model.text(2, "mantissa");
    model.text(3, env!("CARGO_PKG_VERSION"));
    model.message(7, graph);
    model.message(8, opset);
    Ok(Some(model.into_bytes()))
}

/// `NodeProto`: the weight from its parts.
fn node(module: &str, layer: &Layer) -> Message {
    let mut node = Message::default();
    let parts = if layer.scheme.format.has_zero() { 3 } else { 2 };
    names(module).iter().take(parts).for_each(|name| node.text(1, name));
    node.text(2, &format!("{module}.weight"));
    node.text(3, &format!("{module}.dequantize"));
    node.text(4, "DequantizeLinear");
    let mut attribute = |name: &str, value: u64| {
        let mut attribute = Message::default();
        attribute.text(1, name);
        attribute.number(3, value);
        // AttributeProto.AttributeType.INT
        attribute.number(20, 2);
        node.message(5, attribute);
    };
    match layer.scheme.format.blocks() {
        Blocks::Group(group) => {
            attribute("axis", 1);
            attribute("block_size", group.into());
        }
        _ => attribute("axis", 0),
    }
    node
}

/// `TensorProto` of each part of a weight, with its bytes in the file that holds the tensor.
fn initializers(files: &ModelFiles, module: &str, layer: &Layer) -> Result<Vec<Message>> {
    let Layer { scheme, rows, cols } = layer;
    let number = element(scheme).map_or(0, |(_, number)| number);
    let grid = scale_shape(scheme, *rows, *cols);
    // TensorProto.DataType.FLOAT
    let mut parts = vec![(vec![*rows, *cols], number), (grid.clone(), 1)];
    if scheme.format.has_zero() {
        parts.push((grid, number));
    }
    let part = |(name, (shape, number)): (String, (Vec<usize>, u64))| {
        let missing = || Error::NoTensor { path: files.dir().to_owned(), tensor: name.clone() };
        let (file, meta) = files.checkpoint().locate(&name).ok_or_else(missing)?;
        let mut tensor = Message::default();
        shape.iter().for_each(|&n| tensor.number(1, n as u64));
        tensor.number(2, number);
        tensor.text(8, &name);
        let location = file.path().file_name().unwrap_or_default().to_string_lossy();
        let keys = [
            ("location", location.into_owned()),
            ("offset", meta.offset.to_string()),
            ("length", meta.len.to_string()),
        ];
        for (key, value) in keys {
            let mut entry = Message::default();
            entry.text(1, key);
            entry.text(2, &value);
            tensor.message(13, entry);
        }
        // TensorProto.DataLocation.EXTERNAL
        tensor.number(14, 1);
        Ok(tensor)
    };
    names(module).into_iter().zip(parts).map(part).collect()
}

/// `ValueInfoProto` of the weight: FLOAT `[rows, cols]`.
fn output(module: &str, layer: &Layer) -> Message {
    let mut shape = Message::default();
    for n in [layer.rows, layer.cols] {
        let mut side = Message::default();
        side.number(1, n as u64);
        shape.message(1, side);
    }
    let mut tensor = Message::default();
    tensor.number(1, 1);
    tensor.message(2, shape);
    let mut value_type = Message::default();
    value_type.message(1, tensor);
    let mut info = Message::default();
    info.text(1, &format!("{module}.weight"));
    info.message(2, value_type);
    info
}

/// ONNX: initializers with DequantizeLinear nodes.
#[derive(Debug)]
pub(super) struct Onnx;

/// Handle of the format.
pub const CONTAINER: Container = Container::new(&Onnx);

impl Convention for Onnx {
    fn name(&self) -> &'static str {
        QUANT_METHOD
    }

    fn quant_methods(&self) -> &'static [&'static str] {
        &[QUANT_METHOD]
    }

    fn open(&self, folder: &CheckpointFolder<'_>) -> Result<Option<Box<dyn Opened>>> {
        folder.open_as(QUANT_METHOD, Config::parse)
    }

    fn writes(&self) -> Option<Facts> {
        Some(Facts { folded_transforms: true, experts: Experts::AsInSource, ..Facts::default() })
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
        tensors(plan, q)
    }

    fn quantization_config(&self, model: &ModelPlan<'_>) -> Storable<Value> {
        Ok(quantization_config(model))
    }

    /// Writes the graph, which states where in the weight files each tensor lies.
    fn companion(&self, open: &dyn Fn() -> Result<ModelFiles>) -> Result<Option<(&'static str, Vec<u8>)>> {
        Ok(Some((FILE_NAME, graph(&open()?)?.unwrap_or_default())))
    }
}

impl Opened for Config {
    fn name(&self) -> &'static str {
        QUANT_METHOD
    }

    fn code_tensors(&self) -> &'static [(&'static str, &'static [&'static str])] {
        &[("weight_quantized", &["weight_scale"])]
    }

    fn linear(&self, files: &ModelFiles, module: &str, rows: usize, cols: usize) -> Result<StoredLinear> {
        Ok(self.weight(files, module, rows, cols)?.into())
    }
}

//! MLX (mlx-lm): `quantization` in `config.json`, with `group_size`, `bits`, `mode` and overrides by module.
//!
//! For a module with weight `[N, K]`: `weight` U32 `[N, K·b/32]`, each row one little-endian bit stream of unsigned
//! codes, and `scales` `[N, K/g]`. Mode `affine` (2, 3, 4, 5, 6, 8 bits) has `biases` `[N, K/g]` too, both in the
//! model's dtype (written as f32, which loaders accept): `w = scale · code + bias`. `mxfp4` and `mxfp8` have E8M0
//! scales of 32, `nvfp4` E4M3 scales of 16, all as U8. The embedding is quantized like any layer.
//!
//! Source: mlx, `python/mlx/nn/layers/quantized.py`, `mlx/ops.cpp` (`quantize`); mlx-lm, `utils.py`.

use std::collections::BTreeMap;
use std::path::Path;

use mantissa_num::format::{Affine, Format, Offset};
use mantissa_num::pack::Packing;
use mantissa_num::{Blocks, Code, Codes, Quantized, ScaleLevel, ScaleTree, Scheme, minifloat};
use serde_json::{Value, json};

use super::pattern::spellings;
use super::scale_dtype::{scale_code, scale_dtype};
use super::sound::{self, Names};
use super::{
    CheckpointFolder, Container, Convention, Facts, LinearPlan, ModelFiles, ModelPlan, ModuleGroup,
    NamedBytes, NotStorable, Opened, SideTensors, Storable, StoredLinear, Weight,
};
use crate::{Dtype, Error, Result, TensorSpec};

/// Name of the format, for messages.
pub const NAME: &str = "mlx";

/// Meaning of a code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Affine,
    Mxfp4,
    Mxfp8,
    Nvfp4,
}

const MODES: [(Mode, &str); 4] =
    [(Mode::Affine, "affine"), (Mode::Mxfp4, "mxfp4"), (Mode::Mxfp8, "mxfp8"), (Mode::Nvfp4, "nvfp4")];

/// Widths of affine codes.
const AFFINE_BITS: [u32; 6] = [2, 3, 4, 5, 6, 8];

#[derive(Clone, Copy, Debug)]
struct Layer {
    mode: Mode,
    bits: u32,
    group: u32,
}

/// Parsed `quantization`.
#[derive(Clone, Debug)]
pub struct Config {
    default: Layer,
    /// By module; `None` leaves a module dense.
    layers: BTreeMap<String, Option<Layer>>,
}

/// Object that describes the quantization, in a config of this format.
fn found(config: &Value) -> Option<&Value> {
    let object =
        |key: &str| config.get(key).filter(|v| v.get("group_size").is_some() && v.get("bits").is_some());
    object("quantization")
        .or_else(|| object("quantization_config").filter(|v| v.get("quant_method").is_none()))
}

impl Config {
    /// Parses the value of `quantization` in the config at `path`.
    ///
    /// # Errors
    /// [`Error::Field`] names the key, its value and the accepted values.
    pub fn parse(path: &Path, value: &Value) -> Result<Self> {
        let default = layer(path, "quantization", value)?;
        let mut layers = BTreeMap::new();
        for (module, value) in value.as_object().into_iter().flatten() {
            let key = format!("quantization.{module}");
            match value {
                Value::Bool(false) => drop(layers.insert(module.clone(), None)),
                Value::Bool(true) => drop(layers.insert(module.clone(), Some(default))),
                Value::Object(_) => drop(layers.insert(module.clone(), Some(layer(path, &key, value)?))),
                _ => {}
            }
        }
        Ok(Config { default, layers })
    }

    /// What the configuration says of `module`: how it is quantized, `Some(None)` if it is not.
    fn stated(&self, module: &str) -> Option<Option<Layer>> {
        let other = || spellings(module).iter().find_map(|name| self.layers.get(name).copied());
        self.layers.get(module).copied().or_else(other)
    }

    /// Weight of `module`, `[rows, cols]`. The tensors determine if the layer is quantized.
    ///
    /// # Errors
    /// A tensor of the module is missing, or its dtype or shape differs from the config.
    fn weight(&self, files: &ModelFiles, module: &str, rows: usize, cols: usize) -> Result<Weight> {
        let name = |suffix: &str| format!("{module}.{suffix}");
        let (codes_name, scales_name, biases_name) = (name("weight"), name("scales"), name("biases"));
        if !files.meta(&codes_name).is_ok_and(|meta| meta.dtype == Dtype::U32) {
            return files.dense_without(module, "scales", rows, cols);
        }
        let layer = self.stated(module).flatten().unwrap_or(self.default);
        let fits = |n: usize, unit: usize| n.is_multiple_of(unit);
        if !fits(cols * layer.bits as usize, 32) || !fits(cols, layer.group as usize) {
            let allowed = "rows of whole words and groups";
            let found = format!("{cols} columns of {} bits in groups of {}", layer.bits, layer.group);
            return Err(files.fault(
                &codes_name,
                found,
                allowed,
                "config.json and the weights must belong together",
            ));
        }
        let words = cols * layer.bits as usize / 32;
        let bytes = files.read_exact(&codes_name, &[Dtype::U32], &[rows, words])?;
        let affine = layer.mode == Mode::Affine;
        let codes = layer.packing().unpack(&bytes, rows, cols, affine);
        let codes = codes.ok_or_else(|| files.fault(&codes_name, "a wrong length", "whole words", ""))?;
        let grid = Blocks::Group(layer.group).grid(rows, cols);
        let allowed: &[Dtype] = if affine { &[Dtype::F32, Dtype::BF16, Dtype::F16] } else { &[Dtype::U8] };
        let raw = files.read_exact(&scales_name, allowed, &grid)?;
        let dtype = files.meta(&scales_name)?.dtype;
        if affine {
            files.expect_dtype(files.meta(&biases_name)?, &[dtype])?;
        }
        let (format, unit) = layer.format(scale_code(dtype).unwrap_or(Code::F32));
        let scales = Codes::from_le_bytes(unit, &raw);
        let biases = if affine { files.tensor_f32(&biases_name, &grid)? } else { Vec::new() };
        let q = Quantized {
            codes: Codes::U8(codes),
            scales: ScaleLevel::from(scales).with_biases(biases),
            ..Quantized::empty(format, rows, cols)
        };
        sound::check(files, Names { codes: &codes_name, scales: &scales_name, zeros: &biases_name }, &q)?;
        Ok(Weight::Quantized(q))
    }
}

impl Layer {
    /// Layout of codes in words. Affine codes are signed here, converted from unsigned by offset binary.
    fn packing(self) -> Packing {
        Packing { offset_binary: self.mode == Mode::Affine, unit_bytes: 4, ..Packing::rows(self.bits) }
    }

    /// Format of a weight with scales stored in `scale`, and bytes of a scale.
    fn format(self, scale: Code) -> (Format, usize) {
        match self.mode {
            Mode::Affine => {
                let blocks = Blocks::Group(self.group);
                let tree = Some(ScaleTree::leaf(scale));
                let affine = Affine { code: Code::Int(self.bits), blocks, scale: tree, offset: Offset::Bias };
                (Format::Affine(affine), scale.unit_bytes())
            }
            Mode::Mxfp4 => (Scheme::mx(Code::Float(minifloat::E2M1)).format, 1),
            Mode::Mxfp8 => (Scheme::mx(Code::Float(minifloat::E4M3)).format, 1),
            // No global scale.
            Mode::Nvfp4 => (Scheme::nvfp4(None).format, 1),
        }
    }
}

fn layer(path: &Path, key: &str, value: &Value) -> Result<Layer> {
    let fault = |name: &str, allowed: &str| {
        let found = value.get(name).map_or("nothing".to_owned(), Value::to_string);
        Error::field(path, format!("{key}.{name}"), found, allowed, "")
    };
    let number = |name: &str| value.get(name).and_then(Value::as_u64).and_then(|n| u32::try_from(n).ok());
    let mode = value.get("mode").map_or(Some("affine"), Value::as_str);
    let mode = MODES.iter().find(|(_, name)| Some(*name) == mode).map(|(mode, _)| *mode);
    let mode = mode.ok_or_else(|| fault("mode", "\"affine\", \"mxfp4\", \"mxfp8\" or \"nvfp4\""))?;
    let (bits, group) = match mode {
        Mode::Affine => (None, None),
        Mode::Mxfp4 => (Some(4), Some(32)),
        Mode::Mxfp8 => (Some(8), Some(32)),
        Mode::Nvfp4 => (Some(4), Some(16)),
    };
    let fits_bits = |n: &u32| bits.map_or(AFFINE_BITS.contains(n), |bits| *n == bits);
    let fits_group = |n: &u32| group.map_or([32, 64, 128].contains(n), |group| *n == group);
    let bits = number("bits")
        .filter(fits_bits)
        .ok_or_else(|| fault("bits", "2, 3, 4, 5, 6, 8, as the mode has it"))?;
    let group = number("group_size").filter(fits_group);
    let group =
        group.ok_or_else(|| fault("group_size", "32, 64, 128 in mode affine, 32 of mx, 16 of nvfp4"))?;
    Ok(Layer { mode, bits, group })
}

/// Mode, bits and group size that store a scheme.
///
/// # Errors
/// [`NotStorable`] for schemes without a mode.
fn layer_of(scheme: &Scheme, input: Option<&Scheme>) -> Storable<Layer> {
    let no = |why: String| Err(NotStorable { scheme: scheme.to_string(), why });
    if input.is_some() {
        return no("mlx cannot store quantized activations".to_owned());
    }
    let modes = MODES.iter().filter(|(mode, _)| *mode != Mode::Affine);
    for (mode, _) in modes {
        let (bits, group) = match mode {
            Mode::Mxfp8 => (8, 32),
            Mode::Nvfp4 => (4, 16),
            _ => (4, 32),
        };
        let layer = Layer { mode: *mode, bits, group };
        if layer.format(Code::F32).0 == scheme.format {
            return Ok(layer);
        }
    }
    match &scheme.format {
        Format::Affine(Affine {
            code: Code::Int(bits),
            blocks: Blocks::Group(group @ (32 | 64 | 128)),
            scale: Some(scale),
            offset: Offset::Bias,
        }) if AFFINE_BITS.contains(bits) && scale.outer.is_none() => {
            Ok(Layer { mode: Mode::Affine, bits: *bits, group: *group })
        }
        _ => no("mlx holds int2, int3, int4, int5, int6, int8 as -g32|g64|g128-asym:minmax, mxfp4, mxfp8-e4m3 and \
                 nvfp4:torchao-1level"
            .to_owned()),
    }
}

/// Tensors of a quantized linear layer.
///
/// # Errors
/// [`NotStorable`] if the format cannot hold the scheme, or not on this shape.
pub fn specs(plan: &LinearPlan<'_>) -> Storable<Vec<TensorSpec>> {
    let layer = layer_of(plan.scheme, plan.input)?;
    let LinearPlan { module, scheme, rows, cols, .. } = *plan;
    let bits = cols * layer.bits as usize;
    if !bits.is_multiple_of(32) || !cols.is_multiple_of(layer.group as usize) {
        let why = format!("{module}: {cols} columns are not whole words and groups");
        return Err(NotStorable { scheme: scheme.to_string(), why });
    }
    let grid = scheme.format.blocks().grid(rows, cols);
    let spec = |suffix: &str, dtype, shape| TensorSpec::new(format!("{module}.{suffix}"), dtype, shape);
    let mut all = vec![spec("weight", Dtype::U32, vec![rows, bits / 32])];
    if layer.mode == Mode::Affine {
        let dtype = scheme.format.scale().and_then(|s| scale_dtype(s.code)).unwrap_or(Dtype::F32);
        all.push(spec("scales", dtype, grid.clone()));
        all.push(spec("biases", Dtype::F32, grid));
    } else {
        all.push(spec("scales", Dtype::U8, grid));
    }
    Ok(all)
}

/// Bytes of the tensors declared by [`specs`], by name.
///
/// # Errors
/// As [`specs`].
pub fn tensors(plan: &LinearPlan<'_>, q: &Quantized) -> Storable<NamedBytes> {
    let layer = layer_of(plan.scheme, plan.input)?;
    let name = |suffix: &str| format!("{}.{suffix}", plan.module);
    let Codes::U8(codes) = &q.codes else { return Ok(Vec::new()) };
    let mut all =
        vec![(name("weight"), layer.packing().pack(codes, q.cols)), (name("scales"), q.scales.to_le_bytes())];
    if layer.mode == Mode::Affine {
        all.push((name("biases"), q.biases().iter().flat_map(|v| v.to_le_bytes()).collect()));
    }
    Ok(all)
}

/// `quantization` for groups of modules, each with its scheme: the first scheme as the default, and the others by
/// name. Unquantized modules have no scales, by which loaders recognise them.
///
/// # Errors
/// As [`specs`].
pub fn quantization(groups: &[ModuleGroup]) -> Storable<Value> {
    let mut config = json!({});
    for (i, (scheme, input, modules)) in groups.iter().enumerate() {
        let layer = layer_of(scheme, input.as_ref())?;
        let mode = MODES.iter().find(|(mode, _)| *mode == layer.mode).map_or("", |(_, name)| name);
        let keys = json!({"group_size": layer.group, "bits": layer.bits, "mode": mode});
        if i == 0 {
            config = keys;
            continue;
        }
        modules.iter().for_each(|module| config[module.as_str()] = keys.clone());
    }
    Ok(config)
}

/// MLX, read by mlx-lm.
#[derive(Debug)]
pub(super) struct Mlx;

/// Handle of the format.
pub const CONTAINER: Container = Container::new(&Mlx);

impl Convention for Mlx {
    fn name(&self) -> &'static str {
        NAME
    }

    fn open(&self, folder: &CheckpointFolder<'_>) -> Result<Option<Box<dyn Opened>>> {
        let Some(value) = folder.checkpoint.config().and_then(found) else { return Ok(None) };
        Ok(Some(Box::new(Config::parse(folder.config_path, value)?)))
    }

    fn writes(&self) -> Option<Facts> {
        Some(Facts {
            folded_transforms: true,
            quantized_head: true,
            quantized_embedding: true,
            ..Facts::default()
        })
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
        quantization(&model.groups())
    }

    /// mlx-lm reads the first key, hubs the second.
    fn config_keys(&self) -> &'static [&'static str] {
        &["quantization", "quantization_config"]
    }
}

impl Opened for Config {
    fn name(&self) -> &'static str {
        NAME
    }

    /// Of modules without an entry, mlx-lm too asks the tensors.
    fn quantizes(&self, module: &str) -> Option<bool> {
        self.stated(module).map(|layer| layer.is_some())
    }

    fn weight_scales(&self) -> &'static [&'static str] {
        &["scales"]
    }

    fn linear(&self, files: &ModelFiles, module: &str, rows: usize, cols: usize) -> Result<StoredLinear> {
        Ok(self.weight(files, module, rows, cols)?.into())
    }
}

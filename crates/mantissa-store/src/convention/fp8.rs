//! FP8 of DeepSeek-V3 and transformers (`quant_method: "fp8"`): blocks, and vLLM's per-tensor and per-channel scales.
//!
//! For a module with weight `[N, K]` and blocks of `r × c`: `weight` F8_E4M3 `[N, K]` and `weight_scale_inv`
//! `[ceil(N/r), ceil(K/c)]` F32, or F8_E8M0 if `scale_fmt` is `"ue8m0"`. Despite its name it is the factor: `w = code
//! · scale`. Inputs are FP8 with a scale per token and `c` columns; `"activation_scheme": "static"` has one stored
//! scale (`activation_scale`, vLLM's `input_scale`) instead. Without `weight_block_size`, `weight_scale` is F32 `[]`
//! or `[N, 1]`.
//!
//! With `"expert_dtype": "fp4"` (DeepSeek-V4) the weights of experts are MXFP4: `weight` I8 `[N, K/2]`, two E2M1 codes a byte,
//! the first in the low bits, and `weight_scale_inv` `[N, K/32]`, F8_E8M0 or F32. Inputs are as for the other layers.
//!
//! Source: DeepSeek-V3, `README_WEIGHTS.md` and `inference/fp8_cast_bf16.py`; transformers 5,
//! `integrations/finegrained_fp8.py`; vLLM, `model_executor/layers/quantization/fp8.py`.

use std::path::{Path, PathBuf};

use mantissa_num::format::{Affine, Format, Offset};
use mantissa_num::pack::Packing;
use mantissa_num::{Blocks, Code, Codes, Quantized, RowKind, ScaleTree, Scheme, Source, minifloat};
use serde_json::{Value, json};

use super::pattern::Skipped;
use super::scale_dtype::{scale_code, scale_dtype};
use super::sound::{self, Names};
use super::{
    ActivationQuant, CheckpointFolder, Container, Convention, Facts, LinearPlan, LinearWeight, ModelFiles,
    ModelPlan, ModuleGroup, NamedBytes, NotStorable, Opened, ShapeSource, SideTensors, Storable,
    StoredLinear, StoredTensors, Weight,
};
use crate::{Dtype, Error, Result, TensorMeta, TensorSpec};

/// `quant_method` of this format.
pub const QUANT_METHOD: &str = "fp8";

/// Name of the written format.
pub const NAME: &str = "deepseek-fp8";

const E4M3: Code = Code::Float(minifloat::E4M3);
const E2M1: Code = Code::Float(minifloat::E2M1);

/// Dtypes of FP4 codes, two a byte.
const FP4_DTYPES: [Dtype; 2] = [Dtype::I8, Dtype::U8];

/// Columns of FP4 that share a scale.
const FP4_GROUP: u32 = 32;

/// Parsed `quantization_config`.
#[derive(Clone, Debug)]
pub struct Config {
    path: PathBuf,
    /// Rows and columns of a block.
    block: Option<(u32, u32)>,
    /// True if the scale of the inputs is stored.
    fixed: bool,
    /// True if scales are powers of two.
    powers: bool,
    /// True if experts are FP4.
    experts_in_fp4: bool,
    /// Modules that the configuration leaves unquantized.
    skipped: Skipped,
}

impl Config {
    /// Parses the value of `quantization_config` in the config at `path`.
    ///
    /// # Errors
    /// [`Error::Field`] names the key, its value and the accepted values.
    pub fn parse(path: &Path, value: &Value) -> Result<Self> {
        let fault = |key: &str, allowed: &str| {
            let found = value.get(key).map_or("nothing".to_owned(), Value::to_string);
            Error::field(path, format!("quantization_config.{key}"), found, allowed, "")
        };
        let text = |key: &str| value.get(key).filter(|v| !v.is_null());
        if text("fmt").is_some_and(|fmt| fmt != "e4m3" && fmt != "float8_e4m3fn") {
            return Err(fault("fmt", "\"e4m3\""));
        }
        let experts_in_fp4 = match text("expert_dtype") {
            None => false,
            Some(dtype) if dtype == "fp8" => false,
            Some(dtype) if dtype == "fp4" => true,
            Some(_) => return Err(fault("expert_dtype", "\"fp8\" or \"fp4\"")),
        };
        let powers = match text("scale_fmt") {
            None => false,
            Some(fmt) if fmt == "ue8m0" => true,
            Some(_) => return Err(fault("scale_fmt", "\"ue8m0\" or none")),
        };
        let fixed = match text("activation_scheme") {
            None => false,
            Some(scheme) if scheme == "dynamic" => false,
            Some(scheme) if scheme == "static" => true,
            Some(_) => return Err(fault("activation_scheme", "\"dynamic\" or \"static\"")),
        };
        let block = match text("weight_block_size") {
            None => None,
            Some(sides) => {
                Some(block_sides(sides).ok_or_else(|| fault("weight_block_size", "[rows, columns]"))?)
            }
        };
        let skipped = Skipped::parse(value, &["modules_to_not_convert", "ignored_layers"]);
        Ok(Config { path: path.to_owned(), block, fixed, powers, experts_in_fp4, skipped })
    }

    /// Weight of `module`, `[rows, cols]`, and the quantization of its input. A weight that is not FP8 is read
    /// unquantized.
    ///
    /// # Errors
    /// A tensor of the module is missing, or its dtype or shape differs from the config.
    fn layer(&self, files: &ModelFiles, module: &str, rows: usize, cols: usize) -> Result<StoredLinear> {
        let name = |suffix: &str| format!("{module}.{suffix}");
        let codes_name = name("weight");
        if self.experts_in_fp4 && FP4_DTYPES.contains(&files.meta(&codes_name)?.dtype) {
            let q = fp4(files, (&codes_name, &name("weight_scale_inv")), rows, cols)?;
            return Ok((Weight::Quantized(q), Some(self.input(files, module)?)).into());
        }
        if files.meta(&codes_name)?.dtype != Dtype::F8E4M3 {
            let scale = if self.block.is_some() { "weight_scale_inv" } else { "weight_scale" };
            return Ok(files.dense_without(module, scale, rows, cols)?.into());
        }
        let codes = files.read_exact(&codes_name, &[Dtype::F8E4M3], &[rows, cols])?;
        let (scale_name, blocks) = match self.block {
            Some((rows, cols)) => (name("weight_scale_inv"), Blocks::Tile { rows, cols }),
            None => {
                let scale = name("weight_scale");
                let single = files.meta(&scale)?.shape.iter().product::<usize>() == 1;
                (scale, if single { Blocks::Tensor } else { Blocks::Row })
            }
        };
        let meta = files.meta(&scale_name)?;
        files.expect_dtype(meta, &[Dtype::F32, Dtype::BF16, Dtype::F8E8M0, Dtype::U8])?;
        files.expect_grid(meta, &blocks.grid(rows, cols))?;
        let code = scale_code(meta.dtype).unwrap_or(Code::F32);
        let scales = Codes::from_le_bytes(code.unit_bytes(), &files.checkpoint().read(&scale_name)?);
        let scale = Some(ScaleTree::leaf(code));
        let format = Format::Affine(Affine { code: E4M3, blocks, scale, offset: Offset::None });
        let q = Quantized {
            codes: Codes::U8(codes),
            scales: scales.into(),
            ..Quantized::empty(format, rows, cols)
        };
        sound::check(files, Names { codes: &codes_name, scales: &scale_name, zeros: &scale_name }, &q)?;
        Ok((Weight::Quantized(q), Some(self.input(files, module)?)).into())
    }

    fn input(&self, files: &ModelFiles, module: &str) -> Result<ActivationQuant> {
        if !self.fixed {
            let scheme = match self.block {
                Some((_, cols)) => dynamic(cols, self.powers),
                None => Scheme::scaled_float(E4M3, Blocks::Row).with_rows(RowKind::Token),
            };
            return Ok(ActivationQuant::new(scheme, None));
        }
        let names = ["activation_scale", "input_scale"].map(|suffix| format!("{module}.{suffix}"));
        let name = names.iter().find(|name| files.has(name)).unwrap_or(&names[1]);
        let scale = files.read_scalar(name)?;
        if scale <= 0.0 {
            let path = self.path.display();
            let hint = format!("{path} asks for static scales");
            return Err(files.fault(name, scale.to_string(), "a scale greater than 0", hint));
        }
        let scheme = Scheme { source: Source::Static, ..Scheme::scaled_float(E4M3, Blocks::Tensor) };
        Ok(ActivationQuant::new(scheme, Some(scale)))
    }
}

/// FP4 weight `[rows, cols]` from its codes and scales, by name.
fn fp4(files: &ModelFiles, (codes, scales): (&str, &str), rows: usize, cols: usize) -> Result<Quantized> {
    let packing = Packing::rows(E2M1.bits());
    let bytes = files.read_exact(codes, &FP4_DTYPES, &[rows, packing.line_bytes(cols)])?;
    let found = bytes.len();
    let unpacked = packing.unpack(&bytes, rows, cols, false);
    let wrong =
        || files.fault(codes, format!("{found} bytes"), packing.total_bytes(rows, cols).to_string(), "");
    let meta = files.meta(scales)?;
    files.expect_dtype(meta, &[Dtype::F8E8M0, Dtype::U8, Dtype::F32])?;
    let blocks = Blocks::Group(FP4_GROUP);
    files.expect_grid(meta, &blocks.grid(rows, cols))?;
    let code = scale_code(meta.dtype).unwrap_or(Code::F32);
    let stored = Codes::from_le_bytes(code.unit_bytes(), &files.checkpoint().read(scales)?);
    let scale = Some(ScaleTree::leaf(code));
    let format = Format::Affine(Affine { code: E2M1, blocks, scale, offset: Offset::None });
    let q = Quantized {
        codes: Codes::U8(unpacked.ok_or_else(wrong)?),
        scales: stored.into(),
        ..Quantized::empty(format, rows, cols)
    };
    sound::check(files, Names { codes, scales, zeros: scales }, &q)?;
    Ok(q)
}

/// True if FP4 experts are stored in this scheme.
fn is_fp4(scheme: &Scheme) -> bool {
    let blocks = scheme.format.blocks() == Blocks::Group(FP4_GROUP);
    let code = matches!(&scheme.format, Format::Affine(Affine { code: E2M1, offset: Offset::None, .. }));
    blocks && code && scheme.format.scale().is_some_and(|scale| scale.code == Code::E8m0)
}

fn block_sides(value: &Value) -> Option<(u32, u32)> {
    let side = |v: &Value| v.as_u64().and_then(|n| u32::try_from(n).ok()).filter(|&n| n > 0);
    match value.as_array()?.as_slice() {
        [rows, cols] => Some((side(rows)?, side(cols)?)),
        _ => None,
    }
}

/// Scheme of inputs: a scale per token and `cols` columns, a power of two if the weight scales are.
fn dynamic(cols: u32, powers: bool) -> Scheme {
    match powers {
        true => Scheme::power_of_two_tiles(E4M3, Blocks::Tile { rows: 1, cols }),
        false => Scheme::scaled_float(E4M3, Blocks::Group(cols)),
    }
}

/// Rows and columns of a block, and the dtype of scales.
fn layout(scheme: &Scheme, input: Option<&Scheme>) -> Storable<((u32, u32), Dtype)> {
    let no = |why: String| Err(NotStorable { scheme: scheme.to_string(), why });
    let Format::Affine(Affine {
        code: E4M3,
        blocks: Blocks::Tile { rows, cols },
        scale: Some(scale),
        offset: Offset::None,
    }) = &scheme.format
    else {
        return no(format!("{NAME} holds FP8 tiles: fp8-e4m3-t128x128"));
    };
    let dtype = match scale.code {
        Code::F32 => Dtype::F32,
        // Use the FP8 dtype, not U8.
        Code::E8m0 => Dtype::F8E8M0,
        code => scale_dtype(code).unwrap_or(Dtype::F32),
    };
    let expected = dynamic(*cols, scale.code == Code::E8m0);
    // The name of an input row does not matter.
    if input.map(|input| Scheme { row: expected.row, ..input.clone() }).as_ref() != Some(&expected) {
        return no(format!("{NAME} quantizes the inputs as well: add +{expected}"));
    }
    Ok(((*rows, *cols), dtype))
}

/// Checks that an FP4 weight belongs to an expert, has whole groups, and that its inputs are in FP8.
fn check_experts(plan: &LinearPlan<'_>) -> Storable<()> {
    let no = |why: &str| Err(NotStorable::new(plan.scheme, format!("{}: {why}", plan.module)));
    if !plan.module.contains(".experts.") {
        return no("only experts may be FP4 in this format (expert_dtype); the others FP8 tiles");
    }
    if !plan.cols.is_multiple_of(FP4_GROUP as usize) {
        return no("columns are not a multiple of 32");
    }
    let fp8 = |input: &Scheme| input.format.code_bits() == 8 && input.source == Source::Dynamic;
    match plan.input.is_some_and(fp8) {
        true => Ok(()),
        false => no("the format quantizes the inputs as well: add +fp8-e4m3-g128"),
    }
}

/// Tensors of a quantized linear layer.
///
/// # Errors
/// [`NotStorable`] if the format cannot hold the scheme.
pub fn specs(plan: &LinearPlan<'_>) -> Storable<Vec<TensorSpec>> {
    let LinearPlan { module, scheme, rows, cols, .. } = *plan;
    let grid = scheme.format.blocks().grid(rows, cols);
    let (codes, shape, scale) = match is_fp4(scheme) {
        true => {
            check_experts(plan)?;
            (Dtype::I8, vec![rows, Packing::rows(E2M1.bits()).line_bytes(cols)], Dtype::F8E8M0)
        }
        false => (Dtype::F8E4M3, vec![rows, cols], layout(scheme, plan.input)?.1),
    };
    Ok(vec![
        TensorSpec::new(format!("{module}.weight"), codes, shape),
        TensorSpec::new(format!("{module}.weight_scale_inv"), scale, grid),
    ])
}

/// Bytes of the tensors declared by [`specs`], by name.
///
/// # Errors
/// As [`specs`].
pub fn tensors(plan: &LinearPlan<'_>, q: &Quantized) -> Storable<NamedBytes> {
    let name = |suffix: &str| format!("{}.{suffix}", plan.module);
    let codes = match (is_fp4(plan.scheme), &q.codes) {
        (true, Codes::U8(codes)) => {
            check_experts(plan)?;
            Packing::rows(E2M1.bits()).pack(codes, q.cols)
        }
        _ => {
            layout(plan.scheme, plan.input)?;
            q.codes.to_le_bytes()
        }
    };
    Ok(vec![(name("weight"), codes), (name("weight_scale_inv"), q.scales.to_le_bytes())])
}

/// Tensors of a layer as it was read.
///
/// # Errors
/// [`NotStorable`] if the format cannot hold all parts.
pub fn store(module: &str, layer: &LinearWeight) -> Storable<StoredTensors> {
    let Weight::Quantized(q) = &layer.weight else { return Ok(Vec::new()) };
    let scheme = Scheme::new(q.format.clone(), mantissa_num::Rule::Amax);
    if !layer.transforms.is_empty() {
        let why = format!("{module}: {NAME} stores no side tensors");
        return Err(NotStorable { scheme: scheme.to_string(), why });
    }
    let input = layer.input.as_ref().map(|input| &input.scheme);
    let plan = LinearPlan::new(module, &scheme, input, (layer.rows, layer.cols));
    let bytes = tensors(&plan, q)?.into_iter().map(|(_, bytes)| bytes);
    Ok(specs(&plan)?.into_iter().zip(bytes).collect())
}

/// `quantization_config` for modules of one block size, and the unquantized modules `kept` and `head`.
///
/// # Errors
/// [`NotStorable`] if block sizes differ, because the config has one for the whole model.
pub fn quantization_config(groups: &[ModuleGroup], kept: &[String], head: &str) -> Storable<Value> {
    let mut first = None;
    let fp4 = groups.iter().any(|(scheme, ..)| is_fp4(scheme));
    for (scheme, input, modules) in groups.iter().filter(|(scheme, ..)| !is_fp4(scheme)) {
        let found = layout(scheme, input.as_ref())?;
        if *first.get_or_insert(found) != found {
            let module = modules.first().map_or("", String::as_str);
            let why = format!("{module}: {NAME} has one block size for the model");
            return Err(NotStorable { scheme: scheme.to_string(), why });
        }
    }
    let ((rows, cols), scale) = first.unwrap_or(((128, 128), Dtype::F32));
    let kept: Vec<&str> = kept.iter().map(String::as_str).chain([head]).collect();
    let mut config = json!({
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": QUANT_METHOD,
        "weight_block_size": [rows, cols],
        "modules_to_not_convert": kept,
    });
    if fp4 {
        config["expert_dtype"] = json!("fp4");
    }
    if scale == Dtype::F8E8M0 {
        config["scale_fmt"] = json!("ue8m0");
    }
    Ok(config)
}

/// Block-wise FP8 as in DeepSeek-V3, read by vLLM, SGLang and transformers.
#[derive(Debug)]
pub(super) struct DeepseekFp8;

/// Handle of the format.
pub const CONTAINER: Container = Container::new(&DeepseekFp8);

impl Convention for DeepseekFp8 {
    fn name(&self) -> &'static str {
        NAME
    }

    fn quant_methods(&self) -> &'static [&'static str] {
        &[QUANT_METHOD]
    }

    fn open(&self, folder: &CheckpointFolder<'_>) -> Result<Option<Box<dyn Opened>>> {
        folder.open_as(QUANT_METHOD, Config::parse)
    }

    fn writes(&self) -> Option<Facts> {
        Some(Facts { folded_transforms: true, ..Facts::default() })
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

    fn store(&self, module: &str, layer: &LinearWeight) -> Storable<StoredTensors> {
        store(module, layer)
    }

    fn quantization_config(&self, model: &ModelPlan<'_>) -> Storable<Value> {
        quantization_config(&model.groups(), &model.kept, &model.head)
    }
}

impl Opened for Config {
    fn name(&self) -> &'static str {
        QUANT_METHOD
    }

    fn quantizes(&self, module: &str) -> Option<bool> {
        Some(!self.skipped.has(module))
    }

    fn shapes(&self) -> ShapeSource {
        ShapeSource::Codes
    }

    fn coded_shape(&self, _files: &ModelFiles, _module: &str, codes: &TensorMeta) -> Option<(usize, usize)> {
        let [rows, cols] = <[usize; 2]>::try_from(codes.shape.as_slice()).ok()?;
        let two = self.experts_in_fp4 && FP4_DTYPES.contains(&codes.dtype);
        Some((rows, if two { 2 * cols } else { cols }))
    }

    fn weight_scales(&self) -> &'static [&'static str] {
        &["weight_scale_inv", "weight_scale"]
    }

    fn linear(&self, files: &ModelFiles, module: &str, rows: usize, cols: usize) -> Result<StoredLinear> {
        self.layer(files, module, rows, cols)
    }
}

//! AWQ in the GEMM layout (AutoAWQ, vLLM, transformers), and AutoRound's naming of the same tensors.
//!
//! For a module with weight `[N, K]` and groups of `g` columns, `G = ceil(K/g)`: `qweight` I32 `[K, N/8]` and
//! `qzeros` I32 `[G, N/8]`, both packed along N in the order of [`AWQ_NIBBLES`], and `scales` F16 `[G, N]`; 4 bits.
//! `w[n, k] = (q[n, k] - z[k/g, n]) · scales[k/g, n]`. Activation scales are folded into the preceding layers.
//!
//! Source: AutoAWQ 0.2.9, `awq/modules/linear/gemm.py`, `awq/utils/packing_utils.py`, `awq/models/_config.py`.

use std::path::{Path, PathBuf};

use mantissa_num::pack::{AWQ_NIBBLES, Packing, gather_runs, scatter_runs, transpose};
use mantissa_num::{Blocks, Code, Codes, Format, Quantized, Scheme, minifloat};
use serde_json::{Value, json};

use super::container::with_scales_in;
use super::gptq::{self, Layer, centred, group_int, int_groups, read_scales};
use super::pattern::Skipped;
use super::sound::{self, Names};
use super::{
    CheckpointFolder, Container, Convention, Facts, LinearPlan, ModelFiles, ModelPlan, ModuleGroup,
    NamedBytes, NotStorable, Opened, ShapeSource, SideTensors, Storable, StoredLinear, Weight,
};
use crate::{Dtype, Error, Result, TensorSpec};

/// `quant_method` of this format.
pub const QUANT_METHOD: &str = "awq";

const BITS: u32 = 4;

/// Codes of a word.
const PER_WORD: usize = 8;

/// Parsed `quantization_config`.
#[derive(Clone, Debug)]
pub struct Config {
    path: PathBuf,
    group: Option<u32>,
    auto_round: bool,
    /// Modules that the configuration leaves unquantized.
    skipped: Skipped,
}

impl Config {
    /// Parses the value of `quantization_config` in the config at `path`.
    ///
    /// # Errors
    /// [`Error::Field`] names the key, its value and the accepted values.
    pub fn parse(path: &Path, value: &Value) -> Result<Self> {
        let key = |name: &str| format!("quantization_config.{name}");
        let show = |name: &str| value.get(name).map_or("nothing".to_owned(), Value::to_string);
        let bits = value.get("bits").or_else(|| value.get("w_bit"));
        if bits.and_then(Value::as_u64) != Some(u64::from(BITS)) {
            return Err(Error::field(path, key("bits"), show("bits"), BITS.to_string(), "AWQ has 4 bits"));
        }
        let group =
            match value.get("group_size").or_else(|| value.get("q_group_size")).and_then(Value::as_i64) {
                Some(-1) => None,
                Some(size) if size > 0 && u32::try_from(size).is_ok() => u32::try_from(size).ok(),
                _ => {
                    let found = show("group_size");
                    return Err(Error::field(path, key("group_size"), found, "-1 or a positive number", ""));
                }
            };
        for name in ["version", "format"] {
            let text = value.get(name).and_then(Value::as_str).unwrap_or("gemm");
            if !text.eq_ignore_ascii_case("gemm") {
                let hint = "layouts of single kernels are not read; save it again with version \"gemm\"";
                return Err(Error::field(path, key(name), format!("\"{text}\""), "\"gemm\"", hint));
            }
        }
        let skipped = Skipped::parse(value, &["modules_to_not_convert"]);
        Ok(Config { path: path.to_owned(), group, auto_round: false, skipped })
    }

    /// Parses AutoRound's `quantization_config` for tensors packed like AWQ's.
    ///
    /// # Errors
    /// As [`parse`](Self::parse).
    pub fn parse_auto_round(path: &Path, value: &Value) -> Result<Self> {
        let plain = json!({"bits": value.get("bits"), "group_size": value.get("group_size")});
        // A layer of 16 bits or more is unquantized.
        let extra = value.get("extra_config").and_then(Value::as_object).into_iter().flatten();
        let wide = |object: &Value| object.get("bits").and_then(Value::as_u64) >= Some(16);
        let skipped: Vec<_> = extra.filter(|(_, object)| wide(object)).map(|(name, _)| name).collect();
        let skipped = Skipped::parse(&json!({ "names": skipped }), &["names"]);
        Ok(Config { auto_round: true, skipped, ..Self::parse(path, &plain)? })
    }

    /// Bits and group of every quantized layer.
    pub fn layer(&self) -> Layer {
        Layer { bits: BITS, group: self.group }
    }

    /// Weight of `module`, `[rows, cols]`. The tensors determine if the layer is quantized.
    ///
    /// # Errors
    /// A tensor of the module is missing, or its dtype or shape differs from the config.
    fn weight(&self, files: &ModelFiles, module: &str, rows: usize, cols: usize) -> Result<Weight> {
        let name = |suffix: &str| format!("{module}.{suffix}");
        if files.has(&name("weight")) {
            return files.dense(module, rows, cols);
        }
        let (codes_name, zeros_name, scales_name) = (name("qweight"), name("qzeros"), name("scales"));
        if !rows.is_multiple_of(PER_WORD) {
            let hint = "config.json and the weights must belong together";
            let found = format!("{rows} rows in {}", self.path.display());
            return Err(files.fault(&codes_name, found, "rows in eights", hint));
        }
        let blocks = self.layer().blocks(cols);
        let groups = blocks.count(1, cols);
        let scales = read_scales(files, &scales_name, groups, rows)?;
        let codes = fields(files, &codes_name, cols, rows)?.into_iter().map(|f| centred(f, BITS) as u8);
        let zeros: Vec<i32> =
            fields(files, &zeros_name, groups, rows)?.into_iter().map(|f| centred(f, BITS)).collect();
        let codes = transpose(&codes.collect::<Vec<u8>>(), cols, rows);
        let q = group_int((BITS, blocks), (rows, cols), codes, scales, transpose(&zeros, groups, rows));
        sound::check(files, Names { codes: &codes_name, scales: &scales_name, zeros: &zeros_name }, &q)?;
        Ok(Weight::Quantized(q))
    }
}

/// Unsigned fields of a tensor `[lines, n / 8]`, in their own order.
fn fields(files: &ModelFiles, name: &str, lines: usize, n: usize) -> Result<Vec<u8>> {
    let bytes = files.read_exact(name, &[Dtype::I32], &[lines, n / PER_WORD])?;
    let packing = Packing { offset_binary: false, ..Packing::gptq(BITS) };
    let fields = packing.unpack(&bytes, lines, n, false);
    let fields = fields.ok_or_else(|| files.fault(name, "a wrong length", "words of eight codes", ""))?;
    Ok(scatter_runs(&fields, &AWQ_NIBBLES))
}

/// Tensors of a quantized linear layer.
///
/// # Errors
/// [`NotStorable`] if the format cannot hold the scheme, or not on this shape.
pub fn specs(plan: &LinearPlan<'_>) -> Storable<Vec<TensorSpec>> {
    int_groups("awq", plan, &[BITS])?;
    let LinearPlan { module, scheme, rows, cols, .. } = *plan;
    if !rows.is_multiple_of(PER_WORD) {
        let why = format!("{module}: {rows} rows are not a multiple of {PER_WORD}");
        return Err(NotStorable { scheme: scheme.to_string(), why });
    }
    let groups = scheme.format.blocks().count(1, cols);
    let spec = |suffix: &str, dtype, shape| TensorSpec::new(format!("{module}.{suffix}"), dtype, shape);
    Ok(vec![
        spec("qweight", Dtype::I32, vec![cols, rows / PER_WORD]),
        spec("qzeros", Dtype::I32, vec![groups, rows / PER_WORD]),
        spec("scales", Dtype::F16, vec![groups, rows]),
    ])
}

/// Bytes of the tensors declared by [`specs`], by name.
///
/// # Errors
/// [`NotStorable`] if scales are not f16.
pub fn tensors(plan: &LinearPlan<'_>, q: &Quantized) -> Storable<NamedBytes> {
    let name = |suffix: &str| format!("{}.{suffix}", plan.module);
    let (Codes::U8(codes), Codes::U16(scales)) = (&q.codes, &q.scales.codes) else {
        let why = "gptq and awq store scales in f16".to_owned();
        return Err(NotStorable { scheme: plan.scheme.to_string(), why });
    };
    let groups = q.format.blocks().count(1, q.cols);
    let pack = |codes: &[u8]| Packing::gptq(BITS).pack(&gather_runs(codes, &AWQ_NIBBLES), q.rows);
    let zeros: Vec<u8> = match q.zeros().is_empty() {
        true => vec![0; groups * q.rows],
        false => transpose(q.zeros(), q.rows, groups).iter().map(|&z| z as u8).collect(),
    };
    Ok(vec![
        (name("qweight"), pack(&transpose(codes, q.rows, q.cols))),
        (name("qzeros"), pack(&zeros)),
        (name("scales"), Codes::U16(transpose(scales, q.rows, groups)).to_le_bytes()),
    ])
}

/// `quantization_config` for modules of one group size, and the unquantized modules `kept`. Zero points are always
/// stored, so `zero_point` is always true; symmetric codes have the middle code as zero point.
///
/// # Errors
/// [`NotStorable`] if group sizes differ, because the config has one for the whole model.
pub fn quantization_config(groups: &[ModuleGroup], kept: &[String]) -> Storable<Value> {
    let size = |scheme: &Scheme| match scheme.format.blocks() {
        Blocks::Group(group) => i64::from(group),
        _ => -1,
    };
    let first = groups.first().map_or(-1, |(scheme, ..)| size(scheme));
    if let Some((scheme, _, modules)) = groups.iter().find(|(scheme, ..)| size(scheme) != first) {
        let module = modules.first().map_or("", String::as_str);
        let why = format!("{module}: awq has one group size for the model, {first} in other layers");
        return Err(NotStorable { scheme: scheme.to_string(), why });
    }
    Ok(json!({
        "quant_method": QUANT_METHOD,
        "bits": BITS,
        "group_size": first,
        "zero_point": true,
        "version": "gemm",
        "modules_to_not_convert": if kept.is_empty() { Value::Null } else { json!(kept) },
    }))
}

/// Format of AutoRound's tensors, by `packing_format`.
pub(super) fn auto_round_has(value: &Value) -> bool {
    gptq::packing_format(value).contains("awq")
}

/// AWQ GEMM, read by vLLM, SGLang and transformers.
#[derive(Debug)]
pub(super) struct Awq;

/// Handle of the format.
pub const CONTAINER: Container = Container::new(&Awq);

impl Convention for Awq {
    fn name(&self) -> &'static str {
        QUANT_METHOD
    }

    fn quant_methods(&self) -> &'static [&'static str] {
        &[QUANT_METHOD]
    }

    fn open(&self, folder: &CheckpointFolder<'_>) -> Result<Option<Box<dyn Opened>>> {
        let path = folder.config_path;
        let config = match (folder.of_method(QUANT_METHOD), folder.quantization) {
            (Some(value), _) => Config::parse(path, value)?,
            (_, Some(value)) if gptq::is_auto_round(folder) && auto_round_has(value) => {
                Config::parse_auto_round(path, value)?
            }
            _ => return Ok(None),
        };
        Ok(Some(Box::new(config)))
    }

    fn writes(&self) -> Option<Facts> {
        Some(Facts { folded_transforms: true, transposed: true, ..Facts::default() })
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
        quantization_config(&groups_of_one_size(model), &model.kept)
    }

    fn as_stored(&self, scheme: Scheme, _dtype: Dtype) -> Scheme {
        with_scales_in(scheme, Dtype::F16)
    }

    fn scale_code(&self, _dtype: Dtype) -> Option<Code> {
        Some(Code::Float(minifloat::F16))
    }
}

/// Groups modules under the model's single group size. A row exactly as wide as the groups of other layers counts as
/// a group.
fn groups_of_one_size(model: &ModelPlan<'_>) -> Vec<ModuleGroup> {
    let size = model.layers.iter().find_map(|layer| match layer.scheme.format.blocks() {
        Blocks::Group(size) => Some(size),
        _ => None,
    });
    model.groups_by(|layer| {
        let mut scheme = layer.scheme.clone();
        if let (Format::Affine(affine), Some(size)) = (&mut scheme.format, size)
            && affine.blocks == Blocks::Row
            && layer.cols == size as usize
        {
            affine.blocks = Blocks::Group(size);
        }
        scheme
    })
}

impl Opened for Config {
    fn name(&self) -> &'static str {
        if self.auto_round { "auto-round" } else { QUANT_METHOD }
    }

    fn quantizes(&self, module: &str) -> Option<bool> {
        Some(!self.skipped.has(module))
    }

    fn shapes(&self) -> ShapeSource {
        ShapeSource::Words
    }

    fn code_tensors(&self) -> &'static [(&'static str, &'static [&'static str])] {
        &[("qweight", &["qzeros", "scales"])]
    }

    fn linear(&self, files: &ModelFiles, module: &str, rows: usize, cols: usize) -> Result<StoredLinear> {
        Ok(self.weight(files, module, rows, cols)?.into())
    }
}

impl ModelFiles {
    /// Storage of a model with AWQ's tensors; `None` for any other.
    pub fn awq(&self) -> Option<&Config> {
        self.as_convention()
    }
}

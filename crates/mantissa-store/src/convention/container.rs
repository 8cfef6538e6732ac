//! Trait of all checkpoint formats, and the handle that names a format in the rest of the tool.

use std::fmt;
use std::path::Path;

use mantissa_num::stored::{Extra, Map};
use mantissa_num::{Code, Quantized, Rule, Scheme, Source, minifloat};
use serde_json::Value;

use super::cache;
use super::files::{ModelFiles, Opened};
use super::plan::{LinearPlan, ModelPlan, NotStorable, Storable};
use super::weight::{ActivationQuant, LinearWeight, Weight, in_own_order};
use crate::{Checkpoint, Dtype, Kind, Result, TensorSpec};

/// Bytes of tensors, by name.
pub type NamedBytes = Vec<(String, Vec<u8>)>;

/// Tensors with their bytes.
pub type StoredTensors = Vec<(TensorSpec, Vec<u8>)>;

/// Checkpoint folder that a format may recognise.
#[derive(Clone, Copy, Debug)]
pub struct CheckpointFolder<'a> {
    /// Tensors and `config.json`.
    pub checkpoint: &'a Checkpoint,
    /// Path of `config.json`, for messages.
    pub config_path: &'a Path,
    /// `quantization_config` of `config.json`, unless it is null.
    pub quantization: Option<&'a Value>,
    /// False while the folder is being written: only its headers may be read.
    pub complete: bool,
}

impl<'a> CheckpointFolder<'a> {
    /// Returns the `quantization_config` if its `quant_method` is `method`.
    pub fn of_method(&self, method: &str) -> Option<&'a Value> {
        self.quantization.filter(|_| self.method() == method)
    }

    /// Opens the folder by `parse`, which gets the path of `config.json` and the `quantization_config`, if its
    /// `quant_method` is `method`.
    ///
    /// # Errors
    /// Those of `parse`.
    pub fn open_as<O: Opened + 'static>(
        &self,
        method: &str,
        parse: impl FnOnce(&Path, &Value) -> Result<O>,
    ) -> Result<Option<Box<dyn Opened>>> {
        let Some(value) = self.of_method(method) else { return Ok(None) };
        Ok(Some(Box::new(parse(self.config_path, value)?)))
    }

    /// Returns `quant_method`; empty if there is none.
    pub fn method(&self) -> &'a str {
        let method = self.quantization.and_then(|quantization| quantization.get("quant_method"));
        method.and_then(Value::as_str).unwrap_or_default()
    }
}

/// Data stored outside the codes of a linear layer.
#[derive(Clone, Copy, Debug)]
pub enum SideTensors<'a> {
    /// Nothing: groups are adjacent columns.
    Nothing,
    /// Group of each column (`g_idx`); codes are in the order of the weight.
    Groups(&'a [u32]),
    /// Outliers, an [`Extra::Sparse`] with the planned count.
    Outliers(&'a Extra),
}

/// Support for something that a format may store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Support {
    /// Not stored.
    #[default]
    No,
    /// Stored.
    Yes,
    /// Stored if the user names the format; the note names readers that refuse it.
    OnRequest(&'static str),
}

/// Place of the experts of a mixture of experts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Experts {
    /// One by one, each as a linear layer.
    #[default]
    OneByOne,
    /// One by one, but only if the source stores them so.
    AsInSource,
    /// Named and ordered by the format itself, independent of the source.
    OwnNames,
    /// Stacked: one tensor holds all experts of a projection, and nothing else is quantized.
    Stacked,
}

/// Facts about a writable format, as data.
#[derive(Clone, Copy, Debug, Default)]
pub struct Facts {
    /// True if the output is one file with its own tensor names and types (GGUF) instead of a folder.
    pub one_file: bool,
    /// Place of experts.
    pub experts: Experts,
    /// True if layers that the source stores as `[in, out]` (Conv1D) load in the readers of the format.
    pub conv1d: bool,
    /// Support for the group of each column (act-order).
    pub group_order: Support,
    /// True if a calibrated scale of the inputs can be stored.
    pub input_scales: bool,
    /// True if readers multiply integers by scales of either sign.
    pub signed_scales: bool,
    /// True if outliers can be stored.
    pub outliers: bool,
    /// True if inputs can be rotated at run time.
    pub rotations: bool,
    /// True if transforms may be folded into the norms and weights of the model.
    pub folded_transforms: bool,
    /// True if levels of a KV cache can be stored.
    pub kv_levels: bool,
    /// True if block types are searched with an importance per column.
    pub importance: bool,
    /// True if scales are squares of 4-bit codes times one f16 per group, which a solver must choose itself (EXL2).
    pub square_scales: bool,
    /// True if readers take a quantized output head.
    pub quantized_head: bool,
    /// True if readers take a quantized token embedding.
    pub quantized_embedding: bool,
    /// True if scales and biases can be stored in the dtype that a method chooses for them.
    pub half_scales: bool,
    /// True if weights are stored transposed, which takes their codes in both orders while a layer is written.
    pub transposed: bool,
}

/// Facts about a linear layer that influence the choice of a format.
#[derive(Clone, Copy, Debug, Default)]
pub struct LayerKind {
    /// True for the up-projection of latent attention's keys and values.
    pub latent_kv: bool,
    /// True for an expert.
    pub expert: bool,
}

/// Checkpoint format: how one tool lays a model's weights out on disk.
///
/// The defaults describe a read-only format. A writable format returns its [`Facts`] and implements `layer_specs`,
/// `layer_tensors` and `quantization_config`.
pub trait Convention: fmt::Debug + Send + Sync {
    /// Name on the command line and in reports.
    fn name(&self) -> &'static str;

    /// Values of `quant_method` that identify the format.
    fn quant_methods(&self) -> &'static [&'static str] {
        &[]
    }

    /// Opens `path` if it is a single file of this format.
    ///
    /// # Errors
    /// File is malformed.
    fn open_file(&self, _path: &Path) -> Result<Option<(Checkpoint, Box<dyn Opened>)>> {
        Ok(None)
    }

    /// Opens a folder of this format.
    ///
    /// # Errors
    /// [`crate::Error::Field`] names the key of the configuration, its value and the accepted values.
    fn open(&self, _folder: &CheckpointFolder<'_>) -> Result<Option<Box<dyn Opened>>> {
        Ok(None)
    }

    /// Returns the facts of a writable format; `None` if the format is read only.
    fn writes(&self) -> Option<Facts> {
        None
    }

    /// True if this is the default format for weights with these schemes.
    fn is_default_for(&self, _schemes: &[&Scheme]) -> bool {
        false
    }

    /// Tensors of a linear layer without outliers. See [`specs`](Self::specs).
    ///
    /// # Errors
    /// [`NotStorable`] if the format cannot hold the scheme, or not in this shape.
    fn layer_specs(&self, plan: &LinearPlan<'_>) -> Storable<Vec<TensorSpec>> {
        Err(NotStorable::new(plan.scheme, format!("{} is read, not written", self.name())))
    }

    /// Bytes of the tensors declared by [`layer_specs`](Self::layer_specs). `beside` holds only what the facts allow.
    ///
    /// # Errors
    /// As [`layer_specs`](Self::layer_specs).
    fn layer_tensors(
        &self,
        plan: &LinearPlan<'_>,
        _q: &Quantized,
        _beside: SideTensors<'_>,
    ) -> Storable<NamedBytes> {
        Err(NotStorable::new(plan.scheme, format!("{} is read, not written", self.name())))
    }

    /// `quantization_config` of a model; null for a format without `config.json`.
    ///
    /// # Errors
    /// [`NotStorable`] if the format cannot combine the layers.
    fn quantization_config(&self, _model: &ModelPlan<'_>) -> Storable<Value> {
        Ok(Value::Null)
    }

    /// Keys of `config.json` under which the `quantization_config` is written.
    fn config_keys(&self) -> &'static [&'static str] {
        &["quantization_config"]
    }

    /// Name and content of the JSON file that repeats the configuration beside `config.json`, if the format has one.
    ///
    /// # Errors
    /// As [`quantization_config`](Self::quantization_config).
    fn side_config(
        &self,
        _model: &ModelPlan<'_>,
        _quantization: &Value,
    ) -> Storable<Option<(&'static str, Value)>> {
        Ok(None)
    }

    /// Names of the JSON files beside `config.json` in which this format describes the quantization. An output in
    /// another format does not copy them.
    fn side_files(&self) -> &'static [&'static str] {
        &[]
    }

    /// Name and bytes of a file derived from the finished weight files that `open` opens.
    ///
    /// # Errors
    /// A tensor is missing or cannot be read.
    fn companion(&self, _open: &dyn Fn() -> Result<ModelFiles>) -> Result<Option<(&'static str, Vec<u8>)>> {
        Ok(None)
    }

    /// Metadata of the weight files, beyond their framework (`format`).
    fn metadata(&self, _model: &ModelPlan<'_>) -> Vec<(String, String)> {
        Vec::new()
    }

    /// The scheme as this format stores it in a model of `dtype`: for example, f32 scales become f16 or the model's dtype.
    fn as_stored(&self, scheme: Scheme, _dtype: Dtype) -> Scheme {
        scheme
    }

    /// Only code that the format can store for integer scales in a model of `dtype`, if there is only one.
    fn scale_code(&self, _dtype: Dtype) -> Option<Code> {
        None
    }

    /// Reason why a layer stays unquantized in this format under any scheme; `None` if it need not.
    fn keeps_dense(&self, _layer: LayerKind) -> Option<&'static str> {
        None
    }

    /// Tensors of a layer as it was read, with all side tensors except the bias. An unquantized layer has none.
    ///
    /// # Errors
    /// [`NotStorable`] if the format cannot hold all parts.
    fn store(&self, module: &str, layer: &LinearWeight) -> Storable<StoredTensors> {
        store_plain(self, module, layer)
    }

    /// Checks that the format can hold a KV cache of `scheme`, including static scales.
    ///
    /// # Errors
    /// [`NotStorable`] with the reason.
    fn kv_format(&self, scheme: &Scheme) -> Storable<()> {
        let why = format!("{} cannot record a KV-cache scheme", self.name());
        Err(cache::not_storable(scheme, why))
    }

    /// Tensors of the scales of keys and values of the attention `module`, `count` scales each.
    fn kv_specs(&self, module: &str, count: usize) -> [TensorSpec; 2] {
        let shape = if count == 1 { vec![1] } else { vec![count, 1, 1] };
        ["k_scale", "v_scale"]
            .map(|suffix| TensorSpec::new(format!("{module}.{suffix}"), Dtype::F32, shape.clone()))
    }

    /// Facts of the format; a read-only format can store nothing.
    fn facts(&self) -> Facts {
        self.writes().unwrap_or_default()
    }

    /// Tensors of a linear layer. For GGUF they have GGUF names, with blocks as rows of bytes; for stacked experts
    /// they are one expert's part.
    ///
    /// # Errors
    /// [`NotStorable`] if the format cannot hold the scheme, or not in this shape.
    fn specs(&self, plan: &LinearPlan<'_>) -> Storable<Vec<TensorSpec>> {
        if plan.outliers > 0 && !self.facts().outliers {
            let why = format!("{} stores no outliers beside its codes", self.name());
            return Err(NotStorable::new(plan.scheme, why));
        }
        self.layer_specs(plan)
    }

    /// Bytes of the tensors declared by [`specs`](Self::specs), by name. For GGUF the rows are still in Hugging Face
    /// order ([`to_gguf_order`](super::gguf::to_gguf_order)).
    ///
    /// # Errors
    /// As [`specs`](Self::specs), and if the format does not store `beside`.
    fn tensors(&self, plan: &LinearPlan<'_>, q: &Quantized, beside: SideTensors<'_>) -> Storable<NamedBytes> {
        if matches!(beside, SideTensors::Groups(_)) && self.facts().group_order == Support::No {
            let why = format!("{} stores no g_idx (the group of each column)", self.name());
            return Err(NotStorable::new(plan.scheme, why));
        }
        if matches!(beside, SideTensors::Outliers(_)) {
            self.specs(plan)?;
        }
        self.layer_tensors(plan, q, beside)
    }

    /// Checks that the format can record a KV cache of `scheme`.
    ///
    /// # Errors
    /// [`NotStorable`] with the reason.
    fn check_kv(&self, scheme: &Scheme) -> Storable<()> {
        if scheme.source == Source::Static && !cache::is_fixed(scheme) {
            let why = "stores scales of a KV cache of 8-bit integers or floats, per tensor or per head: int8-tensor@static, fp8-e4m3-head@static …";
            return Err(cache::not_storable(scheme, format!("{} {why}", self.name())));
        }
        self.kv_format(scheme)
    }
}

/// Tensors of a layer as it was read, for a format that stores only codes, input scales and the group of each column,
/// as far as its facts allow.
///
/// # Errors
/// As [`Convention::store`].
pub(super) fn store_plain<C: Convention + ?Sized>(
    format: &C,
    module: &str,
    layer: &LinearWeight,
) -> Storable<StoredTensors> {
    let Weight::Quantized(q) = &layer.weight else { return Ok(Vec::new()) };
    let scheme = Scheme::new(q.format.clone(), Rule::Amax);
    let no = |why: &str| Err(NotStorable::new(&scheme, format!("{module}: {} {why}", format.name())));
    let stored = layer.input.as_ref().is_some_and(|input| input.outer.is_some());
    if stored && !format.facts().input_scales {
        return no("cannot store a scale of the inputs");
    }
    if layer.input.as_ref().is_some_and(|input| input.keep_above.is_some()) {
        return no("cannot keep input columns unquantized");
    }
    let around = &layer.transforms;
    let input = layer.input.as_ref().map(|input| &input.scheme);
    let plan = LinearPlan {
        by_group: !around.before.is_empty(),
        input_scale: layer.input.as_ref().and_then(ActivationQuant::stored),
        ..LinearPlan::new(module, &scheme, input, (layer.rows, layer.cols))
    };
    let bytes = match around.before.as_slice() {
        [] if around.is_empty() => format.tensors(&plan, q, SideTensors::Nothing)?,
        [Map::Perm(order)] if around.after.is_empty() && around.extras.is_empty() => {
            let (own, g_idx) = in_own_order(q, order);
            format.tensors(&plan, &own, SideTensors::Groups(&g_idx))?
        }
        _ => return no("stores no side tensors except the column order"),
    };
    Ok(format.specs(&plan)?.into_iter().zip(bytes.into_iter().map(|(_, bytes)| bytes)).collect())
}

/// Returns `scheme` with its f32 scales stored in `dtype`, if it has one level of them and `dtype` is a 16-bit float.
pub(super) fn with_scales_in(mut scheme: Scheme, dtype: Dtype) -> Scheme {
    let plain_f32 = scheme.format.scale().is_some_and(|s| s.code == Code::F32 && s.outer.is_none());
    scheme.format = match dtype {
        Dtype::BF16 if plain_f32 => scheme.format.with_scale_code(Code::Float(minifloat::BF16)),
        Dtype::F16 if plain_f32 => scheme.format.with_scale_code(Code::Float(minifloat::F16)),
        _ => scheme.format,
    };
    scheme
}

/// Handle of a writable format.
#[derive(Clone, Copy)]
pub struct Container(&'static dyn Convention);

impl Container {
    /// Creates the handle of `convention`.
    pub(super) const fn new(convention: &'static dyn Convention) -> Self {
        Container(convention)
    }

    /// True if a model in this format is one file, or parts of one, instead of a folder.
    pub fn is_one_file(&self) -> bool {
        self.facts().one_file
    }

    /// Returns the kind of an output in this format.
    pub fn output_kind(&self) -> Kind {
        if self.is_one_file() { Kind::Gguf } else { Kind::Folder }
    }

    /// Returns the name of an output called `name`: a file gets the ending of the format.
    pub fn output_name(&self, name: &str) -> String {
        if self.is_one_file() { format!("{name}.gguf") } else { name.to_owned() }
    }
}

impl std::ops::Deref for Container {
    type Target = dyn Convention;

    fn deref(&self) -> &Self::Target {
        self.0
    }
}

impl PartialEq for Container {
    fn eq(&self, other: &Self) -> bool {
        self.name() == other.name()
    }
}

impl Eq for Container {}

impl fmt::Debug for Container {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

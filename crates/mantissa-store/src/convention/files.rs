//! Models on disk in any format: reading of tensors, with the checks that all formats share.

use std::any::Any;
use std::fmt::Debug;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use mantissa_num::{Code, Codes, Quantized};
use serde_json::Value;

use super::alike::Alike;
use super::scale_dtype::scale_code;
use super::stacked::Stack;
use super::weight::{KvQuant, LinearWeight, StoredLinear, Weight};
use crate::finite::{FiniteScan, require_finite};
use crate::{Checkpoint, Dtype, Error, Result, TensorMeta};

/// Place of the shapes of quantized weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShapeSource {
    /// Nowhere in the files: the architecture knows them.
    Architecture,
    /// Tensors of codes have them ([`Opened::coded_shape`]).
    Codes,
    /// Words of packed codes give them, with the number of bits that the configuration states (GPTQ, AWQ).
    Words,
    /// A tensor beside the packed codes records them, or the codes have them (compressed-tensors).
    Recorded,
    /// The metadata of the file state them, with the scheme (mantissa's own format).
    Metadata,
    /// Tensors hold the experts of a layer, stacked as the architecture says (gpt-oss).
    Stacked,
}

/// Opened model: the parsed configuration of its format, which reads tensors.
pub trait Opened: Any + Debug + Send + Sync {
    /// Name of the format, for reports.
    fn name(&self) -> &'static str;

    /// Place of the shapes of quantized weights.
    fn shapes(&self) -> ShapeSource {
        ShapeSource::Architecture
    }

    /// True if some linear layer may be quantized.
    fn is_quantized(&self) -> bool {
        true
    }

    /// Format of the quantized model whose dequantized weights this is.
    fn dequantized_from(&self) -> Option<&'static str> {
        None
    }

    /// Requests of the checkpoint that this reader ignores.
    fn notes(&self) -> Vec<String> {
        Vec::new()
    }

    /// True if the configuration says that the decoder's linear layer `module` is quantized; `None` if it says nothing. The
    /// tensors decide.
    fn quantizes(&self, _module: &str) -> Option<bool> {
        None
    }

    /// Suffixes of tensors that may hold the codes of a layer in place of `weight`, each with the tensors needed to
    /// decode it.
    fn code_tensors(&self) -> &'static [(&'static str, &'static [&'static str])] {
        &[]
    }

    /// Suffixes of scales, one of which accompanies codes in a tensor `weight`.
    fn weight_scales(&self) -> &'static [&'static str] {
        &[]
    }

    /// Checks by the headers that the tensors of linear layer `module` exist, for codes that are not in a tensor
    /// `weight`.
    ///
    /// # Errors
    /// [`Error::NoTensor`] names the first missing tensor; [`Error::Field`] for another shape.
    fn check_codes(&self, files: &ModelFiles, module: &str, _rows: usize, _cols: usize) -> Result<()> {
        let name = |suffix: &str| format!("{module}.{suffix}");
        let Some((_, beside)) = self.code_tensors().iter().find(|(codes, _)| files.has(&name(codes))) else {
            // Report a missing layer under the name of an unquantized weight.
            return files.meta(&name("weight")).map(|_| ());
        };
        beside.iter().try_for_each(|suffix| files.meta(&name(suffix)).map(|_| ()))
    }

    /// Weight of linear layer `module`, `[rows, cols]`, with all side tensors except the bias.
    ///
    /// # Errors
    /// As [`ModelFiles::linear`].
    fn linear(&self, files: &ModelFiles, module: &str, rows: usize, cols: usize) -> Result<StoredLinear>;

    /// Quantization of keys and values. See [`ModelFiles::kv_quant`].
    ///
    /// # Errors
    /// As [`ModelFiles::kv_quant`].
    fn kv_quant(&self, _files: &ModelFiles, _module: &str, _kv_heads: usize) -> Result<Option<KvQuant>> {
        Ok(None)
    }

    /// KV-cache policy whose levels are stored with the model.
    fn kv_policy(&self) -> Option<&str> {
        None
    }

    /// Rows and columns of the quantized weight of `module`, derived from its tensors; `codes` is its tensor
    /// `weight`.
    fn coded_shape(&self, _files: &ModelFiles, _module: &str, _codes: &TensorMeta) -> Option<(usize, usize)> {
        None
    }

    /// Names of the tensors that hold the stacked, quantized experts of `tensor`, if the format stacks experts.
    fn expert_tensors(&self, _tensor: &str) -> Option<[String; 2]> {
        None
    }

    /// Weight `[rows, cols]` of one of the experts listed by [`expert_tensors`](Self::expert_tensors).
    ///
    /// # Errors
    /// A tensor is missing or has another dtype or shape.
    fn expert(&self, files: &ModelFiles, stack: &Stack, _rows: usize, _cols: usize) -> Result<Quantized> {
        files.meta(&stack.tensor)?;
        Err(files.fault(&stack.tensor, "an expert of this convention", "a dense tensor", ""))
    }

    /// True if a tensor of this Hugging Face name is stored.
    fn has(&self, checkpoint: &Checkpoint, name: &str) -> bool {
        checkpoint.get(name).is_some()
    }

    /// Unquantized tensor with this Hugging Face name, widened to f32.
    ///
    /// # Errors
    /// As [`ModelFiles::tensor_f32`].
    fn tensor_f32(&self, files: &ModelFiles, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        files.expect_shape(files.meta(name)?, shape)?;
        files.checkpoint.read_f32(name)
    }

    /// Checks by the headers that [`tensor_f32`](Self::tensor_f32) finds a tensor of this name and shape.
    ///
    /// # Errors
    /// As [`ModelFiles::check_tensor`].
    fn check_tensor(&self, files: &ModelFiles, name: &str, shape: &[usize]) -> Result<()> {
        let meta = files.meta(name)?;
        files.expect_shape(meta, shape)?;
        files.expect_float(meta)
    }

    /// Metadata and names, if the model is a GGUF file.
    fn gguf(&self) -> Option<&super::gguf::Model> {
        None
    }

    /// True if [`check_tensor`](Self::check_tensor) is the only header check of a linear layer's weight.
    fn types_every_tensor(&self) -> bool {
        false
    }
}

/// Model on disk: weights in some format, and its configuration.
#[derive(Debug)]
pub struct ModelFiles {
    checkpoint: Checkpoint,
    opened: Box<dyn Opened>,
    /// Answer of [`ModelFiles::stores_alike`].
    pub(super) alike: OnceLock<Alike>,
}

impl ModelFiles {
    /// Combines a checkpoint and its opened format.
    pub(super) fn new(checkpoint: Checkpoint, opened: Box<dyn Opened>) -> Self {
        ModelFiles { checkpoint, opened, alike: OnceLock::new() }
    }

    /// Presents the model with `rows` rows in the matrix `name`, stored plainly, whose rows after its own are its first,
    /// under the configuration `config`.
    pub fn with_rows(self, name: &str, rows: usize, config: Value) -> ModelFiles {
        ModelFiles::new(self.checkpoint.with_rows(name, rows, config), self.opened)
    }

    /// Checkpoint of the model.
    pub(super) fn into_checkpoint(self) -> Checkpoint {
        self.checkpoint
    }

    /// Opened format of the model.
    pub(super) fn opened(&self) -> &dyn Opened {
        &*self.opened
    }

    /// Opened format as `T`; `None` if the model is in another format.
    pub fn as_convention<T: Opened>(&self) -> Option<&T> {
        (&*self.opened as &dyn Any).downcast_ref()
    }

    /// Name of the format, for reports: `dense`, `compressed-tensors`, `native`, `gguf`, `gptq`, `awq`, `auto-round`
    /// …
    pub fn convention_name(&self) -> &'static str {
        self.opened.name()
    }

    /// Place of the shapes of quantized weights.
    pub fn shapes(&self) -> ShapeSource {
        self.opened.shapes()
    }

    /// True if some linear layer may be quantized.
    pub fn is_quantized(&self) -> bool {
        self.opened.is_quantized()
    }

    /// Format of the quantized model that is [presented as dense](Self::with_computed); `None` if it is another model.
    pub fn dequantized_from(&self) -> Option<&'static str> {
        self.opened.dequantized_from()
    }

    /// Features of the checkpoint that this reader ignores, for a message to the user.
    pub fn notes(&self) -> Vec<String> {
        self.opened.notes()
    }

    /// Says whether the configuration differs from the tensors on the decoder's linear layer `module`: `Some(true)` if the
    /// layer is unquantized and the configuration does not say so, `Some(false)` for the reverse.
    pub fn unlisted(&self, module: &str) -> Option<bool> {
        let dense = self.is_dense(&format!("{module}.weight"));
        let stored = dense || self.has_linear(module);
        let stated = self.opened.quantizes(module).filter(|_| stored)?;
        (stated == dense).then_some(dense)
    }

    /// Checkpoint files.
    pub fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    /// `config.json`, if there is one.
    pub fn config(&self) -> Option<&Value> {
        self.checkpoint.config()
    }

    /// Model folder, or the GGUF file.
    pub fn dir(&self) -> &Path {
        self.checkpoint.dir()
    }

    /// Source of the config, for messages: `config.json`, or the GGUF file.
    pub fn config_path(&self) -> PathBuf {
        if self.gguf().is_some() { self.dir().to_owned() } else { self.dir().join("config.json") }
    }

    /// True if a tensor of this name is stored.
    pub fn has(&self, name: &str) -> bool {
        self.opened.has(&self.checkpoint, name)
    }

    /// True if linear layer `module` has its own tensors, unquantized or quantized, in any format.
    pub fn has_linear(&self, module: &str) -> bool {
        let codes = self.opened().code_tensors().iter().map(|(codes, _)| *codes);
        codes.chain(["weight"]).any(|name| self.has(&format!("{module}.{name}")))
    }

    /// True if a tensor of this name is stored in floats of at least 16 bits: values, not codes.
    pub fn is_dense(&self, tensor: &str) -> bool {
        let dtype = self.checkpoint().get(tensor).map(|meta| meta.dtype);
        matches!(dtype, Some(Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::BF16))
    }

    /// Reads an unquantized tensor, widened to f32.
    ///
    /// # Errors
    /// [`Error::NoTensor`], [`Error::NotFloat`], [`Error::NonFinite`], or [`Error::Field`] if the shape is not
    /// `shape`.
    pub fn tensor_f32(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let values = self.opened.tensor_f32(self, name, shape)?;
        require_finite(&values, self.path_of(name), name)?;
        Ok(values)
    }

    /// Reads a tensor of integers from 0 to 2³² - 1, stored in 32 or 64 bits.
    ///
    /// # Errors
    /// [`Error::NoTensor`], or [`Error::Field`] for another dtype or shape, or a value out of range.
    pub fn integers(&self, name: &str, shape: &[usize]) -> Result<Vec<u32>> {
        let meta = self.check_integers(name, shape)?;
        let bytes = self.checkpoint.read(&meta.name)?;
        let values: Vec<i64> = match meta.dtype {
            Dtype::I64 => bytes.as_chunks().0.iter().map(|b| i64::from_le_bytes(*b)).collect(),
            _ => bytes.as_chunks().0.iter().map(|b| i32::from_le_bytes(*b).into()).collect(),
        };
        let value = |value: i64| {
            let fault = |_| self.fault(name, value.to_string(), "integers from 0 to 4294967295", "");
            u32::try_from(value).map_err(fault)
        };
        values.into_iter().map(value).collect()
    }

    /// Checks by the headers that [`integers`](Self::integers) finds a tensor of this name and shape.
    ///
    /// # Errors
    /// As there.
    pub fn check_integers(&self, name: &str, shape: &[usize]) -> Result<&TensorMeta> {
        // A GGUF file has a name of its own for it.
        let stored = self.gguf().filter(|_| self.checkpoint.get(name).is_none());
        let place = stored.and_then(|model| model.place(name));
        let meta = self.meta(place.as_ref().map_or(name, |place| &place.tensor))?;
        self.expect_shape(meta, shape)?;
        match meta.dtype {
            Dtype::I64 | Dtype::I32 => Ok(meta),
            dtype => Err(self.fault(name, format!("dtype {dtype}"), "I64 or I32", "")),
        }
    }

    /// Reads the weight of linear layer `module` (`model.layers.0.self_attn.q_proj`), `[rows, cols]` = `[out, in]`.
    ///
    /// # Errors
    /// A tensor is missing, has another dtype or shape than the format and the layer require, or holds non-finite
    /// values ([`Error::NonFinite`]; in GGUF block types they show only when the model runs).
    pub fn linear(&self, module: &str, rows: usize, cols: usize, bias: bool) -> Result<LinearWeight> {
        let StoredLinear { weight, input, transforms } = self.opened.linear(self, module, rows, cols)?;
        let bias = if bias { Some(self.tensor_f32(&format!("{module}.bias"), &[rows])?) } else { None };
        Ok(LinearWeight { rows, cols, weight, bias, input, transforms })
    }

    /// Quantization of the KV cache of the attention `module` (`model.layers.0.self_attn`), if the checkpoint has
    /// one. A missing scale is 1, as in serving engines.
    ///
    /// # Errors
    /// A scale is neither one value nor one per head of `kv_heads`, or not greater than 0.
    pub fn kv_quant(&self, module: &str, kv_heads: usize) -> Result<Option<KvQuant>> {
        self.opened.kv_quant(self, module, kv_heads)
    }

    /// Suffixes of tensors that may hold the codes of a layer in place of `weight`.
    pub fn code_suffixes(&self) -> impl Iterator<Item = &'static str> {
        self.opened.code_tensors().iter().map(|(codes, _)| *codes)
    }

    /// Rows and columns of the quantized weight of `module`, derived from its tensors, for formats with the codes in
    /// a tensor `weight` (ModelOpt, bitsandbytes, FP8). `None` if it is unquantized, or if nothing bounds the stated
    /// sizes.
    pub fn coded_shape(&self, module: &str) -> Option<(usize, usize)> {
        let codes = self.checkpoint.get(&format!("{module}.weight"))?;
        if !matches!(codes.dtype, Dtype::U8 | Dtype::I8 | Dtype::F8E4M3) || codes.len == 0 {
            return None;
        }
        self.opened.coded_shape(self, module, codes)
    }

    /// Reads an unquantized weight.
    pub(crate) fn dense(&self, module: &str, rows: usize, cols: usize) -> Result<Weight> {
        let name = format!("{module}.weight");
        let meta = self.meta(&name)?;
        self.expect_shape(meta, &[rows, cols])?;
        let words = || -> Result<Vec<u16>> {
            let bytes = self.checkpoint.read(&name)?;
            self.expect_finite(&name, meta.dtype, &bytes)?;
            Ok(bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect())
        };
        match meta.dtype {
            Dtype::BF16 => words().map(Weight::Bf16),
            Dtype::F16 => words().map(Weight::F16),
            _ => self.tensor_f32(&name, &[rows, cols]).map(Weight::F32),
        }
    }

    /// Reads an unquantized weight, in a format whose quantized layers have a tensor `scale` beside the codes.
    pub(crate) fn dense_without(
        &self,
        module: &str,
        scale: &str,
        rows: usize,
        cols: usize,
    ) -> Result<Weight> {
        let (name, scale) = (format!("{module}.weight"), format!("{module}.{scale}"));
        if !self.has(&scale) {
            return self.dense(module, rows, cols);
        }
        let found = format!("dtype {} beside the scales {scale}", self.meta(&name)?.dtype);
        Err(self.fault(
            &name,
            found,
            "codes with scales, or a weight without",
            "the tensors contradict each other",
        ))
    }

    /// Decodes the trellis codes in tensor `name`; returns values and rotations.
    pub(super) fn unfolded(&self, name: &str, q: &Quantized) -> Result<StoredLinear> {
        let Some(unfolded) = q.unfold() else { return Ok(Weight::Quantized(q.clone()).into()) };
        let (values, transforms) =
            unfolded.map_err(|error| self.fault(name, error.to_string(), "the tiles of the weight", ""))?;
        Ok((Weight::F16(values), transforms).into())
    }

    /// Metadata of a tensor.
    pub(crate) fn meta(&self, name: &str) -> Result<&TensorMeta> {
        self.checkpoint
            .get(name)
            .ok_or_else(|| Error::NoTensor { path: self.dir().to_owned(), tensor: name.to_owned() })
    }

    /// Reads a tensor that must have one of `dtypes` and exactly `shape`.
    pub(crate) fn read_exact(&self, name: &str, dtypes: &[Dtype], shape: &[usize]) -> Result<Vec<u8>> {
        let meta = self.meta(name)?;
        self.expect_dtype(meta, dtypes)?;
        self.expect_shape(meta, shape)?;
        self.checkpoint.read(name)
    }

    /// Reads a scale tensor in the shape of its blocks, with its stored code.
    pub(crate) fn read_scales(&self, name: &str, grid: &[usize]) -> Result<(Code, Codes)> {
        let meta = self.meta(name)?;
        let code = scale_code(meta.dtype).ok_or_else(|| {
            self.fault(name, format!("dtype {}", meta.dtype), "F32, BF16, F16, F8_E4M3, F8_E8M0 or U8", "")
        })?;
        self.expect_grid(meta, grid)?;
        Ok((code, Codes::from_le_bytes(code.unit_bytes(), &self.checkpoint.read(name)?)))
    }

    /// Reads a single float value of shape `[1]` or `[]`.
    pub(crate) fn read_scalar(&self, name: &str) -> Result<f32> {
        let meta = self.meta(name)?;
        if meta.shape.iter().product::<usize>() != 1 {
            return Err(self.fault(name, format!("shape {:?}", meta.shape), "one value", ""));
        }
        self.expect_dtype(meta, &[Dtype::F32, Dtype::BF16, Dtype::F16])?;
        let values = self.checkpoint.read_f32(name)?;
        require_finite(&values, self.path_of(name), name)?;
        values.first().copied().ok_or_else(|| self.fault(name, "nothing", "one value", ""))
    }

    /// Reads the zero point of a static input, int8 of shape `[1]` or `[]`; 0 if it is not stored.
    pub(crate) fn read_zero_point(&self, name: &str) -> Result<i32> {
        if !self.has(name) {
            return Ok(0);
        }
        let meta = self.meta(name)?;
        if meta.shape.iter().product::<usize>() != 1 {
            return Err(self.fault(name, format!("shape {:?}", meta.shape), "one value", ""));
        }
        let bytes = self.read_exact(name, &[Dtype::I8], &meta.shape)?;
        let value = bytes.first().map(|byte| i32::from(*byte as i8));
        value.ok_or_else(|| self.fault(name, "nothing", "one value", ""))
    }

    /// Reads the scale of a KV cache: one, or one per head (`[heads]` or `[heads, 1, 1]`).
    pub(crate) fn read_cache_scale(&self, name: &str, heads: usize) -> Result<Vec<f32>> {
        let Some(meta) = self.checkpoint.get(name) else { return Ok(vec![1.0]) };
        let count: usize = meta.shape.iter().product();
        if count != 1 && (count != heads || meta.shape.first() != Some(&heads)) {
            let allowed = format!("one value or [{heads}, 1, 1]");
            return Err(self.fault(name, format!("shape {:?}", meta.shape), allowed, ""));
        }
        let values = self.checkpoint.read_f32(name)?;
        require_finite(&values, self.path_of(name), name)?;
        match values.iter().position(|&scale| scale <= 0.0) {
            None => Ok(values),
            Some(at) => {
                let found = format!("{} at element {at}", values[at]);
                Err(self.fault(name, found, "scales greater than 0", ""))
            }
        }
    }

    /// Refuses a list of per-block values in another shape than the blocks: in another order the same values would
    /// decode to another weight. A single value may have any number of axes.
    pub(crate) fn expect_grid(&self, meta: &TensorMeta, grid: &[usize]) -> Result<()> {
        let single = |shape: &[usize]| shape.iter().all(|&n| n == 1);
        if meta.shape == grid || (single(&meta.shape) && single(grid)) {
            return Ok(());
        }
        let hint = "rows stand first; a transposed list would be read as other scales";
        Err(self.fault(&meta.name, format!("shape {:?}", meta.shape), format!("{grid:?}"), hint))
    }

    /// Refuses bytes of a tensor that hold non-finite values.
    pub(crate) fn expect_finite(&self, name: &str, dtype: Dtype, bytes: &[u8]) -> Result<()> {
        let mut scan = FiniteScan::new(dtype);
        scan.update(bytes);
        scan.finish(self.path_of(name), name)
    }

    /// Path of the file with a tensor, for messages; the folder if there is none.
    pub(crate) fn path_of(&self, name: &str) -> &Path {
        self.checkpoint.locate(name).map_or(self.dir(), |(file, _)| file.path())
    }

    /// Refuses a tensor of another shape.
    pub(crate) fn expect_shape(&self, meta: &TensorMeta, shape: &[usize]) -> Result<()> {
        if meta.shape == shape {
            return Ok(());
        }
        let hint = "config.json and the weights must belong together";
        Err(self.fault(&meta.name, format!("shape {:?}", meta.shape), format!("{shape:?}"), hint))
    }

    /// Refuses a tensor of another dtype.
    pub(crate) fn expect_dtype(&self, meta: &TensorMeta, dtypes: &[Dtype]) -> Result<()> {
        if dtypes.contains(&meta.dtype) {
            return Ok(());
        }
        let allowed: Vec<_> = dtypes.iter().map(ToString::to_string).collect();
        Err(self.fault(&meta.name, format!("dtype {}", meta.dtype), allowed.join(" or "), ""))
    }

    /// Refuses a tensor that is not a float of at least 16 bits.
    pub(crate) fn expect_float(&self, meta: &TensorMeta) -> Result<()> {
        if matches!(meta.dtype, Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::BF16) {
            return Ok(());
        }
        let (path, tensor) = (self.path_of(&meta.name).to_owned(), meta.name.clone());
        Err(Error::NotFloat { path, tensor, dtype: meta.dtype })
    }

    /// Creates the error for one of the checkpoint's tensors or fields.
    pub(crate) fn fault(
        &self,
        field: &str,
        found: impl Into<String>,
        allowed: impl Into<String>,
        hint: impl Into<String>,
    ) -> Error {
        Error::field(self.dir(), field, found, allowed, hint)
    }
}
